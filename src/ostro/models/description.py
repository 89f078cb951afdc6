"""The kinds of description that a model's config can have, and which of them every backend runs."""

from ostro.models.architecture import Architecture, HrmText
from ostro.models.encoder import Encoder
from ostro.models.hrm_config import HrmConfig
from ostro.models.torch_only import torch_only

Causal = Architecture | HrmText
"""Descriptions of models with a KV cache."""
Description = Causal | Encoder | HrmConfig


def plain_decoder(described: Description) -> Architecture | str:
    """The description of a decoder that any backend may run, or the reason why the model is not one."""
    match described:
        case Architecture():
            return torch_only(described) or described
        case HrmText():
            return "its layers run several times a token"
        case Encoder():
            return "it is an encoder"
        case HrmConfig():
            return "it is an HRM"
