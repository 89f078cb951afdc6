"""Weights read in parts: any part of any file is the same part of the whole tensor."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_factory import write_gguf
from levanter_directory import levanter_arrays, write_checkpoint, write_yaml
from model_directory import pickle_weights
from native_directory import WIDE, write
from safetensors.torch import save_file

from ostro.weights import Checkpoint, open_checkpoint
from ostro.weights.arrays import WeightArray, read_safetensors
from ostro.weights.slices import Index, SlicedArray

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 12, 4, 2, 16, 24
SETTINGS = {
    "type": "llama",
    "hidden_dim": HIDDEN,
    "intermediate_dim": 20,
    "num_layers": 3,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "max_seq_len": 32,
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
}
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (20, HIDDEN),
    "mlp.up_proj": (20, HIDDEN),
    "mlp.down_proj": (HIDDEN, 20),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}


def llama_weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    shapes = {f"model.layers.{layer}.{name}.weight": shape for layer in range(3) for name, shape in SHAPES.items()}
    shapes |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    shapes |= {"model.norm.weight": (HIDDEN,)}
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


def parts_of(shape: tuple[int, ...], random: np.random.Generator) -> Iterator[Index]:
    """The whole, and some ranges that begin and end anywhere."""
    yield tuple(slice(0, size) for size in shape)
    for _ in range(6):
        ends = [sorted(random.choice(size + 1, 2, replace=False).tolist()) for size in shape]
        yield tuple(slice(first, last) for first, last in ends)


def assert_parts(checkpoint: Checkpoint) -> None:
    """Every part is that of the tensor."""
    random = np.random.default_rng(0)
    tensors = dict(checkpoint.tensors())
    found = 0
    for name, weight in checkpoint.slices():
        whole = tensors[name].float().numpy()
        assert weight.shape == whole.shape
        assert weight.holds_numbers
        for index in parts_of(whole.shape, random):
            np.testing.assert_array_equal(weight.read(index), whole[index], err_msg=f"{name} {index}")
        found += 1
    assert found == len(tensors)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("stacked", "layers_per_chunk", "shards", "dtype"),
    [
        *product((True,), (1, 3), (1, 8), (torch.float32,)),
        (True, 2, 4, torch.bfloat16),
        (False, 1, 8, torch.float32),
    ],
)
def test_parts_of_levanter_arrays(
    tmp_path: Path, stacked: bool, layers_per_chunk: int, shards: int, dtype: torch.dtype
) -> None:
    """Heads have axes of their own there, layers may share an array, and the vocabulary may be padded."""
    arrays = levanter_arrays(llama_weights(dtype), CONFIG, stacked=stacked, padding=8)
    written = write_checkpoint(tmp_path / "step-1", arrays, layers_per_chunk=layers_per_chunk, shards=shards)
    settings = write_yaml(tmp_path / "llama.yaml", SETTINGS)
    assert_parts(open_checkpoint(written, model_config=str(settings)))


def test_parts_of_safetensors_and_of_pickles(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", WIDE, torch.bfloat16)
    assert_parts(open_checkpoint(directory))
    assert_parts(open_checkpoint(pickle_weights(directory)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_parts_of_every_number_format(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.arange(-24, 24, dtype=torch.float32).reshape(6, 8).to(dtype)
    save_file({"w": tensor}, tmp_path / "w.safetensors")
    ((_, array),) = read_safetensors(tmp_path / "w.safetensors")
    found = SlicedArray(array).read((slice(1, 4), slice(3, 8)))
    np.testing.assert_array_equal(found, tensor.float().numpy()[1:4, 3:8])


@pytest.mark.parametrize("quantized", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16])
def test_parts_of_gguf_tensors(tmp_path: Path, quantized: gguf.GGMLQuantizationType) -> None:
    """Rows of heads are stored in another order, and blocks of numbers cannot be cut."""
    random = np.random.default_rng(0)
    arrays = {
        f"{name}.weight": random.normal(size=shape).astype(np.float32)
        for name, shape in {
            "token_embd": (40, 64),
            "output_norm": (64,),
            "blk.0.attn_q": (64, 64),
            "blk.0.attn_k": (32, 64),
            "blk.0.ffn_down": (64, 128),
        }.items()
    }
    metadata = {
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 128,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": 40,
    }
    assert_parts(open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama", metadata, arrays, quantized)))


def test_parts_of_a_matrix_whose_columns_are_stored() -> None:
    stored = WeightArray.of(np.arange(6, dtype=np.float32).reshape(3, 2))
    weight = SlicedArray(WeightArray("F32", (2, 3), stored.raw, transposed=True))
    assert weight.read((slice(0, 2), slice(1, 3))).tolist() == [[2, 4], [3, 5]]


def test_integers_are_no_numbers_of_a_weight() -> None:
    weight = SlicedArray(WeightArray.of(np.ones((2, 2), np.int8)))
    assert not weight.holds_numbers
    assert weight.format_name == "int8"
