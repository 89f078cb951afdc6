"""A model's description as data: its shape, its layers, and the names of its tensors. Imports no torch.

A family (`models.families`) translates a config.json into an `Architecture`. Everything that runs or measures a model
reads it: the torch modules, the native core's lowering, the GPU's fused kernels, planning.

    x = embedding(ids)
    for layer in layers:                                                             what is None is skipped
        x += residual_scale * attention_post_norm(mixer(attention_norm(x)))
        x += residual_scale * mlp_post_norm(mlp(mlp_norm(x)))                        parallel: reads x before the mixer
        x = stream_scale * (x + input(x))                                            where the layer has these
    logits = softcap(scale * head(norm(x)))

`SideExperts` describes experts beside the MLP; `LayerInputs` and `LayerInput` describe a layer's own
input. Tensors have their full names in Hugging Face checkpoints.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, Literal, NamedTuple

from ostro.models.rope_settings import RopeSettings
from ostro.models.row_order import RowOrder

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_silu"]
"""relu2 is the square of relu. clamped_silu combines gates and ups: both are capped at CLAMP, ups also at -CLAMP, and a
gate g and an up u become g * sigmoid(SLOPE * g) * (u + 1).
"""
CLAMP, SLOPE = 7.0, 1.702


class StoredTensor(NamedTuple):
    """A tensor that a checkpoint of the model must contain."""

    name: str
    shape: tuple[int, ...]
    offset: float = 0.0
    """Added on loading."""
    transposed: bool = False
    """Whether it is stored as [in, out]."""
    order: RowOrder | None = None
    """Row order of the stored matrix, where it differs from ours."""
    stacked: bool = False
    """Whether it holds one such matrix or vector per expert; its first dimension numbers them."""


class Heads(NamedTuple):
    """The heads of one layer's KV cache."""

    kv: int
    """Number of KV heads; 0 for a layer without keys and values of its own."""
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that a runner needs to allocate memory."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    """The context length to serve; may be shorter than the model's own."""
    layer_heads: tuple[Heads, ...] = ()
    """One for each layer, if they differ; `num_kv_heads` and `head_dim` are then some layers' only."""

    def of_layer(self, layer: int) -> "ModelShape":
        """The same with this layer's heads."""
        if not self.layer_heads:
            return self
        return replace(self, num_kv_heads=self.layer_heads[layer].kv, head_dim=self.layer_heads[layer].dim)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm: scales each row to unit root mean square, then by a weight. A layer norm also centres it, and may add a
    bias.
    """

    name: str
    size: int
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    """Added to the stored weight: some families store its difference from one."""
    biased: bool = True
    """Whether a layer norm adds a bias."""
    weighted: bool = True
    """Whether it has a weight; without one, the name is unused."""

    def tensors(self) -> Iterator[StoredTensor]:
        if not self.weighted:
            return
        yield StoredTensor(f"{self.name}.weight", (self.size,), self.offset)
        if self.kind == "layer" and self.biased:
            yield StoredTensor(f"{self.name}.bias", (self.size,))


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norms of queries and keys before rotation: per head, or over all heads as one row."""

    query: Norm
    key: Norm
    over: Literal["head", "width"]

    def tensors(self) -> Iterator[StoredTensor]:
        yield from self.query.tensors()
        yield from self.key.tensors()


class RowScale(NamedTuple):
    """A factor of consecutive rows."""

    rows: int
    factor: float


class Part(NamedTuple):
    """Some rows of a projection, stored as a separate tensor."""

    name: str
    rows: int
    order: RowOrder | None = None
    """The order in which checkpoints store the rows, where it differs from ours."""
    scales: tuple[RowScale, ...] = ()
    """Factors of all the rows, in our order, and of their biases: applied on loading. Empty if they are ones."""


class HubPart(NamedTuple):
    """The tensor of a Hub checkpoint that has a part's rows."""

    name: str
    rows: int
    """All its rows, some of which may belong to other parts."""
    order: RowOrder | None = None
    """The numbers that the part's rows have there."""


@dataclass(frozen=True, slots=True)
class HubForm:
    """A projection as Hub checkpoints hold it, where it is read from a GGUF file that holds it otherwise. Adapters are
    made for the Hub's.
    """

    parts: tuple[HubPart, ...]
    """One for each of the projection's own."""
    columns: RowOrder | None = None
    """The numbers that its columns have there."""


@dataclass(frozen=True, slots=True)
class Projection:
    """y = x Wᵀ + b. Projections of the same input form one matrix: the concatenated rows of its parts."""

    columns: int
    parts: tuple[Part, ...]
    bias: bool = False
    transposed: bool = False
    """Whether checkpoints store the matrix as [in, out]."""
    input_scale: float = 1.0
    """Multiplies the matrix and not the bias on loading, instead of x."""
    hub: HubForm | None = None
    """None if a Hub checkpoint holds the same parts with the same rows and columns."""

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def is_scaled(self) -> bool:
        """Whether a checkpoint's numbers are multiplied on loading."""
        return self.input_scale != 1.0 or any(part.scales for part in self.parts)

    def matrix_scales(self, part: Part) -> tuple[RowScale, ...]:
        """All factors of a part's matrix."""
        if self.input_scale == 1.0:
            return part.scales
        scales = part.scales or (RowScale(part.rows, 1.0),)
        return tuple(each._replace(factor=each.factor * self.input_scale) for each in scales)

    def tensors(self) -> Iterator[StoredTensor]:
        for name, rows, order, _ in self.parts:
            shape = (self.columns, rows) if self.transposed else (rows, self.columns)
            yield StoredTensor(f"{name}.weight", shape, transposed=self.transposed, order=order)
            if self.bias:
                yield StoredTensor(f"{name}.bias", (rows,), order=order)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """How attention scores are computed: all that attention kernels need to know about a layer."""

    scale: float
    window: int | None = None
    """A token attends to itself and the window - 1 tokens before it."""
    softcap: float | None = None
    chunk: int | None = None
    """A token attends to itself and those before it from the last position that is a multiple of this."""

    def first(self, position: int) -> int:
        """The first position that the token at `position` attends to."""
        of_window = 0 if self.window is None else max(0, position + 1 - self.window)
        return of_window if self.chunk is None else max(of_window, position - position % self.chunk)


@dataclass(frozen=True, slots=True)
class Sinks:
    """A number per head: each query also attends to a key with this score, whose value is zero."""

    name: str
    heads: int

    def tensors(self) -> Iterator[StoredTensor]:
        yield StoredTensor(self.name, (self.heads,))


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Multiplies the queries at position p by 1 + strength * log(1 + floor((p + shift) / span))."""

    span: int
    strength: float
    shift: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    spec: AttentionSpec
    qkv: Projection
    """Queries, keys and values, in this order."""
    output: Projection
    rope: int | None
    """Index of the model's rope that rotates queries and keys; None for no rotation."""
    qk_norm: QKNorm | None = None
    value_norm: Norm | None = None
    """Norm of each head's values, without a weight."""
    values_are_keys: bool = False
    """Whether the keys, before norm and rotation, serve as values; `qkv` then has no values."""
    kv_layer: int | None = None
    """An earlier layer whose keys and values it reads; `qkv` then has only queries."""
    query_norm: Norm | None = None
    """Norm of each head's queries, where there are no keys."""
    sinks: Sinks | None = None
    query_scaling: QueryScaling | None = None
    gated: bool = False
    """Whether `qkv` begins with a gate for each number that the query heads attend to: its sigmoid multiplies it."""

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.output

    def tensors(self) -> Iterator[StoredTensor]:
        yield from self.qkv.tensors()
        yield from self.output.tensors()
        for part in (self.qk_norm, self.sinks, self.query_norm):
            if part is not None:
                yield from part.tensors()


class State(NamedTuple):
    """What a recurrent mixer keeps of a sequence, whatever its length."""

    inputs: tuple[int, int]
    """The latest inputs of its convolution, oldest first, in the model's number format: how many, and channels."""
    matrices: tuple[int, int, int] | None = None
    """A matrix per head, in float32: heads, rows and columns."""

    @property
    def ring(self) -> "State":
        """The same with room for one more input, so that a new one replaces none that is still read."""
        count, channels = self.inputs
        return self._replace(inputs=(count + 1, channels))

    def nbytes(self, itemsize: int) -> int:
        """`itemsize` is that of the model's number format."""
        matrices = 0 if self.matrices is None else 4 * prod(self.matrices)
        return prod(self.inputs) * itemsize + matrices


def state_bytes(states: Iterable[State | None], itemsize: int) -> int:
    """What one sequence keeps in all layers together."""
    return sum(state.nbytes(itemsize) for state in states if state is not None)


def ring_states(states: Iterable[State | None]) -> list[State | None]:
    """The same with rings for inputs, as GPUs keep them."""
    return [None if state is None else state.ring for state in states]


@dataclass(frozen=True, slots=True)
class Convolution:
    """A filter per channel over its latest inputs; before a sequence begins, they are zeros. The last tap multiplies
    the newest one.
    """

    name: str
    channels: int
    taps: int
    bias: bool = False

    @property
    def state(self) -> State:
        return State((self.taps - 1, self.channels))

    def tensors(self) -> Iterator[StoredTensor]:
        yield StoredTensor(f"{self.name}.weight", (self.channels, 1, self.taps))
        if self.bias:
            yield StoredTensor(f"{self.name}.bias", (self.channels,))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolution:
    """out = output(c * conv(b * u)), where [b | c | u] = inputs(x)."""

    inputs: Projection
    conv: Convolution
    output: Projection

    @property
    def state(self) -> State:
        return self.conv.state

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.inputs, self.output

    def tensors(self) -> Iterator[StoredTensor]:
        yield from self.inputs.tensors()
        yield from self.conv.tensors()
        yield from self.output.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """A gated delta net. Each value head has a matrix S, zeros at first, and reads a key head:

    [q | k | v | z] = inputs(x)                        z is not convolved
    q, k, v = silu(conv([q | k | v]))
    q, k = q / sqrt(sum(q²) + QK_EPS) / sqrt(key_dim), k / sqrt(sum(k²) + QK_EPS)
    [b | a] = gates(x)
    S *= exp(-exp(decay) * softplus(a + decay_bias))
    S += k (sigmoid(b) * (v - Sᵀ k))ᵀ
    out = output(norm(Sᵀ q) * silu(z))                 the norm is of each value head
    """

    QK_EPS: ClassVar[float] = 1e-6

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    head_map: Literal["grouped", "tiled"] = "grouped"
    """The key head of value head h: h // (value_heads / key_heads), or if tiled, h % key_heads."""
    inputs: Projection
    gates: Projection
    """A row per value head for b, and one for a."""
    conv: Convolution
    decay: str
    """The name of a stored number per value head, as is the next."""
    decay_bias: str
    norm: Norm
    output: Projection

    @property
    def state(self) -> State:
        return self.conv.state._replace(matrices=(self.value_heads, self.key_dim, self.value_dim))

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.inputs, self.gates, self.output

    def tensors(self) -> Iterator[StoredTensor]:
        for projection in self.projections:
            yield from projection.tensors()
        yield from self.conv.tensors()
        yield StoredTensor(self.decay, (self.value_heads,))
        yield StoredTensor(self.decay_bias, (self.value_heads,))
        yield from self.norm.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """A state-space mixer. Each head has a matrix S, zeros at first, and reads a group: head h reads group
    h // (heads / groups).

        [z | u | B | C | t] = inputs(x)                    z and t are not convolved
        u, B, C = silu(conv([u | B | C]))
        t = softplus(t + step_bias)
        S = exp(-exp(decay) * t) * S + (t * u) Bᵀ
        y = S C + skip * u
        out = output(norm(y * silu(z)))
    """

    heads: int
    head_dim: int
    state_size: int
    groups: int
    inputs: Projection
    conv: Convolution
    decay: str
    """The name of a stored number per head, as are the next two."""
    step_bias: str
    skip: str
    norm: Norm | None
    """None if y * silu(z) is not normed."""
    norm_groups: int = 1
    """Equal parts of a row that are normed each by itself."""
    gates_normed: bool = False
    """Whether the gate multiplies what is normed: norm(y) * silu(z)."""
    output: Projection

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def state(self) -> State:
        return self.conv.state._replace(matrices=(self.heads, self.head_dim, self.state_size))

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.inputs, self.output

    def tensors(self) -> Iterator[StoredTensor]:
        yield from self.inputs.tensors()
        yield from self.conv.tensors()
        for name in (self.decay, self.step_bias, self.skip):
            yield StoredTensor(name, (self.heads,))
        if self.norm is not None:
            yield from self.norm.tensors()
        yield from self.output.tensors()


Recurrent = GatedDelta | Mamba2 | ShortConvolution
"""Mixers that keep a state of fixed size instead of keys and values. They have `state` and `tensors`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerPair:
    """out = attention(x) + recurrent(x)"""

    attention: Attention
    recurrent: Recurrent

    @property
    def projections(self) -> tuple[Projection, ...]:
        return *self.attention.projections, *self.recurrent.projections

    def tensors(self) -> Iterator[StoredTensor]:
        yield from self.attention.tensors()
        yield from self.recurrent.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """down(act(up(x))), or if gated, down(act(gate(x)) * up(x))."""

    up: Projection
    """If gated, its first half is the gate."""
    down: Projection
    activation: Activation
    gated: bool

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.up, self.down

    @property
    def width(self) -> int:
        """The longest row that it computes per token."""
        return self.down.columns

    def tensors(self) -> Iterator[StoredTensor]:
        yield from self.up.tensors()
        yield from self.down.tensors()


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One matrix per expert, all of the same shape."""

    experts: int
    columns: int
    parts: tuple[Part, ...]
    """Rows of each matrix, stored as separate tensors. In a name, `{}` stands for the expert's number; a tensor whose
    name has none holds the rows of all experts, [experts, rows, columns].
    """
    weight: str = ".weight"
    """The ending of tensors' names."""
    bias: str | None = None
    """The same for biases; None if there are none."""
    transposed: bool = False
    """Whether checkpoints store each matrix as [in, out]."""

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def weight_names(self, part: Part) -> list[str]:
        """One for each expert, or one for all."""
        return self._names(part, self.weight)

    def bias_names(self, part: Part) -> list[str]:
        return [] if self.bias is None else self._names(part, self.bias)

    def _names(self, part: Part, ending: str) -> list[str]:
        if is_stacked(part):
            return [f"{part.name}{ending}"]
        return [f"{part.name.format(expert)}{ending}" for expert in range(self.experts)]

    def tensors(self) -> Iterator[StoredTensor]:
        for part in self.parts:
            stacked, order = is_stacked(part), part.order
            stack = (self.experts,) if stacked else ()
            shape = (self.columns, part.rows) if self.transposed else (part.rows, self.columns)
            for name in self.weight_names(part):
                yield StoredTensor(name, stack + shape, transposed=self.transposed, order=order, stacked=stacked)
            for name in self.bias_names(part):
                yield StoredTensor(name, (*stack, part.rows), order=order, stacked=stacked)


def is_stacked(part: Part) -> bool:
    """Whether one tensor holds this part of all experts."""
    return "{}" not in part.name


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidRouting:
    """Experts are chosen by the sigmoids of the router's logits, and these are their weights."""

    choice_bias: str | None
    """The name of a stored number per expert, which is added to its sigmoid for the choice alone."""
    eps: float
    """Added to the sum of the chosen experts' weights, by which they are divided if they are normalised."""
    scale: float = 1.0
    """Multiplies the weights."""
    exact: bool = False
    """Whether the router computes in float32, whatever the model's number format."""

    def tensors(self, experts: int) -> Iterator[StoredTensor]:
        if self.choice_bias is not None:
            yield StoredTensor(self.choice_bias, (experts,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts: each token's row goes through the few MLPs for which the router's logits are highest,
    and their weighted outputs are summed. Among equal logits, the first expert's counts as higher.
    """

    router: Projection
    """A row per expert."""
    up: ExpertMatrices
    """If gated, its first half is the gate."""
    down: ExpertMatrices
    activation: Activation
    gated: bool = True
    chosen: int
    """Experts per token."""
    normalized: bool
    """Whether a token's weights add up to one: they are the softmax of its chosen experts' logits. Otherwise they are
    those experts' part of the softmax over all.
    """
    sigmoid: SigmoidRouting | None = None
    """How experts are chosen and weighted if not by softmax; `normalized` then divides weights by their sum."""
    scales_inputs: bool = False
    """Whether a token's weights are the sigmoids of its chosen experts' logits, and multiply what the experts read
    instead of what they compute.
    """
    weight_scales: str | None = None
    """The name of a stored number per expert, which multiplies its weights."""
    shared: MLP | None = None
    """An MLP that every token goes through as well."""
    shared_gate: Projection | None = None
    """A single row, whose product's sigmoid multiplies the shared MLP's output."""
    on_cpu: bool = False
    """Whether the experts' matrices are not on the model's device but on the CPU beside it: see `expert_layers`."""

    @property
    def count(self) -> int:
        return self.up.experts

    @property
    def whole_router(self) -> Projection:
        """The router as one matrix: a row per expert, then the row of the shared MLP's gate, if any."""
        if self.shared_gate is None:
            return self.router
        assert self.router.bias == self.shared_gate.bias
        return replace(self.router, parts=(*self.router.parts, *self.shared_gate.parts))

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The projections that all tokens use, except the router."""
        return () if self.shared is None else self.shared.projections

    @property
    def width(self) -> int:
        """The longest row that it computes per token: the chosen experts' rows one after the other."""
        shared = 0 if self.shared is None else self.shared.width
        return max(self.chosen * max(self.down.columns, self.up.columns), shared)

    def tensors(self) -> Iterator[StoredTensor]:
        """Those on the model's device."""
        yield from self.router.tensors()
        if self.sigmoid is not None:
            yield from self.sigmoid.tensors(self.count)
        if not self.on_cpu:
            yield from self.up.tensors()
            yield from self.down.tensors()
        if self.weight_scales is not None:
            yield StoredTensor(self.weight_scales, (self.count,))
        if self.shared is not None:
            yield from self.shared.tensors()
        if self.shared_gate is not None:
            yield from self.shared_gate.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class SideExperts:
    """Experts beside a layer's MLP. With them, `mlp_post_norm` reads

        mlp_norm(mlp(…)) + post_norm(experts(norm(x)))

    and the router reads x, scaled to unit root mean square, then by a weight and by `router_scale`.
    """

    experts: Experts
    mlp_norm: Norm
    norm: Norm
    post_norm: Norm
    router_weight: str
    """The weight's name."""
    router_scale: float

    def tensors(self) -> Iterator[StoredTensor]:
        yield from self.experts.tensors()
        for norm in (self.mlp_norm, self.norm, self.post_norm):
            yield from norm.tensors()
        yield StoredTensor(self.router_weight, (self.norm.size,))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """x += norm(output(act(gate(x)) * input)), with a layer's part of `LayerInputs`, after its MLP."""

    gate: Projection
    output: Projection
    norm: Norm
    activation: Activation

    def tensors(self) -> Iterator[StoredTensor]:
        yield from self.gate.tensors()
        yield from self.output.tensors()
        yield from self.norm.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """An additional input for each layer, where x is the token's embedding:

        scale * (norm(projection_scale * projection(x)) + table_scale * table(id))

    Projection and table hold the parts of all layers in order.
    """

    table: Part
    """A row per token."""
    width: int
    """Width of one layer's part."""
    projection: Projection
    norm: Norm
    table_scale: float
    projection_scale: float
    scale: float

    def tensors(self) -> Iterator[StoredTensor]:
        yield StoredTensor(f"{self.table.name}.weight", (self.table.rows, self.projection.rows))
        yield from self.projection.tensors()
        yield from self.norm.tensors()


Mixer = Attention | Recurrent | MixerPair
"""What mixes a layer's tokens. Another kind is another class in this union; readers that do not run it refuse it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    mixer: Mixer | None
    """None for a layer that only has an MLP."""
    mlp: MLP | Experts | None
    """None for a layer that only has a mixer."""
    attention_norm: Norm | None = None
    """Before and after the mixer, whatever its kind."""
    attention_post_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    residual_scale: float = 1.0
    """Multiplies the outputs of attention and MLP before they are added to the residual stream."""
    parallel: bool = False
    """Whether the MLP reads the same input as attention, without attention's output added."""
    side: SideExperts | None = None
    input: LayerInput | None = None
    stream_scale: str | None = None
    """The name of a stored number that multiplies the stream after the layer."""

    @property
    def attention(self) -> Attention:
        """The mixer, for readers that know no other kind."""
        assert isinstance(self.mixer, Attention)
        return self.mixer

    @property
    def attends(self) -> Attention | None:
        """The mixer, or the one of a pair, that keeps keys and values."""
        mixer = self.mixer.attention if isinstance(self.mixer, MixerPair) else self.mixer
        return mixer if isinstance(mixer, Attention) else None

    @property
    def recurrent(self) -> Recurrent | None:
        """The mixer, or the one of a pair, that keeps a state."""
        mixer = self.mixer.recurrent if isinstance(self.mixer, MixerPair) else self.mixer
        return None if isinstance(mixer, Attention) else mixer

    @property
    def norms(self) -> tuple[Norm, ...]:
        """The layer's norms, each once: attention and MLP may share one."""
        norms = (self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm)
        return tuple(dict.fromkeys(norm for norm in norms if norm is not None))

    @property
    def experts(self) -> Experts | None:
        """The experts in place of the MLP, or beside it."""
        if isinstance(self.mlp, Experts):
            return self.mlp
        return None if self.side is None else self.side.experts

    @property
    def dense(self) -> MLP:
        """The MLP of a layer that is known to have no experts."""
        assert isinstance(self.mlp, MLP)
        return self.mlp

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The mixer's, such as queries, keys and values, and attention's output; the MLP's up and down. Adapters may
        change these.
        """
        return tuple(each for part in (self.mixer, self.mlp) if part is not None for each in part.projections)

    def tensors(self) -> Iterator[StoredTensor]:
        for part in (self.mixer, self.mlp):
            if part is not None:
                yield from part.tensors()
        for norm in self.norms:
            yield from norm.tensors()
        if self.side is not None:
            yield from self.side.tensors()
        if self.input is not None:
            yield from self.input.tensors()
        if self.stream_scale is not None:
            yield StoredTensor(self.stream_scale, (1,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """A row per token, scaled; with learned positions, plus a row per position."""

    name: str
    scale: float = 1.0
    """Rounded to the weights' number format before use, as in training."""
    positions: Part | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    name: str | None
    """None if the head is tied to the embedding."""
    scale: float = 1.0
    """Multiplies the logits."""
    softcap: float | None = None

    @property
    def is_tied(self) -> bool:
        return self.name is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer."""

    shape: ModelShape
    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: Norm
    head: Head | None
    """None for a backbone that was saved without a head, like an embedding model's."""
    ropes: tuple[RopeSettings, ...] = ()
    layer_inputs: LayerInputs | None = None
    backbone: str = "model"
    """The family's prefix of all tensor names but the head's."""
    folded: bool = False
    """Whether matrices are stored multiplied by factors that are not known, so that no adapter fits."""

    @property
    def widest(self) -> int:
        """The longest row that a layer computes per token."""
        widths = [layer.mlp.width for layer in self.layers if layer.mlp is not None]
        widths += [layer.attends.output.columns for layer in self.layers if layer.attends is not None]
        return max(widths + [layer.recurrent.inputs.rows for layer in self.layers if layer.recurrent is not None])

    @property
    def states(self) -> tuple[State | None, ...]:
        """What each layer keeps of a sequence beside keys and values; empty if none keeps anything."""
        found = tuple(None if layer.recurrent is None else layer.recurrent.state for layer in self.layers)
        return found if any(found) else ()

    @property
    def row_scales(self) -> Mapping[str, tuple[RowScale, ...]]:
        """Factors of tensors' rows that are applied on loading, by the tensors' names."""
        projections = [each for layer in self.layers for each in layer.projections if each.is_scaled]
        matrices = {f"{part.name}.weight": each.matrix_scales(part) for each in projections for part in each.parts}
        biases = {f"{part.name}.bias": part.scales for each in projections if each.bias for part in each.parts}
        return {name: scales for name, scales in (matrices | biases).items() if scales}

    def rope_head_dim(self, rope: int) -> int:
        """The width of the heads that one of the ropes rotates."""
        mixers = enumerate(layer.attends for layer in self.layers)
        rotated = (index for index, attention in mixers if attention is not None and attention.rope == rope)
        return self.shape.of_layer(next(rotated, 0)).head_dim

    @property
    def expert_width(self) -> int:
        """Numbers per token in the chosen experts' rows: what they compute between their matrices, and after."""
        mixtures = [layer.experts for layer in self.layers if layer.experts is not None]
        return max((each.chosen * (each.down.columns + each.down.rows) for each in mixtures), default=0)

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)

    @property
    def expert_names(self) -> frozenset[str]:
        """The matrices of experts and routers, which adapters cannot change."""
        mixtures = [layer.experts for layer in self.layers if layer.experts is not None]
        changeable = {tensor.name for each in mixtures for own in each.projections for tensor in own.tensors()}
        whole = (replace(each, on_cpu=False) for each in mixtures)
        names = {tensor.name for each in whole for tensor in each.tensors()} - changeable
        return frozenset(name.removesuffix(".weight") for name in names)

    @property
    def exact_names(self) -> frozenset[str]:
        """The tensors of small matrices that are never quantised, because they say how fast states decay."""
        deltas = [layer.recurrent for layer in self.layers if isinstance(layer.recurrent, GatedDelta)]
        return frozenset(f"{part.name}.weight" for each in deltas for part in each.gates.parts)

    @property
    def idle_weights(self) -> int:
        """Number of weights in the experts that a token does not use."""
        mixtures = [layer.experts for layer in self.layers if layer.experts is not None]
        matrices = [(each.count - each.chosen, own) for each in mixtures for own in (each.up, each.down)]
        return sum(idle * own.rows * own.columns for idle, own in matrices)

    @property
    def single_layout(self) -> frozenset[str]:
        """Tensors that never get a second layout, with and without the backbone's prefix: stacks of experts, and rows
        that are looked up.
        """
        names = [f"{name}.weight" for name in self.expert_names]
        if self.layer_inputs is not None:
            names.append(f"{self.layer_inputs.table.name}.weight")
        return frozenset(names).union(name.removeprefix(f"{self.backbone}.") for name in names)

    def tensors(self) -> Iterator[StoredTensor]:
        """All tensors that a checkpoint must contain."""
        matrix = (self.shape.vocab_size, self.shape.hidden_size)
        yield StoredTensor(f"{self.embedding.name}.weight", matrix)
        if self.embedding.positions is not None:
            positions = self.embedding.positions
            yield StoredTensor(f"{positions.name}.weight", (positions.rows, self.shape.hidden_size))
        if self.layer_inputs is not None:
            yield from self.layer_inputs.tensors()
        for layer in self.layers:
            yield from layer.tensors()
        yield from self.norm.tensors()
        if self.head is not None and self.head.name is not None:
            yield StoredTensor(f"{self.head.name}.weight", matrix)


@dataclass(frozen=True, slots=True, kw_only=True)
class HrmText:
    """HRM-Text, which does not fit `Architecture`: its layers run several times per token, its norms have no weights,
    and a gate scales attention's output.
    """

    shape: ModelShape
    """Counts a layer per run, because each run has its own keys and values."""
    depth: int
    """Layers per stack."""
    high_cycles: int
    low_cycles: int
    inner_size: int
    activation: Activation
    eps: float
    embedding_scale: float
    attention_bias: bool
    mlp_bias: bool
    rope: RopeSettings
    head: Head | None
    backbone: str = "model"

    layers: ClassVar[tuple[Layer, ...]] = ()
    """Empty: its layers cannot be described one by one."""
    has_experts: ClassVar[bool] = False
    expert_width: ClassVar[int] = 0
    idle_weights: ClassVar[int] = 0
    single_layout: ClassVar[frozenset[str]] = frozenset()
    exact_names: ClassVar[frozenset[str]] = frozenset()
    states: ClassVar[tuple[State | None, ...]] = ()

    @property
    def widest(self) -> int:
        """The longest row that a layer computes per token: gates, queries, keys and values."""
        return max(self.inner_size, 4 * self.shape.num_heads * self.shape.head_dim)
