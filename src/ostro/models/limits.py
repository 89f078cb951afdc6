"""Upper bounds for the sizes in a model's config: several times the largest published models."""

MOST_LAYERS = 1024
MOST_HEADS = 4096
MOST_HEAD_DIM = 4096
MOST_HIDDEN = 1 << 20
MOST_INNER = 1 << 22
MOST_VOCAB = 1 << 24
MOST_EXPERTS = 4096
MOST_EXPERTS_OF_ALL_LAYERS = 1 << 17
MOST_CYCLES = 64
MOST_POSITIONS = (1 << 31) - 1

EPS = (1e-20, 1.0)
THETA = (1.0 + 1e-6, 1e15)
FACTOR = (1e-3, 1e6)
STRENGTH = (1e-6, 1e3)
