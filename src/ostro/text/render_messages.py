"""Messages between `renderer` and `render_process`: first a `Setup`, then conversations, each with its reply."""

from typing import Any

import msgspec


class Setup(msgspec.Struct, frozen=True):
    source: str
    tool_source: str | None
    variables: dict[str, str]
    controls: list[str]
    guarded: list[str]
    bytes: int


class Conversation(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    mark: str | None
    """The mark to put before control texts in the conversation; None leaves them unmarked."""
    max_characters: int
    """Length limit of the rendered text: a longer one is not sent back."""


class Rendered(msgspec.Struct, frozen=True, tag=True):
    text: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    message: str
    unsupported: bool = False
    param: str = "messages"


class TooLong(msgspec.Struct, frozen=True, tag=True):
    num_characters: int


Reply = Rendered | Refused | TooLong
