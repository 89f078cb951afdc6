"""Which mixtures of experts the kernels are made for. Needs neither torch nor Triton."""

MOST_EXPERTS, MOST_CHOSEN = 512, 16
"""Logits of a row are in registers, and loops over the chosen are unrolled, which takes 7 to 12 seconds to compile for
32 of them.
"""
ALIGNED = 8
"""Experts' widths are multiples of this: numbers of 16 bits in the 16 bytes that the copy engine reads."""
