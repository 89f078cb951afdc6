"""What bench/gpu.py adds to a run: the host measured alone, phases of a start, and overlaps that can be turned off."""

import time

import torch
from test_gpu_runner import SHALLOW, gpu_engine
from tiny_models import random_model

from gpu import Phases, defaults, run, set_overlaps, without_device_work
from ostro.backends.cuda.runner import GpuRunner
from workloads import Work


def test_without_the_devices_work_every_request_still_gets_its_tokens(device: torch.device) -> None:
    core = gpu_engine(random_model(SHALLOW), device, rows=4)
    assert isinstance(core.runner, GpuRunner)
    keys_and_values = core.runner.part.attention.pages.memory
    keys_and_values.fill_(7.0)
    work = [Work([1, 2, 3, at], 3 + at) for at in range(6)]
    with without_device_work(core):
        _, steps = run(core, work)
    assert steps >= 3 + 5
    assert (keys_and_values == 7.0).all()
    core.check_integrity()
    run(core, work[:1])
    assert not (keys_and_values == 7.0).all()


def test_overlaps_are_those_of_the_decoder(device: torch.device) -> None:
    core = gpu_engine(random_model(SHALLOW), device)
    for overlaps in (True, False):
        set_overlaps(core, overlaps)
        assert isinstance(core.runner, GpuRunner)
        assert core.runner.part.decoder is not None
        assert core.runner.part.decoder.overlaps is overlaps


def test_other_benchmarks_start_from_the_options_of_a_plain_run() -> None:
    plain, changed = defaults(), defaults(deterministic=True)
    assert (plain.deterministic, changed.deterministic) == (False, True)
    assert (changed.kernel_choices, changed.no_cascade_attention) == ("auto", False)


def test_a_phase_within_another_is_counted_once() -> None:
    phases = Phases(time.time() - 5)
    phases.end("before")
    capture = phases.of("capture", time.sleep)

    def capture_and_sleep(seconds: float) -> None:
        capture(0.04)
        time.sleep(seconds)

    compile = phases.of("compile", capture_and_sleep)
    compile(0.03)
    compile(0.02)
    phases.end("around")
    assert list(phases.seconds) == ["before", "total", "capture", "compile", "around"]
    total = phases.seconds.pop("total")
    assert phases.seconds["before"] >= 5
    assert phases.seconds["compile"] >= 0.05
    assert phases.seconds["capture"] >= 0.08
    assert abs(sum(phases.seconds.values()) - total) < 1e-6
