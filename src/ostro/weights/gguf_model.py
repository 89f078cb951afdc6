"""What a GGUF file's metadata and tensor names mean in Hugging Face terms. Knows no torch and reads no weights.

Converters rename tensors, and change some: they reorder the rows of Llama's queries and keys for interleaved
rotation, add one to Gemma's norm weights, and transpose GPT-2's matrices. Here is the way back, as data: a `Family`
for each architecture says how names map, what is to be undone, and what its config holds besides the common fields.
"""

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from ostro.errors import BadCheckpoint, UnsupportedModel
from ostro.weights.gguf_header import GGML_TYPES, GgufHeader, GgufTensorInfo, MetadataValue, damaged
from ostro.weights.pooling import Pooling, PoolingMode

Config = dict[str, object]

_FLOAT32_MAX = 3.4e38
# Lists are made with an entry for each, before anything is built.
_MOST_BLOCKS = 4096


class Undo(Enum):
    """What has to be done to a stored tensor to get the original back."""

    NOTHING = "nothing"
    ROTATE_HALVES = "rotate_halves"
    """Rows of each head lie as 0, h/2, 1, h/2+1, …: bring them back to 0, 1, … h/2, …"""
    SUBTRACT_ONE = "subtract_one"
    TRANSPOSE = "transpose"


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """One weight under its canonical name, and how to get it out of the file."""

    name: str
    path: Path
    info: GgufTensorInfo
    undo: Undo
    heads: int = 1
    """Heads among the rows, for ROTATE_HALVES."""


@dataclass(frozen=True, slots=True)
class Family:
    architecture: str
    model_type: str
    blocks: Mapping[str, str]
    """Names inside one block, ours by theirs."""
    extend: Callable[["_Facts"], Config]
    """Config fields that this family has besides the common ones."""
    block_prefix: str = "model.layers"
    roots: Mapping[str, str] = field(default_factory=lambda: _DECODER_ROOTS)
    rotate_halves: frozenset[str] = frozenset()
    subtract_one: str | None = None
    """Names that end so have one added."""
    transpose: frozenset[str] = frozenset()


class _Facts:
    """Typed access to the metadata of one model."""

    def __init__(self, headers: tuple[GgufHeader, ...]) -> None:
        self.path = headers[0].path
        self.metadata = headers[0].metadata
        self.arch = self.text("general.architecture")
        self._tensors = {info.name: (header.path, info) for header in headers for info in header.tensors}

    def text(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise self._bad(key, value, "a text")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._own(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._bad(key, value, "a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._own(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._bad(key, value, "a finite number")
        # Metadata are 32-bit floats; their shortest decimal is what the author wrote (1e-05, not 9.99999974e-06).
        return _shortest_float32(value)

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self._own(key, None) is not None else None

    def token_id(self, kind: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        return value if isinstance(value, int) else None

    def flags(self, key: str) -> list[bool] | None:
        value = self.metadata.get(f"{self.arch}.{key}")
        return [bool(each) for each in value] if isinstance(value, list) else None

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise damaged(self.path, f"it holds no tensor {name!r}")
        return self._tensors[name][1].shape

    def factors(self, name: str) -> list[float] | None:
        """A small float32 tensor that belongs to the config rather than to the weights."""
        if name not in self._tensors:
            return None
        path, info = self._tensors[name]
        if GGML_TYPES[info.ggml_type].name != "F32" or len(info.shape) != 1:
            raise damaged(path, f"tensor {name!r} is not a list of 32-bit floats")
        with path.open("rb") as file:
            file.seek(info.offset)
            return [_shortest_float32(value) for value in struct.unpack(f"<{info.shape[0]}f", file.read(info.nbytes))]

    def _own(self, key: str, default: float | None) -> MetadataValue | None:
        """The architecture's own key. A list with one value for each layer counts as that value if all agree."""
        value = self.metadata.get(f"{self.arch}.{key}", default)
        if isinstance(value, list) and value:
            if any(each != value[0] for each in value):
                raise UnsupportedModel(f"{self.path} varies {key} from layer to layer, which Ostro does not support.")
            return value[0]
        return value

    def _bad(self, key: str, value: object, wanted: str) -> BadCheckpoint:
        return BadCheckpoint(
            f"{self.path} should give {wanted} as {key} but gives {value!r}. Download or convert it again."
        )


def _shortest_float32(value: float) -> float:
    """The shortest decimal that rounds to this 32-bit float; any other number as it is."""
    if abs(value) > _FLOAT32_MAX:
        return value
    for digits in range(6, 10):
        shorter = float(f"{value:.{digits}g}")
        if struct.pack("<f", shorter) == struct.pack("<f", value):
            return shorter
    return value


@dataclass(frozen=True, slots=True)
class GgufModel:
    config: Config
    generation_config: Config
    pooling: Pooling | None
    weights: tuple[GgufWeight, ...]


def describe(headers: tuple[GgufHeader, ...]) -> GgufModel:
    """The model that these files hold together; the first holds its metadata."""
    facts = _Facts(headers)
    family = FAMILIES.get(facts.arch)
    if family is None:
        raise UnsupportedModel(
            f"{facts.path} holds a {facts.arch!r} model; the GGUF architectures Ostro knows are "
            f"{', '.join(sorted(FAMILIES))}."
        )
    if (blocks := facts.integer("block_count", 0)) > _MOST_BLOCKS:
        raise damaged(facts.path, f"it claims {blocks} blocks, and {_MOST_BLOCKS} are the most")
    if facts.integer("expert_count", 0):
        raise UnsupportedModel(f"{facts.path} is a mixture of experts, which Ostro does not support for {facts.arch}.")
    return GgufModel(
        _config(family, facts), _generation_config(facts), _pooling(facts), _weights(family, facts, headers)
    )


def _config(family: Family, facts: _Facts) -> Config:
    common: Config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": facts.shape("token_embd.weight")[0],
        "tie_word_embeddings": not facts.has_tensor("output.weight"),
        "bos_token_id": facts.token_id("bos"),
        "eos_token_id": facts.token_id("eos"),
        "pad_token_id": facts.token_id("padding"),
    }
    return common | family.extend(facts)


def _generation_config(facts: _Facts) -> Config:
    config: Config = {}
    if (bos := facts.token_id("bos")) is not None:
        config["bos_token_id"] = bos
    if ends := _end_ids(facts):
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    for ours, theirs in _SAMPLING.items():
        value = facts.metadata.get(f"general.sampling.{theirs}")
        if value is not None:
            config[ours] = _shortest_float32(value) if isinstance(value, float) else value
    return config


# In generation_config.json -> after `general.sampling.` in GGUF.
_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def _pooling(facts: _Facts) -> Pooling | None:
    modes: dict[int, PoolingMode] = {1: "mean", 2: "cls", 3: "lasttoken"}
    kind = facts.integer("pooling_type", 0)
    if kind == 0:
        return None
    if kind not in modes:
        raise UnsupportedModel(f"{facts.path} pools in a way (type {kind}) that Ostro does not support.")
    return Pooling(modes[kind], normalize=True)


# Tokens that end a turn. Files seldom say so in metadata, and a chat model that does not stop at its own is useless.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>")


def _end_ids(facts: _Facts) -> list[int]:
    ids = [facts.token_id(kind) for kind in ("eos", "eot", "eom")]
    template = facts.metadata.get("tokenizer.chat_template")
    tokens = facts.metadata.get("tokenizer.ggml.tokens")
    if isinstance(template, str) and isinstance(tokens, list):
        ids += [tokens.index(text) for text in _TURN_ENDS if text in template and text in tokens]
    return list(dict.fromkeys(each for each in ids if each is not None))


_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROOT_NAME = re.compile(r"(\w+)\.(weight|bias)")
# They belong to the config (see _rope) or can be computed.
_NOT_WEIGHTS = re.compile(r"(rope_freqs|rope_factors_long|rope_factors_short|blk\.\d+\.attn_rot_embd)\.weight")


def _weights(family: Family, facts: _Facts, headers: tuple[GgufHeader, ...]) -> tuple[GgufWeight, ...]:
    return tuple(
        _weight(family, facts, header.path, info)
        for header in headers
        for info in header.tensors
        if not _NOT_WEIGHTS.fullmatch(info.name)
    )


def _weight(family: Family, facts: _Facts, path: Path, info: GgufTensorInfo) -> GgufWeight:
    short, name = _canonical_name(family, info.name)
    if name is None:
        raise UnsupportedModel(f"{path} holds a tensor {info.name!r}, which Ostro does not know for {facts.arch}.")
    if short in family.rotate_halves:
        heads = facts.integer("attention.head_count")
        if short == "attn_k":
            heads = facts.integer("attention.head_count_kv", heads)
        if heads == 0 or info.shape[0] % (2 * heads):
            raise damaged(path, f"tensor {info.name!r} has {info.shape[0]} rows, which {heads} heads cannot share")
        return GgufWeight(name, path, info, Undo.ROTATE_HALVES, heads)
    if family.subtract_one and info.name.endswith(family.subtract_one):
        return GgufWeight(name, path, info, Undo.SUBTRACT_ONE)
    if short in family.transpose and info.name.endswith(".weight"):
        return GgufWeight(name, path, info, Undo.TRANSPOSE)
    return GgufWeight(name, path, info, Undo.NOTHING)


def _canonical_name(family: Family, name: str) -> tuple[str, str | None]:
    """Their short name and our full one; None where the family has no such tensor."""
    if match := _BLOCK_NAME.fullmatch(name):
        layer, short, kind = match.groups()
        ours = family.blocks.get(short)
        return short, f"{family.block_prefix}.{layer}.{ours}.{kind}" if ours else None
    if match := _ROOT_NAME.fullmatch(name):
        short, kind = match.groups()
        ours = family.roots.get(short)
        # Roots never share a short name with what is changed inside blocks.
        return "", f"{ours}.{kind}" if ours else None
    return "", None


def _decoder(facts: _Facts) -> Config:
    """What all the families with rotary positions and RMS norms have."""
    hidden, heads = facts.integer("embedding_length"), facts.integer("attention.head_count")
    return {
        "hidden_size": hidden,
        "intermediate_size": facts.integer("feed_forward_length"),
        "num_hidden_layers": facts.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.integer("attention.head_count_kv", heads),
        "head_dim": _head_dim(facts),
        "max_position_embeddings": facts.integer("context_length"),
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(facts),
        "hidden_act": "silu",
        "attention_bias": facts.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": facts.has_tensor("blk.0.ffn_up.bias"),
    }


def _rope_scaling(facts: _Facts) -> Config | None:
    context = facts.integer("context_length")
    original = facts.integer("rope.scaling.original_context_length", context)
    if (divisors := facts.factors("rope_freqs.weight")) is not None:
        # Llama 3's scaling, worked out by the converter for each frequency. The parameters it came from are gone,
        # but the divisors say all: long-context rope with one set of them, and attention left as it is.
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    long, short = facts.factors("rope_factors_long.weight"), facts.factors("rope_factors_short.weight")
    if long is not None and short is not None:
        scaling: Config = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "factor": context / max(original, 1),
            "original_max_position_embeddings": original,
        }
        if (attention := facts.optional_number("rope.scaling.attn_factor")) is not None:
            scaling["attention_factor"] = attention
        return scaling
    return _named_rope_scaling(facts, original)


def _named_rope_scaling(facts: _Facts, original: int) -> Config | None:
    kind = facts.metadata.get(f"{facts.arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": facts.number("rope.scaling.factor")}
    if kind != "yarn":
        raise UnsupportedModel(f"{facts.path} scales its rotary positions by {kind!r}, which Ostro does not support.")
    scaling: Config = {
        "rope_type": "yarn",
        "factor": facts.number("rope.scaling.factor"),
        "original_max_position_embeddings": original,
    }
    for ours, theirs in (
        ("attention_factor", "yarn_attn_factor"),
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
    ):
        if (value := facts.optional_number(f"rope.scaling.{theirs}")) is not None:
            scaling[ours] = value
    return scaling


def _layer_types(facts: _Facts, period: int) -> list[str]:
    """Which layers attend within a window: as the file lists them, else all but each `period`-th."""
    layers = facts.integer("block_count")
    sliding = facts.flags("attention.sliding_window_pattern")
    if sliding is None:
        period = facts.integer("attention.sliding_window_pattern", period)
        sliding = [period == 0 or (layer + 1) % period != 0 for layer in range(layers)]
    if len(sliding) != layers:
        raise damaged(facts.path, f"it lists {len(sliding)} windows for {layers} layers")
    return ["sliding_attention" if each else "full_attention" for each in sliding]


def _head_dim(facts: _Facts) -> int:
    heads = facts.integer("attention.head_count")
    return facts.integer("attention.key_length", facts.integer("embedding_length") // max(heads, 1))


def _llama(facts: _Facts) -> Config:
    # Files older than the key length: in this family rotation covers the whole head.
    rotated = facts.integer("rope.dimension_count", _head_dim(facts))
    return _decoder(facts) | {"head_dim": facts.integer("attention.key_length", rotated)}


def _qwen2(facts: _Facts) -> Config:
    return _decoder(facts) | {"use_sliding_window": False, "sliding_window": None}


def _gemma2(facts: _Facts) -> Config:
    return _decoder(facts) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": facts.integer("attention.sliding_window", 4096),
        "layer_types": _layer_types(facts, period=2),
        "attn_logit_softcapping": facts.optional_number("attn_logit_softcapping"),
        "final_logit_softcapping": facts.optional_number("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scale(facts, layers_of_27b=46),
    }


def _gemma3(facts: _Facts) -> Config:
    window = facts.integer("attention.sliding_window", 0)
    layers = facts.integer("block_count")
    return _decoder(facts) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": facts.number("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": facts.number("rope.freq_base_swa", 10000.0),
        "sliding_window": window or None,
        "layer_types": _layer_types(facts, period=6) if window else ["full_attention"] * layers,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": facts.optional_number("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scale(facts, layers_of_27b=62),
    }


def _query_scale(facts: _Facts, layers_of_27b: int) -> int:
    """Gemma divides queries by the root of this. Files do not store it; only the 27B models differ from head_dim."""
    if facts.integer("block_count") == layers_of_27b:
        return facts.integer("embedding_length") // max(facts.integer("attention.head_count"), 1)
    return _head_dim(facts)


def _phi3(facts: _Facts) -> Config:
    context = facts.integer("context_length")
    return _decoder(facts) | {
        "partial_rotary_factor": facts.integer("rope.dimension_count", _head_dim(facts)) / max(_head_dim(facts), 1),
        "original_max_position_embeddings": facts.integer("rope.scaling.original_context_length", context),
        "sliding_window": facts.integer("attention.sliding_window", 0) or None,
    }


def _olmo2(facts: _Facts) -> Config:
    config = _decoder(facts)
    window = facts.integer("attention.sliding_window", 0)
    if not window:
        return config
    # Olmo 3 is stored as Olmo 2 with windows.
    return config | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _layer_types(facts, period=4),
    }


def _gpt2(facts: _Facts) -> Config:
    context = facts.integer("context_length")
    return {
        "n_embd": facts.integer("embedding_length"),
        "n_inner": facts.integer("feed_forward_length"),
        "n_layer": facts.integer("block_count"),
        "n_head": facts.integer("attention.head_count"),
        "n_positions": context,
        "n_ctx": context,
        "layer_norm_epsilon": facts.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


_DECODER_ROOTS: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_NORMS = _POST_NORMS | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"}

FAMILIES: dict[str, Family] = {
    # Mistral and SmolLM2 files say llama too, and compute the same.
    "llama": Family(
        "LlamaForCausalLM",
        "llama",
        _ATTENTION | _MLP | _PRE_NORMS,
        _llama,
        rotate_halves=frozenset({"attn_q", "attn_k"}),
    ),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", _ATTENTION | _MLP | _PRE_NORMS, _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", _ATTENTION | _QK_NORMS | _MLP | _PRE_NORMS, _qwen2),
    "gemma2": Family(
        "Gemma2ForCausalLM", "gemma2", _ATTENTION | _MLP | _GEMMA_NORMS, _gemma2, subtract_one="norm.weight"
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _ATTENTION | _QK_NORMS | _MLP | _GEMMA_NORMS,
        _gemma3,
        subtract_one="norm.weight",
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        "phi3",
        _PRE_NORMS
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
        _phi3,
    ),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", _ATTENTION | _QK_NORMS | _MLP | _POST_NORMS, _olmo2),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "gpt2",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        _gpt2,
        block_prefix="transformer.h",
        roots={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        transpose=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
}
