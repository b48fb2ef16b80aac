"""JSON Schema files of the contract, made from the structs: `python -m inferbus.schemas.export [--check]`."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

import msgspec

from inferbus.schemas import computed
from inferbus.schemas.answers import (
    DetokenizeAnswer,
    EmbeddingsAnswer,
    Retrying,
    TextAnswer,
    TextChunk,
    TokenAnswer,
    TokenChunk,
    TokenizeAnswer,
)
from inferbus.schemas.bundles import Bundle, BundleAnswer
from inferbus.schemas.errors import ErrorAnswer
from inferbus.schemas.fleet import WorkerInfo
from inferbus.schemas.handoff import FromPrefill, ToPrefill
from inferbus.schemas.requests import NESTED_SAMPLING, TYPES, AnyRequest
from inferbus.schemas.sampling import ALIASES, HIDDEN_STOPS, Sampling

FOLDER: Final = Path(__file__).parent / "json"
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

STRUCTS: Final[dict[str, Any]] = {
    "chunk.tokens": TokenChunk,
    "chunk.text": TextChunk,
    "answer.tokens": TokenAnswer,
    "answer.text": TextAnswer,
    "answer.embeddings": EmbeddingsAnswer,
    "answer.tokenize": TokenizeAnswer,
    "answer.detokenize": DetokenizeAnswer,
    "answer.error": ErrorAnswer,
    "answer.retrying": Retrying,
    "bundle": Bundle,
    "answer.bundle": BundleAnswer,
    "handoff.to_prefill": ToPrefill,
    "handoff.from_prefill": FromPrefill,
    "fleet.worker": WorkerInfo,
}
"""What is exported besides the requests, by file name."""


def export() -> dict[str, bytes]:
    """Every file's content by its name."""
    schemas = {name: _schema(struct) for name, struct in STRUCTS.items()}
    schemas |= {f"request.{kind}": _request(struct) for kind, struct in TYPES.items()}
    schemas |= {f"request.{kind}": _computed(struct) for kind, struct in computed.TYPES.items()}
    return {f"{name}.json": _text(name, schema) for name, schema in sorted(schemas.items())}


def stale(folder: Path = FOLDER) -> list[str]:
    """Names of files that are not as `export` makes them, or should not be there."""
    made = export()
    found = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    return sorted(name for name in made.keys() | found.keys() if made.get(name) != found.get(name))


def write(folder: Path = FOLDER) -> None:
    """Brings the files up to date."""
    folder.mkdir(exist_ok=True)
    made = export()
    for name in stale(folder):
        if name in made:
            (folder / name).write_bytes(made[name])
        else:
            (folder / name).unlink()


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m inferbus.schemas.export", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not current")
    arguments = parser.parse_args(argv)
    if not arguments.check:
        write()
        return 0
    names = stale()
    for name in names:
        sys.stderr.write(f"{FOLDER.name}/{name} is not current: run python -m inferbus.schemas.export\n")
    return 1 if names else 0


def _schema(struct: Any) -> dict[str, Any]:
    (schema,), definitions = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
    known = _structs(struct)
    for name, definition in definitions.items():
        if name in known:
            _describe(definition, known[name])
    whole: dict[str, Any] = schema | {"$defs": definitions}
    return whole


def _request(struct: type[AnyRequest]) -> dict[str, Any]:
    """A request as it is sent: with the sampling parameters at its top, in every accepted name and place."""
    schema = _schema(struct)
    definitions = schema["$defs"]
    own = definitions.pop(struct.__name__)
    del own["properties"]["warnings"], own["properties"]["sampling"]
    parameters = _parameters(definitions.pop(Sampling.__name__))
    nested = {"anyOf": [{"$ref": "#/$defs/Sampling"}, {"type": "null"}], "default": None}
    own["properties"] |= parameters
    for place, note in NESTED_SAMPLING.items():
        own["properties"][place] = {"description": note} | nested
    definitions[Sampling.__name__] = {
        "title": "Sampling",
        "description": inspect.cleandoc(Sampling.__doc__ or "").partition("\n")[0],
        "type": "object",
        "properties": parameters
        | {
            HIDDEN_STOPS: parameters["stop_token_ids"]
            | {"description": "Dynamo's, in `stop_conditions`: added to `stop_token_ids`."}
        },
    }
    request: dict[str, Any] = own | {"$defs": definitions}
    return request


def _computed(struct: type[computed.AnyComputed]) -> dict[str, Any]:
    """A request as it is sent: without what only the reader fills in."""
    schema = _schema(struct)
    own = schema["$defs"].pop(struct.__name__)
    for name in computed.FILLED_IN:
        own["properties"].pop(name, None)
    return _resolved(own, schema["$defs"])


def _resolved(own: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A schema with those of the definitions that it refers to."""
    named = {name for name in definitions if f'"#/$defs/{name}"' in msgspec.json.encode(own).decode()}
    return own | ({"$defs": {name: definitions[name] for name in sorted(named)}} if named else {})


def _parameters(sampling: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(sampling["properties"])
    for alias, field in ALIASES.items():
        parameters[alias] = parameters[field] | {"description": f"Another name of `{field}`."}
    return parameters


def _structs(root: Any) -> dict[str, type[msgspec.Struct]]:
    """The structs that a type mentions, itself included, by name."""
    found: dict[str, type[msgspec.Struct]] = {}
    pending = [root]
    while pending:
        current = pending.pop()
        if isinstance(current, type) and issubclass(current, msgspec.Struct):
            if current.__name__ not in found:
                found[current.__name__] = current
                pending += [field.type for field in msgspec.structs.fields(current)]
        else:
            pending += get_args(current)
    return found


def _describe(definition: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    """Puts the docstring's account of every attribute beside that attribute."""
    summary, _ = _docstring(struct)
    notes: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        notes |= _docstring(base)[1]
    definition["description"] = summary
    for name, schema in definition.get("properties", {}).items():
        if name in notes:
            schema["description"] = notes[name]


def _docstring(kind: type) -> tuple[str, Mapping[str, str]]:
    text = inspect.cleandoc(kind.__dict__.get("__doc__") or "")
    summary, _, attributes = text.partition("\n\nAttributes:\n")
    entries = re.findall(r"^ {4}(\w+): ((?:.|\n(?= {8}))+)", attributes, re.MULTILINE)
    return summary, {name: " ".join(note.split()) for name, note in entries}


def _text(name: str, schema: dict[str, Any]) -> bytes:
    whole = {"$schema": DIALECT, "title": name} | {key: schema[key] for key in schema if key != "title"}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2) + b"\n"


if __name__ == "__main__":
    sys.exit(main())
