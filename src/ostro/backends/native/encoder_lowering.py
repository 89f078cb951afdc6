"""Translates an encoder's description into the native core's steps and packed tensors. Knows no family by name.

Imports neither torch nor numpy: weights go by name to a sink (`backends.native.sinks`).
"""

from ostro.backends.native.layer_steps import BUFFER_COLS, LayerSteps
from ostro.backends.native.sinks import Sink, padded
from ostro.backends.native.support import ACTIVATIONS
from ostro.kernels.cpu.library import After, Op
from ostro.kernels.cpu.program_spec import BufferSpec, ProgramSpec
from ostro.models.architecture import Part
from ostro.models.encoder import Classifier, Encoder, EncoderLayer


class EncoderLowering(LayerSteps):
    """Further buffers, with a row per text: pooled states; for a classifier, its dense layer's outputs and its own."""

    _POOLED, _DENSE, _LABELS = range(5, 8)

    def __init__(self, described: Encoder, sink: Sink, *, bits: int) -> None:
        """Layers' floats are packed in this many bits; 0 keeps every tensor's own precision."""
        super().__init__(described.shape, sink, bits=bits)
        self._model = described

    def program(self) -> ProgramSpec:
        model, shape = self._model, self._shape
        self._embed()
        rotations = [self._sink.rotation(rope, shape) for rope in model.ropes]
        inner = max(self._layer(layer) for layer in model.layers)
        if model.norm is not None:
            self._norm(model.norm, self._STREAM, self._STREAM)
        head_step = len(self._steps)
        self._add(op=Op.GATHER, input=self._STREAM, out=self._POOLED, cols=shape.hidden_size)
        logits_step = len(self._steps)
        buffers = self._layer_buffers(inner)
        buffers.append(BufferSpec(cols=padded(shape.hidden_size, BUFFER_COLS), asked=True))
        if model.head is not None:
            buffers += self._classify(model.head)
        return ProgramSpec(
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_layers=shape.num_layers,
            max_seq_len=shape.max_seq_len,
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            labels=None if model.head is None else model.head.num_labels,
            buffers=buffers,
            rotations=rotations,
            steps=self._steps,
            states=self._STREAM,
            hidden=self._POOLED,
            logits=None if model.head is None else self._LABELS,
            head_step=head_step,
            logits_step=logits_step,
            tensors=self._tensors,
            precision=self._precision,
        )

    def _embed(self) -> None:
        embedding, shape = self._model.embedding, self._shape
        words = self._pack([Part(embedding.words, shape.vocab_size)], shape.hidden_size, bits=self._token_bits)
        self._add(op=Op.EMBED, out=self._STREAM, matrix=words, cols=shape.hidden_size)
        for op, table in ((Op.TYPE, embedding.types), (Op.POSITION, embedding.positions)):
            if table is not None:
                matrix = self._pack([table], shape.hidden_size, bits=0)
                self._add(op=op, out=self._BESIDE, matrix=matrix, cols=shape.hidden_size)
                self._add_beside(1.0)
        self._norm(embedding.norm, self._STREAM, self._STREAM)

    def _layer(self, layer: EncoderLayer) -> int:
        """Adds the layer's steps; returns the width of its inner states."""
        first = not layer.norms_last
        self._queries_keys_values(layer.qkv, self._normed_stream(layer.attention_norm if first else None))
        self._add(
            op=Op.ATTEND_TEXT,
            input=self._QKV,
            out=self._ATTENDED,
            rotation=-1 if layer.rope is None else layer.rope,
            window=0 if layer.reach is None else layer.reach + 1,
            scale=self._shape.head_dim**-0.5,
        )
        self._product(layer.output, self._ATTENDED, self._STREAM, after=After.ADD)
        if layer.norms_last and layer.attention_norm is not None:
            self._norm(layer.attention_norm, self._STREAM, self._STREAM)
        inner = self._up(layer.mlp, layer.mlp_norm if first else None)
        self._product(layer.mlp.down, self._INNER, self._STREAM, after=After.ADD)
        if layer.norms_last:
            self._norm(layer.mlp_norm, self._STREAM, self._STREAM)
        return inner

    def _classify(self, head: Classifier) -> list[BufferSpec]:
        """Adds the head's steps; returns its buffers. Its few weights keep their precision."""
        self._product(head.dense, self._POOLED, self._DENSE, bits=0)
        width = padded(head.dense.rows, self._panel)
        if head.activation == "tanh":
            self._add(op=Op.SOFTCAP, out=self._DENSE, cols=width, cap=1.0)
        else:
            self._add(op=Op.APPLY, out=self._DENSE, cols=width, after=ACTIVATIONS[head.activation])
        if head.norm is not None:
            self._norm(head.norm, self._DENSE, self._DENSE)
        self._product(head.output, self._DENSE, self._LABELS, bits=0)
        return [BufferSpec(cols=padded(rows, BUFFER_COLS), asked=True) for rows in (head.dense.rows, head.num_labels)]
