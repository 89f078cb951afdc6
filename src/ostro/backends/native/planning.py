"""Whether the native core can run a model, and the memory it takes: the lowering runs with a sink that only counts."""

import sys
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from ostro.backends.backend import OpenedModel
from ostro.backends.memory import Room, host_room, page_bytes
from ostro.backends.native.lowering import lowered
from ostro.backends.native.sinks import Sizes, kind_of
from ostro.backends.native.support import NotNative, check_native
from ostro.backends.plan import Parts, adapter_values, stored_as
from ostro.backends.precision import in_words
from ostro.config import Quantization, ResolvedConfig
from ostro.devices import Memory
from ostro.errors import ModelError
from ostro.kernels.cpu.library import (
    BITS,
    CELLS,
    GROUP,
    PAGE,
    Op,
    instruction_sets,
    panel_of,
)
from ostro.kernels.cpu.packed_layout import PackedLayout
from ostro.kernels.cpu.program_spec import ProgramSpec
from ostro.models.architecture import Architecture
from ostro.models.encoder import Encoder
from ostro.models.expert_layers import ExpertLayers
from ostro.system.topology import threads_here
from ostro.weights import Checkpoint
from ostro.weights.stored import Stored

_MIB = 1 << 20
# Measured, minus the model and a step's buffers: Python and numpy.
_PROCESS = 37 * _MIB

# Header size per matrix with its step, and per layer's attention.
_ENTRY_BYTES = 400
# Size of a quantized group of a row's inputs.
_GROUP_BYTES = GROUP + 12
# Rows and panels in each thread's own buffers.
_OWN_ROWS, _OWN_PANELS = 8, 4
# Rows of queries that each thread compares with all keys of an encoder's text at a time.
_SCORED_ROWS = 12


class Program(NamedTuple):
    """How the native core would run a model: its steps, and the weights that they take."""

    isa: str
    spec: ProgramSpec
    layout: PackedLayout

    @property
    def panel(self) -> int:
        return panel_of(self.isa)


def native_program(
    checkpoint: Checkpoint, described: Architecture | Encoder | ExpertLayers, quantize: Quantization
) -> Program:
    """The model's program for the best instruction set that can run it. Raises NotNative if none can."""
    reason = NotNative("this machine has no instruction set with kernels")
    for isa in instruction_sets():
        try:
            check_native(described, panel_of(isa))
            formats = {tensor.name: tensor.format for tensor in checkpoint.stored().tensors}
            if isinstance(described, Architecture):
                formats |= dict.fromkeys(described.row_scales, "F32")
            sizes = Sizes(panel_of(isa), partial(_kind, formats))
            return Program(isa, lowered(described, sizes, bits=BITS[quantize]), sizes.layout)
        except NotNative as error:
            reason = error
    raise reason


def _stored_as(stored: Stored) -> str | None:
    packings = (f"{tensor.repacked} ({tensor.format})" for tensor in stored.tensors if tensor.repacked is not None)
    return stored_as(stored, packings)


def decoder_parts(opened: OpenedModel, architecture: Architecture, memory: Memory) -> Parts:
    stored, config = opened.checkpoint.stored(), opened.resolved
    program = native_program(opened.checkpoint, architecture, config.quantize)
    shape, layout, cells = architecture.shape, program.layout, CELLS[config.kv_dtype]
    largest = max(matrix.nbytes for matrix in layout.matrices)
    rotated = sum(rope.rotary_dim(shape.head_dim) for rope in architecture.ropes)
    kept = layout.nbytes + (len(layout.matrices) + shape.num_layers) * _ENTRY_BYTES
    kept += 4 * adapter_values(config, stored.tensors)
    state = program.spec.state_bytes
    try:
        room = host_room(
            shape,
            page_size=PAGE,
            itemsize=cells.bytes,
            kv_memory=config.kv_memory,
            max_batch_seqs=config.max_batch_seqs,
            limit=config.kv_memory_limit,
            # An explicit kv_memory is taken at face value: the plan reports whether it fits.
            free=max(0, memory.free - _PROCESS - kept) if config.kv_memory is None else sys.maxsize,
            slot_bytes=cells.slot_bytes,
            max_tokens=config.max_running_tokens,
            state_bytes=state,
        )
    except ModelError:
        room = Room(0, 0)
    pages = room.pages
    page = page_bytes(shape, PAGE, cells.bytes, cells.slot_bytes)
    # A cosine and a sine per rotated pair of dimensions, for each position that the pages can hold.
    other = _PROCESS + _step_bytes(config, program) + 4 * rotated * min(shape.max_seq_len, pages * PAGE)
    return Parts(
        backend=f"native ({program.isa})",
        precision=in_words(program.spec.precision.split(", "), cells.name.lower()),
        parameters=sum(tensor.values for tensor in stored.tensors),
        weights=kept,
        idle=_idle_bytes(program.spec, layout),
        idle_parameters=architecture.idle_weights,
        page=page,
        pages=pages,
        state=state,
        states=room.states,
        other=other,
        # Packing maps all files and builds one matrix at a time.
        peak=max(_PROCESS + stored.file_bytes + largest, kept + pages * page + room.states * state + other),
        stored_as=_stored_as(stored),
    )


def encoder_parts(opened: OpenedModel, encoder: Encoder) -> Parts:
    """An encoder has no KV cache: its pages are just seats in the batch."""
    stored, config = opened.checkpoint.stored(), opened.resolved
    program = native_program(opened.checkpoint, encoder, config.quantize)
    shape, layout = encoder.shape, program.layout
    kept = layout.nbytes + (len(layout.matrices) + shape.num_layers) * _ENTRY_BYTES
    inner = max(layer.mlp.down.columns for layer in encoder.layers)
    row = 4 * sum(buffer.cols * buffer.per_token for buffer in program.spec.buffers if not buffer.asked)
    if config.quantize != "none":
        row += max(inner, shape.hidden_size) // GROUP * _GROUP_BYTES
    # A step's last text is computed whole, even beyond the step's tokens.
    rows = opened.kind.encoded_tokens(opened.config) + shape.max_seq_len
    # Each thread packs one head's keys and values, and has some rows of scores.
    own = 4 * shape.max_seq_len * (2 * shape.head_dim + _SCORED_ROWS)
    rotated = sum(rope.rotary_dim(shape.head_dim) for rope in encoder.ropes)
    threads = threads_here(config.threads).number
    other = _PROCESS + rows * row + threads * own + 4 * rotated * shape.max_seq_len
    largest = max(matrix.nbytes for matrix in layout.matrices)
    return Parts(
        backend=f"native ({program.isa})",
        precision=in_words(program.spec.precision.split(", "), None),
        parameters=sum(tensor.values for tensor in stored.tensors),
        weights=kept,
        page=0,
        pages=config.max_batch_seqs * -(-shape.max_seq_len // config.page_size),
        other=other,
        peak=max(_PROCESS + stored.file_bytes + largest, kept + other),
        stored_as=_stored_as(stored),
    )


def _idle_bytes(program: ProgramSpec, layout: PackedLayout) -> int:
    """Size of the experts' matrices that a token does not use."""
    steps = [step for step in program.steps if step.op in (Op.EXPAND, Op.EXPERT)]
    packed = [(step, layout.matrices[step.matrix].nbytes) for step in steps if step.matrix is not None]
    return sum(nbytes * (step.experts - step.chosen) // step.experts for step, nbytes in packed)


def _kind(formats: Mapping[str, str], name: str) -> int:
    """GGUF's number of a tensor's stored type. A pickle's names are unknown: all its tensors have one format."""
    found = formats.get(name) or next(iter(formats.values()))
    if (kind := kind_of(found)) is None:
        raise NotNative(f"its weights are of type {found}, for which there is no kernel")
    return kind


def _step_bytes(config: ResolvedConfig, program: Program) -> int:
    """A step's buffers, and the matmuls' inputs."""
    spec, matmuls = program.spec, [step for step in program.spec.steps if step.matrix is not None]
    longest = max(step.cols for step in matmuls)
    slots = max(step.cols * max(1, step.chosen) for step in matmuls)
    row = 4 * sum(buffer.cols * buffer.per_token for buffer in spec.buffers if not buffer.asked)
    if config.adapters:
        # Gates and ups are also stored before activation.
        row += 2 * 4 * max(buffer.cols for buffer in spec.buffers if not buffer.asked)
    read = 4 * longest + slots // GROUP * _GROUP_BYTES
    # Logits, and what drafts would do to states.
    asked = 4 * (sum(buffer.cols for buffer in spec.buffers if buffer.asked) + spec.draft_floats)
    own = (4 * _OWN_ROWS + _OWN_PANELS * program.panel) * longest
    rows = max(config.max_batch_tokens, config.max_batch_seqs)
    return rows * (row + read) + config.max_batch_seqs * asked + threads_here(config.threads).number * own
