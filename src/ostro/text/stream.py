"""Streams one choice's text: detokenises its tokens as they arrive and ends it at stop strings. Knows no engine."""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from ostro.errors import BadRequest
from ostro.sampling_params import SamplingParams
from ostro.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental detokenisation: the texts of `push` and `flush`, joined, equal `Tokenizer.decode` of the ids as a
    continuation of the prompt. Tokens stand for bytes, and a character's bytes may span several tokens, so text is
    emitted once its characters are complete.

    A character that the prompt left unfinished belongs to the prompt: the output does not show its bytes.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        skip_special: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_ids` are special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown_ids = shown_ids
        self._utf8 = _Utf8Decoder(errors="replace")
        # Only a text's very first space is dropped: the output's, only if the prompt has no text.
        self._drop_space = tokenizer.drops_first_space and not any(
            tokenizer.bytes_of((token,), skip_special=skip_special) for token in prompt_ids
        )

    def push(self, ids: Sequence[int]) -> str:
        """The text these tokens complete; it never ends within a character."""
        if self._shown_ids:
            data = self._with_shown(ids)
        else:
            data = self._tokenizer.bytes_of(ids, skip_special=self._skip_special)
        if self._drop_space and data:
            data = data.removeprefix(b" ")
            self._drop_space = False
        return self._utf8.decode(data)

    def _with_shown(self, ids: Sequence[int]) -> bytes:
        return b"".join(
            self._tokenizer.bytes_of((token,), skip_special=self._skip_special and token not in self._shown_ids)
            for token in ids
        )

    def flush(self) -> str:
        """Ends the text: an unfinished character becomes a replacement character."""
        return self._utf8.decode(b"", final=True)


class StopResult(NamedTuple):
    text: str
    """Text that is safe to emit now."""
    stop: str | None
    """The stop string that ended the text, once known."""


class StopMatcher:
    """Finds the earliest stop string, and the longest of those that begin there, however the text is cut into pieces.

        text so far:   … emitted …│held back
                                  └ the tail is the beginning of some stop, so it may not be shown yet

    If a longer or earlier stop may still complete ("ab" has arrived, and both "ab" and "abc" are stops), the decision
    waits for more text or for `flush`.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if not all(stops):
            raise BadRequest("stop must hold non-empty strings.", param="stop")
        self._include_stop = include_stop
        # Longest first: of the stops that begin at one place, the longest wins.
        self._stops = sorted(dict.fromkeys(stops), key=len, reverse=True)
        self._longest = len(self._stops[0]) if self._stops else 0
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> StopResult:
        """Takes the next text. Emits nothing after a match."""
        if not self._stops:
            return StopResult(text, None)
        if self.matched is not None:
            return StopResult("", self.matched)
        text = self._held + text
        live = self._live_from(text)
        start, stop = self._first_stop(text)
        if start < live:
            return self._end(text, start, stop)
        self._held = text[live:]
        return StopResult(text[:live], None)

    def flush(self) -> str:
        """Ends the text: returns what was held back, up to a stop in it. `matched` is final then."""
        text, self._held = self._held, ""
        start, stop = self._first_stop(text)
        return text if start == len(text) else self._end(text, start, stop).text

    def _end(self, text: str, start: int, stop: str) -> StopResult:
        self._held = ""
        self.matched = stop
        return StopResult(text[: start + len(stop) if self._include_stop else start], stop)

    def _first_stop(self, text: str) -> tuple[int, str]:
        """Where the earliest stop begins, and which; the text's length if there is none."""
        # Not a regular expression: one for 64 stops is slow to compile, and to match if they begin alike.
        start, found = len(text), ""
        for stop in self._stops:
            at = text.find(stop, 0, start + len(stop) - 1)
            if at >= 0:
                start, found = at, stop
        return start, found

    def _live_from(self, text: str) -> int:
        """Where the earliest tail begins that more text could complete to a stop; the text's length if none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                tail = text[start:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)


class TextStream:
    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`shown_ids` are special tokens whose text is kept even if the params skip special tokens."""
        skip_special = params.skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, prompt_ids, skip_special=skip_special, shown_ids=shown_ids)
        self._matcher = StopMatcher(params.stop, include_stop=params.include_stop_in_output)
        self._params = params
        self.num_tokens = 0
        """Tokens that make up the text, up to the last one of the stop string."""
        self.stopped_by: str | None = None
        """The stop string that ended the text: later tokens of the sequence are ignored."""

    def push(self, token_ids: Sequence[int], *, last_is_stop: bool = False) -> str:
        """The text that these tokens complete. With `last_is_stop` the last one ended the sequence and is not text."""
        if last_is_stop and not self._params.include_stop_in_output:
            token_ids = token_ids[:-1]
        if not self._params.stop:
            self.num_tokens += len(token_ids)
            return self._detokenizer.push(token_ids)
        text = ""
        for token_id in token_ids:
            self.num_tokens += 1
            text += self._match(self._detokenizer.push((token_id,)))
            if self.stopped_by is not None:
                break
        return text

    def flush(self) -> str:
        """The text that was held back. Call it once no more tokens will come."""
        if self.stopped_by is not None:
            return ""
        text = self._match(self._detokenizer.flush())
        return text if self.stopped_by is not None else text + self._matcher.flush()

    def _match(self, text: str) -> str:
        if not self._params.stop or self.num_tokens < self._params.min_tokens:
            return text
        safe, self.stopped_by = self._matcher.push(text)
        return safe
