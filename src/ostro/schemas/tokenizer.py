"""/tokenize, /detokenize and /tokenizer_info: requests and responses, in the form that evaluation tools expect."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from ostro.schemas.chat import MAX_MESSAGES, Message
from ostro.schemas.fields import MAX_TOKENS, Text
from ostro.schemas.tools import MAX_TOOLS, ToolSpec
from ostro.schemas.wire import RequestModel, WireModel, refusal


class TokenizeRequest(RequestModel):
    """A text, or a conversation as for chat completions."""

    model: str = "default"
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    """For a text: whether to add the special tokens that the model expects around it."""
    add_generation_prompt: bool = True
    """For a conversation: whether to end with the start of the model's answer."""
    continue_final_message: bool = False
    """For a conversation: whether to end with the last message's text."""
    tools: Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    """For a conversation: the tools that it offers, as in a chat request."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """For a conversation: variables for the chat template."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "or messages is required, and not both")
        return self


class TokenizeResponse(WireModel):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    model: str = "default"
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_TOKENS, fail_fast=True)]


class DetokenizeResponse(WireModel):
    prompt: str


class TokenizerInfo(WireModel):
    eos_token: str | None
    eos_token_id: int | None
    eos_token_ids: list[int]
    """All end-of-sequence tokens; `eos_token_id` is the lowest of them."""
    bos_token: str | None
    bos_token_id: int | None
    vocab_size: int
    chat_template: str | None
