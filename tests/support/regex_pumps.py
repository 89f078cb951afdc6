"""Finds every regular expression in the sources, and makes texts on which a backtracking engine takes longest.

A pattern takes more than linear time where one of its repetitions can give back what it took and try again. So for each
repetition a text leads up to it, repeats what it takes many times over, and ends in something that fails.
"""

from __future__ import annotations

import ast
import importlib
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

_CALLS = frozenset({"compile", "search", "match", "fullmatch", "sub", "subn", "split", "findall", "finditer"})
_MENTION = re.compile(rf"\.(?:{'|'.join(sorted(_CALLS))})\b")
_ENDS = ("", "\x00", "!", "\n", "=", "a", "}")
_TRIED = (*"aA0 \t\n_-./:;,=<>[](){}'\"#@&%+~\\|^$*?!", "é", "\x00")


@dataclass(frozen=True)
class Found:
    """A regular expression in the sources."""

    place: str
    """Its file and line."""
    pattern: str | None
    """None if it is only known at run time."""
    flags: int = 0
    methods: frozenset[str] = frozenset({"search"})
    """How it is used. Searching tries every place in the text, and so may be slow where matching is not."""


def regexes_in(package: Path) -> list[Found]:
    """Every pattern that is passed to `re`, by the syntax trees of all modules that call one of its functions."""
    found = []
    texts = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items() if _MENTION.search(text)}
    used = {path: _uses(tree) for path, tree in trees.items()}
    for path, tree in trees.items():
        module = ".".join((package.name, *path.relative_to(package).with_suffix("").parts)).removesuffix(".__init__")
        names = _names(tree)
        for node in ast.walk(tree):
            if _is_call(node):
                place = f"{path.relative_to(package).as_posix()}:{node.lineno}"  # type: ignore[attr-defined]
                name = names.get(node, "")
                # A private name is used in its own module; others, and fields, may be used anywhere.
                modules = [path] if name.startswith("_") else used
                methods = frozenset(method for each in modules for method in used[each].get(name, ()))
                found.append(replace(_found(node, place, module), methods=methods or frozenset({_method(node)})))
    return found


def _names(tree: ast.AST) -> dict[ast.AST, str]:
    """The names that compiled patterns are assigned to."""
    names: dict[ast.AST, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                names[node.value] = target.id
    return names


def _uses(tree: ast.AST) -> dict[str, set[str]]:
    """The methods of `re.Pattern` that are called on each name or field."""
    uses: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in _CALLS and isinstance(node.value, ast.Name | ast.Attribute):
            name = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            uses.setdefault(name, set()).add(_kind(node.attr))
    return uses


def _method(call: Any) -> str:
    return "search" if call.func.attr == "compile" else _kind(call.func.attr)


def _kind(method: str) -> str:
    return method if method in ("match", "fullmatch") else "search"


def _is_call(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "re"
        and node.func.attr in _CALLS
    )


def _found(call: Any, place: str, module: str) -> Found:
    """Evaluates the pattern and its flags with the names of the module; those of functions are not known there."""
    flags = call.args[1:2] if call.func.attr == "compile" else []
    flags += [each.value for each in call.keywords if each.arg == "flags"]
    try:
        names = {} if all(map(_is_plain, (call.args[0], *flags))) else vars(importlib.import_module(module))
        pattern, *given = (eval(_code(each), {**names, "re": re}) for each in (call.args[0], *flags))  # noqa: S307
    except (NameError, ImportError):
        return Found(place, None)
    return Found(place, pattern, int(given[0]) if given else 0) if isinstance(pattern, str) else Found(place, None)


def _is_plain(node: ast.expr) -> bool:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} <= {"re"}


def _code(node: ast.expr) -> Any:
    return compile(ast.Expression(node), "<pattern>", "eval")


# --- texts ----------------------------------------------------------------------------------------------------------


def pumped(pattern: str, flags: int, length: int) -> Iterator[str]:
    """Texts of about this length, each of which is worst for one of the pattern's repetitions."""
    seen = set()
    for lead, units in _repetitions(parser.parse(pattern, flags), ""):
        for unit in units:
            for text in (lead + unit * (length // len(unit)), (lead + unit) * (length // len(lead + unit))):
                for end in _ENDS:
                    if (text + end) not in seen:
                        seen.add(text + end)
                        yield text + end


def _repetitions(tree: Any, lead: str) -> Iterator[tuple[str, list[str]]]:
    """A text that leads up to each unbounded repetition, and texts that it repeats."""
    for code, argument in tree:
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            _, most, body = argument
            if most is codes.MAXREPEAT or most > 1000:
                yield lead, [unit for unit in {*_samples(body), _sample(body)} if unit]
            yield from _repetitions(body, lead)
        elif code is codes.SUBPATTERN:
            yield from _repetitions(argument[-1], lead)
        elif code is codes.BRANCH:
            for branch in argument[1]:
                yield from _repetitions(branch, lead)
        elif code in (codes.ASSERT, codes.ATOMIC_GROUP):
            yield from _repetitions(argument[-1] if code is codes.ASSERT else argument, lead)
        lead += _sample([(code, argument)])


def _samples(tree: Any) -> Iterator[str]:
    """Several texts that it matches, if it is a single character of a class; one otherwise."""
    [*nodes] = tree
    if len(nodes) == 1 and nodes[0][0] in (codes.IN, codes.ANY, codes.NOT_LITERAL):
        yield from [each for each in _TRIED if _takes(nodes[0], each)][:6]


def _sample(tree: Any) -> str:
    """A text that it matches, as far as that is easily said."""
    text = ""
    for code, argument in tree:
        if code is codes.LITERAL:
            text += chr(argument)
        elif code in (codes.IN, codes.ANY, codes.NOT_LITERAL):
            text += next((each for each in _TRIED if _takes((code, argument), each)), "")
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            text += _sample(argument[2]) * min(max(1, argument[0]), 8)
        elif code is codes.SUBPATTERN:
            text += _sample(argument[-1])
        elif code is codes.BRANCH:
            text += _sample(argument[1][0])
        elif code is codes.ATOMIC_GROUP:
            text += _sample(argument)
    return text


def _takes(node: tuple[Any, Any], character: str) -> bool:
    code, argument = node
    if code is codes.ANY:
        return character != "\n"
    if code is codes.NOT_LITERAL:
        return bool(ord(character) != argument)
    negated = argument[0] == (codes.NEGATE, None)
    return bool(negated) != any(_is_in(each, character) for each in argument)


_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    codes.CATEGORY_SPACE: str.isspace,
    codes.CATEGORY_DIGIT: str.isdigit,
    codes.CATEGORY_WORD: lambda each: each.isalnum() or each == "_",
}
_NOT = {
    codes.CATEGORY_NOT_SPACE: codes.CATEGORY_SPACE,
    codes.CATEGORY_NOT_DIGIT: codes.CATEGORY_DIGIT,
    codes.CATEGORY_NOT_WORD: codes.CATEGORY_WORD,
}


def _is_in(part: tuple[Any, Any], character: str) -> bool:
    code, argument = part
    if code is codes.LITERAL:
        return bool(ord(character) == argument)
    if code is codes.RANGE:
        return bool(argument[0] <= ord(character) <= argument[1])
    if code is codes.CATEGORY:
        return not _CATEGORIES[_NOT[argument]](character) if argument in _NOT else _CATEGORIES[argument](character)
    return False


# --- time -----------------------------------------------------------------------------------------------------------


class TooLong(Exception):
    pass


def slowest(found: Found, texts: Iterable[str], limit: float) -> tuple[float, str]:
    """The most CPU time that one of the texts took, in the way the pattern is used, and the text; at most `limit`."""
    assert found.pattern is not None
    compiled, worst = re.compile(found.pattern, found.flags), (0.0, "")
    for text in texts:
        for method in (getattr(compiled, each) for each in sorted(found.methods)):
            began = time.process_time()
            try:
                with CpuLimit(limit):
                    method(text)
            except TooLong:
                return limit, text
            worst = max(worst, (time.process_time() - began, text))
    return worst


class CpuLimit:
    """Raises TooLong in a block that takes more CPU time. The engine of `re` looks for signals now and then."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGVTALRM, _too_long)
        signal.setitimer(signal.ITIMER_VIRTUAL, self._seconds)

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, self._before)


def _too_long(number: int, frame: object) -> None:
    raise TooLong
