"""The kinds of description that a config.json can have: a decoder's, HRM-Text's, an encoder's."""

from ostro.models.architecture import Architecture, HrmText
from ostro.models.encoder import Encoder

Description = Architecture | HrmText | Encoder
