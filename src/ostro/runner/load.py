"""From a checkpoint to a runner that is ready: natively on a CPU where the native core can, else with torch.

Imports torch only where a runner needs it: a model that was packed before starts without.
"""

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ostro.config import EngineConfig
from ostro.errors import Unsupported
from ostro.runner.base import ModelRunner
from ostro.runner.native.load import native_runner
from ostro.weights import Checkpoint, Pooling

if TYPE_CHECKING:
    from ostro.models.base import Model

_log = logging.getLogger(__name__)

# Present wherever a driver of NVIDIA's is loaded: on Linux, and on Windows below it.
_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")


def load_runner(checkpoint: Checkpoint, config: EngineConfig) -> ModelRunner:
    reason = _why_torch(config)
    if reason is None:
        config.check_device("cpu")
        found = native_runner(checkpoint, config)
        if not isinstance(found, str):
            return found
        reason = found
    if config.cpu_backend == "native":
        raise Unsupported(f"cpu_backend is native, but {reason}. Leave it out to run on torch.", param="cpu_backend")
    from ostro.runner import torch_load

    runner = torch_load.load_runner(checkpoint, config)
    if config.cpu_backend == "auto":
        _log.info("on torch, for %s", reason)
    return runner


def make_runner(model: "Model", config: EngineConfig, *, pooling: Pooling | None = None) -> ModelRunner:
    """A runner for a torch model that is loaded, on the model's device."""
    from ostro.runner import torch_load

    return torch_load.make_runner(model, config, pooling=pooling)


def _why_torch(config: EngineConfig) -> str | None:
    """Why settings alone ask for torch."""
    if config.cpu_backend == "torch":
        return "cpu_backend is torch"
    if config.device == "cuda" or (config.device == "auto" and _has_gpu()):
        return "there is a GPU" if config.device == "auto" else "device is cuda"
    return None


def _has_gpu() -> bool:
    """Whether it is worth while to ask torch."""
    return sys.platform == "win32" or any(Path(each).exists() for each in _GPU_FILES)


__all__ = ["load_runner", "make_runner"]
