"""Loading onto a mesh: what each rank holds, from every kind of file, and what is refused."""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gguf_factory import write_gguf
from jax_models import FAMILIES
from native_models import ModelCheckpoint, savable_model
from safetensors.torch import save_file

from ostro.backends.jax.layout import VectorLayout
from ostro.backends.jax.mesh import make_mesh
from ostro.backends.jax.weights import Weights, load_weights
from ostro.errors import BadCheckpoint
from ostro.models.architecture import Architecture
from ostro.models.cut import cut
from ostro.models.registry import describe
from ostro.weights import Checkpoint, open_checkpoint

LLAMA = FAMILIES["llama"]


def architecture(config: Mapping[str, object]) -> Architecture:
    described = describe(config)
    assert isinstance(described, Architecture)
    return described


def loaded(checkpoint: Checkpoint, tp: int, dtype: object = np.float32) -> Weights:
    described = architecture(checkpoint.config)
    return load_weights(described, checkpoint, cut(described, tp), make_mesh(tp), dtype)  # type: ignore[arg-type]


def piece(array: object, rank: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """What a rank holds."""
    return np.asarray(array.addressable_shards[rank].data)  # type: ignore[attr-defined]


def tensors_of(config: Mapping[str, object]) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in ModelCheckpoint(savable_model(config), config).tensors()}


def saved(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, object] = LLAMA) -> Checkpoint:
    (directory / "config.json").write_text(json.dumps(dict(config)))
    save_file(dict(tensors), directory / "model.safetensors")
    return open_checkpoint(directory)


def test_each_rank_holds_its_heads_and_a_copy_of_the_kv_head_they_use() -> None:
    tensors = tensors_of(LLAMA)
    weights = loaded(ModelCheckpoint(savable_model(LLAMA), LLAMA), 8)
    q, k, v = (tensors[f"model.layers.1.self_attn.{name}_proj.weight"].numpy() for name in "qkv")
    for rank in range(8):
        # Eight query heads and two KV heads, four wide.
        kv = rank // 4 * 4
        own = (q[4 * rank : 4 * rank + 4], k[kv : kv + 4], v[kv : kv + 4])
        np.testing.assert_array_equal(piece(weights.layers[1].inputs, rank), np.concatenate(own))
        columns = tensors["model.layers.1.self_attn.o_proj.weight"].numpy()[:, 4 * rank : 4 * rank + 4]
        np.testing.assert_array_equal(piece(weights.layers[1].output, rank), columns)


def test_the_vocabulary_is_divided_into_whole_blocks_and_padded_with_zeros() -> None:
    weights = loaded(ModelCheckpoint(savable_model(LLAMA), LLAMA), 2)
    whole = tensors_of(LLAMA)["model.embed_tokens.weight"].numpy()
    np.testing.assert_array_equal(piece(weights.embedding, 0), whole[:256])
    np.testing.assert_array_equal(piece(weights.embedding, 1)[:44], whole[256:])
    assert not piece(weights.embedding, 1)[44:].any()


def test_all_norms_and_biases_are_one_argument() -> None:
    config = FAMILIES["starcoder2"]
    described = architecture(config)
    layout = VectorLayout.of(described, cut(described, 4))
    weights = loaded(ModelCheckpoint(savable_model(config), config), 4)
    assert weights.vectors.shape == (4, layout.total)
    bias = tensors_of(config)["model.layers.0.mlp.c_fc.bias"].numpy()
    start, size = layout.places["model.layers.0.mlp.c_fc.bias"]
    np.testing.assert_array_equal(piece(weights.vectors, 3)[0, start : start + size], bias[36:])


def test_bfloat16_files_keep_their_bits(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(LLAMA).items()}
    weights = loaded(saved(tmp_path, tensors), 4, jnp.bfloat16)
    stored = tensors["model.layers.0.mlp.down_proj.weight"].view(torch.uint16).numpy()
    np.testing.assert_array_equal(piece(weights.layers[0].down, 1).view(np.uint16), stored[:, 12:24])


def test_quantised_gguf_is_dequantised_as_torch_reads_it(tmp_path: Path) -> None:
    """Rows of heads are reordered in GGUF files: what arrives has the order and the numbers of `tensors`."""
    hidden, inner, vocab = 64, 128, 96
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (vocab, hidden),
        "output": (vocab, hidden),
        "blk.0.attn_q": (hidden, hidden),
        "blk.0.attn_k": (32, hidden),
        "blk.0.attn_v": (32, hidden),
        "blk.0.attn_output": (hidden, hidden),
        "blk.0.ffn_gate": (inner, hidden),
        "blk.0.ffn_up": (inner, hidden),
        "blk.0.ffn_down": (hidden, inner),
        "blk.0.attn_norm": (hidden,),
        "blk.0.ffn_norm": (hidden,),
        "output_norm": (hidden,),
    }
    arrays = {f"{name}.weight": random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    metadata = {
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": hidden,
        "llama.feed_forward_length": inner,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": vocab,
    }
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, arrays, gguf.GGMLQuantizationType.Q8_0)
    checkpoint = open_checkpoint(path)
    weights, tensors = loaded(checkpoint, 1), dict(checkpoint.tensors())
    parts = [tensors[f"model.layers.0.self_attn.{name}_proj.weight"].numpy() for name in "qkv"]
    np.testing.assert_array_equal(piece(weights.layers[0].inputs, 0), np.concatenate(parts))
    np.testing.assert_array_equal(piece(weights.head, 0)[:vocab], tensors["lm_head.weight"].numpy())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.norm.weight", None, "lacks 1 tensors"),
        ("model.norm.weight", torch.ones(31), "has shape"),
        ("model.other.weight", torch.ones(3), "no place for"),
        ("model.norm.weight", torch.full((32,), torch.nan), "NaN or infinity"),
        ("model.layers.0.mlp.down_proj.weight", torch.ones((32, 48), dtype=torch.int8), "holds int8"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    tensors = tensors_of(LLAMA)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(BadCheckpoint, match=message):
        loaded(saved(tmp_path, tensors), 2)
