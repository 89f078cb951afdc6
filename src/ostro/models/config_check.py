"""Validates every number of a model's config before anything is sized or indexed by it. Imports no torch.

`check_config` stands in front of every runner, of planning and of the native lowering, for all families and file
formats: GGUF metadata and Levanter's settings have become a config.json by then. What passes describes a model that
can be built: each number is finite and within the range of real models with a wide margin, and those that depend on
one another agree. What is read by no family is not looked at.

HRM ACT-v1 models have a config of their own, which `hrm_config.HrmConfig.read` validates.
"""

import re
from collections.abc import Callable, Mapping
from reprlib import repr as shown

from ostro.errors import BadCheckpoint, UnsupportedModel
from ostro.models.config import ConfigReader
from ostro.models.rope_settings import RopeSettings, full_and_sliding_ropes, rope_settings

# Several times the largest published models, and small enough that products of two fit a machine word.
MOST_LAYERS = 1024
MOST_HEADS = 4096
MOST_HEAD_DIM = 4096
MOST_HIDDEN = 1 << 20
MOST_INNER = 1 << 22
MOST_VOCAB = 1 << 24
MOST_CYCLES = 64
_MOST_ADDRESSES = (1 << 31) - 1
EPS = (1e-20, 1.0)
THETA = (1.0 + 1e-6, 1e15)
_FACTOR = (1e-3, 1e6)

ROPE_KINDS = frozenset({"default", "dynamic", "linear", "llama3", "yarn", "longrope"})

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

_SUFFIX = re.compile(r"(forcausallm|lmheadmodel|model)$")


def check_config(config: Mapping[str, object]) -> None:
    """Raises BadCheckpoint, naming the field, its value and what is allowed, or UnsupportedModel.

    A family that Ostro does not know passes: whoever builds it says so.
    """
    reader = ConfigReader(config)
    names = reader.texts("architectures") or (reader.text("model_type", ""),)
    for name in names:
        if (check := _CHECKS.get(_SUFFIX.sub("", name.lower()))) is not None:
            check(reader)
            return


# --- families -------------------------------------------------------------------------------------------------------


def _check_gpt2(config: ConfigReader) -> None:
    hidden, heads = config.integer("n_embd", most=MOST_HIDDEN), config.integer("n_head", most=MOST_HEADS)
    if hidden % heads:
        raise _bad(config, "n_embd", hidden, f"a multiple of 'n_head' ({heads})")
    config.integer("n_inner", 4 * hidden, most=MOST_INNER)
    config.integer("n_layer", most=MOST_LAYERS)
    config.integer("n_positions")
    config.integer("vocab_size", most=MOST_VOCAB)
    _number(config, "layer_norm_epsilon", EPS, 1e-5)


def _check_decoder(config: ConfigReader) -> None:
    """What all families with rotary positions and RMS norms have."""
    head_dim = _check_heads(config)
    _check_sizes(config)
    _check_rope(rope_settings(config), head_dim)


def _check_windowed(config: ConfigReader) -> None:
    _check_decoder(config)
    config.optional_integer("sliding_window")


def _check_qwen(config: ConfigReader) -> None:
    _check_decoder(config)
    if config.flag("use_sliding_window", False):
        config.optional_integer("sliding_window")
    config.integer("max_window_layers", 1)
    _check_layer_types(config)


def _check_gemma2(config: ConfigReader) -> None:
    _check_windowed(config)
    _check_layer_types(config)
    config.number("query_pre_attn_scalar", least=1e-3, most=1e9)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name) is not None:
            config.number(name, least=1e-3, most=1e6)


def _check_gemma3(config: ConfigReader) -> None:
    _check_gemma2(config)
    config.integer("sliding_window_pattern", 6, most=MOST_LAYERS)
    for rope in full_and_sliding_ropes(config):
        _check_rope(rope, _head_dim(config))


def _check_hrm_text(config: ConfigReader) -> None:
    # Its layers run several times, and all heads have keys of their own.
    _check_sizes(config)
    config.integer("num_attention_heads", most=MOST_HEADS)
    head_dim = config.integer("head_dim", 128, most=MOST_HEAD_DIM)
    depth = config.integer("num_layers_per_stack", config.integer("num_hidden_layers"), most=MOST_LAYERS)
    runs = config.integer("H_cycles", 2, most=MOST_CYCLES) * (config.integer("L_cycles", 3, most=MOST_CYCLES) + 1)
    if depth * runs > 16 * MOST_LAYERS:
        raise BadCheckpoint(
            f"{config.source}: 'num_layers_per_stack', 'H_cycles' and 'L_cycles' make {depth * runs} runs of layers a "
            f"token, and {16 * MOST_LAYERS} are the most."
        )
    if config.get("embedding_scale") is not None:
        config.number("embedding_scale", least=1e-6, most=1e6)
    config.number("initializer_range", 0.02, least=1e-6, most=1e6)
    _check_rope(rope_settings(config), head_dim)


_CHECKS: Mapping[str, Callable[[ConfigReader], None]] = {
    "gemma2": _check_gemma2,
    "gemma3": _check_gemma3,
    "gemma3text": _check_gemma3,
    "gemma3_text": _check_gemma3,
    "gpt2": _check_gpt2,
    "hrmtext": _check_hrm_text,
    "hrm_text": _check_hrm_text,
    "llama": _check_decoder,
    "mistral": _check_windowed,
    "olmo2": _check_decoder,
    "phi3": _check_windowed,
    "qwen2": _check_qwen,
    "qwen3": _check_qwen,
}
"""By model_type, and by architecture in lower case without its ending."""


# --- parts ----------------------------------------------------------------------------------------------------------


def _check_sizes(config: ConfigReader) -> None:
    config.integer("vocab_size", most=MOST_VOCAB)
    config.integer("hidden_size", most=MOST_HIDDEN)
    config.integer("intermediate_size", most=MOST_INNER)
    config.integer("num_hidden_layers", most=MOST_LAYERS)
    _number(config, "rms_norm_eps", EPS)


def _check_heads(config: ConfigReader) -> int:
    heads = config.integer("num_attention_heads", most=MOST_HEADS)
    kv_heads = config.integer("num_key_value_heads", heads, most=MOST_HEADS)
    if heads % kv_heads:
        raise _bad(config, "num_key_value_heads", kv_heads, f"a divisor of 'num_attention_heads' ({heads})")
    return _head_dim(config)


def _head_dim(config: ConfigReader) -> int:
    hidden, heads = config.integer("hidden_size", most=MOST_HIDDEN), config.integer("num_attention_heads")
    if config.get("head_dim") is not None:
        return config.integer("head_dim", most=MOST_HEAD_DIM)
    if hidden % heads:
        raise _bad(config, "hidden_size", hidden, f"a multiple of 'num_attention_heads' ({heads}) without 'head_dim'")
    return hidden // heads


def _check_layer_types(config: ConfigReader) -> None:
    types, layers = config.texts("layer_types"), config.integer("num_hidden_layers")
    if types and (len(types) != layers or not _LAYER_TYPES.issuperset(types)):
        raise UnsupportedModel(
            f"{config.source}: 'layer_types' must say {' or '.join(sorted(_LAYER_TYPES))} for each of {layers} layers, "
            f"got {len(types)}: {shown(list(types))}."
        )


def _check_rope(rope: RopeSettings, head_dim: int) -> None:
    table = rope.table
    if rope.kind not in ROPE_KINDS:
        raise UnsupportedModel(f"Rope scaling {rope.kind!r} is not known; known are {', '.join(sorted(ROPE_KINDS))}.")
    _number(table, "rope_theta", THETA, 10000.0)
    share = table.number("partial_rotary_factor", 1.0, least=1e-3, most=1.0)
    rotated = rope.rotary_dim(head_dim)
    if rotated < 2 or rotated % 2:
        raise BadCheckpoint(
            f"{table.source}: 'partial_rotary_factor' is {share} and heads are {head_dim} wide, so that {rotated} of "
            "their dimensions would rotate; they rotate in pairs, so it must be an even number above 0."
        )
    _SCALING_CHECKS.get(rope.kind, _check_unscaled)(rope, rotated)
    if rope.longest_context() > _MOST_ADDRESSES:
        raise _bad(table, "factor", table.get("factor"), f"such that the context stays below {_MOST_ADDRESSES}")


def _check_unscaled(rope: RopeSettings, rotated: int) -> None:
    pass


def _check_linear(rope: RopeSettings, rotated: int) -> None:
    _number(rope.table, "factor", _FACTOR)


def _check_llama3(rope: RopeSettings, rotated: int) -> None:
    _number(rope.table, "factor", _FACTOR)
    _check_order(rope, ("low_freq_factor", None), ("high_freq_factor", None))


def _check_yarn(rope: RopeSettings, rotated: int) -> None:
    _number(rope.table, "factor", _FACTOR, rope.max_positions / rope.original_positions)
    _check_order(rope, ("beta_slow", 1.0), ("beta_fast", 32.0))
    for name in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.table.get(name) is not None:
            _number(rope.table, name, _FACTOR)


def _check_longrope(rope: RopeSettings, rotated: int) -> None:
    _number(rope.table, "factor", _FACTOR, rope.max_positions / rope.original_positions)
    if rope.table.get("attention_factor") is not None:
        _number(rope.table, "attention_factor", _FACTOR)
    elif rope.original_positions < 2:
        raise _bad(rope.table, "original_max_position_embeddings", rope.original_positions, "at least 2")
    for name in ("short_factor", "long_factor"):
        factors = rope.table.numbers(name)
        if len(factors) != rotated // 2:
            raise BadCheckpoint(
                f"{rope.table.source}: {name!r} must list {rotated // 2} numbers, got {len(factors)}: one for each "
                "pair of dimensions that rotates."
            )
        for factor in factors:
            _number(ConfigReader({name: factor}, rope.table.source), name, _FACTOR)


_SCALING_CHECKS: Mapping[str, Callable[[RopeSettings, int], None]] = {
    "linear": _check_linear,
    "llama3": _check_llama3,
    "longrope": _check_longrope,
    "yarn": _check_yarn,
}


def _check_order(rope: RopeSettings, low: tuple[str, float | None], high: tuple[str, float | None]) -> None:
    """Names with their defaults: the first must be below the second, as their difference divides what lies between."""
    least, most = (_number(rope.table, name, _FACTOR, default) for name, default in (low, high))
    if least >= most:
        raise _bad(rope.table, low[0], least, f"below {high[0]!r} ({most})")


def _number(config: ConfigReader, key: str, limits: tuple[float, float], default: float | None = None) -> float:
    return config.number(key, default, least=limits[0], most=limits[1])


def _bad(config: ConfigReader, key: str, value: object, wanted: str) -> BadCheckpoint:
    return BadCheckpoint(f"{config.source}: {key!r} is {shown(value)}, but it must be {wanted}.")
