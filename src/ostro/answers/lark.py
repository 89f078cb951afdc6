"""Builds grammars in llguidance's Lark notation, rule by rule. Knows the notation; not what a grammar describes."""

from collections.abc import Iterable

from ostro.formats.guidance_text import SpecialIds, marked_text
from ostro.formats.guidance_text import text_literal as quoted


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
        return self._named("r", f"[suffix={quoted(marker)}]: {text}")

    def text_without(self, marker: str) -> str:
        """Any text in which the marker does not occur."""
        return "TEXT" if marker in self._special_ids else self.terminal(f"TEXT & ~(TEXT {quoted(marker)} TEXT)")

    def _token(self, text: str) -> str:
        return f"<[{self._special_ids[text]}]>"

    def _named(self, prefix: str, rest: str) -> str:
        """The name of a definition. Equal definitions share one."""
        if (prefix, rest) not in self._names:
            self._names[prefix, rest] = f"{prefix}{len(self._names)}"
        return self._names[prefix, rest]
