"""JSON schemas as data: finds keywords, enforces limits, and normalises schemas for llguidance.

Knows the keywords; compiles nothing.
"""

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from ostro.errors import BadRequest
from ostro.formats.guidance_text import OPTIONS
from ostro.grammar.limits import (
    MAX_DEPTH,
    MAX_ENUM_VALUES,
    MAX_MULTIPLE_OF,
    MAX_OPTIONAL_PROPERTIES,
    MAX_PATTERN_CHARACTERS,
    MAX_PATTERN_PROPERTIES,
    MAX_REPETITIONS,
)

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

# Keywords that llguidance refuses whatever their value, and the values with which they have no effect.
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
    """The JSON pointer to it, as in `$ref`."""
    return "#" + "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def children(schema: Schema) -> Iterator[tuple[Path, Any]]:
    """The direct subschemas, including true and false, with their paths."""
    for keyword, value in schema.items():
        if keyword in _ONE and isinstance(value, dict | bool):
            yield (keyword,), value
        elif keyword in _LIST and isinstance(value, list):
            yield from (((keyword, index), each) for index, each in enumerate(value))
        elif keyword in _MAP and isinstance(value, dict):
            yield from (((keyword, name), each) for name, each in value.items() if isinstance(each, dict | bool))


def walk(schema: Schema) -> Iterator[tuple[Path, Schema]]:
    """The schema and all its subschemas, depth first, with their paths."""
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
    # Possessive: white space that four places could take would otherwise be divided in every possible way.
    for match in re.finditer(r"\{\s*+(\d++)?\s*+,?\s*+(\d++)?\s*+\}", text):
        if any(len(number) > 6 or int(number) > MAX_REPETITIONS for number in match.groups() if number):
            raise BadRequest(
                f"{param} repeats {match[0][:40]} times{where}; at most {MAX_REPETITIONS} are supported.", param=param
            )


def lint(schema: Schema, param: str) -> None:
    """Raises BadRequest for keywords that take too long to compile or enforce despite the compiler's own limits."""
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
    """The regexes in a keyword's value: a single one, or the names in an object."""
    return [value] if isinstance(value, str) else list(value) if isinstance(value, dict) else []


_UNITS = {
    "multipleOf": "is supported, counted without the decimal point",
    "patternProperties": "patterns of at most 1024 characters are supported in one object",
    "properties": "optional properties are supported in one object; make others required",
    "enum": "values are supported",
    "pattern": "characters are supported",
}


def _sizes(schema: Schema) -> Iterator[tuple[str, float, int]]:
    """The limited keywords of this schema, each with its size and the maximum."""
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
    """The schema without the library's options, and without keywords that have no effect but would be refused."""
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


# llguidance's messages about keywords that it cannot enforce, and the keyword where the message does not name it.
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
    """The path of the keyword that a compiler error is about; None if the message does not tell.

    The compiler names a keyword or a value but no path, so this is the first match.
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
