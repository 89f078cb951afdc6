"""Writes grammars in llguidance's dialect of Lark's notation: literals, regexes, rules, and its options for JSON. Knows
the notation; does not know what a grammar describes.
"""

import json
import re
from collections.abc import Iterable, Mapping

OPTIONS = "x-guidance"
"""The key of llguidance's own options in a schema."""
SEPARATORS: Mapping[str, object] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON as models usually write it. With only one way to write it, most of the punctuation is forced."""
WHITESPACE = r"( |\n{1,2}[ \t]{0,20})"
"""Whitespace between JSON's tokens, at most once: enough for pretty-printing, without endless runs."""

SpecialIds = Mapping[str, int]
"""The ids of a model's special tokens, by their texts."""


def marked_text(text: str, special_ids: SpecialIds) -> str:
    """A text in Lark's notation, with special tokens in place of their names. Empty for an empty text."""
    names = sorted((name for name in special_ids if name and name in text), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
    return " ".join(f"<[{special_ids[part]}]>" if part in special_ids else text_literal(part) for part in parts if part)


def text_literal(text: str) -> str:
    """The text as a string literal in Lark's notation."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def regex_literal(regex: str) -> str:
    """The regex as a literal in Lark's notation: between slashes, without line breaks."""
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", regex, flags=re.DOTALL)
    return f"/{escaped}/".replace("\\\n", r"\n").replace("\n", r"\n")


def alternatives(bodies: Iterable[str]) -> str:
    """One of these. If one is empty, the whole is optional."""
    given = list(dict.fromkeys(bodies))
    some = [body for body in given if body]
    joined = some[0] if len(some) == 1 else f"({' | '.join(some)})" if some else ""
    return f"({joined})?" if len(some) < len(given) else joined


class Lark:
    """Rules and terminals with generated names. `TEXT` is any text without special tokens."""

    def __init__(self, special_ids: SpecialIds) -> None:
        self._special_ids = special_ids
        self._names: dict[tuple[str, str], str] = {}

    def grammar(self, start: str) -> str:
        definitions = (f"{name}{rest}" for (_, rest), name in self._names.items())
        return "\n".join(["%llguidance {}", f"start: {start}", "TEXT: /(.|\\n)*/", *definitions, ""])

    def rule(self, body: str) -> str:
        return self._named("r", f": {body}")

    def terminal(self, body: str) -> str:
        return self._named("T", f": {body}")

    def literal(self, text: str) -> str:
        """The text, with names of special tokens replaced by those tokens. Empty for an empty text."""
        return marked_text(text, self._special_ids)

    def up_to(self, text: str, marker: str) -> str:
        """Text of a terminal, up to and including the first occurrence of the marker."""
        if marker in self._special_ids:
            return self.rule(f"{text} {self._token(marker)}")
        return self._named("r", f"[suffix={text_literal(marker)}]: {text}")

    def text_without(self, marker: str) -> str:
        """Any text in which the marker does not occur."""
        return "TEXT" if marker in self._special_ids else self.terminal(f"TEXT & ~(TEXT {text_literal(marker)} TEXT)")

    def _token(self, text: str) -> str:
        return f"<[{self._special_ids[text]}]>"

    def _named(self, prefix: str, rest: str) -> str:
        """The name of a definition. Equal definitions share one."""
        if (prefix, rest) not in self._names:
            self._names[prefix, rest] = f"{prefix}{len(self._names)}"
        return self._names[prefix, rest]
