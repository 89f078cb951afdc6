"""Checks before the weights are downloaded whether a model needs torch, from its config and headers."""

from pathlib import Path

from ostro.backends.native.planning import on_native
from ostro.config import EngineConfig
from ostro.devices import DEVICE_KINDS, check_settings, require_torch, runs_on_jax
from ostro.models.hrm_config import is_hrm
from ostro.models.registry import describe
from ostro.system.machine import free_memory, has_torch
from ostro.weights import open_headers


def check_without_torch(model: str | Path | None, config: EngineConfig) -> None:
    """Raises Unsupported if loading the model requires torch and torch is not installed, or like `check_settings`.

    Fetches the headers of a remote model if torch is not installed.
    """
    check_settings(config)
    if has_torch() or runs_on_jax(config):
        return
    # The embedded model runs natively, and checking it would require downloading it.
    if model is None:
        return
    with open_headers(model, model_config=config.model_config) as checkpoint:
        if is_hrm(checkpoint.config):
            require_torch("An HRM", param="model")
        described = describe(checkpoint.config, max_seq_len=config.max_seq_len)
        cpu = DEVICE_KINDS["cpu"]
        found = on_native(checkpoint.stored(), cpu.resolve(config), described, free_memory())
        if isinstance(found, str) and config.backend != "native":
            require_torch(f"{checkpoint.name} ({found})", param="model")
