"""Reads the events of a stream one by one, and assembles what the same request returns without streaming."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pydantic import ValidationError

from ostro.client.events import DONE, EventDecoder
from ostro.client.failures import error_in, shortened
from ostro.errors import BadAnswer
from ostro.schemas.chat import (
    CalledCustomTool,
    CalledFunction,
    ChatChoice,
    ChatCompletionChunk,
    ChatCompletionResponse,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    ToolCallDelta,
)
from ostro.schemas.completions import CompletionChoice, CompletionChunk, CompletionLogprobs, CompletionResponse
from ostro.schemas.generation import FinishReason, Usage
from ostro.schemas.native import GenerateEvent, GenerateResponse, GenerateUsageEvent, TokenCounts
from ostro.schemas.wire import WireModel

Chunk = TypeVar("Chunk")
Whole = TypeVar("Whole")
Model = TypeVar("Model", bound=WireModel)


def read(schema: type[Model], payload: bytes) -> Model:
    """Parses an API object. Ignores unknown fields, which a newer server may send."""
    try:
        return schema.model_validate_json(payload, extra="ignore")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "all of it"
        raise BadAnswer(
            f"The answer is not an Ostro {schema.__name__} ({place}: {first['msg']}): {shortened(payload)[:100]}. "
            "Is the address that of an Ostro server?"
        ) from error


class Gathering(ABC, Generic[Chunk, Whole]):
    """Assembles one streamed answer."""

    @abstractmethod
    def take(self, payload: bytes) -> Chunk | None:
        """The chunk in an event; None for an event that the stream's reader should not see."""

    @abstractmethod
    def text(self, chunk: Chunk) -> str:
        """New text of the first choice."""

    @abstractmethod
    def whole(self) -> Whole:
        """The non-streamed form of the answer; raises BadAnswer if the stream was incomplete."""


class StreamReader(Generic[Chunk]):
    """Turns the bytes of one stream into chunks."""

    def __init__(self, take: Callable[[bytes], Chunk | None]) -> None:
        """`take` is a Gathering's method."""
        self._take = take
        self._decoder = EventDecoder()
        self._ended = False

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """Raises an error sent by the server, after the chunks before it."""
        for payload in self._decoder.feed(data):
            if payload == DONE:
                self._ended = True
            elif (chunk := self._chunk(payload)) is not None:
                yield chunk

    def finish(self) -> None:
        """Call at the end of the bytes: raises BadAnswer if the stream is incomplete."""
        if not self._ended:
            raise BadAnswer("The stream ended without its end mark: the answer may be cut short. Ask again.")

    def _chunk(self, payload: bytes) -> Chunk | None:
        try:
            return self._take(payload)
        except BadAnswer:
            if (told := error_in(payload)) is None:
                raise
        raise told


@dataclass(slots=True)
class _Choice:
    text: str = ""
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class _GatheredCall:
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_custom: bool = False

    def take(self, delta: ToolCallDelta) -> None:
        self.id += delta.id or ""
        if delta.function is not None:
            self.name += delta.function.name or ""
            self.arguments += delta.function.arguments
        if delta.custom is not None:
            self.is_custom = True
            self.name += delta.custom.name or ""
            self.arguments += delta.custom.input

    def whole(self) -> ChatToolCall:
        if self.is_custom:
            called = CalledCustomTool(name=self.name, input=self.arguments)
            return ChatToolCall(id=self.id, type="custom", custom=called)
        return ChatToolCall(id=self.id, function=CalledFunction(name=self.name, arguments=self.arguments))


@dataclass(slots=True)
class _ChatChoice(_Choice):
    logprobs: ChatLogprobs | None = None
    reasoning: str = ""
    calls: dict[int, _GatheredCall] = field(default_factory=dict)

    def take(self, delta: ChatDelta) -> None:
        self.text += delta.content or ""
        self.reasoning += delta.reasoning_content or ""
        for call in delta.tool_calls or ():
            self.calls.setdefault(call.index, _GatheredCall()).take(call)

    def message(self) -> ChatMessage:
        is_silent = not self.text and bool(self.calls or self.reasoning)
        return ChatMessage(
            content=None if is_silent else self.text,
            reasoning_content=self.reasoning or None,
            reasoning=self.reasoning or None,
            tool_calls=[call.whole() for _, call in sorted(self.calls.items())] or None,
        )


@dataclass(slots=True)
class _CompletionChoice(_Choice):
    logprobs: CompletionLogprobs | None = None


class ChatGathering(Gathering[ChatCompletionChunk, ChatCompletionResponse]):
    def __init__(self) -> None:
        self._choices: dict[int, _ChatChoice] = {}
        self._last: ChatCompletionChunk | None = None
        self._usage: Usage | None = None

    def take(self, payload: bytes) -> ChatCompletionChunk | None:
        chunk = self._last = read(ChatCompletionChunk, payload)
        self._usage = chunk.usage or self._usage
        for part in chunk.choices:
            choice = self._choices.setdefault(part.index, _ChatChoice())
            choice.take(part.delta)
            choice.finish_reason = part.finish_reason or choice.finish_reason
            if part.logprobs is not None:
                before = [] if choice.logprobs is None else choice.logprobs.content
                choice.logprobs = ChatLogprobs(content=before + part.logprobs.content)
        return chunk if chunk.choices else None

    def text(self, chunk: ChatCompletionChunk) -> str:
        return "".join(choice.delta.content or "" for choice in chunk.choices if choice.index == 0)

    def whole(self) -> ChatCompletionResponse:
        last, usage = _ended(self._last), _ended(self._usage)
        choices = [
            ChatChoice(
                index=index,
                message=choice.message(),
                logprobs=choice.logprobs,
                finish_reason=_ended(choice.finish_reason),
            )
            for index, choice in sorted(self._choices.items())
        ]
        return ChatCompletionResponse(id=last.id, created=last.created, model=last.model, choices=choices, usage=usage)


class CompletionGathering(Gathering[CompletionChunk, CompletionResponse]):
    def __init__(self) -> None:
        self._choices: dict[int, _CompletionChoice] = {}
        self._last: CompletionChunk | None = None
        self._usage: Usage | None = None

    def take(self, payload: bytes) -> CompletionChunk | None:
        chunk = self._last = read(CompletionChunk, payload)
        self._usage = chunk.usage or self._usage
        for part in chunk.choices:
            choice = self._choices.setdefault(part.index, _CompletionChoice())
            choice.text += part.text
            choice.finish_reason = part.finish_reason or choice.finish_reason
            choice.logprobs = _joined(choice.logprobs, part.logprobs)
        return chunk if chunk.choices else None

    def text(self, chunk: CompletionChunk) -> str:
        return "".join(choice.text for choice in chunk.choices if choice.index == 0)

    def whole(self) -> CompletionResponse:
        last, usage = _ended(self._last), _ended(self._usage)
        choices = [
            CompletionChoice(
                index=index, text=choice.text, logprobs=choice.logprobs, finish_reason=_ended(choice.finish_reason)
            )
            for index, choice in sorted(self._choices.items())
        ]
        return CompletionResponse(id=last.id, created=last.created, model=last.model, choices=choices, usage=usage)


@dataclass(slots=True)
class GenerateGathering(Gathering[GenerateEvent, GenerateResponse]):
    _texts: dict[int, str] = field(default_factory=dict)
    _usage: TokenCounts | None = None

    def take(self, payload: bytes) -> GenerateEvent | None:
        if payload.startswith(b'{"usage"'):
            self._usage = read(GenerateUsageEvent, payload).usage
            return None
        event = read(GenerateEvent, payload)
        self._texts[event.index] = self._texts.get(event.index, "") + event.text
        return event

    def text(self, chunk: GenerateEvent) -> str:
        return chunk.text if chunk.index == 0 else ""

    def whole(self) -> GenerateResponse:
        usage = _ended(self._usage)
        return GenerateResponse(completions=[text for _, text in sorted(self._texts.items())], usage=usage)


def _ended(value: Whole | None) -> Whole:
    if value is None:
        raise BadAnswer("The stream was not read to its end, so there is no whole answer.")
    return value


def _joined(before: CompletionLogprobs | None, more: CompletionLogprobs | None) -> CompletionLogprobs | None:
    if before is None or more is None:
        return before or more
    tops = None if before.top_logprobs is None else before.top_logprobs + (more.top_logprobs or [])
    return CompletionLogprobs(
        tokens=before.tokens + more.tokens,
        token_logprobs=before.token_logprobs + more.token_logprobs,
        top_logprobs=tops,
        text_offset=before.text_offset + more.text_offset,
    )
