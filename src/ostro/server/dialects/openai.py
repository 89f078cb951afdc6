"""Turns finished completions into API responses. Knows wire objects and a tokenizer; knows no engine and no sockets."""

import base64
import struct
import time
import uuid
from collections.abc import Sequence

from ostro.answers.events import Call
from ostro.engine.runner import TokenLogprob
from ostro.errors import SequenceFailed
from ostro.frontend.outputs import Choice, Completion
from ostro.schemas import (
    CalledCustomTool,
    CalledFunction,
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    ChatToolCall,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    CompletionTokensDetails,
    Embedding,
    EmbeddingRequest,
    EmbeddingResponse,
    EmbeddingUsage,
    FinishReason,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    TopLogprob,
    Usage,
)
from ostro.server.dialects.chat_turn import AnswerStream, ChatAnswer
from ostro.text.offsets import text_offsets
from ostro.text.tokenizer import Tokenizer
from ostro.weights import Pooling

# JSON has no infinity; OpenAI uses this for an impossible token.
_LOWEST_LOGPROB = -9999.0


def new_id(kind: str) -> str:
    """A new id like OpenAI's: cmpl-…, chatcmpl-…"""
    return f"{kind}{uuid.uuid4().hex}"


def usage(completions: Sequence[Completion], *, num_reasoning: int | None = None) -> Usage:
    """A prompt counts once, however many choices it has. `num_reasoning` is None for plain answers."""
    prompt = sum(len(completion.prompt_ids) for completion in completions)
    generated = sum(completion.num_generated for completion in completions)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(each.num_cached for each in completions)),
        completion_tokens_details=_completion_details(completions, num_reasoning),
    )


def _completion_details(completions: Sequence[Completion], num_reasoning: int | None) -> CompletionTokensDetails | None:
    predicted = [completion for completion in completions if completion.has_prediction]
    if num_reasoning is None and not predicted:
        return None
    return CompletionTokensDetails(
        reasoning_tokens=num_reasoning,
        accepted_prediction_tokens=sum(each.num_accepted for each in predicted) if predicted else None,
        rejected_prediction_tokens=sum(each.num_rejected for each in predicted) if predicted else None,
    )


# --- completions ----------------------------------------------------------------------------------------------------


def completion_response(
    request: CompletionRequest,
    completions: Sequence[Completion],
    tokenizer: Tokenizer,
    *,
    model: str,
    strict: bool = False,
) -> CompletionResponse:
    """`completions` has one per prompt, in order. Raises SequenceFailed if one of them failed."""
    return CompletionResponse(
        id=new_id("cmpl-"),
        created=int(time.time()),
        model=model,
        choices=[
            _completion_choice(request, number, completion, choice, tokenizer, strict=strict)
            for number, completion in enumerate(completions)
            for choice in completion.choices
        ],
        usage=usage(completions),
    )


def _completion_choice(
    request: CompletionRequest,
    number: int,
    completion: Completion,
    choice: Choice,
    tokenizer: Tokenizer,
    *,
    strict: bool,
) -> CompletionChoice:
    """`number` is the index of the prompt."""
    echoed = echoed_prompt(request, number, completion, tokenizer) if request.echo else None
    return CompletionChoice(
        index=number * request.n + choice.index,
        text=(echoed or "") + choice.text,
        logprobs=_completion_logprobs(request.logprobs, completion, choice, echoed, tokenizer),
        finish_reason=finish_reason(choice, strict=strict),
        prompt_logprobs=_prompt_logprobs(request.prompt_logprobs, completion, tokenizer),
    )


def echoed_prompt(request: CompletionRequest, number: int, completion: Completion, tokenizer: Tokenizer) -> str:
    """A prompt's text, to be put before its choices. If it may be truncated, only the part that was kept."""
    prompt = request.prompt[number]
    if isinstance(prompt, str) and request.truncate_prompt_tokens is None:
        return prompt
    return tokenizer.decode(completion.prompt_ids, skip_special=request.skip_special_tokens)


def _completion_logprobs(
    top: int | None, completion: Completion, choice: Choice, echoed: str | None, tokenizer: Tokenizer
) -> CompletionLogprobs | None:
    """Log-probabilities of every generated token, including one that ended the text and is not part of it."""
    if top is None:
        return None
    ids: list[int] = choice.token_ids
    entries: list[TokenLogprob | None] = [*(choice.logprobs or ())]
    offsets = list(text_offsets(ids, choice.text, tokenizer))
    if echoed is not None:
        ids = [*completion.prompt_ids, *ids]
        entries = [*(completion.prompt_logprobs or ()), *entries]
        offsets = [*text_offsets(completion.prompt_ids, echoed, tokenizer), *(len(echoed) + at for at in offsets)]
    return token_arrays(top, ids, entries, offsets, tokenizer)


def token_arrays(
    top: int,
    ids: Sequence[int],
    entries: Sequence[TokenLogprob | None],
    offsets: list[int],
    tokenizer: Tokenizer,
) -> CompletionLogprobs:
    """The parallel arrays for consecutive tokens."""
    return CompletionLogprobs(
        tokens=[_token_name(token, tokenizer) for token in ids],
        token_logprobs=[None if entry is None else finite(entry.logprob) for entry in entries],
        top_logprobs=[_alternatives(entry, top, tokenizer) for entry in entries] if top else None,
        text_offset=offsets,
    )


def _alternatives(entry: TokenLogprob | None, top: int, tokenizer: Tokenizer) -> dict[str, float] | None:
    """The most likely tokens and the actual one. Among tokens with the same name, the most likely one counts."""
    if entry is None:
        return None
    named: dict[str, float] = {}
    for token, logprob in (*entry.top[:top], (entry.token_id, entry.logprob)):
        name = _token_name(token, tokenizer)
        named[name] = max(finite(logprob), named.get(name, _LOWEST_LOGPROB))
    return named


def _token_name(token: int, tokenizer: Tokenizer) -> str:
    """The token's text, or its bytes if it is not valid UTF-8, so that names stay distinct."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


# --- chat -----------------------------------------------------------------------------------------------------------


def chat_response(
    request: ChatCompletionRequest,
    completion: Completion,
    answers: AnswerStream,
    tokenizer: Tokenizer,
    *,
    model: str,
    strict: bool = False,
) -> ChatCompletionResponse:
    """Raises SequenceFailed if a choice failed."""
    choices = [_chat_choice(answers.answer(choice), tokenizer, strict=strict) for choice in completion.choices]
    return ChatCompletionResponse(
        id=new_id("chatcmpl-"),
        created=int(time.time()),
        model=model,
        choices=choices,
        usage=usage([completion], num_reasoning=answers.num_reasoning(tokenizer)),
        prompt_logprobs=_prompt_logprobs(request.prompt_logprobs, completion, tokenizer),
    )


def _chat_choice(answer: ChatAnswer, tokenizer: Tokenizer, *, strict: bool) -> ChatChoice:
    calls = [_tool_call(call) for call in answer.calls] or None
    is_silent = not answer.text and bool(calls or answer.reasoning)
    return ChatChoice(
        index=answer.index,
        message=ChatMessage(
            content=None if is_silent else answer.text,
            reasoning_content=answer.reasoning or None,
            reasoning=answer.reasoning or None,
            tool_calls=calls,
        ),
        logprobs=chat_logprobs(answer.logprobs, tokenizer),
        finish_reason=wire_reason(answer.finish_reason, strict=strict),
    )


def _tool_call(call: Call) -> ChatToolCall:
    if call.is_custom:
        return ChatToolCall(id=call.id, type="custom", custom=CalledCustomTool(name=call.name, input=call.arguments))
    return ChatToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))


def chat_logprobs(entries: Sequence[TokenLogprob] | None, tokenizer: Tokenizer) -> ChatLogprobs | None:
    if entries is None:
        return None
    return ChatLogprobs(content=[_chat_logprob(entry, tokenizer) for entry in entries])


def _chat_logprob(entry: TokenLogprob, tokenizer: Tokenizer) -> ChatTokenLogprob:
    return ChatTokenLogprob(
        token=tokenizer.token_text(entry.token_id),
        logprob=finite(entry.logprob),
        bytes=list(tokenizer.token_bytes(entry.token_id)),
        top_logprobs=[
            TopLogprob(
                token=tokenizer.token_text(token),
                logprob=finite(logprob),
                bytes=list(tokenizer.token_bytes(token)),
            )
            for token, logprob in entry.top
        ],
    )


# --- both -----------------------------------------------------------------------------------------------------------


def finish_reason(choice: Choice, *, strict: bool = False) -> FinishReason:
    """Raises SequenceFailed or StructureFailed for a choice that failed. `strict`: only reasons that OpenAI defines."""
    if choice.finish_reason in (None, "error"):
        raise SequenceFailed.of_choice(choice.error)
    return wire_reason(choice.finish_reason, strict=strict)


def wire_reason(reason: str, *, strict: bool) -> FinishReason:
    """A finish reason for responses. `strict`: only those that OpenAI defines."""
    match reason:
        case "length" | "tool_calls":
            return reason
        case "repetition" if not strict:
            return reason
    return "stop"


def _prompt_logprobs(top: int | None, completion: Completion, tokenizer: Tokenizer) -> PromptLogprobs | None:
    if top is None:
        return None
    return [None if entry is None else _ranked(entry, top, tokenizer) for entry in completion.prompt_logprobs or ()]


def _ranked(entry: TokenLogprob, top: int, tokenizer: Tokenizer) -> dict[int, PromptLogprob]:
    """The most likely tokens at a position, and the actual one."""
    likeliest = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:top], 1)]
    return {
        token: PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=tokenizer.token_text(token))
        for token, logprob, rank in (*likeliest, (entry.token_id, entry.logprob, entry.rank))
    }


def finite(logprob: float) -> float:
    return max(logprob, _LOWEST_LOGPROB)


# --- embeddings -----------------------------------------------------------------------------------------------------


def embedding_response(
    request: EmbeddingRequest, vectors: Sequence[list[float]], *, pooling: Pooling | None, num_tokens: int, model: str
) -> EmbeddingResponse:
    """`vectors` has one per input, in order. Raises Unsupported for dimensions that the model does not have."""
    if pooling is not None:
        vectors = [pooling.shortened(vector, request.dimensions) for vector in vectors]
    return EmbeddingResponse(
        data=[Embedding(index=index, embedding=_encoded(request, vector)) for index, vector in enumerate(vectors)],
        model=model,
        usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
    )


def _encoded(request: EmbeddingRequest, vector: Sequence[float]) -> list[float] | str:
    if request.encoding_format == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
