"""GGUF files of random weights, quantised or not, written without a model, a network or a quantiser.

A quantised file has the types that llama.cpp's quantiser would choose, random codes, and scales that give the weights a
deviation of about `Shape.deviation`. Its vocabulary is made up: all bytes, one merge, and words that nobody writes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter

from cpu_peers.random_hybrids import FILTERS, FINAL_NORMS, Dims, Hybrid, add_metadata, layer_dims

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Shape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    experts: int = 0
    """Experts per layer, each `inner` wide; 0 for a dense MLP."""
    chosen: int = 0
    """Experts that a token goes through."""
    vocab_size: int = 49_152
    context: int = 16_384
    deviation: float = 0.02
    """Standard deviation of the weights, around 0."""
    family: str = "llama"
    """GGUF's name: `llama`; `gpt-oss`, which has biases, sinks, and a head of its own; or one of `random_hybrids`."""
    window: int = 0
    """Tokens that every other layer of a gpt-oss attends to."""
    hybrid: Hybrid | None = None

    @property
    def kv_bytes(self) -> int:
        """Of a token's keys and values in float32."""
        attending = sum(self.attends(layer) for layer in range(self.layers))
        return 2 * 4 * attending * self.kv_heads * self.head_dim

    @property
    def state_bytes(self) -> int:
        """Of a sequence's state."""
        return 0 if self.hybrid is None else self.hybrid.state_bytes(self.layers, self.hidden)

    def attends(self, layer: int) -> bool:
        return self.hybrid is None or layer in self.hybrid.attending


SHAPES: Mapping[str, Shape] = {
    "135m": Shape(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, inner=1536),
    "1b": Shape(hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, inner=8192),
    "3b": Shape(hidden=3072, layers=28, heads=24, kv_heads=8, head_dim=128, inner=8192),
    # Of the size of Granite 3's 1B-A400M.
    "moe": Shape(hidden=1024, layers=24, heads=16, kv_heads=8, head_dim=64, inner=512, experts=32, chosen=8),
    # A quarter of gpt-oss-20b's layers.
    "gpt-oss": Shape(
        hidden=2880,
        layers=6,
        heads=64,
        kv_heads=8,
        head_dim=64,
        inner=2880,
        experts=32,
        chosen=4,
        family="gpt-oss",
        window=128,
    ),
    "qwen3.5-0.8b": Shape(
        hidden=1024,
        layers=24,
        heads=8,
        kv_heads=2,
        head_dim=256,
        inner=3584,
        vocab_size=248_320,
        family="qwen35",
        hybrid=Hybrid(attending=frozenset(range(3, 24, 4)), taps=4, key_heads=16, value_heads=16, dim=128),
    ),
    "lfm2-1.2b": Shape(
        hidden=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        head_dim=64,
        inner=8192,
        vocab_size=65_536,
        family="lfm2",
        hybrid=Hybrid(attending=frozenset({2, 5, 8, 10, 12, 14}), taps=3),
    ),
    # A fifth of Qwen3.5-35B-A3B's layers.
    "qwen3.5-35b-a3b": Shape(
        hidden=2048,
        layers=8,
        heads=16,
        kv_heads=2,
        head_dim=256,
        inner=512,
        experts=256,
        chosen=8,
        vocab_size=248_320,
        family="qwen35moe",
        hybrid=Hybrid(attending=frozenset({3, 7}), taps=4, key_heads=16, value_heads=32, dim=128, shared=512),
    ),
}
KINDS = ("q4_0", "q4_k_m", "q8_0")
OWN_KINDS: Mapping[str, Sequence[str]] = {"gpt-oss": ("mxfp4",)}
"""Those of families that come in no others."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How random blocks of a type are made."""

    columns: int
    bytes: int
    scales: Mapping[int, float]
    """By their place in a block, the 16-bit scales that give weights a deviation of 1; all other bytes are random."""
    signed: bool = True
    """Whether a block's scale may be negative, so that codes that lean to one side bring no mean."""
    power: float | None = None
    """The scale if it is a power of two, whose exponent is the first byte."""


# A scale is one over the deviation of uniform codes (times that of uniform scales of parts of the block, where there
# are some); the minima's is what brings the mean to about 0.
BLOCKS: Mapping[Type, Blocks] = {
    Type.Q4_0: Blocks(32, 18, {0: 1 / 4.6}),
    Type.Q5_0: Blocks(32, 22, {0: 1 / 9.2}),
    Type.Q8_0: Blocks(32, 34, {0: 1 / 74}),
    Type.Q4_K: Blocks(256, 144, {0: 1 / 258, 2: 7.5 / 258}, signed=False),
    Type.Q6_K: Blocks(256, 210, {208: 1 / 1370}),
    Type.MXFP4: Blocks(32, 17, {}, power=1 / 2.93),
}
# What the quantiser takes for rows that are no whole number of blocks.
FALLBACKS: Mapping[Type, Type] = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}


def write_random_llama(path: Path, shape: Shape, kind: str) -> None:
    """`kind` is one of KINDS or the family's own, or `f16`. A Llama's embeddings are also the head."""
    writer = GGUFWriter(path, shape.family)
    writer.add_name(f"random {shape.family}")
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
    if shape.hybrid is not None:
        add_metadata(writer, shape.hybrid, shape)
    if shape.family == "gpt-oss":
        writer.add_expert_feed_forward_length(shape.inner)
        writer.add_sliding_window(shape.window)
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    _add_vocabulary(writer, shape.vocab_size)
    tensors = {name: (dims, tensor_type(name, dims, shape, kind)) for name, dims in tensor_dims(shape).items()}
    for name, (dims, type_) in tensors.items():
        if type_ in BLOCKS:
            stored = (*dims[:-1], dims[-1] // BLOCKS[type_].columns * BLOCKS[type_].bytes)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), type_)
        else:
            dtype = np.dtype(np.float32 if type_ is Type.F32 else np.float16)
            writer.add_tensor_info(name, dims, dtype, int(np.prod(dims)) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    # One at a time: all of them would not fit everywhere.
    for seed, (name, (dims, type_)) in enumerate(tensors.items()):
        writer.write_tensor_data(_values(name, dims, type_, shape.deviation, seed))
    writer.close()


def tensor_dims(shape: Shape) -> dict[str, Dims]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: dict[str, Dims] = {"token_embd.weight": (shape.vocab_size, shape.hidden)}
    if shape.hybrid is not None:
        for layer in range(shape.layers):
            of_hybrid = layer_dims(shape.hybrid, shape, attends=shape.attends(layer)) | _weights(_mlp(shape))
            found |= {f"blk.{layer}.{name}": dims for name, dims in of_hybrid.items()}
        return found | {FINAL_NORMS[shape.family]: (shape.hidden,)}
    matrices: dict[str, Dims] = {
        "attn_q": (queries, shape.hidden),
        "attn_k": (keys, shape.hidden),
        "attn_v": (keys, shape.hidden),
        "attn_output": (shape.hidden, queries),
        **_mlp(shape),
    }
    norms = ("attn_norm", "ffn_norm")
    others: dict[str, Dims] = {}
    if shape.family == "gpt-oss":
        norms = ("attn_norm", "post_attention_norm")
        others = {f"{name}.bias": dims[:-1] for name, dims in matrices.items()}
        others["attn_sinks.weight"] = (shape.heads,)
        found["output.weight"] = (shape.vocab_size, shape.hidden)
    of_layer = _weights(dict.fromkeys(norms, (shape.hidden,)) | matrices) | others
    for layer in range(shape.layers):
        found |= {f"blk.{layer}.{name}": dims for name, dims in of_layer.items()}
    return found | {"output_norm.weight": (shape.hidden,)}


def _weights(dims: Mapping[str, Dims]) -> dict[str, Dims]:
    return {f"{name}.weight": each for name, each in dims.items()}


def tensor_type(name: str, dims: Dims, shape: Shape, kind: str) -> Type:
    """The type that llama.cpp's quantiser would choose."""
    if len(dims) == 1 or "ffn_gate_inp" in name or name.endswith((".bias", *FILTERS)):
        return Type.F32
    if kind == "f16":
        return Type.F16
    if kind == "mxfp4":
        return Type.MXFP4 if "_exps" in name else Type.Q8_0
    found = {"q4_0": Type.Q4_0, "q8_0": Type.Q8_0, "q4_k_m": Type.Q4_K}[kind]
    if name == "token_embd.weight" and kind != "q8_0":
        found = Type.Q6_K
    elif kind == "q4_k_m" and ("attn_v" in name or "ffn_down" in name):
        layer, eighth = int(name.split(".")[1]), shape.layers // 8
        if layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2:
            found = Type.Q6_K
    return FALLBACKS[found] if dims[-1] % BLOCKS[found].columns else found


def bytes_per_token(shape: Shape, kind: str) -> int:
    """Bytes of the file's weights that one token of one stream goes through."""
    total = 0.0
    for name, dims in tensor_dims(shape).items():
        if name == "token_embd.weight" and shape.family == "gpt-oss":
            continue  # looked up: the head is another matrix
        blocks = BLOCKS.get(tensor_type(name, dims, shape, kind))
        size = float(np.prod(dims)) * (blocks.bytes / blocks.columns if blocks else 4)
        total += size * shape.chosen / shape.experts if "_exps" in name else size
    return round(total)


def _mlp(shape: Shape) -> dict[str, Dims]:
    wide, narrow = (shape.inner, shape.hidden), (shape.hidden, shape.inner)
    if not shape.experts:
        return {"ffn_gate": wide, "ffn_up": wide, "ffn_down": narrow}
    return {
        "ffn_gate_inp": (shape.experts, shape.hidden),
        "ffn_gate_exps": (shape.experts, *wide),
        "ffn_up_exps": (shape.experts, *wide),
        "ffn_down_exps": (shape.experts, *narrow),
    }


def _values(name: str, dims: Dims, type_: Type, deviation: float, seed: int) -> npt.NDArray[np.generic]:
    if name.endswith("norm.weight"):
        return np.ones(dims, np.float32)
    if name.endswith(".ssm_a"):
        # The negated rates at which states decay.
        return np.full(dims, -0.05, np.float32)
    if name.endswith(FILTERS):
        deviation = 0.3
    if type_ not in BLOCKS:
        dtype = np.float32 if type_ is Type.F32 else np.float16
        return (np.random.default_rng(seed).standard_normal(dims, np.float32) * deviation).astype(dtype)
    blocks = BLOCKS[type_]
    found = _random_bytes(int(np.prod(dims)) // blocks.columns * blocks.bytes, seed).reshape(-1, blocks.bytes)
    if blocks.power is not None:
        found[:, 0] = 127 + round(math.log2(blocks.power * deviation))
    for place, scale in blocks.scales.items():
        low, high = np.float16(scale * deviation).tobytes()
        found[:, place] = low
        found[:, place + 1] = found[:, place + 1] & (0x80 if blocks.signed else 0) | high
    return found.reshape(*dims[:-1], -1)


def _random_bytes(number: int, seed: int) -> Bytes:
    """By several threads: a file has gigabytes of them."""
    words = np.empty((number + 7) // 8, np.uint64)
    pieces = np.array_split(words, 16)

    def fill(piece: npt.NDArray[np.uint64], dice: np.random.SeedSequence) -> None:
        piece[:] = np.random.default_rng(dice).integers(0, 1 << 64, piece.size, np.uint64)

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(fill, pieces, np.random.SeedSequence(seed).spawn(len(pieces))):
            pass
    return words.view(np.uint8)[:number]


def _add_vocabulary(writer: GGUFWriter, size: int) -> None:
    letters = list(_byte_letters())
    tokens = [*letters, "th"]
    tokens += [f"<unused {number}>" for number in range(size - len(tokens) - 1)] + ["<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (size - 1) + [3])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(size - 1)
    writer.add_vocab_size(size)


def _byte_letters() -> Iterator[str]:
    """GPT-2's letter for each byte: itself where it is printed, otherwise one from 256 on."""
    printed = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = 0
    for byte in range(256):
        if byte in printed:
            yield chr(byte)
        else:
            yield chr(256 + others)
            others += 1
