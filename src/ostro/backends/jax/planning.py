"""The memory that a model takes with JAX, on each device: mirrors `backends.jax.load`. Imports no JAX."""

import sys
from collections.abc import Sequence
from math import prod

from ostro.backends.backend import OpenedModel
from ostro.backends.jax.layout import (
    AdapterLayout,
    VectorLayout,
    fits_tpu_kernel,
    in_whole_rows,
    jax_architecture,
    matrix_values,
    rank_state,
)
from ostro.backends.jax.shapes import PAGES_PER_TURN, Sizes, StepShape
from ostro.backends.memory import JAX_SPARE, Room, StateSlots, device_room, host_room, page_bytes, rank_shape
from ostro.backends.plan import Parts, adapter_ranks, stored_as
from ostro.backends.precision import in_words
from ostro.config import ResolvedConfig
from ostro.devices import Memory
from ostro.errors import ModelError
from ostro.models.architecture import Architecture, ModelShape, state_bytes
from ostro.models.cut import Cut, cut

_MIB = 1 << 20
# Measured, minus the model: Python with JAX, after compiling. Loading kept programs takes 70 MiB less.
_PROCESS = 320 * _MIB
# Host memory of the process where devices have memory of their own.
_DEVICE_PROCESS = 2048 * _MIB
_FLOAT = 4
# Measured: temporary memory of a draw with edits, top-k and top-p, as a multiple of its logits.
_DRAW_COPIES = 6
# Measured: temporary memory of states that are advanced, and of what is convolved and computed from it, as multiples of
# the states and of the convolved channels.
_STATE_COPIES = 2
_CONVOLVED_COPIES = 7
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


def planned_parts(opened: OpenedModel, memory: Memory) -> Parts:
    """Sizes are those of one device, except on a CPU, where all ranks share the machine's memory."""
    stored, config, described = opened.checkpoint.stored(), opened.resolved, jax_architecture(opened.description)
    on_cpu, dtype = opened.kind.name == "cpu", opened.compute_dtype
    own = cut(described, config.tensor_parallel)
    ranks_here = own.ranks if on_cpu else 1
    adapters = AdapterLayout.of(described, adapter_ranks(config, described.backbone))
    values = matrix_values(described, own) + adapters.values(described, own)
    weights = ranks_here * (values * _ITEMSIZE[dtype] + VectorLayout.of(described, own).total * _FLOAT)
    step = ranks_here * step_bytes(described, own, config, adapters.widths)
    padded = config.device == "tpu" and fits_tpu_kernel(own.kv_heads, _ITEMSIZE[dtype])
    head_dim = in_whole_rows(described.shape.head_dim) if padded else None
    shape = rank_shape(described.shape, ranks_here * own.kv_heads, head_dim)
    state = ranks_here * state_bytes(own.states(described), _ITEMSIZE[dtype])
    try:
        room = (_cpu_room if on_cpu else _device_room)(shape, config, memory, weights, step, _ITEMSIZE[dtype], state)
    except ModelError:
        room = Room(0, 0)
    devices = f", {own.ranks} devices" if own.ranks > 1 else ""
    return Parts(
        backend=f"jax ({config.device}{devices})",
        precision=in_words([dtype], dtype),
        parameters=sum(tensor.values for tensor in stored.tensors),
        weights=weights,
        page=page_bytes(shape, config.page_size, _ITEMSIZE[dtype]),
        pages=room.pages,
        state=state,
        states=room.states,
        other=step + (_PROCESS if on_cpu else JAX_SPARE),
        peak=_PROCESS + weights + stored.largest_file if on_cpu else 0,
        host=None if on_cpu else _DEVICE_PROCESS,
        devices=own.ranks,
        stored_as=stored_as(stored, ("widened" for tensor in stored.tensors if tensor.repacked is not None)),
    )


def step_bytes(described: Architecture, own: Cut, config: ResolvedConfig, adapters: Sequence[int] = ()) -> int:
    """A rank's temporary memory in the largest step, with the results of two. `adapters` are their tables' widths."""
    sizes = Sizes(
        page_size=config.page_size,
        num_pages=1,
        max_batch_tokens=config.max_batch_tokens,
        max_batch_seqs=config.max_batch_seqs,
    )
    return max(
        _step_bytes(described, own, config.page_size, shape, max(adapters, default=0))
        for shape in sizes.shapes(described.shape.max_seq_len)
    )


def _step_bytes(described: Architecture, own: Cut, page_size: int, step: StepShape, adapters: int) -> int:
    shape = described.shape
    span = PAGES_PER_TURN * page_size
    # Keys and values of a turn, gathered, and their scores; queries, outputs and sums of all tiles.
    turn = step.tiles * span * (2 * own.kv_heads * shape.head_dim + step.width * own.heads)
    turn += 3 * step.tiles * step.width * own.heads * shape.head_dim
    # Rows of the MLP, and of the residual stream before and after; what adapters make of them.
    rows = step.tokens * (2 * described.widest // own.ranks + 4 * shape.hidden_size + adapters)
    states, convolved = _state_numbers(described, own, step)
    rows += convolved
    logits = 0 if described.head is None else step.rows * own.vocab
    results = logits + step.tokens * shape.hidden_size
    return _FLOAT * (max(turn, rows, states, _DRAW_COPIES * logits) + 2 * results)


def _state_numbers(described: Architecture, own: Cut, step: StepShape) -> tuple[int, int]:
    """A recurrent layer's temporary numbers: those of states, and those of tokens that are convolved."""
    state = rank_state(described, own)
    if state is None:
        return 0, 0
    # Sequences with one token each are advanced at once; others one after the other.
    sequences = step.rows if step.width == 1 else 1
    matrices = 0 if state.matrices is None else _STATE_COPIES * sequences * prod(state.matrices)
    return matrices, _CONVOLVED_COPIES * step.tokens * state.inputs[1]


def _cpu_room(
    shape: ModelShape, config: ResolvedConfig, memory: Memory, weights: int, step: int, itemsize: int, state: int
) -> Room:
    return host_room(
        shape,
        page_size=config.page_size,
        itemsize=itemsize,
        kv_memory=config.kv_memory,
        max_batch_seqs=config.max_batch_seqs,
        limit=config.kv_memory_limit,
        # An explicit kv_memory is taken at face value: the plan reports whether it fits.
        free=max(0, memory.free - _PROCESS - weights) if config.kv_memory is None else sys.maxsize,
        max_tokens=config.max_running_tokens,
        coarse=True,
        state_bytes=state,
    )


def _device_room(
    shape: ModelShape, config: ResolvedConfig, memory: Memory, weights: int, step: int, itemsize: int, state: int
) -> Room:
    return device_room(
        shape,
        page_size=config.page_size,
        itemsize=itemsize,
        free=max(0, memory.free - weights) if config.kv_memory is None else sys.maxsize,
        total=memory.total,
        step=step,
        kv_memory=config.kv_memory,
        utilization=config.gpu_memory_utilization,
        limit=config.kv_memory_limit,
        max_tokens=config.max_running_tokens,
        slots=StateSlots.of(state, config.max_batch_seqs),
    )
