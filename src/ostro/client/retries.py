"""Whether and when to retry a call. Knows errors and clocks; knows no HTTP and does not wait itself."""

import random
import time

from ostro.errors import BodyTimeout, OstroError, ServerError, TryLater, Unreachable

_FIRST_SECONDS = 0.5
_MOST_SECONDS = 8.0
# A server that asks for more patience than this is not waited for.
_MOST_PATIENCE_SECONDS = 60.0
_BAD_GATEWAY = 502


class Tries:
    """Those of one call. All of them, and what is waited in between, share one timeout."""

    def __init__(self, *, max_retries: int, timeout: float) -> None:
        self._left = max_retries
        self._num_failed = 0
        self._deadline = time.monotonic() + timeout

    @property
    def remaining(self) -> float:
        """Seconds until the timeout; never quite none, for an attempt's own."""
        return max(self._deadline - time.monotonic(), 0.001)

    def wait_after(self, error: OstroError) -> float:
        """How long to wait before the next try, in seconds; raises the error where there should be none."""
        seconds = self._seconds(error)
        if self._left <= 0 or not _passes(error) or seconds > min(self.remaining, _MOST_PATIENCE_SECONDS):
            raise error
        self._left -= 1
        self._num_failed += 1
        return seconds

    def _seconds(self, error: OstroError) -> float:
        """At least what the server asks for, and never quite the same for all who were refused together."""
        backoff = min(_FIRST_SECONDS * 2**self._num_failed, _MOST_SECONDS) * random.uniform(0.5, 1.0)
        asked = error.retry_after * random.uniform(1.0, 1.1) if isinstance(error, TryLater) else 0.0
        return max(float(backoff), asked)


def _passes(error: OstroError) -> bool:
    """Whether another try may fare better.

    What failed in the server (500) or took too long there (504) would do so again.
    """
    if isinstance(error, ServerError) and error.status == _BAD_GATEWAY:
        return True
    return isinstance(error, TryLater | BodyTimeout | Unreachable)
