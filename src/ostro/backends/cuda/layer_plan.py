"""A decoder's layers as data for the fused kernels: what is multiplied, normed and added, in which order.

Read once from the model's description and its modules. Everything in which families differ is a field here, so that
the code that carries a plan out (`fused`) knows none of them. The model's own `forward` is the plain twin.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from ostro.backends.cuda import fusible
from ostro.backends.cuda.choices import adding
from ostro.backends.cuda.projections import FusedMatmul, QuantizedLinear, fused_matmul
from ostro.kernels.gpu.experts import Matrices
from ostro.kernels.gpu.norm import NormWeights
from ostro.kernels.gpu.prologue import Prologue
from ostro.kernels.gpu.rope_store import QKNormWeights
from ostro.models import architecture as arch
from ostro.torch_models.base import Model, Module, RecurrentMixer
from ostro.torch_models.decoder import Decoder, DecoderLayer, MixerPair
from ostro.torch_models.experts import CpuExperts, CpuSums, Experts
from ostro.torch_models.layers import (
    Attention,
    CutWidthNorm,
    GatedMLP,
    HeadNorm,
    LayerNorm,
    Linear,
    PlainMLP,
    RMSNorm,
    WidthNorm,
)
from ostro.torch_models.recurrent import GatedDelta, Mamba2, ShortConvolution


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    layer: int
    qkv: FusedMatmul
    output: FusedMatmul
    gates: int
    """The first numbers of what `qkv` computes gate what is attended to; 0 without gates."""
    spec: arch.AttentionSpec
    rope: int | None
    """Which of the model's ropes rotates queries and keys; None for no rotation."""
    sinks: Tensor | None
    """[heads]: see `architecture.Sinks`."""
    norm: QKNormWeights | None
    """The norm of queries and keys before they are rotated."""
    joint_norm: Callable[[Tensor], Tensor] | None
    """The same norm as a module, [tokens, heads, head_dim], for ranks that must add up their sums for it."""

    @property
    def reads(self) -> tuple[FusedMatmul, ...]:
        """The matmuls that read the residual stream."""
        return (self.qkv,)

    @property
    def writes(self) -> tuple[FusedMatmul, ...]:
        """The matmuls whose results are added to it."""
        return (self.output,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentPlan:
    mixer: RecurrentMixer
    """As a module, whose part between the projections the step's states compute."""
    inputs: FusedMatmul
    gates: FusedMatmul | None
    """A small projection beside `inputs`; None if there is none, or if it is the last rows of `inputs`."""
    gate_rows: int
    """How many rows of `inputs` those are."""
    output: FusedMatmul

    @property
    def reads(self) -> tuple[FusedMatmul, ...]:
        return (self.inputs,) if self.gates is None else (self.inputs, self.gates)

    @property
    def writes(self) -> tuple[FusedMatmul, ...]:
        return (self.output,)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPlan:
    """Two mixers that read the same rows; both add to the stream."""

    attention: AttentionPlan
    recurrent: RecurrentPlan

    @property
    def reads(self) -> tuple[FusedMatmul, ...]:
        return *self.attention.reads, *self.recurrent.reads

    @property
    def writes(self) -> tuple[FusedMatmul, ...]:
        return *self.attention.writes, *self.recurrent.writes


MixerPlan = AttentionPlan | RecurrentPlan | PairPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpPlan:
    up: FusedMatmul
    down: FusedMatmul
    activation: arch.Activation
    gated: bool

    @property
    def dense(self) -> "MlpPlan | None":
        """The part that all tokens go through, if there is one."""
        return self

    @property
    def reads(self) -> tuple[FusedMatmul, ...]:
        """The matmuls that read the residual stream."""
        return (self.up,)

    @property
    def reduce(self) -> Callable[[Tensor], Tensor] | None:
        """Sums the ranks' results."""
        return self.down.linear.reduce

    @property
    def matmuls(self) -> tuple[FusedMatmul, ...]:
        return self.up, self.down


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePlan:
    """See `architecture.Experts`."""

    router: FusedMatmul
    """A row per expert, then, if there is one, that of the shared MLP's gate."""
    activation: arch.Activation
    count: int
    chosen: int
    normalized: bool
    shared: MlpPlan | None
    """Its result is added to the experts' before the sum joins the stream."""
    gates_shared: bool
    """Whether the shared MLP has a gate."""

    @property
    def reads(self) -> tuple[FusedMatmul, ...]:
        return (self.router,) if self.shared is None else (self.router, self.shared.up)

    @property
    def reduce(self) -> None:
        """Experts are not divided over ranks."""
        return

    @property
    def matmuls(self) -> tuple[FusedMatmul, ...]:
        """Those that all tokens go through."""
        return (self.router, *(() if self.shared is None else self.shared.matmuls))

    @property
    def dense(self) -> MlpPlan | None:
        return self.shared


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMixturePlan(MixturePlan):
    up: Matrices
    """Gates above ups."""
    down: Matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuMixturePlan(MixturePlan):
    begin: CpuSums


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerPlan:
    """See `Architecture` for what is added to what."""

    mixer: MixerPlan
    mlp: MlpPlan | MixturePlan
    attention_norm: NormWeights | None
    attention_post_norm: NormWeights | None
    mlp_norm: NormWeights | None
    mlp_post_norm: NormWeights | None
    multiplier: float
    """Multiplies what attention and MLP add to the stream."""
    parallel: bool

    @cached_property
    def folds(self) -> bool:
        """Whether, for a single row, matmuls can take over what comes before them: norming the stream and, where deltas
        are normed, adding them to it. All norms must be RMS norms.
        """
        before, after = (self.attention_norm, self.mlp_norm), (self.attention_post_norm, self.mlp_post_norm)
        if self.parallel or any(norm is not None and norm.kind != "rms" for norm in before + after):
            return False
        if after == (None, None):
            reduces = {self.mlp.reduce, *(each.linear.reduce for each in self.mixer.writes)}
            return None not in before and reduces == {None}
        read = (*self.mixer.reads, *self.mlp.reads)
        return None not in after and not any(isinstance(each.linear, QuantizedLinear) for each in read)

    def folds_into(self, reader: FusedMatmul) -> bool:
        """Whether a matmul that reads the stream can do that: not if the CPU reads the normed rows as well."""
        return self.folds and not (isinstance(self.mlp, CpuMixturePlan) and reader in self.mlp.reads)

    @cached_property
    def attention_prologue(self) -> Prologue:
        """What the matmul before attention does to a single row if the layer folds; a delta comes with the step."""
        return Prologue(self.attention_norm)

    @cached_property
    def mlp_prologue(self) -> Prologue:
        """The same for the first matmul of the MLP."""
        return Prologue(self.mlp_norm)

    @property
    def attention(self) -> AttentionPlan | None:
        """The mixer, or the one of a pair, that keeps keys and values."""
        mixer = self.mixer.attention if isinstance(self.mixer, PairPlan) else self.mixer
        return mixer if isinstance(mixer, AttentionPlan) else None

    @property
    def matmuls(self) -> tuple[FusedMatmul, ...]:
        return *self.mixer.reads, *self.mixer.writes, *self.mlp.matmuls


def why_unfused(model: Model) -> str | None:
    """The reason why there is no layer plan for a model; None if there is one."""
    if not isinstance(model, Decoder):
        return "its layers run several times per token"
    return fusible.why_unfused(model.described)


def can_capture(model: Model) -> bool:
    """Whether a CUDA graph can hold a step: fused kernels never wait for the host."""
    return why_unfused(model) is None or model.captures


def kinds(layers: Sequence[LayerPlan]) -> tuple[LayerPlan, ...]:
    """The first layer with each kind of mixer, and with an MLP or experts: others need the same kernels."""
    return tuple({(type(layer.mixer), type(layer.mlp)): layer for layer in reversed(layers)}.values())


def layer_plans(model: Decoder) -> tuple[LayerPlan, ...]:
    return tuple(
        _layer(layer, described) for layer, described in zip(model.layers, model.described.layers, strict=True)
    )


def norm_weights(norm: RMSNorm | LayerNorm) -> NormWeights:
    return NormWeights(norm.weight, norm.eps, norm.bias if isinstance(norm, LayerNorm) else None)


def _layer(layer: DecoderLayer, described: arch.Layer) -> LayerPlan:
    before, after = (layer.attention_norm, layer.mlp_norm), (layer.attention_post_norm, layer.mlp_post_norm)
    attention_norm, mlp_norm = (None if norm is None else norm_weights(norm) for norm in before)
    if layer.mlp_norm is layer.attention_norm:
        mlp_norm = attention_norm
    attention_post_norm, mlp_post_norm = (None if norm is None else norm_weights(norm) for norm in after)
    parallel, multiplier = described.parallel, described.residual_scale
    assert layer.mixer is not None, "layers have both parts"
    assert layer.mlp is not None
    assert described.mixer is not None, "and so have their descriptions"
    assert described.mlp is not None
    assert not parallel or after == (None, None), "what parallel parts add is added up before it is normed"
    return LayerPlan(
        # What attention and MLP add in parallel is added up first.
        mixer=_mixer(
            layer.mixer,
            described.mixer,
            partial(_adding, waits=attention_post_norm is not None or parallel, multiplier=multiplier),
        ),
        mlp=_mlp(layer.mlp, described.mlp, waits=mlp_post_norm is not None, multiplier=1.0 if parallel else multiplier),
        attention_norm=attention_norm,
        attention_post_norm=attention_post_norm,
        mlp_norm=mlp_norm,
        mlp_post_norm=mlp_post_norm,
        multiplier=multiplier,
        parallel=parallel,
    )


def _adding(linear: Linear, *, waits: bool, multiplier: float) -> FusedMatmul:
    """A matmul whose result is added to the stream, by its own kernel unless something must happen first."""
    adds = adding(normed=waits, reduced=linear.reduce is not None) == "added"
    return fused_matmul(linear, adds=adds, multiplier=multiplier)


def _mlp(
    mlp: GatedMLP | PlainMLP | Experts | CpuExperts,
    described: arch.MLP | arch.Experts,
    *,
    waits: bool,
    multiplier: float,
) -> MlpPlan | MixturePlan:
    if isinstance(mlp, Experts | CpuExperts):
        assert isinstance(described, arch.Experts)
        return _mixture(mlp, described)
    assert isinstance(described, arch.MLP)
    return _dense(mlp, described, _adding(mlp.down_proj, waits=waits, multiplier=multiplier))


def _mixture(mlp: Experts | CpuExperts, described: arch.Experts) -> MixturePlan:
    shared = None
    if mlp.shared is not None and described.shared is not None:
        shared = _dense(mlp.shared, described.shared, fused_matmul(mlp.shared.down_proj))
    plan = MixturePlan(
        router=fused_matmul(mlp.router),
        activation=described.activation,
        count=described.count,
        chosen=described.chosen,
        normalized=described.normalized,
        shared=shared,
        gates_shared=described.shared_gate is not None,
    )
    own = {each.name: getattr(plan, each.name) for each in fields(MixturePlan)}
    if isinstance(mlp, CpuExperts):
        assert mlp.begin is not None, "the backend has not attached its experts"
        return CpuMixturePlan(**own, begin=mlp.begin)
    up, down = (Matrices(each.weight, each.bias) for each in (mlp.up, mlp.down))
    return GpuMixturePlan(**own, up=up, down=down)


def _dense(mlp: GatedMLP | PlainMLP, described: arch.MLP, down: FusedMatmul) -> MlpPlan:
    up = mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj
    activation, gated = described.activation, described.gated
    return MlpPlan(
        up=fused_matmul(up, activation=activation, gated=gated), down=down, activation=activation, gated=gated
    )


def _mixer(mixer: Module, described: arch.Mixer, adding: Callable[[Linear], FusedMatmul]) -> MixerPlan:
    match mixer, described:
        case MixerPair(), arch.MixerPair():
            attention = _mixer(mixer.attention, described.attention, adding)
            recurrent = _mixer(mixer.recurrent, described.recurrent, adding)
            assert isinstance(attention, AttentionPlan)
            assert isinstance(recurrent, RecurrentPlan)
            return PairPlan(attention=attention, recurrent=recurrent)
        case Attention(), arch.Attention():
            return _attention(mixer, described, adding(mixer.o_proj))
        case GatedDelta() | Mamba2() | ShortConvolution(), _:
            return _recurrent(mixer, adding(mixer.out_proj))
        case _:
            raise AssertionError("fused kernels store every layer's keys and values")


def _recurrent(mixer: GatedDelta | Mamba2 | ShortConvolution, output: FusedMatmul) -> RecurrentPlan:
    if not isinstance(mixer, GatedDelta):
        return RecurrentPlan(mixer=mixer, inputs=fused_matmul(mixer.in_proj), gates=None, gate_rows=0, output=output)
    if (joined := _joined(mixer)) is not None:
        rows = len(mixer.gates.weight)
        return RecurrentPlan(mixer=mixer, inputs=fused_matmul(joined), gates=None, gate_rows=rows, output=output)
    inputs, gates = fused_matmul(mixer.in_proj), fused_matmul(mixer.gates)
    return RecurrentPlan(mixer=mixer, inputs=inputs, gates=gates, gate_rows=0, output=output)


def _joined(mixer: GatedDelta) -> Linear | None:
    """One matrix of both projections, whose weights become parts of it; None if they differ in their form, or may have
    adapters.
    """
    parts = mixer.in_proj, mixer.gates
    plain = all(not isinstance(each, QuantizedLinear) and each.adapt is None for each in parts)
    if not plain or any(each.bias is not None for each in parts):
        return None
    weight = torch.cat([each.weight.data for each in parts])
    with torch.device("meta"):
        joined = Linear(weight.shape[1], len(weight))
    joined.weight = nn.Parameter(weight, requires_grad=False)
    for part, own in zip(parts, weight.split([len(each.weight) for each in parts]), strict=True):
        part.weight.data = own
    return joined


def _attention(attention: Attention, described: arch.Attention, output: FusedMatmul) -> AttentionPlan:
    norm = attention.qk_norm
    weights = None
    if isinstance(norm, HeadNorm):
        weights = QKNormWeights(norm.weight, norm.eps, "head")
    elif isinstance(norm, WidthNorm) and not isinstance(norm, CutWidthNorm):
        weights = QKNormWeights(torch.cat((norm.q_weight, norm.k_weight)), norm.eps, "width")
    return AttentionPlan(
        layer=attention.layer,
        qkv=fused_matmul(attention.qkv_proj),
        output=output,
        gates=attention.q_and_k[0] * attention.head_dim if attention.gated else 0,
        spec=attention.spec,
        rope=described.rope,
        sinks=None if attention.sinks is None else attention.sinks.weight,
        norm=weights,
        joint_norm=norm if isinstance(norm, CutWidthNorm) else None,
    )
