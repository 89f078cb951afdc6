"""Whether fetching pages from a lower tier is quicker than computing them again, learned from what both took, tier by
tier. Knows no clock and no device.
"""

# How much of what was seen before still counts after each further observation.
_MEMORY = 0.9
# After so many refusals in a row a fetch is tried, because what once was slow may be quick again.
_REFUSALS = 32


class _Rate:
    """A decaying average of amounts by seconds."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    def note(self, amount: float, seconds: float) -> None:
        self._amount = _MEMORY * self._amount + amount
        self._seconds = _MEMORY * self._seconds + seconds

    def seconds(self, amount: float) -> float | None:
        """How long that many would take; None if nothing is known."""
        return self._seconds / self._amount * amount if self._amount else None


class _Tier:
    def __init__(self) -> None:
        self.fetches = _Rate()
        self.refused = 0
        """Sequences in a row."""


class FetchCosts:
    def __init__(self) -> None:
        self._host, self._disk, self._prompts = _Tier(), _Tier(), _Rate()

    def note_fetch(self, pages: int, seconds: float, *, disk: bool) -> None:
        """`disk` if the pages came from there, and not from host memory."""
        if pages:
            (self._disk if disk else self._host).fetches.note(pages, seconds)

    def note_prompt(self, tokens: int, seconds: float) -> None:
        """A step that computed prompts."""
        self._prompts.note(tokens, seconds)

    def pays(self, pages: int, tokens: int, *, disk: bool, is_turn: bool = True) -> bool:
        """Whether to fetch these pages rather than compute the tokens in them. `is_turn` if they are computed now
        otherwise: only that counts as a refusal, not a look ahead.
        """
        tier = self._disk if disk else self._host
        fetching, computing = tier.fetches.seconds(pages), self._prompts.seconds(tokens)
        if fetching is None or computing is None or fetching < computing:
            tier.refused = 0
            return True
        if not is_turn:
            return False
        tier.refused = (tier.refused + 1) % (_REFUSALS + 1)
        return not tier.refused
