"""Builds torch runners: loads the weights, sizes the KV cache, divides a model over ranks on a CPU.

Code shared with NVIDIA GPUs' runners is here, too: `backends.cuda.load` uses it.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from ostro.backends.backend import OpenedModel
from ostro.backends.memory import Room, gpu_room, host_room
from ostro.backends.ranks.messages import Group, Join, Load
from ostro.backends.torch.devices import pick_device, pick_dtype
from ostro.backends.torch.encoder import EncoderRunner
from ostro.backends.torch.part import TorchPart
from ostro.backends.torch.plain_attention import plain_attention_bytes, why_plain_attention
from ostro.backends.torch.quantize import quantize_matrices, quantized_on_the_way
from ostro.backends.torch.recompute import RecomputeRunner
from ostro.backends.torch.runner import TorchRunner
from ostro.config import EngineConfig, Number, ResolvedConfig
from ostro.devices import DEVICE_KINDS
from ostro.engine.runner import ModelRunner
from ostro.errors import BadRequest
from ostro.models.cut import Cut, cut, divisible
from ostro.models.description import Causal
from ostro.models.encoder import Encoder
from ostro.models.hrm_config import HrmConfig
from ostro.system.machine import cpu_limit, free_memory
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_described, build_encoder
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.hrm import load_hrm
from ostro.torch_models.loading import fill, load_weights, places_of
from ostro.torch_models.lora import Adapters
from ostro.torch_models.shard import Collective, Shard
from ostro.weights import Pooling
from ostro.weights.adapter import read_adapter

if TYPE_CHECKING:
    from ostro.backends.ranks.ranks import Ranks

T = TypeVar("T")

# Every token takes a pass over the whole sequence, so a step holds more tokens than with a KV cache.
_RECOMPUTED_TOKENS = 2048

_log = logging.getLogger(__name__)


def paged_runner(opened: OpenedModel, described: Causal) -> ModelRunner:
    """A runner for a model with a KV cache."""
    device = pick_device(opened.config.device)
    opened = opened.divided(chosen_ranks(opened, 1))
    set_threads(opened.config.threads, opened.resolved.tensor_parallel)
    if opened.resolved.tensor_parallel > 1:
        return with_ranks(opened, "gloo", (), lambda ranks: first_rank(opened, ranks))
    model = load_model(opened, described, device)
    return make_runner(model, opened.config, pooling=opened.checkpoint.pooling)


def encoder_runner(opened: OpenedModel, described: Encoder) -> EncoderRunner:
    device = pick_device(opened.config.device)
    set_threads(opened.config.threads)
    model = build_encoder(described, dtype=pick_dtype(opened.config.dtype, device), device=device)
    fill(places_of(model), opened.checkpoint.tensors())
    return EncoderRunner(
        model,
        opened.checkpoint.pooling,
        max_batch_tokens=opened.kind.encoded_tokens(opened.config),
        max_batch_seqs=opened.resolved.max_batch_seqs,
    )


def recompute_runner(opened: OpenedModel, described: HrmConfig) -> RecomputeRunner:
    config, device = opened.config, pick_device(opened.config.device)
    set_threads(config.threads)
    steps = config.hrm_steps or described.decoding_steps
    if config.hrm_halting and steps == 1:
        raise BadRequest(
            f"hrm_halting saves nothing where a token takes one outer step, as in the {described.dialect} dialect. "
            "Set hrm_steps to the most that it may take, or leave hrm_halting out.",
            param="hrm_halting",
        )
    most = " at most" if config.hrm_halting else ""
    _log.info("an HRM of the %s dialect, %d outer steps per token%s", described.dialect, steps, most)
    # Upstream's dialect solves puzzles, whose answers include the q-head's scores.
    asks_q_head = config.hrm_halting or described.dialect == "upstream"
    dtype = pick_dtype(config.dtype, device)
    return RecomputeRunner(
        load_hrm(described, opened.checkpoint.tensors(), dtype, device, needs_q_head=asks_q_head),
        steps=steps,
        halting=config.hrm_halting,
        max_batch_tokens=config.max_batch_tokens or _RECOMPUTED_TOKENS,
        max_batch_seqs=opened.resolved.max_batch_seqs,
    )


def load_model(opened: OpenedModel, described: Causal, device: torch.device, shard: Shard | None = None) -> Model:
    """The model with its weights; with a `shard`, one rank's part of it."""
    config = opened.config
    model = build_described(described, dtype=pick_dtype(config.dtype, device), device=device, shard=shard)
    tensors = opened.checkpoint.tensors()
    # Adapters inspect the original projections, so with adapters the whole model is loaded before it is quantized.
    if not config.adapters and (config.quantize == "int8" or config.quantize == "int4"):
        tensors = quantized_on_the_way(model, tensors, config.quantize)
    load_weights(model, tensors)
    return model


# Read before anybody sets another number.
_ALL_THREADS = torch.get_num_threads()


def set_threads(number: Number, ranks: int = 1) -> None:
    """torch's threads in this process, which shares the CPU with the other ranks' if there are any."""
    if isinstance(number, int):
        torch.set_num_threads(number)
    elif (limit := cpu_limit()) is not None or ranks > 1:
        # More threads than the container's CPU quota would only wait for one another.
        torch.set_num_threads(max(1, min(limit or sys.maxsize, _ALL_THREADS) // ranks))


def make_runner(
    model: Model, config: EngineConfig, *, pooling: Pooling | None = None, ranks: "Ranks | None" = None
) -> TorchRunner:
    """A runner for a loaded model, on the model's device."""
    device = next(model.parameters()).device.type
    resolved, adapters = DEVICE_KINDS[device].resolve(config), adapters_of(model, config)
    _prepare(model, resolved, adapters)
    room = _fitting(model, resolved, 1 if ranks is None else ranks.ranks)
    if ranks is not None:
        room = ranks.agree_on(room)
    return TorchRunner(
        model,
        page_size=resolved.page_size,
        num_pages=room.pages,
        num_states=room.states,
        max_batch_tokens=resolved.max_batch_tokens,
        max_batch_seqs=resolved.max_batch_seqs,
        pooling=pooling,
        adapters=adapters,
        ranks=ranks,
    )


def adapters_of(model: Model, config: EngineConfig) -> Adapters | None:
    """The settings' adapters. Call it before quantization, which replaces the projections that a checkpoint names."""
    found = {name: read_adapter(path) for name, path in config.adapters}
    return Adapters(model, found) if found else None


def _prepare(model: Model, config: ResolvedConfig, adapters: Adapters | None) -> None:
    if isinstance(model, Decoder) and config.device == "cuda":
        reason = why_plain_attention(model.described)
        _log.warning("the model runs with torch's plain attention, which is slow on a GPU: %s", reason)
    if config.quantize == "int8" or config.quantize == "int4":
        quantize_matrices(model, config.quantize)
    if adapters is not None:
        adapters.attach(model)


def _fitting(model: Model, config: ResolvedConfig, ranks: int) -> Room:
    """Pages and states for one of `ranks` processes on this machine; `kv_memory` and its limit are for all of them."""
    itemsize = next(model.parameters()).itemsize
    if config.device == "cuda":
        assert isinstance(model, Decoder)
        return gpu_room(
            model.shape,
            page_size=config.page_size,
            itemsize=itemsize,
            kv_memory=config.kv_memory,
            utilization=config.gpu_memory_utilization,
            max_batch_tokens=config.max_batch_tokens,
            max_batch_seqs=config.max_batch_seqs,
            limit=config.kv_memory_limit,
            max_tokens=config.max_running_tokens,
            expert_bytes=itemsize * model.described.expert_width,
            attention_bytes=plain_attention_bytes(
                model.described, itemsize, config.max_batch_tokens, config.max_batch_seqs
            ),
            state_bytes=model.state_bytes,
        )
    return host_room(
        model.shape,
        page_size=config.page_size,
        itemsize=itemsize,
        kv_memory=None if config.kv_memory is None else config.kv_memory // ranks,
        max_batch_seqs=config.max_batch_seqs,
        limit=None if config.kv_memory_limit is None else config.kv_memory_limit // ranks,
        free=free_memory() // ranks,
        max_tokens=config.max_running_tokens,
        state_bytes=model.state_bytes,
    )


# ---- several ranks


def chosen_ranks(opened: OpenedModel, devices: int) -> int:
    """The number of ranks; logs what "auto" resolved to."""
    ranks = opened.ranks(devices)
    if opened.config.tensor_parallel == "auto":
        _log.info("tensor_parallel is auto: the model runs on %d of %d %s devices", ranks, devices, opened.kind.name)
    return ranks


def with_ranks(
    opened: OpenedModel, group: Group, devices: Sequence[int], load: "Callable[[Ranks], ModelRunner]"
) -> ModelRunner:
    """Starts the other ranks, which load their parts while `load` loads the first one's."""
    # Imported late: not needed with one device.
    from ostro.backends.ranks.ranks import Ranks

    # Refuses a model that does not divide before any process is started.
    divided(opened)
    ranks = Ranks(opened.resolved.tensor_parallel, backend=group, devices=devices)
    try:
        return load(ranks)
    except BaseException:
        ranks.close()
        raise


def divided(opened: OpenedModel) -> Cut:
    return cut(opened.description, opened.resolved.tensor_parallel)


def first_rank(opened: OpenedModel, ranks: "Ranks") -> TorchRunner:
    """Loads a model onto running ranks, replacing any that they have."""
    pooling = opened.checkpoint.pooling
    return load_first(opened, ranks, lambda model: make_runner(model, opened.config, pooling=pooling, ranks=ranks))


def load_first(opened: OpenedModel, ranks: "Ranks", make: Callable[[Model], T]) -> T:
    """The result of `make` for the first rank's part, while the others load theirs."""
    shard = Shard(0, divided(opened), ranks.collective)
    ranks.send(Load(str(opened.checkpoint.path), opened.config))
    try:
        return make(load_model(opened, divisible(opened.description), pick_device(opened.config.device), shard))
    except RuntimeError as error:
        raise ranks.lost(error) from error


class Part(Protocol):
    """One rank's part of a model, ready to run."""

    def carry_out(self, message: object) -> None:
        """Carries out a message from the first rank."""


def load_part(opened: OpenedModel, rank: int, join: Join, group: Collective) -> tuple[Room, Callable[[Room], Part]]:
    """For ranks other than the first: the pages and states that fit into memory, and a function that makes a part with
    those agreed on.
    """
    model = load_shard(opened, rank, group)
    config, adapters = opened.resolved, adapters_of(model, opened.config)
    _prepare(model, config, adapters)
    return _fitting(model, config, join.ranks), lambda room: TorchPart(
        model,
        page_size=config.page_size,
        num_pages=room.pages,
        num_states=room.states,
        adapters=adapters,
        ranks=join.ranks,
    )


def load_shard(opened: OpenedModel, rank: int, group: Collective) -> Model:
    shard = Shard(rank, divided(opened), group)
    return load_model(opened, divisible(opened.description), pick_device(opened.config.device), shard)
