"""Torch modules that run the models described in `ostro.models`.

build     builds modules from a description: `decoder`, made of `layers` and `experts`
loading   copies a checkpoint's tensors into place
hrm       models without a KV cache; hrm_text: layers that run several times per token
lora      adapters beside the weights
"""
