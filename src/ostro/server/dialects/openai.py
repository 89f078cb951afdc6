"""What OpenAI's dialects share on the wire: the envelope of events, usage, finish reasons, log-probabilities.

Knows wire objects and a tokenizer; knows no engine and no sockets.
"""

import time
from collections.abc import Mapping, Sequence

import msgspec

from ostro.engine.runner import TokenLogprob
from ostro.errors import BadRequest, SequenceFailed
from ostro.frontend.outputs import Choice, Completion
from ostro.schemas.chat import ChatLogprobs, ChatTokenLogprob, TopLogprob
from ostro.schemas.generation import (
    CompletionTokensDetails,
    FinishReason,
    GenerationRequest,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    StreamOptions,
    Usage,
)
from ostro.schemas.wire import WireModel
from ostro.server.http.sse import event
from ostro.text.tokenizer import Tokenizer

# JSON has no infinity; OpenAI uses this for an impossible token.
LOWEST_LOGPROB = -9999.0

_encode = msgspec.json.Encoder(enc_hook=WireModel.model_dump).encode


class Envelope:
    """The fields that all events of one stream share, encoded once."""

    def __init__(
        self, id: str, kind: str, completions: Sequence[Completion], options: StreamOptions | None, *, model: str
    ) -> None:
        self.id = id
        self.model = model
        self.created = int(time.time())
        self._shared = {"id": id, "object": kind, "created": self.created, "model": model}
        self._completions = completions
        self._with_usage = options is not None and options.include_usage
        self._always = options is not None and options.include_usage and options.continuous_usage_stats
        # {"id":…,"model":…  and then  ,"choices":[ … ]}
        self._head = b"data: " + _encode(self._shared).removesuffix(b"}") + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._with_usage else b"]}\n\n"

    def choice(self, fields: Mapping[str, object]) -> bytes:
        return self._head + _encode(fields) + (self._usage_so_far() if self._always else self._tail)

    def usage(self, *, num_reasoning: int | None = None) -> bytes:
        """The usage event; empty unless it was requested."""
        if not self._with_usage:
            return b""
        counted = usage(self._completions, num_reasoning=num_reasoning)
        return event(_encode({**self._shared, "choices": [], "usage": counted}))

    def _usage_so_far(self) -> bytes:
        return b'],"usage":' + _encode(usage(self._completions)) + b"}\n\n"


def check_streamable(request: GenerationRequest) -> None:
    """Raises BadRequest for a field that streams do not support."""
    if request.stream and request.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs cannot be streamed: leave out one of them.", param="prompt_logprobs")


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


# --- log-probabilities ----------------------------------------------------------------------------------------------


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


def prompt_logprobs(top: int | None, completion: Completion, tokenizer: Tokenizer) -> PromptLogprobs | None:
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
    return max(logprob, LOWEST_LOGPROB)
