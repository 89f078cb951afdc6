"""Turns panics of the tokenizers library into errors. They arrive as BaseExceptions, which no error handler would
catch.

The library panics where a pattern of tokenizer.json backtracks without end, for one: it gives up after some millions of
tries, which take a second or a few.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ostro.errors import OstroError

# What nested repetitions in a pattern stumble over: one kind of character, many times, and then another.
PROBES = tuple(
    before + kind * 64 + after for before in ("", "x ") for kind in "a1 _!\n\té中" for after in ("", "!", "\x00", " b")
)
"""Texts that every tokenizer can cut. They take well under a millisecond together."""


@contextmanager
def panics_become(error: Callable[[str], OstroError]) -> Iterator[None]:
    """What panics in the block raises the error that is made of the panic's message."""
    try:
        yield
    except BaseException as raised:
        # Each library built with pyo3 creates its own class, and none can be imported.
        if type(raised).__name__ != "PanicException":
            raise
        raise error(str(raised)) from raised
