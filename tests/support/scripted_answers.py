"""Answers that the fake runner gives word for word, for tests of what is made of them.

A script's key is a number: put it anywhere into a message, and the answer comes. Of several keys in a prompt the last
counts, so that a conversation can go on with what a tool returned.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from live_server import LiveServer, live_server

from ostro.text.tokenizer import Tokenizer
from ostro.weights import open_checkpoint


@cache
def default_tokenizer() -> Tokenizer:
    return Tokenizer.load(open_checkpoint(None).tokenizer_path)


class Scripts:
    def __init__(self) -> None:
        self._entries: list[tuple[list[int], list[list[int]]]] = []

    def add(self, *answers: str) -> str:
        """The key of an answer, or of one for each choice. The texts of special tokens are those tokens."""
        # Digits are tokens of their own, whatever stands beside them.
        key = str(90000 + len(self._entries))
        encode = default_tokenizer().encode
        entry = encode(key, add_special=False), [encode(answer, add_special=False) for answer in answers]
        self._entries.append(entry)
        return key

    @contextmanager
    def served(
        self, directory: Path, *args: str, template: str | None = None, faults: str = "fake"
    ) -> Iterator[LiveServer]:
        """A server of the default model, whose engine knows the scripts; with this template, if one is given."""
        if template is not None:
            (directory / "chat.jinja").write_text(template, encoding="utf-8")
            args = (*args, "--chat-template", str(directory / "chat.jinja"))
        path = directory / "answers.json"
        path.write_text(json.dumps(self._entries), encoding="utf-8")
        with live_server(directory, *args, faults=f"{faults},answers={path}") as server:
            yield server
