"""Turns the engine's output into a Responses object, as events or as a whole. Knows no sockets."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ostro.answers.events import Event, Text
from ostro.engine.runner import TokenLogprob
from ostro.errors import OstroError
from ostro.frontend.outputs import Choice, Delta
from ostro.schemas.responses import ResponseObject
from ostro.server.dialects.chat_turn import SingleChoiceReader
from ostro.server.dialects.openai import chat_logprobs
from ostro.server.dialects.responses.framing import DIALECT
from ostro.server.dialects.responses.items import Json
from ostro.server.dialects.responses.writer import ResponseWriter
from ostro.text.offsets import TokenSpans
from ostro.text.tokenizer import Tokenizer


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
        self.framing = self
        writer.response["model"] = model

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
        return [self._told(entries) for entries in self._text_logprobs.of(delta, events)]

    def _told(self, entries: Sequence[TokenLogprob]) -> list[Json]:
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
