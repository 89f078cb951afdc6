"""Prompts as the API takes them: a text, a list of texts, token ids, or a list of such lists."""

from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from ostro.schemas.wire import shape

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
