"""README and front page: the first command they show, run with the model they serve, answers as they say it does."""

import json
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from doc_pages import Block, all_blocks
from live_server import LiveServer, live_server

PAGES = ("README.md", "docs/index.md")
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """`ostro serve` as `make serve` starts it: the default model on a real engine."""
    with live_server(tmp_path_factory.mktemp("server"), faults="") as server:
        yield server


@pytest.mark.parametrize("page", PAGES)
def test_the_first_question_is_answered_as_the_page_says(page: str, server: LiveServer) -> None:
    question, shown = exchanges(page)[0]
    choice = ask(question, server)
    assert choice == choice | shown
    assert "Tokyo" in choice["message"]["content"]


def test_the_readmes_text_is_continued_as_it_says(server: LiveServer) -> None:
    [_, (question, shown)] = exchanges("README.md")
    choice = ask(question, server)
    assert choice == choice | shown
    assert "6, 7, 8" in choice["text"]


def ask(question: Block, server: LiveServer) -> dict[str, Any]:
    assert "max_tokens" in question.text, "an answer without a limit may be long"
    command = question.text.replace(ADDRESS, server.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    [choice] = json.loads(done.stdout)["choices"]
    choice.get("message", {}).pop("refusal", None)
    return dict(choice)


def exchanges(page: str) -> list[tuple[Block, dict[str, Any]]]:
    """A page's curls that have a part of their answer right below them, with that."""
    blocks = [block for block in all_blocks() if block.page == page]
    return [
        (question, json.loads(answer.text))
        for question, answer in pairwise(blocks)
        if "curl" in question.text and answer.language == "json"
    ]
