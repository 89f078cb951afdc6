"""A model's chat template and a conversation's messages, as data. Knows no Jinja: templates run in `render_process`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

Message = Mapping[str, object]
Tools = Sequence[Mapping[str, object]]


def is_about_tools(message: Message) -> bool:
    """Whether it holds tool calls, or the result of one."""
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


class RenderOptions(TypedDict, total=False):
    """How to render a conversation: keyword arguments of everything that renders one."""

    tools: Tools | None
    """Tools in the form of OpenAI's chat completions, as templates expect them."""
    template_kwargs: Mapping[str, object] | None
    """Variables for the template besides its own, such as `enable_thinking`; JSON values."""
    add_generation_prompt: bool
    """Whether the text ends with the start of the model's answer; True if left out."""
    continue_final_message: bool
    """Whether the text ends with the last message's content, for the model to continue it. Takes the place of the
    generation prompt.
    """


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """`variables` are the tokenizer's, such as `bos_token` and `eos_token`."""

    source: str
    variables: Mapping[str, str] = field(default_factory=dict)
    tool_source: str | None = None
    """A separate template for conversations with tools, if the model has one: often called `tool_use`."""

    @property
    def whole_source(self) -> str:
        return self.source + (self.tool_source or "")
