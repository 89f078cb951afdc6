"""Models that attention kernels do not run: torch's plain attention does, on a GPU, and settings that need kernels are
refused.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from every_family import TINY
from model_files import write_checkpoint
from native_models import needs_library
from test_gpu_runner import GREEDY, ON_GPU, on_cpu, requests, run, tokens
from tiny_models import LLAMA, random_model

from ostro.backends.cuda.quantize import quantize_fp8
from ostro.backends.loading import load_runner
from ostro.backends.planning import plan
from ostro.backends.torch.load import make_runner
from ostro.backends.torch.plain_attention import check_plain_attention, plain_attention_bytes, why_plain_attention
from ostro.backends.torch.runner import TorchRunner
from ostro.config import EngineConfig
from ostro.devices import DEVICE_KINDS
from ostro.engine.core import EngineCore
from ostro.errors import BadRequest, Unsupported
from ostro.kernels.plain_attention_memory import BLOCK_BYTES, SCORE_BYTES
from ostro.models.architecture import Architecture
from ostro.models.registry import describe
from ostro.weights.checkpoint import open_checkpoint

Config = Mapping[str, object]

LLAMA4: Config = {
    **LLAMA,
    "architectures": ["Llama4ForCausalLM"],
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_chunk_size": 12,
    "no_rope_layers": [1, 0],
}
GEMMA4: Config = {**TINY["gemma4"], "vocab_size": 64, "max_position_embeddings": 512}
GEMMA4 = {**GEMMA4, "hidden_size": 32, "head_dim": 8, "vocab_size_per_layer_input": 64}


def described(config: Config, max_seq_len: int | None = None) -> Architecture:
    found = describe(config, max_seq_len=max_seq_len)
    assert isinstance(found, Architecture)
    return found


def test_only_models_that_need_it_have_plain_attention() -> None:
    for name, config in TINY.items():
        found = describe(config)
        if isinstance(found, Architecture):
            assert (why_plain_attention(found) is not None) == name.startswith("gemma4")


def test_a_chunk_shorter_than_the_context_needs_it() -> None:
    assert why_plain_attention(described(LLAMA4, 12)) is None
    assert "max_seq_len, 13, is longer than a chunk" in (why_plain_attention(described(LLAMA4, 13)) or "")


def test_its_memory_is_reserved_for_models_that_need_it() -> None:
    assert plain_attention_bytes(described(LLAMA4, 12), 2, 64, 8) == 0
    found = described(LLAMA4, 512)
    kept = 2 * found.shape.num_kv_heads * found.shape.head_dim * 2 * 512
    assert plain_attention_bytes(found, 2, 64, 8) == BLOCK_BYTES + kept
    # One query's scores alone take more than a block's share.
    long = described({**LLAMA4, "max_position_embeddings": 1 << 24}, 1 << 24)
    assert plain_attention_bytes(long, 2, 64, 8) > SCORE_BYTES * long.shape.num_heads << 24


SETTINGS: list[tuple[Config, str]] = [
    ({"kv_dtype": "fp8"}, "kv_dtype"),
    ({"deterministic": True}, "deterministic"),
    ({"kv_host_memory": 1 << 30}, "kv_host_memory"),
    ({"kv_disk": "pages"}, "kv_disk"),
    ({"kv_persist": True}, "kv_persist"),
]


@pytest.mark.parametrize(("settings", "name"), SETTINGS, ids=[name for _, name in SETTINGS])
def test_settings_that_need_kernels_are_refused_by_name(settings: Config, name: str) -> None:
    config = DEVICE_KINDS["cuda"].resolve(EngineConfig(device="cuda", **settings))  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=f"{name} needs attention kernels, .*: its layers differ"):
        check_plain_attention(config, why_plain_attention(described(GEMMA4)) or "")


@pytest.mark.parametrize("settings", [{"kv_host_memory": 1 << 30}, {"kv_disk": "pages"}], ids=["host", "disk"])
def test_a_plan_refuses_tiers_on_a_gpu(tmp_path: Path, settings: Config) -> None:
    directory = write_checkpoint(tmp_path, GEMMA4, random_model(GEMMA4))
    with pytest.raises(BadRequest, match=r"kv_.* needs attention kernels, .*: its layers differ in their heads"):
        plan(directory, EngineConfig(device="cuda", **settings), memory=1 << 32)  # type: ignore[arg-type]


@needs_library
def test_plan_and_loading_refuse_tiers_where_torch_runs_the_model_on_a_cpu(tmp_path: Path) -> None:
    """Loading does so before it reads weights."""
    directory = write_checkpoint(tmp_path, GEMMA4, random_model(GEMMA4))
    config = EngineConfig(device="cpu", kv_persist=True)
    message = r"kv_persist needs .* the native CPU core, .*: its layers differ in their heads"
    with pytest.raises(Unsupported, match=message):
        plan(directory, config, memory=1 << 32)
    with pytest.raises(Unsupported, match=message):
        load_runner(open_checkpoint(directory), config)


def test_fp8_weights_are_refused_by_plan_and_loading(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, GEMMA4, random_model(GEMMA4))
    with pytest.raises(Unsupported, match=r"quantize fp8 needs the fused kernels, .* its layers differ in their heads"):
        plan(directory, EngineConfig(device="cuda", quantize="fp8"), memory=1 << 32)
    with pytest.raises(Unsupported, match=r"quantize fp8 needs the fused kernels, .* its layers differ in their heads"):
        quantize_fp8(random_model(GEMMA4))


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("config", [GEMMA4, LLAMA4], ids=["gemma4", "llama4"])
def test_plain_attention_gives_the_cpus_tokens(config: Config, device: torch.device) -> None:
    asked = requests([GREEDY] * 4)
    expected = on_cpu(random_model(config, max_seq_len=512), asked)
    settings = EngineConfig(device="cuda", dtype="float32", kv_memory=1 << 22)
    runner = make_runner(random_model(config, max_seq_len=512).to(device), settings)
    assert isinstance(runner, TorchRunner)
    assert tokens(run(EngineCore(runner), asked)) == tokens(expected)
