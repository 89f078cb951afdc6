"""API keys, given as arguments or in the environment. Knows no connections."""

import os

from ostro.errors import BadRequest


def check_key(key: str) -> str | None:
    """None for an empty key; raises BadRequest for one that cannot be sent in a header."""
    if not (key.isascii() and key.isprintable()):
        raise BadRequest("A key is printable ASCII on one line. Check the one that is given.", param="api_key")
    return key or None


def key_in_environment(name: str) -> str:
    """The first key of a variable that may list several, as a server's does. Empty if there is none."""
    return os.environ.get(name, "").partition(",")[0].strip()
