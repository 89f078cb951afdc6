"""Selects the log-probabilities of a message's text, without reasoning and calls. Knows token ids and texts."""

from collections import deque
from collections.abc import Sequence

from ostro.answers.events import Event, Text
from ostro.engine.runner import TokenLogprob
from ostro.frontend.outputs import Choice, Delta
from ostro.text.offsets import TokenSpans
from ostro.text.tokenizer import Tokenizer


class MessageLogprobs:
    """Log-probabilities of one choice, streamed or whole. The selection does not depend on how the text was split."""

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
