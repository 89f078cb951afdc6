"""Reads model files. Importing this package imports no torch."""

from ostro.formats.gguf_header import GgufHeader, GgufTensorInfo, read_gguf_header
from ostro.weights.checkpoint import Checkpoint, open_checkpoint, open_headers, open_remote_headers
from ostro.weights.gguf_checkpoint import GgufCheckpoint
from ostro.weights.pooling import Pooling

__all__ = [
    "Checkpoint",
    "GgufCheckpoint",
    "GgufHeader",
    "GgufTensorInfo",
    "Pooling",
    "open_checkpoint",
    "open_headers",
    "open_remote_headers",
    "read_gguf_header",
]
