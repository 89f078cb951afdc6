"""The native CPU core: our shared library, called through ctypes. Works on raw memory; imports no torch.

library        the library's functions and structs, and why it is missing if it is
packed_file    matrices packed for one instruction set, in a memory-mapped file
program        a model's step as a list of operations on them, ready to run
"""
