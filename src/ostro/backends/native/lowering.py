"""Translates a model's description into the native core's steps and packed tensors. Knows no family by name.

Imports neither torch nor numpy: weights go by name to a sink (`backends.native.sinks`).
"""

import logging
import time
from ctypes import c_float

from ostro.backends.native.encoder_lowering import EncoderLowering
from ostro.backends.native.expert_steps import ExpertLowering, ExpertSteps, chosen_of
from ostro.backends.native.layer_steps import BUFFER_COLS, Read
from ostro.backends.native.recurrent_steps import RecurrentSteps
from ostro.backends.native.sinks import Sink, padded
from ostro.backends.native.support import NotNative
from ostro.kernels.cpu.library import After, Op
from ostro.kernels.cpu.program_spec import BufferSpec, ProgramSpec
from ostro.models.architecture import (
    Architecture,
    Attention,
    Experts,
    Layer,
    MixerPair,
    Norm,
    Part,
    Projection,
    QKNorm,
    Recurrent,
)
from ostro.models.encoder import Encoder
from ostro.models.expert_layers import ExpertLayers, mixtures_of

_NO_ROTATION = -1
_LOG_SECONDS = 10.0

_log = logging.getLogger(__name__)


def lowered(described: Architecture | Encoder | ExpertLayers, sink: Sink, *, bits: int) -> ProgramSpec:
    """The steps of a model accepted by `native_architecture`, whose weights go to the sink."""
    if isinstance(described, ExpertLayers):
        return ExpertLowering(described, sink, bits=bits).program()
    if isinstance(described, Encoder):
        return EncoderLowering(described, sink, bits=bits).program()
    return Lowering(described, sink, bits=bits).program()


class Lowering(ExpertSteps, RecurrentSteps):
    """Further buffers: the rows whose output is requested, their logits. With experts also the router's logits, and
    rows per token and expert: inner states, outputs.
    """

    _ASKED, _LOGITS, _ROUTED, _SLOTS, _SLOTS_OUT = range(5, 10)

    def __init__(self, described: Architecture, sink: Sink, *, bits: int) -> None:
        """Layers' floats are packed in this many bits; 0 keeps every tensor's own precision."""
        super().__init__(described.shape, sink, bits=bits)
        self._model = described
        self._num_attending = 0
        """Layers with keys and values so far."""

    def program(self) -> ProgramSpec:
        model, shape = self._model, self._model.shape
        embedding = self._embed()
        rotations = [self._sink.rotation(rope, shape) for rope in model.ropes]
        inner = self._panel
        told = time.monotonic()
        for number, layer in enumerate(model.layers):
            if time.monotonic() - told > _LOG_SECONDS:
                told = time.monotonic()
                _log.info("packing the weights: layer %d of %d", number, len(model.layers))
            inner = max(inner, self._layer(layer))
        head_step = len(self._steps)
        self._add(op=Op.GATHER, input=self._STREAM, out=self._ASKED, cols=shape.hidden_size)
        self._norm(model.norm, self._ASKED, self._ASKED)
        logits_step = len(self._steps)
        self._head(embedding)
        buffers = self._layer_buffers(inner)
        buffers.append(BufferSpec(cols=padded(shape.hidden_size, BUFFER_COLS), asked=True))
        buffers.append(BufferSpec(cols=padded(shape.vocab_size if model.head else 1, BUFFER_COLS), asked=True))
        buffers += self._expert_buffers()
        return ProgramSpec(
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_layers=max(1, self._num_attending),
            max_seq_len=shape.max_seq_len,
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            buffers=buffers,
            rotations=rotations,
            steps=self._steps,
            hidden=self._ASKED,
            logits=self._LOGITS if model.head else None,
            head_step=head_step,
            logits_step=logits_step,
            tensors=self._tensors,
            state_floats=self._state_floats,
            draft_floats=self._draft_floats,
            precision=self._precision,
        )

    def _expert_buffers(self) -> list[BufferSpec]:
        mixtures = mixtures_of(self._model)
        if not mixtures:
            return []
        logits = max(padded(each.count, self._panel) for each in mixtures)
        return [BufferSpec(cols=padded(logits, BUFFER_COLS)), *self._slot_buffers(mixtures)]

    def _embed(self) -> int:
        embedding, shape = self._model.embedding, self._model.shape
        matrix = self._pack([Part(embedding.name, shape.vocab_size)], shape.hidden_size, bits=self._token_bits)
        # Rounded to float32, in which the embedding is computed.
        scale = c_float(embedding.scale).value
        self._add(op=Op.EMBED, out=self._STREAM, matrix=matrix, cols=shape.hidden_size, scale=scale)
        if embedding.positions is not None:
            positions = self._pack([embedding.positions], shape.hidden_size, bits=0)
            self._add(op=Op.POSITION, out=self._BESIDE, matrix=positions, cols=shape.hidden_size)
            self._add_beside(1.0)
        return matrix

    def _layer(self, layer: Layer) -> int:
        """Adds the layer's steps; returns the width of its inner states."""
        mixer, scale, inner = layer.mixer, layer.residual_scale, 0
        if layer.parallel and (mixer is None or isinstance(mixer, MixerPair)):
            raise NotNative("its layers' MLPs are beside two mixers, or none")
        if isinstance(mixer, MixerPair):
            self._pair(mixer, self._normed_stream(layer.attention_norm))
            self._add_beside_to_stream(layer.attention_post_norm, scale)
        elif mixer is not None:
            self._mix(mixer, self._normed_stream(layer.attention_norm))
            if layer.parallel:
                inner = self._up(layer.dense, layer.mlp_norm)
            self._add_to_stream(mixer.output, self._ATTENDED, layer.attention_post_norm, scale)
        if layer.mlp is None:
            return inner
        if isinstance(layer.mlp, Experts):
            return self._experts(layer.mlp, layer.mlp_norm, layer.mlp_post_norm, scale)
        if not layer.parallel:
            inner = self._up(layer.dense, layer.mlp_norm)
        self._add_to_stream(layer.dense.down, self._INNER, layer.mlp_post_norm, scale)
        return inner

    def _mix(self, mixer: Attention | Recurrent, read: Read) -> None:
        if isinstance(mixer, Attention):
            self._attention(mixer, read)
        else:
            self._recurrent(mixer, read)

    def _pair(self, pair: MixerPair, read: Read) -> None:
        """The sum of both is beside the stream, where a layer norm's result would be."""
        if read.input == self._BESIDE:
            raise NotNative("its layers' two mixers read a layer norm")
        for mixer, after in ((pair.attention, After.STORE), (pair.recurrent, After.ADD)):
            self._mix(mixer, read)
            self._product(mixer.output, self._ATTENDED, self._BESIDE, after=after)

    def _experts(self, mixture: Experts, norm: Norm | None, post_norm: Norm | None, scale: float) -> int:
        """Adds a mixture's steps; returns the width of its shared MLP's inner states, if it has one."""
        read, width = self._normed_stream(norm), 0
        which = chosen_of(mixture)
        # Which experts are chosen changes with the last bits of the router.
        self._product(mixture.router, read, self._ROUTED, bits=0)
        self._add(op=Op.ROUTE, input=self._ROUTED, normalized=mixture.normalized, **self._routing(mixture), **which)
        self._multiply(mixture, read, self._SLOTS, self._SLOTS_OUT)
        # The shared MLP reads the stream before anything is added to it.
        if mixture.shared is not None:
            width = self._up(mixture.shared, norm)
            if mixture.shared_gate is not None:
                self._product(mixture.shared_gate, read, self._ROUTED, bits=0)
                self._add(op=Op.GATE, input=self._ROUTED, out=self._INNER, cols=width)
        added = {"input": self._SLOTS_OUT, "cols": self._model.shape.hidden_size}
        if post_norm is None:
            self._add(op=Op.COMBINE, out=self._STREAM, scale=scale, after=After.ADD, **added, **which)
            if mixture.shared is not None:
                self._add_to_stream(mixture.shared.down, self._INNER, None, scale)
            return width
        self._add(op=Op.COMBINE, out=self._BESIDE, **added, **which)
        if mixture.shared is not None:
            self._product(mixture.shared.down, self._INNER, self._BESIDE, after=After.ADD)
        self._norm(post_norm, self._BESIDE, self._BESIDE)
        self._add_beside(scale)
        return width

    def _routing(self, mixture: Experts) -> dict[str, object]:
        """What says that experts are chosen by sigmoids, if they are."""
        found = mixture.sigmoid
        if found is None:
            return {}
        biases = None if found.choice_bias is None else self._vector(found.choice_bias, mixture.count)
        # Rounded to float32, in which weights are computed.
        numbers = {"eps": c_float(found.eps).value, "scale": c_float(found.scale).value}
        return {"after": After.SIGMOID, "weights": biases, **numbers}

    def _add_to_stream(self, projection: Projection, source: int, norm: Norm | None, scale: float) -> None:
        if norm is None and scale == 1.0:
            self._product(projection, source, self._STREAM, after=After.ADD)
            return
        self._product(projection, source, self._BESIDE)
        self._add_beside_to_stream(norm, scale)

    def _add_beside_to_stream(self, norm: Norm | None, scale: float) -> None:
        if norm is not None and norm.kind == "rms" and scale == 1.0:
            self._norm(norm, self._BESIDE, self._STREAM, after=After.ADD)
            return
        if norm is not None:
            self._norm(norm, self._BESIDE, self._BESIDE)
        self._add_beside(scale)

    def _attention(self, attention: Attention, read: Read) -> None:
        spec, qk_norm, sinks = attention.spec, attention.qk_norm, attention.sinks
        width = attention.output.columns
        first = width if attention.gated else 0
        self._queries_keys_values(attention.qkv, read)
        self._widen(self._QKV, attention.qkv.rows)
        if qk_norm is not None and qk_norm.over == "width":
            self._norm(qk_norm.query, self._QKV, self._QKV, at=first)
            self._norm(qk_norm.key, self._QKV, self._QKV, at=first + qk_norm.query.size)
            qk_norm = None
        self._add(
            op=Op.ATTEND,
            input=self._QKV,
            in_at=first,
            out=self._ATTENDED,
            layer=self._num_attending,
            rotation=_NO_ROTATION if attention.rope is None else attention.rope,
            window=spec.window or 0,
            scale=spec.scale,
            cap=spec.softcap or 0.0,
            norm=None if qk_norm is None else self._head_weights(qk_norm),
            eps=0.0 if qk_norm is None else qk_norm.query.eps,
            bias=None if sinks is None else self._vector(sinks.name, sinks.heads),
        )
        self._num_attending += 1
        if attention.gated:
            self._multiply_by(self._QKV, 0, width, After.SIGMOID)

    def _head(self, embedding: int) -> None:
        head, shape = self._model.head, self._model.shape
        if head is None:
            return
        matrix = embedding
        if head.name is not None:
            matrix = self._pack([Part(head.name, shape.vocab_size)], shape.hidden_size, bits=self._token_bits)
        self._add(op=Op.LINEAR, input=self._ASKED, out=self._LOGITS, cols=shape.hidden_size, matrix=matrix)
        width = padded(shape.vocab_size, self._panel)
        if head.scale != 1.0:
            self._add(op=Op.SCALE, input=self._LOGITS, out=self._LOGITS, cols=width, scale=head.scale)
        if head.softcap is not None:
            self._add(op=Op.SOFTCAP, out=self._LOGITS, cols=width, cap=head.softcap)
        self._add(op=Op.SAMPLE, input=self._LOGITS, cols=shape.vocab_size)

    def _head_weights(self, norm: QKNorm) -> int:
        """A row per query and key head."""
        shape = self._model.shape
        counts = [(f"{norm.query.name}.weight", shape.num_heads), (f"{norm.key.name}.weight", shape.num_kv_heads)]
        return self._sink.vector(counts, (shape.num_heads + shape.num_kv_heads) * shape.head_dim)
