"""Decides which backend runs a model. Loading, planning and the check for torch all ask here. Imports neither torch nor
JAX.
"""

from pathlib import Path
from typing import NamedTuple

from ostro.backends.backend import Backend, OpenedModel, Reasons, open_model
from ostro.backends.cuda.backend import CudaBackend
from ostro.backends.jax.backend import JaxBackend
from ostro.backends.native.backend import NativeBackend
from ostro.backends.torch.backend import TorchBackend
from ostro.config import EngineConfig
from ostro.devices import check_settings, check_together, require_torch, runs_on_jax
from ostro.errors import Unsupported
from ostro.system.machine import has_torch
from ostro.weights import open_headers

BACKENDS: tuple[Backend, ...] = (JaxBackend(), NativeBackend(), CudaBackend(), TorchBackend())
"""In order of preference. The last one refuses nothing."""


class Choice(NamedTuple):
    backend: Backend
    reasons: Reasons

    @property
    def not_native(self) -> str | None:
        return self.reasons.get("native")


def choose(opened: OpenedModel, unloadable: Reasons | None = None) -> Choice:
    """The first backend that can run the model. Raises if the settings name a backend that cannot run it, or do not
    suit the one chosen.

    `unloadable` says why some backends could not load the model.
    """
    check_together(opened.config)
    opened.kind.check(opened.config)
    reasons = dict(unloadable or {})
    for backend in BACKENDS:
        reason = reasons.get(backend.name) or backend.refuses(opened)
        if reason is None:
            backend.check(opened, reasons)
            return Choice(backend, reasons)
        if opened.config.backend == backend.name:
            raise Unsupported(
                f"backend is {backend.name}, which cannot run this model: {reason}. Leave backend out to run on torch.",
                param="backend",
            )
        reasons[backend.name] = reason
    raise AssertionError("the last backend refuses nothing")


def check_without_torch(model: str | Path | None, config: EngineConfig) -> None:
    """Before the weights are downloaded, raises Unsupported if loading the model requires torch and torch is not
    installed; also raises what `check_settings` does. Fetches the headers of a remote model if torch is not installed.
    """
    check_settings(config)
    # The default model runs natively, and checking it would require downloading it.
    if has_torch() or runs_on_jax(config) or model is None:
        return
    with open_headers(model, model_config=config.model_config) as checkpoint:
        opened = open_model(checkpoint, config)
        require(opened, choose(opened))


def require(opened: OpenedModel, choice: Choice) -> None:
    """Raises Unsupported if the chosen backend needs torch and torch is not installed."""
    if choice.backend.library == "torch":
        require_torch(f"{opened.checkpoint.name} ({choice.not_native})", param="model")
