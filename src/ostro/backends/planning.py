"""Estimates how much memory a model needs, from its config and its files' headers. Reads no weights; imports no torch.

    ┌─ weights ────────────────────┬─ KV cache ─────────────────┬─ other ──────────────────────────────┐
    │ as stored in memory; torch   │ pages: allocated as        │ Python, its libraries, torch if it   │
    │ on a CPU adds a second       │ sequences arrive, then     │ runs the model, and the temporary    │
    │ layout if it fits            │ kept                       │ memory of one step                   │
    └──────────────────────────────┴────────────────────────────┴──────────────────────────────────────┘

Mirrors the decisions of `backends.loading` and shares `backends.memory` with it. Tests compare plans with the memory of
whole engines.

native      whether the native core can run a model, and the memory it takes
on_torch    the memory a model takes with torch
on_jax      the memory a model takes with JAX, on each device
quantized   what becomes of a quantised checkpoint's numbers
outcome     the plan itself
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ostro.backends.cuda.kernel_choices import own_kernels
from ostro.backends.cuda.quantized_planning import kept_on_gpu, stored_as
from ostro.backends.division import choose_ranks
from ostro.backends.jax.planning import on_jax
from ostro.backends.native.planning import on_native
from ostro.backends.plan import Fit, Parts, Plan, put_together
from ostro.backends.torch.planning import on_apple_gpu, on_cpu, on_encoder, on_gpu
from ostro.config import EngineConfig, ResolvedConfig
from ostro.devices import DEVICE_KINDS, DeviceKind, Memory, check_together, device_kind_here, runs_on_jax
from ostro.errors import BadRequest, Unsupported
from ostro.models.description import Description
from ostro.models.encoder import Encoder
from ostro.models.registry import describe
from ostro.weights import Checkpoint, open_headers
from ostro.weights.stored import Stored

__all__ = ["Fit", "Plan", "plan"]


def plan(
    model: Checkpoint | str | Path | None,
    config: EngineConfig,
    *,
    memory: int | None = None,
    device: str | None = None,
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
    unknown = device == "auto" and memory is not None
    backend = DEVICE_KINDS["cpu"] if unknown else device_kind_here(device, config.backend)
    resolved = backend.resolve(config)
    check_together(resolved)
    stored = model.stored()
    described = describe(model.config, max_seq_len=config.max_seq_len)
    resolved = replace(resolved, tensor_parallel=_ranks(model, config, backend))
    there = backend.memory(resolved.tensor_parallel) if memory is None else Memory(memory, memory)
    if there is None:
        raise BadRequest(_unknown_memory(backend, resolved.tensor_parallel))
    if isinstance(described, Encoder) and not runs_on_jax(resolved):
        given = replace(config, tensor_parallel=resolved.tensor_parallel)
        resolved = replace(resolved, max_batch_tokens=backend.encoded_tokens(config))
        parts = _of_encoder(stored, given, resolved, described, there)
    else:
        planner = on_jax if runs_on_jax(resolved) else _PLANNERS[backend.name]
        parts = planner(stored, resolved, described, there)
    found = put_together(model.name, resolved, described, there.free, parts)
    kept = kept_on_gpu(stored, resolved, described) if parts.backend.startswith("torch (cuda") else {}
    natively = parts.backend.startswith("native")
    found = replace(found, stored_as=stored_as(stored, natively=natively, kept=kept))
    return found if memory is not None else replace(found, own_kernels=own_kernels(resolved, described, kept))


def _ranks(model: Checkpoint, config: EngineConfig, backend: DeviceKind) -> int:
    devices = backend.count() if config.tensor_parallel == "auto" else 1
    if not devices:
        raise BadRequest(
            f"tensor_parallel is auto, but there is no {backend.label} here to be counted. Give their number: "
            "--tensor-parallel 8.",
            param="tensor_parallel",
        )
    return choose_ranks(model, config, devices)


def _unknown_memory(backend: DeviceKind, devices: int) -> str:
    # Devices may be here without the libraries that would use them.
    if devices == 1:
        missing, each = f"no {backend.label} that Ostro could use was found here", "it has"
    else:
        missing, each = f"{devices} {backend.label}s that Ostro could use were not found here", "each of them has"
    return f"device is {backend.name!r}, but {missing}. Say how much memory {each}: --memory 80G."


def _of_encoder(
    stored: Stored, given: EngineConfig, config: ResolvedConfig, described: Encoder, memory: Memory
) -> Parts:
    """On any device; makes the same choice as `backends.loading`."""
    has_core, reason = DEVICE_KINDS[config.device].has_native_core, None
    if has_core:
        reason = "backend is torch"
        if config.backend != "torch":
            given.check_encoding(natively=True)
            found = on_native(stored, config, described, memory.free)
            if not isinstance(found, str):
                return found
            reason = found
        if config.backend == "native":
            raise Unsupported(f"backend is native, but {reason}. Leave it out to run on torch.", param="backend")
    given.check_encoding()
    return replace(on_encoder(stored, config, described, memory), not_native=reason)


def _on_cpu(stored: Stored, config: ResolvedConfig, described: Description, memory: Memory) -> Parts:
    """Makes the same choice as `backends.loading`."""
    reason = "backend is torch"
    if config.backend != "torch":
        found = on_native(stored, config, described, memory.free)
        if not isinstance(found, str):
            return found
        reason = found
        if config.backend == "native":
            raise Unsupported(f"backend is native, but {reason}. Leave it out to run on torch.", param="backend")
    config.check_tiers(reason)
    return replace(on_cpu(stored, config, described, memory.free), not_native=reason)


def _on_gpu(stored: Stored, config: ResolvedConfig, described: Description, memory: Memory) -> Parts:
    return on_gpu(stored, config, described, memory.total, memory.free)


def _on_apple_gpu(stored: Stored, config: ResolvedConfig, described: Description, memory: Memory) -> Parts:
    config.check_tiers(f"the model runs on a {DEVICE_KINDS['mps'].label}")
    return on_apple_gpu(stored, config, described, memory.free)


_PLANNERS: Mapping[str, Callable[[Stored, ResolvedConfig, Description, Memory], Parts]] = {
    "cpu": _on_cpu,
    "cuda": _on_gpu,
    "mps": _on_apple_gpu,
}
