"""An LLM whose own process is the first rank."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from model_directory import write_model

from ostro import LLM, EngineConfig, SamplingParams
from ostro.errors import Unavailable

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")]

PROMPTS = ["the quick brown fox", "yes"]
GREEDY = SamplingParams(max_tokens=8, temperature=0)


def children() -> list[int]:
    """Ranks that this process has started."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"ostro.backends.rank_process" in (directory / "cmdline").read_bytes():
                found.append(int(directory.name))
    return found


def texts(llm: LLM) -> list[str]:
    return [output.choices[0].text for output in llm.generate(PROMPTS, GREEDY)]


def test_a_lost_rank_is_an_error_that_says_so_and_the_model_can_be_loaded_again(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model", heads=4))
    expected = texts(LLM(config=EngineConfig(model=model, backend="torch", device="cpu")))
    config = EngineConfig(model=model, backend="torch", device="cpu", tensor_parallel=2)
    llm = LLM(config=config)
    assert texts(llm) == expected
    [rank] = children()
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(Unavailable, match="Rank 1 of 2 ended"):
        texts(llm)
    assert texts(LLM(config=config)) == expected
