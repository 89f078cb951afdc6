"""Kinds of fields that several endpoints have: prompts, variables for the chat template, and unions of
tagged objects.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, Any, Self, get_args

from pydantic import (
    BeforeValidator,
    Field,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ostro.schemas.wire import RequestModel, refusal, shape

MAX_PROMPTS = 2048
MAX_CHARACTERS = 16 << 20
# Over all prompts; `body` counts them, and leaves room for a request's other fields.
MAX_TOKENS = 500_000


def _listed(value: object) -> object:
    """Wraps a single prompt in a list."""
    alone = isinstance(value, str) or (isinstance(value, list) and len(value) > 0 and isinstance(value[0], int))
    return [value] if alone else value


_TEXT_SCHEMA = {"type": "string", "maxLength": MAX_CHARACTERS}
_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}

Text = Annotated[str, Field(max_length=MAX_CHARACTERS)]
# Fails fast: a million wrong entries are one mistake, not a million.
TokenIds = Annotated[list[int], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]
Prompts = Annotated[
    list[Text | TokenIds],
    Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
    BeforeValidator(_listed),
    shape(
        "must be a text, a list of texts, a list of token ids or a list of such lists: "
        f"1 to {MAX_PROMPTS} of them, a text of at most {MAX_CHARACTERS} characters"
    ),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_SCHEMA,
                _IDS_SCHEMA,
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TEXT_SCHEMA},
                {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _IDS_SCHEMA},
            ]
        }
    ),
]


# Variables of the template that have fields of their own in a request.
_TAKEN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")


class TemplateFields(RequestModel):
    """Variables for the chat template, which all chat dialects accept."""

    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as `{"enable_thinking": false}`. They override the other fields."""

    @model_validator(mode="after")
    def _check_variables(self) -> Self:
        for name in _TAKEN_VARIABLES:
            if name in self.chat_template_kwargs:
                raise refusal(f"chat_template_kwargs.{name}", "is not a variable to set: use the request's own field")
        return self


_LONGEST_TAG = 64


def tagged(
    *kinds: type[RequestModel],
    untagged: Callable[[dict[str, Any]], type[RequestModel] | None] = lambda value: None,
    unserved: Iterable[str] = (),
    other: Callable[[dict[str, Any]], type[RequestModel] | None] = lambda value: None,
) -> WrapValidator:
    """Reads an object as the kind that its `type` names. `untagged` finds the kind of one without a type; `unserved`
    are the API's types that Ostro does not serve; `other` finds the kind of one whose type, a string, is not known.

    pydantic's own unions complain about every kind that an object is not, under paths that name our classes. Here the
    `type` decides first, and errors are about that kind alone: `input[7].content[0].text`.
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
