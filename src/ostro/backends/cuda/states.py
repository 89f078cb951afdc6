"""The recurrent states of all sequences on a GPU, in slots, and one step's view of them. Knows layers and their mixers,
and no sequences.

A slot is a row of two matrices, the inputs of convolutions and the heads' matrices, each with the parts of all layers:

    inputs     [slots | layer 0 | layer 1 | layer 3 …]      rings by position: see `kernels.gpu.state_rows`
    matrices   [slots | layer 0 | layer 1 | layer 3 …]      float32

So a slot is copied in two pieces, whatever the number of layers.
"""

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ostro.kernels.gpu.delta import DeltaWeights, delta_chunks, delta_singles
from ostro.kernels.gpu.ssm import SsmWeights, ssm_chunks, ssm_singles
from ostro.kernels.gpu.state_conv import short_chunks, short_singles
from ostro.kernels.gpu.state_rows import PIECE_ROWS, ChunkTables, KeptState, SingleRows, tables_of_singles
from ostro.kernels.gpu.step_inputs import CAPTURED, STATE, StepInputs
from ostro.models.architecture import State, ring_states
from ostro.torch_models.base import RecurrentMixer
from ostro.torch_models.recurrent import GatedDelta, Mamba2, ShortConvolution

# Blocks of so many rows in all are few enough not to matter.
_FEW_ROWS = 2048


class GpuStates:
    def __init__(
        self, states: Sequence[State | None], slots: int, *, dtype: torch.dtype, device: torch.device, exact: bool
    ) -> None:
        """`exact` if a row's results must not depend on the rest of the step."""
        rings = ring_states(states)
        inputs = [0 if ring is None else prod(ring.inputs) for ring in rings]
        matrices = [prod(ring.matrices) if ring is not None and ring.matrices is not None else 0 for ring in rings]
        self.inputs = torch.zeros(slots, sum(inputs), dtype=dtype, device=device)
        self.matrices = torch.zeros(slots, sum(matrices), dtype=torch.float32, device=device)
        self.exact = exact
        self._layers: list[KeptState | None] = []
        parts = zip(rings, self.inputs.split(inputs, 1), self.matrices.split(matrices, 1), strict=True)
        for ring, own_inputs, own_matrices in parts:
            if ring is None:
                self._layers.append(None)
                continue
            own = None if ring.matrices is None else own_matrices.unflatten(1, ring.matrices)
            self._layers.append(KeptState(own_inputs.unflatten(1, ring.inputs), own))
        self._weights: dict[RecurrentMixer, DeltaWeights | SsmWeights] = {}

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.matrices.nbytes

    def layer(self, layer: int) -> KeptState:
        found = self._layers[layer]
        assert found is not None, "the layer keeps a state"
        return found

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copies (from, to) slots, in order."""
        for source, target in pairs:
            for memory in (self.inputs, self.matrices):
                memory[target].copy_(memory[source])

    def of_single_tokens(self, inputs: StepInputs, sent: Tensor) -> "StepStates":
        """The states of a step in which every sequence has one token."""
        singles = _singles(inputs, sent)
        if self.exact:
            return StepStates(self, StateWork(None, tables_of_singles(singles), is_padded=True))
        return StepStates(self, StateWork(singles, None))

    def of_step(
        self, inputs: StepInputs, singles: Tensor, tables: ChunkTables, *, padded: bool = False
    ) -> "StepStates":
        """The states of any step: `singles` are the columns of what was sent for the single tokens that come first."""
        rows = _singles(inputs, singles) if singles.shape[1] else None
        return StepStates(self, StateWork(rows, tables if len(tables.chunks) else None, padded))

    def delta_weights(self, mixer: GatedDelta) -> DeltaWeights:
        found = self._weights.get(mixer)
        if found is None:
            described, conv = mixer.described, mixer.conv
            found = self._weights[mixer] = DeltaWeights(
                taps=conv.weight,
                bias=conv.bias,
                decay=mixer.decay.weight,
                decay_bias=mixer.decay_bias.weight,
                norm=mixer.norm.weight,
                eps=described.norm.eps,
                tiled=described.head_map == "tiled",
            )
        assert isinstance(found, DeltaWeights)
        return found

    def ssm_weights(self, mixer: Mamba2) -> SsmWeights:
        found = self._weights.get(mixer)
        if found is None:
            described, conv = mixer.described, mixer.conv
            found = self._weights[mixer] = SsmWeights(
                taps=conv.weight,
                bias=conv.bias,
                decay=mixer.decay.weight,
                step_bias=mixer.step_bias.weight,
                skip=mixer.skip.weight,
                norm=None if mixer.norm is None else mixer.norm.weight,
                eps=0.0 if described.norm is None else described.norm.eps,
                norm_groups=described.norm_groups,
                gates_normed=described.gates_normed,
                head_dim=described.head_dim,
                state_size=described.state_size,
                groups=described.groups,
            )
        assert isinstance(found, SsmWeights)
        return found


def _singles(inputs: StepInputs, sent: Tensor) -> SingleRows:
    number = sent.shape[1]
    return SingleRows(sent[STATE], inputs.positions[:number], sent[CAPTURED])


class StateWork(NamedTuple):
    """Which rows of a step advance which states."""

    singles: SingleRows | None
    """The step's first rows, if each is its sequence's only one."""
    tables: ChunkTables | None
    """The rows of all other chunks."""
    is_padded: bool = False
    """Whether some rows may belong to no sequence."""


class StepStates:
    """One step's states: the kernels' counterpart of `kernels.recurrent_state.StepStates`."""

    def __init__(self, states: GpuStates, work: StateWork) -> None:
        self._states, self._work = states, work

    def mix(self, mixer: RecurrentMixer, *rows: Tensor, pdl: bool = False) -> Tensor:
        first, *gates = rows
        match mixer:
            case GatedDelta():
                return self._delta(mixer, first, *gates, pdl=pdl)
            case Mamba2():
                return self._ssm(mixer, first, pdl=pdl)
            case ShortConvolution():
                return self._short(mixer, first, pdl=pdl)
            case _:
                raise AssertionError(f"no kernels for {type(mixer).__name__}")

    def _delta(self, mixer: GatedDelta, rows: Tensor, gates: Tensor, *, pdl: bool) -> Tensor:
        described, (singles, tables, _) = mixer.described, self._work
        out = self._memory(rows, described.value_heads * described.value_dim)
        weights, kept = self._states.delta_weights(mixer), self._states.layer(mixer.layer)
        if singles is not None:
            few = len(singles.slots)
            delta_singles(rows[:few], gates[:few], weights, kept, singles, out[:few], pdl=pdl)
        if tables is not None:
            delta_chunks(rows, gates, weights, kept, tables, out, exact=self._is_exact(tables, rows), pdl=pdl)
        return out

    def _ssm(self, mixer: Mamba2, rows: Tensor, *, pdl: bool) -> Tensor:
        out, (singles, tables, _) = self._memory(rows, mixer.described.width), self._work
        weights, kept = self._states.ssm_weights(mixer), self._states.layer(mixer.layer)
        if singles is not None:
            few = len(singles.slots)
            ssm_singles(rows[:few], weights, kept, singles, out[:few], pdl=pdl)
        if tables is not None:
            ssm_chunks(rows, weights, kept, tables, out, exact=self._is_exact(tables, rows), pdl=pdl)
        return out

    def _short(self, mixer: ShortConvolution, rows: Tensor, *, pdl: bool) -> Tensor:
        conv, (singles, tables, _) = mixer.conv, self._work
        out, inputs = self._memory(rows, conv.described.channels), self._states.layer(conv.layer).inputs
        if singles is not None:
            few = len(singles.slots)
            short_singles(rows[:few], conv.weight, conv.bias, inputs, singles, out[:few], pdl=pdl)
        if tables is not None:
            short_chunks(rows, conv.weight, conv.bias, inputs, tables, out, pdl=pdl)
        return out

    def _is_exact(self, tables: ChunkTables, rows: Tensor) -> bool:
        """Whether chunks advance step by step, rather than by blocks: those that are mostly shorter than a block would
        compute, and keep in memory, much more than they have rows.
        """
        return self._states.exact or PIECE_ROWS * len(tables.pieces) > 2 * len(rows) + _FEW_ROWS

    def _memory(self, rows: Tensor, width: int) -> Tensor:
        """Memory for the results; rows without a sequence are zeros."""
        make = rows.new_zeros if self._work.is_padded else rows.new_empty
        return make(len(rows), width)
