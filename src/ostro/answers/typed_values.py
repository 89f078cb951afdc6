"""Converts values that a model wrote without quotes or types to JSON, by their schema."""

import json
from collections.abc import Mapping
from typing import TypeGuard

_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_COMBINED = ("anyOf", "oneOf", "allOf")


def json_of(text: str, schema: object, root: Mapping[str, object]) -> str:
    """The text as JSON of a type that the schema allows, or else as a string. If the schema allows a string and another
    type, the other type is preferred if the text parses as that. References in the schema are relative to `root`.
    """
    types = _types(schema, root)
    if types and types <= {"string"}:
        return _dumped(text)
    value = _value(text)
    if value is _NOTHING or not (not types or _types_of(value) & types):
        return _dumped(text)
    # Verbatim, unless it is Python's spelling.
    written = text.strip()
    return written if written not in ("True", "False", "None") else _dumped(value)


def may_be_text(schema: object, root: Mapping[str, object]) -> bool:
    """Whether a string is one of the types that the schema allows."""
    types = _types(schema, root)
    return not types or "string" in types


_NOTHING = object()


def _value(text: str) -> object:
    if text.strip() in _WORDS:
        return _WORDS[text.strip()]
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOTHING


def _refuse(word: str) -> object:
    raise ValueError(word)


def _types(schema: object, root: Mapping[str, object]) -> set[str]:
    """The types that the schema allows; empty if it allows any."""
    types: set[str] = set()
    waiting, seen = [schema], set[int]()
    while waiting:
        each = waiting.pop()
        # Each part once: parts that refer to one another several times would be visited exponentially often.
        if isinstance(each, Mapping) and id(each) not in seen:
            seen.add(id(each))
            types |= _own_types(each)
            waiting += _parts(each, root)
    return types


def _own_types(schema: Mapping[str, object]) -> set[str]:
    """The types that the schema states itself, or that its values have."""
    types = set(filter(_is_text, _listed(schema.get("type"))))
    if types:
        return types
    values = [schema["const"]] if "const" in schema else _listed(schema.get("enum"))
    return types.union(*map(_types_of, values))


def _parts(schema: Mapping[str, object], root: Mapping[str, object]) -> list[object]:
    """The schemas that it combines or refers to."""
    parts = [part for name in _COMBINED for part in _listed(schema.get(name))]
    if isinstance(reference := schema.get("$ref"), str):
        parts.append(_referred(reference, root))
    return parts


def _referred(reference: str, root: object) -> object:
    """The target of a reference such as #/$defs/Place; None if there is none."""
    for key in reference.removeprefix("#").split("/")[1:]:
        root = root.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str)


def _types_of(value: object) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
    return {"object"}


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
