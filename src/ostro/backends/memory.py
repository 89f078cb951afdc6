"""How many KV cache pages, and recurrent states beside them, fit into memory. Needs only a model's shape; allocates
nothing, and imports no torch.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ostro.errors import BadRequest, ModelError
from ostro.models.architecture import Heads, ModelShape
from ostro.system.machine import free_memory

# Share of the memory left after loading the weights; the rest is for activations and other processes.
_SHARE = 0.4
_MOST = 4 << 30
# Share of the free memory that a second copy of the weights may use.
_SECOND_LAYOUT_SHARE = 0.25
# Left free on a device that JAX runs on: its allocator's fragments, collectives' buffers.
JAX_SPARE = 256 << 20


class Shape(Protocol):
    """The sizes that memory depends on; from a loaded model or from its files."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def layer_heads(self) -> Sequence[Heads]: ...


def page_bytes(shape: Shape, page_size: int, itemsize: int, slot_bytes: int = 0) -> int:
    """`slot_bytes` is the overhead per head of a token's key or value, beyond its numbers."""
    heads = shape.layer_heads or [Heads(shape.num_kv_heads, shape.head_dim)] * shape.num_layers
    return 2 * page_size * sum(kv * (dim * itemsize + slot_bytes) for kv, dim in heads)


def second_layout_fits(nbytes: int, free: int) -> bool:
    """Whether a second copy of the weights may be kept, in the layout for multiplying many rows."""
    return nbytes < free * _SECOND_LAYOUT_SHARE


@dataclass(frozen=True, slots=True)
class StateSlots:
    """The slots for recurrent states that a model asks for."""

    nbytes: int = 0
    """Bytes of each; 0 for a model without states."""
    most: int = 0

    @classmethod
    def of(cls, nbytes: int, max_batch_seqs: int) -> "StateSlots":
        """One for each sequence that runs, and as many for snapshots."""
        return cls(nbytes, 2 * max_batch_seqs)


NO_STATES = StateSlots()


@dataclass(frozen=True, slots=True)
class Room:
    """What fits into the memory for cached tokens."""

    pages: int
    states: int

    @classmethod
    def within(cls, budget: int, page: int, slots: StateSlots) -> "Room":
        """Pages of `page` bytes, with states in half of the memory at most. There may be no room for either."""
        states = min(slots.most, budget // 2 // slots.nbytes) if slots.nbytes else 0
        return cls((budget - states * slots.nbytes) // page, states)

    def checked(self, budget: int, slots: StateSlots, *, least: int = 1) -> "Room":
        """Raises ModelError where there are too few states, or fewer pages than `least` because of them."""
        if slots.nbytes and (not self.states or self.pages < least):
            raise ModelError(
                f"A sequence's recurrent state takes {slots.nbytes} bytes, and {max(0, budget)} are left for states, "
                "keys and values, half of them for states; free some, or raise kv_memory."
            )
        return self


def host_room(
    shape: Shape,
    *,
    page_size: int,
    itemsize: int,
    kv_memory: int | None,
    max_batch_seqs: int,
    limit: int | None = None,
    free: int | None = None,
    slot_bytes: int = 0,
    max_tokens: int | None = None,
    coarse: bool = False,
    state_bytes: int = 0,
) -> Room:
    """Pages and states within `kv_memory` bytes, or within a share of the free memory; at most as many as can be used
    at once, and at most `max_tokens` tokens' worth.

    `limit` bounds the share, which is rounded with `coarse`. `free` is the memory left after loading the model; None
    measures it. `state_bytes` is the size of a sequence's recurrent state.
    """
    slots = StateSlots.of(state_bytes, max_batch_seqs)
    each = page_bytes(shape, page_size, itemsize, slot_bytes)
    most = pages_within(max_tokens, page_size)
    useful = min(most, max_batch_seqs * -(-shape.max_seq_len // page_size))
    free = free_memory() if free is None else free
    if kv_memory is not None:
        if kv_memory < each:
            raise BadRequest(
                f"kv_memory must hold at least one page ({each} bytes), got {kv_memory}.", param="kv_memory"
            )
        if kv_memory > free:
            raise BadRequest(f"kv_memory is {kv_memory} bytes, but only {free} are free; lower it.", param="kv_memory")
        room = Room.within(kv_memory, each, slots).checked(kv_memory, slots)
        return replace(room, pages=min(room.pages, most))
    budget = min(int(free * _SHARE), _MOST if limit is None else min(_MOST, limit))
    if budget < each:
        raise ModelError(
            f"One page takes {each} bytes and {budget} are free for keys and values; free some, or lower page_size."
        )
    room = Room.within(budget, each, slots).checked(budget, slots)
    return replace(room, pages=min(rounded(room.pages) if coarse else room.pages, useful))


def rounded(pages: int) -> int:
    """The number of pages, rounded down by at most 3 %, so that the next start likely gets the same number though
    the free memory differs a little. Programs compiled for a number of pages serve only that number.
    """
    step = 1 << max(0, pages.bit_length() - 6)
    return pages // step * step


def rank_shape(shape: ModelShape, kv_heads: int, head_dim: int | None = None) -> ModelShape:
    """The shape with this many KV heads, of this width if given, to size keys and values."""
    own = Heads(kv_heads, head_dim or shape.head_dim)
    layers = tuple(own if each.kv else each for each in shape.layer_heads)
    return replace(shape, num_kv_heads=own.kv, head_dim=own.dim, layer_heads=layers)


def gpu_room(
    shape: Shape,
    *,
    page_size: int,
    itemsize: int,
    kv_memory: int | None,
    utilization: float,
    max_batch_tokens: int,
    max_batch_seqs: int,
    limit: int | None = None,
    max_tokens: int | None = None,
    expert_bytes: int = 0,
    widened_bytes: int = 0,
    attention_bytes: int = 0,
    state_bytes: int = 0,
) -> Room:
    """Pages and states within `kv_memory` bytes, or within the GPU memory left by the loaded model and one step; at
    most `limit` bytes and `max_tokens` tokens. For `expert_bytes`, `widened_bytes` and `attention_bytes` see
    `gpu_step_bytes`; `state_bytes` is the size of a sequence's recurrent state.
    """
    import torch

    free, total = torch.cuda.mem_get_info()
    step = gpu_step_bytes(
        shape,
        itemsize=itemsize,
        max_batch_tokens=max_batch_tokens,
        max_batch_seqs=max_batch_seqs,
        expert_bytes=expert_bytes,
        widened_bytes=widened_bytes,
        attention_bytes=attention_bytes,
    )
    return room_beside(
        page_bytes(shape, page_size, itemsize),
        free=free,
        total=total,
        step=step,
        kv_memory=kv_memory,
        utilization=utilization,
        limit=limit,
        most=pages_within(max_tokens, page_size),
        slots=StateSlots.of(state_bytes, max_batch_seqs),
    )


def device_room(
    shape: Shape,
    *,
    page_size: int,
    itemsize: int,
    free: int,
    total: int,
    step: int,
    kv_memory: int | None,
    utilization: float,
    limit: int | None = None,
    max_tokens: int | None = None,
    slots: StateSlots = NO_STATES,
) -> Room:
    """Pages and states for JAX on each device that has memory of its own, if one step needs `step` bytes: see
    `room_beside`.
    """
    room = room_beside(
        page_bytes(shape, page_size, itemsize),
        free=free,
        total=total,
        step=step + JAX_SPARE,
        kv_memory=kv_memory,
        utilization=utilization,
        limit=limit,
        most=pages_within(max_tokens, page_size),
        slots=slots,
    )
    return room if kv_memory is not None else Room(rounded(room.pages), rounded(room.states))


def pages_within(max_tokens: int | None, page_size: int) -> int:
    """Whole pages for this many tokens; None means no bound."""
    if max_tokens is None:
        return sys.maxsize
    if max_tokens < page_size:
        raise BadRequest(
            f"max_running_tokens must hold at least one page of {page_size} tokens, got {max_tokens}. Raise it, or "
            "lower page_size.",
            param="max_running_tokens",
        )
    return max_tokens // page_size


def gpu_step_bytes(
    shape: Shape,
    *,
    itemsize: int,
    max_batch_tokens: int,
    max_batch_seqs: int,
    expert_bytes: int = 0,
    widened_bytes: int = 0,
    attention_bytes: int = 0,
) -> int:
    """`expert_bytes` is the memory of a token's rows in a mixture of experts, `widened_bytes` that of the largest
    packed matrix once widened for prompts, and `attention_bytes` that of attention without kernels.
    """
    # Activations are a few times the widest row per token. Add the logits, in float32 and in the model's dtype, with
    # sampling's temporaries, and a margin for kernels, graphs and libraries.
    widest = max(shape.hidden_size * 16, shape.num_heads * shape.head_dim * 8)
    activations = max_batch_tokens * (widest * itemsize + expert_bytes)
    return activations + widened_bytes + attention_bytes + max_batch_seqs * shape.vocab_size * 8 + (1 << 30)


def room_beside(
    each: int,
    *,
    free: int,
    total: int,
    step: int,
    kv_memory: int | None,
    utilization: float,
    limit: int | None = None,
    most: int = sys.maxsize,
    slots: StateSlots = NO_STATES,
) -> Room:
    """Pages of `each` bytes, at most `most`, and states, on a GPU of `total` bytes with `free` left, if one step needs
    `step` bytes.
    """
    budget = int(total * utilization) - (total - free) - step
    if limit is not None:
        budget = min(budget, limit)
    if kv_memory is not None:
        if kv_memory > free - step:
            raise BadRequest(
                f"kv_memory is {kv_memory} bytes, but only {max(0, free - step)} are left for it; lower it.",
                param="kv_memory",
            )
        budget = kv_memory
    # The runner reserves one page for padding rows.
    if budget < 2 * each:
        raise ModelError(
            f"Two pages take {2 * each} bytes and {max(0, budget)} are left of the GPU's memory for keys and values; "
            "raise gpu_memory_utilization, lower max_batch_tokens, or take a smaller model."
        )
    room = Room.within(budget, each, slots).checked(budget, slots, least=2)
    return replace(room, pages=min(room.pages - 1, most))
