"""Whole runs of all families, adapters, HRM and a second model, in fp32 on both devices."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from every_family import RUN_BY_ALL, config_of
from hrm_brain import write_brain
from peft_directory import random_adapter
from test_gpu_runner import GREEDY, ON_GPU, QWEN3, gpu_engine, on_cpu, on_gpu, requests, run, tokens
from tiny_models import LLAMA, random_model
from triton_device import slow_in_the_interpreter

from ostro.backends.cuda.runner import GpuRunner
from ostro.backends.torch.recompute import RecomputeRunner
from ostro.backends.torch.runner import TorchRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.torch_models.base import Model
from ostro.torch_models.hrm import HrmConfig, load_hrm
from ostro.torch_models.lora import Adapters
from ostro.weights.adapter import read_adapter
from ostro.weights.hrm_checkpoint import open_hrm

FAMILIES = {name: config_of(name, {**LLAMA, "hidden_size": 64, "head_dim": 16}) for name in (*RUN_BY_ALL, "hrm_text")}


@slow_in_the_interpreter
# NumPy warns where a sigmoid's exponential is infinite, as it may be on a GPU.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("name", FAMILIES)
def test_families_give_the_cpus_tokens(name: str, device: torch.device) -> None:
    asked = requests([GREEDY] * 4)
    expected = on_cpu(random_model(FAMILIES[name]), asked)
    given, _ = on_gpu(random_model(FAMILIES[name]), device, asked, budget=12)
    assert tokens(given) == tokens(expected)


@slow_in_the_interpreter
@pytest.mark.parametrize("config", [{**LLAMA, "head_dim": 16}, QWEN3], ids=["llama", "qwen3"])
def test_each_request_is_given_its_own_adapters_tokens(
    config: Mapping[str, object], device: torch.device, tmp_path: Path
) -> None:
    names = [None, "red", "green", "red", None, "green"]
    paths = {
        name: random_adapter(tmp_path / name, random_model(config), seed=seed, rank=3 + seed)
        for seed, name in enumerate(("red", "green"))
    }
    asked = [
        Request(id=each.id, prompt_ids=each.prompt_ids, params=each.params, seed=each.seed, adapter=name)
        for each, name in zip(requests([GREEDY] * len(names)), names, strict=True)
    ]

    def adapted(model: Model) -> Adapters:
        adapters = Adapters(model, {name: read_adapter(path) for name, path in paths.items()})
        adapters.attach(model)
        return adapters

    ours = random_model(config).to(device)
    plain = random_model(config)
    gpu = GpuRunner(ours, page_size=16, num_pages=256, max_batch_tokens=64, max_batch_seqs=8, adapters=adapted(ours))
    cpu = TorchRunner(plain, page_size=4, num_pages=512, adapters=adapted(plain))
    given, expected = (tokens(run(EngineCore(each, adapters=tuple(paths)), asked)) for each in (gpu, cpu))
    assert given == expected
    unadapted = tokens(on_cpu(random_model(config), requests([GREEDY] * len(names))))
    assert {key for key in given if given[key] != unadapted[key]} >= {(1, 0), (2, 0), (3, 0), (5, 0)}


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("halting", [False, True], ids=["all steps", "halting"])
@pytest.mark.parametrize(("dialect", "moe"), [("upstream", False), ("aios", False), ("aios", True)])
def test_hrm_gives_the_cpus_tokens(
    dialect: str, moe: bool, halting: bool, device: torch.device, tmp_path: Path
) -> None:
    # Few and shallow: with random weights each pass takes a difference of rounding some ten times further.
    brain = write_brain(tmp_path, dialect=dialect, moe=moe, h_layers=1, l_layers=1, h_cycles=1, l_cycles=1)  # type: ignore[arg-type]
    checkpoint = open_hrm(brain)
    found = []
    for place in (torch.device("cpu"), device):
        model = load_hrm(HrmConfig.read(checkpoint.config), checkpoint.tensors(), torch.float32, place)
        core = EngineCore(RecomputeRunner(model, steps=2, halting=halting))
        found.append(tokens(run(core, requests([GREEDY] * 4))))
    assert found[0] == found[1]


@slow_in_the_interpreter
def test_two_models_take_turns_on_one_gpu(device: torch.device) -> None:
    asked = requests([GREEDY] * 3)
    configs = [QWEN3, {**LLAMA, "head_dim": 16}]
    expected = [tokens(on_cpu(random_model(config), asked)) for config in configs]
    cores = [gpu_engine(random_model(config), device) for config in configs]
    given: list[dict[tuple[int, int], list[int]]] = [{(each.id, 0): [] for each in asked} for _ in cores]
    for core in cores:
        for request in asked:
            core.add(request)
    while any(core.has_work for core in cores):
        for core, found in zip(cores, given, strict=True):
            for gain in core.step() if core.has_work else ():
                found[gain.request_id, gain.choice] += gain.token_ids
    assert given == expected
