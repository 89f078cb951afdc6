"""Checkpoints as Levanter writes them: arrays through TensorStore in each of its three ways, optimizer's state beside.

Written down from what Levanter stores, without the code that reads it: which axes a projection has is told here again.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import tensorstore
import torch
import yaml
from model_directory import CONTEXT, HEADS, HIDDEN, INNER, KV_HEADS, LAYERS

# The model of `model_directory` as Levanter's settings have it.
TINY_LLAMA: Mapping[str, Any] = {
    "type": "llama",
    "hidden_dim": HIDDEN,
    "intermediate_dim": INNER,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "max_seq_len": CONTEXT,
    "layer_norm_epsilon": 1e-5,
}

Generation = Literal["directories", "database", "manifest"]
Arrays = dict[str, "np.ndarray[Any, Any]"]

_ENDS = {
    "model.embed_tokens.weight": "embeddings/token_embeddings/weight",
    "model.norm.weight": "transformer/norm/weight",
    "lm_head.weight": "lm_head/weight",
}
_AXES = {
    "self_attn.q_proj.weight": ("kv", "group", "head", "embed"),
    "self_attn.k_proj.weight": ("kv", "head", "embed"),
    "self_attn.v_proj.weight": ("kv", "head", "embed"),
    "self_attn.o_proj.weight": ("embed", "heads", "head"),
    "self_attn.q_proj.bias": ("kv", "group", "head"),
    "self_attn.k_proj.bias": ("kv", "head"),
    "self_attn.v_proj.bias": ("kv", "head"),
}
# Where they are over all heads together. A norm over each head has one axis anyway.
_NORM_AXES = {"self_attn.q_norm.weight": ("kv", "group", "head"), "self_attn.k_norm.weight": ("kv", "head")}


def levanter_arrays(
    weights: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    stacked: bool = True,
    layers: str = "layers",
    padding: int = 0,
    norms_of_all_heads: bool = False,
) -> Arrays:
    """The arrays by path that Levanter has of a model with these weights, which are named as on the Hub."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    sizes = {"kv": kv_heads, "group": heads // kv_heads, "head": head, "heads": heads, "embed": config["hidden_size"]}
    axes = _AXES | (_NORM_AXES if norms_of_all_heads else {})
    weights = _with_stacked_experts(weights)
    arrays: Arrays = {}
    parts: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name, tensor in sorted(weights.items(), key=lambda item: _layer(item[0])):
        array = _numpy(tensor)
        if name in _ENDS:
            if padding and name != "model.norm.weight":
                array = np.concatenate((array, np.full((padding, array.shape[1]), 7, array.dtype)))
            arrays[f"model/{_ENDS[name]}"] = array
            continue
        part = name.removeprefix(f"model.layers.{_layer(name)}.")
        shape = [sizes[axis] for axis in axes[part]] if part in axes else array.shape
        parts.setdefault(part, []).append(array.reshape(shape))
    for part, per_layer in parts.items():
        path = part.replace(".", "/")
        if stacked:
            arrays[f"model/transformer/{layers}/stacked/{path}"] = np.stack(per_layer)
        else:
            arrays |= {f"model/transformer/{layers}/blocks/{i}/{path}": each for i, each in enumerate(per_layer)}
    return arrays


def gpt2_arrays(weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], *, padding: int = 0) -> Arrays:
    """The same for GPT-2, which has names of its own, and no blocks that are not stacked."""
    embed, heads = config["n_embd"], config["n_head"]
    axes = {
        "attn.c_attn.weight": (embed, 3, heads, embed // heads),
        "attn.c_attn.bias": (3, heads, embed // heads),
        "attn.c_proj.weight": (heads, embed // heads, embed),
    }
    vocabulary = _numpy(weights["transformer.wte.weight"])
    arrays: Arrays = {
        "model/embeddings/token_embeddings/weight": np.concatenate(
            (vocabulary, np.full((padding, embed), 7, vocabulary.dtype))
        ),
        "model/embeddings/position_embeddings/weight": _numpy(weights["transformer.wpe.weight"]),
        "model/transformer/ln_f/weight": _numpy(weights["transformer.ln_f.weight"]),
        "model/transformer/ln_f/bias": _numpy(weights["transformer.ln_f.bias"]),
        # Of a dropout, which no one reads.
        "model/transformer/blocks/stacked/resid_dropout/pdrop": np.zeros(config["n_layer"], np.float32),
    }
    parts = [name.removeprefix("transformer.h.0.") for name in weights if name.startswith("transformer.h.0.")]
    for part in parts:
        own = [_numpy(weights[f"transformer.h.{layer}.{part}"]) for layer in range(config["n_layer"])]
        spread = [each.reshape(axes.get(part, each.shape)) for each in own]
        arrays[f"model/transformer/blocks/stacked/{part.replace('.', '/')}"] = np.stack(spread)
    return arrays


def _with_stacked_experts(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices of experts are one tensor, each the other way round."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in weights.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor.T
        else:
            found[name] = tensor
    return found | {name: torch.stack([own[i] for i in range(len(own))]) for name, own in experts.items()}


def write_checkpoint(
    directory: Path,
    arrays: Arrays,
    *,
    generation: Generation = "manifest",
    step: int = 1000,
    layers_per_chunk: int = 1,
    shards: int = 1,
    complete: bool = True,
) -> Path:
    """A checkpoint of these arrays, and of an optimizer's state as large as one of them.

    `shards` is the number of devices that trained it, each with its part of the model's width: a chunk of an array is
    what one of them held.
    """
    directory.mkdir(parents=True, exist_ok=True)
    state = {"opt_state/0/mu/embed": next(iter(arrays.values())) * 0 + 9, "step": np.array(step, np.int32)}
    # Nobody needs it after a crash.
    context = tensorstore.Context({"file_io_sync": False})
    writes = [
        tensorstore.open(
            _spec(directory, path, generation),
            create=True,
            dtype=tensorstore.dtype(array.dtype),
            shape=array.shape,
            chunk_layout=tensorstore.ChunkLayout(chunk_shape=_chunks(path, array, layers_per_chunk, shards)),
            context=context,
        )
        .result()
        .write(array)
        for path, array in {**arrays, **state}.items()
    ]
    for write in writes:
        write.result()
    if generation == "manifest":
        _write_manifest(directory, arrays)
    if complete:
        metadata = {"step": step, "timestamp": "2026-01-02T03:04:05.678901", "is_temporary": False}
        (directory / "metadata.json").write_text(json.dumps(metadata))
    return directory


def write_yaml(path: Path, model: Mapping[str, Any], *, whole: bool = False) -> Path:
    """The model's settings alone, or in the YAML of a trainer."""
    trainer = {"trainer": {"mp": "p=f32,c=bfloat16", "train_batch_size": 32}, "optimizer": {"learning_rate": 1e-3}}
    path.write_text(yaml.safe_dump({"model": dict(model), **trainer} if whole else dict(model)))
    return path


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def _layer(name: str) -> int:
    return int(name.split(".")[2]) if name.startswith("model.layers.") else -1


def _numpy(tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _chunks(path: str, array: "np.ndarray[Any, Any]", layers_per_chunk: int, shards: int = 1) -> tuple[int, ...]:
    shape = [max(size, 1) for size in array.shape]
    stacked = "/stacked/" in path
    if stacked:
        shape[0] = min(layers_per_chunk, shape[0])
    if path.endswith("weight"):
        width = int(stacked) if "/o_proj/" in path or "/down_proj/" in path else -1
        shape[width] //= shards
    return tuple(shape)


def _spec(directory: Path, path: str, generation: Generation) -> dict[str, Any]:
    base = {"driver": "file", "path": str(directory.absolute())}
    if generation == "directories":
        kvstore = base | {"path": str(directory.absolute() / path)}
        return {"driver": "zarr", "kvstore": kvstore, "metadata": {"compressor": {"id": "gzip"}}}
    return {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": path}}


def _write_manifest(directory: Path, arrays: Arrays) -> None:
    described = [
        {"path": path, "shape": array.shape, "dtype": array.dtype.name, "chunk_shape": _chunks(path, array, 1)}
        for path, array in arrays.items()
    ]
    manifest = {"format_version": 1, "array_driver": "zarr3", "kvstore_driver": "ocdbt", "arrays": described}
    (directory / "manifest.json").write_text(json.dumps(manifest))
