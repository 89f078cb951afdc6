"""The CPU's fast path: one native call per step of a model.

support     decides from a model's description whether the kernels can run it
lowering    translates a model's description into steps and packed tensors
packing     packs a checkpoint's tensors into a file
load        finds that file or makes it; reports why a model cannot run natively
runner      runs batches
sampling    edits scores before the core samples from them
logprobs    log-probabilities of tokens, in numpy
lora        adds adapters' steps to a program
"""
