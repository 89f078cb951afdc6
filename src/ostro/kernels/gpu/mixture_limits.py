"""Which mixtures of experts the kernels support. Needs neither torch nor Triton."""

MOST_EXPERTS, MOST_CHOSEN = 512, 16
"""A row's logits are held in registers, and loops over the chosen experts are unrolled, which takes 7 to 12 seconds to
compile for 32 of them.
"""
ALIGNED = 8
"""Experts' widths must be multiples of this: the copy engine reads 16 bytes, eight 16-bit numbers, at a time."""
