"""Quantised checkpoints of each format: the tokens that transformers finds with their twins in float32."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from native_directory import load
from native_models import ModelCheckpoint, needs_library, savable_model
from quantized_packers import FORMATS, write_quantized
from safetensors.torch import save_file
from telling_weights import telling

from ostro.backends.native.runner import NativeRunner
from ostro.backends.torch.runner import TorchRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.errors import Unsupported
from ostro.sampling_params import SamplingParams

CONFIG: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
PROMPT = tuple(torch.randint(3, 160, (24,), generator=torch.Generator().manual_seed(1)).tolist())
LENGTH = 12


@pytest.fixture(scope="module")
def reference() -> transformers.PreTrainedModel:
    settings = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
    return telling(transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)))


@pytest.fixture(scope="module")
def weights(reference: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in reference.state_dict().items()}


def greedy(model: transformers.PreTrainedModel, twin: Mapping[str, torch.Tensor]) -> list[int]:
    model.load_state_dict(dict(twin))
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(LENGTH):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def logprobs(model: transformers.PreTrainedModel, twin: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Log-probabilities of the prompt's tokens except the first."""
    model.load_state_dict(dict(twin))
    with torch.inference_mode():
        scores: torch.Tensor = model(torch.tensor([PROMPT]), use_cache=False).logits[0].log_softmax(-1)
    return scores[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])]


def ran(runner: NativeRunner | TorchRunner, params: SamplingParams) -> tuple[list[int], torch.Tensor]:
    core = EngineCore(runner)
    core.add(Request(id=0, prompt_ids=PROMPT, params=params, seed=0, prompt_logprobs_from=1))
    tokens: list[int] = []
    scores: list[float] = []
    while core.has_work:
        for gain in core.step():
            tokens += gain.token_ids
            scores += [each.logprob for each in gain.prompt_logprobs]
    return tokens, torch.tensor(scores)


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", FORMATS)
def test_tokens_on_torch_are_those_of_the_twin(
    name: str, reference: transformers.PreTrainedModel, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    twin = write_quantized(tmp_path, CONFIG, weights, FORMATS[name])
    expected = greedy(reference, twin)
    assert len(set(expected)) > 3, "the test would not see a difference"
    runner = load(tmp_path, backend="torch")
    assert isinstance(runner, TorchRunner)
    assert ran(runner, SamplingParams(max_tokens=LENGTH, temperature=0))[0] == expected


@pytest.mark.cases(4)
@needs_library
@pytest.mark.parametrize("name", FORMATS)
def test_native_scores_are_those_of_the_twin_but_for_rounding(
    name: str,
    reference: transformers.PreTrainedModel,
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Activations are rounded to 8 bits, as with any weights in blocks."""
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    format = FORMATS[name]
    twin = write_quantized(tmp_path / "model", CONFIG, weights, format)
    runner = load(tmp_path / "model")
    assert isinstance(runner, NativeRunner)
    assert format.native in runner.spec.precision
    _, scores = ran(runner, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    # The model amplifies rounding; a single wrong code or scale moves scores by ten times as much.
    assert (scores - logprobs(reference, twin)).abs().mean() < 0.1


@needs_library
def test_what_the_native_core_does_with_the_numbers_is_logged(
    weights: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    write_quantized(tmp_path / "model", CONFIG, weights, FORMATS["fp8-block"])
    with caplog.at_level("INFO"):
        load(tmp_path / "model")
    assert "14 quantised matrices become Q8_0, requantised to 8 bits" in caplog.text


@needs_library
def test_scales_that_float16_cannot_hold_run_on_torch(
    weights: dict[str, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    huge = {name: tensor * 1e9 if ".layers." in name else tensor for name, tensor in weights.items()}
    write_quantized(tmp_path / "model", CONFIG, huge, FORMATS["int-quantized"])
    assert isinstance(load(tmp_path / "model"), TorchRunner)
    with pytest.raises(Unsupported, match="cannot be repacked: its scales are too large for float16"):
        load(tmp_path / "model", backend="native")


_FUSED: Mapping[str, Mapping[str, object]] = {
    "phi3": {"architectures": ["Phi3ForCausalLM"]},
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "rotary_pct": 0.5},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
}


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("family", _FUSED)
def test_matrices_that_are_fused_interleaved_or_experts_are_those_of_the_twin(
    family: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin is run by torch too, which other tests hold to transformers."""
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    config = {**{key: value for key, value in CONFIG.items() if key != "model_type"}, **_FUSED[family]}
    tensors = dict(ModelCheckpoint(savable_model(config), config).tensors())
    # Smaller matrices amplify rounding less.
    tensors = {
        name: tensor / 3 if ".layers." in name and tensor.dim() == 2 else tensor for name, tensor in tensors.items()
    }
    twin = write_quantized(tmp_path / "quantized", config, tensors, FORMATS["pack-quantized"])
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "config.json").write_text(json.dumps(config))
    save_file(twin, tmp_path / "twin" / "model.safetensors")
    params = SamplingParams(max_tokens=LENGTH, temperature=0, prompt_logprobs=0)
    tokens, scores = ran(load(tmp_path / "quantized", backend=backend), params)
    expected, theirs = ran(load(tmp_path / "twin", backend="torch"), params)
    assert (scores - theirs).abs().mean() < (1e-4 if backend == "torch" else 0.2)
    if backend == "torch":
        assert tokens == expected
