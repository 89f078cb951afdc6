"""Writes an answer as a Responses object and its stream of events. Knows items; knows no sockets.

One writer serves one response. It is fed an answer's events and returns the stream's events in order, numbered without
gaps; `response` is the object so far. One item is open at a time: the next event either continues or closes it, and its
closing events repeat the sum of its deltas.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Self

from ostro.answers.events import CallArguments, CallBegin, Event, Reasoning, Text
from ostro.engine.runner import TokenLogprob
from ostro.errors import OstroError
from ostro.frontend.outputs import Choice, Delta
from ostro.schemas.responses import ChoiceWord, CreateResponse, ResponseObject
from ostro.server.dialects.chat_turn import SingleChoiceReader
from ostro.server.dialects.openai import chat_logprobs
from ostro.server.dialects.responses.framing import DIALECT
from ostro.server.dialects.responses.items import (
    Json,
    OpenCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
    OpenSummary,
)
from ostro.server.dialects.responses.request import OfferedTools, sealed
from ostro.server.dialects.writing import Counts, Outcome, new_id
from ostro.server.http.sse import typed_event
from ostro.text.offsets import TokenSpans
from ostro.text.tokenizer import Tokenizer

_CODES = {429: "rate_limit_exceeded", 503: "server_is_overloaded"}


class ResponseWriter:
    def __init__(
        self,
        request: CreateResponse,
        *,
        model: str,
        is_stored: bool = False,
    ) -> None:
        self.id = new_id("resp_")
        self._namespaces: Mapping[str, tuple[str, str]] = {}
        self._with_logprobs = request.wants_logprobs
        self._seals = "reasoning.encrypted_content" in request.include
        self._reasoning = OpenSummary if request.reasoning.wanted_summary else OpenReasoning
        self._num_events = 0
        self._output: list[Json] = []
        self._open: OpenItem | None = None
        self.response = _frame(request, self.id, model, is_stored=is_stored) | {"output": self._output}

    def offer(self, tools: OfferedTools) -> None:
        """Sets the request's tools, before the first event: reading them takes its time."""
        self._namespaces = tools.namespaces
        self.response["tools"] = tools.shown

    def queue(self) -> bytes:
        """For a background response, before it begins."""
        self.response["status"] = "queued"
        return self._whole("response.created") + self._whole("response.queued")

    def begin(self) -> bytes:
        created = b"" if self._num_events else self._whole("response.created")
        self.response["status"] = "in_progress"
        return created + self._whole("response.in_progress")

    def push(self, events: Iterable[Event], logprobs: Sequence[Sequence[Json]] = ()) -> bytes:
        """`logprobs` are those of the tokens behind each of the events, if any are wanted."""
        behind = iter(logprobs)
        return b"".join(self._of(event, next(behind, ())) for event in events)

    def finish(self, outcome: Outcome) -> bytes:
        is_cut = outcome.reason == "length"
        status = "incomplete" if is_cut else "completed"
        opened = b"" if self._output else self._begin(self._new_message())
        data = opened + self._close(status)
        self.response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "completed_at": None if is_cut else _now(self.response["created_at"]),
            "usage": _usage(outcome.counts),
        }
        return data + self._whole(f"response.{status}")

    def fail(self, error: OstroError) -> bytes:
        """Ends the response with an error."""
        data = self._close("incomplete")
        code = error.openai_code if error.http_status < 429 else _CODES.get(error.http_status)
        failure = {"code": code or "server_error", "message": error.public}
        self.response |= {"status": "failed", "error": failure}
        return data + self._whole("response.failed")

    def cancel(self) -> bytes:
        data = self._close("incomplete")
        self.response["status"] = "cancelled"
        # The API has no event for this; the status of the response shows it.
        return data + self._whole("response.failed")

    def _of(self, event: Event, logprobs: Sequence[Json]) -> bytes:
        match event:
            case Text(text):
                opened = b"" if isinstance(self._open, OpenMessage) else self._begin(self._new_message())
                assert isinstance(self._open, OpenMessage)
                return opened + self._events(self._open.grow(text, logprobs))
            case Reasoning(text):
                is_open = isinstance(self._open, OpenReasoning | OpenSummary)
                opened = b"" if is_open else self._begin(self._reasoning(len(self._output)))
                return opened + self._grow(text)
            case CallBegin():
                namespace, name = self._namespaces.get(event.name, (None, event.name))
                return self._begin(OpenCall(len(self._output), event, namespace, name))
            case CallArguments(text=text):
                return self._grow(text)

    def _new_message(self) -> OpenMessage:
        return OpenMessage(len(self._output), with_logprobs=self._with_logprobs)

    def _begin(self, item: OpenItem) -> bytes:
        closed = self._close("completed")
        item.item["status"] = "in_progress"
        added = self._event("response.output_item.added", {"output_index": len(self._output), "item": item.item})
        self._output.append(item.item)
        self._open = item
        return closed + added + self._events(item.begin())

    def _grow(self, text: str) -> bytes:
        assert self._open is not None, "a call begins before its arguments come"
        return self._events(self._open.grow(text))

    def _close(self, status: str) -> bytes:
        """Closes the open item, if there is one."""
        if (item := self._open) is None:
            return b""
        self._open = None
        item.item["status"] = status
        data = self._events(item.end())
        if self._seals and isinstance(item, OpenReasoning | OpenSummary):
            item.item["encrypted_content"] = sealed(item.text)
        done: Json = {"output_index": len(self._output) - 1, "item": item.item}
        return data + self._event("response.output_item.done", done)

    def _events(self, events: Iterable[tuple[str, Json]]) -> bytes:
        return b"".join(self._event(kind, fields) for kind, fields in events)

    def _whole(self, kind: str) -> bytes:
        return self._event(kind, {"response": self.response})

    def _event(self, kind: str, fields: Json) -> bytes:
        number = self._num_events
        self._num_events += 1
        return typed_event(kind, {"sequence_number": number} | fields)


class ResponseAnswerWriter:
    """Writes the engine's output as a response. `keep` is called once the response has ended without an error."""

    ping: Final = DIALECT.ping
    done: Final = DIALECT.done

    def __init__(
        self,
        writer: ResponseWriter,
        reader: SingleChoiceReader,
        tokenizer: Tokenizer,
        *,
        model: str,
        keep: Callable[[], None],
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._tokenizer = tokenizer
        self._text_logprobs = TextLogprobs(reader.choice, tokenizer)
        self._keep = keep
        self._has_begun = False
        self.id = writer.id
        writer.response["model"] = model

    @property
    def framing(self) -> Self:
        # Not an attribute: a writer that refers to itself is freed only when garbage is collected.
        return self

    def start(self) -> bytes:
        # The first event waits for the first output: if there is none, no event must have been numbered.
        return b""

    def of(self, number: int, deltas: Iterable[Delta]) -> bytes:
        # Read first: if that fails, no event must have been numbered that is never sent.
        read = [(events := self._reader.of([delta]), self._logprobs(delta, events)) for delta in deltas]
        begun = b"" if self._has_begun else self._writer.begin()
        self._has_begun = True
        return begun + b"".join(self._writer.push(events, logprobs) for events, logprobs in read)

    def end(self) -> bytes:
        data = self._writer.finish(self._reader.outcome())
        self._keep()
        return data

    def failed(self, error: OstroError) -> bytes:
        return self._writer.fail(error)

    def whole(self) -> ResponseObject:
        self.of(0, [self._reader.choice.as_delta()])
        self.end()
        return ResponseObject.model_validate(self._writer.response)

    def _logprobs(self, delta: Delta, events: Sequence[Event]) -> list[list[Json]]:
        if delta.logprobs is None:
            return []
        return [self._encoded(entries) for entries in self._text_logprobs.of(delta, events)]

    def _encoded(self, entries: Sequence[TokenLogprob]) -> list[Json]:
        logprobs = chat_logprobs(entries, self._tokenizer)
        return [] if logprobs is None else [entry.model_dump() for entry in logprobs.content]


class TextLogprobs:
    """Selects the log-probabilities of one choice's text, without reasoning and calls. The selection does not depend on
    how the text was split.
    """

    def __init__(self, choice: Choice, tokenizer: Tokenizer) -> None:
        self._choice = choice
        self._special_ids = tokenizer.special_ids
        self._spans = TokenSpans(tokenizer)
        self._entries: deque[TokenLogprob] = deque()
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()

    def of(self, delta: Delta, events: Sequence[Event]) -> list[list[TokenLogprob]]:
        """For each event of the delta: the tokens of a text event, and none for others."""
        self._entries += delta.logprobs or ()
        ended = delta.finish_reason is not None
        for begin, end in self._spans.push(delta.token_ids, self._choice.text, ended=ended):
            self._waiting.append((begin, end, self._entries.popleft()))
        return [self._within(event) if isinstance(event, Text) else [] for event in events]

    def _within(self, text: Text) -> list[TokenLogprob]:
        """Tokens that overlap the text. One that also overlaps the next text counts only here."""
        found = []
        while self._waiting and self._waiting[0][0] < text.begin + len(text.text):
            begin, end, entry = self._waiting.popleft()
            is_part = end > text.begin or begin == end == text.begin
            if is_part and entry.token_id not in self._special_ids:
                found.append(entry)
        return found


def _now(began: object) -> int:
    """The time, but never before the beginning: the clock may have been set back meanwhile."""
    assert isinstance(began, int)
    return max(began, int(time.time()))


def _frame(request: CreateResponse, id: str, model: str, *, is_stored: bool) -> Json:
    """The response before it begins: the request's settings, and nothing else yet."""
    choice = request.tool_choice
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "usage": None,
        "instructions": request.instructions,
        "previous_response_id": request.previous_response_id,
        "max_output_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_logprobs": request.top_logprobs or 0,
        "text": request.text.model_dump(by_alias=True) | {"verbosity": "medium"},
        "tools": [],
        "tool_choice": choice.type if isinstance(choice, ChoiceWord) else choice.model_dump(exclude_none=True),
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": {"effort": request.reasoning.effort, "summary": request.reasoning.wanted_summary},
        "truncation": request.truncation,
        "store": is_stored,
        "background": request.background,
        "metadata": request.metadata,
        "user": request.user,
    }


def _usage(counts: Counts) -> Json:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
        "output_tokens": counts.generated,
        "output_tokens_details": {"reasoning_tokens": counts.reasoning},
        "total_tokens": counts.prompt + counts.generated,
    }
