"""Command lines in the style of draccus, Levanter's configuration library, translated to ours.

    --hf_checkpoint ./model      underscores for dashes
    port=9000                    a setting without dashes
    --access_log false           a switch with its value
    --trainer.mp=bf16            a key in a section, if a setting has that alias

Translates names; values are interpreted by the settings. A key in a section that matches no setting is refused with a
suggestion.
"""

import difflib
import re
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ostro.errors import BadRequest, ModelNotFound
from ostro.server.settings.names import is_levanter_section, levanter_key, why_not_served
from ostro.sources.references import parse_model

_KEY_AND_VALUE = re.compile(r"(?P<dashes>--)?(?P<key>[A-Za-z][\w.-]*)=(?P<value>.*)", re.ASCII | re.DOTALL)
_TRUTH = {"true": True, "false": False}
# Section prefixes that can be dropped.
_TRANSPARENT = ("ostro.", "serve.", "server.", "hrm.")


@dataclass(frozen=True, slots=True)
class Flags:
    """The flags that argparse accepts: those that take a value, and switches."""

    valued: Collection[str]
    switches: Collection[str]

    def find(self, key: str) -> str | None:
        """The flag for a key, in any spelling."""
        for section in _TRANSPARENT:
            key = key.removeprefix(section)
        key = levanter_key(key)
        spellings = (f"--{key}", f"--{key.replace('_', '-')}")
        return next((each for each in spellings if each in self.valued or each in self.switches), None)


def translated(words: Sequence[str], flags: Flags) -> list[str]:
    """The same command line with argparse's flags. Anything invalid is left for argparse to report."""
    out: list[str] = []
    rest = deque(words)
    while rest:
        word = rest.popleft()
        match = _KEY_AND_VALUE.fullmatch(word)
        flag = flags.find(word[2:]) if word.startswith("--") and match is None else None
        if word == "--":
            out += [word, *rest]
            rest.clear()
        elif match is not None:
            out += _assignment(word, match, flags)
        elif flag in flags.valued:
            out += [flag or word, *([rest.popleft()] if rest else [])]
        elif flag is not None and rest and rest[0].lower() in _TRUTH:
            out += _switch(flag, rest.popleft(), flags)
        else:
            _check_section(word)
            out.append(flag or word)
    return out


def _assignment(word: str, match: re.Match[str], flags: Flags) -> list[str]:
    key, value = match["key"], match["value"]
    flag = flags.find(key)
    if flag is None:
        if match["dashes"] or is_levanter_section(key.partition(".")[0]):
            _check_section(f"--{key}")
        if not match["dashes"]:
            _check_name(key, value, flags)
        # Without dashes, it is a model with its name: tiny=./model.
        return [word]
    return _switch(flag, value, flags) if flag in flags.switches else [f"{flag}={value}"]


def _check_name(key: str, value: str, flags: Flags) -> None:
    """Raises BadRequest unless it could be a model with its name."""
    try:
        parse_model(value)
    except ModelNotFound as error:
        known = [flag[2:].replace("-", "_") for flag in (*flags.valued, *flags.switches)]
        close = difflib.get_close_matches(key.replace("-", "_"), known, 1)
        guess = f" Did you mean {close[0]}?" if close else ""
        raise BadRequest(f"{key}={value} is neither SETTING=VALUE nor NAME=MODEL.{guess}") from error


def _switch(flag: str, value: str, flags: Flags) -> list[str]:
    wanted = _TRUTH.get(value.lower())
    if wanted is None:
        raise BadRequest(f"{flag} is a switch: its value is true or false, got {value!r}.")
    if wanted:
        return [flag]
    opposite = f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
    # A switch without an opposite is off by default.
    return [opposite] if opposite in flags.switches else []


def _check_section(word: str) -> None:
    """Raises BadRequest for a key in a section."""
    key = word[2:].partition("=")[0]
    if not word.startswith("--") or "." not in key:
        return
    section = key.partition(".")[0]
    reason = why_not_served(key) or f"there is no section {section} here; leave it out"
    raise BadRequest(f"--{key} is not supported: {reason}.")
