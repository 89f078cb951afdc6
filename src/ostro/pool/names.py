"""Valid model names, and which model a name refers to. Knows only text."""

import re
from collections.abc import Collection

from ostro.errors import UnknownModel

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"{_PART}(?:/{_PART})?")


def is_name(name: str) -> bool:
    """Whether it is a valid model name, and so safe in a path: `model` or `org/model`."""
    return ".." not in name and _NAME.fullmatch(name) is not None


def resolve(name: str, known: Collection[str]) -> str | None:
    """The known name that is meant: itself, or the one that differs only by "/" for "-"; None if there is none.

    Raises UnknownModel if it is ambiguous.
    """
    if name in known:
        return name
    if not is_name(name):
        return None
    matches = [other for other in _spellings(name) if other in known]
    if len(matches) > 1:
        raise UnknownModel(f"{name!r} could be {' or '.join(map(repr, matches))}. Ask for one of them by its own name.")
    return matches[0] if matches else None


def resolve_base(asked: str, known: Collection[str]) -> str | None:
    """The known model that an adapter's base refers to: a name, or an address that ends in one."""
    parts = asked.strip("/").split("/")
    return resolve(asked, known) or resolve("/".join(parts[-2:]), known) or resolve(parts[-1], known)


def _spellings(name: str) -> list[str]:
    if "/" in name:
        return [name.replace("/", "-")]
    return [f"{name[:at]}/{name[at + 1 :]}" for at, letter in enumerate(name) if letter == "-"]
