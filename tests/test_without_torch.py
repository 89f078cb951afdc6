"""All that the native core serves it serves without torch, and what needs torch says so in one line."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from checkout import ROOT
from encoder_directory import WIDE, add_modules, reference, write_encoder
from fake_hub import hub_environment, running_hub
from hrm_brain import write_brain
from live_server import LiveServer, live_server
from model_directory import make_embedding_model, pickle_weights, write_model
from native_models import needs_library
from peft_directory import random_adapter
from safetensors.numpy import load_file, save_file
from tiny_models import random_model
from torch_blocker import BLOCKER, without_torch
from warm_start import warm_run

pytestmark = needs_library

INSTALL = f"needs libraries that are not installed. Run: pip install -e '{ROOT}[torch]'"
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


# What starts warm has read Python's own variables already; its children have not.
BLOCKED = f"""
{BLOCKER}
assert "torch" not in sys.modules
from ostro.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run(directory: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **without_torch(directory), "OSTRO_CACHE": str(directory / "cache"), **env},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def ostro(directory: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **without_torch(directory), "OSTRO_CACHE": str(directory / "cache"), **env}
    return warm_run(arguments, program=BLOCKED, environment=environment, cwd=directory)


def test_the_blocker_blocks(tmp_path: Path) -> None:
    assert "No module named 'torch'" in run(tmp_path, "-c", "import torch").stderr
    assert run(tmp_path, "-c", "from ostro.system.machine import has_torch; print(has_torch())").stdout == "False\n"


# --- what is served -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A model with an adapter, and one that embeds; their weights are packed here."""
    directory = tmp_path_factory.mktemp("served")
    chat = write_model(directory / "chat", seed=5)
    vectors = make_embedding_model(write_model(directory / "vectors", seed=6))
    adapter = random_adapter(directory / "adapter", random_model(json.loads((chat / "config.json").read_text())))
    arguments = (
        *("--model", f"chat={chat}", "--model", f"vectors={vectors}", "--lora", f"tuned={adapter}"),
        *("--threads", "1", "--max-models", "2"),
    )
    env = {**without_torch(directory), "OSTRO_CACHE": str(directory / "cache")}
    with live_server(directory, *arguments, faults="", env=env) as live:
        yield live


@pytest.mark.full
def test_an_encoder_embeds(tmp_path: Path) -> None:
    dense = torch.ones(8, 64), torch.ones(8)
    encoder = add_modules(write_encoder(tmp_path / "encoder", reference(WIDE["bert"])), dense=[dense])
    program = f"from ostro import LLM; print(len(LLM({str(encoder)!r}).embed('the quick brown fox')[0]))"
    done = run(tmp_path, "-c", program)
    assert done.stdout == "8\n", done.stderr


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def post(client: httpx.Client, path: str, **body: object) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_chat_with_log_probabilities(client: httpx.Client) -> None:
    body = post(
        client,
        "/v1/chat/completions",
        model="chat",
        messages=MESSAGES,
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    )
    [choice] = body["choices"]
    listed = choice["logprobs"]["content"]
    assert len(listed) == body["usage"]["completion_tokens"]
    for entry in listed:
        assert len(entry["top_logprobs"]) == 3
        # Greedy: the token is the likeliest.
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] <= 0


def test_a_prompt_is_scored_by_echo_as_by_loglikelihood(client: httpx.Client) -> None:
    prompt, continuation = "the quick", " brown fox"
    echoed = post(
        client, "/v1/completions", model="chat", prompt=prompt + continuation, max_tokens=0, echo=True, logprobs=1
    )
    scores = echoed["choices"][0]["logprobs"]
    first = next(at for at, offset in enumerate(scores["text_offset"]) if offset >= len(prompt))
    scored = post(client, "/loglikelihood", model="chat", prompts=[prompt], continuations=[continuation])
    assert scored["ll"][0] == pytest.approx(math.fsum(scores["token_logprobs"][first:]), abs=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"repetition_penalty": 3.0},
        {"logit_bias": {"5": 100}},
        {"bad_words": ["{first}"]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_settings_change_the_answer(changes: dict[str, Any], client: httpx.Client) -> None:
    body = {"model": "chat", "prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    plain = post(client, "/v1/completions", **body, logprobs=0)["choices"][0]
    if "bad_words" in changes:
        changes = {"bad_words": plain["logprobs"]["tokens"][:1]}
    assert post(client, "/v1/completions", **body, **changes)["choices"][0]["text"] != plain["text"]


def test_min_tokens_is_honoured(client: httpx.Client) -> None:
    body = {"model": "chat", "prompt": "the", "max_tokens": 9, "min_tokens": 9, "temperature": 1.5, "seed": 3}
    assert post(client, "/v1/completions", **body)["usage"]["completion_tokens"] == 9


@pytest.mark.full
def test_vectors(client: httpx.Client) -> None:
    body = post(client, "/v1/embeddings", model="vectors", input=["the fox", "the dog"])
    for entry in body["data"]:
        assert math.fsum(number * number for number in entry["embedding"]) == pytest.approx(1, abs=1e-4)


def test_an_adapter_beside_its_base(client: httpx.Client) -> None:
    texts = [
        post(client, "/v1/completions", model=name, prompt="the quick", max_tokens=12, temperature=0)["choices"][0]
        for name in ("chat", "tuned", "chat")
    ]
    assert texts[0] == texts[2] != texts[1]


def test_engines_ran_natively_and_nobody_imported_torch(client: httpx.Client, server: LiveServer) -> None:
    models = {entry["id"]: entry for entry in client.get("/v1/models").json()["data"]}
    assert "torch" not in server.log_text
    assert {"chat", "tuned", "vectors"} <= models.keys()


@pytest.mark.full
def test_llm_generates_and_scores(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    program = (
        f"from ostro import LLM, SamplingParams; llm = LLM({str(model)!r}); "
        "print(llm.generate('the', SamplingParams(max_tokens=3, logprobs=1))[0].choices[0].token_ids); "
        "import sys; print('torch' in sys.modules)"
    )
    done = run(tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.full
def test_pickles_are_read(tmp_path: Path) -> None:
    """Until this was so, the image without torch could not serve the models of many buckets."""
    model = write_model(tmp_path / "model")
    prompt = ("generate", "the quick", "--temperature", "0", "--max-tokens", "8", "--model", str(model))
    expected = ostro(tmp_path, *prompt)
    pickle_weights(model)
    done = ostro(tmp_path, *prompt)
    assert (done.returncode, done.stdout) == (0, expected.stdout), done.stderr
    assert done.stdout.strip()


# --- what needs torch -----------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "what"),
    [(("--device", "cuda"), "device cuda"), (("--backend", "torch"), "backend torch")],
)
def test_settings_that_need_torch_end_the_start(arguments: tuple[str, ...], what: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    for command in (("serve", str(model), "--port", "0"), ("generate", "hello", "--model", str(model))):
        done = ostro(tmp_path, *command, *arguments)
        assert done.returncode == 1
        assert f"{what} {INSTALL}" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_model_without_native_kernels_needs_torch(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", heads=4)
    done = ostro(tmp_path, "generate", "hello", "--model", str(model))
    assert f"model (its heads are 8 wide, not a multiple of 16 up to 256) {INSTALL}" in done.stderr


def test_model_that_will_run_on_torch_is_reported_to_need_it(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", heads=4)
    assert INSTALL in ostro(tmp_path, "serve", str(model), "--print-config").stdout


def test_an_hrm_needs_torch(tmp_path: Path) -> None:
    done = ostro(tmp_path, "generate", "hello", "--model", str(write_brain(tmp_path / "brain")))
    assert f"(it is an HRM) {INSTALL}" in done.stderr


def test_pickles_that_only_torch_reads_need_torch(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    weights = {name: torch.from_numpy(values) for name, values in load_file(model / "model.safetensors").items()}
    (model / "model.safetensors").unlink()
    torch.save(weights, model / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    done = ostro(tmp_path, "generate", "hello", "--model", str(model))
    assert f"pytorch_model.bin, a pickle that only torch reads, {INSTALL}" in done.stderr


def test_without_the_native_core_every_model_needs_torch(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    done = ostro(tmp_path, "generate", "hello", "--model", str(model), OSTRO_NATIVE_LIBRARY=str(tmp_path / "none.so"))
    assert "The native core was not built" in done.stderr
    assert INSTALL in done.stderr


@pytest.mark.full
def test_a_model_that_needs_torch_is_not_downloaded(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", heads=4)
    weights = load_file(model / "model.safetensors")
    # Large beside its header, and passed over by whoever loads it.
    save_file(weights | {"model.rotary_emb.inv_freq": np.zeros(1 << 19, np.float32)}, model / "model.safetensors")
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    with running_hub({"org/narrow": files}) as hub:
        env = hub_environment(hub.address, tmp_path / "home")
        for command in (("generate", "hello", "--model", "org/narrow"), ("serve", "org/narrow", "--dry-run")):
            done = ostro(tmp_path, *command, **env)
            assert done.returncode == 1
            assert INSTALL in done.stderr + done.stdout, done.stderr
        assert hub.num_bytes < len(files["model.safetensors"]) / 2


def test_planning_does_without_torch(tmp_path: Path) -> None:
    native, other = write_model(tmp_path / "native"), write_model(tmp_path / "other", heads=4)
    assert "runs on:          native" in ostro(tmp_path, "plan", str(native)).stdout
    assert "runs on:          torch (cpu)" in ostro(tmp_path, "plan", str(other)).stdout
