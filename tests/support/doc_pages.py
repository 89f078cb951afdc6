"""The Markdown at the root and in docs/ as tests read it: fenced blocks, commands, tables, links. Runs nothing."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})\s*([\w+-]*).*$")
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")
_LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
_JOINTS = frozenset({"|", "||", "&&", ";", "&", ">", ">>", "<", "2>", "(", ")"})


@dataclass(frozen=True)
class Block:
    page: str
    """Its path from the repository's root."""
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One program with its arguments, as a shell would start it."""

    block: Block
    variables: tuple[tuple[str, str], ...]
    words: tuple[str, ...]
    line: str
    """The whole shell line that contains it."""

    @property
    def program(self) -> str:
        return self.words[0].rpartition("/")[2]

    @property
    def text(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True)
class Table:
    page: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    section: str
    """The heading it stands under."""


def pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *docs_pages()]


def docs_pages() -> list[Path]:
    """The pages of the site."""
    return sorted((ROOT / "docs").rglob("*.md"))


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def all_blocks() -> tuple[Block, ...]:
    return tuple(block for page in pages() for block in blocks(name_of(page), page.read_text(encoding="utf-8")))


def blocks(page: str, text: str) -> Iterator[Block]:
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        number += 1
        if opening is None:
            continue
        indent, fence, language = opening.groups()
        begin = number
        while number < len(lines) and not lines[number].strip().startswith(fence):
            number += 1
        content = [line.removeprefix(indent) for line in lines[begin:number]]
        yield Block(page, begin + 1, language, "\n".join(content) + "\n")
        number += 1


def commands(block: Block) -> Iterator[Command]:
    """Every program that a block of shell starts, in order."""
    for line in _shell_lines(block.text):
        for words in _simple_commands(line):
            variables = []
            while words and _ASSIGNMENT.match(words[0]):
                name, _, value = words.pop(0).partition("=")
                variables.append((name, value))
            if words:
                yield Command(block, tuple(variables), tuple(words), line)


def _shell_lines(text: str) -> Iterator[str]:
    """Logical lines, joined at backslashes and open quotation marks, without prompts."""
    waiting = ""
    for line in text.splitlines():
        waiting += line.removeprefix("$ ") if not waiting else line
        if waiting.endswith("\\"):
            waiting = waiting[:-1] + " "
            continue
        try:
            shlex.split(waiting, comments=True)
        except ValueError:
            waiting += "\n"
            continue
        if waiting.strip():
            yield waiting
        waiting = ""
    assert not waiting.strip(), f"unfinished: {waiting}"


def _simple_commands(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.commenters = "#"
    lexer.whitespace_split = True
    words: list[str] = []
    skip = False
    for word in lexer:
        if word in _JOINTS:
            if word in (">", ">>", "<", "2>"):
                skip = True
                continue
            yield words
            words = []
        elif skip:
            skip = False
        else:
            words.append(word)
    yield words


def tables(page: Path) -> Iterator[Table]:
    lines = outside_fences(page.read_text(encoding="utf-8"))
    number = 0
    section = ""
    while number + 1 < len(lines):
        if heading := _HEADING.match(lines[number]):
            section = heading[1]
        if lines[number].startswith("|") and re.fullmatch(r"[|\s:-]+", lines[number + 1]) and "-" in lines[number + 1]:
            begin = number
            while number < len(lines) and lines[number].startswith("|"):
                number += 1
            found = [_cells(line) for line in lines[begin:number]]
            yield Table(name_of(page), found[0], tuple(found[2:]), section)
        number += 1


def outside_fences(text: str) -> list[str]:
    found, inside = [], False
    for line in text.splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            found.append(line)
    return found


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def links(text: str) -> list[str]:
    plain = re.sub(r"`[^`]*`", "", "\n".join(outside_fences(text)))
    return _LINK.findall(plain)


def anchors(text: str) -> set[str]:
    found = set()
    for line in outside_fences(text):
        if heading := _HEADING.match(line):
            words = re.sub(r"[^\w\s-]", "", re.sub(r"`|\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])).strip().lower()
            found.add(re.sub(r"[\s]+", "-", words))
        found |= set(re.findall(r'(?:id|name)="([^"]+)"', line))
    return found


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")))
