"""Whether a model can be loaded without torch, told by its config and headers: before its weights are downloaded."""

from pathlib import Path

from ostro.backends import BACKENDS
from ostro.config import EngineConfig
from ostro.machine import free_memory, has_torch
from ostro.models.hrm_config import is_hrm
from ostro.models.registry import describe
from ostro.planning.native import on_native
from ostro.torch_extra import check_settings, require_torch
from ostro.weights import open_headers


def check_without_torch(model: str | Path | None, config: EngineConfig) -> None:
    """Raises Unsupported where loading the model needs torch, and torch is not installed.

    Where torch is installed it looks at nothing. Else, of a model in a store or on the Hub, headers are fetched.
    """
    if has_torch():
        return
    check_settings(config)
    # The embedded model runs natively, and is a file that has to be fetched to be looked at.
    if model is None:
        return
    with open_headers(model, model_config=config.model_config) as checkpoint:
        if is_hrm(checkpoint.config):
            require_torch("An HRM", param="model")
        described = describe(checkpoint.config, max_seq_len=config.max_seq_len)
        cpu = BACKENDS["cpu"]
        found = on_native(checkpoint.stored(), cpu.resolve(config), described, free_memory())
        if isinstance(found, str) and config.cpu_backend != "native":
            require_torch(f"{checkpoint.name} ({found})", param="model")
