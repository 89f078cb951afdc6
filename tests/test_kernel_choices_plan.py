"""What `ostro plan` says about the choice of kernels on a machine with a GPU."""

from collections.abc import Container, Mapping
from pathlib import Path

import pytest
from every_family import TINY

from ostro.backends.cuda.choices import MEASURED_LATER, Choices, Gpu, described_matmuls, keep, own_kernels
from ostro.config import EngineConfig
from ostro.devices import DEVICE_KINDS
from ostro.errors import BadRequest
from ostro.kernels.gpu.tilings import DotTiling, Multiprocessors
from ostro.models.architecture import Architecture
from ostro.models.description import Causal
from ostro.models.registry import describe
from ostro.system import machine

H200 = Gpu("NVIDIA H200", "9.0", Multiprocessors(132, 220 << 10))
QWEN3_06B = {
    **TINY["qwen3"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


@pytest.fixture(autouse=True)
def an_h200(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\ncase "$*" in *name*) echo "NVIDIA H200" ;; *) exit 6 ;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "_has_driver", lambda: True)


def planned(config: Mapping[str, object], **settings: object) -> Mapping[str, str] | None:
    return planned_beside((), config, **settings)


def planned_beside(kept: Container[str], config: Mapping[str, object], **settings: object) -> Mapping[str, str] | None:
    """With tensors that are kept quantised."""
    resolved = DEVICE_KINDS["cuda"].resolve(EngineConfig(device="cuda", **settings))  # type: ignore[arg-type]
    described = describe(dict(config), max_seq_len=None)
    assert isinstance(described, Causal)
    return own_kernels(resolved, described, kept)


def test_shipped_choices_are_shown() -> None:
    names = ("qkv", "output", "up", "down", "head")
    assert planned(QWEN3_06B) == planned(QWEN3_06B, kernel_choices="off") == dict.fromkeys(names, "1-64")


def test_unknown_choices_are_measured_or_left_to_the_library() -> None:
    names, tiny = ("qkv", "output", "up", "down", "head"), TINY["llama"]
    assert planned(tiny) == dict.fromkeys(names, MEASURED_LATER)
    assert planned(tiny, kernel_choices="off") == dict.fromkeys(names, "1")


def test_what_an_earlier_start_measured_is_shown() -> None:
    described = describe(dict(TINY["llama"]), max_seq_len=None)
    assert isinstance(described, Architecture)
    matmuls = described_matmuls(described, 16)
    keep(Choices({matmuls["down"]: {16: DotTiling(64, 32, 4, stages=2), 64: None}}), H200)
    shown = planned(TINY["llama"])
    assert shown is not None
    assert (shown["down"], shown["up"]) == ("1-16", MEASURED_LATER)


@pytest.mark.parametrize(
    "settings",
    [{"deterministic": True}, {"quantize": "fp8"}, {"tensor_parallel": 2}],
    ids=lambda each: next(iter(each)),
)
def test_where_something_else_decides_nothing_is_shown(settings: dict[str, object]) -> None:
    assert planned(QWEN3_06B, **settings) is None


def test_nothing_is_chosen_for_weights_that_stay_quantised() -> None:
    """They were said to be measured later, and never were."""
    tiny = TINY["llama"]
    layers = [f"model.layers.{number}.mlp.down_proj.weight" for number in range(int(str(tiny["num_hidden_layers"])))]
    assert planned_beside(layers, tiny) == dict.fromkeys(("qkv", "output", "up", "head"), MEASURED_LATER)
    assert "down" in (planned_beside(layers[:-1], tiny) or ()), "the last layer's is not"


def test_nothing_is_chosen_for_models_that_run_unfused() -> None:
    mixture = TINY["qwen3_moe"]
    assert planned(mixture) is not None
    assert planned({**mixture, "moe_intermediate_size": 12}) is None


def test_a_file_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(BadRequest, match="nowhere"):
        planned(QWEN3_06B, kernel_choices="/nowhere.json")


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_a_file_of_choices_is_refused_where_there_are_none(device: str) -> None:
    with pytest.raises(BadRequest, match=r"kernel_choices choices\.json is for NVIDIA GPUs"):
        DEVICE_KINDS[device].resolve(EngineConfig(device=device, kernel_choices="choices.json"))  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", "mps", "cuda"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_settings_without_effect_can_be_turned_off_anywhere(device: str, deterministic: bool) -> None:
    """One file of settings may serve several kinds of machines and models."""
    deterministic = deterministic and device == "cuda"
    idle = EngineConfig(
        device=device,  # type: ignore[arg-type]
        kernel_choices="off",
        cascade_attention=False,
        deterministic=deterministic,
    )
    DEVICE_KINDS[device].resolve(idle)
    if not deterministic:
        idle.check_encoding()
    idle.check_recomputing()


def test_deterministic_results_leave_nothing_to_choose() -> None:
    with pytest.raises(BadRequest, match="leave out kernel_choices"):
        DEVICE_KINDS["cuda"].resolve(EngineConfig(device="cuda", deterministic=True, kernel_choices="choices.json"))
    with pytest.raises(BadRequest, match="auto, off or a file"):
        EngineConfig(kernel_choices="")
