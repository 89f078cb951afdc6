"""Builds a torch runner from a checkpoint: picks the device, loads the weights, sizes the KV cache."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from ostro.backends.cuda.fusible import check_plain_attention, why_plain_attention
from ostro.backends.cuda.quantized_weights import why_widened
from ostro.backends.division import choose_ranks
from ostro.backends.memory import num_pages
from ostro.backends.precision import check_torch_format
from ostro.backends.torch.devices import pick_device, pick_dtype
from ostro.backends.torch.encoder import EncoderRunner
from ostro.backends.torch.part import TorchPart
from ostro.backends.torch.quantize import quantize_matrices, quantized_on_the_way
from ostro.backends.torch.recompute import RecomputeRunner
from ostro.backends.torch.runner import TorchRunner
from ostro.backends.torch.tp.messages import Join, Load
from ostro.config import EngineConfig, ResolvedConfig
from ostro.devices import DEVICE_KINDS
from ostro.engine.runner import ModelRunner
from ostro.errors import BadRequest, Unsupported
from ostro.models.architecture import Architecture
from ostro.models.cut import Cut, cut
from ostro.models.encoder import Encoder
from ostro.models.hrm_config import is_hrm
from ostro.models.registry import describe
from ostro.system.machine import cpu_limit, free_memory
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_encoder, build_model
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.hrm import HrmConfig, load_hrm
from ostro.torch_models.loading import fill, load_weights, places_of
from ostro.torch_models.lora import Adapters
from ostro.torch_models.shard import Collective, Shard
from ostro.weights import Checkpoint, Pooling
from ostro.weights.adapter import read_adapter
from ostro.weights.checkpoint import with_hrm_settings
from ostro.weights.hrm_settings import HrmSettings

if TYPE_CHECKING:
    from ostro.backends.cuda.precompiling import Precompiler, Request
    from ostro.backends.torch.tp.ranks import Ranks

# Every token takes a pass over the whole sequence, so a step holds more tokens than with a KV cache.
_RECOMPUTED_TOKENS = 2048

_log = logging.getLogger(__name__)


def load_runner(
    checkpoint: Checkpoint,
    config: EngineConfig,
    precompiler: "Precompiler | None" = None,
    *,
    keeps_quantized: bool = False,
) -> ModelRunner:
    """The `precompiler` is for a model on one GPU, and so is `keeps_quantized`: see `quantized_weights`."""
    device = pick_device(config.device)
    ranks = _choose_ranks(checkpoint, config, device)
    config = replace(config, tensor_parallel=ranks)
    set_threads(config.threads, ranks)
    DEVICE_KINDS[device.type].check(config)
    if is_hrm(checkpoint.config):
        return _recompute_runner(checkpoint, config, device)
    described = describe(checkpoint.config, max_seq_len=config.max_seq_len)
    if isinstance(described, Encoder):
        return _encoder_runner(checkpoint, described, config, device)
    config.check_causal()
    if device.type == "cuda" and isinstance(described, Architecture):
        # Before the weights are loaded.
        _why_plain_attention(described, DEVICE_KINDS["cuda"].resolve(config))
    if ranks > 1:
        if keeps_quantized:
            _log.info("quantised weights are widened: %s", why_widened(config, described))
        return _first_rank(checkpoint, config, device, ranks)
    if device.type == "cuda" and keeps_quantized:
        return make_runner(_quantized_model(checkpoint, config, device), config, pooling=checkpoint.pooling)
    if device.type != "cuda" or precompiler is None:
        return make_runner(_load_model(checkpoint, config, device), config, pooling=checkpoint.pooling)
    precompiler.begin(_kernels_for(checkpoint, config, device))
    model = _load_model(checkpoint, config, device)
    precompiler.wait()
    return make_runner(model, config, pooling=checkpoint.pooling)


def _kernels_for(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> "Request":
    from ostro.backends.cuda.measuring import this_gpu
    from ostro.backends.cuda.precompiling import Request

    return Request(dict(checkpoint.config), DEVICE_KINDS[device.type].resolve(config), this_gpu(device))


def _load_model(
    checkpoint: Checkpoint, config: EngineConfig, device: torch.device, shard: Shard | None = None
) -> Model:
    dtype = pick_dtype(config.dtype, device)
    described = describe(checkpoint.config, max_seq_len=config.max_seq_len)
    check_torch_format(described, config.quantize)
    model = build_model(checkpoint.config, max_seq_len=config.max_seq_len, dtype=dtype, device=device, shard=shard)
    tensors = checkpoint.tensors()
    # Adapters inspect the original projections, so with adapters the whole model is loaded before it is quantized.
    if not config.adapters and (config.quantize == "int8" or config.quantize == "int4"):
        tensors = quantized_on_the_way(model, tensors, config.quantize)
    load_weights(model, tensors)
    return model


def _quantized_model(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> Model:
    # Needs triton, which machines without a GPU may lack.
    from ostro.backends.cuda.quantized_loading import load_quantized

    dtype, meta = pick_dtype(config.dtype, device), torch.device("meta")
    model = build_model(checkpoint.config, max_seq_len=config.max_seq_len, dtype=dtype, device=meta)
    assert isinstance(model, Decoder)
    load_quantized(model, checkpoint, dtype, device)
    return model


# Before anybody has set another number.
_ALL_THREADS = torch.get_num_threads()


def set_threads(number: int | None, ranks: int = 1) -> None:
    """torch's threads in this process, which shares the CPU with the other ranks' if there are any."""
    if number is not None:
        torch.set_num_threads(number)
    elif (limit := cpu_limit()) is not None or ranks > 1:
        # More threads than the container's CPU quota would only wait for one another.
        torch.set_num_threads(max(1, min(limit or sys.maxsize, _ALL_THREADS) // ranks))


def make_runner(model: Model, config: EngineConfig, *, pooling: Pooling | None = None) -> ModelRunner:
    """A runner for a loaded model, on the model's device."""
    return _runner(model, config, pooling)


def _runner(model: Model, config: EngineConfig, pooling: Pooling | None, ranks: "Ranks | None" = None) -> ModelRunner:
    resolved = DEVICE_KINDS[next(model.parameters()).device.type].resolve(config)
    return _RUNNERS[resolved.device](model, resolved, pooling, _adapters(model, config), ranks)


def _adapters(model: Model, config: EngineConfig) -> Adapters | None:
    """To be found before quantization, which replaces the projections that a checkpoint names."""
    found = {name: read_adapter(path) for name, path in config.adapters}
    return Adapters(model, found) if found else None


# ---- several ranks


def _choose_ranks(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> int:
    devices = torch.cuda.device_count() if device.type == "cuda" else 1
    ranks = choose_ranks(checkpoint, config, devices)
    if config.tensor_parallel == "auto":
        _log.info("tensor_parallel is auto: the model runs on %d of %d %s devices", ranks, devices, device.type)
    return ranks


def _first_rank(checkpoint: Checkpoint, config: EngineConfig, device: torch.device, number: int) -> ModelRunner:
    """Starts the others, which load their parts at the same time."""
    # Not for those who have one device.
    from ostro.backends.torch.tp.ranks import Ranks

    # Refuses what does not divide before any process is started.
    _cut(checkpoint, config, number)
    if device.type == "cuda" and torch.cuda.device_count() < number:
        raise BadRequest(
            f"tensor_parallel is {number}, but this machine has {torch.cuda.device_count()}. Lower it.",
            param="tensor_parallel",
        )
    gpus = range(number) if device.type == "cuda" else ()
    if gpus:
        torch.cuda.set_device(gpus[0])
    ranks = Ranks(number, backend="nccl" if gpus else "gloo", devices=gpus)
    try:
        return first_rank(checkpoint, config, ranks)
    except BaseException:
        ranks.close()
        raise


def first_rank(checkpoint: Checkpoint, config: EngineConfig, ranks: "Ranks") -> ModelRunner:
    """Loads a model onto ranks that have started, in place of any that they have."""
    shard = Shard(0, _cut(checkpoint, config, ranks.ranks), ranks.collective)
    ranks.send(Load(str(checkpoint.path), config))
    try:
        model = _load_model(checkpoint, config, pick_device(config.device), shard)
        return _runner(model, config, checkpoint.pooling, ranks)
    except RuntimeError as error:
        raise ranks.lost(error) from error


class Part(Protocol):
    """One rank's part of a model, ready to run."""

    def carry_out(self, message: object) -> None:
        """What the first rank has sent."""


def load_part(
    checkpoint: Checkpoint, config: EngineConfig, rank: int, join: Join, group: Collective
) -> tuple[int, Callable[[int], Part]]:
    """For ranks other than the first: the number of pages that there is memory for, and what makes a part with as many
    as are agreed on.
    """
    shard = Shard(rank, _cut(checkpoint, config, join.ranks), group)
    model = _load_model(checkpoint, config, pick_device(config.device), shard)
    device = next(model.parameters()).device.type
    resolved, adapters = DEVICE_KINDS[device].resolve(config), _adapters(model, config)
    if device == "cuda":
        from ostro.backends.cuda.runner import fitting_pages, rank_part

        _prepare_gpu(model, resolved, adapters, group)
        pages = fitting_pages(model, resolved)
        captures = join.backend == "nccl"
        return pages, lambda number: rank_part(
            model, resolved, number, adapters=adapters, group=group, captures=captures
        )
    _prepare_cpu(model, resolved, adapters)
    size = resolved.page_size
    pages = _fitting_pages(model, resolved, join.ranks)
    return pages, lambda number: TorchPart(model, page_size=size, num_pages=number, adapters=adapters, ranks=join.ranks)


def _cut(checkpoint: Checkpoint, config: EngineConfig, ranks: int) -> Cut:
    return cut(describe(checkpoint.config, max_seq_len=config.max_seq_len), ranks)


# ---- by device


def _gpu_runner(
    model: Model, config: ResolvedConfig, pooling: Pooling | None, adapters: Adapters | None, ranks: "Ranks | None"
) -> ModelRunner:
    # Needs triton, which machines without a GPU may lack.
    from ostro.backends.cuda.runner import GpuRunner, fitting_pages

    reason = _why_plain_attention(model.described, config) if isinstance(model, Decoder) else None
    if reason is not None:
        _log.warning("the model runs with torch's plain attention, which is slow on a GPU: %s", reason)
    group = None if ranks is None else ranks.collective
    _prepare_gpu(model, config, adapters, group)
    pages = fitting_pages(model, config)
    if reason is not None:
        return _torch_runner(model, config, pages, pooling, adapters)
    if ranks is not None:
        pages = ranks.agree_on_pages(pages)
    return GpuRunner.sized(model, config, pages, pooling=pooling, adapters=adapters, ranks=ranks, group=group)


def _why_plain_attention(described: Architecture, config: ResolvedConfig) -> str | None:
    reason = why_plain_attention(described)
    if reason is not None:
        check_plain_attention(config, reason)
    return reason


def _prepare_gpu(
    model: Model, config: ResolvedConfig, adapters: Adapters | None, group: Collective | None = None
) -> None:
    from ostro.backends.cuda.quantize import quantize_fp8

    if config.quantize == "fp8":
        quantize_fp8(model, group)
    if adapters is not None:
        adapters.attach(model)


def _cpu_runner(
    model: Model, config: ResolvedConfig, pooling: Pooling | None, adapters: Adapters | None, ranks: "Ranks | None"
) -> ModelRunner:
    _prepare_cpu(model, config, adapters)
    return _paged_runner(model, config, pooling, adapters, ranks)


def _apple_runner(
    model: Model, config: ResolvedConfig, pooling: Pooling | None, adapters: Adapters | None, ranks: "Ranks | None"
) -> ModelRunner:
    if adapters is not None:
        adapters.attach(model)
    return _paged_runner(model, config, pooling, adapters, ranks)


def _paged_runner(
    model: Model, config: ResolvedConfig, pooling: Pooling | None, adapters: Adapters | None, ranks: "Ranks | None"
) -> TorchRunner:
    pages = _fitting_pages(model, config, 1 if ranks is None else ranks.ranks)
    return _torch_runner(
        model, config, pages if ranks is None else ranks.agree_on_pages(pages), pooling, adapters, ranks
    )


def _torch_runner(
    model: Model,
    config: ResolvedConfig,
    num_pages: int,
    pooling: Pooling | None,
    adapters: Adapters | None,
    ranks: "Ranks | None" = None,
) -> TorchRunner:
    return TorchRunner(
        model,
        page_size=config.page_size,
        num_pages=num_pages,
        max_batch_tokens=config.max_batch_tokens,
        max_batch_seqs=config.max_batch_seqs,
        pooling=pooling,
        adapters=adapters,
        ranks=ranks,
    )


def _prepare_cpu(model: Model, config: ResolvedConfig, adapters: Adapters | None) -> None:
    if config.kv_dtype not in ("auto", "float32"):
        raise Unsupported(
            f"kv_dtype {config.kv_dtype} needs the native core, and this model runs on torch; leave it out.",
            param="kv_dtype",
        )
    if config.quantize == "int8" or config.quantize == "int4":
        quantize_matrices(model, config.quantize)
    if adapters is not None:
        adapters.attach(model)


def _fitting_pages(model: Model, config: ResolvedConfig, ranks: int) -> int:
    """Pages for one of `ranks` processes on this machine; `kv_memory` and its limit are for all of them."""
    return num_pages(
        model.shape,
        page_size=config.page_size,
        itemsize=next(model.parameters()).itemsize,
        kv_memory=None if config.kv_memory is None else config.kv_memory // ranks,
        max_batch_seqs=config.max_batch_seqs,
        limit=None if config.kv_memory_limit is None else config.kv_memory_limit // ranks,
        free=free_memory() // ranks,
        max_tokens=config.max_running_tokens,
    )


_MakeRunner = Callable[[Model, ResolvedConfig, Pooling | None, Adapters | None, "Ranks | None"], ModelRunner]
_RUNNERS: Mapping[str, _MakeRunner] = {
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
        max_batch_seqs=DEVICE_KINDS[device.type].resolve(config).max_batch_seqs,
    )


def _encoder_runner(
    checkpoint: Checkpoint, described: Encoder, config: EngineConfig, device: torch.device
) -> EncoderRunner:
    config.check_encoding()
    model = build_encoder(described, dtype=pick_dtype(config.dtype, device), device=device)
    fill(places_of(model), checkpoint.tensors())
    backend = DEVICE_KINDS[device.type]
    return EncoderRunner(
        model,
        checkpoint.pooling,
        max_batch_tokens=backend.encoded_tokens(config),
        max_batch_seqs=backend.resolve(config).max_batch_seqs,
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
