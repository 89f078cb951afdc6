"""The memory that a model takes with torch, on a CPU or a GPU: mirrors `backends.torch.load`. Imports no torch."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ostro.backends.backend import OpenedModel
from ostro.backends.memory import (
    Room,
    StateSlots,
    gpu_step_bytes,
    host_room,
    page_bytes,
    pages_within,
    room_beside,
    second_layout_fits,
)
from ostro.backends.plan import Parts, adapter_values, stored_as
from ostro.backends.precision import in_words
from ostro.backends.torch.plain_attention import (
    plain_attention_bytes,
    recurrent_bytes,
    recurrent_rows_bytes,
    why_plain_attention,
)
from ostro.config import ResolvedConfig
from ostro.devices import Memory
from ostro.errors import ModelError
from ostro.models.architecture import ModelShape, State, ring_states, state_bytes
from ostro.models.cut import Cut, cut, divisible, rank_shapes
from ostro.models.description import Causal
from ostro.models.encoder import Encoder
from ostro.weights.forms import Form
from ostro.weights.stored import Stored, TensorHeader

_MIB = 1 << 20
# Measured, minus the model: Python with torch loaded; with BLAS's buffers after computing tokens; oneDNN's extra once
# it has packed weights. Other builds of torch may differ by a few dozen megabytes.
_LOADED, _PROCESS, _ONEDNN = 230 * _MIB, 260 * _MIB, 25 * _MIB
# The part of each of these that ranks share: the libraries' files.
_SHARED = 95 * _MIB
# Left over from dequantizing GGUF blocks, in the allocators' per-thread pools, and from the vocabulary: from nothing to
# 96 MiB, depending on the machine.
_UNPACKING = 48 * _MIB
# With a GPU: GPU memory taken by the driver, and host memory taken by each rank's process.
_GPU_CONTEXT = 600 * _MIB
_GPU_PROCESS = 3072 * _MIB
# Rows of a layer's widest intermediate per token that are alive at a time: gate, up, their product, and the stream.
_ROWS_ALIVE = 4
# Tensors dequantized ahead of the one being copied.
_UNPACKED_AHEAD = 5
# In 4 bits, this many weights share a two-byte scale and a two-byte minimum; in 8 bits, a row has a four-byte scale.
_GROUP, _SCALE = 32, 4

_NO_ROOM = Room(0, 0)

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Kept:
    """The weights of a quantised checkpoint that a GPU keeps in their stored form."""

    forms: Mapping[str, Form] = field(default_factory=dict)
    """Forms by tensor name, with and without the backbone's prefix."""
    largest_packed: int = 0
    """Number of weights in the largest packed projection, which is widened as a whole for prompts."""


def host_parts(opened: OpenedModel, described: Causal, memory: Memory) -> Parts:
    """On a CPU, or on a Mac's GPU, which shares the host's memory. All ranks share it, too."""
    stored, config, dtype = opened.checkpoint.stored(), opened.resolved, opened.compute_dtype
    itemsize, ranks = _ITEMSIZE[dtype], config.tensor_parallel
    own, shape, states = _rank(stored, described, ranks)
    weights = _count(own, config, itemsize, ranks, one_layout=described.single_layout, exact=described.exact_names)
    # Each rank unpacks whole tensors, of which it then keeps its part.
    unpacked = ranks * _unpacked_bytes(stored)
    shared = (ranks - 1) * _SHARED
    process = ranks * _PROCESS - shared
    leftover = ranks * _UNPACKING if unpacked else 0
    logits = 2 * config.max_batch_seqs * shape.vocab_size
    step = ranks * (config.max_batch_tokens * _ROWS_ALIVE * described.widest + logits) * itemsize
    divided = cut(described, ranks) if ranks > 1 else None
    step += ranks * recurrent_bytes(described, config.max_batch_tokens, config.max_batch_seqs, divided)
    free = max(0, memory.free - process - leftover - weights.kept)
    # Each rank's page has its own KV heads.
    heads = tuple(each._replace(kv=ranks * each.kv) for each in shape.layer_heads)
    shape = replace(shape, num_kv_heads=ranks * shape.num_kv_heads, layer_heads=heads)
    # On a CPU, matrices get a second layout if there is memory for it.
    second = weights.kept_plain if opened.kind.name == "cpu" and second_layout_fits(weights.kept_plain, free) else 0
    state = ranks * state_bytes(states, itemsize)
    try:
        room = host_room(
            shape,
            page_size=config.page_size,
            itemsize=itemsize,
            kv_memory=config.kv_memory,
            max_batch_seqs=config.max_batch_seqs,
            limit=config.kv_memory_limit,
            # An explicit kv_memory is taken at face value: the plan reports whether it fits.
            free=free if config.kv_memory is None else sys.maxsize,
            max_tokens=config.max_running_tokens,
            state_bytes=state,
        )
    except ModelError:
        room = _NO_ROOM
    return Parts(
        backend=_backend(config.device, ranks),
        devices=ranks,
        precision=in_words(_formats(stored.tensors, config.quantize, dtype), dtype),
        parameters=sum(tensor.values for tensor in stored.tensors),
        weights=weights.kept,
        idle=described.idle_weights * itemsize,
        idle_parameters=described.idle_weights,
        second=second,
        page=page_bytes(shape, config.page_size, itemsize),
        pages=room.pages,
        state=state,
        states=room.states,
        other=process + leftover + (ranks * _ONEDNN if second else 0) + step,
        peak=ranks * _LOADED - shared + leftover + weights.kept + stored.largest_file + unpacked + weights.staged,
        stored_as=_stored_as(stored),
    )


def gpu_parts(
    opened: OpenedModel,
    described: Causal,
    memory: Memory,
    kept: Kept | None = None,
    elsewhere: frozenset[str] = frozenset(),
) -> Parts:
    """On NVIDIA GPUs; sizes are those of one. Tensors that are `kept` are not widened, and those `elsewhere` are not
    there.
    """
    stored, config, kept = opened.checkpoint.stored(), opened.resolved, kept or Kept()
    stored = replace(stored, tensors=[tensor for tensor in stored.tensors if tensor.name not in elsewhere])
    own, shape, states = _rank(stored, described, config.tensor_parallel)
    dtype = opened.compute_dtype
    itemsize = _ITEMSIZE[dtype]
    cells = "fp8" if config.kv_dtype == "fp8" else dtype
    kv_itemsize = 1 if config.kv_dtype == "fp8" else itemsize
    weights = _count(own, config, itemsize, kept=kept)
    step = gpu_step_bytes(
        shape,
        itemsize=kv_itemsize,
        max_batch_tokens=config.max_batch_tokens,
        max_batch_seqs=config.max_batch_seqs,
        expert_bytes=itemsize * described.expert_width,
        widened_bytes=itemsize * kept.largest_packed,
        attention_bytes=max(
            plain_attention_bytes(described, itemsize, config.max_batch_tokens, config.max_batch_seqs),
            recurrent_rows_bytes(described, dtype, config.max_batch_tokens),
        ),
    )
    if why_plain_attention(described) is None:
        # Kernels keep inputs of convolutions in rings.
        states = ring_states(states)
    page, state = page_bytes(shape, config.page_size, kv_itemsize), state_bytes(states, itemsize)
    try:
        room = room_beside(
            page,
            free=sys.maxsize if config.kv_memory is not None else max(0, memory.free - _GPU_CONTEXT - weights.kept),
            total=memory.total,
            step=step,
            kv_memory=config.kv_memory,
            utilization=config.gpu_memory_utilization,
            limit=config.kv_memory_limit,
            most=pages_within(config.max_running_tokens, config.page_size),
            slots=StateSlots.of(state, config.max_batch_seqs),
        )
    except ModelError:
        room = _NO_ROOM
    return Parts(
        backend=_backend("cuda", config.tensor_parallel),
        devices=config.tensor_parallel,
        precision=in_words(_formats(stored.tensors, config.quantize, dtype, kept), cells),
        parameters=sum(tensor.values for tensor in stored.tensors),
        weights=weights.kept,
        idle=described.idle_weights * itemsize,
        idle_parameters=described.idle_weights,
        page=page,
        pages=room.pages,
        # One page takes the writes of padding rows.
        spare=1 if room.pages else 0,
        state=state,
        states=room.states,
        other=_GPU_CONTEXT + step,
        peak=0,
        host=gpu_host_bytes(config),
        stored_as=_stored_as(stored, kept),
    )


def gpu_host_bytes(config: ResolvedConfig) -> int:
    """Memory of this machine that a model on NVIDIA GPUs takes."""
    return config.tensor_parallel * _GPU_PROCESS + (config.kv_host_memory or 0)


def encoder_parts(opened: OpenedModel, described: Encoder, memory: Memory) -> Parts:
    """On any device. Without a KV cache, pages are just seats in the batch."""
    stored, config, kind, dtype = opened.checkpoint.stored(), opened.resolved, opened.kind, opened.compute_dtype
    itemsize, shape = _ITEMSIZE[dtype], described.shape
    kept = sum(tensor.values for tensor in stored.tensors) * itemsize
    step = kind.encoded_tokens(opened.config) * _ROWS_ALIVE * described.widest * itemsize
    linear = sum(layer.num_weights for layer in described.layers) * itemsize
    free = max(0, memory.free - _PROCESS - kept)
    second = linear if kind.name == "cpu" and second_layout_fits(linear, free) else 0
    on_host = not kind.has_own_memory
    process = _PROCESS + (_ONEDNN if second else 0) if on_host else _GPU_CONTEXT
    return Parts(
        backend=_backend(kind.name, 1),
        precision=in_words(_formats(stored.tensors, "none", dtype), None),
        parameters=sum(tensor.values for tensor in stored.tensors),
        weights=kept,
        second=second,
        page=0,
        pages=config.max_batch_seqs * -(-shape.max_seq_len // config.page_size),
        other=process + step,
        peak=_LOADED + kept + stored.largest_file if on_host else 0,
        host=None if on_host else _GPU_PROCESS,
        stored_as=_stored_as(stored),
    )


def _backend(device: str, ranks: int) -> str:
    return f"torch ({device}" + (f", {ranks} devices)" if ranks > 1 else ")")


def _rank(stored: Stored, described: Causal, ranks: int) -> tuple[Stored, ModelShape, Sequence[State | None]]:
    """The tensors that one of `ranks` ranks keeps, its shape, and what its layers keep of a sequence."""
    if ranks == 1:
        return stored, described.shape, described.states
    own, whole = cut(described, ranks), divisible(described)
    shapes = rank_shapes(whole, own)
    tensors = [_kept(tensor, shapes, described.backbone, own) for tensor in stored.tensors]
    return replace(stored, tensors=tensors), own.shape(described.shape), own.states(whole)


def _kept(tensor: TensorHeader, shapes: Mapping[str, tuple[int, ...]], backbone: str, own: Cut) -> TensorHeader:
    shape = shapes.get(tensor.name) or shapes.get(f"{backbone}.{tensor.name}")
    if shape is None:
        # A pickle's header tells only the size.
        shape = (-(-tensor.shape[0] // own.ranks), *tensor.shape[1:])
    return replace(tensor, shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    kept: int
    kept_plain: int
    """Size of matrices that are not quantized, and so of a second layout."""
    staged: int
    """Peak size of weights waiting to be quantized."""


def _count(
    stored: Stored,
    config: ResolvedConfig,
    itemsize: int,
    copies: int = 1,
    one_layout: frozenset[str] = frozenset(),
    exact: frozenset[str] = frozenset(),
    kept: Kept | None = None,
) -> _Weights:
    """For `copies` equal ranks in the same memory. Tensors in `one_layout` get no second layout, those in `exact` are
    not quantized, and those in `kept` are not widened.
    """
    quantize, few_bits, tensors = config.quantize, config.quantize in ("int8", "int4"), stored.tensors
    adapters = adapter_values(config, tensors)
    plain = [tensor.values * itemsize for tensor in tensors]
    # One matrix at a time; with adapters the whole model, because they inspect it first.
    staged = 0 if not few_bits else sum(plain) if config.adapters else max(plain, default=0)
    bits = ("none" if tensor.name in exact else quantize for tensor in tensors)
    sizes = (_kept_bytes(tensor, own, itemsize, kept) for tensor, own in zip(tensors, bits, strict=True))
    return _Weights(
        kept=copies * (sum(sizes) + adapters * itemsize),
        kept_plain=copies * itemsize * sum(t.values for t in tensors if len(t.shape) == 2 and t.name not in one_layout)
        if quantize == "none"
        else 0,
        staged=staged,
    )


def _unpacked_bytes(stored: Stored) -> int:
    """Peak size of dequantized blocks waiting to be copied."""
    blocks = sorted((each.values * 4 for each in stored.tensors if each.format not in _FLOATS), reverse=True)
    return sum(blocks[:_UNPACKED_AHEAD])


def _kept_bytes(tensor: TensorHeader, quantize: str, itemsize: int, kept: "Kept | None" = None) -> int:
    if kept is not None and (form := kept.forms.get(tensor.name)) is not None:
        rows, columns = tensor.shape
        return form.nbytes(rows, columns)
    match _kept_in(tensor, quantize):
        case "int4":
            return tensor.values // 2 + tensor.values // _GROUP * _SCALE
        case "int8" | "fp8":
            return tensor.values + tensor.shape[0] * _SCALE
        case _:
            return tensor.values * itemsize


def _kept_in(tensor: TensorHeader, quantize: str) -> str | None:
    """The quantized format of a tensor; None if it stays unquantized."""
    if quantize == "none" or len(tensor.shape) != 2 or (quantize == "fp8" and not tensor.in_layer):
        return None
    if quantize == "int4" and not (tensor.in_layer and tensor.shape[-1] % _GROUP == 0):
        return "int8"
    return quantize


def _formats(tensors: Sequence[TensorHeader], quantize: str, dtype: str, kept: Kept | None = None) -> list[str]:
    """The formats of matrices in memory, the most common first."""
    counts: Counter[str] = Counter()
    for tensor in tensors:
        if len(tensor.shape) > 1:
            form = None if kept is None else kept.forms.get(tensor.name)
            name = _kept_in(tensor, quantize) or dtype if form is None else form.format_name
            counts[name] += tensor.values
    return [name for name, _ in counts.most_common()]


def _stored_as(stored: Stored, kept: Kept | None = None) -> str | None:
    forms = {} if kept is None else kept.forms
    quantized = (tensor for tensor in stored.tensors if tensor.repacked is not None)
    return stored_as(stored, (_packing(forms.get(tensor.name)) for tensor in quantized))


def _packing(form: Form | None) -> str:
    if form is None:
        return "widened"
    groups = "" if form.kind == "float" else f" in groups of {form.group}"
    return f"kept as {form.format_name}{groups}"
