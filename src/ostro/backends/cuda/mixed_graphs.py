"""Steps with prompts as CUDA graphs, for a ladder of numbers of tokens. Knows no sequences and no sampling.

A step with prompts launches about nine kernels a layer. If it has few tokens, that takes the host longer than the
device takes to run them, and every sequence that is decoding waits for it. As a graph such a step is padded:

    tokens   [ a ][ b ][ c c c c c ][ - - - ]      as many as the ladder has
    lengths   9    4    0 …                        0 for all that are not single, up to `Padding.singles`
    tiles    (c c c c)(c)( )( )( )                 as many as there may be; the others have no tokens

Its inputs are copied to fixed memory, and what it computes is left in fixed memory: hidden states, to be sampled from
as those of any other step. Nothing is stored for tokens that pad it.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ostro.backends.cuda.attention import AttentionWorkspace, StepAttention
from ostro.backends.cuda.graphs import StepGraphs
from ostro.backends.cuda.states import GpuStates
from ostro.backends.cuda.step_plan import Mixed, Padding
from ostro.kernels.gpu.state_rows import CHUNK_FIELDS, PIECE_FIELDS, PIECE_ROWS, ChunkTables
from ostro.kernels.gpu.state_rows import SLOT as STATE_SLOT
from ostro.kernels.gpu.step_inputs import CAPTURED, FIELDS, SLOT, STATE, StepInputs, unpack
from ostro.torch_models.base import Model
from ostro.torch_models.experts import CpuExperts, Experts
from ostro.torch_models.layers import Linear

# Close together where padding costs time, far apart where it costs none.
_TOKENS = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 2048)
# The most single tokens, and the most longer chunks, in a graph: programs without work cost a little.
_SINGLES = (16, 64, 256, 1024)
_CHUNKS = (8, 64, 512)
# Sizes of a step's inputs, padded to the most tokens.
_INPUTS = FIELDS * _TOKENS[-1]
# Pieces of chunks that advance states, beyond those of whole blocks: in finer steps, for what pads takes memory, and
# with much of it chunks do not advance by blocks.
_SPARE_PIECES = (8, 16, 32, 64, 128, 256, 512)
_PIECES = _TOKENS[-1] // PIECE_ROWS + _SPARE_PIECES[-1]
# Multiply-adds that an H200 does while the host launches a layer's kernels: 500 µs at 700 TFLOP/s (hosts were seen to
# take 140 to 900 µs). A step with more work than this in each layer hides its launches, and padding it would only cost.
_HIDDEN_WORK = 500e-6 * 700e12 / 2


def max_graph_tokens(model: Model) -> int:
    """The largest step, in tokens, that gains from being a graph."""
    shape = model.shape
    matrices = [each.shape for each in model.modules() if isinstance(each, Linear)]
    weights = sum(prod(each) for each in matrices if shape.vocab_size not in each)
    weights += sum(each.num_active for each in model.modules() if isinstance(each, Experts | CpuExperts))
    most = _HIDDEN_WORK * shape.num_layers / max(1, weights)
    return max((tokens for tokens in _TOKENS if tokens <= most), default=0)


class MixedGraphs:
    def __init__(
        self,
        model: Model,
        forward: Callable[[StepInputs, StepAttention], Tensor],
        attention: AttentionWorkspace,
        states: GpuStates | None = None,
        *,
        tokens: Tensor,
        max_batch_seqs: int,
        captures: bool,
    ) -> None:
        """`tokens` holds what the latest step drew. Without `captures`, padded steps run directly."""
        self.most = 0
        """The most tokens of a step that is a graph; 0 if none is. Used on the rank that plans."""
        self._forward, self._attention, self._states, self._tokens = forward, attention, states, tokens
        self._width, self._dtype = model.shape.hidden_size, next(model.parameters()).dtype
        self._max_batch_seqs = max_batch_seqs
        self._met: set[Padding] = set()
        self._memory: _Memory | None = None
        self.graphs: StepGraphs[Padding] = StepGraphs(
            self._step, idle=self._idle, most=_TOKENS[-1], captured=_TOKENS[-1] if captures else 0, sizes=_TOKENS
        )

    def padding_for(self, tokens: int, singles: int, tiles: int, pieces: int = 0) -> Padding | None:
        """The graph for a step of this size, if there is one. Capturing delays a step, so it happens only once a second
        step of the size comes. `pieces` are those of chunks that advance states.
        """
        if tokens > self.most or singles > _SINGLES[-1] or tiles > _CHUNKS[-1] or pieces > _SPARE_PIECES[-1]:
            return None
        size = self.graphs.size_for(tokens)
        full, full_pieces = size // self._attention.tokens_in_tile, size // PIECE_ROWS
        padding = Padding(
            size,
            min(_at_least(singles, _SINGLES), size, self._max_batch_seqs) if singles else 0,
            full + _at_least(tiles - full, _CHUNKS),
            0 if self._states is None else full_pieces + _at_least(pieces - full_pieces, _SPARE_PIECES),
        )
        if padding in self._met:
            return padding
        self._met.add(padding)
        return None

    def run(self, step: Mixed, padding: Padding) -> Tensor:
        """The hidden states of the step's tokens; valid until the next such step."""
        # Before the inputs are set: what is captured for the first time overwrites them.
        run = self.graphs.get(padding.tokens, padding)
        number = step.inputs.shape[1]
        memory = self._fixed()
        packed = np.zeros(memory.packed.shape, dtype=np.int32)
        inputs, tiles, chunks, pieces = _parts(packed, len(memory.tiles))
        inputs[[SLOT, STATE, CAPTURED]] = -1
        inputs[:, :number] = step.inputs
        if step.tiles is not None:
            tiles[: len(step.tiles)] = step.tiles
        if step.states is not None:
            chunks[:, STATE_SLOT] = -1
            chunks[: len(step.states.chunks)] = step.states.chunks
            pieces[: len(step.states.pieces)] = step.states.pieces
        host = torch.from_numpy(packed)
        memory.packed.copy_(host.pin_memory() if memory.packed.is_cuda else host, non_blocking=True)
        run()
        return memory.hidden[:number]

    @torch.inference_mode()
    def _step(self, size: int, padding: Padding) -> None:
        """The step captured in a graph."""
        memory = self._fixed()
        sent = memory.inputs[:, :size]
        inputs = unpack(sent, self._tokens)
        ctx = self._attention.of_padded_tiles(padding.singles, memory.tiles[: padding.tiles], sent, inputs.slots)
        if self._states is not None:
            tables = ChunkTables(memory.chunks[: padding.tiles], memory.pieces[: padding.pieces])
            ctx.states = self._states.of_step(inputs, sent[:, : padding.singles], tables, padded=True)
        memory.hidden[:size].copy_(self._forward(inputs, ctx))

    def _idle(self) -> None:
        """Sets inputs that have no effect."""
        memory = self._fixed()
        memory.packed.zero_()
        memory.inputs[[SLOT, STATE, CAPTURED]] = -1
        memory.chunks[:, STATE_SLOT] = -1

    def _fixed(self) -> "_Memory":
        if self._memory is None:
            tiles = _TOKENS[-1] // self._attention.tokens_in_tile + _CHUNKS[-1]
            tables = 0 if self._states is None else CHUNK_FIELDS * tiles + PIECE_FIELDS * _PIECES
            size = _INPUTS + 4 * tiles + tables
            packed = torch.zeros(size, dtype=torch.int32, device=self._tokens.device)
            hidden = torch.empty(_TOKENS[-1], self._width, dtype=self._dtype, device=packed.device)
            self._memory = _Memory(packed, *_parts(packed, tiles), hidden)
        return self._memory


class _Memory(NamedTuple):
    """What graphs read, packed so that one transfer suffices, and what they write."""

    packed: Tensor
    inputs: Tensor
    tiles: Tensor
    chunks: Tensor
    pieces: Tensor
    """Those of chunks that advance states; both empty for a model without any."""
    hidden: Tensor


_Packed = TypeVar("_Packed", Tensor, npt.NDArray[np.int32])


def _parts(packed: _Packed, tiles: int) -> tuple[_Packed, _Packed, _Packed, _Packed]:
    """Inputs, tiles, chunks and pieces within what is sent."""
    chunks = _INPUTS + 4 * tiles
    pieces = min(len(packed), chunks + CHUNK_FIELDS * tiles)
    return (
        packed[:_INPUTS].reshape(FIELDS, -1),
        packed[_INPUTS:chunks].reshape(-1, 4),
        packed[chunks:pieces].reshape(-1, CHUNK_FIELDS),
        packed[pieces:].reshape(-1, PIECE_FIELDS),
    )


def _at_least(number: int, ladder: Sequence[int]) -> int:
    return next(each for each in ladder if each >= number)
