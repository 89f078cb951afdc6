"""From a model's structure and a checkpoint's tensors to a packed file with the model's step as a list of operations.

Knows the layers that families are made of, and refuses what is not among them; knows no family by name. Nothing else of
the native path needs torch: where the packed file is there already, nothing here is called.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import byref
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from ostro.errors import BadCheckpoint
from ostro.kernels.cpu.library import HEAD_MULTIPLE, MOST_HEAD, After, CMatrix, Op, library
from ostro.kernels.cpu.packed_file import Floats, PackedLayout, PackedWriter
from ostro.kernels.cpu.program import BufferSpec, ProgramSpec, RotationSpec, StepSpec
from ostro.models.base import Model
from ostro.models.decoder import Backbone, CausalLM, PreNormLayer
from ostro.models.gemma import SandwichLayer, ScaledEmbedding
from ostro.models.layers import Attention, Embedding, FusedLinear, GatedMLP, HeadNorm, Linear, RMSNorm, gelu_tanh
from ostro.models.loading import REDUNDANT, Weighted, not_finite
from ostro.models.rope import Rotary
from ostro.weights.checkpoint import Checkpoint
from ostro.weights.gguf_checkpoint import GgufCheckpoint
from ostro.weights.gguf_header import GGML_TYPES
from ostro.weights.gguf_model import Undo

_LOG_SECONDS = 10.0

_log = logging.getLogger(__name__)

_FLOATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
"""GGUF's numbers of what safetensors hold."""
_ACTIVATIONS = {F.silu: After.SILU, gelu_tanh: After.GELU}

Addresses = npt.NDArray[np.uint64]


class NotNative(Exception):
    """Why a model cannot run natively."""


class WrongPanel(NotNative):
    """Why it cannot with panels so wide; with others it may."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor where it lies: rows of GGUF's type `kind`, by their addresses."""

    kind: int
    rows: Addresses
    cols: int
    memory: object
    """What the addresses point into."""

    @property
    def is_float(self) -> bool:
        return self.kind in _FLOATS.values()


def check(model: Model, panel: int) -> None:
    """Raises NotNative where the structure has parts that the native core does not know."""
    if type(model) is not CausalLM or type(backbone := model.get_submodule(model.backbone_name)) is not Backbone:
        raise NotNative("its family has no native kernels")
    shape = model.shape
    if shape.head_dim % HEAD_MULTIPLE or shape.head_dim > MOST_HEAD:
        raise NotNative(f"its heads are {shape.head_dim} wide, not a multiple of {HEAD_MULTIPLE} up to {MOST_HEAD}")
    if shape.hidden_size % panel:
        raise WrongPanel(f"its hidden size, {shape.hidden_size}, is no multiple of {panel}")
    for layer in backbone.layers:
        if type(layer) not in (PreNormLayer, SandwichLayer):
            raise NotNative("its layers have no native kernels")
        if type(layer.self_attn) is not Attention or not isinstance(layer.self_attn.qk_norm, HeadNorm | None):
            raise NotNative("its attention has no native kernel")
        if type(layer.mlp) is not GatedMLP or layer.mlp.act not in _ACTIVATIONS:
            raise NotNative("its activation has no native kernel")


def lower(
    model: Model,
    checkpoint: Checkpoint,
    writer: PackedWriter,
    *,
    bits: int,
    make_room: Callable[[int], None] = lambda nbytes: None,
) -> ProgramSpec:
    """Packs the weights and lists the steps. `model` needs no weights of its own; `check` has passed it.

    `make_room` is told how many bytes the file will take before any is written.
    """
    assert isinstance(model, CausalLM)
    tensors, layout = _Tensors(model, checkpoint), PackedLayout(writer.panel)
    _Lowering(model, tensors, layout, bits).program()
    make_room(layout.nbytes)
    writer.allocate(layout.nbytes)
    return _Lowering(model, tensors, writer, bits).program()


class _Tensors:
    """A checkpoint's tensors by their names in the model."""

    def __init__(self, model: CausalLM, checkpoint: Checkpoint) -> None:
        self._matrices: dict[str, Stored] = {}
        self._vectors: dict[str, Floats] = {}
        places = {
            name: place
            for path, module in model.named_modules()
            if isinstance(module, Weighted)
            for name, place in module.places(path).items()
        }
        for given, tensor in _stored(checkpoint):
            name = given if given in places else f"{model.backbone_name}.{given}"
            place = places.pop(name, None)
            if place is None:
                if REDUNDANT.fullmatch(given):
                    continue
                raise BadCheckpoint(
                    f"The checkpoint holds a tensor {given!r} that its architecture has no place for, or holds it "
                    "twice; its config may belong to another model."
                )
            shape = (len(tensor.rows), tensor.cols) if isinstance(tensor, Stored) else tensor.shape
            if tuple(place.shape) != tuple(shape):
                raise BadCheckpoint(
                    f"Tensor {given!r} has shape {tuple(shape)}, but its config asks for {tuple(place.shape)}; "
                    "they may belong to different models."
                )
            if isinstance(tensor, Stored):
                self._matrices[name] = tensor
            elif not np.isfinite(tensor).all():
                raise not_finite(given)
            else:
                self._vectors[name] = tensor + np.float32(place.offset)
        if places:
            some = ", ".join(sorted(places)[:3]) + (", …" if len(places) > 3 else "")
            raise BadCheckpoint(f"The checkpoint lacks {len(places)} tensors ({some}); fetch the model again.")

    @property
    def formats(self) -> set[tuple[int, int]]:
        """Types and widths of all matrices."""
        return {(each.kind, each.cols) for each in self._matrices.values()}

    def matrix(self, name: str) -> Stored:
        return self._matrices[name]

    def vector(self, name: str) -> Floats:
        return self._vectors[name]


def _stored(checkpoint: Checkpoint) -> Iterator[tuple[str, "Stored | Floats"]]:
    """Every tensor: matrices as they lie in the file, vectors as floats."""
    if isinstance(checkpoint, GgufCheckpoint):
        for weight in checkpoint.weights:
            if len(weight.info.shape) != 2:
                yield weight.name, checkpoint.tensor(weight).float().numpy()
                continue
            raw = checkpoint.raw(weight)
            if weight.undo is Undo.NOTHING:
                order = np.arange(len(raw))
            elif weight.undo is Undo.ROTATE_HALVES:
                order = np.arange(len(raw)).reshape(weight.heads, -1, 2).transpose(0, 2, 1).reshape(-1)
            else:
                raise NotNative(f"{weight.name} is stored in a form that cannot be packed")
            kind = weight.info.ggml_type
            addresses = (raw.ctypes.data + order * raw.shape[1]).astype(np.uint64)
            yield weight.name, Stored(kind, addresses, weight.info.shape[1], raw)
        return
    for name, tensor in checkpoint.tensors():
        if not tensor.is_floating_point():
            raise BadCheckpoint(
                f"Tensor {name!r} holds {str(tensor.dtype).removeprefix('torch.')}, not floating-point numbers: the "
                "checkpoint is quantised in a way that its config does not tell. Fetch the unquantised model."
            )
        if tensor.dim() != 2:
            yield name, tensor.float().numpy()
            continue
        whole = (tensor if tensor.dtype in _FLOATS else tensor.float()).contiguous()
        addresses = whole.data_ptr() + np.arange(len(whole), dtype=np.uint64) * np.uint64(
            whole.shape[1] * whole.itemsize
        )
        kind = _FLOATS[whole.dtype]
        yield name, Stored(kind, addresses, whole.shape[1], whole)


class _Lowering:
    """Buffers, by their numbers: the stream, a product beside it, queries with keys and values, what attention gives,
    the inner states, the rows asked for, their logits.
    """

    _STREAM, _BESIDE, _QKV, _ATTENDED, _INNER, _ASKED, _LOGITS = range(7)

    def __init__(self, model: CausalLM, tensors: _Tensors, writer: PackedLayout, bits: int) -> None:
        self._model, self._tensors, self._writer = model, tensors, writer
        self._panel, self._bits = writer.panel, bits
        self._steps: list[StepSpec] = []
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._vectors: dict[int, int] = {}
        self._precisions: Counter[str] = Counter()

    def program(self) -> ProgramSpec:
        # Before anything is written.
        for kind, cols in self._tensors.formats:
            if library().ostro_format(kind, self._bits, byref(CMatrix(rows=self._panel, cols=cols))) < 0:
                raise NotNative(f"its weights are of type {GGML_TYPES[kind].name}, for which there is no kernel")
        model, shape = self._model, self._model.shape
        backbone = model.get_submodule(model.backbone_name)
        assert isinstance(backbone, Backbone)
        embedding = self._embed(backbone.embed_tokens)
        rotations = [
            RotationSpec(
                frequencies=self._writer.vector(rope.frequencies[len(rope.frequencies) // 2 :].numpy()),
                factor=rope.attention_factor,
            )
            for rope in backbone.ropes
            if isinstance(rope, Rotary)
        ]
        inner = 0
        told = time.monotonic()
        for number, (layer, rope) in enumerate(zip(backbone.layers, backbone.rope_of_layer, strict=True)):
            assert isinstance(layer, PreNormLayer | SandwichLayer)
            if time.monotonic() - told > _LOG_SECONDS:
                told = time.monotonic()
                _log.info("packing the weights: layer %d of %d", number, len(backbone.layers))
            inner = max(inner, self._layer(layer, rope))
        head_step = len(self._steps)
        self._add(op=Op.GATHER, input=self._STREAM, out=self._ASKED, cols=shape.hidden_size)
        self._norm(backbone.norm, self._ASKED, self._ASKED)
        logits_step = len(self._steps)
        self._head(embedding)
        qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        widths = (shape.hidden_size, shape.hidden_size, qkv, shape.num_heads * shape.head_dim, inner)
        buffers = [BufferSpec(cols=self._padded(width)) for width in widths]
        buffers.append(BufferSpec(cols=self._padded(shape.hidden_size), asked=True))
        buffers.append(BufferSpec(cols=self._padded(shape.vocab_size if model.has_head else 1), asked=True))
        return ProgramSpec(
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_layers=shape.num_layers,
            max_seq_len=shape.max_seq_len,
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            buffers=buffers,
            rotations=rotations,
            steps=self._steps,
            hidden=self._ASKED,
            logits=self._LOGITS if model.has_head else None,
            head_step=head_step,
            logits_step=logits_step,
            precision=", ".join(name for name, _ in self._precisions.most_common()),
        )

    def _embed(self, module: Embedding) -> int:
        matrix = self._pack([self._tensors.matrix(f"{self._paths[id(module)]}.weight")], head=True)
        scale = module.scale if isinstance(module, ScaledEmbedding) else 1.0
        self._add(op=Op.EMBED, out=self._STREAM, matrix=matrix, cols=self._model.shape.hidden_size, scale=scale)
        return matrix

    def _layer(self, layer: PreNormLayer | SandwichLayer, rope: int) -> int:
        """Its steps; returns the width of its inner states."""
        attention, mlp = layer.self_attn, layer.mlp
        self._attention(attention, layer.input_layernorm, rope)
        if isinstance(layer, PreNormLayer):
            self._product(attention.o_proj, self._ATTENDED, self._STREAM, after=After.ADD)
            inner = self._gate_and_up(mlp, layer.post_attention_layernorm)
            self._product(mlp.down_proj, self._INNER, self._STREAM, after=After.ADD)
        else:
            self._product(attention.o_proj, self._ATTENDED, self._BESIDE)
            self._norm(layer.post_attention_layernorm, self._BESIDE, self._STREAM, after=After.ADD)
            inner = self._gate_and_up(mlp, layer.pre_feedforward_layernorm)
            self._product(mlp.down_proj, self._INNER, self._BESIDE)
            self._norm(layer.post_feedforward_layernorm, self._BESIDE, self._STREAM, after=After.ADD)
        return inner

    def _attention(self, module: Attention, norm: RMSNorm, rope: int) -> None:
        qkv, spec = module.qkv_proj, module.spec
        parts = self._parts(qkv)
        bias = self._bias(qkv, parts)
        at = 0
        # Parts of one type are one matrix.
        for _, group in groupby(parts, key=lambda part: part.kind):
            some = list(group)
            rows = sum(len(part.rows) for part in some)
            if rows % self._panel:
                raise WrongPanel(f"its projections have {rows} rows, not a multiple of {self._panel}")
            self._add(
                op=Op.LINEAR,
                input=self._STREAM,
                out=self._QKV,
                out_at=at,
                cols=some[0].cols,
                norm=self._vector(norm),
                eps=norm.eps,
                bias=None if bias is None else self._writer.vector(bias[at : at + rows]),
                matrix=self._pack(some),
            )
            at += rows
        head_norm = module.qk_norm
        self._add(
            op=Op.ATTEND,
            input=self._QKV,
            out=self._ATTENDED,
            layer=module.layer,
            rotation=rope,
            window=spec.window or 0,
            scale=spec.scale,
            cap=spec.softcap or 0.0,
            norm=self._vector(head_norm) if isinstance(head_norm, HeadNorm) else None,
            eps=head_norm.eps if isinstance(head_norm, HeadNorm) else 0.0,
        )

    def _gate_and_up(self, mlp: GatedMLP, norm: RMSNorm) -> int:
        """Gates and ups by turns, a panel of each: whoever has made both multiplies them."""
        gate, up = self._parts(mlp.gate_up_proj)
        if gate.kind != up.kind:
            raise NotNative("its gates and ups are kept in different types")
        bias = self._bias(mlp.gate_up_proj, (gate, up))
        width = self._padded(len(gate.rows), self._panel)
        order = np.stack([self._panels(part.rows) for part in (gate, up)], 1).reshape(-1)
        if bias is not None:
            halves = np.split(bias, 2)
            bias = np.stack([self._panels(half) for half in halves], 1).reshape(-1)
        self._add(
            op=Op.LINEAR,
            input=self._STREAM,
            out=self._INNER,
            cols=gate.cols,
            after=_ACTIVATIONS[mlp.act],
            norm=self._vector(norm),
            eps=norm.eps,
            bias=None if bias is None else self._writer.vector(bias),
            matrix=self._pack([Stored(gate.kind, order, gate.cols, (gate, up))]),
        )
        return width

    def _product(self, module: Linear, source: int, target: int, after: After = After.STORE) -> None:
        path = self._paths[id(module)]
        stored = self._tensors.matrix(f"{path}.weight")
        bias = None if module.bias is None else self._padded_vector(self._tensors.vector(f"{path}.bias"))
        self._add(
            op=Op.LINEAR,
            input=source,
            out=target,
            cols=stored.cols,
            after=after,
            bias=None if bias is None else self._writer.vector(bias),
            matrix=self._pack([stored]),
        )

    def _head(self, embedding: int) -> None:
        model, shape = self._model, self._model.shape
        if model.lm_head is None:
            return
        tied = isinstance(model.lm_head, Embedding)
        matrix = embedding if tied else self._pack([self._tensors.matrix("lm_head.weight")], head=True)
        self._add(op=Op.LINEAR, input=self._ASKED, out=self._LOGITS, cols=shape.hidden_size, matrix=matrix)
        if model.logit_softcap is not None:
            width = self._padded(shape.vocab_size, self._panel)
            self._add(op=Op.SOFTCAP, out=self._LOGITS, cols=width, cap=model.logit_softcap)
        self._add(op=Op.SAMPLE, input=self._LOGITS, cols=shape.vocab_size)

    def _norm(self, module: RMSNorm, source: int, target: int, after: After = After.STORE) -> None:
        self._add(
            op=Op.NORM,
            input=source,
            out=target,
            cols=module.weight.shape[0],
            norm=self._vector(module),
            eps=module.eps,
            after=after,
        )

    def _parts(self, module: FusedLinear) -> list[Stored]:
        path = self._paths[id(module)]
        if not module.stored_fused:
            parent = path.rpartition(".")[0]
            return [self._tensors.matrix(f"{parent}.{part}.weight") for part in module.parts]
        whole = self._tensors.matrix(f"{path}.weight")
        ends = np.cumsum(list(module.parts.values()))[:-1]
        return [Stored(whole.kind, rows, whole.cols, whole) for rows in np.split(whole.rows, ends)]

    def _bias(self, module: FusedLinear, parts: Sequence[Stored]) -> Floats | None:
        if module.bias is None:
            return None
        path = self._paths[id(module)]
        if module.stored_fused:
            return self._tensors.vector(f"{path}.bias")
        parent = path.rpartition(".")[0]
        return np.concatenate([self._tensors.vector(f"{parent}.{part}.bias") for part in module.parts])

    def _pack(self, parts: Iterable[Stored], *, head: bool = False) -> int:
        some = list(parts)
        first = some[0]
        # Embedding and head tell one token from the next: they keep eight bits where layers have four.
        bits = 8 if head and self._bits else self._bits
        found = self._writer.matrix(first.kind, np.concatenate([part.rows for part in some]), first.cols, bits)
        assert found is not None, "its format was looked at"
        quantized = first.is_float and bits and first.cols % 32 == 0
        name = f"int{bits}" if quantized else GGML_TYPES[first.kind].name
        self._precisions[name] += sum(len(part.rows) for part in some) * first.cols
        return found

    def _vector(self, module: RMSNorm | HeadNorm) -> int:
        """Of a norm's weights; a head norm has a row for each head."""
        if id(module) not in self._vectors:
            path = self._paths[id(module)]
            if isinstance(module, RMSNorm):
                values = self._tensors.vector(f"{path}.weight")
            else:
                parent, shape = path.rpartition(".")[0], self._model.shape
                values = np.concatenate(
                    [
                        np.tile(self._tensors.vector(f"{parent}.q_norm.weight"), shape.num_heads),
                        np.tile(self._tensors.vector(f"{parent}.k_norm.weight"), shape.num_kv_heads),
                    ]
                )
            self._vectors[id(module)] = self._writer.vector(values)
        return self._vectors[id(module)]

    def _panels(self, rows: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        padded = np.zeros(self._padded(len(rows), self._panel), rows.dtype)
        padded[: len(rows)] = rows
        return padded.reshape(-1, self._panel)

    def _padded_vector(self, values: Floats) -> Floats:
        return np.pad(values, (0, -len(values) % self._panel))

    def _padded(self, width: int, multiple: int = 64) -> int:
        return -(-width // multiple) * multiple

    def _add(self, **values: object) -> None:
        self._steps.append(StepSpec(**values))  # type: ignore[arg-type]


__all__ = ["NotNative", "check", "lower"]
