"""Output items of a Responses object while they are being written, and their events. Knows no response."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from ostro.answers.events import CallBegin
from ostro.server.dialects.writing import new_id

Json = dict[str, object]
# An event's type and its fields.
ItemEvent = tuple[str, Json]


class OpenItem(Protocol):
    """`item` is what the response lists; it is complete once `end` has been called."""

    item: Json

    def begin(self) -> Iterator[ItemEvent]:
        """Events between `response.output_item.added` and the first text."""

    def grow(self, text: str) -> Iterator[ItemEvent]: ...

    def end(self) -> Iterator[ItemEvent]:
        """Events between the last text and `response.output_item.done`."""


class OpenMessage:
    def __init__(self, index: int, *, with_logprobs: bool) -> None:
        self._content: list[Json] = []
        self.item: Json = {"type": "message", "id": new_id("msg_"), "role": "assistant", "content": self._content}
        self._at: Json = {"item_id": self.item["id"], "output_index": index, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[Json] | None = [] if with_logprobs else None

    def begin(self) -> Iterator[ItemEvent]:
        yield "response.content_part.added", self._at | {"part": self._part("")}

    def grow(self, text: str, logprobs: Sequence[Json] = ()) -> Iterator[ItemEvent]:
        self._texts.append(text)
        if self._logprobs is not None:
            self._logprobs += logprobs
        yield "response.output_text.delta", self._at | {"delta": text, "logprobs": logprobs}

    def end(self) -> Iterator[ItemEvent]:
        text = "".join(self._texts)
        part = self._part(text)
        self._content.append(part)
        yield "response.output_text.done", self._at | {"text": text, "logprobs": self._logprobs or []}
        yield "response.content_part.done", self._at | {"part": part}

    def _part(self, text: str) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs or []}


class OpenReasoning:
    """Reasoning as the item's content."""

    def __init__(self, index: int) -> None:
        self._content: list[Json] = []
        self.item: Json = {"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": self._content}
        self._at: Json = {"item_id": self.item["id"], "output_index": index, "content_index": 0}
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def begin(self) -> Iterator[ItemEvent]:
        yield "response.content_part.added", self._at | {"part": {"type": "reasoning_text", "text": ""}}

    def grow(self, text: str) -> Iterator[ItemEvent]:
        self._texts.append(text)
        yield "response.reasoning_text.delta", self._at | {"delta": text}

    def end(self) -> Iterator[ItemEvent]:
        part: Json = {"type": "reasoning_text", "text": self.text}
        self._content.append(part)
        yield "response.reasoning_text.done", self._at | {"text": self.text}
        yield "response.content_part.done", self._at | {"part": part}


class OpenSummary:
    """Reasoning as the item's summary."""

    def __init__(self, index: int) -> None:
        self._summary: list[Json] = []
        self.item: Json = {"type": "reasoning", "id": new_id("rs_"), "summary": self._summary}
        self._at: Json = {"item_id": self.item["id"], "output_index": index, "summary_index": 0}
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def begin(self) -> Iterator[ItemEvent]:
        yield "response.reasoning_summary_part.added", self._at | {"part": {"type": "summary_text", "text": ""}}

    def grow(self, text: str) -> Iterator[ItemEvent]:
        self._texts.append(text)
        yield "response.reasoning_summary_text.delta", self._at | {"delta": text}

    def end(self) -> Iterator[ItemEvent]:
        part: Json = {"type": "summary_text", "text": self.text}
        self._summary.append(part)
        yield "response.reasoning_summary_text.done", self._at | {"text": self.text}
        yield "response.reasoning_summary_part.done", self._at | {"part": part}


class OpenCall:
    def __init__(self, index: int, call: CallBegin, namespace: str | None, name: str) -> None:
        if call.is_custom:
            kind, id_kind, self._field, self._event = "custom_tool_call", "ctc_", "input", "custom_tool_call_input"
        else:
            kind, id_kind, self._field, self._event = "function_call", "fc_", "arguments", "function_call_arguments"
        self.item: Json = {"type": kind, "id": new_id(id_kind), "call_id": call.id, "name": name, self._field: ""}
        if namespace is not None:
            self.item["namespace"] = namespace
        self._at: Json = {"item_id": self.item["id"], "output_index": index}
        self._texts: list[str] = []

    def begin(self) -> Iterator[ItemEvent]:
        return iter(())

    def grow(self, text: str) -> Iterator[ItemEvent]:
        self._texts.append(text)
        yield f"response.{self._event}.delta", self._at | {"delta": text}

    def end(self) -> Iterator[ItemEvent]:
        whole = self.item[self._field] = "".join(self._texts)
        done: Json = {self._field: whole}
        if self._field == "arguments":
            done["name"] = self.item["name"]
        yield f"response.{self._event}.done", self._at | done
