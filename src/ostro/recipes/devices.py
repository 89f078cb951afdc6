"""The devices that recipes name."""

from collections.abc import Mapping
from dataclasses import dataclass

from ostro.config import Device, Number

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDevice:
    name: str
    label: str
    kind: Device
    memory: int
    """Free for a model, in bytes: of each, if there are several."""
    threads: Number = "auto"

    @property
    def options(self) -> str:
        """The options of `ostro plan` that mean this device."""
        return f"--device {self.kind} --memory {self.memory // _GIB}G"


# A GPU's memory is what its driver shows, rounded down. A machine keeps some for its other processes.
_TABLE = (
    NamedDevice(name="cpu-16gb", label="2-core CPU, 16 GB", kind="cpu", memory=14 * _GIB, threads=2),
    NamedDevice(name="cpu-64gb", label="16-core CPU, 64 GB", kind="cpu", memory=60 * _GIB, threads=16),
    NamedDevice(name="cpu-256gb", label="32-core CPU, 256 GB", kind="cpu", memory=240 * _GIB, threads=32),
    NamedDevice(name="rtx-4090", label="RTX 4090, 24 GB", kind="cuda", memory=23 * _GIB),
    NamedDevice(name="h100", label="H100, 80 GB", kind="cuda", memory=79 * _GIB),
    NamedDevice(name="h100-x2", label="2 × H100, 80 GB", kind="cuda", memory=79 * _GIB),
    NamedDevice(name="h200", label="H200, 141 GB", kind="cuda", memory=140 * _GIB),
)
DEVICES: Mapping[str, NamedDevice] = {each.name: each for each in _TABLE}
STANDARD = ("cpu-16gb", "rtx-4090", "h100", "h200")
"""Those that every recipe names: as a setup, or as too small. The others are there for models that need them."""
