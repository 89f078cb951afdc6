"""Turns deltas into stream events, in OpenAI's order: role, text, finish reason, usage. Knows no sockets.

This runs for every token of every stream, so an event is assembled from bytes prepared once per stream; only the choice
in its middle is encoded each time.
"""

import codecs
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from ostro.answers.events import CallArguments, CallBegin, Event, Reasoning, Text
from ostro.engine.runner import TokenLogprob
from ostro.frontend.outputs import Choice, Completion, Delta
from ostro.schemas import ChatCompletionRequest, CompletionRequest, StreamOptions
from ostro.server.dialects.chat_turn import AnswerStream
from ostro.server.dialects.openai import (
    chat_logprobs,
    echoed_prompt,
    finish_reason,
    new_id,
    token_arrays,
    usage,
    wire_reason,
)
from ostro.server.http.sse import OPENAI, Framing, event
from ostro.text.offsets import text_offsets
from ostro.text.tokenizer import Tokenizer

_encode = msgspec.json.Encoder().encode
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Chunks(Protocol):
    """Writes one answer's events."""

    @property
    def id(self) -> str | None:
        """The answer's id, if it has one."""

    @property
    def framing(self) -> Framing: ...

    def start(self) -> bytes:
        """The events before the first text."""

    def of(self, number: int, deltas: Iterable[Delta]) -> bytes:
        """The events for new deltas of prompt `number`. Raises SequenceFailed if a choice failed."""

    def end(self) -> bytes:
        """The events after the last text."""


class _Envelope:
    """The fields that all events of one stream share."""

    def __init__(
        self, id: str, kind: str, completions: Sequence[Completion], options: StreamOptions | None, *, model: str
    ) -> None:
        self._shared = {"id": id, "object": kind, "created": int(time.time()), "model": model}
        self._completions = completions
        self._with_usage = options is not None and options.include_usage
        self._always = options is not None and options.include_usage and options.continuous_usage_stats
        # {"id":…,"model":…  and then  ,"choices":[ … ]}
        self._head = b"data: " + _encode(self._shared).removesuffix(b"}") + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self._with_usage else b"]}\n\n"

    def choice(self, fields: dict[str, object]) -> bytes:
        return self._head + _encode(fields) + (self._usage_so_far() if self._always else self._tail)

    def usage(self, *, num_reasoning: int | None = None) -> bytes:
        """The usage event; empty unless it was requested."""
        if not self._with_usage:
            return b""
        counted = usage(self._completions, num_reasoning=num_reasoning).model_dump()
        return event(_encode({**self._shared, "choices": [], "usage": counted}))

    def _usage_so_far(self) -> bytes:
        return b'],"usage":' + _encode(usage(self._completions).model_dump()) + b"}\n\n"


class ChatChunks:
    """A chat answer that is plain text: its deltas are written unparsed."""

    framing: Final = OPENAI

    def __init__(
        self,
        request: ChatCompletionRequest,
        completion: Completion,
        tokenizer: Tokenizer,
        *,
        model: str,
        strict: bool = False,
    ) -> None:
        self._completion = completion
        self._strict = strict
        self._tokenizer = tokenizer
        self.id = new_id("chatcmpl-")
        self._envelope = _Envelope(self.id, "chat.completion.chunk", [completion], request.stream_options, model=model)

    def start(self) -> bytes:
        opening = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(choice.index, opening) for choice in self._completion.choices)

    def of(self, number: int, deltas: Iterable[Delta]) -> bytes:
        return b"".join(map(self._of, deltas))

    def end(self) -> bytes:
        return self._envelope.usage()

    def _of(self, delta: Delta) -> bytes:
        data = b""
        if delta.text or delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, self._tokenizer)
            data = self._chunk(
                delta.index, {"content": delta.text}, None if logprobs is None else logprobs.model_dump()
            )
        if delta.finish_reason is not None:
            reason = finish_reason(self._completion.choices[delta.index], strict=self._strict)
            data += self._chunk(delta.index, {}, None, reason)
        return data

    def _chunk(
        self,
        index: int,
        delta: Mapping[str, object],
        logprobs: dict[str, object] | None = None,
        reason: str | None = None,
    ) -> bytes:
        return self._envelope.choice({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})


class AnswerChunks(ChatChunks):
    """A chat answer that is parsed while it streams: reasoning, text and tool calls, each under its own name."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        completion: Completion,
        answers: AnswerStream,
        tokenizer: Tokenizer,
        *,
        model: str,
        strict: bool = False,
    ) -> None:
        super().__init__(request, completion, tokenizer, model=model, strict=strict)
        self._answers = answers
        self._unopened = {choice.index for choice in completion.choices}
        self._custom_calls: set[tuple[int, int]] = set()
        """Calls of custom tools, by choice and call index: OpenAI has a different name for their input."""

    def start(self) -> bytes:
        # The first chunk of a choice says whether there is content, so it waits for the first event.
        return b""

    def end(self) -> bytes:
        return self._envelope.usage(num_reasoning=self._answers.num_reasoning(self._tokenizer))

    def _of(self, delta: Delta) -> bytes:
        index, events = delta.index, self._answers.events(delta)
        logprobs = chat_logprobs(delta.logprobs, self._tokenizer)
        # A delta's log-probabilities are sent with the first of its events.
        told = None if not delta.logprobs or logprobs is None else logprobs.model_dump()
        parts = [self._part(index, event) for event in events]
        if not parts and told is not None:
            parts = [{}]
        data = b""
        if index in self._unopened and (parts or delta.finish_reason is not None):
            self._unopened.remove(index)
            is_text = not events or isinstance(events[0], Text)
            data = self._chunk(index, {"role": "assistant", "content": "" if is_text else None})
        for part in parts:
            data += self._chunk(index, part, told)
            told = None
        if delta.finish_reason is not None:
            reason = wire_reason(self._answers.finish_reason(index), strict=self._strict)
            data += self._chunk(index, {}, None, reason)
        return data

    def _part(self, choice: int, event: Event) -> dict[str, object]:
        match event:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text, "reasoning": text}
            case CallBegin(index, id, name, is_custom):
                if is_custom:
                    self._custom_calls.add((choice, index))
                    begun: dict[str, object] = {"type": "custom", "custom": {"name": name, "input": ""}}
                else:
                    begun = {"type": "function", "function": {"name": name, "arguments": ""}}
                return {"tool_calls": [{"index": index, "id": id, **begun}]}
            case CallArguments(index, text):
                if (choice, index) in self._custom_calls:
                    return {"tool_calls": [{"index": index, "custom": {"input": text}}]}
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


class CompletionChunks:
    """Completions of one or several prompts, each with its choices."""

    framing: Final = OPENAI

    def __init__(
        self,
        request: CompletionRequest,
        completions: Sequence[Completion],
        tokenizer: Tokenizer,
        *,
        model: str,
        strict: bool = False,
    ) -> None:
        self.id = new_id("cmpl-")
        self._envelope = _Envelope(self.id, "text_completion", completions, request.stream_options, model=model)
        self._choices = [
            [
                _CompletionChoice(request, number, completion, choice, tokenizer, strict=strict)
                for choice in completion.choices
            ]
            for number, completion in enumerate(completions)
        ]

    def start(self) -> bytes:
        return b""

    def of(self, number: int, deltas: Iterable[Delta]) -> bytes:
        choices = self._choices[number]
        return b"".join(
            self._envelope.choice(fields) for delta in deltas if (fields := choices[delta.index].of(delta)) is not None
        )

    def end(self) -> bytes:
        return self._envelope.usage()


class _CompletionChoice:
    """One choice of a completion: whether its prompt has been echoed, and the text offset of its next token."""

    def __init__(
        self,
        request: CompletionRequest,
        number: int,
        completion: Completion,
        choice: Choice,
        tokenizer: Tokenizer,
        *,
        strict: bool,
    ) -> None:
        self._strict = strict
        self._top = request.logprobs
        self._completion = completion
        self._choice = choice
        self._tokenizer = tokenizer
        self._index = number * request.n + choice.index
        self._echo = echoed_prompt(request, number, completion, tokenizer) if request.echo else None
        self._base = self._at = len(self._echo or "")
        self._skip_special = request.skip_special_tokens
        self._decoder = _Utf8Decoder(errors="replace")

    def of(self, delta: Delta) -> dict[str, object] | None:
        """The choice's part of an event; None if there is nothing to report."""
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return None
        reason = None if delta.finish_reason is None else finish_reason(self._choice, strict=self._strict)
        text = delta.text
        ids: Sequence[int] = delta.token_ids
        entries: Sequence[TokenLogprob | None] = delta.logprobs or ()
        offsets = [] if self._top is None else self._offsets(delta)
        if self._echo is not None:
            # All of the prompt's log-probabilities are known before the first text.
            prompt = self._completion
            ids = [*prompt.prompt_ids, *ids]
            entries = [*(prompt.prompt_logprobs or ()), *entries]
            offsets = [*text_offsets(prompt.prompt_ids, self._echo, self._tokenizer), *offsets]
            text = self._echo + text
            self._echo = None
        logprobs = None
        if self._top is not None:
            logprobs = token_arrays(self._top, ids, entries, offsets, self._tokenizer).model_dump()
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _offsets(self, delta: Delta) -> list[int]:
        """Text offsets of the tokens. Those that a stop string has cut off get the offset of the end."""
        offsets = [self._advance(token) for token in delta.token_ids]
        if delta.finish_reason is None:
            return offsets
        end = self._base + len(self._choice.text)
        return [min(at, end) for at in offsets]

    def _advance(self, token: int) -> int:
        at = self._at
        self._at += len(self._decoder.decode(self._tokenizer.bytes_of((token,), skip_special=self._skip_special)))
        return at
