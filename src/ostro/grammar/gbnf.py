"""Rewrites grammars from GBNF, llama.cpp's notation, in Lark's. Knows the two notations; compiles nothing.

A GBNF grammar matches characters, and llguidance's matches lexemes, which are greedy: /[a-z]+/ "y" never matches "xy".
So each stretch of a rule without recursion becomes one lexeme, whose regex sees all of it. A grammar without recursion
becomes a single lexeme, and keeps its exact meaning.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ostro.errors import BadRequest
from ostro.formats.guidance_text import text_literal
from ostro.grammar.limits import MAX_DEPTH, MAX_REPETITIONS

ROOT = "root"

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_RULE_NAME = re.compile(r"([A-Za-z0-9_-]++)[ \t]*+::=")
_COUNTS = re.compile(r"\{\s*+(\d{1,9})\s*+(?:(,)\s*+(\d{1,9})?\s*+)?\}")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "[": "[", "]": "]", "-": "-", "^": "^"}
_TIMES = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def is_gbnf(text: str) -> bool:
    """Whether a grammar is in GBNF rather than in Lark's notation."""
    return re.search(r"(?m)^[^\S\n]*+[A-Za-z0-9_-]++\s*+::=", text) is not None


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Characters:
    regex: str


@dataclass(frozen=True, slots=True)
class Reference:
    rule: str


@dataclass(frozen=True, slots=True)
class Repeated:
    node: "Node"
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Sequence:
    nodes: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Alternatives:
    nodes: "tuple[Node, ...]"


Node = Text | Characters | Reference | Repeated | Sequence | Alternatives


def to_lark(text: str) -> str:
    """The same grammar in Lark's notation. Raises BadRequest that names the line at fault."""
    rules = _Parser(text).rules()
    if ROOT not in rules:
        raise BadRequest(f"grammar has no rule {ROOT}: it is where a GBNF grammar starts.", param="grammar")
    return _Writer(rules).lark()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._references: dict[str, int] = {}

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self._skip_space()
        while self._at < len(self._text):
            match = _RULE_NAME.match(self._text, self._at)
            if match is None:
                raise self._error("expected a rule, such as root ::= ...")
            if match[1] in found:
                raise self._error(f"there are two rules {match[1]}")
            self._at = match.end()
            self._skip_space()
            found[match[1]] = self._alternatives()
        for name, at in self._references.items():
            if name not in found:
                self._at = at
                raise self._error(f"there is no rule {name}")
        return found

    def _alternatives(self) -> Node:
        nodes = [self._sequence()]
        while self._peek() == "|":
            self._at += 1
            self._skip_space()
            nodes.append(self._sequence())
        return nodes[0] if len(nodes) == 1 else Alternatives(tuple(nodes))

    def _sequence(self) -> Node:
        nodes: list[Node] = []
        # A rule may span several lines: it ends where the next one begins.
        while self._peek() not in ("", "|", ")") and not _RULE_NAME.match(self._text, self._at):
            nodes.append(self._repeated(self._item()))
        return nodes[0] if len(nodes) == 1 else Sequence(tuple(nodes))

    def _item(self) -> Node:
        first = self._peek()
        if first == '"':
            return Text(self._quoted())
        if first == "[":
            return self._characters()
        if first == "(":
            return self._group()
        if first == ".":
            self._step(1)
            return Characters(r"(?s:.)")
        if match := _NAME.match(self._text, self._at):
            self._references.setdefault(match[0], self._at)
            self._step(len(match[0]))
            return Reference(match[0])
        raise self._error(f"{first!r} is not part of GBNF here; tokens such as <[1]> are not supported")

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"groups are nested more than {MAX_DEPTH} deep")
        self._step(1)
        node = self._alternatives()
        if self._peek() != ")":
            raise self._error("a group is not closed: expected )")
        self._step(1)
        self._depth -= 1
        return node

    def _repeated(self, node: Node) -> Node:
        while True:
            if (times := _TIMES.get(self._peek())) is not None:
                self._step(1)
                node = Repeated(node, *times)
            elif match := _COUNTS.match(self._text, self._at):
                least = int(match[1])
                most = least if match[2] is None else None if match[3] is None else int(match[3])
                if max(least, most or 0) > MAX_REPETITIONS or (most is not None and most < least):
                    raise self._error(f"repetitions go up to {MAX_REPETITIONS}, from the lower to the higher number")
                self._step(len(match[0]))
                node = Repeated(node, least, most)
            else:
                return node

    def _quoted(self) -> str:
        self._at += 1
        letters = []
        while self._peek() != '"':
            letters.append(self._letter("a text is not closed: expected a quote"))
        self._step(1)
        return "".join(letters)

    def _characters(self) -> Node:
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        parts = []
        while self._peek() != "]":
            low = high = self._letter("a set of characters is not closed: expected ]")
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._letter("a set of characters is not closed: expected ]")
            if high < low:
                raise self._error(f"the range {low}-{high} is the wrong way round")
            parts.append(_code(low) if low == high else f"{_code(low)}-{_code(high)}")
        self._step(1)
        if not parts:
            # [^] matches any character; [] could never match, so it must be a mistake.
            if not negated:
                raise self._error("a set of characters is empty")
            return Characters(r"(?s:.)")
        return Characters(f"[{'^' if negated else ''}{''.join(parts)}]")

    def _letter(self, missing: str) -> str:
        if self._at >= len(self._text):
            raise self._error(missing)
        match = _ESCAPE.match(self._text, self._at)
        if match is None:
            self._at += 1
            return self._text[self._at - 1]
        code = match[1] or match[2] or match[3]
        if code is None and match[4] not in _PLAIN:
            raise self._error(f"{match[0]!r} is not an escape of GBNF")
        self._at = match.end()
        if code is None:
            return _PLAIN[match[4]]
        if int(code, 16) > 0x10FFFF or 0xD800 <= int(code, 16) < 0xE000:
            raise self._error(f"{match[0]} is not a character")
        return chr(int(code, 16))

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _step(self, count: int) -> None:
        self._at += count
        self._skip_space()

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _error(self, why: str) -> BadRequest:
        line = self._text.count("\n", 0, self._at) + 1
        return BadRequest(f"grammar is not GBNF: {why} (line {line}).", param="grammar")


def _code(letter: str) -> str:
    return f"\\u{{{ord(letter):x}}}"


@dataclass(slots=True)
class _Writer:
    """Non-recursive rules become terminals, which Lark merges into regexes; recursive ones become Lark rules."""

    rules: dict[str, Node]
    names: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def lark(self) -> str:
        recurring = _recurring(self.rules)
        self.names = {
            name: f"r{number}" if name in recurring else f"T{number}" for number, name in enumerate(self.rules)
        }
        self.lines.append(f"start: {self.names[ROOT]}")
        for name, node in self.rules.items():
            written = self._rule(node) if name in recurring else _terminal(node, self.names)
            self.lines.append(f"{self.names[name]}: {written}")
        return "\n".join(["%llguidance {}", *self.lines, ""])

    def _recurs(self, node: Node) -> bool:
        if isinstance(node, Reference):
            return self.names[node.rule].startswith("r")
        return any(map(self._recurs, _parts(node)))

    def _rule(self, node: Node) -> str:
        """Part of a recursive rule. Adjacent non-recursive nodes are merged into one terminal."""
        if not self._recurs(node):
            return self._lexeme((node,))
        if isinstance(node, Reference):
            return self.names[node.rule]
        if isinstance(node, Repeated):
            return f"({self._rule(node.node)}){_times(node)}"
        if isinstance(node, Alternatives):
            return "(" + " | ".join(map(self._rule, node.nodes)) + ")"
        written, lexeme = [], list[Node]()
        for part in _parts(node):
            if not self._recurs(part):
                lexeme.append(part)
                continue
            if lexeme:
                written.append(self._lexeme(tuple(lexeme)))
                lexeme = []
            written.append(self._rule(part))
        if lexeme:
            written.append(self._lexeme(tuple(lexeme)))
        return " ".join(written)

    def _lexeme(self, nodes: tuple[Node, ...]) -> str:
        name = f"L{len(self.lines)}"
        self.lines.append(f"{name}: {_terminal(Sequence(nodes), self.names)}")
        return name


def _terminal(node: Node, names: dict[str, str]) -> str:
    if isinstance(node, Text):
        return text_literal(node.text)
    if isinstance(node, Characters):
        return f"/{node.regex}/"
    if isinstance(node, Reference):
        return names[node.rule]
    if isinstance(node, Repeated):
        return f"({_terminal(node.node, names)}){_times(node)}"
    if isinstance(node, Alternatives):
        return "(" + " | ".join(_terminal(each, names) for each in node.nodes) + ")"
    return " ".join(_terminal(each, names) for each in node.nodes) or '""'


def _times(node: Repeated) -> str:
    if node.most is None and node.least < 2:
        return "+" if node.least else "*"
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _parts(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Repeated):
        return (node.node,)
    return node.nodes if isinstance(node, Sequence | Alternatives) else ()


def _references(node: Node) -> Iterator[str]:
    if isinstance(node, Reference):
        yield node.rule
    for part in _parts(node):
        yield from _references(part)


def _recurring(rules: dict[str, Node]) -> set[str]:
    """Rules that refer to themselves, directly or not, and rules that refer to such rules."""
    needs = {name: set(_references(node)) for name, node in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, needed in needs.items():
        for each in needed:
            users[each].append(name)
    settled = [name for name, needed in needs.items() if not needed]
    for name in settled:
        for user in users[name]:
            needs[user].discard(name)
            if not needs[user]:
                settled.append(user)
    return needs.keys() - set(settled)
