"""One sequence's guesses of its next tokens: what followed its last tokens before. Knows token ids only.

Guesses come from the sequence's own tokens or from the text that its request predicts, whichever has the longer match
(`TextIndex`). The longer the match, the likelier the guess is right. How likely is learned from every guess, even
those that no step verifies.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Occurrences of the last two tokens that are compared, latest first.
_MOST_COMPARED = 8
# Tokens beyond which a longer match is no better.
LONGEST_MATCH = 32
# Tokens indexed per call, so that no step waits for a long prompt: milliseconds at most.
_MOST_AT_ONCE = 4096
# A bound on the memory of an index, which takes about 150 bytes a token.
_MOST_INDEXED = 32_768


class Match(NamedTuple):
    end: int
    """Where in the text the match ends, and what may follow begins."""
    length: int


class TextIndex:
    """Occurrences of token pairs in a text: finds where the end of a sequence occurred before. The text may grow after
    it was indexed, but not change.

        text       … def area ( w , h ) : return w * h … def volume ( w , h
                                   └─────┘ match            └─────┘ the sequence's last tokens
                                          ) : return w * h …        what may follow

    Each pair of adjacent tokens points to its latest occurrence, and each occurrence to the one before it. Following a
    few of them finds the longest match among them; indexing a token and looking one up take constant time.
    """

    __slots__ = ("_before", "_first", "_indexed", "_latest", "text")

    def __init__(self, text: list[int]) -> None:
        self.text = text
        # A pair's position is the one after it. The first indexed token, and the end of the indexed part.
        self._first = self._indexed = max(0, len(text) - _MOST_INDEXED)
        self._latest: dict[tuple[int, int], int] = {}
        # Position - _first - 1 -> the previous position of the same pair; 0 if there is none.
        self._before: list[int] = [0]

    def grow(self, end: int) -> None:
        """Indexes the text up to `end`, at most _MOST_AT_ONCE tokens per call."""
        text, latest, before = self.text, self._latest, self._before
        start = max(self._indexed, self._first + 1)
        end = min(end, start + _MOST_AT_ONCE)
        for at in range(start, end):
            pair = (text[at - 1], text[at])
            before.append(latest.get(pair, 0))
            latest[pair] = at + 1
        self._indexed = max(self._indexed, end)

    def find(self, tokens: list[int], end: int) -> Match | None:
        """The longest match in the text for what comes before `end` in `tokens`, the latest of equally long ones."""
        if end < 2:
            return None
        at = self._latest.get((tokens[end - 2], tokens[end - 1]), 0)
        best = Match(0, 0)
        for _ in range(_MOST_COMPARED):
            if not at:
                break
            length = self._common(tokens, end, at)
            if length > best.length:
                best = Match(at, length)
                if length == LONGEST_MATCH:
                    break
            at = self._before[at - self._first - 1]
        return best if best.length else None

    def _common(self, tokens: list[int], end: int, at: int) -> int:
        """How many tokens before `end` equal those before `at` in the text; at least the pair."""
        text, length = self.text, 2
        most = min(LONGEST_MATCH, end, at)
        while length < most and tokens[end - 1 - length] == text[at - 1 - length]:
            length += 1
        return length


MOST_DRAFTS = 15
"""Most tokens in a guess."""

# Lower bounds of the match lengths that share a rate, and the rates assumed before anything is seen.
_LENGTHS = (2, 3, 4, 5, 7, 10, 15, 23)
_ASSUMED = (0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.88, 0.92)
_PLACES = [sum(length >= least for least in _LENGTHS[1:]) for length in range(_LENGTHS[-1] + 1)]
# How many observations the assumed rate counts as.
_ASSUMED_WEIGHT = 6.0
# A chance too low to be worth a row on any device.
_HOPELESS = 0.02
_KEPT = 0.95
"""Weight that a sequence's older observations keep after each new one."""


class Rates:
    """How often the token after a match was right, by the match's length. Recent observations count most."""

    __slots__ = ("_base", "_kept", "_right", "_seen")

    def __init__(self, kept: float, base: "Rates | None" = None) -> None:
        """`base` holds the rates to assume where little was seen."""
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
    """Length of the match that the guess follows."""
    is_predicted: bool


class Drafter:
    """One sequence's source texts, and how often guesses from them were right."""

    __slots__ = ("_guess", "_num_prompt", "_own", "_predicted", "_rates")

    def __init__(self, token_ids: list[int], predicted: TextIndex | None, rates: Rates) -> None:
        """`token_ids` is the sequence's own list, which grows; so far it holds the prompt. `rates` are over all
        sequences. Both `rates` and `predicted` may be shared.
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
        """For each of the first `most` tokens, the chance that it and all before it are right. Leaves out the
        hopeless.
        """
        chance = 1.0
        for length in range(guess.length, guess.length + min(most, len(guess.token_ids))):
            chance *= self._rates.at(_place(length))
            if chance < _HOPELESS:
                break
            yield chance

    def learn(self, token_ids: Sequence[int]) -> None:
        """Compares the last guess with the tokens that were generated."""
        if self._guess is None:
            return
        for at, (guessed, came) in enumerate(zip(self._guess.token_ids, token_ids, strict=False)):
            self._rates.note(self._guess.length + at, right=guessed == came)
            if guessed != came:
                break
        self._guess = None

    def _found(self, end: int) -> Guess | None:
        tokens = self._own.text
        # Leave out the last token, or the sequence's end would match itself.
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
            # The output begins like the prediction: here one token says as much as two elsewhere.
            return Match(1, _LENGTHS[0])
        return predicted.find(self._own.text, end)
