"""NaN and infinity among a model's weights: one message wherever they show, and refused at load where that is cheap."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import pytest
import torch
from live_server import live_server
from model_directory import make_embedding_model, write_model
from native_models import needs_library
from safetensors.torch import load_file, save_file

from ostro.config import EngineConfig
from ostro.engine.runner import NOT_FINITE
from ostro.errors import BadCheckpoint, SequenceFailed
from ostro.llm import LLM
from ostro.sampling_params import SamplingParams

Backend = Literal["native", "torch"]
DEVICE_KINDS = (pytest.param("native", marks=needs_library), "torch")
# The test model's vocabulary has this letter as a token of its own.
BROKEN, WHOLE = "Z", "the quick brown fox"


def poisoned(directory: Path, tensor: str, index: int | None, value: float) -> Path:
    """The model with one number changed: in row `index`, or at the beginning of a vector."""
    weights = load_file(directory / "model.safetensors")
    if index is None:
        weights[tensor][0] = value
    else:
        weights[tensor][index] = value
    save_file(weights, directory / "model.safetensors")
    return directory


def broken_letter(directory: Path, value: float = torch.nan) -> Path:
    """One token's embedding is no number: the model loads and serves, as long as no one writes that letter."""
    model = write_model(directory)
    with_tokenizer = LLM(str(model), config=EngineConfig(backend="torch", kv_memory=1 << 20))
    [token] = with_tokenizer.tokenizer.encode(BROKEN)
    return poisoned(model, "model.embed_tokens.weight", token, value)


def load(model: Path, backend: Backend) -> LLM:
    return LLM(str(model), config=EngineConfig(backend=backend, device="cpu", kv_memory=1 << 20))


def wide(directory: Path) -> Path:
    """Heads as wide as the native core takes them."""
    import json

    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2, "num_key_value_heads": 1}))
    return directory


@pytest.mark.cases(2)
@pytest.mark.parametrize("backend", DEVICE_KINDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_offline_generation_and_scoring_say_the_same(tmp_path: Path, backend: Backend, value: float) -> None:
    """`score` gave a log-probability of nan, and called it the most likely continuation."""
    llm = load(wide(broken_letter(tmp_path / "model", value)), backend)
    [completion] = llm.generate([BROKEN], SamplingParams(max_tokens=2))
    assert completion.choices[0].error == NOT_FINITE
    with pytest.raises(SequenceFailed, match="not finite"):
        llm.score([WHOLE], [BROKEN + BROKEN])
    [completion] = llm.generate([f"{WHOLE} {BROKEN} fox"], SamplingParams(max_tokens=1, prompt_logprobs=0, n=2))
    assert [choice.error for choice in completion.choices] == [NOT_FINITE] * 2
    assert llm.score([WHOLE], [" fox"])[0].logprob < 0


def test_a_non_finite_embedding_is_an_error(tmp_path: Path) -> None:
    llm = load(make_embedding_model(broken_letter(tmp_path / "model")), "torch")
    with pytest.raises(SequenceFailed, match="not finite"):
        llm.embed(BROKEN)
    assert llm.embed(WHOLE)


ASKS: Mapping[str, Callable[[str], tuple[str, Mapping[str, object]]]] = {
    "generate": lambda text: ("/generate", {"prompts": [text], "max_tokens": 2}),
    "loglikelihood": lambda text: ("/loglikelihood", {"prompts": ["the"], "continuations": [text + text]}),
    "echo": lambda text: ("/v1/completions", {"prompt": text + text, "echo": True, "logprobs": 1, "max_tokens": 0}),
    "prompt_logprobs": lambda text: ("/v1/completions", {"prompt": text + text, "prompt_logprobs": 1, "max_tokens": 1}),
    "chat": lambda text: ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
}


@pytest.mark.full
def test_every_endpoint_says_the_same(tmp_path: Path) -> None:
    """Scoring answered with an opaque 500."""
    model = broken_letter(tmp_path / "model")
    serving = live_server(tmp_path, "--model", str(model), "--kv-memory", "1M", faults="")
    with serving as server, server.client() as client:
        for path, body in (ask(BROKEN) for ask in ASKS.values()):
            answer = client.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["message"]) == (500, NOT_FINITE), path
        for path, body in (ask(" fox") for ask in ASKS.values()):
            assert client.post(path, json=body).status_code == 200, path


@pytest.mark.full
def test_a_model_without_finite_logits_is_refused_at_load(tmp_path: Path) -> None:
    model = poisoned(write_model(tmp_path / "model"), "model.layers.1.mlp.down_proj.weight", 3, torch.nan)
    with live_server(tmp_path, "--model", str(model), faults="", ready=False) as server:
        server.process.wait(120)
        assert NOT_FINITE in server.log_text


@pytest.mark.parametrize("backend", DEVICE_KINDS)
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_norm_that_is_not_a_number_is_refused_by_name(tmp_path: Path, backend: Backend, value: float) -> None:
    model = poisoned(wide(write_model(tmp_path / "model")), "model.layers.0.input_layernorm.weight", None, value)
    with pytest.raises(BadCheckpoint, match=r"'model\.layers\.0\.input_layernorm\.weight' holds NaN or infinity"):
        load(model, backend)
