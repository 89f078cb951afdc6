"""What a profile shows of each runner's own work, through `LLM` and the commands."""

import json
import os
from pathlib import Path

import pytest
from model_directory import write_model
from native_models import needs_library
from traces import named, read_spans

from ostro import LLM, SamplingParams
from ostro.cli import main
from ostro.config import EngineConfig
from ostro.errors import ProfileFailed

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PROMPTS = ["the quick brown fox", "the lazy dog"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def torch_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    narrow = write_model(tmp_path_factory.mktemp("models") / "narrow", heads=4)
    return LLM(narrow, EngineConfig(device="cpu", threads=1))


def texts(llm: LLM) -> list[str]:
    return [completion.text for completion in llm.generate(PROMPTS, PARAMS)]


@needs_library
def test_native_steps_show_the_time_of_each_operation(model: Path, tmp_path: Path) -> None:
    llm = LLM(model, EngineConfig(device="cpu", threads=1))
    plain = texts(llm)
    before = llm.core.scheduler.counters.steps
    with llm.profile(tmp_path) as path:
        assert texts(llm) == plain
    assert list(tmp_path.iterdir()) == [path]
    spans = read_spans(path)
    launches = named(spans, "launch")
    assert len(launches) == llm.core.scheduler.counters.steps - before
    for launch in launches:
        inside = {span.name for span in spans if launch.holds(span)} - {"launch"}
        assert inside >= {"embed", "linear", "attend", "sample"}


def test_torch_steps_show_its_operations(torch_llm: LLM, tmp_path: Path) -> None:
    plain = texts(torch_llm)
    before = torch_llm.core.scheduler.counters.steps
    with torch_llm.profile(tmp_path) as path:
        assert texts(torch_llm) == plain
    spans = read_spans(path)
    launches = named(spans, "launch")
    assert len(launches) == torch_llm.core.scheduler.counters.steps - before
    assert launches[-1].name == "launch: 2 sequences, 2 tokens, 2 sampled"
    for launch in launches:
        assert any(span.name.startswith("aten::") for span in spans if launch.holds(span))


async def _awaited(llm: LLM) -> list[str]:
    return [completion.text for completion in await llm.agenerate(PROMPTS, PARAMS)]


def test_steps_of_another_thread_are_seen(torch_llm: LLM, tmp_path: Path) -> None:
    """Calls that are awaited are stepped by a worker thread."""
    import asyncio

    with torch_llm.profile(tmp_path) as path:
        asyncio.run(_awaited(torch_llm))
    assert any(span.name.startswith("aten::") for span in read_spans(path))


def test_directory_that_vanishes_is_reported(torch_llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ProfileFailed, match="cannot be written"), torch_llm.profile(tmp_path / "gone"):
        (tmp_path / "gone").rmdir()
    assert texts(torch_llm)


def test_generate_and_batch_write_a_profile(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = tmp_path / "requests.jsonl"
    body = {"prompt": "the fox", "max_tokens": 3}
    requests.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}))
    common = ("--model", str(model), "--threads", "1", "--device", "cpu")
    for args in (
        ("generate", "the fox", "--max-tokens", "3"),
        ("batch", str(requests), "--output", os.devnull),
    ):
        assert main([*args, *common, "--profile", str(tmp_path / args[0])]) == 0
        [path] = (tmp_path / args[0]).iterdir()
        assert str(path) in capsys.readouterr().err
        assert named(read_spans(path), "launch")
