"""Levanter's model settings as Hugging Face's config.json. Knows which of them change what a model computes.

    type: llama
    hidden_dim: 2048
    num_layers: 16
    rope: {type: llama3}

What is not given has Levanter's default. The config describes the model as Levanter itself computes it: windows and
final soft caps that its settings name but its code does not apply are left out.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ostro.errors import BadCheckpoint, UnsupportedModel
from ostro.weights.levanter_yaml import Settings, read_model_section

_LLAMA: Mapping[str, object] = {
    "max_seq_len": 2048,
    "hidden_dim": 4096,
    "intermediate_dim": 11008,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 32,
    "activation_function": "silu",
    "layer_norm_epsilon": 1e-5,
}
_MISTRAL = {
    **_LLAMA,
    "max_seq_len": 8192,
    "intermediate_dim": 14336,
    "num_kv_heads": 8,
    "layer_norm_epsilon": 1e-6,
}
_GEMMA: Mapping[str, object] = {
    "max_seq_len": 8192,
    "hidden_dim": 2048,
    "intermediate_dim": 16384,
    "num_layers": 18,
    "num_heads": 8,
    "num_kv_heads": 1,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}
# Levanter's types: the family that serves each, and its defaults.
_TYPES: Mapping[str, tuple[str, str, Mapping[str, object]]] = {
    "gemma2": ("gemma2", "Gemma2ForCausalLM", {**_GEMMA, "attn_logit_softcapping": 50.0}),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM", _GEMMA),
    "llama": ("llama", "LlamaForCausalLM", _LLAMA),
    "mistral": ("mistral", "MistralForCausalLM", _MISTRAL),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", {**_LLAMA, "max_seq_len": 4096, "layer_norm_epsilon": 1e-6}),
    # Without windows it is OLMo 2.
    "olmo3": ("olmo2", "Olmo2ForCausalLM", {**_LLAMA, "sliding_window": 4096}),
    "qwen": ("qwen2", "Qwen2ForCausalLM", _LLAMA),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", _LLAMA),
}
_GEMMAS = ("gemma2", "gemma3")

# Settings that are used, or checked, and where they are not of every type, the types that they are of. Of another type,
# or of a name that is neither here nor below, they ask for something that no family computes.
_USED: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    (
        *("type", "max_seq_len", "seq_len", "hidden_dim", "intermediate_dim", "num_layers", "num_heads"),
        *("num_kv_heads", "vocab_size", "activation_function", "layer_norm_epsilon", "use_layer_norm_weight"),
        *("tie_word_embeddings", "rope", "rope_theta", "rope_scaling"),
        # Where they are not of the type, Levanter passes them over.
        *("head_dim", "sliding_window", "layer_types", "attn_logit_softcapping"),
    ),
    tuple(_TYPES),
) | {"attention_bias": ("olmo2", "olmo3"), "use_qk_norm": ("llama", "qwen3", "gemma3")}
# Of training alone, or handed to exports without being computed with.
_WITHOUT_EFFECT = frozenset(
    (
        *("attention_dropout", "attn_backend", "cross_entropy_block_size", "flash_attention_block_size"),
        *("gradient_checkpointing", "gradient_checkpointing_block_size", "initializer_range", "reference_checkpoint"),
        *("scan_layers", "tokenizer", "upcast_attn", "use_flash_attention"),
        *("final_logit_softcapping", "max_window_layers", "query_pre_attn_scalar", "rope_local_base_freq"),
        *("sliding_window_pattern", "use_sliding_window"),
    )
)


@dataclass(frozen=True, slots=True)
class LevanterModel:
    type: str
    settings: Settings

    def config(self, *, stored_vocab: int, stored_head_dim: int, dtype: str) -> dict[str, object]:
        """As config.json has it; some of it only the arrays can tell."""
        settings = self.settings
        family, architecture, _ = _TYPES[self.type]
        if self.type == "llama" and settings.flag("use_qk_norm"):
            # Llama with normed query and key heads is what Qwen 3 is.
            family, architecture = "qwen3", "Qwen3ForCausalLM"
        heads, kv_heads = settings.integer("num_heads"), settings.integer("num_kv_heads")
        if heads % kv_heads:
            raise BadCheckpoint(f"{settings.path}: {heads} num_heads cannot share {kv_heads} num_kv_heads evenly.")
        head_dim = self._head_dim(stored_head_dim)
        config = {
            "architectures": [architecture],
            "model_type": family,
            "vocab_size": stored_vocab if settings.get("vocab_size") is None else settings.integer("vocab_size"),
            "hidden_size": settings.integer("hidden_dim"),
            "intermediate_size": settings.integer("intermediate_dim"),
            "num_hidden_layers": settings.integer("num_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": self._context(),
            "rms_norm_eps": settings.number("layer_norm_epsilon"),
            # Levanter's Mistral has a head of its own, whatever its settings say.
            "tie_word_embeddings": self.type != "mistral" and settings.flag("tie_word_embeddings"),
            "torch_dtype": dtype,
            **_rope(settings),
        }
        activation = settings.text("activation_function")
        if self.type not in _GEMMAS:
            return config | {"hidden_act": activation, "attention_bias": settings.flag("attention_bias")}
        softcap = settings.get("attn_logit_softcapping")
        return config | {
            "hidden_activation": "gelu_pytorch_tanh" if activation == "gelu_new" else activation,
            "query_pre_attn_scalar": head_dim,
            "attn_logit_softcapping": None if softcap is None else settings.number("attn_logit_softcapping"),
            "layer_types": ["full_attention"] * settings.integer("num_layers"),
        }

    def check(self) -> None:
        """Raises UnsupportedModel for what no family of Ostro's computes."""
        settings = self.settings
        if settings.get("use_layer_norm_weight") is False:
            raise _unsupported(settings, "norms without weights")
        if "rope" in settings.given and settings.get("rope") is None:
            raise _unsupported(settings, "attention without rotary positions (rope: null)")
        for name, value in settings.given.items():
            if value and name not in _WITHOUT_EFFECT and self.type not in _USED.get(name, ()):
                raise _unsupported(settings, name)
        if self.type == "olmo3" and self._slides():
            raise _unsupported(settings, "a sliding window shorter than the context")

    def _context(self) -> int:
        # Older versions call it seq_len.
        older = "seq_len" in self.settings.given and "max_seq_len" not in self.settings.given
        return self.settings.integer("seq_len" if older else "max_seq_len")

    def _head_dim(self, stored: int) -> int:
        if self.type in _GEMMAS:
            # Levanter's Gemmas have a setting for it that not every version goes by.
            return stored
        if self.type in ("llama", "olmo3", "qwen3") and self.settings.get("head_dim") is not None:
            return self.settings.integer("head_dim")
        return max(self.settings.integer("hidden_dim") // self.settings.integer("num_heads"), 1)

    def _slides(self) -> bool:
        types = self.settings.get("layer_types")
        all_full = isinstance(types, list) and all(each == "full_attention" for each in types)
        return not all_full and self.settings.integer("sliding_window") < self._context()


def read_levanter_model(path: Path) -> LevanterModel:
    """The model that a YAML describes. Raises ModelNotFound, BadCheckpoint or UnsupportedModel."""
    settings = read_model_section(path)
    kind = settings.get("type")
    if kind is None:
        raise BadCheckpoint(f"{path} does not tell the model's type. Add 'type: llama', or what it is.")
    if not isinstance(kind, str) or kind not in _TYPES:
        known = ", ".join(sorted(_TYPES))
        raise UnsupportedModel(f"{path}: Levanter's model type {kind!r} is not supported; supported: {known}.")
    model = LevanterModel(kind, replace(settings, defaults=_TYPES[kind][2]))
    model.check()
    return model


def _rope(settings: Settings) -> dict[str, object]:
    table = settings.table("rope")
    if not table:
        # As older versions write it.
        scaling = settings.table("rope_scaling")
        table = {**scaling, "type": scaling.get("rope_type") or scaling.get("type") or "default"}
        table |= {"theta": settings.given["rope_theta"]} if "rope_theta" in settings.given else {}
    kind = table.get("type", "default")
    rope = Settings(settings.path, table, _ROPE_DEFAULTS)
    if kind == "llama3":
        rope = replace(rope, defaults=_LLAMA3_DEFAULTS)
    theta, factor = rope.number("theta"), rope.number("factor")
    original = "original_max_position_embeddings"
    match kind:
        case "default" | "linear" if factor == 1.0:
            return {"rope_theta": theta}
        case "default" | "linear":
            scaling = {"factor": factor, "rope_type": "linear"}
        case "llama3":
            scaling = {name: rope.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor")}
            scaling |= {original: rope.integer(original), "rope_type": "llama3"}
        case "yarn":
            scaling = {name: rope.number(name) for name in ("factor", "beta_fast", "beta_slow")}
            stretch = 0.1 * rope.number("mscale") * math.log(max(factor, 1.0)) + 1.0
            scaling |= {original: rope.integer(original), "attention_factor": stretch, "rope_type": "yarn"}
        case _:
            raise _unsupported(settings, f"rope of the type {kind!r}")
    return {"rope_theta": theta, "rope_scaling": scaling}


_ROPE_DEFAULTS: Mapping[str, object] = {
    "theta": 10_000.0,
    "factor": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "original_max_position_embeddings": 2048,
}
_LLAMA3_DEFAULTS: Mapping[str, object] = {
    "theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _unsupported(settings: Settings, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{settings.path} asks for {what}, which Ostro does not serve of Levanter's type {settings.get('type')!r}."
    )
