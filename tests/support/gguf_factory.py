"""Builds small GGUF files the way converters do: from a transformers model, by its config and state dict."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
from family_case import Array, Converted

if TYPE_CHECKING:
    import transformers


def write_gguf(
    path: Path,
    arch: str,
    metadata: Mapping[str, object],
    tensors: Mapping[str, Array],
    quantize: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """`metadata` keys are full. Matrices whose rows are whole blocks are quantised if asked; norms never."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, array in tensors.items():
        if quantize is not None and _is_quantized(name, array, gguf.GGML_QUANT_SIZES[quantize][0]):
            writer.add_tensor(name, gguf.quants.quantize(array, quantize), raw_dtype=quantize)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _is_quantized(name: str, array: Array, block: int) -> bool:
    return array.ndim > 1 and array.shape[-1] % block == 0 and not name.endswith((".bias", "_norm.weight"))


def fuse_experts(path: Path, fused: Path) -> Path:
    """Writes the same file with each expert's gate and up in one tensor."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(fused, str(reader.fields["general.architecture"].contents()))
    for key, each in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            value, kinds = each.contents(), each.types
            writer.add_key_value(key, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)
    tensors = {each.name: each for each in reader.tensors}
    for name, each in tensors.items():
        data = each.data
        if "ffn_up_exps" in name:
            continue
        if "ffn_gate_exps" in name:
            data = np.concatenate([data, tensors[name.replace("_gate_", "_up_")].data], axis=1)
        writer.add_tensor(name.replace("ffn_gate_exps", "ffn_gate_up_exps"), data, raw_dtype=each.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return fused


_TINY = {
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def write_tiny_gguf(path: Path, *, padding: int = 0) -> Path:
    """A model without a vocabulary or a layer's weights: to be opened, not run. `padding` rows make it larger."""
    tensors = {
        "token_embd.weight": np.ones((4, 8), np.float32),
        "output.weight": np.zeros((4 + padding, 8), np.float32),
    }
    return write_gguf(path, "llama", _TINY, tensors)


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


_EXPERTS = re.compile(
    r"model\.layers\.(\d+)\.\w+\.(gate|router|experts\.gate_up_proj|experts\.down_proj)(?:\.weight|[._](bias))?"
)


def _expert_tensors(name: str, array: Array) -> dict[str, Array] | None:
    """Those that a converter makes of a tensor of a mixture of experts; None for any other."""
    if (match := _EXPERTS.fullmatch(name)) is None:
        return None
    layer, part, bias = match.groups()
    kind = bias or "weight"
    if part == "experts.gate_up_proj":
        gate, up = np.split(array, 2, axis=1)
        return {f"blk.{layer}.ffn_gate_exps.{kind}": gate, f"blk.{layer}.ffn_up_exps.{kind}": up}
    return {f"blk.{layer}.{'ffn_down_exps' if part == 'experts.down_proj' else 'ffn_gate_inp'}.{kind}": array}


def gguf_tensors(
    arch: str, model: "transformers.PreTrainedModel", converted: Converted, layers: int
) -> dict[str, Array]:
    """The model's weights under GGUF names, changed as a converter changes them."""
    names = gguf.get_tensor_name_map(next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), layers)
    tensors: dict[str, Array] = {}
    for hf_name, array in _converted(model, converted):
        if hf_name.startswith("blk."):
            tensors[hf_name] = array
            continue
        if (experts := _expert_tensors(hf_name, array)) is not None:
            tensors |= experts
            continue
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        tensors[f"{name}.weight" if name.endswith("attn_sinks") else name] = array
    return tensors


def _converted(model: "transformers.PreTrainedModel", converted: Converted) -> Iterator[tuple[str, Array]]:
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        made = converted(name, tensor.float().numpy())
        yield from made.items() if isinstance(made, Mapping) else [(name, made)]
