"""What Ostro knows of a family of models: its names, how its models are described, how other formats hold them."""

from collections.abc import Callable
from dataclasses import dataclass

from ostro.models.architecture import Description
from ostro.models.config import ConfigReader
from ostro.models.families.gguf_names import GgufNames
from ostro.models.families.levanter_names import LevanterNames


@dataclass(frozen=True, slots=True)
class Family:
    title: str
    """The models that it serves, as people call them."""
    model_type: str
    """As config.json names it, as it does the next two."""
    architecture: str
    bare: str
    """The architecture's name where a checkpoint was saved without the head, as embedding models are."""
    describe: Callable[[ConfigReader, int | None], Description]
    """From a config, in which `tie_word_embeddings` is always there, and the context to serve."""
    backbone: str = "model"
    """The prefix of all tensors' names but the head's. A checkpoint of the bare backbone may leave it out."""
    head: str = "lm_head"
    """The head's name, where it is not the embedding's matrix."""
    wrapper: str | None = None
    """A multimodal architecture that is served as the language model inside it, whose config is its `text_config`."""
    tied: bool = False
    """Whether the head is the embedding's matrix where config.json does not say."""
    gguf: GgufNames | None = None
    """None where no GGUF file names the family."""
    levanter: tuple[LevanterNames, ...] = ()
    """One for each of Levanter's types that the family serves."""
