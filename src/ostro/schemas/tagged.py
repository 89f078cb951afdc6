"""Unions of objects that are told apart by their `type`. Knows pydantic; knows no endpoint.

pydantic's own unions complain about every kind that an object is not, under paths that name our classes. Here the
`type` decides first, and errors are about that kind alone: `input[7].content[0].text`.
"""

from collections.abc import Callable, Iterable
from typing import Any, get_args

from pydantic import BeforeValidator, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from ostro.schemas.wire import RequestModel, refusal

_LONGEST_TAG = 64


def tagged(
    *kinds: type[RequestModel],
    untagged: Callable[[dict[str, Any]], type[RequestModel] | None] = lambda value: None,
    unserved: Iterable[str] = (),
    other: Callable[[dict[str, Any]], type[RequestModel] | None] = lambda value: None,
) -> WrapValidator:
    """Reads an object as the kind that its `type` names. `untagged` finds the kind of one without a type; `unserved`
    are the API's types that Ostro does not serve; `other` finds the kind of one whose type, a string, is not known.
    """
    by_tag = {tag: kind for kind in kinds for tag in get_args(kind.model_fields["type"].annotation)}
    refused = frozenset(unserved)
    known = ", ".join(by_tag)

    def read(value: object, validate: ValidatorFunctionWrapHandler) -> RequestModel:
        if isinstance(value, kinds):
            # Built by our own code.
            return value
        if not isinstance(value, dict):
            raise PydanticCustomError("refused", "must be a JSON object")
        tag = value.get("type")
        kind = untagged(value) if tag is None else by_tag.get(tag) if isinstance(tag, str) else None
        if kind is None and isinstance(tag, str) and tag not in refused:
            kind = other(value)
        if kind is not None:
            return kind.model_validate(value)
        if tag is None:
            raise refusal("type", "is required")
        if isinstance(tag, str) and tag in refused:
            raise refusal("type", f"{tag} is not supported: it can be {known}", kind="unsupported")
        raise refusal("type", f"is not known, got {str(tag)[:_LONGEST_TAG]!r}: it can be {known}")

    return WrapValidator(read)


def text_or_list(items: Any, *, part: Callable[[str], dict[str, object]], what: str) -> BeforeValidator:
    """Reads a text as a list of one, so that code inside sees lists only. `items` is the list's type."""

    def listed(value: object) -> object:
        if isinstance(value, str):
            return [part(value)]
        if not isinstance(value, list | tuple):
            raise PydanticCustomError("refused", "{complaint}", {"complaint": f"must be a string or a list of {what}"})
        return value

    return BeforeValidator(listed, json_schema_input_type=str | items)
