"""The CPU's fast path: a model's step as one native call.

support     which models have kernels, by their descriptions
lowering    from a model's description to steps, and what is packed for them
packing     from a checkpoint's tensors to a packed file
load        finds that file, or has it made; says why a model cannot run so
runner      runs batches
sampling    changes scores before the core draws from them
logprobs    log-probabilities of tokens, in numpy
lora        puts adapters' steps into a program
"""
