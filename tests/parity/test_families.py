"""Every model family against transformers: tiny random models, in float32, sequences longer than their windows."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from dense_context import DenseContext, dense_logits
from native_models import native, needs_library, packed
from telling_weights import telling
from tiny_configs import TORCH_ONLY
from transformers.core_model_loading import revert_weight_conversion

from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.scheduler import Limits
from ostro.models.architecture import Architecture
from ostro.models.config import ConfigReader
from ostro.models.registry import FAMILIES, describe
from ostro.models.rope_settings import rope_settings
from ostro.sampling_params import SamplingParams
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model
from ostro.torch_models.loading import load_weights
from ostro.torch_models.rope import Rotary

Config = Mapping[str, object]

TOLERANCE = 5e-5
SHORT, LONG = 40, 100
"""Prompt lengths: within and beyond the original context of the longrope models below."""

TINY: Config = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
}
GEMMA: Config = {
    **TINY,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
    "num_hidden_layers": 4,
    "tie_word_embeddings": True,
}
GRANITE: Config = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
MIXTURE: Config = {
    **TINY,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
}
HRM_TEXT: Config = {**TINY, "model_type": "hrm_text", "head_dim": 16}
GPT2: Config = {"vocab_size": 160, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128}

# As config.json of published models spells them.
CASES: Mapping[str, Config] = {
    "llama": {**TINY, "model_type": "llama", "rope_theta": 500.0},
    "llama-tied": {**TINY, "model_type": "llama", "tie_word_embeddings": True},
    "llama-biases": {**TINY, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-wide-heads": {**TINY, "model_type": "llama", "head_dim": 20},
    "llama-linear": {**TINY, "model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama-dynamic": {**TINY, "model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama-llama3": {**TINY, "model_type": "llama", "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama-yarn": {**TINY, "model_type": "llama", "rope_scaling": YARN},
    "llama-yarn-mscale": {
        **TINY,
        "model_type": "llama",
        "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3, "beta_fast": 16, "truncate": False},
    },
    "llama-longrope": {
        **TINY,
        "model_type": "llama",
        "rope_scaling": {**LONGROPE, "factor": 2.0, "original_max_position_embeddings": 128},
    },
    "mistral": {**TINY, "model_type": "mistral", "sliding_window": 16},
    "mistral-no-window": {**TINY, "model_type": "mistral", "sliding_window": None},
    "smollm3": {**TINY, "model_type": "smollm3", "rope_theta": 500.0, "num_hidden_layers": 4},
    "smollm3-windows": {
        **TINY,
        "model_type": "smollm3",
        "rope_theta": 500.0,
        "use_sliding_window": True,
        "sliding_window": 16,
        "no_rope_layers": [0, 1, 1],
    },
    "granite": {**TINY, "model_type": "granite", **GRANITE},
    "granite-biases": {
        **TINY,
        "model_type": "granite",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        **GRANITE,
    },
    "qwen2": {**TINY, "model_type": "qwen2", "use_sliding_window": False, "sliding_window": 16},
    "qwen2-windows": {
        **TINY,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen2-layer-types": {
        **TINY,
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3": {**TINY, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    "cohere2": {
        **TINY,
        "model_type": "cohere2",
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.5,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True,
    },
    "cohere2-biases": {
        **TINY,
        "model_type": "cohere2",
        "attention_bias": True,
        "logit_scale": 2.0,
        "num_hidden_layers": 4,
    },
    "exaone4": {**TINY, "model_type": "exaone4", "sliding_window": 16, "num_hidden_layers": 4},
    "exaone4-no-window": {
        **TINY,
        "model_type": "exaone4",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
    },
    "gemma": {**TINY, "model_type": "gemma", "head_dim": 16, "hidden_act": "gelu", "tie_word_embeddings": True},
    "glm4": {**TINY, "model_type": "glm4", "head_dim": 16, "partial_rotary_factor": 0.5},
    "glm4-rotated-whole": {
        **TINY,
        "model_type": "glm4",
        "head_dim": 16,
        "attention_bias": False,
        "partial_rotary_factor": 1.0,
    },
    "ministral3": {
        **TINY,
        "model_type": "ministral3",
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen3-biases": {**TINY, "model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "gemma2": {
        **GEMMA,
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        **GEMMA,
        "model_type": "gemma3_text",
        "rope_theta": 20000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "sliding_window_pattern": 3,
    },
    "gemma4": {
        **GEMMA,
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "final_logit_softcapping": 3.0,
    },
    "gemma4-inputs": {
        **GEMMA,
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 170,
        "global_head_dim": 32,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "final_logit_softcapping": 30.0,
    },
    "gemma4-experts": {
        **GEMMA,
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 3,
        "moe_intermediate_size": 40,
    },
    "gemma4-twelve-layers": {
        **GEMMA,
        "model_type": "gemma4_text",
        "num_hidden_layers": 12,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 32,
    },
    "gemma4_unified": {
        **GEMMA,
        "model_type": "gemma4_unified_text",
        "num_hidden_layers": 6,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 3.0,
    },
    "gemma4-own-values": {
        **GEMMA,
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 24,
        "attention_bias": True,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.5,
                "rope_theta": 500.0,
                "factor": 2.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "phi3": {**TINY, "model_type": "phi3", "sliding_window": 16},
    "phi3-partial-rotary": {**TINY, "model_type": "phi3", "partial_rotary_factor": 0.5},
    "phi3-longrope": {
        **TINY,
        "model_type": "phi3",
        "original_max_position_embeddings": 64,
        "rope_scaling": LONGROPE,
    },
    "olmo2": {**TINY, "model_type": "olmo2"},
    "olmo3": {**TINY, "model_type": "olmo3", "sliding_window": 16, "num_hidden_layers": 5},
    "olmo3-yarn": {
        **TINY,
        "model_type": "olmo3",
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_scaling": {**YARN, "attention_factor": 1.2},
    },
    "olmoe": {**MIXTURE, "model_type": "olmoe"},
    "olmoe-normalized": {**MIXTURE, "model_type": "olmoe", "norm_topk_prob": True, "attention_bias": True},
    "mixtral": {**MIXTURE, "model_type": "mixtral", "rope_theta": 500.0, "sliding_window": 16},
    "granitemoe": {**MIXTURE, "model_type": "granitemoe", **GRANITE, "tie_word_embeddings": True},
    "qwen3_moe": {**MIXTURE, "model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": True},
    "qwen3_moe-some-plain": {
        **MIXTURE,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_hidden_layers": 4,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
        "use_sliding_window": True,
        "sliding_window": 16,
    },
    "qwen2_moe": {**MIXTURE, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 56},
    "llama4": {
        **MIXTURE,
        "model_type": "llama4_text",
        "head_dim": 16,
        "num_hidden_layers": 4,
        "attention_chunk_size": 16,
        "floor_scale": 8,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3,
    },
    "llama4-step-in-rope": {
        **MIXTURE,
        "model_type": "llama4_text",
        "head_dim": 16,
        "rope_theta": 500000.0,
        "rope_scaling": {**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0},
    },
    "llama4-dense": {**TINY, "model_type": "llama4_text", "head_dim": 16, "rope_theta": 500.0, "moe_layers": []},
    "llama4-one-expert": {
        **MIXTURE,
        "model_type": "llama4_text",
        "head_dim": 16,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 16,
        "attention_bias": True,
        "no_rope_layers": [1, 0, 1],
        "attn_temperature_tuning": False,
        "use_qk_norm": False,
        "rope_theta": 500.0,
    },
    "hrm_text": {**HRM_TEXT, "num_hidden_layers": 2, "embedding_scale": 12.0},
    "hrm_text-cycles": {
        **HRM_TEXT,
        "H_cycles": 3,
        "L_cycles": 2,
        "num_layers_per_stack": 1,
        "num_hidden_layers": 9,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "rope_theta": 500.0,
    },
    "hrm_text-biases": {**HRM_TEXT, "num_hidden_layers": 1, "attention_bias": True, "mlp_bias": True},
    "gpt_neox": {**TINY, "model_type": "gpt_neox", "rotary_pct": 0.5, "rotary_emb_base": 500},
    "gpt_neox-sequential": {
        **TINY,
        "model_type": "gpt_neox",
        "rotary_pct": 0.5,
        "use_parallel_residual": False,
        "hidden_act": "gelu_fast",
        "layer_norm_eps": 1e-2,
        "tie_word_embeddings": True,
    },
    "starcoder2": {
        **TINY,
        "model_type": "starcoder2",
        "norm_epsilon": 1e-2,
        "rope_theta": 500.0,
        "sliding_window": 16,
        "tie_word_embeddings": True,
    },
    "starcoder2-no-biases": {**TINY, "model_type": "starcoder2", "use_bias": False, "sliding_window": None},
    "gpt_oss": {
        **MIXTURE,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "sliding_window": 16,
        "rope_theta": 500.0,
        "rope_scaling": {**YARN, "beta_fast": 16.0, "truncate": False},
    },
    "gpt_oss-no-biases": {
        **MIXTURE,
        "model_type": "gpt_oss",
        "head_dim": 16,
        "attention_bias": False,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "gpt2": {**GPT2, "model_type": "gpt2"},
    "gpt2-untied": {**GPT2, "model_type": "gpt2", "tie_word_embeddings": False, "n_inner": 100},
    "gpt2-scaled-by-layer": {**GPT2, "model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
}


def _is_native(values: Config) -> bool:
    """All but HRM-Text and the TORCH_ONLY; and longrope's factors above are for narrower heads."""
    scaling = values.get("rope_scaling")
    refused = {"hrm_text", *TORCH_ONLY}
    return values["model_type"] not in refused and not (isinstance(scaling, Mapping) and "long_factor" in scaling)


def reference_model(values: Config, *, headless: bool = False) -> transformers.PreTrainedModel:
    """Transformers' model of a config."""
    settings = {key: value for key, value in values.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(values["model_type"], **settings)
    auto = transformers.AutoModel if headless else transformers.AutoModelForCausalLM
    # Eager, because the others know no soft-cap.
    return telling(auto.from_config(config, attn_implementation="eager"))


def reference_logits(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def stored_tensors(reference: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Under the names, and in the form, that checkpoints have."""
    tensors: dict[str, torch.Tensor] = revert_weight_conversion(reference, reference.state_dict())
    return tensors


def our_model(values: Config, reference: transformers.PreTrainedModel, *, max_seq_len: int | None = None) -> Model:
    model = build_model(values, max_seq_len=max_seq_len, dtype=torch.float32)
    load_weights(model, stored_tensors(reference).items())
    return model


def random_ids(length: int) -> list[int]:
    ids: list[int] = torch.randint(3, 160, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    return ids


def test_there_is_a_case_of_each_family() -> None:
    assert {values["model_type"] for values in CASES.values()} == {family.model_type for family in FAMILIES}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers_in_either_spelling_of_the_config(name: str) -> None:
    reference = reference_model(CASES[name])
    ids = random_ids(SHORT)
    expected = reference_logits(reference, ids)
    assert expected.std() > 0.3, "the test would not see a difference"
    for values in (CASES[name], reference.config.to_dict()):
        torch.testing.assert_close(dense_logits(our_model(values, reference), ids), expected, atol=TOLERANCE, rtol=0)


def widened(values: Config) -> Config:
    """The same with heads as wide as native kernels want them."""
    return {**values, "n_embd": 64} if "n_embd" in values else {**values, "hidden_size": 64, "head_dim": 16}


@needs_library
@pytest.mark.parametrize("name", [name for name, values in CASES.items() if _is_native(values)])
def test_native_scores_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of every token of a prompt that is run in pieces; and what follows is the token that transformers ranks first."""
    values = widened(CASES[name])
    reference = reference_model(values)
    ids = random_ids(SHORT)
    expected = reference_logits(reference, ids).log_softmax(-1)
    assert expected.std() > 0.3, "the test would not see a difference"
    weights = packed(values, our_model(values, reference), tmp_path / "packed")
    core = EngineCore(native(weights), Limits(max_batch_tokens=7, max_batch_seqs=1))
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    core.add(Request(id=0, prompt_ids=tuple(ids), params=params, seed=0, prompt_logprobs_from=1))
    tokens, scored = [], []
    while core.has_work:
        for gain in core.step():
            tokens += gain.token_ids
            scored += gain.prompt_logprobs
    assert tokens == [expected[-1].argmax().item()]
    assert [each.token_id for each in scored] == ids[1:]
    theirs = expected[torch.arange(SHORT - 1), ids[1:]]
    torch.testing.assert_close(torch.tensor([each.logprob for each in scored]), theirs, atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        *("mistral", "gemma2", "gemma3", "gemma4-inputs", "gpt2", "gpt_neox", "hrm_text", "llama4", "olmo2", "olmoe"),
        *("phi3-longrope", "qwen3"),
    ],
)
def test_a_sequence_fed_in_chunks_gives_the_logits_of_the_whole(name: str) -> None:
    model = our_model(CASES[name], reference_model(CASES[name]))
    ids = random_ids(SHORT)
    torch.testing.assert_close(dense_logits(model, ids, chunk=7), dense_logits(model, ids), atol=TOLERANCE, rtol=0)


def test_longrope_takes_its_long_factors_when_a_longer_context_is_asked_for() -> None:
    reference = reference_model(CASES["phi3-longrope"])
    model = our_model(CASES["phi3-longrope"], reference, max_seq_len=128)
    ids = random_ids(LONG)
    torch.testing.assert_close(dense_logits(model, ids), reference_logits(reference, ids), atol=TOLERANCE, rtol=0)


def test_ministral_3_scales_queries_when_a_longer_context_is_asked_for() -> None:
    reference = reference_model(CASES["ministral3"])
    ids = random_ids(LONG)
    expected = reference_logits(reference, ids)
    model = our_model(CASES["ministral3"], reference, max_seq_len=128)
    torch.testing.assert_close(dense_logits(model, ids), expected, atol=TOLERANCE, rtol=0)
    unscaled = dense_logits(our_model(CASES["ministral3"], reference), ids)
    assert (unscaled[:64] - expected[:64]).abs().max() < TOLERANCE < (unscaled[64:] - expected[64:]).abs().max()


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch's notice of a CPU without bfloat16 instructions
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3", "gemma2", "gemma3", "gemma4", "gemma4-inputs", "gemma4-experts"),
        *("llama4", "llama4-one-expert", "llama4-dense", "olmo2", "gpt2", "hrm_text"),
    ],
)
def test_bfloat16_strays_from_float32_no_further_than_transformers_does(name: str) -> None:
    reference = reference_model(CASES[name])
    ids = random_ids(SHORT)
    exact = reference_logits(reference, ids)
    rounded = reference_logits(reference.to(torch.bfloat16), ids).float()
    model = build_model(CASES[name], dtype=torch.bfloat16)
    load_weights(model, stored_tensors(reference).items())
    assert (dense_logits(model, ids) - exact).abs().mean() < 1.2 * (rounded - exact).abs().mean()


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("gpt", "gemma3", "gemma4", "olmo3"))])
def test_rope_frequencies_are_bit_for_bit_those_of_transformers(name: str) -> None:
    """A last-bit difference here is a visible angle at position 100,000."""
    config = ConfigReader(CASES[name])
    reference = reference_model(CASES[name])
    head_dim = config.integer("head_dim", 48 // 4)
    rope = Rotary(rope_settings(config), head_dim=head_dim, max_seq_len=64)
    expected = reference.model.rotary_emb.inv_freq
    assert torch.equal(rope.frequencies, torch.cat((-expected, expected)))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("gemma4")])
def test_both_ropes_of_gemma_4_are_within_a_last_bit_of_those_of_transformers(name: str) -> None:
    described, reference = describe(CASES[name]), reference_model(CASES[name])
    assert isinstance(described, Architecture)
    for index, kind in enumerate(("full_attention", "sliding_attention")):
        rope = Rotary(described.ropes[index], head_dim=described.rope_head_dim(index), max_seq_len=64)
        expected = getattr(reference.model.rotary_emb, f"{kind}_inv_freq")
        torch.testing.assert_close(rope.frequencies, torch.cat((-expected, expected)), rtol=2**-23, atol=0)


@pytest.mark.parametrize("name", ["qwen3", "llama", "gpt2", "gpt_neox", "hrm_text"])
def test_a_checkpoint_of_the_bare_backbone_gives_the_hidden_states_of_transformers(name: str) -> None:
    reference = reference_model(CASES[name], headless=True)
    family = next(family for family in FAMILIES if family.model_type == CASES[name]["model_type"])
    assert type(reference).__name__ == family.bare
    model = our_model({**CASES[name], "architectures": [family.bare]}, reference)
    ids = random_ids(SHORT)
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).last_hidden_state[0]
        ours = model(torch.tensor(ids), torch.arange(SHORT), DenseContext())
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


def test_architecture_names_are_those_that_transformers_writes() -> None:
    for family in FAMILIES:
        config = transformers.CONFIG_MAPPING[family.model_type]
        assert transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config].__name__ == family.architecture
        assert transformers.MODEL_MAPPING[config].__name__ == family.bare
