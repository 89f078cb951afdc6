"""Ministral 3: YaRN, and queries scaled by position beyond the original context."""

from family_case import Config, FamilyCase

YARN: Config = {
    "rope_type": "yarn",
    "factor": 2.0,
    "original_max_position_embeddings": 60,
    "llama_4_scaling_beta": 0.1,
}

CASE = FamilyCase(
    model_type="ministral3",
    config={"rope_parameters": YARN},
    variants={
        "mscale": {"rope_parameters": {**YARN, "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 1.0}},
    },
)
