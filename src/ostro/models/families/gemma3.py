"""Gemma 3 (text): as Gemma 2, but query and key heads are normed, and windowed layers have a rope of their own."""

from ostro.errors import UnsupportedModel
from ostro.models.architecture import Architecture
from ostro.models.config import ConfigReader
from ostro.models.families import gemma2
from ostro.models.families.common import decoder_shape, sliding_layers
from ostro.models.limits import MOST_LAYERS
from ostro.models.rope_settings import full_and_sliding_ropes


def describe(config: ConfigReader, max_seq_len: int | None) -> Architecture:
    if config.flag("use_bidirectional_attention", False):
        raise UnsupportedModel("Gemma with bidirectional attention is not supported; only its causal models are.")
    shape = decoder_shape(config, max_seq_len)
    period = config.integer("sliding_window_pattern", 6, most=MOST_LAYERS)
    slides = sliding_layers(config, shape.num_layers, otherwise=lambda layer: (layer + 1) % period != 0)
    layers = gemma2.layers(config, shape, slides, normed_heads=True, own_rope=True)
    return gemma2.around(config, shape, layers, full_and_sliding_ropes(config))
