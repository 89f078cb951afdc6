"""Turns `oneOf` into `anyOf`, which llguidance can enforce, where the branches exclude each other. Compiles nothing."""

from itertools import combinations
from typing import Any

from ostro.grammar.exactness import json_type
from ostro.grammar.schema import Schema, walk

_MAX_BRANCHES = 128
"""Limited because every pair is compared."""
_MAX_REFERENCES = 8
_MAX_LEVELS = 3


def replace_exclusive_one_of(schema: Schema) -> None:
    for _, each in walk(schema):
        branches = each.get("oneOf")
        if isinstance(branches, list) and 0 < len(branches) <= _MAX_BRANCHES and "anyOf" not in each:
            resolved = [_resolved(branch, schema) for branch in branches]
            if all(_exclude(one, other, schema) for one, other in combinations(resolved, 2)):
                each["anyOf"] = each.pop("oneOf")


def _resolved(branch: Any, root: Schema) -> Schema:
    """The schema that a reference points to. Empty if it is not known, since an empty schema excludes nothing."""
    for _ in range(_MAX_REFERENCES):
        reference = branch.get("$ref") if isinstance(branch, dict) else None
        if not isinstance(reference, str):
            return branch if isinstance(branch, dict) else {}
        if not reference.startswith("#/"):
            return {}
        branch = root
        for part in reference[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            branch = branch.get(name) if isinstance(branch, dict) else None
    return {}


def _exclude(one: Schema, other: Schema, root: Schema, level: int = 0) -> bool:
    """Whether values, types or required properties prove that no value satisfies both."""
    types, other_types = _types(one), _types(other)
    if types is not None and other_types is not None and not types & other_types:
        return True
    values, other_values = _values(one), _values(other)
    if values is not None and other_values is not None:
        # True == 1 in Python.
        keys, other_keys = ({(type(each) is bool, each) for each in some} for some in (values, other_values))
        return not keys & other_keys
    if types != {"object"} or other_types != {"object"} or level == _MAX_LEVELS:
        return False
    properties, other_properties = _required(one), _required(other)
    return any(
        _exclude(_resolved(properties[name], root), _resolved(other_properties[name], root), root, level + 1)
        for name in properties.keys() & other_properties.keys()
    )


def _values(schema: Schema) -> list[Any] | None:
    """The values that the schema lists; None if it lists none, or any that is not a scalar."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    are_known = isinstance(values, list) and not any(isinstance(each, dict | list) for each in values)
    return values if are_known else None


def _types(schema: Schema) -> set[str] | None:
    values = _values(schema)
    named = schema.get("type")
    if values is not None:
        return {json_type(each) for each in values}
    types = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else None
    return types | {"integer"} if types and "number" in types else types


def _required(schema: Schema) -> Schema:
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    return {name: each for name, each in properties.items() if name in required}
