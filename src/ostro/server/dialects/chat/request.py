"""Translates a chat completion request into a `ChatRequest`. Knows no engine and no sockets."""

from ostro.answers.tools import ReasoningSettings, Tool, ToolChoice
from ostro.sampling_params import SamplingParams
from ostro.schemas.chat import ChatCompletionRequest
from ostro.schemas.tools import ToolFields, ToolSpec
from ostro.server.dialects.chat_request import ChatRequest


def chat_request(request: ChatCompletionRequest, params: SamplingParams) -> ChatRequest:
    """`params` are the request's own with the operator's defaults."""
    return ChatRequest(
        messages=request.template_messages(),
        params=params,
        tools=tuple(map(tool_of, request.tools)),
        tool_choice=_tool_choice(request),
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning=ReasoningSettings(
            enabled=False if request.budget == 0 and request.enable_thinking is None else request.enable_thinking,
            effort=request.reasoning_effort,
            budget=request.budget,
            include=request.include_reasoning,
        ),
        template_kwargs=request.chat_template_kwargs,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        jump_forward=request.jump_forward,
        format_source=request.format_source,
        prediction="" if request.prediction is None else request.prediction.text,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


def tool_of(spec: ToolSpec) -> Tool:
    if spec.function is not None:
        parameters = spec.function.parameters
        return Tool(
            name=spec.function.name,
            description=spec.function.description,
            # The schema `true` allows anything, but arguments are always an object.
            parameters=({"type": "object"} if parameters is True else parameters) or None,
            strict=spec.function.strict,
        )
    assert spec.custom is not None, "a tool is a function or a custom tool"
    grammar = None if spec.custom.format is None else spec.custom.format.grammar
    return Tool(
        name=spec.custom.name,
        description=spec.custom.description,
        is_custom=True,
        regex=grammar.definition if grammar is not None and grammar.syntax == "regex" else None,
        grammar=grammar.definition if grammar is not None and grammar.syntax == "lark" else None,
    )


def _tool_choice(fields: ToolFields) -> ToolChoice:
    choice = fields.tool_choice
    if isinstance(choice, str):
        return ToolChoice(mode=choice)
    if choice.allowed_tools is not None:
        allowed = frozenset(tool.name for tool in choice.allowed_tools.tools)
        return ToolChoice(mode=choice.allowed_tools.mode, allowed=allowed)
    named = choice.function or choice.custom
    assert named is not None, "a choice is a mode, a name or a list of names"
    return ToolChoice(mode="named", name=named.name)
