"""Writes a chat answer: as stream events, in OpenAI's order (role, text, finish reason, usage), or as a whole, put
together from the same chunks. Knows no sockets.

This runs for every token of every stream, so an event is assembled from bytes prepared once per stream; only the choice
in its middle is encoded each time.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, Required, TypedDict

from ostro.answers.events import CallArguments, CallBegin, Event, Reasoning, Text
from ostro.frontend.outputs import Choice, Delta
from ostro.schemas.chat import (
    CalledCustomTool,
    CalledFunction,
    ChatChoice,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
)
from ostro.schemas.generation import FinishReason
from ostro.server.dialects.chat.framing import DIALECT
from ostro.server.dialects.chat_turn import CompletionReader
from ostro.server.dialects.openai import Envelope, chat_logprobs, finish_reason, prompt_logprobs, usage, wire_reason
from ostro.server.dialects.writing import new_id
from ostro.text.tokenizer import Tokenizer


class _FunctionPart(TypedDict, total=False):
    name: str
    arguments: Required[str]


class _CustomPart(TypedDict, total=False):
    name: str
    input: Required[str]


class _CallPart(TypedDict, total=False):
    index: Required[int]
    id: str
    type: Literal["function", "custom"]
    function: _FunctionPart
    custom: _CustomPart


class _Part(TypedDict, total=False):
    """A chunk's delta."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str
    reasoning: str
    tool_calls: list[_CallPart]


class _Chunk(TypedDict):
    """The choice in the middle of an event."""

    index: int
    delta: _Part
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatWriter:
    """Writes an answer that is plain text: its deltas are written unparsed."""

    framing: Final = DIALECT

    def __init__(
        self,
        request: ChatCompletionRequest,
        reader: CompletionReader,
        tokenizer: Tokenizer,
        *,
        model: str,
        strict: bool = False,
    ) -> None:
        self._request = request
        self._completion = reader.completion
        self._reader = reader
        self._strict = strict
        self._tokenizer = tokenizer
        self.id = new_id("chatcmpl-")
        self._envelope = Envelope(
            self.id, "chat.completion.chunk", [self._completion], request.stream_options, model=model
        )

    def start(self) -> bytes:
        chunks = (self._opening(choice.index) for choice in self._completion.choices)
        return b"".join(self._envelope.choice(chunk) for chunk in chunks if chunk is not None)

    def of(self, number: int, deltas: Iterable[Delta]) -> bytes:
        encode = self._envelope.choice
        return b"".join([encode(chunk) for delta in deltas for chunk in self._chunks(delta)])

    def end(self) -> bytes:
        return self._envelope.usage(num_reasoning=self._num_reasoning())

    def whole(self) -> ChatCompletionResponse:
        return ChatCompletionResponse(
            id=self.id,
            created=self._envelope.created,
            model=self._envelope.model,
            choices=[self._whole_choice(choice) for choice in self._completion.choices],
            usage=usage([self._completion], num_reasoning=self._num_reasoning()),
            prompt_logprobs=prompt_logprobs(self._request.prompt_logprobs, self._completion, self._tokenizer),
        )

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        opening = self._opening(choice.index)
        chunks = self._chunks(choice.as_delta())
        return _gathered(chunks if opening is None else [opening, *chunks], with_logprobs=choice.logprobs is not None)

    def _num_reasoning(self) -> int | None:
        return None

    def _opening(self, index: int) -> _Chunk | None:
        """A choice's chunk before its first text, if that can be told in advance."""
        return _chunk(index, {"role": "assistant", "content": ""})

    def _chunks(self, delta: Delta) -> list[_Chunk]:
        if not (delta.text or delta.logprobs):
            return self._last(delta)
        logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._tokenizer)
        part: _Part = {"content": delta.text}
        chunk: _Chunk = {"index": delta.index, "delta": part, "logprobs": logprobs, "finish_reason": None}
        return [chunk] if delta.finish_reason is None else [chunk, *self._last(delta)]

    def _last(self, delta: Delta) -> list[_Chunk]:
        """The chunk with the finish reason, if the delta is the last."""
        if delta.finish_reason is None:
            return []
        reason = finish_reason(self._completion.choices[delta.index], strict=self._strict)
        return [_chunk(delta.index, {}, None, reason)]


class ParsedChatWriter(ChatWriter):
    """Writes an answer that is parsed as it comes: reasoning, text and tool calls, each under its own name."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        reader: CompletionReader,
        tokenizer: Tokenizer,
        *,
        model: str,
        strict: bool = False,
    ) -> None:
        super().__init__(request, reader, tokenizer, model=model, strict=strict)
        self._unopened = {choice.index for choice in self._completion.choices}
        self._custom_calls: set[tuple[int, int]] = set()
        """Calls of custom tools, by choice and call index: OpenAI has a different name for their input."""

    def _num_reasoning(self) -> int | None:
        return self._reader.num_reasoning(self._tokenizer)

    def _opening(self, index: int) -> _Chunk | None:
        # The first chunk of a choice says whether there is content, so it waits for the first event.
        return None

    def _chunks(self, delta: Delta) -> list[_Chunk]:
        index, events = delta.index, self._reader.events(delta)
        # A delta's log-probabilities are sent with the first of its events.
        logprobs = chat_logprobs(delta.logprobs, self._tokenizer) if delta.logprobs else None
        parts = [self._part(index, event) for event in events]
        if not parts and logprobs is not None:
            parts = [{}]
        chunks = []
        if index in self._unopened and (parts or delta.finish_reason is not None):
            self._unopened.remove(index)
            is_text = not events or isinstance(events[0], Text)
            chunks.append(_chunk(index, {"role": "assistant", "content": "" if is_text else None}))
        for part in parts:
            chunks.append(_chunk(index, part, logprobs))
            logprobs = None
        if delta.finish_reason is not None:
            reason = wire_reason(self._reader.finish_reason(index), strict=self._strict)
            chunks.append(_chunk(index, {}, None, reason))
        return chunks

    def _part(self, choice: int, event: Event) -> _Part:
        match event:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content": text, "reasoning": text}
            case CallBegin(index, id, name, is_custom):
                if is_custom:
                    self._custom_calls.add((choice, index))
                    custom: _CustomPart = {"name": name, "input": ""}
                    return {"tool_calls": [{"index": index, "id": id, "type": "custom", "custom": custom}]}
                function: _FunctionPart = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
            case CallArguments(index, text):
                if (choice, index) in self._custom_calls:
                    return {"tool_calls": [{"index": index, "custom": {"input": text}}]}
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def chat_writer(
    request: ChatCompletionRequest, reader: CompletionReader, tokenizer: Tokenizer, *, model: str, strict: bool = False
) -> ChatWriter:
    kind = ChatWriter if reader.is_plain else ParsedChatWriter
    return kind(request, reader, tokenizer, model=model, strict=strict)


def _chunk(index: int, part: _Part, logprobs: ChatLogprobs | None = None, reason: FinishReason | None = None) -> _Chunk:
    return {"index": index, "delta": part, "logprobs": logprobs, "finish_reason": reason}


# --- the whole, from its chunks -------------------------------------------------------------------------------------


def _gathered(chunks: Sequence[_Chunk], *, with_logprobs: bool) -> ChatChoice:
    """A choice, put together from all of its chunks as a client would."""
    parts = [chunk["delta"] for chunk in chunks]
    contents = [content for part in parts if (content := part.get("content")) is not None]
    reasoning = "".join(part.get("reasoning", "") for part in parts) or None
    entries = [entry for chunk in chunks if chunk["logprobs"] is not None for entry in chunk["logprobs"].content]
    reason = chunks[-1]["finish_reason"]
    assert reason is not None, "the last chunk has the finish reason"
    return ChatChoice(
        index=chunks[-1]["index"],
        message=ChatMessage(
            content="".join(contents) if contents else None,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=list(_calls(parts)) or None,
        ),
        logprobs=ChatLogprobs(content=entries) if with_logprobs else None,
        finish_reason=reason,
    )


def _calls(parts: Iterable[_Part]) -> Iterator[ChatToolCall]:
    pieces: dict[int, list[_CallPart]] = {}
    for part in parts:
        for call in part.get("tool_calls", ()):
            pieces.setdefault(call["index"], []).append(call)
    for first, *rest in pieces.values():
        if "custom" in first:
            given = "".join(each["custom"]["input"] for each in rest)
            called = CalledCustomTool(name=first["custom"]["name"], input=given)
            yield ChatToolCall(id=first["id"], type="custom", custom=called)
        else:
            arguments = "".join(each["function"]["arguments"] for each in rest)
            function = CalledFunction(name=first["function"]["name"], arguments=arguments)
            yield ChatToolCall(id=first["id"], function=function)
