"""The native core on a CPU: a shared library of ours, called through ctypes. Knows raw memory; imports no torch.

library        the library's functions and structs, and why it is not there where it is not
packed_file    matrices packed for one instruction set, in a file that is mapped
program        a model's step as a list of operations on them, ready to run
"""
