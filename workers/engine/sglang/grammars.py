"""The grammars and stop patterns of a request, checked before the engine runs them.

SGLang evaluates both in its scheduler, once a token, where nothing interrupts
them and all requests wait. So a request may hold what is known to be cheap:
deterministic patterns (`patterns.py`) and JSON Schemas of bounded size. A
context-free grammar (`ebnf`) can be ambiguous in ways that no rule finds, and a
structural tag may hold one; these need an operator who trusts the callers.
"""

from __future__ import annotations

import graphlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn
from urllib.parse import unquote

import msgspec

from inferbus.schemas import limits
from inferbus.schemas.errors import InvalidRequest, NotSupported
from inferbus.schemas.requests import AnyRequest, ChatRequest
from inferbus.workers.engine.sglang import patterns
from inferbus.workers.engine.sglang.patterns import PatternRefused

STOP_POSITIONS: Final = 128
"""Most positions in all stop patterns of a request, so also the longest text that one can match.

SGLang decodes and searches so many tokens again after every new one."""

STOP_CLASSES: Final = 8
"""Most classes with a range beyond Latin-1 in all stop patterns; the scheduler compiles them."""

SCHEMA_BYTES: Final = 65_536
"""Largest JSON Schema. One of 200 KB took xgrammar nine seconds to compile, outside of the scheduler."""

SCHEMA_DEPTH: Final = 32
"""Deepest nesting of schemas."""

SUBSCHEMAS: Final = 2_000
"""Most schemas inside a schema."""

PROPERTIES: Final = 256
"""Most properties of one object. Each may be left out, so each is a way to go on; 2,000 take minutes."""

PATTERN_POSITIONS: Final = 1024
"""Most positions in all patterns of a schema; they are checked on the event loop."""

ALTERNATIVES: Final = 32
"""Most alternatives of one value, nested ones multiplied. With 64 a token took 40 to 130 ms."""

_TRUST: Final = "--trust-grammars on the worker would allow it"
_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA: Final = frozenset({"enum", "const", "default", "examples"})


def check(request: AnyRequest) -> None:
    """Checks the grammars and stop patterns that a request asks for.

    A schema that came as text is replaced by what was checked: parsers differ in keys that come twice.

    Raises:
        InvalidRequest: One is invalid, too large, or may take unbounded time; `param` names its field.
        NotSupported: It needs `--trust-grammars`.
    """
    sampling = request.sampling
    for name in ("ebnf", "structural_tag"):
        if getattr(sampling, name):
            raise NotSupported(f"{name} is not allowed here; {_TRUST}", param=name)
    if sampling.stop_regex:
        _check_stops(sampling.stop_regex)
    if sampling.regex:
        _cost(sampling.regex, "regex")
    if sampling.json_schema:
        schema = _decoded(sampling.json_schema, "json_schema")
        check_schema(schema, "json_schema")
        text = msgspec.json.encode(schema).decode()
        request.sampling = msgspec.structs.replace(sampling, json_schema=text)
    _check_response_format(getattr(request, "response_format", None))


def with_window(stops: str | Sequence[str], patterns: str | Sequence[str] | None) -> list[str]:
    r"""The stop patterns of a request with stop strings, with one that makes SGLang see them all.

    SGLang looks for a stop string in the text of as many of the last tokens as the string has when it is
    tokenised as a whole, plus one, and holds back text that may be its beginning over the same window. Where
    a model generates the string in more tokens than that, SGLang neither stops nor trims. The window is also
    as long as the longest match of a stop pattern, and a token stands for at least one byte. Nothing follows
    the end of a text (`\Z`), so the added pattern matches nothing.
    """
    stops = [stops] if isinstance(stops, str) else stops
    own = [patterns] if isinstance(patterns, str) else list(patterns or ())
    longest = max((len(stop.encode("utf-8", "replace")) for stop in stops), default=0)
    if not longest or len(own) >= limits.STOP_STRINGS:
        return own
    return [*own, rf"\Z.{{{longest}}}"]


def check_tools(request: AnyRequest) -> None:
    """Checks the parameters of tools, for a request whose tools have become a grammar.

    Raises:
        InvalidRequest: As `check`.
    """
    tools = request.tools if isinstance(request, ChatRequest) else None
    for i, tool in enumerate(tools or ()):
        function = tool.get("function")
        parameters = function.get("parameters") if isinstance(function, dict) else None
        if parameters is not None:
            check_schema(parameters, f"tools[{i}].function.parameters")


def check_schema(schema: Any, param: str) -> None:
    """Checks a JSON Schema.

    Raises:
        InvalidRequest: As `check`.
    """
    if len(msgspec.json.encode(schema)) > SCHEMA_BYTES:
        _refuse(param, f"has more than {SCHEMA_BYTES} bytes")
    walk = _Schema(schema, param)
    try:
        walk.visit(schema, 1)
        walk.check_alternatives()
    except RecursionError:
        _refuse(param, "is nested too deeply")


def _check_response_format(form: dict[str, Any] | None) -> None:
    if form is None:
        return
    # SGLang takes an object without a type for a structural tag.
    if form.get("type", "structural_tag") == "structural_tag":
        raise NotSupported(f"a structural tag is not allowed here; {_TRUST}", param="response_format.type")
    if form.get("type") == "json_schema" and isinstance(form.get("json_schema"), dict):
        schema = form["json_schema"].get("schema")
        if schema is not None:
            check_schema(schema, "response_format.json_schema.schema")


def _check_stops(stops: str | list[str]) -> None:
    left, wide = STOP_POSITIONS, 0
    for pattern in [stops] if isinstance(stops, str) else stops:
        cost = _cost(pattern, "stop_regex", positions=left)
        if cost.longest is None:
            _refuse("stop_regex", "can match a text of any length; give repeats a bound: {0,16} instead of *")
        left -= cost.positions
        wide += cost.wide
    if wide > STOP_CLASSES:
        _refuse("stop_regex", f"holds more than {STOP_CLASSES} classes with ranges beyond Latin-1")


def _cost(pattern: str, param: str, *, positions: int = patterns.POSITIONS) -> patterns.Cost:
    try:
        return patterns.cost(pattern, positions=positions)
    except PatternRefused as error:
        _refuse(param, str(error))


def _decoded(text: str, param: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        _refuse(param, "is not valid JSON, or nested too deeply")


def _refuse(param: str, reason: str) -> NoReturn:
    raise InvalidRequest(f"{param} {reason}", param=param)


class _Schema:
    """One walk through a JSON Schema and what its references lead to.

    Args:
        root: What references are resolved against.
        param: Named in errors.
    """

    def __init__(self, root: Any, param: str) -> None:
        self._root = root
        self._param = param
        self._positions = PATTERN_POSITIONS
        # By the identity of a schema, those that describe the same value: alternatives, and the others.
        self._choices: dict[int, list[list[int]]] = {}
        self._others: dict[int, list[int]] = {}

    def visit(self, schema: Any, depth: int) -> int:
        """Checks a schema and all below it; returns its identity."""
        if isinstance(schema, bool):
            return id(schema)
        if not isinstance(schema, dict):
            _refuse(self._param, "holds something else than an object or a boolean where a schema belongs")
        if id(schema) in self._choices:
            return id(schema)
        if depth > SCHEMA_DEPTH:
            _refuse(self._param, f"is nested more than {SCHEMA_DEPTH} schemas deep")
        if len(self._choices) == SUBSCHEMAS:
            _refuse(self._param, f"holds more than {SUBSCHEMAS} schemas")
        choices = self._choices[id(schema)] = []
        others = self._others[id(schema)] = []
        self._check_patterns(schema)
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                alternatives = [self.visit(each, depth + 1) for each in schema[name]]
                choices.append(alternatives)
        if isinstance(schema.get("allOf"), list):
            others += [self.visit(each, depth + 1) for each in schema["allOf"]]
        if "$ref" in schema:
            others.append(self.visit(self._target(schema["$ref"]), 1))
        for below in _below(schema):
            self.visit(below, depth + 1)
        return id(schema)

    def check_alternatives(self) -> None:
        """Refuses schemas that refer to themselves for the same value, and too many alternatives of one."""
        graph = {
            schema: [*(each for choice in choices for each in choice), *self._others[schema]]
            for schema, choices in self._choices.items()
        }
        alternatives: dict[int, int] = {}
        try:
            for schema in graphlib.TopologicalSorter(graph).static_order():
                ways = [
                    sum(alternatives[each] for each in choice) for choice in self._choices.get(schema, ())
                ]
                ways += [alternatives[each] for each in self._others.get(schema, ())]
                alternatives[schema] = max(1, math.prod(ways))
                if alternatives[schema] > ALTERNATIVES:
                    _refuse(self._param, f"gives one value more than {ALTERNATIVES} alternatives")
        except graphlib.CycleError:
            _refuse(self._param, "holds a schema that refers to itself without anything in between")

    def _check_patterns(self, schema: dict[str, Any]) -> None:
        if isinstance(schema.get("pattern"), str):
            self._check_pattern("pattern", schema["pattern"])
        for name in ("properties", "patternProperties"):
            members = schema.get(name)
            if isinstance(members, dict) and len(members) > PROPERTIES:
                _refuse(self._param, f"holds an object of more than {PROPERTIES} properties")
        members = schema.get("patternProperties")
        for pattern in members if isinstance(members, dict) else ():
            self._check_pattern("patternProperties", pattern)

    def _check_pattern(self, name: str, pattern: str) -> None:
        try:
            self._positions -= patterns.cost(
                pattern, positions=min(patterns.POSITIONS, self._positions)
            ).positions
        except PatternRefused as error:
            _refuse(self._param, f"holds a {name} that {error}")

    def _target(self, reference: Any) -> Any:
        """What a reference leads to."""
        target = self._root
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            _refuse(self._param, "holds a $ref that does not lead into the schema itself")
        for part in reference[1:].split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                _refuse(self._param, "holds a $ref to something that is not there")
        return target


def _below(schema: dict[str, Any]) -> Iterator[Any]:
    """The schemas for parts of the value. Unknown keywords count: a reference may lead there."""
    for name, value in schema.items():
        if name in ("anyOf", "oneOf", "allOf") or name in _DATA:
            continue
        if name in _MAPS and isinstance(value, dict):
            yield from value.values()
        else:
            yield from _schemas(value)


def _schemas(value: Any) -> Sequence[Any]:
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]
