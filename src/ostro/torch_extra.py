"""Torch is an extra: which settings need it, and the error if it is not installed. Imports no torch."""

from ostro.backends import BACKENDS
from ostro.config import EngineConfig
from ostro.errors import Unsupported
from ostro.extras import needs
from ostro.machine import has_torch


def check_settings(config: EngineConfig) -> None:
    """Raises Unsupported for settings that need torch if it is not installed."""
    if config.device != "auto" and not BACKENDS[config.device].has_native_core:
        require_torch(f"device {config.device}", param="device")
    if config.backend == "torch":
        require_torch("backend torch", param="backend")


def require_torch(what: str, *, param: str | None = None) -> None:
    """Raises Unsupported if torch is not installed, with the command that installs it."""
    if not has_torch():
        raise Unsupported(needs(what, "torch"), param=param)
