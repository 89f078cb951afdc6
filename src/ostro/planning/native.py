"""Whether the native core runs a model, and what that takes: follows `runner.native`, without torch.

Asks the library itself how large a matrix is once it is packed, and for which panels this machine packs.
"""

import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass
from itertools import groupby

from ostro.config import EngineConfig
from ostro.errors import ModelError
from ostro.kernels.cpu.library import (
    BITS,
    CELLS,
    GROUP,
    PAGE,
    CMatrix,
    instruction_sets,
    library,
    panel_of,
    why_missing,
)
from ostro.models.architecture import Architecture, Description, ModelShape
from ostro.planning.outcome import Parts
from ostro.planning.tensors import Stored, Tensor
from ostro.runner.memory import num_pages, page_bytes
from ostro.runner.native.support import NotNative, native_architecture
from ostro.runner.precision import in_words
from ostro.weights import Checkpoint, GgufCheckpoint
from ostro.weights.gguf_header import GGML_TYPES
from ostro.weights.gguf_model import Undo

_MIB = 1 << 20
# Measured, less the model and a step's buffers: Python and numpy; and torch, which packs, and makes log-probabilities.
_PROCESS, _TORCH = 37 * _MIB, 205 * _MIB

_TYPES = {each.name: number for number, each in GGML_TYPES.items()}
_FLOATS = ("F32", "F16", "BF16")
_ALIGN = 64
# Of the header: a matrix with the step that reads it, and a layer's attention.
_ENTRY_BYTES = 400
# Of a row's group of inputs once it is quantised.
_GROUP_BYTES = GROUP + 12
# Rows and panels that each thread has for itself.
_OWN_ROWS, _OWN_PANELS = 8, 4


@dataclass(frozen=True, slots=True)
class _Matrix:
    """As it is packed: rows of one format, filled up to whole panels."""

    format: str
    rows: int
    cols: int
    bits: int

    @property
    def is_quantized(self) -> bool:
        return self.format in _FLOATS and self.bits > 0 and self.cols % GROUP == 0

    @property
    def kept_in(self) -> str:
        return f"int{self.bits}" if self.is_quantized else self.format


def on_native(
    checkpoint: Checkpoint, stored: Stored, config: EngineConfig, described: Description, memory: int
) -> Parts | str:
    """The plan's parts, or why the model does not run natively."""
    if (missing := why_missing()) is not None:
        return missing.rstrip(".")
    if config.adapters:
        return "adapters have no native kernels"
    if config.page_size not in (None, PAGE):
        return f"page_size is {config.page_size}, and native kernels take {PAGE}"
    reason = ""
    for isa in instruction_sets():
        try:
            architecture = native_architecture(described, panel_of(isa))
            _check_stored(checkpoint)
            matrices = list(_matrices(stored.tensors, config, panel_of(isa)))
            return _parts(isa, matrices, architecture, stored, config, memory)
        except NotNative as error:
            reason = str(error)
    return reason


def _parts(
    isa: str,
    matrices: Sequence[_Matrix],
    architecture: Architecture,
    stored: Stored,
    config: EngineConfig,
    memory: int,
) -> Parts:
    assert config.max_batch_seqs is not None
    shape = architecture.shape
    panel, cells = panel_of(isa), CELLS[config.kv_dtype]
    sizes = [_packed_bytes(each, panel) for each in matrices]
    rotated = sum(rope.rotary_dim(shape.head_dim) for rope in architecture.ropes)
    vectors = sum(_vector_bytes(each, shape) for each in stored.tensors if len(each.shape) < 2)
    kept = sum(sizes) + vectors + (len(matrices) + shape.num_layers) * _ENTRY_BYTES
    try:
        pages = num_pages(
            shape,
            page_size=PAGE,
            itemsize=cells.bytes,
            kv_memory=config.kv_memory,
            max_batch_seqs=config.max_batch_seqs,
            limit=config.kv_memory_limit,
            # What was asked for counts as it is: whether it fits is for the plan to say.
            free=max(0, memory - _PROCESS - kept) if config.kv_memory is None else sys.maxsize,
            slot_bytes=cells.slot_bytes,
            max_tokens=config.max_running_tokens,
        )
    except ModelError:
        pages = 0
    counts: Counter[str] = Counter()
    for each in matrices:
        counts[each.kept_in] += each.rows * each.cols
    page = page_bytes(shape, PAGE, cells.bytes, cells.slot_bytes)
    # Of each rotated pair of dimensions a cosine and a sine, at each position that the pages can hold.
    other = _PROCESS + _step_bytes(config, architecture, panel) + 4 * rotated * min(shape.max_seq_len, pages * PAGE)
    return Parts(
        backend=f"native ({isa})",
        precision=in_words((name for name, _ in counts.most_common()), cells.name.lower()),
        parameters=sum(tensor.values for tensor in stored.tensors),
        weights=kept,
        page=page,
        pages=pages,
        other=other,
        # Packing reads all files, a matrix at a time; torch stays where it was needed once.
        peak=_TORCH + max(_PROCESS + stored.file_bytes + max(sizes, default=0), kept + pages * page + other),
    )


def _check_stored(checkpoint: Checkpoint) -> None:
    if isinstance(checkpoint, GgufCheckpoint):
        for weight in checkpoint.weights:
            if len(weight.info.shape) == 2 and weight.undo not in (Undo.NOTHING, Undo.ROTATE_HALVES):
                raise NotNative(f"{weight.name} is stored in a form that cannot be packed")


def _matrices(tensors: Sequence[Tensor], config: EngineConfig, panel: int) -> Iterator[_Matrix]:
    """What is packed as one: queries, keys and values as far as their formats agree, and gates with ups."""
    bits = BITS[config.quantize]
    layers: Mapping[str, dict[str, Tensor]] = defaultdict(dict)
    for tensor in tensors:
        if len(tensor.shape) != 2:
            continue
        if tensor.in_layer:
            parent, _, part = tensor.name.removesuffix(".weight").rpartition(".")
            layers[parent][part] = tensor
        else:
            # Embedding and head keep eight bits where layers have four.
            yield _Matrix(tensor.format, _padded(tensor.shape[0], panel), tensor.shape[1], 8 if bits else 0)
    for parts in layers.values():
        read_alike = [parts.pop(name) for name in ("q_proj", "k_proj", "v_proj") if name in parts]
        if (fused := parts.pop("qkv_proj", None)) is not None:
            read_alike.append(fused)
        for format, group in groupby(read_alike, key=lambda each: each.format):
            some = list(group)
            if (rows := sum(each.shape[0] for each in some)) % panel:
                raise NotNative(f"its projections have {rows} rows, not a multiple of {panel}")
            yield _Matrix(format, rows, some[0].shape[1], bits)
        inner = [parts.pop(name) for name in ("gate_proj", "up_proj") if name in parts]
        if len({each.format for each in inner}) > 1:
            raise NotNative("its gates and ups are kept in different types")
        if inner:
            yield _Matrix(inner[0].format, sum(_padded(t.shape[0], panel) for t in inner), inner[0].shape[1], bits)
        for name, each in parts.items():
            halves = 2 if name == "gate_up_proj" else 1
            yield _Matrix(each.format, halves * _padded(each.shape[0] // halves, panel), each.shape[1], bits)


def _packed_bytes(matrix: _Matrix, panel: int) -> int:
    number, described = _TYPES.get(matrix.format), CMatrix(rows=_padded(matrix.rows, panel), cols=matrix.cols)
    found = -1 if number is None else library().ostro_format(number, matrix.bits, byref(described))
    if found < 0:
        raise NotNative(f"its weights are of type {matrix.format}, for which there is no kernel")
    return _reserved(int(found))


def _vector_bytes(tensor: Tensor, shape: ModelShape) -> int:
    """Head norms are kept for each head."""
    heads = {"q_norm": shape.num_heads, "k_norm": shape.num_kv_heads}.get(
        tensor.name.removesuffix(".weight").rpartition(".")[2], 1
    )
    return _reserved(4 * tensor.values * heads)


def _step_bytes(config: EngineConfig, architecture: Architecture, panel: int) -> int:
    """Buffers of a step: rows of all widths that a layer has, logits, and what products read."""
    assert config.max_batch_tokens is not None
    assert config.max_batch_seqs is not None
    shape, widest = architecture.shape, architecture.widest
    attended = shape.num_heads * shape.head_dim
    qkv = attended + 2 * shape.num_kv_heads * shape.head_dim
    longest = max(widest, shape.hidden_size)
    row = 4 * (2 * shape.hidden_size + qkv + attended + widest)
    read = 4 * longest + longest // GROUP * _GROUP_BYTES
    asked = 4 * (shape.hidden_size + shape.vocab_size)
    own = (4 * _OWN_ROWS + _OWN_PANELS * panel) * longest
    rows = max(config.max_batch_tokens, config.max_batch_seqs)
    return rows * (row + read) + config.max_batch_seqs * asked + (config.threads or os.cpu_count() or 1) * own


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _reserved(nbytes: int) -> int:
    return _padded(nbytes, _ALIGN) + _ALIGN
