"""torch's profiler for a torch runner: its operations, and the kernels that they launch on a GPU. Knows no schedule."""

from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from ostro.engine.profile import Profiler


class TorchProfiler(Profiler):
    def __init__(self, device: torch.device) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # The thread that steps an engine may not be the one that profiles it.
        all_threads = _ExperimentalConfig(profile_all_threads=True)
        self._profile = profile(activities=activities, experimental_config=all_threads)
        self._profile.start()

    def span(self, name: str, **counts: int) -> AbstractContextManager[object]:
        # torch writes no arguments of spans.
        sizes = ", ".join(f"{count} {what}" for what, count in counts.items())
        return record_function(f"{name}: {sizes}" if sizes else name)

    def write(self, path: Path) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))
