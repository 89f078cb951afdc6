"""Writes an answer as an Anthropic message and its stream of events. Knows blocks; knows no sockets.

One writer serves one message. One block is open at a time: the next event either continues or closes it.
"""

from collections.abc import Iterable
from typing import Final, Self

from pydantic_core import from_json

from ostro.answers.events import CallArguments, CallBegin, Event, Reasoning, Text
from ostro.errors import OstroError
from ostro.frontend.outputs import Delta
from ostro.schemas.messages import AssistantMessage
from ostro.server.dialects.chat_turn import SingleChoiceReader
from ostro.server.dialects.messages.framing import DIALECT
from ostro.server.dialects.writing import Counts, Outcome, new_id
from ostro.server.http.sse import typed_event

Json = dict[str, object]

# Some clients drop thinking blocks without a signature. It has no meaning here, and is not checked.
_SIGNATURE = "ostro"


class MessageWriter:
    def __init__(self, *, model: str) -> None:
        self.id = new_id("msg_")
        self._blocks: list[Json] = []
        self._texts: list[str] = []
        """The open block's text so far; it is the last block."""
        self._is_open = False
        self.message: Json = {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._blocks,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, counts: Counts) -> bytes:
        self.message["usage"] = _usage(counts)
        return typed_event("message_start", {"message": self.message})

    def push(self, events: Iterable[Event]) -> bytes:
        return b"".join(map(self._of, events))

    def finish(self, outcome: Outcome) -> bytes:
        data = self._close()
        reason = self._stop_reason(outcome)
        by = outcome.stopped_by if reason == "stop_sequence" else None
        ended: Json = {"stop_reason": reason, "stop_sequence": by}
        self.message |= ended | {"usage": _usage(outcome.counts)}
        told = typed_event("message_delta", {"delta": ended, "usage": self.message["usage"]})
        return data + told + typed_event("message_stop", {})

    def _stop_reason(self, outcome: Outcome) -> str:
        if outcome.reason == "length" and outcome.stopped_by is None:
            return "model_context_window_exceeded" if outcome.context_full else "max_tokens"
        if outcome.reason == "stop" and any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use"
        return "end_turn" if outcome.stopped_by is None else "stop_sequence"

    def _of(self, event: Event) -> bytes:
        match event:
            case Text(text):
                return self._grow("text", text)
            case Reasoning(text):
                return self._grow("thinking", text)
            case CallBegin(id=id, name=name):
                return self._begin({"type": "tool_use", "id": id, "name": name, "input": {}})
            case CallArguments(text=text):
                return self._add({"type": "input_json_delta", "partial_json": text}, text)

    def _grow(self, kind: str, text: str) -> bytes:
        is_open = self._is_open and self._blocks[-1]["type"] == kind
        opened = b""
        if not is_open:
            block: Json = {"type": kind, kind: ""}
            opened = self._begin(block | {"signature": ""} if kind == "thinking" else block)
        return opened + self._add({"type": f"{kind}_delta", kind: text}, text)

    def _begin(self, block: Json) -> bytes:
        closed = self._close()
        self._blocks.append(block)
        self._is_open = True
        return closed + typed_event("content_block_start", {"index": len(self._blocks) - 1, "content_block": block})

    def _add(self, delta: Json, text: str) -> bytes:
        assert self._is_open, "a call begins before its arguments come"
        self._texts.append(text)
        return self._delta(delta)

    def _delta(self, delta: Json) -> bytes:
        return typed_event("content_block_delta", {"index": len(self._blocks) - 1, "delta": delta})

    def _close(self) -> bytes:
        """Closes the open block, if there is one."""
        if not self._is_open:
            return b""
        block, text = self._blocks[-1], "".join(self._texts)
        self._is_open = False
        self._texts.clear()
        data = b""
        match block["type"]:
            case "tool_use":
                block["input"] = _input(text)
            case "thinking":
                block |= {"thinking": text, "signature": _SIGNATURE}
                data = self._delta({"type": "signature_delta", "signature": _SIGNATURE})
            case _:
                block["text"] = text
        return data + typed_event("content_block_stop", {"index": len(self._blocks) - 1})


class MessageAnswerWriter:
    """Writes the engine's output as a message, in events or as a whole."""

    ping: Final = DIALECT.ping
    done: Final = DIALECT.done

    def __init__(self, reader: SingleChoiceReader, *, model: str, request_id: str) -> None:
        self._writer = MessageWriter(model=model)
        self._reader = reader
        self._request_id = request_id
        self._has_begun = False
        self.id = self._writer.id

    @property
    def framing(self) -> Self:
        # Not an attribute: a writer that refers to itself is freed only when garbage is collected.
        return self

    def start(self) -> bytes:
        # The number of cached prompt tokens is only known with the first output.
        return b""

    def of(self, number: int, deltas: Iterable[Delta]) -> bytes:
        events = self._reader.of(deltas)
        begun = b"" if self._has_begun else self._writer.begin(self._reader.counts)
        self._has_begun = True
        return begun + self._writer.push(events)

    def end(self) -> bytes:
        return self._writer.finish(self._reader.outcome())

    def failed(self, error: OstroError) -> bytes:
        return DIALECT.failed(error, self._request_id)

    def whole(self) -> AssistantMessage:
        self.of(0, [self._reader.choice.as_delta()])
        self.end()
        return AssistantMessage.model_validate(self._writer.message)


def _input(arguments: str) -> Json:
    """A call's arguments; if the call was cut off, only the complete ones."""
    try:
        value = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(counts: Counts) -> Json:
    return {
        "input_tokens": counts.prompt - counts.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": counts.cached,
        "output_tokens": counts.generated,
    }
