from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from model_directory import write_model

from ostro.backends.backend import open_model
from ostro.backends.loading import load_runner
from ostro.backends.torch.devices import pick_device, pick_dtype
from ostro.config import Device, EngineConfig
from ostro.devices import DEVICE_KINDS
from ostro.errors import BadRequest
from ostro.weights import open_checkpoint


def without_gpu(monkeypatch: pytest.MonkeyPatch, *, available: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)


def test_auto_is_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    assert pick_device("auto").type == "cpu"
    without_gpu(monkeypatch, available=True)
    assert pick_device("auto").type == "cuda"
    assert pick_device("cpu").type == "cpu"


def test_gpu_that_is_not_there_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    with pytest.raises(BadRequest, match=r"torch sees no NVIDIA GPU.*--device cpu"):
        pick_device("cuda")


def test_amd_gpu_is_refused_though_torch_calls_it_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch, available=True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert pick_device("auto").type == "cpu"
    with pytest.raises(BadRequest, match=r"AMD's GPUs, which are not supported.*--device cpu"):
        pick_device("cuda")


@pytest.mark.parametrize(("built", "reason"), [(False, "built without MPS"), (True, "has no Apple GPU")])
def test_apple_gpu_that_is_not_there_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, built: bool, reason: str
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: built)
    with pytest.raises(BadRequest, match=rf"{reason}.*--device cpu"):
        pick_device("mps")


def test_dtype_suits_the_device() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert pick_dtype("auto", cpu) is torch.float32
    assert pick_dtype("auto", gpu) is torch.bfloat16
    assert pick_dtype("float16", gpu) is torch.float16


def test_unset_settings_suit_the_device_and_its_use() -> None:
    offline, serving = EngineConfig(), EngineConfig(serving=True, max_batch_seqs=7)
    assert DEVICE_KINDS["cpu"].resolve(offline).page_size == 16
    assert DEVICE_KINDS["cuda"].resolve(offline).page_size == 64
    both = [DEVICE_KINDS[name] for name in ("cpu", "cuda")]
    tokens = [each.resolve(config).max_batch_tokens for config in (offline, serving) for each in both]
    assert tokens == [256, 16384, 128, 8192]
    assert {backend.resolve(serving).max_batch_seqs for backend in DEVICE_KINDS.values()} == {7}


def test_every_device_that_settings_can_name_has_a_kind() -> None:
    assert {"auto", *DEVICE_KINDS} == set(get_args(Device))


@pytest.mark.parametrize("name", DEVICE_KINDS)
def test_resolved_settings_keep_what_was_given(name: str) -> None:
    config = EngineConfig(page_size=32, max_batch_tokens=7, max_batch_seqs=3, threads=2)
    resolved = DEVICE_KINDS[name].resolve(config)
    assert (resolved.device, resolved.threads) == (name, 2)
    assert (resolved.page_size, resolved.max_batch_tokens, resolved.max_batch_seqs) == (32, 7, 3)


def test_auto_is_one_device_on_a_cpu_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "model", heads=4))
    config = EngineConfig(backend="torch", device="cpu", tensor_parallel="auto", max_running_tokens=64)
    with caplog.at_level("INFO"):
        assert load_runner(checkpoint, config).spec.devices == 1
    assert "tensor_parallel is auto: the model runs on 1 of 1 cpu devices" in caplog.text


def test_auto_on_gpus_is_as_many_as_the_model_divides_over(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "model", heads=4))
    auto = EngineConfig(device="cuda", tensor_parallel="auto")
    assert [open_model(checkpoint, auto).ranks(devices) for devices in (1, 2, 3, 8)] == [1, 2, 2, 4]
    assert open_model(checkpoint, replace(auto, tensor_parallel=3)).ranks(8) == 3
    assert open_model(checkpoint, replace(auto, deterministic=True)).ranks(8) == 1
