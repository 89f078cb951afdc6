"""How much memory a model will take, from its config and its files' headers. Reads no weights and imports no torch.

    ┌─ weights ────────────────────┬─ keys and values ──────────┬─ other ──────────────────────────────┐
    │ as they are kept; with torch │ pages: taken as sequences  │ Python, its libraries, torch where   │
    │ on a CPU in a second layout  │ come, then kept            │ it runs the model, and what one step │
    │ too, if it fits              │                            │ needs besides                        │
    └──────────────────────────────┴────────────────────────────┴──────────────────────────────────────┘

Follows what `runner.load` does and asks `runner.memory` what it asks. Tests hold them together, by the bytes of whole
engines.

native      what the native core makes of a model's tensors, and whether it does
on_torch    what torch makes of them
outcome     what a plan says
"""

from dataclasses import replace
from pathlib import Path

from ostro.config import EngineConfig
from ostro.errors import BadRequest, Unsupported
from ostro.machine import device_here, free_memory, gpu_memory
from ostro.models.architecture import Description
from ostro.models.registry import describe
from ostro.planning.native import on_native
from ostro.planning.on_torch import on_cpu, on_gpu
from ostro.planning.outcome import Fit, Parts, Plan, put_together
from ostro.weights import Checkpoint, open_outline
from ostro.weights.stored import Stored

__all__ = ["Fit", "Plan", "plan"]


def plan(
    model: Checkpoint | str | Path | None,
    config: EngineConfig,
    *,
    memory: int | None = None,
    device: str | None = None,
) -> Plan:
    """What loading the model with these settings would take, on this machine or on one with `memory` bytes free.

    A reference is looked up as for serving, but of a model in a store or on the Hub no weights are downloaded.
    `config.model` is not read. A model that is too large is planned all the same: then `fits` is false.
    """
    if memory is not None and memory < 1:
        raise BadRequest(f"memory must be at least 1 byte, got {memory}.", param="memory")
    if isinstance(model, str | Path | None):
        with open_outline(model, model_config=config.model_config) as outline:
            return plan(outline, config, memory=memory, device=device)
    device = device or config.device
    # Asked about the memory of another machine, "auto" does not look at this one's.
    device = "cpu" if device == "auto" and memory is not None else device_here(device)
    config.check_device(device)
    config = config.suited_to(device)
    stored = model.stored()
    described = describe(model.config, max_seq_len=config.max_seq_len)
    shape = described.shape
    if device == "cpu":
        memory = free_memory() if memory is None else memory
        return put_together(model.name, "cpu", config, shape, memory, _on_cpu(stored, config, described, memory))
    total_and_free = gpu_memory() if memory is None else (memory, memory)
    if total_and_free is None:
        raise BadRequest("device is 'cuda', but there is no GPU here. Say how much memory it has: --memory 80G.")
    parts = on_gpu(stored, config, shape, *total_and_free)
    return put_together(model.name, "cuda", config, shape, total_and_free[1], parts)


def _on_cpu(stored: Stored, config: EngineConfig, described: Description, memory: int) -> Parts:
    """As `runner.load` decides."""
    reason = "cpu_backend is torch"
    if config.cpu_backend != "torch":
        found = on_native(stored, config, described, memory)
        if not isinstance(found, str):
            return found
        reason = found
        if config.cpu_backend == "native":
            raise Unsupported(
                f"cpu_backend is native, but {reason}. Leave it out to run on torch.", param="cpu_backend"
            )
    return replace(on_cpu(stored, config, described, memory), not_native=reason)
