"""Drafts that are right as often as a test wants, whatever they cost."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from random import Random

from ostro.backends.fake import FakeRunner
from ostro.engine.sequence import Sequence
from ostro.engine.speculation import Drafts, NgramSpeculation


class GuessedDrafts:
    """Knows what the fake runner will sample, and drafts it with a given accuracy."""

    def __init__(self, fake: FakeRunner, accuracy: float, *, most: int = 6, patience: float = 0.0) -> None:
        """With a probability of `patience`, the next step waits for the results of the one under way."""
        self._fake, self._accuracy, self._most, self._patience = fake, accuracy, most, patience
        self._random = Random(0)
        self.learned: list[int] = []

    def begin(self, choices: Seq[Sequence]) -> None:
        """Has nothing to prepare."""

    def draft(self, asking: Seq[tuple[Sequence, int]], rows: int, most: int) -> Mapping[int, Drafts]:
        found = {}
        for seq, room in asking:
            assert not seq.num_pending
            count = min(self._random.randint(0, self._most), room, most)
            if count > 0:
                most -= count
                found[seq.id] = Drafts(tuple(self._guessed(seq, count)))
        return found

    def waits(self, asking: Seq[tuple[Sequence, int]], rows: int, most: int) -> bool:
        assert all(seq.num_pending == 1 for seq, _ in asking)
        return self._random.random() < self._patience

    def learn(self, seq: Sequence, token_ids: Seq[int]) -> None:
        self.learned += token_ids

    def note_step(self, rows: int, seconds: float) -> None:
        assert rows > 0

    def _guessed(self, seq: Sequence, count: int) -> list[int]:
        tokens: list[int] = []
        for _ in range(count):
            masks = [seq.mask] if seq.matcher is None else [seq.mask, *seq.masks_along(tuple(tokens))]
            # After a token that its structure does not allow, a sequence is as good as unconstrained.
            mask = masks[-1] if seq.matcher is None or len(masks) == 1 + len(tokens) else None
            right = self._fake.expected_next(seq.supposing(tuple(tokens), mask)).token_id
            wrong = (right + 1) % self._fake.spec.vocab_size
            tokens.append(right if self._random.random() < self._accuracy else wrong)
        return tokens


class ReplayedDrafts:
    """Drafts what an earlier run without drafts has generated, with some tokens replaced."""

    def __init__(self, outputs: Mapping[tuple[int, int], Seq[int]], *, accuracy: float = 0.8, most: int = 5) -> None:
        """`frontend.outputs` are by request id and choice."""
        self._outputs, self._accuracy, self._most = outputs, accuracy, most
        self._random = Random(0)

    def begin(self, choices: Seq[Sequence]) -> None:
        """Has nothing to prepare."""

    def draft(self, asking: Seq[tuple[Sequence, int]], rows: int, most: int) -> Mapping[int, Drafts]:
        found = {}
        for seq, room in asking:
            count = min(self._random.randint(0, self._most), room, most)
            coming = self._outputs[seq.request.id, seq.choice][seq.num_output : seq.num_output + count]
            if coming:
                most -= len(coming)
                found[seq.id] = Drafts(tuple(token if self._is_right() else token ^ 1 for token in coming))
        return found

    def waits(self, asking: Seq[tuple[Sequence, int]], rows: int, most: int) -> bool:
        return True

    def learn(self, seq: Sequence, token_ids: Seq[int]) -> None:
        """Has nothing to learn."""

    def note_step(self, rows: int, seconds: float) -> None:
        """Drafts at any cost."""

    def _is_right(self) -> bool:
        return self._random.random() < self._accuracy


class EagerDrafts(NgramSpeculation):
    """Drafts what follows matches as if further rows cost next to nothing, whatever the machine."""

    def __init__(self, seconds_by_rows: Mapping[int, float] | None = None) -> None:
        """`seconds_by_rows` replaces the default belief about step costs."""
        super().__init__()
        for _ in range(100):
            for rows, seconds in (seconds_by_rows or {rows: 1.0 + 0.02 * rows for rows in (1, 2, 4, 8, 16)}).items():
                super().note_step(rows, seconds)

    def note_step(self, rows: int, seconds: float) -> None:
        """Learns nothing from a test's own steps."""
