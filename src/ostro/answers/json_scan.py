"""Streaming JSON: forwards values verbatim, and decodes strings. Does not interpret the values."""

import json
import re

from ostro.answers.scanner import Emit, Parse, Scanner

_PLAIN = re.compile(r'[^"\\]*')
# Characters that JSON may have outside strings, except brackets and braces.
_BETWEEN = re.compile(r"[\s:,\w.+-]*")
_SCALAR = re.compile(r"[\w.+-]*")
_ESCAPE_DIGITS = 4


def string(scanner: Scanner, emit: Emit) -> Parse[bool]:
    """Forwards a string verbatim, with its quotes. False if there is no string here, or if it is incomplete."""
    if not (yield from scanner.literal('"')):
        return False
    emit('"')
    while True:
        yield from scanner.run(_PLAIN, emit)
        mark = yield from scanner.peek()
        if not mark:
            return False
        emit(scanner.take())
        if mark == '"':
            return True
        if not (yield from scanner.peek()):
            return False
        emit(scanner.take())


def decoded(scanner: Scanner) -> Parse[str | None]:
    """A string's decoded value; None if there is no string here, or if it is incomplete or invalid."""
    parts: list[str] = []
    if not (yield from string(scanner, parts.append)):
        return None
    return _decoded("".join(parts))


def decode(scanner: Scanner, emit: Emit) -> Parse[bool]:
    """Forwards a string's decoded value in pieces. False if there is none here, or if it is incomplete or invalid."""
    if not (yield from scanner.literal('"')):
        return False
    while True:
        yield from scanner.run(_PLAIN, emit)
        mark = yield from scanner.peek()
        if not mark:
            return False
        if mark == '"':
            scanner.take()
            return True
        character = yield from _escape(scanner)
        if character is None:
            return False
        emit(character)


def value(scanner: Scanner, emit: Emit) -> Parse[bool]:
    """Forwards a value verbatim. False if it is incomplete or not JSON."""
    first = yield from scanner.peek()
    if first == '"':
        return (yield from string(scanner, emit))
    if first not in ("{", "["):
        parts: list[str] = []
        yield from scanner.run(_SCALAR, parts.append)
        for part in parts:
            emit(part)
        return bool(parts)
    depth = 0
    while True:
        mark = yield from scanner.peek()
        if mark in ("{", "["):
            depth += 1
            emit(scanner.take())
        elif mark in ("}", "]"):
            depth -= 1
            emit(scanner.take())
            if not depth:
                return True
        elif mark == '"':
            if not (yield from string(scanner, emit)):
                return False
        elif mark and _BETWEEN.fullmatch(mark):
            yield from scanner.run(_BETWEEN, emit)
        else:
            return False


def _escape(scanner: Scanner) -> Parse[str | None]:
    """The decoded value of an escape, or of two if they form a surrogate pair; None if it is invalid."""
    raw = yield from _raw_escape(scanner)
    said = _decoded(f'"{raw}"')
    if said is not None and _is_half(said) and (yield from scanner.peek()) == "\\":
        raw += yield from _raw_escape(scanner)
        said = _decoded(f'"{raw}"')
    # A lone surrogate cannot be encoded as UTF-8.
    return None if said is None else "".join("\N{REPLACEMENT CHARACTER}" if _is_half(each) else each for each in said)


def _raw_escape(scanner: Scanner) -> Parse[str]:
    """The escape verbatim; shorter if the text ends within it."""
    raw = ""
    count = 2
    while len(raw) < count and (yield from scanner.peek()):
        raw += scanner.take()
        if raw == "\\u":
            count += _ESCAPE_DIGITS
    return raw


def _is_half(character: str) -> bool:
    return len(character) == 1 and 0xD800 <= ord(character) < 0xE000


def _decoded(text: str) -> str | None:
    try:
        said = json.loads(text, strict=False)
    except ValueError:
        return None
    return said if isinstance(said, str) else None
