"""The language model within a multimodal one, as its config.json describes it: what is served."""

from pathlib import Path
from reprlib import repr as shown

from ostro.errors import BadCheckpoint, UnsupportedModel
from ostro.models.registry import FAMILIES

# Keys that only the whole model's config has.
_OUTER = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "tie_word_embeddings",
    "torch_dtype",
    "quantization_config",
    "compression_config",
)


def text_part(path: Path, config: dict[str, object]) -> dict[str, object]:
    """The config of a multimodal model's language model; any other config unchanged."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    families = [family for family in FAMILIES if name in family.wrappers]
    if not families:
        return config
    # The first multimodal models had no table of their own for it.
    text_config = config if config.get("text_config") is None else config["text_config"]
    if not isinstance(text_config, dict):
        raise BadCheckpoint(f"{path} has a text_config that is not an object. Download it again.")
    if len(families) > 1:
        families = [family for family in families if family.model_type == text_config.get("model_type")]
        if not families:
            raise UnsupportedModel(
                f"{path} describes a language model of type {shown(text_config.get('model_type'))} in its text_config, "
                f"which is not supported within {name}."
            )
    family = families[0]
    inherited = {key: config[key] for key in _OUTER if key in config}
    # The head belongs to the whole model, not to the language model.
    tied = {key: value for key, value in inherited.items() if key == "tie_word_embeddings"}
    named = {"architectures": [family.architecture], "model_type": family.model_type}
    return inherited | text_config | tied | named
