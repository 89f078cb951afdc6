"""Carries out a decoder's layer plan with fused kernels: the same mathematics as the model's own `forward`, its plain
twin.

    x ─┬─(norm)─ qkv ─ [norms, rotation, store] ─ attention ─ o ─(norm)─(· multiplier)─┐
       └─────────────────────────────── + ─────────────────────────────────────────────┘ …then the MLP, likewise

What a matmul adds to the residual stream waits for the next norm, whose kernel adds it. For many rows, the library
computes the matmuls. For few, our own kernels compute those that `choices` names, with the activation fused as an
epilogue and, where nothing comes between, the addition too. For one row they compute all of them, with the norms fused
as prologues as well: there, launching a kernel costs more than its work. So do slices of up to 16 rows (`slice_linear`)
where their tiling says so.

If results must not depend on the batch, all rows take the many-rows path, with matmuls and tilings that do not depend
on the number of rows.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ostro.backends.cuda.attention import StepAttention
from ostro.backends.cuda.choices import Choices, adding
from ostro.backends.cuda.layer_plan import (
    AttentionPlan,
    CpuMixturePlan,
    GpuMixturePlan,
    LayerPlan,
    MixerPlan,
    MixturePlan,
    MlpPlan,
    PairPlan,
    RecurrentPlan,
    layer_plans,
    norm_weights,
)
from ostro.backends.cuda.measuring import Operand
from ostro.backends.cuda.projections import (
    FusedMatmul,
    QuantizedLinear,
    large_matmul,
    matmul_of,
    own_tiling,
    small_matmul,
)
from ostro.kernels.gpu.experts import Ending, Shared, add_up, inner_rows, outer_rows
from ostro.kernels.gpu.gates import scaled_by_gates
from ostro.kernels.gpu.invariant_linear import invariant_linear
from ostro.kernels.gpu.logits import finished_logits
from ostro.kernels.gpu.mlp import activated
from ostro.kernels.gpu.norm import NormWeights, add_norm
from ostro.kernels.gpu.prologue import NO_PROLOGUE, Delta, Prologue
from ostro.kernels.gpu.rope_store import rope_store, rotation_table
from ostro.kernels.gpu.routing import INVARIANT_HEIGHT, by_expert, route, tile_height
from ostro.kernels.gpu.single_experts import single_inner, single_outer
from ostro.kernels.gpu.small_batch import norms_itself, small_linear
from ostro.kernels.gpu.step_inputs import StepInputs
from ostro.kernels.gpu.tilings import Matmul
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.rope import Rotary

_NARROW = 2048


@dataclass(slots=True)
class _Stream:
    """The residual stream of a step."""

    x: Tensor
    delta: Delta | None = None


class _Read(NamedTuple):
    """What a matmul reads, and what it does to that first."""

    x: Tensor
    prologue: Prologue = NO_PROLOGUE


class _Step(NamedTuple):
    """What all layers of a step share."""

    rotations: list[Tensor]
    """One table per rope."""
    slots: Tensor
    attention: StepAttention
    own: bool
    """Whether our own kernels may compute matmuls."""


class FusedDecoder:
    def __init__(self, model: Decoder, *, overlaps: bool, invariant: bool = False) -> None:
        """`overlaps` lets a kernel prefetch its weights before the previous one has finished; `invariant` gives each
        row the same bits for any number of rows.
        """
        self.model = model
        self.layers = layer_plans(model)
        self._norm = norm_weights(model.body.norm)
        self._ropes = [rope for rope in model.body.ropes if isinstance(rope, Rotary)]
        self.overlaps = overlaps
        self.invariant = invariant
        self.choices = Choices()
        """Which matmuls our own kernels compute, unless results must be invariant."""
        self.folds = True
        """Whether, for one row, matmuls have prologues."""

    @property
    def matmuls(self) -> Mapping[Matmul, Sequence[Operand]]:
        """The matmuls whose kernel can be chosen, with the weights of each."""
        found: defaultdict[Matmul, list[Operand]] = defaultdict(list)
        for layer in self.layers:
            for matmul in layer.matmuls:
                if not isinstance(linear := matmul.linear, QuantizedLinear):
                    found[matmul.key].append(Operand(linear.weight, linear.bias))
        if (head := self.model.lm_head) is not None:
            found[matmul_of(head)].append(Operand(head.weight, None))
        return found

    def __call__(self, inputs: StepInputs, ctx: StepAttention, *, adapted: bool = False) -> Tensor:
        """Hidden states of all tokens in the step, after the final norm. `adapted` rows take the many-rows path: fused
        matmuls have no place to add the adapters' terms.
        """
        x = self.model.body.embed(inputs.tokens, inputs.positions)
        rotations = [
            rotation_table(
                inputs.positions,
                rope.frequencies[len(rope.frequencies) // 2 :],
                rope.attention_factor,
                invariant=self.invariant,
            )
            for rope in self._ropes
        ]
        step = _Step(rotations, inputs.slots, ctx, own=not adapted and not self.invariant)
        stream = _Stream(x)
        for layer in self.layers:
            run = self._parallel if layer.parallel else self._in_turn
            run(layer, stream, step)
        return self._joined(stream, self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        model, head = self.model, self.model.lm_head
        if head is None:
            return model.raw_logits(hidden)
        if self.invariant:
            logits = invariant_linear(hidden, head.weight, pdl=self.overlaps)
        elif (tiling := own_tiling(head, matmul_of(head), len(hidden), self.choices)) is not None:
            logits = small_linear(hidden, head.weight, tiling=tiling, pdl=self.overlaps)
        else:
            logits = head.matmul(hidden)
        return finished_logits(model.whole_logits(logits), multiplier=model.logit_scale, softcap=model.logit_softcap)

    @property
    def leads_from_attention(self) -> bool:
        """Whether the kernel after attention may start before attention has finished."""
        # On an H200 this gains 2 % at hidden size 1024 and loses 10 % at 4096, where the next kernel's weight reads
        # compete with attention's reads of keys.
        return self.overlaps and self.model.shape.hidden_size <= _NARROW

    # ---- one layer

    def _in_turn(self, layer: LayerPlan, stream: _Stream, step: _Step) -> None:
        own, mlp = step.own, layer.mlp
        add = partial(self._add, multiplier=layer.multiplier, own=own)
        for written, output in self._mixed(layer.mixer, self._read_by_mixer(stream, layer, own), step):
            add(output, written, stream, layer.attention_post_norm)
        if isinstance(mlp, MixturePlan):
            self._mix(mlp, layer, stream, step)
            return
        read = self._reads_mlp(stream, layer, own)
        add(mlp.down, self._inner(mlp, read, own), stream, layer.mlp_post_norm)

    def _parallel(self, layer: LayerPlan, stream: _Stream, step: _Step) -> None:
        own, attention, mlp = step.own, layer.mixer, layer.mlp
        assert isinstance(attention, AttentionPlan)
        assert isinstance(mlp, MlpPlan)
        read = _Read(self._joined(stream, layer.attention_norm))
        qkv = self._matmul(attention.qkv, read, own)
        beside = read if layer.mlp_norm is layer.attention_norm else _Read(self._joined(stream, layer.mlp_norm))
        attended = self._attend(attention, qkv, step)
        # The MLP adds to what attention adds, and the next norm's kernel adds both to the stream.
        both = _Stream(self._matmul(attention.output, _Read(attended), own))
        self._add(mlp.down, self._inner(mlp, beside, own), both, None, multiplier=1.0, own=own)
        stream.delta = Delta(self._joined(both, None), None, layer.multiplier)

    # ---- its parts

    def _read_by_mixer(self, stream: _Stream, layer: LayerPlan, own: bool) -> list[Tensor]:
        """What the mixer's projections compute of the stream."""
        reads = layer.mixer.reads
        if self._is_folded(stream, layer, reads[0], own):
            read = _folded(stream, layer.attention_prologue)
        else:
            read = _Read(self._joined(stream, layer.attention_norm))
        first = self._matmul(reads[0], read, own)
        if read.prologue.delta is not None:
            # Its kernel has added the delta.
            read = _Read(stream.x, layer.attention_prologue)
        return [first, *(self._matmul(each, read, own) for each in reads[1:])]

    def _mixed(self, mixer: MixerPlan, rows: Sequence[Tensor], step: _Step) -> Iterator[tuple[Tensor, FusedMatmul]]:
        """From what a mixer's projections have computed to what the last ones read."""
        match mixer:
            case AttentionPlan():
                yield self._attend(mixer, rows[0], step), mixer.output
            case RecurrentPlan():
                yield self._advance(mixer, rows, step), mixer.output
            case PairPlan():
                first, *others = rows
                yield self._attend(mixer.attention, first, step), mixer.attention.output
                yield self._advance(mixer.recurrent, others, step), mixer.recurrent.output

    def _advance(self, mixer: RecurrentPlan, rows: Sequence[Tensor], step: _Step) -> Tensor:
        """Advances the mixer's states."""
        if mixer.gate_rows:
            [joined] = rows
            rows = joined.split_with_sizes((joined.shape[1] - mixer.gate_rows, mixer.gate_rows), 1)
        states = step.attention.states
        assert states is not None, "the model keeps states"
        return states.mix(mixer.mixer, *rows, pdl=self.overlaps)

    def _reads_mlp(self, stream: _Stream, layer: LayerPlan, own: bool) -> _Read:
        if self._is_folded(stream, layer, layer.mlp.reads[0], own):
            return _folded(stream, layer.mlp_prologue)
        return _Read(self._joined(stream, layer.mlp_norm))

    def _is_folded(self, stream: _Stream, layer: LayerPlan, reader: FusedMatmul, own: bool) -> bool:
        """Whether the matmul that reads the stream norms it itself."""
        # What the library has computed is added without a norm, for which kernels have no prologue.
        adds = stream.delta is not None and stream.delta.norm is None
        return own and self.folds and not adds and folds(layer, reader, len(stream.x), self.choices)

    def _joined(self, stream: _Stream, norm: NormWeights | None) -> Tensor:
        """The stream after adding its pending delta, normed if there is a norm."""
        value, delta_norm, multiplier = stream.delta or (None, None, 1.0)
        stream.delta = None
        return add_norm(
            stream.x,
            value,
            norm,
            delta_norm=delta_norm,
            multiplier=multiplier,
            invariant=self.invariant,
            pdl=self.overlaps,
        )

    def _add(
        self,
        matmul: FusedMatmul,
        x: Tensor,
        stream: _Stream,
        norm: NormWeights | None,
        *,
        multiplier: float,
        own: bool,
    ) -> None:
        """Adds a matmul's result to the stream, or leaves it pending: if a norm comes first, if the ranks' results must
        be summed, or if the library computed it.
        """
        if stream.delta is not None:
            # The layer's other mixer left it.
            self._joined(stream, None)
        if not matmul.epilogue.adds:
            stream.delta = Delta(self._matmul(matmul, _Read(x), own), norm, multiplier)
        elif own and (tiling := matmul.tiling(len(x), self.choices)) is not None:
            small_matmul(matmul, x, residual=stream.x, tiling=tiling, pdl=self.overlaps)
        else:
            stream.delta = Delta(self._many(matmul, x), norm, multiplier)

    def _inner(self, mlp: MlpPlan, read: _Read, own: bool) -> Tensor:
        x, prologue = read
        if own and (tiling := mlp.up.tiling(len(x), self.choices)) is not None:
            return small_matmul(mlp.up, x, prologue, tiling=tiling, pdl=self.overlaps)
        return activated(self._many(mlp.up, x), mlp.activation, gated=mlp.gated, pdl=self.overlaps)

    def _mix(self, mixture: MixturePlan, layer: LayerPlan, stream: _Stream, step: _Step) -> None:
        """Adds a mixture of experts to the stream, or leaves it pending if a norm comes first."""
        own = step.own
        read = self._reads_mlp(stream, layer, own)
        logits = self._matmul(mixture.router, read, own)
        if read.prologue.delta is not None:
            # The router's kernel has added it.
            read = _Read(stream.x, layer.mlp_prologue)
        sums = self._begin(mixture, read.x, logits, step) if isinstance(mixture, CpuMixturePlan) else None
        beside = None
        if mixture.shared is not None:
            rows = self._matmul(mixture.shared.down, _Read(self._inner(mixture.shared, read, own)), own)
            beside = Shared(rows, logits[:, mixture.count] if mixture.gates_shared else None)
        adds = adding(normed=layer.mlp_post_norm is not None, reduced=False) == "added"
        ending = Ending(beside, stream.x, layer.multiplier) if adds else Ending(beside)
        if isinstance(mixture, GpuMixturePlan):
            added = self._mix_here(mixture, read, logits, ending)
        else:
            assert sums is not None
            added = add_up(sums(), None, ending, dtype=read.x.dtype)
        if not adds:
            stream.delta = Delta(added, layer.mlp_post_norm, layer.multiplier)

    def _begin(self, mixture: CpuMixturePlan, x: Tensor, logits: Tensor, step: _Step) -> Callable[[], Tensor]:
        """Has the CPU compute the rows' experts, while the GPU goes on."""
        routed = route(logits, mixture.count, mixture.chosen, normalized=mixture.normalized, pdl=self.overlaps)
        return mixture.begin(x, routed.experts, routed.weights, step.slots)

    def _mix_here(self, mixture: GpuMixturePlan, read: _Read, logits: Tensor, ending: Ending) -> Tensor:
        if len(read.x) > 1 or self.invariant:
            return self._mix_rows(mixture, read.x, logits, ending)
        inner = single_inner(
            read.x,
            logits,
            mixture.up,
            mixture.chosen,
            mixture.activation,
            norm=read.prologue.norm,
            pdl=self.overlaps,
        )
        return single_outer(
            inner, logits, mixture.down, normalized=mixture.normalized, ending=ending, pdl=self.overlaps
        )

    def _mix_rows(self, mixture: GpuMixturePlan, x: Tensor, logits: Tensor, ending: Ending) -> Tensor:
        count, chosen, pdl = mixture.count, mixture.chosen, self.overlaps
        # Tiles of a fixed height give each row the same bits whatever the other rows are.
        height = INVARIANT_HEIGHT if self.invariant else tile_height(len(x) * chosen, count)
        routed = route(logits, count, chosen, normalized=mixture.normalized, pdl=pdl)
        rows = by_expert(routed.experts, count, height, pdl=pdl)
        inner = inner_rows(x, mixture.up, rows, chosen, mixture.activation, pdl=pdl)
        return add_up(outer_rows(inner, mixture.down, rows, pdl=pdl), routed, ending, pdl=pdl)

    def _matmul(self, matmul: FusedMatmul, read: _Read, own: bool) -> Tensor:
        x, prologue = read
        if own and (tiling := matmul.tiling(len(x), self.choices)) is not None:
            y = small_matmul(matmul, x, prologue, tiling=tiling, pdl=self.overlaps)
            return y if matmul.linear.reduce is None else matmul.linear.reduce(y)
        return self._many(matmul, x)

    def _many(self, matmul: FusedMatmul, x: Tensor) -> Tensor:
        """The library's matmul, or the one that gives the same bits for any number of rows."""
        linear = matmul.linear
        if self.invariant:
            return invariant_linear(x, linear.weight, linear.bias, pdl=self.overlaps)
        y = large_matmul(matmul, x, pdl=self.overlaps)
        if linear.adapt is not None:
            linear.adapt(x, y)
        return y if linear.reduce is None else linear.reduce(y)

    def _attend(self, attention: AttentionPlan, qkv: Tensor, step: _Step) -> Tensor:
        keys, values = step.attention.pages.layers[attention.layer]
        rotation = None if attention.rope is None else step.rotations[attention.rope]
        gates, qkv = qkv[:, : attention.gates], qkv[:, attention.gates :]
        if attention.joint_norm is not None:
            qk = qkv.unflatten(1, (-1, keys.shape[-1]))[:, : -keys.shape[1]]
            qk.copy_(attention.joint_norm(qk))
        q = rope_store(
            qkv, rotation, step.slots, keys, values, norm=attention.norm, invariant=self.invariant, pdl=self.overlaps
        )
        attended = step.attention.attend_stored(
            attention.layer,
            q,
            attention.spec,
            attention.sinks,
            pdl=self.overlaps,
            leads=self.leads_from_attention,
        )
        return attended if not attention.gates else scaled_by_gates(attended, gates, pdl=self.overlaps)


def folds(layer: LayerPlan, reader: FusedMatmul, rows: int, choices: Choices) -> bool:
    """Whether a matmul norms this many rows of the stream itself. Every program of its kernel repeats the norm's sum,
    which always pays for a single row, and for more where it was measured. Of float16 no kernel does for several.
    """
    if rows == 1 or not layer.folds_into(reader):
        return layer.folds_into(reader)
    if reader in layer.mixer.reads and len(layer.mixer.reads) > 1:
        # The others could not read what only the first one has normed.
        return False
    tiling = reader.tiling(rows, choices) if isinstance(layer.mlp, MlpPlan) else None
    return norms_itself(tiling, reader.linear.weight.dtype)


def _folded(stream: _Stream, prologue: Prologue) -> _Read:
    """The stream without its pending delta, which the next matmul's kernel adds."""
    x, delta = stream.x, stream.delta
    if delta is None:
        return _Read(x, prologue)
    stream.x, stream.delta = torch.empty_like(x), None
    return _Read(x, Prologue(prologue.norm, delta, stream.x))
