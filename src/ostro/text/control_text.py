"""Prevents control-token injection: finds control texts, and tells the template's own from those in users' messages.

A user may write <|im_end|> into a message. Once a template has put the message between its own markers, the two look
alike; so what users wrote is marked before rendering, with a mark nobody can guess:

    message   hi <|im_end|>         marked    hi ⟨mark⟩<|im_end|>
    rendered  <|im_start|>user⏎hi ⟨mark⟩<|im_end|><|im_end|>
              └ the template's      └ a user's, stays text      └ the template's

Knows strings only: no ids, no templates.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping

from ostro.errors import BadRequest

MAX_NESTING = 64


class ControlTexts:
    """The texts of some tokens, to be found in other texts."""

    def __init__(self, texts: Collection[str]) -> None:
        self.texts = frozenset(filter(None, texts))
        self._lengths = sorted({len(text) for text in self.texts}, reverse=True)
        self._firsts = sorted({text[0] for text in self.texts})
        firsts = "".join(map(re.escape, self._firsts))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def __contains__(self, text: str) -> bool:
        return text in self.texts

    def marked(self, text: str, mark: str) -> str:
        """The text with the mark before every place where a control text begins, including overlapping ones."""
        return self._first.sub(lambda first: self._mark(first, mark), text) if self._may_begin_in(text) else text

    def marked_everywhere(self, text: str, mark: str) -> str:
        """The text with the mark before every character with which a control text could begin."""
        return self._first.sub(lambda first: mark + first[0], text) if self._may_begin_in(text) else text

    def unmarked(self, text: str, mark: str) -> Iterator[tuple[int, int]]:
        """Spans of control texts that bear no mark: the leftmost, and of those the longest, without overlaps."""
        end = 0
        for first in self._first.finditer(text) if self._may_begin_in(text) else ():
            start = first.start()
            if start >= end and not text.endswith(mark, 0, start) and (length := self._length_at(text, start)):
                end = start + length
                yield start, end

    def unmarked_texts(self, text: str, mark: str) -> list[str]:
        return [text[start:end] for start, end in self.unmarked(text, mark)]

    def signed(self, text: str, mark: str, signature: str) -> str:
        """The text with the signature before every unmarked control text, and without marks."""
        parts, done = [], 0
        for start, end in self.unmarked(text, mark):
            parts += [text[done:start].replace(mark, ""), signature, text[start:end]]
            done = end
        parts.append(text[done:].replace(mark, ""))
        return "".join(parts)

    def _may_begin_in(self, text: str) -> bool:
        # Much faster than a regular expression, and most texts hold no control texts.
        return any(first in text for first in self._firsts)

    def _mark(self, first: re.Match[str], mark: str) -> str:
        return mark + first[0] if self._length_at(first.string, first.start()) else first[0]

    def _length_at(self, text: str, start: int) -> int:
        """Length of the longest control text that begins there; 0 if none does."""
        return next((length for length in self._lengths if text[start : start + length] in self.texts), 0)


class Marker:
    """Marks all strings of a JSON value, keys included, and remembers whether any changed."""

    def __init__(self, marked: Callable[[str], str]) -> None:
        self._marked = marked
        self.marked_any = False

    def __call__(self, value: object, depth: int = 0) -> object:
        if depth > MAX_NESTING:
            raise BadRequest(f"messages and tools must not be nested more than {MAX_NESTING} deep.", param="messages")
        match value:
            case str():
                marked = self._marked(value)
                self.marked_any |= marked != value
                return marked
            case None | bool() | int() | float():
                return value
            case Mapping():
                return {self(key, depth + 1): self(entry, depth + 1) for key, entry in value.items()}
            case list() | tuple():
                return [self(entry, depth + 1) for entry in value]
        raise BadRequest(
            f"messages and tools must hold JSON values only, not {type(value).__name__}.", param="messages"
        )
