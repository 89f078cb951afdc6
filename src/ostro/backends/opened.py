"""A model that is open: its files, its description and the settings, made once and asked by everything that decides,
plans or loads. Reads no weights; imports neither torch nor JAX.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from ostro.config import DType, EngineConfig, ResolvedConfig
from ostro.devices import DeviceKind, device_kind_here, why_undivided
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
        return most_ranks(self.description, devices)

    def divided(self, ranks: int) -> "OpenedModel":
        """The same model over a number of devices that is known."""
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
