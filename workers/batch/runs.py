"""Beginning a batch, or going on with it: what the command and the Python interface share."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from inferbus.schemas.errors import BusUnavailable
from inferbus.schemas.subjects import Kind
from inferbus.workers.batch.copies import Copy, restore
from inferbus.workers.batch.counts import Counts
from inferbus.workers.batch.errors import BatchChanged, BatchHeld, InvalidBatch
from inferbus.workers.batch.lines import Expected, Problem
from inferbus.workers.batch.reading import COMPRESSIONS, FORMATS, stamp
from inferbus.workers.batch.state import ENDED, Batches, Kept, Record, Source
from inferbus.workers.batch.submitter import Report, Submitter
from inferbus.workers.batch.template import Template
from inferbus.workers.batch.validation import Validation, validate
from inferbus.workers.client.client import Client

CONTENT: Final = "content"
"""What the bytes of an uploaded file are called on the server."""

SHOWN: Final = 20
"""Problems that an error's message names."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch is run.

    Attributes:
        output: The output file; None: beside the input, `<name>.output.jsonl`.
        errors: The error file; None: beside the output, `<name>.errors.jsonl`.
        model: For all lines, whatever they name; None: they name it.
        window: Seconds after its beginning when the batch expires; None: never.
        deadline: Seconds that a line may take from when it was submitted; None: no limit.
        skip_invalid: Lines that cannot be run become error lines; otherwise the batch does not begin.
        ordered: The finished output is in the order of the input.
        reorder: Lines whose prompts begin alike are sent near each other.
        template: What is made of the input's rows; None: they are lines of a batch file.
        shared: Input and output are on the server too, so that another machine can go on.
    """

    output: Path | None = None
    errors: Path | None = None
    model: str | None = None
    window: float | None = None
    deadline: float | None = None
    skip_invalid: bool = False
    ordered: bool = False
    reorder: bool = True
    template: Template | None = None
    shared: bool = False


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that can be run.

    Attributes:
        kept: Its record.
        duplicates: Lines that repeat an id.
        complete: Whether nothing is left to do.
    """

    kept: Kept
    duplicates: frozenset[int] = frozenset()
    complete: bool = False


async def begin(client: Client, source: Path, options: Options) -> Begun:
    """Validates a file and registers its batch, or finds the batch that it began earlier.

    Raises:
        InvalidBatch: Lines cannot be run, and are not to be skipped.
        BatchChanged: The file has changed since, in another way than by growing.
        InvalidRequest: The file cannot be read.
        BusUnavailable: JetStream does not answer.
    """
    batches = Batches(client.bus, client.owner)
    source, output, errors = _paths(source, options)
    found = await batches.find(_id(client.owner, output))
    if found is not None and not found.record.shared and not _files_exist(found.record):
        found = await _forgotten(batches, found)
    if found is None:
        return await _new(client, batches, source, output, errors, options)
    return await _again(batches, found, source, options)


async def proceed(
    client: Client,
    batch: str,
    *,
    source: Path | None = None,
    output: Path | None = None,
    retry: bool = False,
) -> Begun:
    """Goes on with a batch that is known by its id: one that is not shared, where its files are.

    Args:
        client: Connected; its owner is the batch's.
        batch: Its id.
        source: Where the input is now; None: where it was, or on the server.
        output: Where the output is now, the error file beside it; None: where it was.
        retry: Run the lines of the error file again.

    Raises:
        BatchNotFound: There is none.
        BatchHeld: Lines are to be run again, and the batch has not ended.
        BatchChanged: The output is not here, or the file has changed since, in another way than by growing.
        InvalidRequest: The file cannot be read.
        BusUnavailable: JetStream does not answer.
    """
    batches = Batches(client.bus, client.owner)
    found = await batches.get(batch)
    record = found.record
    if output is not None:
        _, output, errors = _paths(output, Options(output=output))
        record.output, record.errors = str(output), str(errors)
    if retry:
        if record.status not in ENDED:
            raise BatchHeld("the batch has not ended; resume it")
        _require_output(record)
        errors = Path(record.errors)
        for path in (errors, errors.with_name(f"{errors.name}.partial")):
            if path.exists():
                path.replace(errors.with_name(f"{errors.name}.retried"))
        # A window that has passed would end it at once.
        record.stamps = record.stamps | {"created_at": int(time.time())}
        await batches.forget_cancel(batch)
        record.status = "in_progress"
        # Those of the error file are not done any more; where all were in it, no file is left.
        record.counts = Counts(succeeded=record.counts.succeeded)
        record.retries += 1
        found = msgspec.structs.replace(found, sequence=await batches.save(record, found.sequence))
    options = Options(
        model=record.model if record.any_model else None,
        skip_invalid=record.skip_invalid,
        template=record.source.template,
    )
    filled = source is None and record.source.filled
    if source is None:
        source = Path(record.source.path)
        if record.shared and not await asyncio.to_thread(source.exists):
            source, filled = await _fetched(client, record), options.template is not None
    return await _again(batches, found, source, options, filled=filled)


async def _fetched(client: Client, record: Record) -> Path:
    """The input as the server has it, as a batch file beside the output."""
    path = Path(f"{record.output}.input.jsonl")
    if record.input_file:
        await restore(Copy(client.bus, record.owner, record.input_file, CONTENT), path)
        return path
    if record.input_copied != record.source.digest:
        raise BatchChanged(
            f"the input of batch {record.id} is not here, nor on the server as a whole: "
            f"it was {record.source.path}; --input says where it is now"
        )
    copy = Copy(client.bus, record.owner, record.id, record.input_name)
    await restore(copy, path)
    return path


async def register(
    client: Client, file: str, kind: Kind, *, window: float | None, metadata: dict[str, str]
) -> Kept:
    """Registers a batch whose input is on the server; `admit` checks it, wherever it is run.

    Args:
        client: Connected; its owner is the batch's.
        file: The input's id.
        kind: Of its requests.
        window: Seconds after which the batch expires; None: never.
        metadata: Of the caller.
    """
    record = Record(
        id=f"batch_{secrets.token_hex(12)}",
        owner=client.owner,
        kind=kind,
        model="",
        source=Source(path="", size=0, modified=0, lines=0, digest=""),
        output="",
        errors="",
        window=window,
        shared=True,
        replies=secrets.token_hex(11),
        input_file=file,
        metadata=metadata,
    )
    record.stamps = {"created_at": int(time.time())}
    sequence = await Batches(client.bus, client.owner).save(record, 0)
    return Kept(record=record, sequence=sequence)


async def admit(client: Client, kept: Kept, output: Path) -> Begun | None:
    """Checks the input of a batch that is registered, before it is run; None: it has failed.

    Args:
        client: Connected; its owner is the batch's.
        kept: Its record.
        output: Where the output is to be, the error file beside it.

    Raises:
        BatchHeld: Another process has taken it meanwhile.
        InvalidRequest: The input cannot be read.
        BusUnavailable: JetStream does not answer.
    """
    record = kept.record
    _, output, errors = _paths(output, Options(output=output))
    record.output, record.errors = str(output), str(errors)
    source = await _fetched(client, record)
    expected = Expected(kind=record.kind, served=await _served(client))
    validation = await _validated(source, expected, None)
    record.source = _source(source, validation, None)
    if validation.problems or validation.expected.model is None:
        await fail(client, kept, validation.problems[:SHOWN])
        return None
    record.model = validation.expected.model
    return Begun(kept=kept)


async def fail(client: Client, kept: Kept, problems: list[Problem]) -> None:
    """Ends a batch that cannot be run.

    Raises:
        BatchHeld: Another process has taken it meanwhile.
    """
    record = kept.record
    record.problems, record.holder = problems, None
    record.enter("failed", time.time())
    await Batches(client.bus, client.owner).save(record, kept.sequence)


async def run(
    client: Client,
    begun: Begun,
    *,
    report: Report = lambda record, pace, submitted: None,
    written: Callable[[list[bytes]], None] = lambda lines: None,
) -> Record:
    """Runs a batch to its end; see `Submitter.run`."""
    if begun.complete:
        return begun.kept.record
    submitter = Submitter(client, begun.kept, report=report, written=written)
    return await submitter.run(begun.duplicates)


async def _new(
    client: Client, batches: Batches, source: Path, output: Path, errors: Path, options: Options
) -> Begun:
    expected = Expected(
        model=options.model,
        any_model=options.model is not None,
        served=await _served(client),
    )
    validation = await _validated(source, expected, options.template)
    kind, model = validation.expected.kind, validation.expected.model
    if validation.problems and (not options.skip_invalid or kind is None or model is None):
        raise _invalid(source, validation, options.template)
    assert kind is not None
    assert model is not None
    record = Record(
        id=_id(client.owner, output),
        owner=client.owner,
        kind=kind,
        model=model,
        any_model=options.model is not None,
        source=_source(source, validation, options.template),
        output=str(output),
        errors=str(errors),
        window=options.window,
        deadline=options.deadline,
        skip_invalid=options.skip_invalid,
        ordered=options.ordered,
        as_read=not options.reorder,
        shared=options.shared,
        problems=validation.problems[:SHOWN],
        replies=secrets.token_hex(11),
    )
    record.stamps = {"created_at": int(time.time())}
    sequence = await batches.save(record, await batches.last(record.id))
    await batches.forget_cancel(record.id)
    kept = Kept(record=record, sequence=sequence)
    return Begun(kept=kept, duplicates=frozenset(validation.duplicates))


async def _again(
    batches: Batches, found: Kept, source: Path, options: Options, *, filled: bool = False
) -> Begun:
    record = found.record
    record.shared = record.shared or options.shared
    if options.model is not None and options.model != record.model:
        raise BatchChanged(f"the batch was begun with the model {record.model}; use another --output")
    _require_output(record)
    known, duplicates = record.source, frozenset[int]()
    template = options.template
    mapping = None if filled else template
    read = (known.template, known.filled, known.size, known.modified)
    if known.duplicates or (template, filled, *stamp(source)) != read:
        expected = Expected(kind=record.kind, model=record.model, any_model=record.any_model)
        validation = await _validated(source, expected, mapping, earlier=known.lines)
        if validation.earlier != known.digest:
            mapped = ", or the mapping makes others of them" if template or known.template else ""
            raise BatchChanged(
                f"{source} is not the file of batch {record.id}: its first {known.lines} lines have changed"
                f"{mapped}; use another --output for another batch"
            )
        if validation.problems and not record.skip_invalid:
            raise _invalid(source, validation, mapping)
        duplicates = frozenset(validation.duplicates)
        record.source = _source(source, validation, template, filled=filled)
    elif str(source) != known.path:
        record.source = msgspec.structs.replace(known, path=str(source))
    if record.status in ENDED:
        complete = not record.shared or (record.here and _files_exist(record))
        if complete and record.counts.ended >= record.source.lines:
            return Begun(kept=found, complete=True)
        await batches.forget_cancel(record.id)
    return Begun(kept=found, duplicates=duplicates)


def _require_output(record: Record) -> None:
    if record.counts.ended and not record.shared and not _files_exist(record):
        raise BatchChanged(
            f"the output of batch {record.id} is not here: {record.output} has {record.counts.ended} of its "
            f"lines on {record.host or 'another machine'}; put it there, or begin anew after "
            f"`inferbus batch rm {record.id}`"
        )


async def _forgotten(batches: Batches, found: Kept) -> Kept | None:
    """A record whose output is gone: where the batch had ended, its lines are run anew."""
    if found.record.status not in ENDED:
        return found
    await batches.remove(found.record)
    return None


async def _served(client: Client) -> tuple[str, ...]:
    """The models that have workers, as far as that is known: a batch may begin before its first worker."""
    try:
        return tuple(await client.models())
    except BusUnavailable:
        return ()


async def _validated(
    source: Path, expected: Expected, template: Template | None, *, earlier: int = 0
) -> Validation:
    return await asyncio.to_thread(validate, source, expected, template=template, earlier=earlier)


def _files_exist(record: Record) -> bool:
    paths = [Path(record.output), Path(record.errors)]
    return any(path.exists() or path.with_name(f"{path.name}.partial").exists() for path in paths)


def _source(path: Path, validation: Validation, template: Template | None, *, filled: bool = False) -> Source:
    size, modified = stamp(path)
    return Source(
        path=str(path),
        size=size,
        modified=modified,
        lines=validation.total,
        digest=validation.digest,
        duplicates=bool(validation.duplicates),
        template=template,
        filled=filled,
    )


def _invalid(source: Path, validation: Validation, template: Template | None) -> InvalidBatch:
    count = max(validation.invalid, len(validation.problems))
    each = "line" if template is None else "row"
    shown = "; ".join(_shown(problem, each) for problem in validation.problems[:SHOWN])
    more = f"; and {count - SHOWN} more" if count > SHOWN else ""
    return InvalidBatch(f"{source}: nothing was submitted: {shown}{more}")


def _shown(problem: Problem, each: str) -> str:
    where = "" if problem.line is None else f"{each} {problem.line}: "
    return f"{where}{problem.code}: {problem.message}"


def _paths(source: Path, options: Options) -> tuple[Path, Path, Path]:
    output = options.output or _beside(source, "output")
    errors = options.errors or _beside(output, "errors")
    return source.absolute(), output.absolute(), errors.absolute()


def _beside(path: Path, what: str) -> Path:
    name = path.name
    for suffix in (*COMPRESSIONS, *FORMATS, ".output"):
        name = name.removesuffix(suffix)
    return path.with_name(f"{name}.{what}.jsonl")


def _id(owner: str, output: Path) -> str:
    """The same command means the same batch."""
    return f"batch_{hashlib.blake2b(f'{owner} {output}'.encode(), digest_size=8).hexdigest()}"
