"""Builds a torch runner from a checkpoint: picks the device, loads the weights, sizes the KV cache."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from ostro.backends import BACKENDS
from ostro.config import EngineConfig, ResolvedConfig
from ostro.engine.runner import ModelRunner
from ostro.errors import BadRequest, Unsupported
from ostro.machine import cpu_limit
from ostro.models.hrm_config import is_hrm
from ostro.runner.devices import pick_device, pick_dtype
from ostro.runner.memory import num_pages
from ostro.runner.quantize import quantize_matrices, quantized_on_the_way
from ostro.runner.recompute import RecomputeRunner
from ostro.runner.torch_runner import TorchRunner
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model
from ostro.torch_models.hrm import HrmConfig, load_hrm
from ostro.torch_models.loading import load_weights
from ostro.torch_models.lora import Adapters
from ostro.weights import Checkpoint, Pooling
from ostro.weights.adapter import read_adapter
from ostro.weights.checkpoint import with_hrm_settings
from ostro.weights.hrm_settings import HrmSettings

# Every token takes a pass over the whole sequence, so a step holds more tokens than with a KV cache.
_RECOMPUTED_TOKENS = 2048

_log = logging.getLogger(__name__)


def load_runner(checkpoint: Checkpoint, config: EngineConfig) -> ModelRunner:
    _set_threads(config.threads)
    device = pick_device(config.device)
    BACKENDS[device.type].check(config)
    if is_hrm(checkpoint.config):
        return _recompute_runner(checkpoint, config, device)
    config.check_causal()
    model = build_model(
        checkpoint.config, max_seq_len=config.max_seq_len, dtype=pick_dtype(config.dtype, device), device=device
    )
    tensors = checkpoint.tensors()
    # Adapters inspect the original projections, so with adapters the whole model is loaded before it is quantized.
    if not config.adapters and (config.quantize == "int8" or config.quantize == "int4"):
        tensors = quantized_on_the_way(model, tensors, config.quantize)
    load_weights(model, tensors)
    return make_runner(model, config, pooling=checkpoint.pooling)


def _set_threads(number: int | None) -> None:
    if number is not None:
        torch.set_num_threads(number)
    elif (limit := cpu_limit()) is not None:
        # More threads than the container's CPU quota would only wait for one another.
        torch.set_num_threads(min(limit, torch.get_num_threads()))


def make_runner(model: Model, config: EngineConfig, *, pooling: Pooling | None = None) -> ModelRunner:
    """A runner for a loaded model, on the model's device."""
    resolved = BACKENDS[next(model.parameters()).device.type].resolve(config)
    # Before quantization, which replaces the projections that a checkpoint names.
    found = {name: read_adapter(path) for name, path in config.adapters}
    adapters = Adapters(model, found) if found else None
    return _RUNNERS[resolved.device](model, resolved, pooling, adapters)


def _gpu_runner(
    model: Model, config: ResolvedConfig, pooling: Pooling | None, adapters: Adapters | None
) -> ModelRunner:
    # Needs triton, which machines without a GPU may lack.
    from ostro.runner.gpu.quantize import quantize_fp8
    from ostro.runner.gpu.runner import GpuRunner

    if config.quantize == "fp8":
        quantize_fp8(model)
    if adapters is not None:
        adapters.attach(model)
    return GpuRunner.sized(model, config, pooling=pooling, adapters=adapters)


def _cpu_runner(
    model: Model, config: ResolvedConfig, pooling: Pooling | None, adapters: Adapters | None
) -> ModelRunner:
    if config.kv_dtype not in ("auto", "float32"):
        raise Unsupported(
            f"kv_dtype {config.kv_dtype} needs the native core, and this model runs on torch; leave it out.",
            param="kv_dtype",
        )
    if config.quantize == "int8" or config.quantize == "int4":
        quantize_matrices(model, config.quantize)
    if adapters is not None:
        adapters.attach(model)
    return _paged_runner(model, config, pooling, adapters)


def _paged_runner(
    model: Model, config: ResolvedConfig, pooling: Pooling | None, adapters: Adapters | None
) -> TorchRunner:
    pages = num_pages(
        model.shape,
        page_size=config.page_size,
        itemsize=next(model.parameters()).itemsize,
        kv_memory=config.kv_memory,
        max_batch_seqs=config.max_batch_seqs,
        limit=config.kv_memory_limit,
        max_tokens=config.max_running_tokens,
    )
    return TorchRunner(
        model,
        page_size=config.page_size,
        num_pages=pages,
        max_batch_tokens=config.max_batch_tokens,
        max_batch_seqs=config.max_batch_seqs,
        pooling=pooling,
        adapters=adapters,
    )


def _apple_runner(
    model: Model, config: ResolvedConfig, pooling: Pooling | None, adapters: Adapters | None
) -> ModelRunner:
    if adapters is not None:
        adapters.attach(model)
    return _paged_runner(model, config, pooling, adapters)


_RUNNERS: Mapping[str, Callable[[Model, ResolvedConfig, Pooling | None, Adapters | None], ModelRunner]] = {
    "cpu": _cpu_runner,
    "cuda": _gpu_runner,
    "mps": _apple_runner,
}


def _recompute_runner(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> RecomputeRunner:
    config.check_recomputing()
    checkpoint = with_hrm_settings(checkpoint, _architecture(config))
    dialect = None if config.hrm_dialect == "auto" else config.hrm_dialect
    hrm = HrmConfig.read(checkpoint.config, dialect=dialect, max_seq_len=config.max_seq_len)
    steps = config.hrm_steps or hrm.decoding_steps
    if config.hrm_halting and steps == 1:
        raise BadRequest(
            f"hrm_halting saves nothing where a token takes one outer step, as in the {hrm.dialect} dialect. "
            "Set hrm_steps to the most that it may take, or leave hrm_halting out.",
            param="hrm_halting",
        )
    _log.info(
        "an HRM of the %s dialect, %d outer steps per token%s", hrm.dialect, steps, " at most" * config.hrm_halting
    )
    return RecomputeRunner(
        load_hrm(hrm, checkpoint.tensors(), pick_dtype(config.dtype, device), device),
        steps=steps,
        halting=config.hrm_halting,
        max_batch_tokens=config.max_batch_tokens or _RECOMPUTED_TOKENS,
        max_batch_seqs=BACKENDS[device.type].resolve(config).max_batch_seqs,
    )


def _architecture(config: EngineConfig) -> HrmSettings:
    """The HRM architecture in the settings, under the names used in HRM files."""
    return HrmSettings(
        None if config.hrm_config is None else Path(config.hrm_config),
        {
            "num_heads": config.hrm_num_heads,
            "H_cycles": config.hrm_h_cycles,
            "L_cycles": config.hrm_l_cycles,
            "H_layers": config.hrm_h_layers,
            "L_layers": config.hrm_l_layers,
        },
    )
