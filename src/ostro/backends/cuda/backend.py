"""NVIDIA GPUs as a backend: models with a KV cache, on our own kernels. Imports torch only to load a model."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from ostro.backends.backend import OpenedModel, Reasons
from ostro.backends.cuda.choices import own_kernels
from ostro.backends.cuda.cpu_layers import (
    check_cpu_experts,
    check_host_memory,
    divided,
    movable_layers,
    on_device,
    with_cpu_part,
)
from ostro.backends.cuda.determinism import check_deterministic
from ostro.backends.cuda.fusible import why_unfused
from ostro.backends.cuda.precompiling import Precompiler, precompiler
from ostro.backends.cuda.quantized_weights import kept_weights, largest_packed, why_widened
from ostro.backends.plan import Parts
from ostro.backends.precision import check_torch_format
from ostro.backends.torch.plain_attention import check_states_whole, why_plain_attention
from ostro.backends.torch.planning import Kept, gpu_parts
from ostro.devices import Memory
from ostro.engine.runner import ModelRunner
from ostro.errors import Unsupported
from ostro.models.architecture import Architecture
from ostro.models.description import Causal

_log = logging.getLogger(__name__)


class CudaBackend:
    name = "cuda"
    library = "torch"

    def refuses(self, opened: OpenedModel) -> str | None:
        if opened.kind.name != self.name:
            return f"the model runs on a {opened.kind.label}"
        if not isinstance(opened.description, Causal):
            return "it has no KV cache"
        return why_plain_attention(opened.description)

    def check(self, opened: OpenedModel, reasons: Reasons) -> None:
        config, described = opened.config, _causal(opened)
        config.check_causal()
        # Other formats are for experts on the CPU.
        if config.cpu_experts == "none" or config.quantize == "fp8":
            check_torch_format(described, config.quantize)
        check_cpu_experts(opened, described)
        if config.speculative == "ngram" and described.states:
            raise Unsupported(
                "speculative ngram does not work on a GPU with models whose layers keep a recurrent state: wrong "
                "drafts could not be taken out of it. Leave it out, or serve the model on a CPU.",
                param="speculative",
            )
        check_states_whole(described, config)
        if config.deterministic:
            check_deterministic(
                has_adapters=bool(config.adapters),
                unfused=why_unfused(described),
                # Experts on the CPU compute each row alone, in whatever format.
                quantizes=config.quantize != "none" and config.cpu_experts == "none",
            )

    def plan(self, opened: OpenedModel, memory: Memory) -> Parts:
        described, there = _causal(opened), on_device(opened)
        config = there.resolved
        if (found := divided(opened, described, memory)) is not None:
            assert isinstance(described, Architecture)
            parts = gpu_parts(there, found.device, memory, elsewhere=found.experts.names)
            parts = replace(parts, own_kernels=own_kernels(config, described, {}))
            return with_cpu_part(parts, opened, described, found)
        forms = kept_weights(opened.checkpoint.stored(), described, config)
        parts = gpu_parts(there, described, memory, Kept(forms, largest_packed(described, forms)))
        parts = replace(parts, own_kernels=own_kernels(config, described, forms))
        return parts if parts.fits(memory.free) else replace(parts, movable=movable_layers(opened, described))

    def load(self, opened: OpenedModel, following: Callable[[], None]) -> ModelRunner:
        described, stored = _causal(opened), opened.checkpoint.stored()
        if (found := divided(opened, described, opened.kind.memory(1))) is not None:
            check_host_memory(opened, found)
            from ostro.backends.cuda.load import load_divided

            return load_divided(opened, found)
        if opened.config.cpu_experts == "auto":
            unused = "" if opened.config.quantize == "none" else f"; quantize {opened.config.quantize} is not used"
            _log.info("cpu_experts auto: all experts fit on the GPU%s", unused)
        opened = on_device(opened)
        # If the number of GPUs is not known yet, one is assumed.
        alone = opened.divided(opened.ranks(1)).config
        keeps_quantized = bool(kept_weights(stored, described, alone))
        if any(tensor.form for tensor in stored.tensors) and (reason := why_widened(alone, described)) is not None:
            _log.info("quantised weights are widened: %s", reason)
        # Kernels are compiled ahead from the config, which does not say which kernels a quantised model needs.
        with nullcontext() if keeps_quantized else _precompiler(opened) as started:
            from ostro.backends.cuda.load import load_runner

            return load_runner(opened, described, started, keeps_quantized=keeps_quantized)


def _causal(opened: OpenedModel) -> Causal:
    assert isinstance(opened.description, Causal)
    return opened.description


def _precompiler(opened: OpenedModel) -> AbstractContextManager[Precompiler | None]:
    """For a model on one GPU: started before torch is imported, which takes seconds."""
    if opened.config.tensor_parallel not in (1, "auto"):
        return nullcontext()
    return precompiler(opened.checkpoint.config, opened.config)
