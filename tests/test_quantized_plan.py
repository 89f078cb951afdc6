"""Plans of quantised checkpoints, from headers alone, against what loading makes of them."""

import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from native_directory import load, packed_files
from native_models import ModelCheckpoint, needs_library, savable_model
from quantized_packers import FORMATS, write_mxfp4, write_quantized

from ostro.backends.native.runner import NativeRunner
from ostro.backends.planning import Plan, plan
from ostro.config import EngineConfig

CONFIG: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
GIB = 1 << 30


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return dict(ModelCheckpoint(savable_model(CONFIG), CONFIG).tensors())


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))


def planned(directory: Path, device: str = "cpu", backend: str = "auto") -> Plan:
    return plan(directory, EngineConfig(device=device, backend=backend, kv_memory=4 << 20), memory=GIB)  # type: ignore[arg-type]


def without_numbers(directory: Path) -> None:
    """Leaves the files' headers alone, as they are fetched of a model that is elsewhere."""
    path = directory / "model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    path.write_bytes(data[: 8 + size].ljust(len(data), b"\0"))


@pytest.mark.cases(3)
@needs_library
@pytest.mark.parametrize("name", FORMATS)
def test_the_packed_file_is_as_large_as_was_planned(
    name: str, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    write_quantized(directory, CONFIG, weights, FORMATS[name])
    runner = load(directory)
    assert isinstance(runner, NativeRunner)
    (packed,) = packed_files()
    without_numbers(directory)
    found = planned(directory)
    assert found.weights_bytes == pytest.approx(packed.stat().st_size, rel=0.05)
    assert found.precision == runner.spec.precision
    assert found.parameters == sum(tensor.numel() for tensor in weights.values())
    assert found.stored_as is not None
    assert found.stored_as.endswith(f"({FORMATS[name].native})")


@needs_library
def test_stacks_of_experts_are_planned_as_they_are_packed(tmp_path: Path) -> None:
    experts = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
    config = {**CONFIG, **experts, "sliding_window": 16}
    tensors = dict(ModelCheckpoint(savable_model(config), config).tensors())
    directory = tmp_path / "model"
    write_mxfp4(directory, config, tensors)
    runner = load(directory)
    assert isinstance(runner, NativeRunner)
    (packed,) = packed_files()
    without_numbers(directory)
    found = planned(directory)
    assert found.weights_bytes == pytest.approx(packed.stat().st_size, rel=0.05)
    assert (found.precision, found.stored_as) == (
        runner.spec.precision,
        "MXFP4; repacked exactly (MXFP4)",
    )
    assert found.parameters == sum(tensor.numel() for tensor in tensors.values())


@pytest.mark.parametrize(
    ("name", "device", "backend", "itemsize"),
    [
        *((name, "cpu", "torch", 4) for name in ("fp8-block", "gptq", "nf4-nested")),
        ("nf4-nested", "cuda", "auto", 2),
        ("gptq-order", "cuda", "auto", 2),
    ],
)
def test_weights_are_counted_as_they_are_widened(
    name: str, device: str, backend: str, itemsize: int, weights: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write_quantized(tmp_path, CONFIG, weights, FORMATS[name])
    without_numbers(tmp_path)
    found = planned(tmp_path, device, backend)
    values = sum(tensor.numel() for tensor in weights.values())
    assert found.weights_bytes - found.second_layout_bytes == itemsize * values
    assert found.stored_as is not None
    assert found.stored_as.endswith("; widened")
