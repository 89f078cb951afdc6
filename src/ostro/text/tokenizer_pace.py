r"""How long a tokenizer's regexes take, measured. Knows no vocabularies and no requests.

A regex may take time in the square of a run of characters: `\s+$` takes seconds over 32,000 blanks, and hours over a
million, in a thread that nothing can stop. Its text does not tell it from a harmless one: those of most vocabularies
look alike. So when a tokenizer is loaded, its normalizer and pre-tokenizer are tried on runs of characters, each longer
than the one before, for as long as the time grows faster than the run:

    a tokenizer whose runs are read in no time      any text is encoded at once, as before
    one that took long over a run of N characters   a longer text is first read in pieces of N, and refused if one
                                                    of them takes long too

A text slow enough to matter has a run longer than two pieces, so that at least one piece lies within it.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import tokenizers
from tokenizers import models

from ostro.errors import BadRequest
from ostro.text.library_panics import is_of_library

_LENGTHS = (32, 128, 512, 2048, 8192, 32_768, 131_072)
"""Lengths of runs. A regex in linear time takes four times as long for one as for the one before, one in cubic time 64
times."""
_SLOW = 0.02
"""CPU seconds for up to _ENOUGH characters, scaled linearly beyond. Regexes in linear time take a tenth of it, or half
if they split a run into single characters."""
_ENOUGH = 2048
_DOUBTFUL_GROWTH = 4.5
"""Runs of _ENOUGH characters and more that take this many times as long as a run of a quarter of their length are also
tried at greater lengths."""
_MOST_MEASUREMENTS = 3
_FAR = 4.0
_KINDS = " \n\taA0!_é漢"
_MOST_RUNS = 24
_MOST_NEEDED = 64

Read = Callable[[str], None]


class SlowRun(NamedTuple):
    """A run that took long: how long it was, and what it ended in."""

    length: int
    tail: str


@dataclass(frozen=True, slots=True)
class Pace:
    """What a tokenizer was found to take long over. `read` normalises and splits a text."""

    read: Read
    slow: frozenset[SlowRun]

    def check(self, text: str) -> None:
        """Raises BadRequest for a text that would take long. Releases the GIL while it reads."""
        # Short pieces first: what takes very long in them would take even longer in long ones.
        for run in sorted(self.slow):
            if len(text) > run.length:
                self._check_pieces(text, run)

    def _check_pieces(self, text: str, run: SlowRun) -> None:
        limit, spent, num_read = _limit(run.length) / 2, 0.0, 0
        for begin in range(0, len(text), run.length):
            piece = text[begin : begin + run.length] + run.tail
            took = _least_seconds(self.read, piece, limit)
            if took > limit:
                raise BadRequest(
                    "The model's tokenizer gave up on this text: its patterns take too long over long runs such as the "
                    f"one at character {begin}. Break up runs of more than {run.length} characters."
                )
            spent, num_read = spent + took, num_read + len(piece)
            if spent > _limit(num_read):
                raise BadRequest(
                    "The model's tokenizer gave up on this text: its patterns take too long over the first "
                    f"{begin + run.length} characters. Send it in shorter pieces."
                )


def measured_pace(core: tokenizers.Tokenizer, normalizer: object, pre_tokenizer: object) -> Pace:
    """Tries runs that are longer and longer. The declarations are those of a tokenizer.json."""
    read = _reader(core)
    patterns = [*_regexes(normalizer), *_regexes(pre_tokenizer)]
    # With what each took at the length before.
    left = [(run, tail, 0.0) for run in _runs(patterns) for tail in _tails(patterns)] if patterns else []
    slow: dict[str, int] = {}
    """Shortest slow length, by tail."""
    for length in _LENGTHS:
        limit, tried, left = _limit(length), left, []
        for run, tail, before in tried:
            if tail in slow:
                # Further runs like it would only take longer.
                continue
            took = _least_seconds(read, (run * length)[:length] + tail, limit)
            if took > limit:
                slow[tail] = length
            elif length < _ENOUGH or took >= _DOUBTFUL_GROWTH * before:
                left.append((run, tail, took))
    return Pace(
        read, frozenset(SlowRun(long, tail) for tail, short in slow.items() for long in _LENGTHS if long >= short)
    )


def _reader(core: tokenizers.Tokenizer) -> Read:
    """Normalises and splits a text. The library's own calls for that, on a normalizer and a pre-tokenizer, hold the GIL
    for as long as they take; encoding with a vocabulary of one word does not.
    """
    twin = tokenizers.Tokenizer(models.WordLevel({"u": 0}, unk_token="u"))
    if core.normalizer is not None:
        twin.normalizer = core.normalizer
    if core.pre_tokenizer is not None:
        twin.pre_tokenizer = core.pre_tokenizer

    def read(text: str) -> None:
        twin.encode_batch_fast([text], add_special_tokens=False)

    return read


def _limit(length: int) -> float:
    return _SLOW * max(1.0, length / _ENOUGH)


def _least_seconds(read: Read, text: str, limit: float) -> float:
    """Measured again where it is a little over the limit: once may be the machine's doing."""
    least = math.inf
    for _ in range(_MOST_MEASUREMENTS):
        least = min(least, _seconds(read, text))
        if not limit < least <= _FAR * limit:
            break
    return least


def _runs(patterns: list[str]) -> list[str]:
    """Characters of every kind, and what the patterns themselves spell out."""
    own = [match for pattern in patterns for match in re.findall(r"\w+|[^\w\s]", pattern)]
    return list(dict.fromkeys([*_KINDS, *own, *"".join(own)]))[:_MOST_RUNS]


def _tails(patterns: list[str]) -> tuple[str, ...]:
    """What a run ends in. A pattern that may end with a run is slow where it must not; one that needs a character to
    follow is not even tried on a text without it.
    """
    needed = "".join(dict.fromkeys("\n ".join(patterns)))[:_MOST_NEEDED]
    return "", "!", f"\x00\n {needed}"


def _regexes(declared: object) -> Iterator[str]:
    if isinstance(declared, Mapping):
        for name, value in declared.items():
            if name == "Regex" and isinstance(value, str):
                yield value
            yield from _regexes(value)
    elif isinstance(declared, list):
        for value in declared:
            yield from _regexes(value)


def _seconds(read: Read, text: str) -> float:
    """Processor time of this thread, whatever else is running; without limit if the library gave up."""
    began = time.thread_time()
    try:
        read(text)
    except BaseException as raised:
        if not is_of_library(raised):
            raise
        return math.inf
    return time.thread_time() - began
