"""Whether and when to retry a call. Knows errors and clocks; knows no HTTP and does not wait itself."""

import random
import time

from ostro.errors import BodyTimeout, OstroError, ServerError, TryLater, Unreachable

_FIRST_SECONDS = 0.5
_MOST_SECONDS = 8.0
# If the server asks to wait longer than this, give up.
_MOST_PATIENCE_SECONDS = 60.0
_BAD_GATEWAY = 502


class Tries:
    """The attempts of one call. All attempts and the waits between them share one timeout."""

    def __init__(self, *, max_retries: int, timeout: float) -> None:
        self._left = max_retries
        self._num_failed = 0
        self._deadline = time.monotonic() + timeout

    @property
    def remaining(self) -> float:
        """Seconds until the timeout; always positive, to serve as an attempt's own timeout."""
        return max(self._deadline - time.monotonic(), 0.001)

    def wait_after(self, error: OstroError) -> float:
        """Seconds to wait before the next attempt; raises the error if there should be none."""
        seconds = self._seconds(error)
        if self._left <= 0 or not _passes(error) or seconds > min(self.remaining, _MOST_PATIENCE_SECONDS):
            raise error
        self._left -= 1
        self._num_failed += 1
        return seconds

    def _seconds(self, error: OstroError) -> float:
        """At least as long as the server asks, with jitter to spread out clients that were refused together."""
        backoff = min(_FIRST_SECONDS * 2**self._num_failed, _MOST_SECONDS) * random.uniform(0.5, 1.0)
        asked = error.retry_after * random.uniform(1.0, 1.1) if isinstance(error, TryLater) else 0.0
        return max(float(backoff), asked)


def _passes(error: OstroError) -> bool:
    """Whether a retry may succeed.

    What failed in the server (500) or took too long there (504) would do so again.
    """
    if isinstance(error, ServerError) and error.status == _BAD_GATEWAY:
        return True
    return isinstance(error, TryLater | BodyTimeout | Unreachable)
