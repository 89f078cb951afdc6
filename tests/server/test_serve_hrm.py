"""A Hierarchical Reasoning Model behind all endpoints, served from a brain's files by the options of AI-OS's server."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hrm_brain import random_weights, write_brain
from live_server import LiveServer, live_server
from model_directory import write_model
from object_stores import running_store
from sse_events import events_of, streamed

from ostro.client.client import Client
from ostro.config import EngineConfig
from ostro.errors import BadRequest, OstroError
from ostro.llm import LLM
from ostro.sampling_params import SamplingParams

MESSAGES = [{"role": "user", "content": "Say hello."}]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A brain's weights and the directory of a tokenizer."""
    directory = tmp_path_factory.mktemp("hrm")
    return write_brain(directory / "brains" / "actv1", vocab=700), write_model(directory / "tok")


@pytest.fixture(scope="module")
def server(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    brain, tokenizer = files
    options = ("--model-path", str(brain), "--tokenizer-path", str(tokenizer), "--device", "cpu", "--threads", "1")
    steps = ("--hrm-steps", "3", "--hrm-halting")
    with live_server(tmp_path_factory.mktemp("served"), *options, *steps, faults="") as live:
        yield live


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def llm(files: tuple[Path, Path]) -> LLM:
    brain, tokenizer = files
    return LLM(brain, EngineConfig(tokenizer=str(tokenizer), hrm_steps=3, hrm_halting=True, threads=1))


def test_texts_are_those_of_the_engine_in_process(client: httpx.Client, llm: LLM) -> None:
    prompts = ["the fox", "the lazy dog does not mind", "yes"]
    body = {"prompts": prompts, "max_tokens": 6, "temperature": 0.7, "top_p": 0.9, "seed": 4}
    given = client.post("/generate", json=body).json()
    params = SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9, seed=4)
    assert given["completions"] == [each.text for each in llm.generate(prompts, params)]
    events = events_of(client.post("/generate_stream", json=body).text)
    texts = ["".join(each["text"] for each in events if each.get("index") == number) for number in range(3)]
    assert texts == given["completions"]


def test_several_choices_stream_at_once(client: httpx.Client) -> None:
    body: dict[str, object] = {"prompt": "the fox", "max_tokens": 5, "n": 3, "seed": 1, "temperature": 1.5}
    whole = client.post("/v1/completions", json=body).json()["choices"]
    chunks = [chunk["choices"][0] for chunk in streamed(client, "/v1/completions", body)]
    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
    assert len({choice["text"] for choice in whole}) > 1


def test_it_chats_by_the_tokenizers_template(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 4}).json()
    assert answer["usage"]["completion_tokens"] <= 4
    assert answer["model"] == "actv1_student"


def test_scores_are_those_of_the_steps_that_would_generate_it(client: httpx.Client, llm: LLM) -> None:
    prompts, continuations = ["the fox", "the lazy"], [" jumps over", " dog"]
    pairs = {"prompts": prompts, "continuations": continuations}
    given = client.post("/loglikelihood", json=pairs).json()
    assert given["ll"] == pytest.approx([each.logprob for each in llm.score(prompts, continuations)], abs=1e-5)
    for at, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        border = client.post("/tokenize", json={"prompt": prompt}).json()["count"]
        body = {"prompt": prompt + continuation, "max_tokens": 0, "echo": True, "logprobs": 0}
        echoed = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
        assert math.isclose(given["ll"][at], sum(echoed[border:]), abs_tol=1e-5)
    one_pass = client.post("/pseudo_loglikelihood", json=pairs).json()
    assert one_pass["num_tokens"] == given["num_tokens"]
    expected = [each.logprob for each in llm.score(prompts, continuations, one_pass=True)]
    assert one_pass["pll"] == pytest.approx(expected, abs=1e-5)
    assert one_pass["pll"] != pytest.approx(given["ll"], abs=1e-3)


def test_outer_steps_are_reported(client: httpx.Client) -> None:
    client.post("/generate", json={"prompts": ["the fox"] * 4, "max_tokens": 4})
    told = {
        line.partition("{")[0]: float(line.rpartition(" ")[2])
        for line in client.get("/metrics").text.splitlines()
        if line.startswith("ostro_outer_steps")
    }
    assert told["ostro_outer_steps_total"] > 0
    assert told["ostro_outer_steps_saved_total"] > 0


# --- upstream's own use ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As upstream publishes a model: no tokenizer, and a file without a suffix."""
    directory = tmp_path_factory.mktemp("upstream") / "sudoku"
    write_brain(directory, dialect="upstream", vocab=11, seq_len=81, puzzle_size=32, halt_max_steps=5).rename(
        directory / "checkpoint"
    )
    return directory


@pytest.fixture(scope="module")
def solver(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    options = (str(published), "--threads", "1", "--hrm-halting")
    with live_server(tmp_path_factory.mktemp("solver"), *options, faults="") as live:
        yield live


def test_a_published_model_solves_puzzles_by_position_without_a_tokenizer(solver: LiveServer, published: Path) -> None:
    inputs = [[(3 * place + number) % 11 for place in range(81)] for number in range(5)]
    puzzle_ids = [0, 1, 2, 1, 0]
    llm = LLM(published, EngineConfig(hrm_halting=True, threads=1))
    expected = llm.solve(inputs, puzzle_ids)
    with Client(solver.url) as client:
        given = client.solve(inputs, puzzle_ids)
        alone = [client.solve([grid], [puzzle]) for grid, puzzle in zip(inputs, puzzle_ids, strict=True)]
        assert client.solve(inputs) == client.solve(inputs, [0] * 5)
        with pytest.raises(BadRequest, match="puzzle_ids holds 3, but the model knows puzzles from 0 to 2"):
            client.solve(inputs[:1], [3])
        with pytest.raises(BadRequest, match="81"):
            client.solve([[1] * 82])
        with pytest.raises(BadRequest, match="inputs holds token id 11"):
            client.solve([[11]])
    assert given.predictions == [each.predictions for each in expected]
    assert given.steps == [each.steps for each in expected]
    assert given.halted == [each.halted for each in expected]
    assert [one.predictions[0] for one in alone] == given.predictions
    assert [(one.q_halt[0], one.q_continue[0]) for one in alone] == [
        (each.q_halt, each.q_continue) for each in expected
    ]
    assert all(len(grid) == 81 for grid in given.predictions)


def test_without_a_tokenizer_texts_are_token_ids(solver: LiveServer) -> None:
    with solver.client() as client:
        text = client.post("/generate", json={"prompts": ["3 1 4"], "max_tokens": 4, "seed": 1}).json()
        ids = client.post("/generate", json={"prompts": [[3, 1, 4]], "max_tokens": 4, "seed": 1}).json()
        refused = client.post("/generate", json={"prompts": ["three"]})
        chat = client.post("/v1/chat/completions", json={"messages": MESSAGES})
    assert text == ids
    assert all(0 <= int(word) < 11 for word in text["completions"][0].split())
    assert refused.status_code == 400
    assert "'three' is not a token id from 0 to 10. This model has no tokenizer" in refused.json()["error"]["message"]
    assert "no chat template" in chat.json()["error"]["message"]


def test_a_brain_of_the_other_dialect_solves_no_puzzles(client: httpx.Client) -> None:
    response = client.post("/hrm/solve", json={"inputs": [[1, 2, 3]]})
    assert response.status_code == 400
    assert "/hrm/solve is for HRM checkpoints of upstream's dialect" in response.json()["error"]["message"]


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_weights_without_a_brain_are_served_by_flags_with_a_vocabulary_of_berts(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "dog", "##gy", "jumps", "."]
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "vocab.txt").write_text("\n".join(words))
    weights = tmp_path / "student.pt"
    torch.save(random_weights(vocab=len(words)), weights)
    numbers = ("--num-heads", "4", "--h-cycles", "2", "--l-cycles", "2", "--hrm-dialect", "aios", "--max-seq-len", "64")
    options = ("--model-path", str(weights), "--tokenizer-path", str(tmp_path / "tok"), "--threads", "1")
    pairs = {"prompts": ["The fox", "the dog"], "continuations": [" jumps.", "gy jumps"]}
    with live_server(tmp_path, *options, *numbers, faults="") as live, live.client() as client:
        text = client.post("/generate", json={"prompts": ["The doggy"], "max_tokens": 6, "seed": 1}).json()
        scored = client.post("/loglikelihood", json=pairs).json()
    config = EngineConfig(tokenizer=str(tmp_path / "tok"), max_seq_len=64, threads=1, hrm_dialect="aios")
    config = replace(config, hrm_num_heads=4, hrm_h_cycles=2, hrm_l_cycles=2)
    llm = LLM(weights, config)
    [completion] = llm.generate(["The doggy"], SamplingParams(max_tokens=6, seed=1, temperature=0.7))
    assert text["completions"] == [completion.text]
    assert scored["num_tokens"] == [2, 2]
    # [CLS] the fox | jumps . — nothing closes the prompt before its continuation begins.
    by_ids = llm.score([[2, 5, 6], [2, 5, 7]], [[9, 10], [8, 9]])
    assert scored["ll"] == pytest.approx([each.logprob for each in by_ids], abs=1e-5)


@pytest.mark.full
def test_a_brain_in_a_bucket_is_listed_and_answers(files: tuple[Path, Path], tmp_path: Path) -> None:
    brain, tokenizer = files
    places = {brain: "mind", brain.parents[1] / "brain.json": ".", **dict.fromkeys(tokenizer.glob("tok*"), "tokenizer")}
    with running_store("gs", bucket="brains") as store:
        store.put_model(
            "lab/thinker",
            {f"{where}/{path.name}".removeprefix("./"): path.read_bytes() for path, where in places.items()},
        )
        environment = {**store.environment(store.url), "OSTRO_CACHE": str(tmp_path / "cache")}
        options = ("--models", "gs://brains/lab", "--threads", "1")
        with live_server(tmp_path, *options, faults="", env=environment) as live, live.client() as client:
            [card] = client.get("/v1/models").json()["data"]
            assert (card["id"], card["state"]) == ("thinker", "available")
            answer = client.post("/generate", json={"model": "thinker", "prompts": ["the fox"], "max_tokens": 4})
            assert answer.status_code == 200, answer.text
            assert 1 <= answer.json()["usage"]["completion_tokens"] <= 4


def test_weights_without_a_brain_say_which_flags_to_give(files: tuple[Path, Path], tmp_path: Path) -> None:
    torch.save(random_weights(), tmp_path / "student.pt")
    args = ("--model-path", str(tmp_path / "student.pt"), "--tokenizer-path", str(files[1]))
    with live_server(tmp_path, *args, faults="", ready=False) as live:
        live.process.wait(120)
        assert "Give such a file with --hrm-config, or --num-heads and --h-cycles and --l-cycles and " in live.log_text


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"hrm_dialect": "upstream", "hrm_steps": 1, "hrm_halting": True}, "hrm_halting saves nothing"),
        ({"quantize": "int8"}, "does not take quantize"),
        ({"max_running_tokens": 512}, "does not take max_running_tokens"),
        ({"max_seq_len": 4096}, "max_seq_len is 4096"),
    ],
)
def test_what_a_brain_cannot_do_is_refused_by_name(
    files: tuple[Path, Path], options: dict[str, Any], complaint: str
) -> None:
    brain, tokenizer = files
    with pytest.raises(OstroError, match=complaint):
        LLM(brain, EngineConfig(tokenizer=str(tokenizer), **options))


def test_a_server_whose_brain_cannot_do_something_ends_and_says_what(files: tuple[Path, Path], tmp_path: Path) -> None:
    brain, tokenizer = files
    args = ("--model-path", str(brain), "--tokenizer-path", str(tokenizer), "--max-seq-len", "4096")
    with live_server(tmp_path, *args, faults="", ready=False) as live:
        live.process.wait(120)
        assert "max_seq_len is 4096" in live.log_text


def test_an_hrms_settings_are_refused_for_other_models(files: tuple[Path, Path], tmp_path: Path) -> None:
    with live_server(tmp_path, str(files[1]), "--num-heads", "2", faults="", ready=False) as live:
        live.process.wait(120)
        # In the user's words.
        assert "hrm_num_heads (--num-heads) is for HRM checkpoints" in live.log_text


@pytest.mark.full
def test_a_long_step_is_not_taken_for_a_stuck_engine(files: tuple[Path, Path], tmp_path: Path) -> None:
    brain, tokenizer = files
    options = ("--model-path", str(brain), "--tokenizer-path", str(tokenizer), "--threads", "1")
    # So many outer steps for a token take longer than the engine may make no progress.
    with live_server(tmp_path, *options, "--hrm-steps", "200", "--stall-timeout", "1.5", faults="") as live:
        with live.client() as client:
            response = client.post("/generate", json={"prompts": ["the fox " * 30], "max_tokens": 1})
        assert response.status_code == 200, response.text
