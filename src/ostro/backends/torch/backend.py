"""Torch as a backend: all models that no other one runs, on CPUs, GPUs and Macs. Imports torch only to load a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, assert_never

from ostro.backends.backend import OpenedModel, Reasons
from ostro.backends.plan import Parts
from ostro.backends.precision import check_torch_format
from ostro.backends.torch.plain_attention import check_plain_attention, check_states_whole
from ostro.backends.torch.planning import encoder_parts, gpu_parts, host_parts
from ostro.devices import Memory
from ostro.engine.runner import ModelRunner
from ostro.errors import Unsupported
from ostro.models.architecture import Architecture, HrmText
from ostro.models.description import Causal
from ostro.models.encoder import Encoder
from ostro.models.hrm_config import HrmConfig


class TorchBackend:
    name = "torch"
    library = "torch"

    def refuses(self, opened: OpenedModel) -> None:
        return None

    def check(self, opened: OpenedModel, reasons: Reasons) -> None:
        _variant(opened).check(reasons)

    def plan(self, opened: OpenedModel, memory: Memory) -> Parts:
        return _variant(opened).plan(memory)

    def load(self, opened: OpenedModel, following: Callable[[], None]) -> ModelRunner:
        return _variant(opened).load()


class _Variant(Protocol):
    """How torch runs a kind of model."""

    def check(self, reasons: Reasons) -> None: ...
    def plan(self, memory: Memory) -> Parts: ...
    def load(self) -> ModelRunner: ...


def _variant(opened: OpenedModel) -> _Variant:
    match opened.description:
        case Architecture() | HrmText() as described:
            return _Paged(opened, described)
        case Encoder() as described:
            return _Encoding(opened, described)
        case HrmConfig() as described:
            return _Recomputing(opened, described)
        case unknown:
            assert_never(unknown)


@dataclass(frozen=True, slots=True)
class _Paged:
    """A model with a KV cache; on an NVIDIA GPU, one that the attention kernels do not run."""

    opened: OpenedModel
    described: Causal

    def check(self, reasons: Reasons) -> None:
        config = self.opened.config
        config.check_causal()
        check_torch_format(self.described, config.quantize)
        if self.opened.kind.name == "cuda":
            check_states_whole(self.described, config)
            check_plain_attention(config, reasons["cuda"])
            return
        config.check_tiers(reasons["native"])
        if self.opened.kind.name == "cpu" and config.kv_dtype not in ("auto", "float32"):
            raise Unsupported(
                f"kv_dtype {config.kv_dtype} needs the native core, and this model runs on torch; leave it out.",
                param="kv_dtype",
            )

    def plan(self, memory: Memory) -> Parts:
        planned = gpu_parts if self.opened.kind.name == "cuda" else host_parts
        return planned(self.opened, self.described, memory)

    def load(self) -> ModelRunner:
        from ostro.backends.torch.load import paged_runner

        return paged_runner(self.opened, self.described)


@dataclass(frozen=True, slots=True)
class _Encoding:
    opened: OpenedModel
    described: Encoder

    def check(self, reasons: Reasons) -> None:
        self.opened.divided(self.opened.ranks(1)).config.check_encoding()

    def plan(self, memory: Memory) -> Parts:
        return encoder_parts(self.opened, self.described, memory)

    def load(self) -> ModelRunner:
        from ostro.backends.torch.load import encoder_runner

        return encoder_runner(self.opened, self.described)


@dataclass(frozen=True, slots=True)
class _Recomputing:
    opened: OpenedModel
    described: HrmConfig

    def check(self, reasons: Reasons) -> None:
        self.opened.divided(self.opened.ranks(1)).config.check_recomputing()

    def plan(self, memory: Memory) -> Parts:
        name = self.opened.checkpoint.name
        raise Unsupported(
            f"{name} is an HRM, which keeps no keys and values: its memory does not depend on how many sequences "
            "run. Load it to see."
        )

    def load(self) -> ModelRunner:
        from ostro.backends.torch.load import recompute_runner

        return recompute_runner(self.opened, self.described)
