"""Which backend runs a model on which devices, and which settings do not go together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ostro.config import EngineConfig
from ostro.devices import check_together, device_kind_here, runs_on_jax
from ostro.errors import BadRequest, OstroError
from ostro.system import machine

GIB = 1 << 30


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"tensor_parallel": 2, "device": "cpu"}, "tensor_parallel is 2, .* to try it on a CPU, add --backend torch"),
        ({"tensor_parallel": 2, "backend": "native"}, "Leave it out"),
        ({"tensor_parallel": 2, "backend": "torch", "quantize": "int8"}, "int8 cannot be divided"),
        ({"tensor_parallel": 2, "device": "cuda", "deterministic": True}, "deterministic or tensor_parallel"),
        ({"backend": "torch", "device": "tpu"}, "backend torch does not run on TPUs. Use --backend jax"),
        ({"backend": "native", "device": "tpu"}, "backend native does not run on TPUs"),
        ({"backend": "jax", "quantize": "int8"}, "quantize does not work with JAX"),
        ({"backend": "jax", "quantize": "fp8", "device": "cuda"}, "quantize does not work with JAX"),
        ({"device": "tpu", "kv_dtype": "fp8"}, "kv_dtype does not work with JAX"),
        ({"backend": "jax", "speculative": "ngram"}, "speculative does not work with JAX"),
        ({"backend": "jax", "deterministic": True}, "deterministic does not work with JAX"),
        ({"backend": "jax", "cuda_graphs": False}, "cuda_graphs does not work with JAX"),
        ({"backend": "jax", "threads": 1}, "threads does not work with JAX"),
    ],
)
def test_what_a_backend_cannot_do_is_refused_by_name(settings: Mapping[str, Any], complaint: str) -> None:
    config = EngineConfig(**settings)
    with pytest.raises(OstroError, match=complaint) as caught:
        check_together(config)
    assert caught.value.param in settings


@pytest.mark.parametrize("settings", [{}, {"backend": "jax", "tensor_parallel": 8}, {"device": "tpu"}])
def test_compatible_settings_are_accepted(settings: Mapping[str, Any]) -> None:
    check_together(EngineConfig(**settings))


def test_all_devices_is_compatible_with_single_device_settings() -> None:
    for settings in ({"device": "cpu"}, {"backend": "native"}, {"device": "cuda", "deterministic": True}):
        check_together(EngineConfig(tensor_parallel="auto", **settings))


def test_a_number_of_devices_is_at_least_one() -> None:
    with pytest.raises(BadRequest, match="tensor_parallel must be at least 1"):
        EngineConfig(tensor_parallel=0)


def test_float16_is_not_for_tpus() -> None:
    with pytest.raises(BadRequest, match="bfloat16 or float32"):
        device_kind_here("tpu").resolve(EngineConfig(device="tpu", dtype="float16"))


def test_auto_finds_a_macs_gpu_for_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_apple_gpu", lambda: True)
    monkeypatch.setattr(machine, "_visible_gpus", list)
    assert device_kind_here("auto", "torch").name == "mps"
    assert {device_kind_here("auto", backend).name for backend in ("auto", "native", "jax")} == {"cpu"}
    assert device_kind_here("cpu", "torch").name == "cpu"
    monkeypatch.setattr(machine, "has_torch", lambda: False)
    assert device_kind_here("auto", "torch").name == "cpu"


def test_other_machines_have_no_apple_gpu() -> None:
    assert not machine.has_apple_gpu("linux")


@pytest.fixture
def pci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two TPU chips and a network card of the same vendor, as sysfs shows them."""
    for number, device in enumerate(("0x0042", "0x0063", "0x0063")):
        card = tmp_path / f"0000:00:0{number}.0"
        card.mkdir()
        (card / "vendor").write_text("0x1ae0\n")
        (card / "device").write_text(f"{device}\n")
    monkeypatch.setattr(machine, "_is_installed", lambda module: module in ("jax", "libtpu"))
    return tmp_path


def test_a_tpu_is_known_by_its_pci_id(pci: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert machine.tpu_memory(pci) == 16 * GIB
    assert machine.tpu_memory(tmp_path_factory.mktemp("empty")) is None


def test_a_tpu_without_its_library_is_not_used(pci: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_is_installed", lambda module: module == "jax")
    assert machine.tpu_memory(pci) is None


def test_tpus_are_counted_by_chips_and_their_devices(pci: Path) -> None:
    assert machine.count_tpus(pci) == 2
    # A chip of the kind that has two devices.
    (pci / "0000:00:02.0" / "device").write_text("0x0076\n")
    assert machine.count_tpus(pci) == 3


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with three GPUs, of 80, 40 and 80 GB, as its tool lists them."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*index,uuid*) printf "0, GPU-aa00\\n1, GPU-bb11\\n2, GPU-cc22\\n" ;;\n'
        '*"-i 0,1"*) printf "81920, 70000\\n40960, 40000\\n" ;;\n'
        '*"-i 0"*) printf "81920, 70000\\n" ;;\n'
        "*) exit 6 ;;\n"
        "esac\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(machine, "_has_driver", lambda: True)
    monkeypatch.setattr(machine, "_has_torch_on_gpus", lambda: True)


@pytest.mark.usefixtures("nvidia_smi")
@pytest.mark.parametrize(
    ("visible", "number"),
    [(None, 3), ("", 0), ("-1", 0), ("1", 1), ("2,0", 2), ("GPU-bb,GPU-cc22", 2), ("0,7,1", 1), ("0,", 1)],
)
def test_gpus_are_counted_as_cuda_does(visible: str | None, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.count_gpus() == number
    assert device_kind_here("cuda").count() == number


@pytest.mark.usefixtures("nvidia_smi")
def test_the_memory_of_all_gpus_is_that_of_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert device_kind_here("cuda").memory("auto") == (40 * GIB, 40000 << 20)
    assert device_kind_here("cuda").memory() == (80 * GIB, 70000 << 20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert device_kind_here("cuda").memory("auto") is None


def test_auto_runs_on_a_tpu_with_jax_and_only_with_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "tpu_memory", lambda: 16 * GIB)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert runs_on_jax(EngineConfig())
    check_together(EngineConfig(tensor_parallel=4))
    kinds = {backend: device_kind_here("auto", backend).name for backend in ("auto", "jax", "torch", "native")}
    assert kinds == {"auto": "tpu", "jax": "tpu", "torch": "cpu", "native": "cpu"}
    assert not runs_on_jax(EngineConfig(device="cpu"))
