"""Estimates how much memory a model needs, from its config and its files' headers. Reads no weights; imports no torch.

    ┌─ weights ────────────────────┬─ KV cache ─────────────────┬─ other ──────────────────────────────┐
    │ as stored in memory; torch   │ pages: allocated as        │ Python, its libraries, torch if it   │
    │ on a CPU adds a second       │ sequences arrive, then     │ runs the model, and the temporary    │
    │ layout if it fits            │ kept                       │ memory of one step                   │
    └──────────────────────────────┴────────────────────────────┴──────────────────────────────────────┘

Asks the backend that would load the model (`backends.choosing`). Tests compare plans with the memory of whole engines.
"""

from dataclasses import replace
from pathlib import Path

from ostro.backends.backend import OpenedModel, open_model
from ostro.backends.choosing import choose
from ostro.backends.plan import Fit, Plan, put_together
from ostro.config import Device, EngineConfig
from ostro.devices import DeviceKind, Memory
from ostro.errors import BadRequest
from ostro.system.machine import free_memory
from ostro.weights import Checkpoint, open_headers

__all__ = ["Fit", "Plan", "plan"]


def plan(
    model: Checkpoint | str | Path | None,
    config: EngineConfig,
    *,
    memory: int | None = None,
    device: Device | None = None,
) -> Plan:
    """The memory needed to load the model with these settings, on this machine or on one with `memory` bytes free.

    A reference is resolved as for serving, but no weights of a remote model are downloaded. `config.model` is not
    read. A model that is too large still gets a plan, with `fits` false.
    """
    if memory is not None and memory < 1:
        raise BadRequest(f"memory must be at least 1 byte, got {memory}.", param="memory")
    if isinstance(model, str | Path | None):
        with open_headers(model, model_config=config.model_config) as headers:
            return plan(headers, config, memory=memory, device=device)
    device = device or config.device
    # When planning for another machine's memory, "auto" does not look at this machine's devices.
    there: Device = "cpu" if device == "auto" and memory is not None else device
    opened = _counted(open_model(model, replace(config, device=there)))
    choice, resolved = choose(opened), opened.resolved
    given = opened.kind.memory(resolved.tensor_parallel) if memory is None else Memory(memory, memory)
    if given is None:
        raise BadRequest(_unknown_memory(opened.kind, resolved.tensor_parallel))
    found = put_together(
        model.name,
        resolved,
        opened.description.shape,
        given.free,
        choice.backend.plan(opened, given),
        runs_on=choice.backend.name,
        not_native=choice.not_native if opened.kind.has_native_core else None,
    )
    if memory is not None:
        return replace(found, own_kernels=None)
    return found if found.cpu is None else replace(found, host_memory=free_memory())


def _counted(opened: OpenedModel) -> OpenedModel:
    """The same model over as many devices as "auto" means here."""
    devices = opened.kind.count() if opened.config.tensor_parallel == "auto" else 1
    if not devices:
        raise BadRequest(
            f"tensor_parallel is auto, but there is no {opened.kind.label} here to count. Give their number: "
            "--tensor-parallel 8.",
            param="tensor_parallel",
        )
    return opened.divided(opened.ranks(devices))


def _unknown_memory(kind: DeviceKind, devices: int) -> str:
    # Devices may be here without the libraries that would use them.
    if devices == 1:
        missing, each = f"no {kind.label} that Ostro could use was found here", "it has"
    else:
        missing, each = f"{devices} {kind.label}s that Ostro could use were not found here", "each of them has"
    return f"device is {kind.name!r}, but {missing}. Say how much memory {each}: --memory 80G."
