"""Torch and JAX are extras: which settings need them, and the error if they are not installed. Imports neither."""

from ostro.backends import BACKENDS, check_together, runs_on_jax
from ostro.config import EngineConfig
from ostro.errors import Unsupported
from ostro.extras import needs
from ostro.machine import has_jax, has_torch


def check_settings(config: EngineConfig) -> None:
    """Raises BadRequest or Unsupported for a backend that other settings rule out, or that is not installed."""
    check_together(config)
    if runs_on_jax(config):
        _require_jax(config)
        return
    if config.device != "auto" and not BACKENDS[config.device].has_native_core:
        require_torch(f"device {config.device}", param="device")
    if config.backend == "torch":
        require_torch("backend torch", param="backend")


def require_torch(what: str, *, param: str | None = None) -> None:
    """Raises Unsupported if torch is not installed, with the command that installs it."""
    if not has_torch():
        raise Unsupported(needs(what, "torch"), param=param)


def _require_jax(config: EngineConfig) -> None:
    if not has_jax():
        setting = "backend" if config.backend == "jax" else "device"
        raise Unsupported(needs(f"{setting} {getattr(config, setting)}", "jax"), param=setting)
