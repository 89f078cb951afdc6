"""Turns panics of the tokenizers library into errors. They arrive as BaseExceptions, which no error handler would
catch.

For example, the library panics if a pattern in tokenizer.json backtracks without end: it gives up after some millions
of tries, which take a second or a few.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ostro.errors import OstroError

# Nested repetitions in a pattern backtrack on these: one character many times, then another.
PROBES = tuple(
    before + kind * 64 + after for before in ("", "x ") for kind in "a1 _!\n\té中" for after in ("", "!", "\x00", " b")
)
"""Texts that every sound tokenizer can encode. They take well under a millisecond together."""


@contextmanager
def panics_become(error: Callable[[str], OstroError]) -> Iterator[None]:
    """Turns a panic in the block into the error that `error` makes of its message."""
    try:
        yield
    except BaseException as raised:
        # Each library built with pyo3 creates its own class, and none can be imported.
        if type(raised).__name__ != "PanicException":
            raise
        raise error(str(raised)) from raised
