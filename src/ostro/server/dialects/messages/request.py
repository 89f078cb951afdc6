"""Translates a request to /v1/messages into a chat request. The only place that knows what blocks mean."""

import json

from ostro.answers.tools import ReasoningSettings, Tool, ToolChoice
from ostro.sampling_params import SamplingParams
from ostro.schemas.messages import (
    AutoChoice,
    InputMessage,
    MessagesInput,
    NamedChoice,
    NoChoice,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from ostro.server.dialects.chat_request import ChatRequest
from ostro.server.dialects.turns import Turns
from ostro.text.chat import Message

# Claude Code's first system block changes with every request. At the very beginning of the prompt, it would prevent
# every prefix hit.
_BILLING_HEADER = "x-anthropic-billing-header:"


def chat_request(request: MessagesInput, params: SamplingParams) -> ChatRequest:
    """`params` are what the request and the operator set."""
    return ChatRequest(
        messages=conversation(request),
        params=params,
        tools=offered_tools(request),
        tool_choice=tool_choice(request),
        parallel_tool_calls=calls_in_parallel(request),
        reasoning=reasoning_settings(request),
        continue_final_message=continues_answer(request),
        fits_output=True,
        template_kwargs=request.chat_template_kwargs,
        jump_forward=request.jump_forward,
        format_source=request.format_source,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def conversation(request: MessagesInput) -> list[Message]:
    turns = Turns(merges=True)
    system = [block.text for block in request.system if not block.text.startswith(_BILLING_HEADER)]
    if system:
        turns.say("system", system)
    for number, message in enumerate(request.messages):
        _add(turns, message, number)
    return turns.messages()


def _add(turns: Turns, message: InputMessage, number: int) -> None:
    role = message.role
    if not message.content:
        turns.say(role, [])
    texts: list[str] = []
    for place, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(block.text)
            continue
        if texts:
            turns.say(role, texts)
            texts = []
        match block:
            case ThinkingBlock(thinking=text):
                turns.reason(text)
            case ToolUseBlock():
                turns.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
            case ToolResultBlock():
                turns.result(
                    block.tool_use_id,
                    _result_texts(block),
                    param=f"messages[{number}].content[{place}].tool_use_id",
                )
    if texts:
        turns.say(role, texts)


def _result_texts(block: ToolResultBlock) -> list[str]:
    texts = [part.text for part in block.content]
    # Templates have no other way to express it.
    return ["Error: " + (texts[0] if texts else ""), *texts[1:]] if block.is_error else texts


def continues_answer(request: MessagesInput) -> bool:
    """Whether the last message is the beginning of the answer, to be continued."""
    last = request.messages[-1]
    return last.role == "assistant" and not any(isinstance(block, ToolUseBlock) for block in last.content)


def offered_tools(request: MessagesInput) -> tuple[Tool, ...]:
    return tuple(
        Tool(
            name=tool.name,
            description=tool.description,
            parameters=tool.input_schema or None,
            strict=tool.strict is True,
        )
        for tool in request.tools
    )


def tool_choice(request: MessagesInput) -> ToolChoice:
    match request.tool_choice:
        case None | AutoChoice(type="auto"):
            return ToolChoice()
        case AutoChoice():
            return ToolChoice(mode="required")
        case NamedChoice(name=name):
            return ToolChoice(mode="named", name=name)
        case NoChoice():
            return ToolChoice(mode="none")


def calls_in_parallel(request: MessagesInput) -> bool:
    choice = request.tool_choice
    return choice is None or isinstance(choice, NoChoice) or not choice.disable_parallel_tool_use


def reasoning_settings(request: MessagesInput) -> ReasoningSettings:
    thinking = request.thinking
    enabled = None if thinking is None else {"enabled": True, "disabled": False}.get(thinking.type)
    return ReasoningSettings(
        enabled=enabled,
        effort=request.output_config.effort,
        budget=None if thinking is None else thinking.budget_tokens,
    )
