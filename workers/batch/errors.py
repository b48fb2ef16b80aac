"""What ends a batch, or keeps it from beginning."""

from __future__ import annotations

from inferbus.schemas.errors import CallerError, InfrastructureError


class InvalidBatch(CallerError):
    """Lines of the file cannot be run; `problems` of the report names them."""

    code = "invalid_batch"


class BatchChanged(CallerError):
    """The file is not the one with which this batch began, nor has it only grown."""

    code = "batch_changed"


class BatchNotFound(CallerError):
    """There is no batch of this id."""

    code = "batch_not_found"


class BatchHeld(InfrastructureError):
    """Another process runs this batch."""

    code = "batch_held"


class OutputFailed(InfrastructureError):
    """The output cannot be written: the disk is full, for example. What was written stands."""

    code = "output_failed"
