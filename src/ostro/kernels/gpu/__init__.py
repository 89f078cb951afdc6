"""GPU kernels in Triton, each next to a plain torch implementation that tests hold it to.

Imported only if there is a GPU, or if Triton's interpreter stands in for one (TRITON_INTERPRET=1), except for
`tilings`, `packed_layout` and `mixture_limits`, which are plain arithmetic.
"""
