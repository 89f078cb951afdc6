"""What the tokenizers library raises."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ostro.errors import OstroError


@contextmanager
def panics_become(error: Callable[[str], OstroError]) -> Iterator[None]:
    """Turns an error of the tokenizers library in the block into the one that `error` makes of its message: it raises
    nothing narrower than Exception, and its panics arrive as BaseExceptions, which no error handler would catch.

    For example, the library panics if a pattern in tokenizer.json backtracks without end: it gives up after some
    millions of tries, which take a second or a few.
    """
    try:
        yield
    except BaseException as raised:
        if not is_of_library(raised):
            raise
        raise error(str(raised)) from raised


def is_of_library(raised: BaseException) -> bool:
    # Each library built with pyo3 creates its own class, and none can be imported.
    return type(raised) is Exception or type(raised).__name__ == "PanicException"
