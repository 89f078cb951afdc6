"""JSON schemas as data: where their keywords are, which limits they break, and what they become for llguidance.

Knows the keywords; compiles nothing.
"""

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from ostro.errors import BadRequest
from ostro.grammar.limits import (
    MAX_DEPTH,
    MAX_ENUM_VALUES,
    MAX_MULTIPLE_OF,
    MAX_OPTIONAL_PROPERTIES,
    MAX_PATTERN_CHARACTERS,
    MAX_PATTERN_PROPERTIES,
    MAX_REPETITIONS,
)
from ostro.guidance_text import OPTIONS

Schema = dict[str, Any]
Path = tuple[str | int, ...]

# Keywords whose values hold schemas: one, a list of them, or an object of them.
_ONE = frozenset(
    {
        *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
        *("unevaluatedItems", "unevaluatedProperties"),
    }
)
_LIST = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_MAP = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})

# Keywords that llguidance refuses whatever their value, and the values with which they say nothing.
_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "not": (False,),
}


def pointer(path: Path) -> str:
    """A JSON pointer, as `$ref` has them."""
    return "#" + "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def children(schema: Schema) -> Iterator[tuple[Path, Any]]:
    """The schemas right within this one, true and false among them, and where they are."""
    for keyword, value in schema.items():
        if keyword in _ONE and isinstance(value, dict | bool):
            yield (keyword,), value
        elif keyword in _LIST and isinstance(value, list):
            yield from (((keyword, index), each) for index, each in enumerate(value))
        elif keyword in _MAP and isinstance(value, dict):
            yield from (((keyword, name), each) for name, each in value.items() if isinstance(each, dict | bool))


def walk(schema: Schema) -> Iterator[tuple[Path, Schema]]:
    """All schemas in it, itself first, and where they are."""
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, each = waiting.pop()
        if isinstance(each, dict):
            yield path, each
            waiting += reversed([((*path, *more), child) for more, child in children(each)])


def check_depth(value: object, param: str) -> None:
    """Raises BadRequest for JSON that is nested too deeply to be walked."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise BadRequest(f"{param} is nested more than {MAX_DEPTH} levels deep. Flatten it.", param=param)


def check_repetitions(text: str, param: str, where: str = "") -> None:
    """Raises BadRequest for a regex or a grammar that repeats something too often."""
    for match in re.finditer(r"\{\s*(\d+)?\s*,?\s*(\d+)?\s*\}", text):
        if any(len(number) > 6 or int(number) > MAX_REPETITIONS for number in match.groups() if number):
            raise BadRequest(
                f"{param} repeats {match[0][:40]} times{where}; at most {MAX_REPETITIONS} are supported.", param=param
            )


def lint(schema: Schema, param: str) -> None:
    """Raises BadRequest for what would take too long to compile or to enforce, whatever the compiler's own limits."""
    for path, each in walk(schema):
        for keyword, found, most in _sizes(each):
            if found > most:
                where = pointer((*path, keyword))
                raise BadRequest(
                    f"{param} has too large a {keyword} at {where}: at most {most} {_UNITS[keyword]}.", param=param
                )
        for keyword in ("pattern", "patternProperties"):
            for regex in _regexes(each.get(keyword)):
                check_repetitions(regex, param, f" at {pointer((*path, keyword))}")


def _regexes(value: object) -> list[str]:
    """Of a keyword: one, or the names in an object."""
    return [value] if isinstance(value, str) else list(value) if isinstance(value, dict) else []


_UNITS = {
    "multipleOf": "is supported, counted without the decimal point",
    "patternProperties": "patterns of at most 1024 characters are supported in one object",
    "properties": "optional properties are supported in one object; make others required",
    "enum": "values are supported",
    "pattern": "characters are supported",
}


def _sizes(schema: Schema) -> Iterator[tuple[str, float, int]]:
    """Keywords of this schema that are limited, what they have and what they may have."""
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and not isinstance(multiple, bool):
        yield "multipleOf", _numerator(multiple), MAX_MULTIPLE_OF
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict):
        longest = max(map(len, patterns), default=0)
        yield "patternProperties", len(patterns), MAX_PATTERN_PROPERTIES
        yield "patternProperties", 0 if longest <= MAX_PATTERN_CHARACTERS else longest, MAX_PATTERN_PROPERTIES
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict):
        needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        yield "properties", len(properties.keys() - needed), MAX_OPTIONAL_PROPERTIES
    if isinstance(schema.get("enum"), list):
        yield "enum", len(schema["enum"]), MAX_ENUM_VALUES
    if isinstance(schema.get("pattern"), str):
        yield "pattern", len(schema["pattern"]), MAX_PATTERN_CHARACTERS


def _numerator(value: float) -> float:
    try:
        digits = Decimal(str(value)).as_tuple().digits
    except InvalidOperation:
        return 0
    return max(abs(value), int("".join(map(str, digits))))


def normalized(schema: Any) -> Any:
    """The same schema without the library's options, and without keywords that say nothing but would be refused."""
    if not isinstance(schema, dict):
        return schema
    made = {
        keyword: _normalized_value(keyword, value)
        for keyword, value in schema.items()
        if keyword != OPTIONS and value not in _WITHOUT_EFFECT.get(keyword, ())
    }
    if "if" not in made or not made.keys() & {"then", "else"}:
        for keyword in ("if", "then", "else"):
            made.pop(keyword, None)
    return made


def _normalized_value(keyword: str, value: Any) -> Any:
    if keyword in _LIST and isinstance(value, list):
        return [normalized(each) for each in value]
    if keyword in _MAP and isinstance(value, dict):
        return {name: normalized(each) for name, each in value.items()}
    return normalized(value) if keyword in _ONE else value


# What llguidance says of a keyword that it cannot enforce, and which keyword that is.
_REFUSALS = (
    (re.compile(r'Unimplemented keys: \["([^"]+)"'), None),
    (re.compile(r"(oneOf) constraints are not supported"), None),
    (re.compile(r"Unknown format: (.*)"), "format"),
    (re.compile(r"Invalid type: (.*)"), "type"),
    (re.compile(r"Pointer '(.*)' does not exist"), "$ref"),
    (re.compile(r"Resource '(.*)' is not present"), "$ref"),
    (re.compile(r"patternProperty regexes /(.*)/ and /"), "patternProperties"),
    (re.compile(r"(min/maxProperties) only supported"), "minProperties"),
    (re.compile(r"regex parse error:\s*\n\s*(.*)"), "pattern"),
    (re.compile(r"in regex /(.*)/"), "pattern"),
)


def locate(error: str, schema: Schema) -> Path | None:
    """Where the keyword is that an error of the compiler is about; None if it does not tell.

    The compiler names a keyword or a value, not its place: the first that could be meant is taken.
    """
    for expression, keyword in _REFUSALS:
        if match := expression.search(error):
            return _find(schema, keyword or match[1], match[1] if keyword else None)
    return None


def _find(schema: Schema, keyword: str, value: str | None) -> Path | None:
    for path, each in walk(schema):
        for name in _SYNONYMS.get(keyword, (keyword,)):
            if name in each and (value is None or _holds(each[name], value)):
                return (*path, name)
    return _find(schema, keyword, None) if value is not None else None


_SYNONYMS = {"minProperties": ("minProperties", "maxProperties"), "pattern": ("pattern", "patternProperties")}


def _holds(found: object, value: str) -> bool:
    if isinstance(found, str):
        return value in found
    return value in found if isinstance(found, dict | list) else False
