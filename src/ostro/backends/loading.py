"""Builds a runner from a checkpoint: the native core on a CPU if it supports the model, JAX if it is asked for or there
is a TPU, otherwise torch.

Imports torch and JAX only if they run the model.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from ostro.backends.cuda.precompiling import Precompiler, precompiler
from ostro.backends.cuda.quantized_weights import keeps_quantized
from ostro.backends.native.load import native_runner
from ostro.config import EngineConfig
from ostro.devices import DEVICE_KINDS, check_settings, device_kind_here, require_torch, runs_on_jax
from ostro.engine.runner import ModelRunner
from ostro.errors import Unsupported, UnsupportedModel
from ostro.models.hrm_config import is_hrm
from ostro.models.registry import describe, is_encoder
from ostro.system.extras import needs
from ostro.system.machine import device_here, has_idle_gpu
from ostro.weights import Checkpoint, Pooling

if TYPE_CHECKING:
    from ostro.torch_models.base import Model

_log = logging.getLogger(__name__)


def load_runner(
    checkpoint: Checkpoint, config: EngineConfig, *, following: Callable[[], None] = lambda: None
) -> ModelRunner:
    """If another host's process leads this one, calls `following` once it follows, and ends when the leader does."""
    check_settings(config)
    hrm = is_hrm(checkpoint.config)
    # Describing a config validates it. Done first, because a model with packed weights in the cache is not built again.
    if not hrm:
        describe(checkpoint.config, max_seq_len=config.max_seq_len)
    if runs_on_jax(config):
        return _jax_runner(checkpoint, config, following, hrm=hrm)
    reason = _why_torch(config)
    if reason is None:
        DEVICE_KINDS["cpu"].check(config)
        found = native_runner(checkpoint, config)
        if not isinstance(found, str):
            _tell_of_gpu(config)
            return found
        reason = found
    if config.backend == "native":
        raise Unsupported(f"backend is native, but {reason}. Leave it out to run on torch.", param="backend")
    # Before the weights are loaded. An HRM and an encoder have no pages, and say so themselves.
    if not hrm and not is_encoder(checkpoint.config) and device_kind_here(config.device).name != "cuda":
        config.check_tiers(reason)
    require_torch("An HRM" if hrm else f"{checkpoint.name} ({reason})", param="model")
    # What is compiled ahead follows from the config, which does not tell a quantised model's kernels.
    keeps = not hrm and _keeps_quantized(checkpoint, config)
    with nullcontext() if hrm or keeps else _precompiler(checkpoint, config) as precompiler:
        from ostro.backends.torch import load as torch_load

        runner = torch_load.load_runner(checkpoint, config, precompiler, keeps_quantized=keeps)
    if config.backend == "auto" and device_kind_here(config.device).has_native_core:
        _log.info("the model runs on torch, which is slower than the native core: %s", reason)
    return runner


def _keeps_quantized(checkpoint: Checkpoint, config: EngineConfig) -> bool:
    """Decided for one GPU if their number is not known yet."""
    if is_encoder(checkpoint.config) or device_here(config.device, config.backend) != "cuda":
        return False
    one = replace(config, tensor_parallel=1) if config.tensor_parallel == "auto" else config
    return keeps_quantized(checkpoint.stored(), describe(checkpoint.config, max_seq_len=config.max_seq_len), one)


def _precompiler(checkpoint: Checkpoint, config: EngineConfig) -> AbstractContextManager[Precompiler | None]:
    """For a model on one GPU: started before torch is imported, which takes seconds."""
    on_gpu = config.device in ("auto", "cuda") and device_here("auto", config.backend) == "cuda"
    if is_encoder(checkpoint.config) or not on_gpu or config.tensor_parallel not in (1, "auto"):
        return nullcontext()
    return precompiler(checkpoint.config, config)


def _jax_runner(
    checkpoint: Checkpoint, config: EngineConfig, following: Callable[[], None], *, hrm: bool
) -> ModelRunner:
    if hrm:
        raise UnsupportedModel("The JAX backend cannot run an HRM. Use --backend torch.")
    resolved = device_kind_here(config.device, config.backend).resolve(config)
    from ostro.backends.jax.load import jax_runner

    return jax_runner(checkpoint, resolved, counts_devices=config.tensor_parallel == "auto", following=following)


def _tell_of_gpu(config: EngineConfig) -> None:
    if config.device == "auto" and has_idle_gpu():
        _log.warning("This machine has a GPU, but the model runs on the CPU. %s", needs("The GPU", "torch"))


def make_runner(model: "Model", config: EngineConfig, *, pooling: Pooling | None = None) -> ModelRunner:
    """A runner for a loaded torch model, on the model's device."""
    from ostro.backends.torch import load as torch_load

    return torch_load.make_runner(model, config, pooling=pooling)


def _why_torch(config: EngineConfig) -> str | None:
    """The reason why the settings alone require torch; None if they do not."""
    if config.backend == "torch":
        return "backend is torch"
    # "auto" never is: without a GPU or TPU it means one device.
    if config.tensor_parallel not in (1, "auto"):
        return "the model is divided over devices"
    backend = device_kind_here(config.device)
    return None if backend.has_native_core else f"the model runs on a {backend.label}"


__all__ = ["load_runner", "make_runner"]
