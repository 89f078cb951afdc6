"""Mistral: Llama with windows."""

from family_case import LEVANTER_SETTINGS, FamilyCase, LevanterCase

CASE = FamilyCase(
    model_type="mistral",
    config={"sliding_window": 12},
    variants={"no-window": {"sliding_window": None}},
    levanter={
        "mistral": LevanterCase(
            settings={**LEVANTER_SETTINGS, "type": "mistral", "sliding_window": 4}, config={"rms_norm_eps": 1e-6}
        )
    },
)
