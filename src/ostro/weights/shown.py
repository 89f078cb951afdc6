"""Values of files that somebody else wrote, as messages may show them."""

import reprlib

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2


def shown(value: object) -> str:
    """Short: an alias may stand for more than memory holds, and Python writes out no integer of many digits."""
    try:
        return _SHORT.repr(value)
    except ValueError:
        return "what is too large to show"
