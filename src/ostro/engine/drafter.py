"""One sequence's guesses of its next tokens: what followed its last tokens before. Knows token ids only.

Guesses come from the sequence's own tokens or from the text that its request predicts, whichever has the longer match
(`engine.ngrams`). The longer the match, the likelier the guess is right: how likely, is learned from every guess, also
from those that no step verifies.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ostro.engine.ngrams import Match, TextIndex

MOST_DRAFTS = 15
"""Most tokens in a guess."""

# Match lengths from which on rates are kept apart, and the rates assumed before anything was seen.
_LENGTHS = (2, 3, 4, 5, 7, 10, 15, 23)
_ASSUMED = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.88, 0.92)
_PLACES = [sum(length >= least for least in _LENGTHS[1:]) for length in range(_LENGTHS[-1] + 1)]
# How many observations the assumption before them counts as.
_ASSUMED_WEIGHT = 6.0
# A chance that is not worth a row on any device.
_HOPELESS = 0.02
_KEPT = 0.95
"""How much a sequence's older observations count with each new one."""


class Rates:
    """How often the token after a match was right, by the match's length. Recent observations count most."""

    __slots__ = ("_base", "_kept", "_right", "_seen")

    def __init__(self, kept: float, base: "Rates | None" = None) -> None:
        """`base` is what to assume where little was seen."""
        self._kept, self._base = kept, base
        self._right = [0.0] * len(_LENGTHS)
        self._seen = [0.0] * len(_LENGTHS)

    def note(self, length: int, *, right: bool) -> None:
        place = _place(length)
        self._right[place] = self._right[place] * self._kept + right
        self._seen[place] = self._seen[place] * self._kept + 1.0
        if self._base is not None:
            self._base.note(length, right=right)

    def at(self, place: int) -> float:
        assumed = _ASSUMED[place] if self._base is None else self._base.at(place)
        return (self._right[place] + _ASSUMED_WEIGHT * assumed) / (self._seen[place] + _ASSUMED_WEIGHT)


def _place(length: int) -> int:
    return _PLACES[length] if length < len(_PLACES) else len(_LENGTHS) - 1


class Guess(NamedTuple):
    token_ids: list[int]
    length: int
    """Of the match that it follows."""
    is_predicted: bool


class Drafter:
    """One sequence's texts to look in, and how often they were right."""

    __slots__ = ("_guess", "_num_prompt", "_own", "_predicted", "_rates")

    def __init__(self, token_ids: list[int], predicted: TextIndex | None, rates: Rates) -> None:
        """`token_ids` is the sequence's own list: its prompt so far, and it grows. `rates` are those of all sequences.
        Both `rates` and `predicted` may be shared.
        """
        self._own = TextIndex(token_ids)
        self._num_prompt = len(token_ids)
        self._predicted = predicted
        self._rates = Rates(_KEPT, rates)
        self._guess: Guess | None = None

    def guess(self, end: int) -> Guess | None:
        """What may follow the first `end` tokens, which are known."""
        self._guess = self._found(end)
        return self._guess

    def chances(self, guess: Guess, most: int) -> Iterator[float]:
        """The chance of each of the first `most` tokens to be right, with all before it. Leaves out the hopeless."""
        chance = 1.0
        for length in range(guess.length, guess.length + min(most, len(guess.token_ids))):
            chance *= self._rates.at(_place(length))
            if chance < _HOPELESS:
                break
            yield chance

    def learn(self, token_ids: Sequence[int]) -> None:
        """Compares the last guess with what came."""
        if self._guess is None:
            return
        for at, (guessed, came) in enumerate(zip(self._guess.token_ids, token_ids, strict=False)):
            self._rates.note(self._guess.length + at, right=guessed == came)
            if guessed != came:
                break
        self._guess = None

    def _found(self, end: int) -> Guess | None:
        tokens = self._own.text
        # Not the last token, or the sequence's end would match itself.
        self._own.grow(end - 1)
        match = self._own.find(tokens, end)
        if self._predicted is not None:
            text, place = self._predicted.text, self._find_predicted(self._predicted, end)
            if place is not None and place.end < len(text) and (match is None or place.length >= match.length):
                return Guess(text[place.end : place.end + MOST_DRAFTS], place.length, True)
        if match is None:
            return None
        following = tokens[match.end : min(end, match.end + MOST_DRAFTS)]
        # What repeats is expected to go on repeating.
        repeated = following * -(-MOST_DRAFTS // len(following))
        return Guess(repeated[:MOST_DRAFTS], match.length, False)

    def _find_predicted(self, predicted: TextIndex, end: int) -> Match | None:
        predicted.grow(len(predicted.text))
        if end == self._num_prompt + 1 and predicted.text[0] == self._own.text[end - 1]:
            # The output begins like the prediction: a token that says as much as two elsewhere.
            return Match(1, _LENGTHS[0])
        return predicted.find(self._own.text, end)
