"""The torch modules that run models, as `ostro.models` describes them.

build     from a description to modules: `decoder`, made of `layers`
loading   each tensor of a checkpoint to its place
hrm       the models that keep no KV cache; hrm_text, whose layers run several times a token
lora      adapters beside the weights
"""
