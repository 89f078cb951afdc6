"""A model's shape, read from its config without building the model. Knows the names of families; knows no files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ostro.errors import BadRequest, UnsupportedModel
from ostro.models.config import ConfigReader
from ostro.models.config_check import check_config
from ostro.models.rope_settings import rope_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """As `models.base.ModelShape`, read without building the model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    widest: int
    """The longest row that a layer makes of a token."""


def read_shape(config: Mapping[str, object], max_seq_len: int | None = None) -> Shape:
    reader = ConfigReader(config)
    names = reader.texts("architectures") or (reader.text("model_type", "(none named)"),)
    for read, known in KNOWN.items():
        if not known.isdisjoint(names):
            check_config(config)
            return read(reader, max_seq_len)
    raise UnsupportedModel(f"Architecture {', '.join(names)} is not supported.")


def _decoder_shape(config: ConfigReader, max_seq_len: int | None) -> Shape:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", hidden // heads)
    settings = rope_settings(config)
    return Shape(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        max_seq_len=_served(max_seq_len, settings.default_context(), settings.longest_context()),
        widest=max(config.integer("intermediate_size"), heads * head_dim),
    )


def _hrm_text_shape(config: ConfigReader, max_seq_len: int | None) -> Shape:
    shape = _decoder_shape(config, max_seq_len)
    depth = config.integer("num_layers_per_stack", shape.num_layers)
    head_dim = config.integer("head_dim", 128)
    return replace(
        shape,
        num_layers=depth * config.integer("H_cycles", 2) * (config.integer("L_cycles", 3) + 1),
        num_kv_heads=shape.num_heads,
        head_dim=head_dim,
        widest=max(config.integer("intermediate_size"), 4 * shape.num_heads * head_dim),
    )


def _gpt2_shape(config: ConfigReader, max_seq_len: int | None) -> Shape:
    hidden, heads, positions = config.integer("n_embd"), config.integer("n_head"), config.integer("n_positions")
    return Shape(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=config.integer("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_seq_len=_served(max_seq_len, positions, positions),
        widest=config.integer("n_inner", 4 * hidden),
    )


def _served(asked: int | None, usual: int, longest: int) -> int:
    if asked is not None and asked > longest:
        raise BadRequest(
            f"max_seq_len is {asked}, but the model knows only {longest} positions; lower it to {longest} or less.",
            param="max_seq_len",
        )
    return asked or usual


def _names(*families: str) -> frozenset[str]:
    """A family's model_type, and its architecture with a head and without."""
    return frozenset(name for family in families for name in family.split())


KNOWN: Mapping[Callable[[ConfigReader, int | None], Shape], frozenset[str]] = {
    _gpt2_shape: _names("gpt2 GPT2LMHeadModel GPT2Model"),
    _hrm_text_shape: _names("hrm_text HrmTextForCausalLM HrmTextModel"),
    _decoder_shape: _names(
        "gemma2 Gemma2ForCausalLM Gemma2Model",
        "gemma3_text Gemma3ForCausalLM Gemma3TextModel",
        "llama LlamaForCausalLM LlamaModel",
        "mistral MistralForCausalLM MistralModel",
        "olmo2 Olmo2ForCausalLM Olmo2Model",
        "phi3 Phi3ForCausalLM Phi3Model",
        "qwen2 Qwen2ForCausalLM Qwen2Model",
        "qwen3 Qwen3ForCausalLM Qwen3Model",
    ),
}
"""How the shape of each architecture is read, by the names that config.json may give it."""
