"""Whether fetching pages from a lower tier is quicker than computing them again, learned from what both took. Knows no
clock and no device.
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


class FetchCosts:
    def __init__(self) -> None:
        self._fetches, self._prompts = _Rate(), _Rate()
        self._refused = 0

    def note_fetch(self, pages: int, seconds: float) -> None:
        if pages:
            self._fetches.note(pages, seconds)

    def note_prompt(self, tokens: int, seconds: float) -> None:
        """A step that computed prompts."""
        self._prompts.note(tokens, seconds)

    def pays(self, pages: int, tokens: int) -> bool:
        """Whether to fetch these pages rather than compute the tokens in them."""
        fetching, computing = self._fetches.seconds(pages), self._prompts.seconds(tokens)
        if fetching is None or computing is None or fetching < computing or self._refused >= _REFUSALS:
            self._refused = 0
            return True
        self._refused += 1
        return False
