"""Batches of tables in memory: a frame in, the same frame with the answers beside its rows out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inferbus.schemas.errors import InvalidRequest
from inferbus.schemas.subjects import Kind
from inferbus.workers.batch import tables
from inferbus.workers.batch.rows import batch, row_number
from inferbus.workers.client.stream import text

ADDED: Final = ("answer", "finish_reason", "input_tokens", "output_tokens", "error")
"""The columns that a frame gets."""

_COUNTS: Final = ("input_tokens", "output_tokens")


def batch_frame(
    frame: tables.Frame,
    map: Mapping[str, Any],
    set: Mapping[str, Any] | None = None,
    *,
    kind: Kind = "chat",
    prefix: str = "",
    **options: Any,
) -> Any:
    """Runs a request for each row of a frame, and returns the frame with the answers.

    Its new columns are `answer` (text, or token ids), `finish_reason`, `input_tokens`, `output_tokens`, and
    `error`, which says why a row has no answer. Of several choices the first is there; `batch` has all.

    Args:
        frame: A DataFrame of pandas, a Table of Arrow, or what else gives itself as Arrow, as Polars' do.
        map: Fields of the request, by column; see `Client.batch`.
        set: Fields that all requests have.
        kind: Of the requests.
        prefix: Of the names of the new columns.
        options: See `batch` and `Client.batch`: `url`, `owner`, `model`, `output`, `deadline` and others.

    Returns:
        A DataFrame with the same index for a DataFrame of pandas, else a Table of Arrow.

    Raises:
        InvalidRequest: The frame has a column of such a name, or not one that the mapping names.
        InferbusError: See `batch`.
    """
    frame = tables.held(frame)
    names = tables.frame_names(frame)
    for name in ADDED:
        if prefix + name in names:
            raise InvalidRequest(
                f"the table has a column {prefix}{name} already; `prefix` names the new columns otherwise",
                param=prefix + name,
            )
    found: dict[int, tuple[Any, ...]] = {}
    for line in batch(frame, map=map, set=set, kind=kind, **options):
        found[row_number(line)] = _cells(line)
    rows = [found[number] for number in sorted(found)]
    columns = {prefix + name: [row[at] for row in rows] for at, name in enumerate(ADDED)}
    return _joined(frame, columns, [prefix + name for name in _COUNTS])


def _cells(line: dict[str, Any]) -> tuple[Any, ...]:
    """What `ADDED` names, of a line of the output."""
    response = line["response"] or {"body": {"error": line["error"]}}
    body = response["body"]
    if (error := body.get("error")) is not None:
        return None, None, None, None, error["message"]
    choice = body["choices"][0]
    answer = choice["token_ids"] if "token_ids" in choice else text(body)
    usage = body["usage"]
    return answer, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"], None


def _joined(frame: Any, columns: dict[str, list[Any]], counts: list[str]) -> Any:
    if (pandas := tables.pandas_of(frame)) is not None:
        # Their usual integers have no missing values.
        typed = {name: pandas.array(columns[name], dtype="Int64") for name in counts}
        return frame.assign(**columns | typed)
    import pyarrow as pa

    for name, values in columns.items():
        frame = frame.append_column(name, pa.array(values, pa.int64() if name in counts else None))
    return frame
