"""Loads a model: opens it, chooses its backend, and lets that load it. Imports only the library that runs the model."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from ostro.backends.backend import Unloadable, open_model
from ostro.backends.choosing import choose, require
from ostro.config import EngineConfig
from ostro.devices import check_settings
from ostro.engine.runner import ModelRunner
from ostro.weights import Checkpoint, Pooling

if TYPE_CHECKING:
    from ostro.torch_models.base import Model

_log = logging.getLogger(__name__)


def load_runner(
    checkpoint: Checkpoint, config: EngineConfig, *, following: Callable[[], None] = lambda: None
) -> ModelRunner:
    """A runner for the checkpoint's model. For `following`, see `Backend.load`."""
    check_settings(config)
    opened = open_model(checkpoint, config)
    unloadable: dict[str, str] = {}
    while True:
        choice = choose(opened, unloadable)
        require(opened, choice)
        try:
            runner = choice.backend.load(opened, following)
        except Unloadable as error:
            unloadable[choice.backend.name] = str(error)
            continue
        if config.backend == "auto" and opened.kind.has_native_core and choice.not_native is not None:
            _log.info("the model runs on torch, which is slower than the native core: %s", choice.not_native)
        return runner


def make_runner(model: "Model", config: EngineConfig, *, pooling: Pooling | None = None) -> ModelRunner:
    """A runner for a torch model that is loaded, on its device."""
    if next(model.parameters()).device.type == "cuda":
        from ostro.backends.cuda.load import make_runner as make
    else:
        from ostro.backends.torch.load import make_runner as make
    return make(model, config, pooling=pooling)


__all__ = ["load_runner", "make_runner"]
