"""Experts on the CPU beside a GPU: what plans say, how many layers `auto` means, and what is refused."""

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from every_family import config_of
from native_models import needs_library
from peft_directory import random_adapter
from tiny_models import LLAMA, random_model

from ostro.backends.backend import open_model
from ostro.backends.cuda.backend import CudaBackend
from ostro.backends.cuda.cpu_layers import check_host_memory, divided, fewest_layers
from ostro.backends.cuda.load import cpu_threads
from ostro.backends.planning import Plan, plan
from ostro.cli import main
from ostro.config import CpuExperts, EngineConfig, read_cpu_experts
from ostro.devices import Memory
from ostro.errors import BadRequest, Unsupported
from ostro.models.architecture import Architecture
from ostro.system.topology import Cpu, choose_threads
from ostro.weights import open_checkpoint
from test_planning import GIB, write_checkpoint

pytestmark = needs_library

LAYERS = 6
SIZES = {**LLAMA, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": LAYERS}
# Experts are most of it: 6 MB in 16 bits for each layer.
CONFIG: Mapping[str, object] = config_of("qwen3_moe", SIZES, num_experts=32, moe_intermediate_size=512)
OF_LAYER = 2 * 32 * 3 * 64 * 512


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mixture"), CONFIG, torch.float16)


def planned(model: Path, experts: CpuExperts, memory: int = 20 * GIB, **settings: object) -> Plan:
    config = EngineConfig(device="cuda", cpu_experts=experts, **settings)  # type: ignore[arg-type]
    return plan(model, config, memory=memory)


def test_a_plan_counts_both_parts(mixture: Path) -> None:
    whole, half, rest = (planned(mixture, each) for each in ("none", 3, "all"))
    assert whole.cpu is None
    assert half.cpu is not None
    assert rest.cpu is not None
    assert (half.cpu.layers, rest.cpu.layers) == (3, LAYERS)
    assert whole.weights_bytes - half.weights_bytes == half.weights_bytes - rest.weights_bytes == 3 * OF_LAYER
    # float16 stays float16 on the CPU.
    assert half.cpu.formats == "F16"
    of_three = rest.cpu.nbytes - half.cpu.nbytes
    assert 3 * OF_LAYER <= of_three < 3.01 * OF_LAYER
    assert half.host_bytes - whole.host_bytes == half.cpu.nbytes
    assert whole.parameters == half.parameters == rest.parameters
    assert whole.active_parameters == half.active_parameters
    assert half.precision.endswith("; experts of 3 layers on the CPU in F16")


def test_more_layers_than_there_are_mean_all(mixture: Path) -> None:
    assert planned(mixture, 99) == planned(mixture, "all")


def test_other_bits_are_those_of_the_experts_alone(mixture: Path) -> None:
    plain, few = planned(mixture, "all"), planned(mixture, "all", quantize="int4")
    assert few.weights_bytes == plain.weights_bytes
    assert plain.cpu is not None
    assert few.cpu is not None
    assert few.cpu.formats == "int4"
    assert few.cpu.nbytes < 0.5 * plain.cpu.nbytes


@pytest.mark.full
def test_auto_is_as_few_layers_as_the_memory_asks_for(mixture: Path) -> None:
    assert planned(mixture, "auto").cpu is None
    found = []
    for spare in range(0, 9 * OF_LAYER, OF_LAYER // 2):
        # What everything but experts needs, with a share of pages, and the utilisation's rest.
        memory = int((planned(mixture, "all", kv_memory=1 << 20).total_bytes + spare) / 0.9)
        auto = planned(mixture, "auto", memory, kv_memory=1 << 20)
        layers = 0 if auto.cpu is None else auto.cpu.layers
        found.append(layers)
        assert auto.fits
        if layers:
            fewer = planned(mixture, layers - 1 or "none", memory, kv_memory=1 << 20)
            assert fewer.total_bytes > 0.9 * memory
    assert found == sorted(found, reverse=True)
    assert found[0] == LAYERS
    assert found[-1] == 0
    assert len(set(found)) == LAYERS + 1


@pytest.mark.full
def test_auto_leaves_a_share_of_the_pages(mixture: Path) -> None:
    opened = open_model(open_checkpoint(mixture), EngineConfig(device="cuda", cpu_experts="auto", max_seq_len=64))
    assert isinstance(opened.description, Architecture)
    for memory in range(3 * GIB, 4 * GIB, 200 << 20):
        layers = fewest_layers(opened, opened.description, Memory(memory, memory))
        all_pages = planned(mixture, "all", memory, max_seq_len=64).num_pages
        pages = planned(mixture, layers or "none", memory, max_seq_len=64).num_pages
        assert pages >= int(0.2 * all_pages)


def test_the_table_says_what_is_where(mixture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", str(mixture), "--device", "cuda", "--memory", "20G", "--cpu-experts", "2"])
    shown = capsys.readouterr().out
    assert "for the experts of 2 layers, which the CPU computes" in shown


def test_a_plan_for_this_machine_checks_its_own_memory(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ostro.devices.gpu_memory", lambda devices=1: (20 * GIB, 20 * GIB))
    monkeypatch.setattr("ostro.backends.planning.free_memory", lambda: 100 * GIB)
    config = EngineConfig(device="cuda", cpu_experts="all")
    assert plan(mixture, config).fits
    monkeypatch.setattr("ostro.backends.planning.free_memory", lambda: GIB)
    found = plan(mixture, config)
    assert (found.fits, found.fits_device, found.fits_host) == (False, True, False)


@pytest.mark.parametrize(
    ("memory", "host", "options", "cures"),
    [
        (20, 1, ["all"], "own memory is too small for the experts. Lower --cpu-experts, try --quantize int4, or take"),
        (20, 1, ["all", "--quantize", "int4"], "for the experts. Lower --cpu-experts, or take"),
        (0, 9, ["none"], "It does not fit. Give it more memory, lower --kv-memory, try --cpu-experts auto, or take"),
        (0, 9, ["1"], "It does not fit. Give it more memory, lower --kv-memory, raise --cpu-experts, or take"),
        (0, 9, ["all"], "It does not fit. Give it more memory, lower --kv-memory, or take"),
        (
            0,
            1,
            ["1"],
            "Neither does this machine's own memory hold the experts. Give it more memory, lower --kv-memory, or",
        ),
    ],
)
def test_a_plan_that_does_not_fit_says_what_would_help(
    mixture: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    memory: int,
    host: int,
    options: list[str],
    cures: str,
) -> None:
    """`memory` and `host` in GiB; 0 is too little for anything."""
    free = memory * GIB or 20 << 20
    monkeypatch.setattr("ostro.devices.gpu_memory", lambda devices=1: (free, free))
    monkeypatch.setattr("ostro.backends.planning.free_memory", lambda: host * GIB)
    assert main(["plan", str(mixture), "--device", "cuda", "--cpu-experts", *options]) == 1
    assert cures in capsys.readouterr().out


@pytest.mark.parametrize("spare", [-1, 0])
def test_a_start_and_a_plan_ask_for_the_same_memory(mixture: Path, monkeypatch: pytest.MonkeyPatch, spare: int) -> None:
    config = EngineConfig(device="cuda", cpu_experts="all", kv_host_memory=GIB)
    free = plan(mixture, config, memory=20 * GIB).host_bytes + spare
    monkeypatch.setattr("ostro.devices.gpu_memory", lambda devices=1: (20 * GIB, 20 * GIB))
    monkeypatch.setattr("ostro.backends.planning.free_memory", lambda: free)
    monkeypatch.setattr("ostro.backends.cuda.cpu_layers.free_memory", lambda: free)
    assert plan(mixture, config).fits == (spare == 0)
    opened = open_model(open_checkpoint(mixture), config)
    assert isinstance(opened.description, Architecture)
    parts = divided(opened, opened.description, None)
    assert parts is not None
    with nullcontext() if spare == 0 else pytest.raises(BadRequest, match="Lower it, or use quantize int4"):
        check_host_memory(opened, parts)


class Loaded(Exception):
    """A model would be loaded now."""


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cpu_experts": "auto"}, ["cpu_experts auto: all experts fit on the GPU"]),
        (
            {"cpu_experts": "auto", "quantize": "int4"},
            ["cpu_experts auto: all experts fit on the GPU; quantize int4 is not used"],
        ),
        ({}, []),
    ],
)
def test_auto_that_leaves_nothing_to_the_cpu_says_so(
    mixture: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    settings: Mapping[str, object],
    said: list[str],
) -> None:
    def load(*args: object, **kwargs: object) -> None:
        raise Loaded

    caplog.set_level("INFO")
    monkeypatch.setattr("ostro.devices.gpu_memory", lambda devices=1: (20 * GIB, 20 * GIB))
    monkeypatch.setattr("ostro.backends.cuda.backend.precompiler", lambda *args: nullcontext())
    monkeypatch.setattr("ostro.backends.cuda.load.load_runner", load)
    opened = open_model(open_checkpoint(mixture), EngineConfig(device="cuda", **settings))  # type: ignore[arg-type]
    with pytest.raises(Loaded):
        CudaBackend().load(opened, lambda: None)
    assert [each for each in caplog.messages if "experts" in each] == said


def test_threads_leave_one_to_the_process_that_launches_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = [Cpu(number, core=number) for number in range(4)]
    monkeypatch.setattr(
        "ostro.backends.cuda.load.threads_here",
        lambda asked: choose_threads(cpus, asked=asked if isinstance(asked, int) else None),
    )
    found = cpu_threads("auto")
    assert (found.number, found.reason) == (3, "3, and one for launching steps, of 4, one per core")
    assert cpu_threads(4).reason == "4, as asked"
    cpus[1:] = []
    assert cpu_threads("auto").number == 1


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"device": "cpu"}, "cpu_experts is for models on an NVIDIA GPU"),
        ({"device": "tpu"}, "cpu_experts does not work with JAX"),
        ({"device": "cuda", "backend": "jax"}, "cpu_experts does not work with JAX"),
        ({"device": "cuda", "tensor_parallel": 2}, "cpu_experts cannot be used: the model is divided over devices"),
        ({"device": "cuda", "quantize": "fp8"}, "quantize fp8 of a mixture of experts"),
    ],
)
def test_settings_that_rule_it_out_are_named(mixture: Path, settings: Mapping[str, object], why: str) -> None:
    config = EngineConfig(cpu_experts="all", **settings)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=why):
        plan(mixture, config, memory=20 * GIB)


def test_models_that_rule_it_out_are_named(mixture: Path, tmp_path: Path) -> None:
    dense = write_checkpoint(tmp_path / "dense", config_of("llama", SIZES), torch.float16)
    with pytest.raises(Unsupported, match="cpu_experts cannot be used: the model is no mixture of experts"):
        planned(dense, "all")
    odd = config_of("qwen3_moe", SIZES, num_experts=4, moe_intermediate_size=12)
    with pytest.raises(Unsupported, match="the fused kernels do not run this model: its experts' widths"):
        planned(write_checkpoint(tmp_path / "odd", odd, torch.float16), 1)
    adapter = random_adapter(tmp_path / "adapter", random_model(CONFIG), seed=0)
    with pytest.raises(Unsupported, match="it does not work with adapters"):
        planned(mixture, 1, adapters=(("a", str(adapter)),))


@pytest.mark.parametrize(("text", "value"), [("12", 12), (" all ", "all"), ("auto", "auto"), ("none", "none")])
def test_numbers_of_layers_are_read(text: str, value: CpuExperts) -> None:
    assert read_cpu_experts(text) == value


@pytest.mark.parametrize("value", [0, -1, 1 << 20])
def test_numbers_have_limits(value: int) -> None:
    with pytest.raises(BadRequest, match="cpu_experts must be at"):
        EngineConfig(cpu_experts=value)


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match="12, none, auto or all"):
        read_cpu_experts("half")
