"""Configs of tiny models, as config.json would hold them."""

from collections.abc import Mapping

LLAMA: Mapping[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
GPT2: Mapping[str, object] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 32,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
LONGROPE: Mapping[str, object] = {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 4.0]}
PHI3: Mapping[str, object] = {
    **LLAMA,
    "architectures": ["Phi3ForCausalLM"],
    "original_max_position_embeddings": 16,
    "rope_scaling": LONGROPE,
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
