"""Tiny checkpoints, and what an attacker or a bad disk may have changed in them. Everything is bytes by file name."""

import io
import json
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
from every_family import CASES, configs_of
from gguf_cases import CASES as GGUF_CASES
from gguf_cases import build as build_gguf
from gguf_cases import save as save_gguf
from gguf_factory import fuse_experts
from model_directory import pickle_weights
from native_directory import write as write_directory
from native_models import ModelCheckpoint, savable_model
from peft_directory import random_adapter
from quantized_packers import FORMATS, write_mxfp4, write_quantized

from ostro.torch_models.base import Model

Files = Mapping[str, bytes]
VOCAB = 32
_SIZES: Mapping[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
# Fields of most configs.
_TOLD: Mapping[str, object] = {"rope_theta": 10000.0, "tie_word_embeddings": False}
CONFIGS = {name: {**config, **_TOLD} for name, config in configs_of(tuple(CASES), _SIZES).items()}
_GGUF_TYPES = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
}

# One of each layout of tensors.
_QUANTIZED = ("fp8-block", "int-quantized-zeros", "pack-quantized-zeros", "gptq-order", "awq", "nf4-nested", "bnb-8")

# Replacements for numbers, and for what should be numbers.
NUMBERS: Sequence[object] = (
    *(0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 128, 255, 256, 1024, 4096, 65535, 10**6, 10**8),
    *(-1, -2, -(2**31), 2**31 - 1, 2**31, 2**32, 2**32 + 16, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**30, 10**400),
    *(0.0, -0.0, 0.1, 0.25, 0.5, 0.75, 1.5, 2.0, 4000.0, 400000.0, 1e-45, 1e-30, 1e-8, 1e30, 1e38, 1e39, 1e300),
    *(float("inf"), float("-inf"), float("nan")),
)
OTHERS: Sequence[object] = (
    *(True, False, None, "", "8", "0x10", "silu", "relu", "default", "yarn", "longrope", "full_attention", "é" * 300),
    *([], [1], [0, 0], [1.0] * 8, [float("nan")] * 8, ["full_attention"] * 2, ["sliding_attention"] * 2, [[[[]]]]),
    *(["linear_attention", "full_attention"], ["mamba"] * 2, ["conv"] * 2, ["recurrent"] * 2, "M*", "M-*E", [0, 1e30]),
    *({}, {"a": 1}, {"rope_type": "yarn"}, {"rope_type": "llama3", "factor": 8}, {"type": "longrope"}),
)
# Fields that a config may have without being in any of those above.
FIELDS = (
    *("partial_rotary_factor", "rope_scaling", "rope_parameters", "rope_theta", "rope_local_base_freq", "head_dim"),
    *("num_key_value_heads", "sliding_window", "layer_types", "sliding_window_pattern", "max_window_layers"),
    *("use_sliding_window", "attention_bias", "mlp_bias", "hidden_act", "hidden_activation", "model_type", "n_inner"),
    *("original_max_position_embeddings", "query_pre_attn_scalar", "attn_logit_softcapping", "embedding_scale"),
    *("final_logit_softcapping", "initializer_range", "H_cycles", "L_cycles", "num_layers_per_stack", "text_config"),
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "clip_qkv"),
    *("decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size", "experts_stored_apart"),
    *("linear_inputs_stored_apart", "linear_value_heads_tiled", "full_attn_idxs", "block_auto_adjust_ff_dim"),
    *(
        "conv_bias",
        "use_conv_bias",
        "mamba_proj_bias",
        "mamba_d_ssm",
        "mamba_expand",
        "time_step_limit",
        "num_dense_layers",
    ),
    *("ssm_multipliers", "hybrid_override_pattern", "layers_block_type", "full_attention_interval", "expand"),
    *("quantization_config", "use_bidirectional_attention", "add_cross_attention", "torch_dtype", "layer_norm_epsilon"),
)
ROPE_FIELDS = (
    *("rope_type", "type", "factor", "partial_rotary_factor", "rope_theta", "low_freq_factor", "high_freq_factor"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate", "short_factor"),
    *("long_factor", "original_max_position_embeddings"),
)


@dataclass(frozen=True)
class Subject:
    """A complete checkpoint that runs; a mutation changes one of its files."""

    name: str
    files: Files
    model: str
    """The file or directory, below the case's own, that is loaded."""
    adapter: str | None = None
    quantized: bool = False


def subjects() -> list[Subject]:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        found = [_directory(root / name, name, config) for name, config in CONFIGS.items()]
        found += [_gguf(root, name, kind) for name, kind in _GGUF_TYPES.items()]
        recurrent = [name for name, case in GGUF_CASES.items() if case.family.recurrent]
        found += [subject for name in recurrent for subject in _converted(root, name)]
        found.append(_fused(root))
        found += [_quantized(root / name, name) for name in _QUANTIZED]
        found.append(_stacked(root / "mxfp4"))
        found.append(_pickled(root / "pickle"))
        found.append(_adapted(root))
    return found


def _directory(path: Path, name: str, config: Mapping[str, object]) -> Subject:
    write_directory(path, config)
    return Subject(name, read_files(path, "model"), "model")


def _quantized(path: Path, name: str) -> Subject:
    tensors = ModelCheckpoint(savable_model(CONFIGS["llama"]), CONFIGS["llama"]).tensors()
    write_quantized(path, CONFIGS["llama"], dict(tensors), FORMATS[name])
    return Subject(f"quantized-{name}", read_files(path, "model"), "model", quantized=True)


def _stacked(path: Path) -> Subject:
    config = CONFIGS["gpt_oss"]
    write_mxfp4(path, config, dict(ModelCheckpoint(savable_model(config), config).tensors()))
    return Subject("quantized-mxfp4", read_files(path, "model"), "model", quantized=True)


def _pickled(path: Path) -> Subject:
    write_directory(path, CONFIGS["llama"])
    return Subject("pickle", read_files(pickle_weights(path), "model"), "model")


def _adapted(root: Path) -> Subject:
    base = write_directory(root / "base", CONFIGS["llama"])
    random_adapter(root / "adapter", savable_model(CONFIGS["llama"]), rank=2)
    files = {**read_files(base, "model"), **read_files(root / "adapter", "adapter")}
    return Subject("adapter", files, "model", adapter="adapter")


def _gguf(root: Path, name: str, kind: gguf.GGMLQuantizationType) -> Subject:
    path = root / f"{name}.gguf"
    _write_gguf(path, savable_model(CONFIGS["llama"]), kind)
    quantized = kind not in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
    return Subject(f"gguf-{name}", {"model.gguf": path.read_bytes()}, "model.gguf", quantized=quantized)


def _fused(root: Path) -> Subject:
    """A mixture whose gates and ups are one tensor for each layer."""
    case = replace(GGUF_CASES["mixtral"], config={**GGUF_CASES["mixtral"].config, "vocab_size": VOCAB})
    apart = save_gguf(root / "apart.gguf", case, build_gguf(case.config))
    return Subject(
        "gguf-fused-F32", {"model.gguf": fuse_experts(apart, root / "fused.gguf").read_bytes()}, "model.gguf"
    )


def _converted(root: Path, name: str) -> list[Subject]:
    """A family's own GGUF files, of a vocabulary as large as that of the other subjects."""
    case = GGUF_CASES[name]
    case = replace(case, config={**case.config, "vocab_size": VOCAB})
    model = build_gguf(case.config)
    found = []
    for kind, quantize in (("F32", None), ("Q8_0", gguf.GGMLQuantizationType.Q8_0)):
        files = {"model.gguf": save_gguf(root / f"{name}-{kind}.gguf", case, model, quantize).read_bytes()}
        found.append(Subject(f"gguf-{name}-{kind}", files, "model.gguf", quantized=quantize is not None))
    return found


def read_files(directory: Path, prefix: str) -> dict[str, bytes]:
    return {f"{prefix}/{path.name}": path.read_bytes() for path in sorted(directory.iterdir())}


def _write_gguf(path: Path, model: Model, kind: gguf.GGMLQuantizationType) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(VOCAB)])
    writer.add_token_merges([])
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    parts |= {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
    parts |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    from ostro.torch_models.loading import places_of

    for name, place in places_of(model).items():
        stem = name.removesuffix(".weight")
        *_, last = stem.split(".")
        ours = names.get(stem) or f"blk.{stem.split('.')[2]}.{parts[last]}"
        values = place.memory.numpy()
        if values.ndim < 2 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(f"{ours}.weight", values)
        elif kind == gguf.GGMLQuantizationType.F16:
            writer.add_tensor(f"{ours}.weight", values.astype(np.float16))
        else:
            writer.add_tensor(f"{ours}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- mutations ------------------------------------------------------------------------------------------------------


def mutated(subject: Subject, random: Random) -> Files:
    """The subject's files with one to three changes in them."""
    files = dict(subject.files)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        names = [each for each in files if subject.adapter is None or each.startswith("adapter/")]
        # Config first: there is more to get wrong in it.
        name = random.choices(names, [3 if each.endswith("config.json") else 1 for each in names])[0]
        change = _change_of(name, random)
        files[name] = change(files[name], random)
    return files


Change = Callable[[bytes, Random], bytes]


def _change_of(name: str, random: Random) -> Change:
    if random.random() < 0.1:
        return damaged
    if name.endswith("config.json"):
        return _change_config
    if name.endswith(".bin"):
        return _change_pickle
    return _change_gguf if name.endswith(".gguf") else _change_safetensors


def _value(random: Random) -> Any:
    return random.choice(NUMBERS) if random.random() < 0.75 else random.choice(OTHERS)


def _near(value: object, random: Random) -> object:
    """Something close to a number, which checks of ranges alone let pass."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return _value(random)
    return random.choice((value + 1, value - 1, value * 2, value // 2, value * 3, -value, value + 0.5, value * 16))


def _change_config(data: bytes, random: Random) -> bytes:
    try:
        config = json.loads(data)
    except ValueError:
        return data
    if not isinstance(config, dict) or not config:
        return data
    key = random.choice(list(config))
    if isinstance(config.get("quantization_config"), dict) and random.random() < 0.5:
        _change_table(config["quantization_config"], random)
        return json.dumps(config).encode()
    match random.randrange(8):
        case 0 | 1:
            config[key] = _value(random)
        case 2 | 3:
            config[key] = _near(config[key], random)
        case 4:
            config[random.choice(FIELDS)] = _value(random)
        case 5:
            table = {random.choice(ROPE_FIELDS): _value(random) for _ in range(random.randrange(1, 4))}
            kind = random.choice(("default", "linear", "llama3", "yarn", "longrope", "dynamic"))
            config[random.choice(("rope_scaling", "rope_parameters"))] = {"rope_type": kind, **table}
        case 6:
            del config[key]
        case 7:
            other = random.choice(list(config))
            config[key], config[other] = config[other], config[key]
            if random.random() < 0.3:
                config["architectures"] = random.choice(list(CONFIGS.values()))["architectures"]
    return json.dumps(config).encode()


def _change_table(table: dict[str, Any], random: Random) -> None:
    """One value in it, or in a table within it."""
    if not table:
        return
    key = random.choice(list(table))
    if isinstance(table[key], dict) and random.random() < 0.8:
        _change_table(table[key], random)
    elif random.random() < 0.2:
        del table[key]
    else:
        other = random.choice(("gptq", "awq", "fp8", "bitsandbytes", "compressed-tensors", "mxfp4", "pack-quantized"))
        table[key] = random.choice((other, not table[key], _value(random), _near(table[key], random)))


def _change_safetensors(data: bytes, random: Random) -> bytes:
    (size,) = struct.unpack("<Q", data[:8]) if len(data) >= 8 else (0,)
    try:
        header = json.loads(data[8 : 8 + size])
        names = [name for name in header if name != "__metadata__"]
        entry = header[name := random.choice(names)]
        alike = [each for each in names if _num_bytes(header[each]) == _num_bytes(entry)]
        match random.randrange(14):
            case 8 | 9:
                # All below the header's own checks: the bytes are there, and mean something else.
                entry["dtype"] = random.choice(_SAME_WIDTH.get(entry["dtype"], ("F32",)))
            case 10:
                rows, *cols = entry["shape"]
                entry["shape"] = random.choice(([*cols, rows], [rows, *cols, 1], [1, rows, *cols], [rows * 2, *cols]))
            case 11:
                entry["data_offsets"] = header[random.choice(alike)]["data_offsets"]
            case 12:
                other = random.choice(alike)
                header[name], header[other] = header[other], header[name]
            case 13:
                return _poison(data, 8 + size, random)
            case 0:
                entry["shape"][random.randrange(len(entry["shape"]))] = _value(random)
            case 1:
                entry["shape"] = random.choice((entry["shape"][::-1], [*entry["shape"], 1], entry["shape"][:1], []))
            case 2:
                entry["data_offsets"][random.randrange(2)] = _value(random)
            case 3:
                entry["dtype"] = random.choice(("F16", "BF16", "F64", "I32", "U8", "I8", "BOOL", "F8_E4M3", "?", 3))
            case 4:
                header[random.choice((f"{name}x", "", "lm_head.bias", random.choice(names)))] = header.pop(name)
            case 5:
                entry["data_offsets"] = header[random.choice(names)]["data_offsets"]
            case 6:
                header.pop(name)
            case 7:
                return _poison(data, 8 + size, random)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError):
        return _overwrite(data, random)
    text = json.dumps(header).encode()
    length = len(text) if random.random() < 0.9 else random.choice((0, 1, len(text) + 1, 2**31, 2**63))
    return struct.pack("<Q", length) + text + data[8 + size :]


# Instructions of pickles that take memory, call functions or move values about.
_INSTRUCTIONS = (
    *(
        b"r\xff\xff\xff\x7f",
        b"h\x00",
        b"q\x00",
        b"j\xff\xff\xff\xff",
        b"\x86",
        b"t",
        b"(",
        b"R",
        b"b",
        b"s",
        b"u",
        b"a",
    ),
    *(
        b"X\xff\xff\xff\x7f",
        b"\x8b\xff\xff\xff\x7f",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"2",
        b"0",
        b"Q",
        b".",
        b"N",
    ),
    *(b"J\xff\xff\xff\x7f", b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"cos\nsystem\n", b"cbuiltins\nlist\n"),
)


def _change_pickle(data: bytes, random: Random) -> bytes:
    """Rewrites the archive, so that its checksums fit the changed pickle."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            files = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    except (ValueError, OSError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return damaged(data, random)
    name = (
        next(each for each in files if each.endswith("data.pkl")) if random.random() < 0.8 else random.choice([*files])
    )
    if random.random() < 0.3:
        files[name] = damaged(files[name], random)
    else:
        at = random.randrange(len(files[name]) + 1)
        cut = at + random.choice((0, 0, 1, 2, 5))
        files[name] = files[name][:at] + random.choice(_INSTRUCTIONS) + files[name][cut:]
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", random.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        for each, content in files.items():
            archive.writestr(each, content)
    return written.getvalue()


_SAME_WIDTH = {
    "F32": ("I32", "U32", "F32"),
    "F16": ("BF16", "I16"),
    "BF16": ("F16", "I16"),
    "I32": ("F32", "U32"),
    "I64": ("F64", "U64"),
    **dict.fromkeys(("I8", "U8", "F8_E4M3"), ("I8", "U8", "F8_E4M3", "F8_E5M2", "BOOL")),
}


def _num_bytes(entry: Mapping[str, Any]) -> int:
    begin, end = entry["data_offsets"]
    return int(end - begin)


def _change_gguf(data: bytes, random: Random) -> bytes:
    """Counts, types, lengths, values, shapes and offsets lie as words among names: most places are one of these."""
    end = data.rfind(b"blk.1.") + 64 if b"blk.1." in data else 256
    changed = bytearray(data)
    if random.random() < 0.15:
        return _poison(data, min(end, len(data) - 8), random)
    number = random.choice([each for each in NUMBERS if isinstance(each, int) and 0 <= each < 2**64])
    assert isinstance(number, int)
    if random.random() < 0.5 and (keys := _places(data, _architecture(data) + b".", end)):
        # A key of the architecture's, its type, and then the value.
        at = random.choice(keys)
        (length,) = struct.unpack_from("<Q", data, at - 8)
        at = min(at + (length if length < 64 else 0), len(data) - 8)
        kind = random.random()
        if kind < 0.2:
            struct.pack_into("<I", changed, at, random.randrange(14))
        elif kind < 0.8:
            struct.pack_into("<I", changed, at + 4, number & 0xFFFFFFFF)
        else:
            struct.pack_into("<f", changed, at + 4, random.choice((0.0, -1.0, 1e-45, 1e38, float("nan"), float("inf"))))
        return bytes(changed)
    at = random.randrange(4, max(5, min(end, len(data) - 8)))
    if random.random() < 0.5:
        struct.pack_into("<I", changed, at, number & 0xFFFFFFFF)
    else:
        struct.pack_into("<Q", changed, at, number)
    return bytes(changed)


def _architecture(data: bytes) -> bytes:
    """What the architecture's keys begin with: the value of the first key, if it is still as it was written."""
    name = b"general.architecture"
    at = data.find(name) + len(name) + 12
    length = int.from_bytes(data[at - 8 : at], "little")
    return data[at : at + length] if 0 < length < 64 else b"llama"


def _places(data: bytes, what: bytes, end: int) -> list[int]:
    found, at = [], data.find(what)
    while 8 <= at < end:
        found.append(at)
        at = data.find(what, at + 1)
    return found


def _poison(data: bytes, begin: int, random: Random) -> bytes:
    """Replaces some of the weights, also with NaN and infinities."""
    changed = bytearray(data)
    for _ in range(random.randrange(1, 4)):
        at = random.randrange(begin, max(begin + 1, len(data) - 4)) // 4 * 4
        if 0 <= at <= len(data) - 4:
            struct.pack_into("<f", changed, at, random.choice((0.0, 1.0, -3.0, 30.0, float("nan"), float("-inf"))))
    return bytes(changed)


def damaged(data: bytes, random: Random) -> bytes:
    """What a bad disk or an interrupted download leaves."""
    return random.choice((_flip, _cut, _overwrite))(data, random)


def _flip(data: bytes, random: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random.randrange(1, 9)):
        if changed:
            changed[random.randrange(min(len(changed), 4096))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _cut(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _overwrite(data: bytes, random: Random) -> bytes:
    at = random.randrange(max(1, min(len(data), 4096)))
    return data[:at] + random.randbytes(random.choice((1, 2, 4, 8))) + data[at + 8 :]
