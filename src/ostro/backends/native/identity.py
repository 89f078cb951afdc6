"""The cache key of a packed file: whose weights it holds, and how they were packed. Reads a sample of each source file.

The key depends on contents, not on location: a file replaced by another of the same size and time gets another key.
"""

import hashlib
import json
from dataclasses import dataclass

from ostro.backends.model_facts import model_facts
from ostro.config import EngineConfig
from ostro.kernels.cpu.library import library
from ostro.weights import Checkpoint

# Incremented when the packed format changes, so that older files are packed again.
_FORMAT = 2


@dataclass(frozen=True, slots=True)
class PackedKey:
    digest: str
    source: str
    """The checkpoint's path."""
    variant: str
    """How it was packed, in words. For each source and variant, only the newest packed file is useful."""


def packed_key(checkpoint: Checkpoint, config: EngineConfig, panel: int) -> PackedKey:
    made = (_FORMAT, library().ostro_version(), panel)
    facts = [made, config.quantize, config.max_seq_len, dict(checkpoint.config), model_facts(checkpoint)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
    variant = f"panels of {panel}"
    if config.quantize != "none":
        variant += f", {config.quantize}"
    if config.max_seq_len is not None:
        variant += f", context {config.max_seq_len}"
    return PackedKey(digest, str(checkpoint.path), variant)
