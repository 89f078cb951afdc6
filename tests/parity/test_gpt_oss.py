"""gpt-oss checkpoints as the Hub stores them, with experts in MXFP4 or in bfloat16: the tokens and scores that
transformers finds with the same numbers in float32.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from native_directory import load
from native_models import needs_library
from quantized_packers import mxfp4
from safetensors.torch import save_file
from telling_weights import telling
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from ostro.backends.native.runner import NativeRunner
from ostro.backends.torch.runner import TorchRunner
from ostro.config import BackendName
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.errors import BadCheckpoint, UnsupportedModel
from ostro.models.registry import describe
from ostro.sampling_params import SamplingParams
from ostro.torch_models.layers import clamped_silu

CONFIG: Mapping[str, object] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
PROMPT = tuple(torch.randint(3, 160, (40,), generator=torch.Generator().manual_seed(1)).tolist())
LENGTH = 12


def reference() -> transformers.PreTrainedModel:
    """With sinks and biases that matter, and gates and ups beyond where they are clamped."""
    settings = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
    config = transformers.GptOssConfig(**settings, attn_implementation="eager")
    model = telling(transformers.GptOssForCausalLM(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter *= 10
            elif name.endswith("gate_up_proj"):
                parameter *= 2
            elif name.endswith("down_proj"):
                parameter *= 0.25
    return model


def write(directory: Path, model: transformers.PreTrainedModel, *, blocks: bool) -> None:
    """Writes the checkpoint, and rounds the model's own numbers as the files' are."""
    config = dict(CONFIG)
    stored: dict[str, torch.Tensor] = {}
    if blocks:
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if blocks and name.endswith(("gate_up_proj", "down_proj")):
                parts, twin = mxfp4(parameter.data)
                parameter.copy_(twin)
                stored |= {f"{name}_{part}": tensor for part, tensor in parts.items()}
                continue
            stored[name] = parameter.to(torch.bfloat16)
            parameter.copy_(stored[name])
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(stored, directory / "model.safetensors")


def expected(model: transformers.PreTrainedModel) -> tuple[list[int], torch.Tensor]:
    """The greedy continuation, and the log-probabilities of the prompt's tokens except the first."""
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(LENGTH):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
            ids.append(int(logits[-1].argmax()))
    scores = logits.log_softmax(-1)[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])]
    return ids[len(PROMPT) :], scores


def ran(runner: NativeRunner | TorchRunner) -> tuple[list[int], torch.Tensor]:
    core = EngineCore(runner)
    params = SamplingParams(max_tokens=LENGTH, temperature=0, prompt_logprobs=0)
    core.add(Request(id=0, prompt_ids=PROMPT, params=params, seed=0, prompt_logprobs_from=1))
    tokens: list[int] = []
    scores: list[float] = []
    while core.has_work:
        for gain in core.step():
            tokens += gain.token_ids
            scores += [each.logprob for each in gain.prompt_logprobs]
    return tokens, torch.tensor(scores)


@pytest.mark.parametrize("blocks", [True, False], ids=["mxfp4", "bfloat16"])
def test_tokens_on_torch_are_those_of_transformers(blocks: bool, tmp_path: Path) -> None:
    model = reference()
    write(tmp_path / "model", model, blocks=blocks)
    tokens, scores = expected(model)
    assert len(set(tokens)) > 3, "the test would not see a difference"
    ours = ran(load(tmp_path / "model", backend="torch"))
    assert ours[0] == tokens
    torch.testing.assert_close(ours[1], scores, atol=2e-4, rtol=0)


@pytest.mark.full
@needs_library
@pytest.mark.parametrize("blocks", [True, False], ids=["mxfp4", "bfloat16"])
def test_native_scores_are_those_of_transformers(blocks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stored in blocks are multiplied by activations rounded to 8 bits."""
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    model = reference()
    write(tmp_path / "model", model, blocks=blocks)
    runner = load(tmp_path / "model")
    assert isinstance(runner, NativeRunner)
    assert ("MXFP4" in runner.spec.precision) == blocks
    tokens, scores = expected(model)
    ours = ran(runner)
    assert (ours[1] - scores).abs().mean() < (0.1 if blocks else 1e-3)
    if not blocks:
        assert ours[0] == tokens


def test_gates_and_ups_are_clamped_as_in_transformers() -> None:
    gate, up = 9 * torch.randn(2, 50, 32, generator=torch.Generator().manual_seed(0))
    assert (gate > 7).any()
    assert (up.abs() > 7).any()
    experts = GptOssExperts(transformers.GptOssConfig(**{**CONFIG, "num_hidden_layers": 1}))
    theirs = experts._apply_gate(torch.stack((gate, up), -1).flatten(-2))
    torch.testing.assert_close(clamped_silu(gate, up), theirs)


@pytest.mark.parametrize(("field", "value"), [("swiglu_limit", 5.0), ("swiglu_alpha", 1.0)])
def test_another_activation_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{field}' is {value!r}; Ostro runs gpt-oss with"):
        describe({**CONFIG, field: value})


@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_library), "torch"])
@pytest.mark.parametrize("part", ["gate_up_proj", "down_proj"])
def test_an_experts_bias_that_is_not_a_number_is_refused_by_name(
    part: str, backend: BackendName, tmp_path: Path
) -> None:
    """The biases of all experts are one matrix, and those of a matrix were not looked at on torch."""
    model, name = reference(), f"model.layers.1.mlp.experts.{part}_bias"
    with torch.no_grad():
        dict(model.named_parameters())[name][2, 5] = torch.nan
    write(tmp_path / "model", model, blocks=False)
    with pytest.raises(BadCheckpoint, match=f"'{re.escape(name)}' holds NaN"):
        load(tmp_path / "model", backend=backend)
