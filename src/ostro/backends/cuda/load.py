"""Builds runners on NVIDIA GPUs: loads the weights, compiles kernels meanwhile, divides a model over several GPUs."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Thread

import torch

from ostro.backends.backend import OpenedModel, Unloadable
from ostro.backends.cuda.cpu_experts import CpuMixtures
from ostro.backends.cuda.cpu_layers import MOST_ROWS, Divided
from ostro.backends.cuda.measuring import this_gpu
from ostro.backends.cuda.precompiling import Precompiler, Request
from ostro.backends.cuda.quantize import quantize_fp8
from ostro.backends.cuda.quantized_loading import load_quantized
from ostro.backends.cuda.quantized_weights import why_widened
from ostro.backends.cuda.runner import GpuRunner, fitting_room, rank_part
from ostro.backends.memory import Room
from ostro.backends.native.load import expert_program
from ostro.backends.ranks.messages import Join
from ostro.backends.ranks.ranks import Ranks
from ostro.backends.torch import load as on_torch
from ostro.backends.torch.devices import pick_device, pick_dtype
from ostro.backends.torch.plain_attention import why_plain_attention
from ostro.config import EngineConfig, Number, ResolvedConfig
from ostro.devices import DEVICE_KINDS
from ostro.engine.runner import ModelRunner
from ostro.errors import BadRequest, Unsupported
from ostro.kernels.gpu.signatures import prepare_keys
from ostro.models.description import Causal
from ostro.system.topology import ThreadChoice, threads_here
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_described
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.loading import load_weights
from ostro.torch_models.lora import Adapters
from ostro.torch_models.shard import Collective
from ostro.weights import Pooling
from ostro.weights.arrays import tensor_of

_log = logging.getLogger(__name__)


def load_runner(
    opened: OpenedModel, described: Causal, precompiler: Precompiler | None, *, keeps_quantized: bool
) -> ModelRunner:
    """`precompiler` and `keeps_quantized` apply only to a model on one GPU; see `quantized_weights`."""
    device = pick_device(opened.config.device)
    opened = opened.divided(on_torch.chosen_ranks(opened, torch.cuda.device_count() if device.type == "cuda" else 1))
    config, pooling = opened.config, opened.checkpoint.pooling
    on_torch.set_threads(config.threads, opened.resolved.tensor_parallel)
    if opened.resolved.tensor_parallel > 1:
        if keeps_quantized:
            _log.info("quantised weights are widened: %s", why_widened(config, described))
        return _divided(opened)
    if keeps_quantized:
        return make_runner(_quantized_model(opened, described, device), config, pooling=pooling)
    with preparing_keys(device):
        if precompiler is not None:
            precompiler.begin(Request(dict(opened.checkpoint.config), opened.resolved, this_gpu(device)))
        model = on_torch.load_model(opened, described, device)
        if precompiler is not None:
            precompiler.wait()
    return make_runner(model, config, pooling=pooling)


def load_divided(opened: OpenedModel, divided: Divided) -> ModelRunner:
    """A runner for a model on one GPU, some of whose experts the CPU computes."""
    on_torch.set_threads(opened.config.threads)
    model = divided_model(opened, divided, pick_device(opened.config.device))
    return make_runner(model, opened.config, pooling=opened.checkpoint.pooling)


def divided_model(opened: OpenedModel, divided: Divided, device: torch.device) -> Decoder:
    """Its weights are on the device, but for experts, which are packed for the CPU and never go there."""
    config = opened.config
    model = build_described(divided.device, dtype=pick_dtype(config.dtype, device), device=device)
    assert isinstance(model, Decoder)
    arrays = (each for each in opened.checkpoint.arrays() if each[0] not in divided.experts.names)
    load_weights(model, ((name, tensor_of(weight)) for name, weight in arrays))
    make = partial(
        expert_program,
        opened,
        divided.experts,
        max_rows=min(MOST_ROWS, opened.resolved.max_batch_tokens),
        threads=cpu_threads(config.threads),
    )
    try:
        mixtures = CpuMixtures(lambda allocate: make(allocate=allocate), device)
    except Unloadable as error:
        # No other backend computes experts on the CPU.
        raise Unsupported(
            f"cpu_experts cannot be used: {error}. Correct that, or leave cpu_experts out.", param="cpu_experts"
        ) from error
    mixtures.attach(model)
    return model


def cpu_threads(asked: Number) -> ThreadChoice:
    """Threads for experts; by default, one core is left to this process, which launches steps."""
    choice = threads_here(asked)
    if asked != "auto" or choice.number == 1:
        return choice
    number = choice.number - 1
    return replace(choice, number=number, reason=f"{number}, and one for launching steps, of {choice.reason}")


@contextmanager
def preparing_keys(device: torch.device) -> Iterator[None]:
    """Computes what launches need to find compiled kernels, while weights are loaded: loading launches none."""
    if device.type != "cuda":
        yield
        return
    preparing = Thread(target=prepare_keys, daemon=True)
    preparing.start()
    try:
        yield
    finally:
        preparing.join()


def _quantized_model(opened: OpenedModel, described: Causal, device: torch.device) -> Model:
    dtype = pick_dtype(opened.config.dtype, device)
    model = build_described(described, dtype=dtype, device=torch.device("meta"))
    assert isinstance(model, Decoder)
    load_quantized(model, opened.checkpoint, dtype, device)
    return model


def make_runner(
    model: Model, config: EngineConfig, *, pooling: Pooling | None = None, ranks: Ranks | None = None
) -> ModelRunner:
    """A runner for a model that is loaded on a GPU."""
    if isinstance(model, Decoder) and why_plain_attention(model.described) is not None:
        return on_torch.make_runner(model, config, pooling=pooling)
    resolved, adapters = DEVICE_KINDS["cuda"].resolve(config), on_torch.adapters_of(model, config)
    group = None if ranks is None else ranks.collective
    _prepare(model, resolved, adapters, group)
    room = fitting_room(model, resolved)
    if ranks is not None:
        room = ranks.agree_on(room)
    return GpuRunner.sized(model, resolved, room, pooling=pooling, adapters=adapters, ranks=ranks, group=group)


def _prepare(model: Model, config: ResolvedConfig, adapters: Adapters | None, group: Collective | None = None) -> None:
    if config.quantize == "fp8":
        quantize_fp8(model, group)
    if adapters is not None:
        adapters.attach(model)


# ---- several GPUs


def _divided(opened: OpenedModel) -> ModelRunner:
    number, here = opened.resolved.tensor_parallel, torch.cuda.device_count()
    on_torch.divided(opened)
    if here < number:
        raise BadRequest(
            f"tensor_parallel is {number}, but the number of GPUs here is {here}. Lower tensor_parallel.",
            param="tensor_parallel",
        )
    torch.cuda.set_device(0)
    return on_torch.with_ranks(opened, "nccl", range(number), lambda ranks: first_rank(opened, ranks))


def first_rank(opened: OpenedModel, ranks: Ranks) -> ModelRunner:
    """Loads a model onto ranks that have started, in place of any that they have."""
    pooling = opened.checkpoint.pooling
    return on_torch.load_first(
        opened, ranks, lambda model: make_runner(model, opened.config, pooling=pooling, ranks=ranks)
    )


def load_part(
    opened: OpenedModel, rank: int, join: Join, group: Collective
) -> tuple[Room, Callable[[Room], on_torch.Part]]:
    """Loads the part of a rank other than the first; the counterpart of `backends.torch.load.load_part`."""
    model = on_torch.load_shard(opened, rank, group)
    config, adapters = opened.resolved, on_torch.adapters_of(model, opened.config)
    _prepare(model, config, adapters, group)
    captures = join.backend == "nccl"
    return fitting_room(model, config), lambda room: rank_part(
        model, config, room, adapters=adapters, group=group, captures=captures
    )
