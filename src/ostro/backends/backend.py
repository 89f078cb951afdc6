"""What a backend is, and the opened model that it is asked about: made once, then used to choose, plan and load.

A backend is one folder with a `backend` module, which imports neither torch nor JAX until it loads a model. It says
which models it runs, plans the memory that they take, and loads them. `backends.choosing` lists the backends in order
of preference, and is the only place that decides between them. Nothing here reads weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ostro.backends.plan import Parts
from ostro.config import DType, EngineConfig, ResolvedConfig
from ostro.devices import DeviceKind, Memory, device_kind_here, runs_on_jax, why_undivided
from ostro.engine.runner import ModelRunner
from ostro.models.architecture import Architecture
from ostro.models.cut import most_ranks
from ostro.models.description import Description
from ostro.models.registry import describe
from ostro.weights import Checkpoint
from ostro.weights.checkpoint import with_hrm_settings
from ostro.weights.hrm_settings import HrmSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedModel:
    checkpoint: Checkpoint
    description: Description
    config: EngineConfig
    kind: DeviceKind
    """The kind of device that the settings mean on this machine."""

    @property
    def resolved(self) -> ResolvedConfig:
        """The settings with the device's defaults filled in."""
        return self.kind.resolve(self.config)

    @property
    def compute_dtype(self) -> DType:
        """The number format that the model computes in, if torch or JAX runs it."""
        return self.kind.compute_dtype(self.config.dtype)

    def ranks(self, devices: int) -> int:
        """`tensor_parallel`; for "auto", as many of the `devices` as the model and the other settings allow."""
        if self.config.tensor_parallel != "auto":
            return self.config.tensor_parallel
        if devices < 2 or why_undivided(self.config) is not None:
            return 1
        has_states = isinstance(self.description, Architecture) and bool(self.description.states)
        if has_states and not runs_on_jax(self.config):
            return 1
        return most_ranks(self.description, devices)

    def divided(self, ranks: int) -> "OpenedModel":
        """The same model, divided over a known number of devices."""
        return replace(self, config=replace(self.config, tensor_parallel=ranks))


def open_model(checkpoint: Checkpoint, config: EngineConfig) -> OpenedModel:
    """Describes the model, which validates its config. Raises as `models.registry.describe` does."""
    checkpoint = with_hrm_settings(checkpoint, _hrm_settings(config))
    return OpenedModel(
        checkpoint=checkpoint,
        description=describe(checkpoint.config, max_seq_len=config.max_seq_len),
        config=config,
        kind=device_kind_here(config.device, config.backend),
    )


def _hrm_settings(config: EngineConfig) -> HrmSettings:
    """An HRM's architecture as the settings state it, under the names used in HRM files."""
    return HrmSettings(
        None if config.hrm_config is None else Path(config.hrm_config),
        {
            "num_heads": config.hrm_num_heads,
            "H_cycles": config.hrm_h_cycles,
            "L_cycles": config.hrm_l_cycles,
            "H_layers": config.hrm_h_layers,
            "L_layers": config.hrm_l_layers,
            "dialect": None if config.hrm_dialect == "auto" else config.hrm_dialect,
        },
    )


Reasons = Mapping[str, str]
"""Why the backends before the chosen one do not run a model, by their names."""


class Unloadable(Exception):
    """Why a model that was not refused cannot be loaded after all; another backend may be able to."""


class Backend(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def library(self) -> str | None:
        """The optional dependency that it needs: "torch" or "jax"."""

    def refuses(self, opened: OpenedModel) -> str | None:
        """The reason why another backend must run the model; None if this one can."""

    def check(self, opened: OpenedModel, reasons: Reasons) -> None:
        """Raises BadRequest or Unsupported for settings that it does not take with this model."""

    def plan(self, opened: OpenedModel, memory: Memory) -> Parts:
        """The memory that the model takes on a device with this much, from its config and its files' headers."""

    def load(self, opened: OpenedModel, following: Callable[[], None]) -> ModelRunner:
        """Raises Unloadable if only loading shows that it cannot run the model.

        If another host's process leads this one, calls `following` once it follows, and ends when the leader does.
        """
