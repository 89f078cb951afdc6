"""Language models within multimodal ones, saved whole by transformers: the text's logits are theirs."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from dense_context import dense_logits
from safetensors.torch import load_file, save_file
from telling_weights import telling

from ostro.torch_models.build import build_model
from ostro.torch_models.loading import load_weights
from ostro.weights import open_checkpoint

Config = Mapping[str, object]

TEXT: Config = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PIXTRAL: Config = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "patch_size": 8,
    "image_size": 16,
}
SIGLIP: Config = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 16,
}
QWEN_VISION: Config = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 48,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
YARN: Config = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 2.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}
SECTIONS: Config = {"rope_theta": 1e4, "mrope_section": [2, 3, 3]}
DELTA: Config = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}
CASES: Mapping[str, tuple[str, Config]] = {
    "gemma3": (
        "gemma3",
        {
            "text_config": {
                **TEXT,
                "model_type": "gemma3_text",
                "query_pre_attn_scalar": 24,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4": (
        "gemma4",
        {
            "text_config": {
                **TEXT,
                "model_type": "gemma4_text",
                "num_hidden_layers": 4,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "global_head_dim": 32,
                "num_kv_shared_layers": 2,
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 160,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
            },
            "audio_config": None,
            "image_token_id": 151,
            "video_token_id": 152,
            "audio_token_id": 153,
        },
    ),
    "gemma4_unified": (
        "gemma4_unified",
        {
            "text_config": {
                **TEXT,
                "model_type": "gemma4_unified_text",
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
                "global_head_dim": 32,
            },
            "vision_config": {"mm_embed_dim": 48, "output_proj_dims": 48, "mm_posemb_size": 8, "patch_size": 4},
            "audio_config": {"audio_embed_dim": 16},
            "image_token_id": 151,
            "video_token_id": 152,
            "audio_token_id": 153,
        },
    ),
    "llama4": (
        "llama4",
        {
            "text_config": {**TEXT, "num_local_experts": 4, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 16,
                "patch_size": 8,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            },
        },
    ),
    "mistral3": ("mistral3", {"text_config": {**TEXT, "model_type": "mistral"}, "vision_config": PIXTRAL}),
    "mistral3 around ministral3": (
        "mistral3",
        {"text_config": {**TEXT, "model_type": "ministral3", "rope_parameters": YARN}, "vision_config": PIXTRAL},
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {
            "text_config": {**TEXT, "head_dim": 12, "rope_parameters": {**SECTIONS, "mrope_section": [2, 2, 2]}},
            "vision_config": QWEN_VISION,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3_5": ("qwen3_5", {"text_config": {**TEXT, **DELTA}, "vision_config": QWEN_VISION}),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {
            "text_config": {
                **TEXT,
                **DELTA,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "shared_expert_intermediate_size": 32,
            },
            "vision_config": QWEN_VISION,
        },
    ),
    "qwen3_vl": ("qwen3_vl", {"text_config": {**TEXT, "rope_parameters": SECTIONS}, "vision_config": QWEN_VISION}),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", CASES)
def test_the_language_model_gives_transformers_logits(name: str, tmp_path: Path) -> None:
    model_type, values = CASES[name]
    config = transformers.AutoConfig.for_model(model_type, **values)
    whole = telling(transformers.AutoModelForImageTextToText.from_config(config))
    whole.save_pretrained(tmp_path)
    ids = torch.randint(3, 150, (24,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = whole(input_ids=ids[None]).logits[0].float()
    assert expected.std() > 0.3, "the test would not see a difference"
    checkpoint = open_checkpoint(tmp_path)
    model = build_model(checkpoint.config, dtype=torch.float32)
    load_weights(model, checkpoint.tensors())
    # Recurrences add up more numbers, and transformers computes them in blocks.
    tolerance = 2e-4 if name.startswith("qwen3_5") else 5e-5
    torch.testing.assert_close(dense_logits(model, ids.tolist()), expected, atol=tolerance, rtol=0)


def test_experts_may_be_stacked_and_layers_that_guess_ahead_are_left_out(tmp_path: Path) -> None:
    """As the published checkpoints of Qwen 3.5 have them; transformers writes each expert, and no such layers."""
    whole = saved_mixture(tmp_path)
    apart = dict(open_checkpoint(tmp_path).tensors())
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if ".mlp.experts." not in name}
    for layer in range(2):
        name = f"layers.{layer}.mlp.experts"
        gates, ups, downs = (
            torch.stack([apart[f"model.{name}.{expert}.{part}_proj.weight"] for expert in range(4)])
            for part in ("gate", "up", "down")
        )
        tensors[f"model.language_model.{name}.gate_up_proj"] = torch.cat((gates, ups), 1)
        tensors[f"model.language_model.{name}.down_proj"] = downs
    tensors["mtp.fc.weight"] = torch.zeros(48, 96)
    save_file(tensors, file, {"format": "pt"})
    check_against(whole, tmp_path)


def test_layers_that_guess_ahead_do_not_say_how_experts_are_stored(tmp_path: Path) -> None:
    whole = saved_mixture(tmp_path)
    file = tmp_path / "model.safetensors"
    stacked = {"mtp.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 48, 48)}
    save_file(load_file(file) | stacked, file, {"format": "pt"})
    check_against(whole, tmp_path)


def saved_mixture(directory: Path) -> transformers.PreTrainedModel:
    model_type, values = CASES["qwen3_5_moe"]
    whole = telling(
        transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(model_type, **values))
    )
    whole.save_pretrained(directory)
    return whole


def check_against(whole: transformers.PreTrainedModel, directory: Path) -> None:
    checkpoint, ids = open_checkpoint(directory), list(range(3, 20))
    model = build_model(checkpoint.config, dtype=torch.float32)
    load_weights(model, checkpoint.tensors())
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([ids])).logits[0].float()
    torch.testing.assert_close(dense_logits(model, ids), expected, atol=1e-4, rtol=0)
