"""Guesses several tokens of a sequence, for one step to verify at once. Knows no schedule and no device.

A draft is accepted if it equals the token that is sampled in its place, which is a function of the seed and the
position. So drafts never change what is generated, only how many tokens a step generates:

    known            a b c
    drafts                 d e f          the step computes c d e f
    sampled                d e x y        after c, d, e and f: d and e are accepted, x is new, y is void

Drafts continue the longest match of the sequence's last tokens (`engine.drafter`) in its own tokens, or in the text
that the request predicts. Whether they pay is decided at every step, by what was measured: how often tokens after a
match of this length are right, which is also learned from guesses that were not drafted, and what further rows cost
(`engine.costs`). Where nothing repeats, or the batch is large, no drafts are made.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from heapq import merge
from itertools import islice, repeat
from typing import NamedTuple, Protocol

from ostro.engine.costs import StepCosts
from ostro.engine.drafter import Drafter, Guess, Rates, TextIndex
from ostro.engine.runner import RunnerSpec
from ostro.engine.sequence import Sequence

_log = logging.getLogger(__name__)

# The speedup that drafts must promise, because estimates are never exact.
_WORTHWHILE = 1.05
# The speedup they must promise if the device has to wait for the host, which then prepares no step meanwhile.
_WORTH_WAITING = 1.15
# A few more rows may cost little more than one, so the search only stops below this share of the best.
_GIVEN_UP = 0.8
# Numbers of drafts that are tried when all are assumed to be right.
_TRIED = (1, 3, 7, 15)
# Weight that older observations keep after each new one, over all sequences.
_KEPT = 0.998


class Drafts(NamedTuple):
    """What a step should verify for one sequence."""

    token_ids: tuple[int, ...]
    is_predicted: bool = False
    """Whether they come from the text that the request predicts."""


class Speculation(Protocol):
    """Decides what to draft. Whatever it decides, the same tokens are generated."""

    def begin(self, choices: Seq[Sequence]) -> None:
        """Prepares for the choices of a new request."""
        ...

    def draft(self, asking: Seq[tuple[Sequence, int]], rows: int, most: int) -> Mapping[int, Drafts]:
        """Drafts by sequence id: for each of those asking at most as many as it says, and at most `most` in all. All
        tokens of these sequences are known. Without drafts, the step computes one row for each of `rows` sequences.
        """
        ...

    def waits(self, asking: Seq[tuple[Sequence, int]], rows: int, most: int) -> bool:
        """Whether the next step should wait for the results of the one under way, so that it can have drafts. One token
        of each of these sequences is pending; otherwise as for `draft`.
        """
        ...

    def learn(self, seq: Sequence, token_ids: Seq[int]) -> None:
        """Takes in what a step generated, with or without drafts; all of it is in the sequence by now."""
        ...

    def note_step(self, rows: int, seconds: float) -> None:
        """Takes in how long a step took in which every row was sampled."""
        ...


class NgramSpeculation:
    """Drafts what follows the longest match, as far as it pays."""

    def __init__(self) -> None:
        self._costs = StepCosts()
        self._rates = Rates(_KEPT)

    def begin(self, choices: Seq[Sequence]) -> None:
        text = choices[0].request.predicted_ids
        predicted = TextIndex(list(text)) if text else None
        for seq in choices:
            seq.drafter = Drafter(seq.token_ids, predicted, self._rates)

    def draft(self, asking: Seq[tuple[Sequence, int]], rows: int, most: int) -> Mapping[int, Drafts]:
        least = rows / self._costs.of(rows) * _WORTHWHILE
        if self._is_futile(rows, least):
            return {}
        guesses: dict[int, Guess] = {}
        chances: list[Iterator[tuple[float, int]]] = []
        for seq, room in asking:
            if seq.drafter is not None and (guess := seq.drafter.guess(seq.num_known)) is not None:
                guesses[seq.id] = guess
                chances.append(zip(seq.drafter.chances(guess, room), repeat(seq.id)))
        ranked = merge(*chances, reverse=True)
        return {
            id: Drafts(tuple(guesses[id].token_ids[:count]), guesses[id].is_predicted)
            for id, count in self._best_counts(ranked, rows, most, least).items()
        }

    def waits(self, asking: Seq[tuple[Sequence, int]], rows: int, most: int) -> bool:
        least = rows / self._costs.of(rows) * _WORTH_WAITING
        if self._is_futile(rows, least):
            return False
        chances: list[Iterator[tuple[float, int]]] = []
        for seq, room in asking:
            if seq.drafter is not None and (guess := seq.drafter.guess(seq.num_known)) is not None:
                # The first guess is of the token that is pending; those after it would be drafts.
                chances.append(zip(islice(seq.drafter.chances(guess, room + 1), 1, None), repeat(seq.id)))
        return bool(self._best_counts(merge(*chances, reverse=True), rows, most, least))

    def _is_futile(self, rows: int, least: float) -> bool:
        """Whether not even drafts that are sure to be accepted would pay, so that there is no need to look for any."""
        return not any((rows + more) / self._costs.of(rows + more) > least for more in _TRIED)

    def _best_counts(
        self, ranked: Iterable[tuple[float, int]], rows: int, most: int, least: float
    ) -> Mapping[int, int]:
        """How many drafts of each sequence bring the most tokens per cost, if that is more than `least`. `ranked` are
        chances and sequences' ids, the best first.
        """
        taken: list[int] = []
        tokens, best, best_count = float(rows), least, 0
        for chance, id in islice(ranked, most):
            taken.append(id)
            tokens += chance
            gain = tokens / self._costs.of(rows + len(taken))
            if gain > best:
                best, best_count = gain, len(taken)
            elif gain < _GIVEN_UP * best:
                break
        return Counter(taken[:best_count])

    def learn(self, seq: Sequence, token_ids: Seq[int]) -> None:
        if seq.drafter is not None:
            seq.drafter.learn(token_ids)

    def note_step(self, rows: int, seconds: float) -> None:
        self._costs.note(rows, seconds)


def speculation(setting: str, spec: RunnerSpec) -> Speculation | None:
    """What the setting `speculative` asks for. A runner that cannot verify drafts gets none, whatever the setting."""
    if setting == "ngram" and not spec.max_sampled:
        _log.warning("speculative is ngram, but %s cannot verify drafts: nothing is drafted", spec.backend)
    wanted = setting == "ngram" or (setting == "auto" and spec.is_invariant)
    return NgramSpeculation() if wanted and spec.max_sampled else None
