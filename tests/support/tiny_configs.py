"""Configs of tiny models, as config.json would hold them."""

from collections.abc import Mapping

_SIZES: Mapping[str, object] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA: Mapping[str, object] = {**_SIZES, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5}
GPT2: Mapping[str, object] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "layer_norm_epsilon": 1e-5,
}
LONGROPE: Mapping[str, object] = {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0]}
PHI3: Mapping[str, object] = {
    **LLAMA,
    "architectures": ["Phi3ForCausalLM"],
    "original_max_position_embeddings": 16,
    "rope_scaling": LONGROPE,
}
GRANITE_SCALES: Mapping[str, object] = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
GRANITE: Mapping[str, object] = {**LLAMA, **GRANITE_SCALES, "architectures": ["GraniteForCausalLM"]}
EXPERTS: Mapping[str, object] = {"num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS: Mapping[str, object] = {"num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURES: Mapping[str, Mapping[str, object]] = {
    "gpt_oss": {
        **LLAMA,
        **LOCAL_EXPERTS,
        "architectures": ["GptOssForCausalLM"],
        "sliding_window": 12,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    },
    "granitemoe": {**LLAMA, **GRANITE_SCALES, **LOCAL_EXPERTS, "architectures": ["GraniteMoeForCausalLM"]},
    "llama4_text": {
        **LLAMA,
        **LOCAL_EXPERTS,
        "architectures": ["Llama4ForCausalLM"],
        "head_dim": 4,
        "attention_chunk_size": 12,
        "floor_scale": 8,
        "attn_scale": 0.1,
        "intermediate_size_mlp": 20,
    },
    "mixtral": {**LLAMA, **LOCAL_EXPERTS, "architectures": ["MixtralForCausalLM"], "sliding_window": 12},
    "olmoe": {**LLAMA, **EXPERTS, "architectures": ["OlmoeForCausalLM"]},
    "qwen2_moe": {
        **LLAMA,
        **EXPERTS,
        "architectures": ["Qwen2MoeForCausalLM"],
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 20,
    },
    "qwen3_moe": {
        **LLAMA,
        **EXPERTS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "moe_intermediate_size": 8,
        "decoder_sparse_step": 1,
    },
}
"""Families with experts."""
TORCH_ONLY = frozenset({"gemma4_text", "gemma4_unified_text", "llama4_text"})
"""Families that only torch's modules run."""
EXPERT_SIZES: Mapping[str, object] = {
    **EXPERTS,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 20,
}
"""What all of them read, for configs that are given to every family."""
GPT_NEOX: Mapping[str, object] = {
    **_SIZES,
    "architectures": ["GPTNeoXForCausalLM"],
    "layer_norm_eps": 1e-5,
    "rotary_pct": 0.5,
}
HRM_TEXT: Mapping[str, object] = {
    "architectures": ["HrmTextForCausalLM"],
    "model_type": "hrm_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "H_cycles": 2,
    "L_cycles": 3,
    "embedding_scale": 12.0,
}
GEMMA2: Mapping[str, object] = {
    **LLAMA,
    "architectures": ["Gemma2ForCausalLM"],
    "query_pre_attn_scalar": 8,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 10.0,
    "sliding_window": 12,
}
BY_MODEL_TYPE: Mapping[str, Mapping[str, object]] = {
    "cohere2": {
        **_SIZES,
        "architectures": ["Cohere2ForCausalLM"],
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.5,
        "sliding_window": 12,
        "sliding_window_pattern": 2,
    },
    "exaone4": {
        **LLAMA,
        "architectures": ["Exaone4ForCausalLM"],
        "sliding_window": 12,
        "sliding_window_pattern": 2,
    },
    "gemma": {**LLAMA, "architectures": ["GemmaForCausalLM"]},
    "gemma2": GEMMA2,
    "gemma3_text": {**GEMMA2, "architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention"] * 2},
    "gemma4_text": {
        **LLAMA,
        "architectures": ["Gemma4ForCausalLM"],
        "head_dim": 4,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 12,
        "global_head_dim": 8,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 6,
        "vocab_size_per_layer_input": 32,
        "final_logit_softcapping": 10.0,
    },
    "gemma4_unified_text": {
        **LLAMA,
        "architectures": ["Gemma4UnifiedForCausalLM"],
        "head_dim": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 12,
        "global_head_dim": 8,
        "final_logit_softcapping": 10.0,
    },
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "granite": GRANITE,
    "glm4": {**LLAMA, "architectures": ["Glm4ForCausalLM"]},
    "hrm_text": HRM_TEXT,
    "llama": LLAMA,
    "ministral3": {
        **LLAMA,
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 60,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "mistral": {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 12},
    "olmo2": {**LLAMA, "architectures": ["Olmo2ForCausalLM"]},
    "olmo3": {**LLAMA, "architectures": ["Olmo3ForCausalLM"], "sliding_window": 12},
    "phi3": PHI3,
    **MIXTURES,
    "qwen2": {**LLAMA, "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {**LLAMA, "architectures": ["Qwen3ForCausalLM"]},
    "smollm3": {**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]},
    "starcoder2": {
        **_SIZES,
        "architectures": ["Starcoder2ForCausalLM"],
        "norm_epsilon": 1e-5,
        "sliding_window": 12,
    },
}
"""One of each family, with the numbers that only it reads: tests put bad ones in their place."""


def with_eight_heads(config: Mapping[str, object]) -> Mapping[str, object]:
    """Large enough to be divided by eight; keys and values have two heads where they may have fewer than queries."""
    names = {"num_attention_heads": 8, "hidden_size": 32, "intermediate_size": 48, "head_dim": 4, "vocab_size": 300}
    if "n_head" in config:
        names = {"n_head": 8, "n_embd": 32, "vocab_size": 300}
    if "rope_scaling" in config:
        # Longer than any prompt here, and shorter than the stretched context.
        names |= {"original_max_position_embeddings": 60}
    return {**config, **names}


DIVISIBLE: Mapping[str, Mapping[str, object]] = {
    name: with_eight_heads(config)
    for name, config in BY_MODEL_TYPE.items()
    if name != "hrm_text" and name not in MIXTURES and name not in TORCH_ONLY
}
"""Every family that can be divided over devices."""
