"""A decoder's layers as data for the fused kernels: what is multiplied, normed and added, in which order.

Read once from the model's description and its modules. Everything in which families differ is a field here, so that
the code that carries a plan out (`fused`) knows none of them. The model's own `forward` is the plain twin.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ostro.backends.cuda import fusible
from ostro.backends.cuda.choices import adding
from ostro.backends.cuda.projections import QuantizedLinear
from ostro.kernels.gpu.experts import Matrices
from ostro.kernels.gpu.norm import NormWeights
from ostro.kernels.gpu.rope_store import QKNormWeights
from ostro.kernels.gpu.tilings import Epilogue
from ostro.models import architecture as arch
from ostro.torch_models.base import Model
from ostro.torch_models.decoder import Decoder, DecoderLayer
from ostro.torch_models.experts import Experts
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
from ostro.torch_models.reading_attention import ReadingAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    layer: int
    qkv: Linear
    output: Linear
    spec: arch.AttentionSpec
    rope: int | None
    """Which of the model's ropes rotates queries and keys; None for no rotation."""
    sinks: Tensor | None
    """[heads]: see `architecture.Sinks`."""
    norm: QKNormWeights | None
    """Of queries and keys, before they are rotated."""
    joint_norm: Callable[[Tensor], Tensor] | None
    """The same as a module, [tokens, heads, head_dim], where ranks must add up their sums for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpPlan:
    up: Linear
    down: Linear
    activation: arch.Activation
    gated: bool

    @property
    def epilogue(self) -> Epilogue:
        """What the first matmul's kernel can do with its result."""
        return "gated" if self.gated else "activated"

    @property
    def dense(self) -> "MlpPlan | None":
        """What all tokens go through, if there is such a part."""
        return self

    @property
    def reads(self) -> tuple[Linear, ...]:
        """Matmuls of the stream."""
        return (self.up,)

    @property
    def reduce(self) -> Callable[[Tensor], Tensor] | None:
        """Sums up the ranks' results."""
        return self.down.reduce

    def matmuls(self, added: Epilogue) -> tuple[tuple[Linear, Epilogue], ...]:
        """See `LayerPlan.matmuls`; `added` is the epilogue of what the MLP adds."""
        return (self.up, self.epilogue), (self.down, added)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePlan:
    """See `architecture.Experts`."""

    router: Linear
    """A row per expert, then, if there is one, that of the shared MLP's gate."""
    up: Matrices
    """Gates above ups."""
    down: Matrices
    activation: arch.Activation
    chosen: int
    normalized: bool
    shared: MlpPlan | None
    gates_shared: bool
    """Whether the shared MLP has a gate."""

    @property
    def count(self) -> int:
        return len(self.up.weight)

    @property
    def reads(self) -> tuple[Linear, ...]:
        return (self.router,) if self.shared is None else (self.router, self.shared.up)

    @property
    def reduce(self) -> None:
        """Experts are not divided over ranks."""
        return

    def matmuls(self, added: Epilogue) -> tuple[tuple[Linear, Epilogue], ...]:
        """Those of all tokens. The shared MLP's result is added to the experts' first."""
        return (self.router, "plain"), *(() if self.shared is None else self.shared.matmuls("plain"))

    @property
    def dense(self) -> MlpPlan | None:
        return self.shared


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """See `Architecture` for what is added to what."""

    attention: AttentionPlan
    mlp: MlpPlan | MixturePlan
    attention_norm: NormWeights | None
    attention_post_norm: NormWeights | None
    mlp_norm: NormWeights | None
    mlp_post_norm: NormWeights | None
    multiplier: float
    """Of what attention and MLP add."""
    parallel: bool

    @property
    def folds(self) -> bool:
        """Whether, for a single row, matmuls can do what stands before them: norm the stream, and, if it is normed
        first, add to it. All norms must be RMS norms.
        """
        before, after = (self.attention_norm, self.mlp_norm), (self.attention_post_norm, self.mlp_post_norm)
        if self.parallel or any(norm is not None and norm.kind != "rms" for norm in before + after):
            return False
        if after == (None, None):
            return None not in before and self.attention.output.reduce is self.mlp.reduce is None
        read = (self.attention.qkv, *self.mlp.reads)
        return None not in after and not any(isinstance(each, QuantizedLinear) for each in read)

    @property
    def matmuls(self) -> tuple[tuple[Linear, Epilogue], ...]:
        """Each matmul, with what its kernel can do with the result."""
        attention, mlp = self.attention, self.mlp
        # What attention and MLP add in parallel is added up first.
        waits = self.attention_post_norm is not None or self.parallel
        output = adding(normed=waits, reduced=attention.output.reduce is not None)
        down = adding(normed=self.mlp_post_norm is not None, reduced=mlp.reduce is not None)
        return (attention.qkv, "plain"), (attention.output, output), *mlp.matmuls(down)


def why_unfused(model: Model) -> str | None:
    """The reason why there is no layer plan for a model; None if there is one."""
    if not isinstance(model, Decoder):
        return "its layers run several times a token"
    return fusible.why_unfused(model.described)


def can_capture(model: Model) -> bool:
    """Whether a CUDA graph can hold a step: fused kernels never wait for the host."""
    return why_unfused(model) is None or model.captures


def kinds(layers: Sequence[LayerPlan]) -> tuple[LayerPlan, ...]:
    """The first layer with an MLP, and the first with experts, if there are both: others need the same kernels."""
    return tuple({type(layer.mlp): layer for layer in reversed(layers)}.values())


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
    assert not described.parallel or after == (None, None), "what parallel parts add is added up before it is normed"
    return LayerPlan(
        attention=_attention(layer.self_attn, described.attention),
        mlp=_mlp(layer.mlp, described.mlp),
        attention_norm=attention_norm,
        attention_post_norm=attention_post_norm,
        mlp_norm=mlp_norm,
        mlp_post_norm=mlp_post_norm,
        multiplier=described.residual_scale,
        parallel=described.parallel,
    )


def _mlp(mlp: GatedMLP | PlainMLP | Experts, described: arch.MLP | arch.Experts) -> MlpPlan | MixturePlan:
    if isinstance(mlp, Experts):
        assert isinstance(described, arch.Experts)
        return MixturePlan(
            router=mlp.router,
            up=Matrices(mlp.up.weight, mlp.up.bias),
            down=Matrices(mlp.down.weight, mlp.down.bias),
            activation=described.activation,
            chosen=described.chosen,
            normalized=described.normalized,
            shared=None if mlp.shared is None or described.shared is None else _dense(mlp.shared, described.shared),
            gates_shared=mlp.is_gated,
        )
    assert isinstance(described, arch.MLP)
    return _dense(mlp, described)


def _dense(mlp: GatedMLP | PlainMLP, described: arch.MLP) -> MlpPlan:
    return MlpPlan(
        up=mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj,
        down=mlp.down_proj,
        activation=described.activation,
        gated=described.gated,
    )


def _attention(attention: Attention | ReadingAttention, described: arch.Attention) -> AttentionPlan:
    assert isinstance(attention, Attention), "fused kernels store every layer's keys and values"
    norm = attention.qk_norm
    weights = None
    if isinstance(norm, HeadNorm):
        weights = QKNormWeights(norm.weight, norm.eps, "head")
    elif isinstance(norm, WidthNorm) and not isinstance(norm, CutWidthNorm):
        weights = QKNormWeights(torch.cat((norm.q_weight, norm.k_weight)), norm.eps, "width")
    return AttentionPlan(
        layer=attention.layer,
        qkv=attention.qkv_proj,
        output=attention.o_proj,
        spec=attention.spec,
        rope=described.rope,
        sinks=None if attention.sinks is None else attention.sinks.weight,
        norm=weights,
        joint_norm=norm if isinstance(norm, CutWidthNorm) else None,
    )
