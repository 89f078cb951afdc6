"""Finds keywords in a schema that llguidance would compile but enforce wrongly, and rewrites `oneOf` where it can be
enforced. Compiles nothing.

llguidance's numbers are 64-bit floats, and it counts a property as often as it is written.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from ostro.errors import Unsupported
from ostro.grammar.schema import Schema, pointer, walk

_MAX_EXACT = 1 << 53
"""Floats represent every integer up to this one."""
_MAX_INT64 = (1 << 63) - 1
_MIN_BOUND = 1e-50
"""Bounds closer to 0 compile to expressions that are nested too deeply."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


@dataclass(frozen=True, slots=True)
class _Inexact:
    keyword: str
    reason: str
    instead: Schema = field(default_factory=dict)
    """The part of the keyword that can be enforced."""


def require_exact(schema: Schema, param: str) -> None:
    """Raises Unsupported for the first keyword that would be enforced wrongly."""
    for path, each in walk(schema):
        for found in _inexact(each):
            raise not_exact(param, found.keyword, pointer((*path, found.keyword)), found.reason)


def takes_names_twice(schema: Schema) -> bool:
    """Whether an object allows properties besides those with a schema of their own. llguidance compares names as they
    are written, so an escape in an additional name could spell a name that has its own schema.
    """
    return any(
        bool(each.get("properties") or each.get("patternProperties")) and each.get("additionalProperties") is not False
        for _, each in walk(schema)
    )


def leave_out_inexact(schema: Schema) -> None:
    """Removes keywords that would be enforced wrongly, keeping the part that can be enforced."""
    for _, each in walk(schema):
        for found in list(_inexact(each)):
            del each[found.keyword]
            each.update({name: value for name, value in found.instead.items() if name not in each})


def not_exact(param: str, keyword: str, where: str, reason: str) -> Unsupported:
    return Unsupported(
        f"{param} cannot be enforced exactly: {keyword} at {where} is not supported ({reason}). Leave it out, or set "
        "strict to false to have it ignored.",
        param=param,
    )


def _inexact(schema: Schema) -> Iterator[_Inexact]:
    for keyword in ("const", "enum"):
        if keyword in schema and (number := _beyond(schema[keyword])) is not None:
            values = schema["enum"] if keyword == "enum" else [schema["const"]]
            yield _Inexact(keyword, f"{number} is beyond 2**53", {"type": sorted({json_type(each) for each in values})})
    for keyword in _BOUNDS:
        if (bound := _number(schema, keyword)) is not None and (reason := _why_inexact(schema, keyword, bound)):
            yield _Inexact(keyword, reason)
    yield from _loose_bounds(schema)
    least = _number(schema, "minProperties")
    most = len(_names(schema.get("required"))) + 1
    if least is not None and least > most:
        # Names that are not listed may repeat: {"a": 1, "a": 2} has one property.
        yield _Inexact("minProperties", f"at most {most} is, one more than the required ones", {"minProperties": most})


def _why_inexact(schema: Schema, keyword: str, bound: float) -> str:
    if not abs(bound) <= _MAX_EXACT:
        # The only larger bound that is enforced exactly.
        is_int64 = keyword == "maximum" and schema.get("type") == "integer" and bound == _MAX_INT64
        return "" if is_int64 else f"{bound} is beyond 2**53"
    return f"{bound} is too close to 0" if bound and abs(bound) < _MIN_BOUND else ""


def _loose_bounds(schema: Schema) -> Iterator[_Inexact]:
    """Exclusive integer bounds that llguidance treats as inclusive because no other integer lies between them."""
    if schema.get("type") == "integer":
        return
    for keyword, others, sign in (
        ("exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        bound = _number(schema, keyword)
        if bound is None or bound % 1 or sign * bound < 0:
            continue
        for other in others:
            end = _number(schema, other)
            if end is not None and sign * (end - bound) < 1:
                inclusive = "minimum" if sign > 0 else "maximum"
                reason = f"with {other} {end}; use {inclusive}"
                yield _Inexact(keyword, reason, {inclusive: bound})
                return


def _number(schema: Schema, keyword: str) -> float | None:
    value = schema.get(keyword)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _beyond(value: Any) -> float | None:
    """A number in the value that floats cannot distinguish from its neighbours."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return next((found for each in inner if (found := _beyond(each)) is not None), None)
    if isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) <= _MAX_EXACT:
        return value
    return None


def json_type(value: Any) -> str:
    """The narrowest type of a JSON value."""
    if isinstance(value, float) and value.is_integer():
        return "integer"
    for kind, name in _TYPES:
        if isinstance(value, kind):
            return name
    return "null"


# A boolean is an int in Python.
_TYPES = (
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)


def _names(required: Any) -> set[str]:
    return {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()


_MAX_BRANCHES = 128
"""Most branches of a `oneOf`: every pair is compared."""
_MAX_REFERENCES = 8
_MAX_LEVELS = 3


def replace_exclusive_one_of(schema: Schema) -> None:
    """Turns `oneOf` into `anyOf`, which llguidance can enforce, where the branches exclude each other."""
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
