"""Quantised Hub checkpoints: one module per format decodes its tensors into ordinary weights. Imports no torch.

scheme    code common to all formats; parts, their stored tensors
weight    one weight, decoded or repacked as GGUF blocks (`blocks`) a few rows at a time
grid      integers with scales and zero points; tiles, float8 with scales
"""

from collections.abc import Callable, Mapping
from reprlib import repr as shown

from ostro.errors import BadCheckpoint
from ostro.models.config import ConfigReader
from ostro.weights.quantized.awq import Awq
from ostro.weights.quantized.bitsandbytes import Bitsandbytes
from ostro.weights.quantized.compressed_tensors import CompressedTensors
from ostro.weights.quantized.fp8 import Float8
from ostro.weights.quantized.gptq import Gptq
from ostro.weights.quantized.mxfp4 import Mxfp4
from ostro.weights.quantized.scheme import Scheme, refused

__all__ = ["Scheme", "read_scheme"]

_READERS: Mapping[str, Callable[[ConfigReader], Scheme]] = {
    "awq": Awq.read,
    "bitsandbytes": Bitsandbytes.read,
    "compressed-tensors": CompressedTensors.read,
    "fbgemm_fp8": Float8.read,
    "fp8": Float8.read,
    "gptq": Gptq.read,
    "modelopt": Float8.read_modelopt,
    "mxfp4": Mxfp4.read,
}


def read_scheme(quantization: object) -> Scheme:
    """The format that a config.json's `quantization_config` describes. Raises UnsupportedModel if it is not read."""
    if not isinstance(quantization, Mapping):
        raise BadCheckpoint(
            f"config.json: 'quantization_config' must be an object, got {shown(quantization)}. Download it again."
        )
    config = ConfigReader(quantization, "config.json, quantization_config")
    method = config.text("quant_method", "an unknown method")
    read = _READERS.get(method)
    if read is None:
        raise refused(method)
    return read(config)
