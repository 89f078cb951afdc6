"""How many layers' experts the CPU computes for a model on a GPU, and what that takes on both. Imports no torch."""

import logging
from bisect import bisect_left
from dataclasses import dataclass, replace

from ostro.backends.backend import OpenedModel
from ostro.backends.cuda.fusible import why_unfused
from ostro.backends.native.planning import native_program
from ostro.backends.native.support import NotNative
from ostro.backends.plan import CpuPart, Parts
from ostro.backends.precision import with_cpu_experts as with_experts
from ostro.backends.torch.planning import gpu_host_bytes, gpu_parts
from ostro.devices import Memory
from ostro.errors import BadRequest, Unsupported
from ostro.kernels.cpu.library import why_missing
from ostro.models.architecture import Architecture
from ostro.models.description import Causal
from ostro.models.expert_layers import ExpertLayers, mixtures_of, with_cpu_experts
from ostro.system.machine import free_memory

MOST_ROWS = 1024
"""Rows that the CPU computes at a time. Of a model with many experts, each has a few dozen of them, so that reading its
weights counts for little, and the rows of all their experts fit into a hundred megabytes.
"""
_GIB = 1 << 30
_log = logging.getLogger(__name__)
# Share of the pages that there would be with all experts on the CPU: so many are kept free of experts.
_KV_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Divided:
    """A model without some experts, and these."""

    device: Architecture
    experts: ExpertLayers


def check_cpu_experts(opened: OpenedModel, described: Causal) -> None:
    """Raises Unsupported if the CPU cannot compute experts of this model."""
    if opened.config.cpu_experts == "none":
        return
    if (reason := _why_not(opened, described)) is not None:
        raise Unsupported(f"cpu_experts cannot be used: {reason}. Leave it out.", param="cpu_experts")


def _why_not(opened: OpenedModel, described: Causal) -> str | None:
    if not isinstance(described, Architecture) or not mixtures_of(described):
        return "the model is no mixture of experts"
    if (reason := why_unfused(described)) is not None:
        return f"the fused kernels do not run this model: {reason}"
    if opened.config.tensor_parallel not in (1, "auto"):
        return "the model is divided over devices"
    if opened.config.adapters:
        return "it does not work with adapters"
    if (missing := why_missing()) is not None:
        return missing.rstrip(".")
    try:
        native_program(opened.checkpoint, _divided(described, "all").experts, opened.config.quantize)
    except NotNative as error:
        return str(error)
    return None


def movable_layers(opened: OpenedModel, described: Causal) -> int:
    """Layers of a model that is on the GPU as a whole whose experts the CPU could compute."""
    if not isinstance(described, Architecture) or _why_not(opened, described) is not None:
        return 0
    return len(mixtures_of(described))


def divided(opened: OpenedModel, described: Causal, memory: Memory | None) -> Divided | None:
    """The parts of a model that `check_cpu_experts` has accepted, on a GPU with this memory, if it is known. None if
    the CPU computes nothing.
    """
    wanted = opened.config.cpu_experts
    if wanted == "none" or not isinstance(described, Architecture):
        return None
    if wanted == "auto" and memory is not None:
        wanted = fewest_layers(opened, described, memory)
    return None if wanted == 0 else _divided(described, "all" if wanted == "auto" else wanted)


def _divided(described: Architecture, layers: int | str) -> Divided:
    most = len(mixtures_of(described))
    return Divided(*with_cpu_experts(described, min(layers, most) if isinstance(layers, int) else most))


def fewest_layers(opened: OpenedModel, described: Architecture, memory: Memory) -> int:
    """The fewest layers' experts without which the rest fits on the GPU, with enough pages for keys and values."""
    most, opened = len(mixtures_of(described)), on_device(opened)

    def pages(layers: int) -> int:
        """Those that fit beside the experts of all but so many layers."""
        device, experts = with_cpu_experts(described, layers)
        parts = gpu_parts(opened, device, memory, elsewhere=experts.names)
        usable = memory.total * opened.config.gpu_memory_utilization - (memory.total - memory.free)
        return parts.pages if parts.total <= usable else 0

    enough = max(1, int(_KV_SHARE * pages(most)))
    return bisect_left(range(most), True, key=lambda layers: pages(layers) >= enough)


def on_device(opened: OpenedModel) -> OpenedModel:
    """The settings of what is on the GPU: with `cpu_experts`, `quantize` is for the others alone."""
    if opened.config.cpu_experts == "none":
        return opened
    return replace(opened, config=replace(opened.config, quantize="none"))


def with_cpu_part(parts: Parts, opened: OpenedModel, described: Architecture, found: Divided) -> Parts:
    """The plan of a GPU's part, with what the CPU adds."""
    cpu = cpu_part(opened, found.experts)
    return replace(
        parts,
        parameters=sum(tensor.values for tensor in opened.checkpoint.stored().tensors),
        idle_parameters=described.idle_weights,
        host=_host_bytes(opened, cpu),
        precision=with_experts(parts.precision, cpu.layers, cpu.formats),
        cpu=cpu,
        movable=len(mixtures_of(described)) - cpu.layers,
    )


def check_host_memory(opened: OpenedModel, found: Divided) -> None:
    """Logs what goes where; raises BadRequest if this machine's memory does not hold the experts."""
    cpu, free = cpu_part(opened, found.experts), free_memory()
    if (needed := _host_bytes(opened, cpu)) > free:
        raise BadRequest(
            f"cpu_experts leaves {cpu.nbytes / _GIB:.1f} GiB of experts to this machine's own memory: with the process "
            f"{needed / _GIB:.1f} GiB, of which {free / _GIB:.1f} are free. Lower it, or use quantize int4.",
            param="cpu_experts",
        )
    most = len(mixtures_of(found.device))
    _log.info("the CPU computes the experts of %d of %d layers: %.1f GiB", cpu.layers, most, cpu.nbytes / _GIB)


def _host_bytes(opened: OpenedModel, cpu: CpuPart) -> int:
    """What has to fit into this machine's own memory, as plans and starts see it."""
    return gpu_host_bytes(opened.resolved) + cpu.nbytes


def cpu_part(opened: OpenedModel, experts: ExpertLayers) -> CpuPart:
    program = native_program(opened.checkpoint, experts, opened.config.quantize)
    row = 4 * sum(buffer.cols * buffer.per_token for buffer in program.spec.buffers)
    rows = min(MOST_ROWS, opened.resolved.max_batch_tokens)
    return CpuPart(
        len(experts.mixtures), program.layout.nbytes + rows * row, program.spec.precision.replace(", ", " and ")
    )
