"""Converts streamed Python literals to JSON text. Also takes JSON's true, false and null."""

import ast
import json
import re

from ostro.answers.scanner import Parse, Scanner

_WORD = re.compile(r"[\w.+-]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
# What a string holds up to its end or an escape, by its quote.
_PLAIN = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_MAX_DEPTH = 64


def value(scanner: Scanner, depth: int = 0) -> Parse[str | None]:
    """The next literal as JSON; None if it is invalid or incomplete."""
    yield from scanner.space()
    first = yield from scanner.peek()
    if depth > _MAX_DEPTH or not first:
        return None
    if first in "\"'":
        return (yield from _string(scanner))
    if first in _CLOSING:
        return (yield from _collection(scanner, depth))
    parts: list[str] = []
    yield from scanner.run(_WORD, parts.append)
    return _scalar("".join(parts))


def _string(scanner: Scanner) -> Parse[str | None]:
    quote = scanner.take()
    parts = [quote]
    while True:
        yield from scanner.run(_PLAIN[quote], parts.append)
        mark = yield from scanner.peek()
        if not mark:
            return None
        parts.append(scanner.take())
        if mark == quote:
            return _literal("".join(parts))
        if not (yield from scanner.peek()):
            return None
        parts.append(scanner.take())


def _collection(scanner: Scanner, depth: int) -> Parse[str | None]:
    opening = scanner.take()
    entries: list[str] = []
    while True:
        yield from scanner.space()
        if (yield from scanner.literal(_CLOSING[opening])):
            return f"{{{', '.join(entries)}}}" if opening == "{" else f"[{', '.join(entries)}]"
        entry = yield from value(scanner, depth + 1)
        if entry is not None and opening == "{":
            entry = yield from _entry(scanner, entry, depth)
        if entry is None:
            return None
        entries.append(entry)
        yield from scanner.space()
        yield from scanner.literal(",")


def _entry(scanner: Scanner, key: str, depth: int) -> Parse[str | None]:
    yield from scanner.space()
    if not (yield from scanner.literal(":")):
        return None
    entry = yield from value(scanner, depth + 1)
    if not key.startswith('"'):
        # JSON's keys are strings.
        key = json.dumps(key)
    return None if entry is None else f"{key}: {entry}"


def _scalar(word: str) -> str | None:
    if word in _WORDS:
        return _WORDS[word]
    return word if _NUMBER.fullmatch(word) else _literal(word)


def _literal(text: str) -> str | None:
    # Models write line breaks within quotes, which Python does not allow.
    try:
        said = ast.literal_eval(text.replace("\n", "\\n"))
        return json.dumps(said, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
