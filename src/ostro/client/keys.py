"""API keys, given as arguments or in the environment. Knows no connections."""

import os

from ostro.errors import BadRequest


def check_key(key: str) -> str | None:
    """None for the empty one; raises BadRequest for one that no header can carry."""
    if not (key.isascii() and key.isprintable()):
        raise BadRequest("A key is printable ASCII on one line. Check the one that is given.", param="api_key")
    return key or None


def key_in_environment(name: str) -> str:
    """A server's variable may list several keys: the first of them opens it as well as any. Empty if there is none."""
    return os.environ.get(name, "").partition(",")[0].strip()
