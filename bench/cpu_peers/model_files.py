"""The GGUF files that both engines run, made once in a work directory. Knows formats; measures nothing."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from cpu_peers.llama_cpp import LlamaCpp
from ostro.weights import open_checkpoint


@dataclass(frozen=True, slots=True)
class LlamaShape:
    hidden: int = 2048
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    inner: int = 8192
    experts: int = 0
    """Experts per layer, each `inner` wide; 0 for a dense MLP."""
    chosen: int = 0
    """Experts that a token goes through."""
    context: int = 4096
    deviation: float = 0.02
    """Standard deviation of the weights, around 0."""


MIXTURE = LlamaShape(hidden=1024, layers=24, heads=16, inner=512, experts=32, chosen=8)
"""A mixture of the size of Granite 3's 1B-A400M."""


class ModelFiles:
    """`default` is the default model's own file; `f32`, `q8_0`, `q4_0` are made from it by llama.cpp's quantiser."""

    def __init__(self, work: Path, llama: LlamaCpp) -> None:
        self._work = work
        self._llama = llama
        work.mkdir(parents=True, exist_ok=True)

    def variant(self, name: str) -> Path:
        source = open_checkpoint(None).path
        if name == "default":
            return source
        if name == "f32":
            return self.made(source, f"{source.stem}.f32.gguf", "F32")
        return self.made(self.variant("f32"), f"{source.stem}.{name}.gguf", name.upper())

    def one_billion(self, name: str) -> Path:
        """A Llama of a billion random weights, with the default model's tokenizer."""
        return self._random("llama-1b", LlamaShape(), name)

    def mixture(self, name: str) -> Path:
        """A mixture of experts of 1.3 billion random weights, 0.4 billion of them active."""
        return self._random("mixture", MIXTURE, name)

    def _random(self, label: str, shape: LlamaShape, name: str) -> Path:
        source = self._work / f"{label}.f16.gguf"
        if not source.is_file():
            partial = source.with_name(source.name + ".partial")
            write_random_llama(partial, shape, tokenizer=self.variant("default"))
            partial.replace(source)
        return self.made(source, f"{label}.{name}.gguf", name.upper())

    def made(self, source: Path, name: str, kind: str) -> Path:
        """The source as the quantiser makes it, unless a file of that name is there."""
        target = self._work / name
        if not target.is_file():
            self._llama.quantize(source, target, kind)
        return target


def write_random_llama(path: Path, shape: LlamaShape, *, tokenizer: Path) -> None:
    """In 16 bits, its embeddings tied. `tokenizer` is a GGUF file whose tokenizer it takes over."""
    writer = GGUFWriter(path, "llama")
    writer.add_name("random Llama")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.chosen)
    vocab_size = _copy_tokenizer(tokenizer, writer)
    writer.add_vocab_size(vocab_size)
    dice = np.random.default_rng(0)
    tensors = _tensors(shape, vocab_size)
    for name, dims in tensors.items():
        dtype = np.dtype(np.float32 if len(dims) == 1 else np.float16)
        writer.add_tensor_info(name, dims, dtype, int(np.prod(dims)) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # One at a time: all of them would not fit everywhere.
    for dims in tensors.values():
        writer.write_tensor_data(
            np.ones(dims, np.float32)
            if len(dims) == 1
            else (dice.standard_normal(dims, np.float32) * shape.deviation).astype(np.float16)
        )
    writer.close()


def tensor_types(path: Path) -> dict[str, int]:
    """Number of tensors of each type in a file."""
    found: dict[str, int] = {}
    for tensor in GGUFReader(path).tensors:
        name = GGMLQuantizationType(tensor.tensor_type).name
        found[name] = found.get(name, 0) + 1
    return found


def _copy_tokenizer(source: Path, writer: GGUFWriter) -> int:
    """Copies the tokenizer; returns its number of tokens."""
    fields = GGUFReader(source).fields
    for name, field in fields.items():
        if name.startswith("tokenizer."):
            of = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], of)
    return len(fields["tokenizer.ggml.tokens"].data)


def _tensors(shape: LlamaShape, vocab_size: int) -> dict[str, tuple[int, ...]]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, shape.hidden)}
    for layer in range(shape.layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (shape.hidden,),
            "attn_q": (queries, shape.hidden),
            "attn_k": (keys, shape.hidden),
            "attn_v": (keys, shape.hidden),
            "attn_output": (shape.hidden, queries),
            "ffn_norm": (shape.hidden,),
            **_mlp(shape),
        }
        found |= {f"blk.{layer}.{name}.weight": dims for name, dims in of_layer.items()}
    return found | {"output_norm.weight": (shape.hidden,)}


def _mlp(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    wide, narrow = (shape.inner, shape.hidden), (shape.hidden, shape.inner)
    if not shape.experts:
        return {"ffn_gate": wide, "ffn_up": wide, "ffn_down": narrow}
    return {
        "ffn_gate_inp": (shape.experts, shape.hidden),
        "ffn_gate_exps": (shape.experts, *wide),
        "ffn_up_exps": (shape.experts, *wide),
        "ffn_down_exps": (shape.experts, *narrow),
    }
