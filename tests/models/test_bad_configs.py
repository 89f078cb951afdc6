"""Every number of a config is validated before anything is sized by it: by all runners, by planning, natively."""

import math
from pathlib import Path

import pytest
import tiny_models
import torch
from every_family import CASES
from every_family import TINY as CONFIGS
from family_case import Config, longrope
from model_directory import write_model
from native_models import ModelCheckpoint, needs_library, savable_model
from tiny_models import random_model

from ostro.backends.loading import load_runner
from ostro.backends.planning import plan
from ostro.config import EngineConfig
from ostro.errors import BadCheckpoint, ModelError, OstroError, UnsupportedModel
from ostro.models.registry import describe
from ostro.torch_models.build import build_model

LLAMA, GPT2 = CONFIGS["llama"], CONFIGS["gpt2"]
LONGROPE = longrope(4)

WRONG: tuple[object, ...] = (0, -1, 2**31, 10**400, math.nan, math.inf, -math.inf, True, "8", [8], {}, 0.5)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_config_of_each_family_passes(family: str) -> None:
    describe(CONFIGS[family])


@pytest.mark.parametrize(
    ("family", "field"),
    [(family, field) for family, config in CONFIGS.items() for field, value in config.items() if type(value) is int],
)
def test_an_invalid_count_is_refused_by_name(family: str, field: str) -> None:
    for wrong in WRONG:
        if field == "query_pre_attn_scalar" and wrong in (0.5, 2**31):
            continue  # A number like any other.
        if field in ("hidden_size_per_layer_input", "num_dense_layers", "num_kv_shared_layers") and wrong == 0:
            continue  # There need not be any.
        if (family, field) == ("granitemoehybrid", "num_local_experts") and wrong == 0:
            continue  # Nor here: its MLP is then alone.
        with pytest.raises(BadCheckpoint, match=f"'{field}'"):
            describe({**CONFIGS[family], field: wrong})


@pytest.mark.parametrize(
    ("family", "field"),
    [
        *((name, field) for name, config in CONFIGS.items() for field, value in config.items() if type(value) is float),
        *((name, field) for name, case in CASES.items() for field in case.numbers if field not in CONFIGS[name]),
    ],
)
def test_an_invalid_number_is_refused_by_name(family: str, field: str) -> None:
    named = "rope_theta" if field in ("rope_local_base_freq", "rotary_emb_base") else field
    for wrong in (0, -1.0, 1e-45, 1e39, 10**400, math.nan, math.inf, True, "1", [1.0]):
        with pytest.raises(BadCheckpoint, match=f"'({named}|{field})'"):
            describe({**CONFIGS[family], field: wrong})


@pytest.mark.parametrize("factor", [2, 4000, 400000, 0, -0.5, math.nan, 0.1])
@pytest.mark.parametrize("family", [name for name, case in CASES.items() if case.ropes])
def test_more_than_a_head_never_rotates_nor_an_odd_part_of_it(family: str, factor: float) -> None:
    """A partial_rotary_factor above one made the native core write beyond its buffers."""
    table = {"rope_type": "default", "partial_rotary_factor": factor}
    both = {"full_attention": table, "sliding_attention": table}
    rope = both if CASES[family].ropes == 2 else table
    with pytest.raises(BadCheckpoint, match="'partial_rotary_factor'"):
        describe({**CONFIGS[family], "rope_scaling": None, "rope_parameters": rope})


@pytest.mark.parametrize("kv_heads", [3, 8, 5])
@pytest.mark.parametrize("family", [name for name in CONFIGS if "num_key_value_heads" in CONFIGS[name]])
def test_key_heads_must_divide_the_heads(family: str, kv_heads: int) -> None:
    """Four heads with three or eight KV heads were computed from memory that nothing had written."""
    with pytest.raises(BadCheckpoint, match=r"'num_key_value_heads' is \d, but it must be a divisor"):
        describe({**CONFIGS[family], "num_key_value_heads": kv_heads})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": 18}, "hidden_size"),
        ({"head_dim": 3}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": math.inf}}, "factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 2.0}}, "beta_slow"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": -1}}, "attention_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e6}, "max_position_embeddings": 10**8}, "factor"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 5, "high_freq_factor": 4}},
            "low_freq_factor",
        ),
        ({"rope_scaling": {**LONGROPE, "short_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0, math.nan]}}, "long_factor"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0, 0.0]}}, "long_factor"),
        ({"rope_scaling": LONGROPE, "original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        ({"rope_scaling": [1.0]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": 7}}, "rope_type"),
    ],
)
def test_numbers_that_do_not_agree_are_refused_by_name(changes: Config, field: str) -> None:
    with pytest.raises(BadCheckpoint, match=f"'{field}'"):
        describe({**LLAMA, **changes})


@pytest.mark.parametrize("wrong", [[1], [1, 2], "10", [1, 0, 1]])
def test_layers_without_rope_that_do_not_fit_the_model_are_refused_by_name(wrong: object) -> None:
    with pytest.raises(BadCheckpoint, match="'no_rope_layers'"):
        describe({**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": wrong})


GEMMA4 = CONFIGS["gemma4"]
GEMMA4_EXPERTS: Config = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
        ({"num_kv_shared_layers": 1000}, "num_kv_shared_layers"),
        ({"vocab_size_per_layer_input": 31}, "vocab_size_per_layer_input"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "num_global_key_value_heads"),
        ({"enable_moe_block": True, **GEMMA4_EXPERTS, "top_k_experts": 5}, "top_k_experts"),
        ({"enable_moe_block": True, **GEMMA4_EXPERTS, "num_experts": 0}, "num_experts"),
        ({"enable_moe_block": True, **GEMMA4_EXPERTS, "moe_intermediate_size": None}, "moe_intermediate_size"),
        ({"per_layer_config": []}, "per_layer_config"),
        ({"per_layer_config": {"1": 8}}, "1"),
        ({"per_layer_config": {"last": {"head_dim": 4}}}, "per_layer_config"),
        ({"per_layer_config": {"4": {"head_dim": 4}}}, "per_layer_config"),
        ({"per_layer_config": {"-1": {"head_dim": 4}}}, "per_layer_config"),
        ({"per_layer_config": {"1": {"head_dim": 4}, "01": {"head_dim": 4}}}, "per_layer_config"),
        ({"per_layer_config": {"9" * 5000: {"head_dim": 4}}}, "per_layer_config"),
        ({"per_layer_config": {"1": {"head_dim": 2**31}}}, "head_dim"),
        ({"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "num_key_value_heads"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 0}}}, "factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": math.inf}}}, "rope_theta"),
        ({"rope_parameters": {"full_attention": 7}}, "full_attention"),
    ],
)
def test_layers_of_gemma_4_that_do_not_agree_are_refused_by_name(changes: Config, field: str) -> None:
    with pytest.raises(BadCheckpoint, match=f"'{field}'"):
        describe({**GEMMA4, **changes})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"use_bidirectional_attention": "all"}, "bidirectional"),
        ({"per_layer_config": {"0": {"sliding_window": 4}}}, "sliding_window"),
    ],
)
def test_variants_of_gemma_4_that_are_not_served_are_refused_by_name(changes: Config, name: str) -> None:
    with pytest.raises(UnsupportedModel, match=name):
        describe({**GEMMA4, **changes})


def test_a_width_of_rotation_that_is_odd_is_refused_by_name() -> None:
    with pytest.raises(BadCheckpoint, match=r"'partial_rotary_factor' is 0\.25 and heads are 4 wide, so that 1 of"):
        describe({**LLAMA, "architectures": ["GPTNeoXForCausalLM"]})


def test_a_rope_scaling_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(UnsupportedModel, match="'ntk' is not known; known are default, dynamic, linear"):
        describe({**LLAMA, "rope_scaling": {"rope_type": "ntk"}})


def test_a_message_stays_short_however_long_the_value_is() -> None:
    with pytest.raises(BadCheckpoint) as caught:
        describe({**LLAMA, "hidden_size": "9" * 1_000_000})
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("changes", [{"partial_rotary_factor": 400000}, {"num_key_value_heads": 3}])
def test_planning_refuses_what_loading_refuses(changes: Config) -> None:
    with pytest.raises(BadCheckpoint, match=f"'{next(iter(changes))}'"):
        plan(ModelCheckpoint(random_model(LLAMA), {**LLAMA, **changes}), EngineConfig(device="cpu"))


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_library)])
@pytest.mark.parametrize(
    "changes", [{"partial_rotary_factor": 2}, {"partial_rotary_factor": 4000}, {"num_key_value_heads": 3}]
)
def test_every_runner_refuses_a_config_before_it_reads_a_tensor(backend: str, changes: Config) -> None:
    config = {**tiny_models.LLAMA, "hidden_size": 64}

    class Unread(ModelCheckpoint):
        def tensors(self):  # type: ignore[no-untyped-def]
            raise AssertionError("a tensor was read")

    checkpoint = Unread(savable_model(config), {**config, **changes})
    engine = EngineConfig(backend="native" if backend == "native" else "torch")
    with pytest.raises(OstroError, match=f"'{next(iter(changes))}'"):
        load_runner(checkpoint, engine)


def test_a_directory_whose_config_is_hostile_is_refused_by_name(tmp_path: Path) -> None:
    import json

    from ostro.llm import LLM

    model = write_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "partial_rotary_factor": 400000}))
    with pytest.raises(BadCheckpoint, match=r"'partial_rotary_factor' must be a number from 0.001 to 1.0, got 400000"):
        LLM(str(model))


def test_sizes_that_are_too_much_together_are_no_crash() -> None:
    vast = {**GPT2, "n_embd": 1 << 20, "n_inner": 1 << 22, "n_layer": 64}
    with pytest.raises(ModelError, match="no memory for a model as large as"):
        build_model(vast, dtype=torch.float32)
