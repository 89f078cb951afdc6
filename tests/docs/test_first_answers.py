"""README and quick start: the first command they show, run with the model they serve, answers as they say it does."""

import json
import subprocess
from collections.abc import Iterator
from itertools import dropwhile

import pytest
from doc_pages import Block, all_blocks
from live_server import LiveServer, live_server

PAGES = ("README.md", "docs/quick-start.md")
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """`ostro serve` as `make serve` starts it: the embedded default model on a real engine."""
    with live_server(tmp_path_factory.mktemp("server"), faults="") as server:
        yield server


@pytest.mark.parametrize("page", PAGES)
def test_the_first_question_is_answered_as_the_page_says(page: str, server: LiveServer) -> None:
    question, shown = first_exchange(page)
    assert "max_tokens" in question.text, "an answer without a limit may be long"
    command = question.text.replace(ADDRESS, server.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    [choice] = json.loads(done.stdout)["choices"]
    expected = json.loads(shown.text)
    assert choice["finish_reason"] == expected["finish_reason"]
    assert choice["message"]["content"] == expected["message"]["content"]
    assert "Tokyo" in choice["message"]["content"]


def first_exchange(page: str) -> tuple[Block, Block]:
    """A page's first curl, and the answer that is shown below it."""
    found = dropwhile(lambda block: "curl" not in block.text, (block for block in all_blocks() if block.page == page))
    question = next(found)
    return question, next(block for block in found if block.language == "json")
