"""A program that loads a Levanter checkpoint onto eight virtual devices and reports the memory that it took.

    python -m loading_memory CHECKPOINT MODEL_CONFIG -> {"peak": bytes, "read": bytes, "weights": bytes}

On a CPU, what the devices hold is host memory too, so `peak` is measured piece by piece: the most that the process had
resident while a piece was read and placed, less what it had before loading, less what the devices held when that piece
began. It includes what TensorStore has in flight, and copies that the devices make while they fuse matrices.
"""

import gc
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from ostro.backends.jax.mesh import make_mesh
from ostro.backends.jax.weights import Weights, load_weights
from ostro.models.architecture import Architecture
from ostro.models.cut import cut
from ostro.models.registry import describe
from ostro.weights import Checkpoint, open_checkpoint
from ostro.weights.arrays import Floats
from ostro.weights.slices import Index, SlicedWeight

RANKS = 8


def main(path: str, model_config: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS)
    checkpoint = open_checkpoint(path, model_config=model_config)
    # Once before: what libraries allocate on first use is not the checkpoint's.
    loaded(checkpoint)
    gc.collect()
    before = bytes_read()
    memory = Memory(base=resident("VmRSS"))
    weights = loaded(WatchedCheckpoint(checkpoint, memory))  # type: ignore[arg-type]
    memory.note()
    held = sum(array.nbytes for array in jax.tree.leaves(weights))
    print(json.dumps({"peak": memory.peak, "read": bytes_read() - before, "weights": held}))


def loaded(checkpoint: Checkpoint) -> Weights:
    described = describe(checkpoint.config)
    assert isinstance(described, Architecture)
    return load_weights(described, checkpoint, cut(described, RANKS), make_mesh(RANKS), np.float32)


@dataclass
class Memory:
    base: int
    peak: int = 0
    _held: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._begin()

    def note(self) -> None:
        """Ends the measurement of one piece, and begins the next."""
        self.peak = max(self.peak, resident("VmHWM") - self.base - self._held)
        self._begin()

    def _begin(self) -> None:
        self._held = on_devices()
        # Resets the kernel's high-water mark.
        Path("/proc/self/clear_refs").write_text("5")


@dataclass(frozen=True)
class WatchedCheckpoint:
    """Measures from each read to the next."""

    checkpoint: Checkpoint
    memory: Memory

    @property
    def config(self) -> Mapping[str, object]:
        return self.checkpoint.config

    def slices(self) -> Iterator[tuple[str, SlicedWeight]]:
        for name, weight in self.checkpoint.slices():
            yield name, WatchedWeight(weight, self.memory)


@dataclass(frozen=True)
class WatchedWeight:
    weight: SlicedWeight
    memory: Memory

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def holds_numbers(self) -> bool:
        return self.weight.holds_numbers

    @property
    def format_name(self) -> str:
        return self.weight.format_name

    def read(self, index: Index) -> Floats:
        self.memory.note()
        return self.weight.read(index)


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def bytes_read() -> int:
    """Bytes that the process has read from files."""
    return int(Path("/proc/self/io").read_text().splitlines()[0].split()[1])


def on_devices() -> int:
    """Bytes of live arrays. None of them is copied to several devices."""
    return sum(array.nbytes for array in jax.live_arrays())


if __name__ == "__main__":
    main(*sys.argv[1:])
