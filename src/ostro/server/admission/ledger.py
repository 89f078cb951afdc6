"""What requests hold in memory, by key, from a body's first byte to the last event. Knows bytes and keys; no HTTP.

    body ──────> parsed request ──────> prompt, as token ids ──────> answered: released
    hold(read)   hold(what is kept)     count_tokens       └──> hand_over: a background run's, until it ends

Short requests have a room of their own, so that a few long ones do not lock out everyone else. The keys share each room
(`server.admission.shares`): one key cannot take what another is entitled to. A request that finds no room gets 503 with
Retry-After. Token ids and answers are only counted, because the admission queue bounds them, by its slots and the
model's context. Admin keys also have a small room of their own, so that operators get in no matter who fills the
others.
Stored responses have a room too, in which the store makes room by dropping old ones.
"""

from collections.abc import Callable
from typing import Self

from ostro.errors import BodyTooLarge, OstroError, TryLater
from ostro.server.admission.shares import Shares

# Longer requests are in the room of long ones.
SHORT = 64 << 10
# Measured: a request's connection, task, records and parsed fields, without their texts.
_EACH = 48 << 10
# A Python list's entry and its number.
_TOKEN = 40
# Measured: a generated token's id and its text, in the completion and in what a writer keeps of it.
_GENERATED = 200
_RETRY_SECONDS = 1
# Enough for a few requests to /admin, which are short.
_OPERATORS = 1 << 20


class Ledger:
    """Use within one event loop, but for `stored`, which the store locks."""

    def __init__(self, most: int, *, most_stored: int = 0, num_keys: int = 1, num_places: int = 0) -> None:
        """`most` bytes for long requests, and as many for short ones, or what `num_places` of these take."""
        short = max(most, num_places * (SHORT + _EACH))
        self.short = Shares(short, num_keys=num_keys, is_strict=True)
        self.long = Shares(most, num_keys=num_keys, is_strict=True)
        self.operators = Shares(_OPERATORS, is_strict=True)
        self.stored = Shares(most_stored, num_keys=num_keys, is_strict=True)
        self.tokens = 0
        """Bytes of prompts' token ids."""
        self.answers: dict[Holding, Callable[[], int]] = {}
        """Token counts of answers so far, called only when metrics are read: generating a token costs nothing."""
        self.has_several_keys = num_keys > 1

    @property
    def used(self) -> int:
        return sum(self.held().values())

    def held(self) -> dict[str, int]:
        """Bytes by what they are held for."""
        return {
            "short": self.short.used + self.operators.used,
            "long": self.long.used,
            "stored": self.stored.used,
            "tokens": self.tokens,
            "answers": _GENERATED * sum(number() for number in self.answers.values()),
        }


class Holding:
    """What one request holds. It holds nothing until it begins to read a body."""

    def __init__(self, ledger: Ledger, key: str, head: int = 0, *, is_operator: bool = False) -> None:
        """`head` is the size of its headers; `is_operator` whether its key is an admin key."""
        self._ledger = ledger
        self._key = key
        self._is_operator = is_operator
        self._each = _EACH + head
        self._room = ledger.short
        self._size = 0
        self._tokens = 0

    @property
    def size(self) -> int:
        """Bytes of its body, or of the parsed request."""
        return max(0, self._size - self._each)

    @property
    def is_long(self) -> bool:
        return self._room is self._ledger.long

    def check(self, size: int) -> None:
        """Raises what `hold` would, and holds nothing."""
        before, room = self._size, self._room
        self.hold(size)
        self._move(room, before)

    def hold(self, size: int, *, expected: int = 0) -> None:
        """Holds this much, in place of what it held; `expected` is what it is about to hold. Raises TryLater if there
        is no room, or BodyTooLarge if there never will be.
        """
        before, room = self._size, self._room
        self._move(room, 0)
        self._room = self._room_for(max(size, expected))
        if not self._room.has_room(self._key, self._each + size):
            refusal = self._refusal(self._each + size)
            self._move(room, before)
            raise refusal
        self._move(self._room, self._each + size)

    def count_tokens(self, number: int) -> None:
        """It holds this many token ids."""
        self._ledger.tokens += _TOKEN * number - self._tokens
        self._tokens = _TOKEN * number

    def count_answer(self, num_tokens: Callable[[], int]) -> None:
        """Counts the answer too. `num_tokens` returns its tokens so far."""
        self._ledger.answers[self] = num_tokens

    def hand_over(self) -> "Holding":
        """A holding for work that outlives the request, with all that this one held."""
        heir = Holding(self._ledger, self._key, is_operator=self._is_operator)
        heir._each, heir._room, heir._size, heir._tokens = self._each, self._room, self._size, self._tokens
        self._size = self._tokens = 0
        return heir

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """Idempotent."""
        self.count_tokens(0)
        self._ledger.answers.pop(self, None)
        self._move(self._room, 0)

    def _move(self, room: Shares, size: int) -> None:
        self._room.give_back(self._key, self._size)
        self._room, self._size = room, size
        room.take(self._key, size)

    def _room_for(self, size: int) -> Shares:
        if size > SHORT:
            return self._ledger.long
        short = self._ledger.short
        # What is kept for operators is used last.
        if self._is_operator and not short.has_room(self._key, self._each + size):
            return self._ledger.operators
        return short

    def _refusal(self, size: int) -> OstroError:
        room, key = self._room, self._key
        if size > room.most_for_one:
            return BodyTooLarge(
                f"The request takes {size} bytes of memory, and there are {room.most_for_one} for the requests of one "
                "key. Send less, or split the request."
            )
        held = f"This key's requests already hold {room.used_by(key)} bytes"
        if not self._ledger.has_several_keys:
            held = f"Current requests already hold {room.used} of {room.total} bytes"
        return TryLater(
            f"{held}, and there is no room for this one. Try again in a moment.", retry_after=_RETRY_SECONDS
        )
