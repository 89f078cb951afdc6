"""Quantizes the layers' projections of a loaded model, most of its bytes, to 8 bits.

The embedding, norms and head are left alone: they are rarely read, small, or sensitive, as they distinguish tokens.
"""

import torch

from ostro.backends.cuda.layer_plan import why_unfused
from ostro.backends.cuda.projections import Fp8Linear
from ostro.backends.precision import without_fused_kernels
from ostro.errors import Unsupported
from ostro.kernels.gpu.fp8 import MULTIPLE
from ostro.torch_models.base import Model
from ostro.torch_models.decoder import Decoder, DecoderLayer
from ostro.torch_models.layers import Linear
from ostro.torch_models.shard import Collective

_NEEDS = (8, 9)
"""The lowest compute capability with 8-bit float matrix units: Ada's; Hopper's is 9.0."""


def quantize_fp8(model: Model, group: Collective | None = None) -> None:
    """Replaces all projections in the model's layers and returns their memory to the device. A rank's part of a model
    is quantized together with the others of its `group`.
    """
    layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
    _check(model, layers)
    for layer in layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                # One at a time, so that at most one weight exists in both formats.
                if isinstance(child, Linear):
                    setattr(parent, name, Fp8Linear.quantized(child, group))
    if torch.cuda.is_available():
        # The device's free memory is measured next.
        torch.cuda.empty_cache()


def has_fp8(device: torch.device) -> bool:
    """Whether a GPU has 8-bit matrix units. A CPU stands in for one that has, in tests."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _NEEDS


def _check(model: Model, layers: list[DecoderLayer]) -> None:
    refusal = "quantize fp8 cannot be done: "
    if (unfused := why_unfused(model)) is not None:
        raise without_fused_kernels(unfused)
    if isinstance(model, Decoder) and model.described.has_experts:
        raise Unsupported(f"{refusal}there are no kernels for experts in 8 bits. Leave it out.", param="quantize")
    weights = [module.weight for layer in layers for module in layer.modules() if isinstance(module, Linear)]
    device, dtype = weights[0].device, weights[0].dtype
    if not has_fp8(device):
        raise Unsupported(f"{refusal}this GPU has no 8-bit matrix units. Leave it out.", param="quantize")
    if device.type == "cuda" and dtype == torch.float32:
        raise Unsupported(f"{refusal}it needs dtype bfloat16 or float16, got float32.", param="quantize")
    if any(size % MULTIPLE for weight in weights for size in weight.shape):
        raise Unsupported(f"{refusal}a layer's width is not a multiple of {MULTIPLE}. Leave it out.", param="quantize")
