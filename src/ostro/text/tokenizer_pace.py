r"""How long a tokenizer's regexes take, measured. Knows no vocabularies and no requests.

A regex may take time in the square of a run of characters: `\s+$` takes seconds over 32,000 blanks, and hours over a
million, in a thread that nothing can stop. Its text does not tell it from a harmless one: those of most vocabularies
look alike. So when a tokenizer is loaded, its normalizer and pre-tokenizer are tried on runs of characters, each longer
than the one before:

    a tokenizer whose runs are read in no time      any text is encoded at once, as before
    one that took long over a run of N characters   a longer text is first read in pieces of N, and refused if one
                                                    of them takes long too

A text that would take much longer has a run of more than two pieces, and so a piece that is nothing but a part of it.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import tokenizers

from ostro.errors import BadRequest
from ostro.text.library_panics import is_of_library

_LENGTHS = (32, 128, 512, 2048, 8192)
"""Lengths of runs. A regex in cubic time takes 64 times as long for one as for the one before."""
_SLOW = 0.02
"""Seconds of a processor over up to _ENOUGH characters, and in proportion over more. Regexes in linear time take a
tenth, or half if they split a run into single characters."""
_ENOUGH = 2048
_DOUBTFUL = 0.15
"""Share of _SLOW from which on a run of _ENOUGH characters is tried longer, too."""
_MOST = 2.0
"""Seconds for all pieces of a text."""
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
        """Raises BadRequest for a text that would take long."""
        spent = 0.0
        # Short pieces first: what takes very long in them would take even longer in long ones.
        for run in sorted(self.slow):
            for begin in range(0, len(text) if len(text) > run.length else 0, run.length):
                piece, limit = text[begin : begin + run.length] + run.tail, _limit(run.length) / 2
                took = _seconds(self.read, piece)
                spent += took
                if spent > _MOST or (took > limit and _is_slow(self.read, piece, limit)):
                    raise BadRequest(
                        "The model's tokenizer gave up on this text: its patterns take too long over runs of more than "
                        f"{run.length} characters like those from character {begin} on. Shorten them."
                    )


def measured_pace(core: tokenizers.Tokenizer, normalizer: object, pre_tokenizer: object) -> Pace:
    """Tries runs that are longer and longer. The declarations are those of a tokenizer.json."""

    def read(text: str) -> None:
        if core.normalizer is not None:
            text = core.normalizer.normalize_str(text)
        if core.pre_tokenizer is not None:
            core.pre_tokenizer.pre_tokenize_str(text)

    patterns = [*_regexes(normalizer), *_regexes(pre_tokenizer)]
    left = [(run, tail) for run in _runs(patterns) for tail in _tails(patterns)] if patterns else []
    slow: dict[str, int] = {}
    """From which length on runs with this tail are slow."""
    for length in _LENGTHS:
        limit, tried, left = _limit(length), left, []
        least = 0.0 if length < _ENOUGH else _DOUBTFUL * limit
        for run, tail in tried:
            if tail in slow:
                # Further runs like it would only take longer.
                continue
            text = (run * length)[:length] + tail
            took = _seconds(read, text)
            if took > limit and _is_slow(read, text, limit):
                slow[tail] = length
            elif took >= least:
                left.append((run, tail))
    return Pace(
        read, frozenset(SlowRun(long, tail) for tail, short in slow.items() for long in _LENGTHS if long >= short)
    )


def _is_slow(read: Read, text: str, limit: float) -> bool:
    """Whether it takes that long again and again: once may be the machine's doing."""
    return all(_seconds(read, text) > limit for _ in range(2))


def _limit(length: int) -> float:
    return _SLOW * max(1.0, length / _ENOUGH)


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
