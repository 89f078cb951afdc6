"""A model family: its names, how its configs are described, and how other formats store it."""

from collections.abc import Callable
from dataclasses import dataclass

from ostro.models.config import ConfigReader
from ostro.models.description import Causal
from ostro.models.encoder import Encoder
from ostro.models.families.gguf_names import GgufNames
from ostro.models.families.levanter_names import LevanterNames


@dataclass(frozen=True, slots=True)
class Family:
    title: str
    """The models it covers, by their common names."""
    model_type: str
    """As in config.json, like the next two."""
    architecture: str
    bare: str
    """The architecture's name in checkpoints saved without the head, like embedding models."""
    describe: Callable[[ConfigReader, int | None], Causal | Encoder]
    """Takes a config, in which `tie_word_embeddings` is always set, and the context length to serve."""
    backbone: str = "model"
    """The prefix of all tensor names but the head's. Checkpoints of the bare backbone may omit it."""
    head: str = "lm_head"
    """The head's name, unless it is tied to the embedding."""
    others: tuple[str, ...] = ()
    """An encoder's further architectures: the bare one with a head that is only for training."""
    wrappers: tuple[str, ...] = ()
    """Multimodal architectures whose language model, configured by their `text_config`, is what gets served. If several
    families have one, `text_config` names the model type.
    """
    tied: bool = False
    """Whether the head is tied to the embedding if config.json does not say."""
    unread: Callable[[ConfigReader], frozenset[str]] | None = None
    """The modules that checkpoints hold though nothing reads them."""
    gguf: GgufNames | None = None
    """None if GGUF has no such family."""
    levanter: tuple[LevanterNames, ...] = ()
    """One for each of Levanter's model types that belong to the family."""
