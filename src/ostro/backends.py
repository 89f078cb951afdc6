"""The kinds of devices that run models: their defaults, number formats and memory. Asks the system, never torch.
`planning` and `runner` have a function for each, by name.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import ClassVar, NamedTuple

from ostro.config import DType, EngineConfig, ResolvedConfig
from ostro.errors import BadRequest, Unsupported
from ostro.machine import device_here, free_memory, gpu_memory


class Memory(NamedTuple):
    total: int
    free: int


class Backend(ABC):
    """One kind of device."""

    name: ClassVar[str]
    """Its name in settings, plans and loaded models."""
    label: ClassVar[str]
    """Its name for people."""
    has_own_memory: ClassVar[bool]
    """Whether models use memory there in addition to the host's."""
    has_native_core: ClassVar[bool]
    dtypes: ClassVar[tuple[DType, ...]]
    """Compute dtypes without the native core."""
    smaller: ClassVar[str]
    """Formats with smaller weights, in words."""
    page_size: ClassVar[int]
    max_batch_seqs: ClassVar[int]
    max_batch_tokens: ClassVar[int]
    max_batch_tokens_serving: ClassVar[int]
    """For serving, where steps must be short because people read along."""

    @abstractmethod
    def check(self, config: EngineConfig) -> None:
        """Raises BadRequest for number formats that it does not support."""

    @abstractmethod
    def memory(self) -> Memory | None:
        """The memory of this machine's device; None if there is none, or if it cannot be queried."""

    def resolve(self, config: EngineConfig) -> ResolvedConfig:
        """The settings for this device, with defaults filled in. Raises BadRequest like `check`."""
        self.check(config)
        tokens = self.max_batch_tokens_serving if config.serving else self.max_batch_tokens
        given = {each.name: getattr(config, each.name) for each in fields(EngineConfig)}
        open_ = {
            "device": self.name,
            "page_size": config.page_size or self.page_size,
            "max_batch_tokens": config.max_batch_tokens or tokens,
            "max_batch_seqs": config.max_batch_seqs or self.max_batch_seqs,
        }
        return ResolvedConfig(**(given | open_))


class _Cpu(Backend):
    name, label = "cpu", "CPU"
    has_own_memory, has_native_core = False, True
    dtypes = ("float32",)
    smaller = "int8 or int4"
    page_size, max_batch_seqs = 16, 64
    max_batch_tokens, max_batch_tokens_serving = 256, 128

    def check(self, config: EngineConfig) -> None:
        if config.dtype not in ("auto", *self.dtypes):
            raise BadRequest(f"dtype {config.dtype} runs on GPUs only; on a CPU use float32.", param="dtype")
        if config.quantize == "fp8":
            raise BadRequest("quantize fp8 needs a GPU; on a CPU use int8 or int4.", param="quantize")
        if config.kv_dtype == "fp8":
            raise BadRequest("kv_dtype fp8 needs a GPU; on a CPU use float16 or int8.", param="kv_dtype")

    def memory(self) -> Memory:
        free = free_memory()
        return Memory(free, free)


class _Cuda(Backend):
    name, label = "cuda", "GPU"
    has_own_memory, has_native_core = True, False
    dtypes = ("float32", "float16", "bfloat16")
    smaller = "fp8"
    page_size, max_batch_seqs = 64, 256
    max_batch_tokens, max_batch_tokens_serving = 16384, 8192

    def check(self, config: EngineConfig) -> None:
        if config.quantize in ("int8", "int4"):
            raise Unsupported(
                f"quantize {config.quantize} runs on CPUs only for now; on a GPU use fp8.", param="quantize"
            )
        if config.kv_dtype not in ("auto", "fp8"):
            raise BadRequest(f"kv_dtype {config.kv_dtype} runs on CPUs only; on a GPU use fp8.", param="kv_dtype")

    def memory(self) -> Memory | None:
        found = gpu_memory()
        return None if found is None else Memory(*found)


BACKENDS: Mapping[str, Backend] = {each.name: each for each in (_Cpu(), _Cuda())}


def backend_here(device: str) -> Backend:
    """The backend for a setting on this machine: "auto" is a GPU if there is one."""
    return BACKENDS[device_here(device)]
