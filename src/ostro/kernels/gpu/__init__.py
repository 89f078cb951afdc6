"""Kernels for GPUs, in Triton, each beside a plain-torch twin that tests hold it to.

Imported only where there is a GPU, or where Triton's interpreter stands in for one (TRITON_INTERPRET=1).
"""
