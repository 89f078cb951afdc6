"""The kinds of devices that run models: their defaults, number formats and memory; which settings rule each other out;
and which need torch or JAX, which are extras. Asks the system, and imports neither.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import ClassVar, NamedTuple

from ostro.config import Device, DType, EngineConfig, Number, ResolvedConfig
from ostro.errors import BadRequest, Unsupported
from ostro.system.machine import (
    count_gpus,
    count_tpus,
    device_here,
    free_memory,
    gpu_memory,
    has_jax,
    has_torch,
    tpu_memory,
)
from ostro.system.requirements import needs


class Memory(NamedTuple):
    total: int
    free: int


class DeviceKind(ABC):
    """One kind of device."""

    name: ClassVar[Device]
    """Its name in settings, plans and loaded models."""
    label: ClassVar[str]
    """Its name for people."""
    has_own_memory: ClassVar[bool]
    """Whether models use memory there in addition to the host's."""
    has_native_core: ClassVar[bool]
    dtypes: ClassVar[tuple[DType, ...]]
    """Compute dtypes without the native core; the first is the default."""
    smaller: ClassVar[str]
    """The option for smaller weights; empty if there is none."""
    page_size: ClassVar[int]
    max_batch_seqs: ClassVar[int]
    max_batch_tokens: ClassVar[int]
    max_batch_tokens_serving: ClassVar[int]
    """Tokens per step when serving, where steps must be short because people read along."""
    max_encoded_tokens: ClassVar[int] = 1024
    """Tokens per step of an encoder, which takes whole texts in a step while nobody reads along."""

    @abstractmethod
    def check(self, config: EngineConfig) -> None:
        """Raises BadRequest for number formats that it does not support."""

    def count(self) -> int:
        """Devices of this machine that a model can be divided over; 0 if there are none, or if they cannot be queried.
        A CPU is one.
        """
        return 1

    def memory(self, devices: Number = 1) -> Memory | None:
        """The memory of this machine's device, or of the smallest of its first `devices`, "auto" being all; None if
        there are fewer, or if they cannot be queried. CPUs share theirs.
        """
        number = self.count() if devices == "auto" else devices
        return self._memory(number) if number else None

    @abstractmethod
    def _memory(self, devices: int) -> Memory | None: ...

    def dtypes_of(self, backend: str) -> tuple[DType, ...]:
        """Compute dtypes with this backend, if it is not the native core."""
        return self.dtypes

    def compute_dtype(self, asked: DType) -> DType:
        """The compute dtype without the native core."""
        return self.dtypes[0] if asked == "auto" else asked

    def encoded_tokens(self, config: EngineConfig) -> int:
        """Most tokens in a step of an encoder."""
        return config.max_batch_tokens or self.max_encoded_tokens

    def resolve(self, config: EngineConfig) -> ResolvedConfig:
        """The settings for this device, with defaults filled in. Raises BadRequest like `check`.

        How many devices "auto" means depends on the model (`backends.division`): here it is one.
        """
        self.check(config)
        tokens = self.max_batch_tokens_serving if config.serving else self.max_batch_tokens
        given = {each.name: getattr(config, each.name) for each in fields(EngineConfig)}
        open_ = {
            "device": self.name,
            "tensor_parallel": 1 if config.tensor_parallel == "auto" else config.tensor_parallel,
            "page_size": config.page_size or self.page_size,
            "max_batch_tokens": config.max_batch_tokens or tokens,
            "max_batch_seqs": config.max_batch_seqs or self.max_batch_seqs,
        }
        return ResolvedConfig(**(given | open_))


class _Cpu(DeviceKind):
    name, label = "cpu", "CPU"
    has_own_memory, has_native_core = False, True
    dtypes = ("float32",)
    smaller = "--quantize int8 or int4"
    page_size, max_batch_seqs = 16, 64
    max_batch_tokens, max_batch_tokens_serving = 256, 128

    def check(self, config: EngineConfig) -> None:
        _check_no_nvidia_settings(config)
        if config.dtype not in ("auto", *self.dtypes_of(config.backend)):
            cure = "Use float32, or --backend jax." if config.dtype == "bfloat16" else "Use float32."
            raise BadRequest(f"dtype {config.dtype} does not run on a CPU. {cure}", param="dtype")
        if config.quantize == "fp8":
            raise BadRequest("quantize fp8 needs a GPU; on a CPU use int8 or int4.", param="quantize")
        if config.kv_dtype == "fp8":
            raise BadRequest("kv_dtype fp8 needs a GPU; on a CPU use float16 or int8.", param="kv_dtype")

    def dtypes_of(self, backend: str) -> tuple[DType, ...]:
        # XLA computes in bfloat16 on CPUs, too: for checking on one what a TPU or GPU will do.
        return (*self.dtypes, "bfloat16") if backend == "jax" else self.dtypes

    def _memory(self, devices: int) -> Memory:
        free = free_memory()
        return Memory(free, free)


class _Cuda(DeviceKind):
    name, label = "cuda", "GPU"
    has_own_memory, has_native_core = True, False
    # 16-bit dtypes are twice as fast there.
    dtypes = ("bfloat16", "float16", "float32")
    smaller = "--quantize fp8"
    page_size, max_batch_seqs = 64, 256
    max_batch_tokens, max_batch_tokens_serving = 16384, 8192
    max_encoded_tokens = 16384

    def check(self, config: EngineConfig) -> None:
        if config.quantize in ("int8", "int4") and config.cpu_experts == "none":
            raise Unsupported(
                f"quantize {config.quantize} runs on CPUs only for now; on a GPU use fp8.", param="quantize"
            )
        if config.kv_dtype not in ("auto", "fp8"):
            raise BadRequest(f"kv_dtype {config.kv_dtype} runs on CPUs only; on a GPU use fp8.", param="kv_dtype")
        if config.deterministic and config.names_kernels:
            raise BadRequest(
                "With deterministic, the same matmul computes any number of rows: leave out kernel_choices.",
                param="kernel_choices",
            )

    def count(self) -> int:
        return count_gpus()

    def _memory(self, devices: int) -> Memory | None:
        found = gpu_memory(devices)
        return None if found is None else Memory(*found)


class _Tpu(DeviceKind):
    name, label = "tpu", "TPU"
    has_own_memory, has_native_core = True, False
    dtypes = ("bfloat16", "float32")
    smaller = ""
    page_size, max_batch_seqs = 64, 128
    max_batch_tokens, max_batch_tokens_serving = 4096, 2048

    def check(self, config: EngineConfig) -> None:
        if config.dtype not in ("auto", *self.dtypes):
            raise BadRequest(f"dtype {config.dtype} does not run on TPUs. Use bfloat16 or float32.", param="dtype")

    def count(self) -> int:
        return count_tpus()

    def _memory(self, devices: int) -> Memory | None:
        total = tpu_memory()
        return None if total is None else Memory(total, total)


class _Mps(DeviceKind):
    name, label = "mps", "Mac's GPU"
    has_own_memory, has_native_core = False, False
    dtypes = ("float32", "float16", "bfloat16")
    smaller = "--dtype float16"
    page_size, max_batch_seqs = 16, 64
    max_batch_tokens, max_batch_tokens_serving = 256, 128

    def check(self, config: EngineConfig) -> None:
        _check_no_nvidia_settings(config)
        for name, idle in {"quantize": "none", "kv_dtype": "auto", "deterministic": False}.items():
            if getattr(config, name) != idle:
                raise Unsupported(
                    f"{name} {getattr(config, name)} does not run on a Mac's GPU. Leave it out, or use --device cpu.",
                    param=name,
                )

    def _memory(self, devices: int) -> Memory:
        # Shared with the CPU.
        free = free_memory()
        return Memory(free, free)


def _check_no_nvidia_settings(config: EngineConfig) -> None:
    if config.kv_host_memory is not None:
        raise BadRequest(
            "kv_host_memory is for NVIDIA GPUs; elsewhere the KV cache is in host memory already. Use kv_memory.",
            param="kv_host_memory",
        )
    if config.cpu_experts != "none":
        raise BadRequest(
            "cpu_experts is for models on an NVIDIA GPU; elsewhere all experts are in the same memory. Leave it out.",
            param="cpu_experts",
        )
    if config.names_kernels:
        raise BadRequest(
            f"kernel_choices {config.kernel_choices} is for NVIDIA GPUs. Leave it out.", param="kernel_choices"
        )


DEVICE_KINDS: Mapping[str, DeviceKind] = {each.name: each for each in (_Cpu(), _Cuda(), _Tpu(), _Mps())}

# Settings that JAX does not honour, with the value that leaves them out.
_NOT_ON_JAX: Mapping[str, object] = {
    "quantize": "none",
    "kv_dtype": "auto",
    "deterministic": False,
    "cuda_graphs": True,
    "cuda_graph_max_bs": None,
    "cpu_experts": "none",
    "threads": "auto",
    "huge_pages": "auto",
}


def device_kind_here(device: str, backend: str = "auto") -> DeviceKind:
    """The kind of device that settings mean on this machine: "auto" is a TPU or a GPU if the backend can use one,
    and a Mac's GPU if torch is asked for.
    """
    return DEVICE_KINDS[device_here(device, backend)]


def runs_on_jax(config: EngineConfig) -> bool:
    """Whether JAX runs models with these settings on this machine."""
    return _is_jax(config.backend, config.device)


def can_divide(backend: str, device: str) -> bool:
    """Whether these settings can divide a model over several devices on this machine. On a CPU, where that gains
    nothing, the backend must be named.
    """
    kind = device_here(device, backend)
    return kind in ("cuda", "tpu") if backend == "auto" else backend != "native" and kind in ("cpu", "cuda", "tpu")


def _is_jax(backend: str, device: str) -> bool:
    return backend == "jax" or (backend == "auto" and device_here(device) == "tpu")


def check_together(config: EngineConfig) -> None:
    """Raises BadRequest or Unsupported for a backend that cannot do what other settings ask for."""
    if runs_on_jax(config):
        if config.device == "mps":
            raise Unsupported("JAX does not run on a Mac's GPU. Use --backend torch, or --device cpu.", param="device")
        ignored = [name for name, idle in _NOT_ON_JAX.items() if getattr(config, name) != idle] + config.tier_settings
        if config.names_kernels:
            ignored.append("kernel_choices")
        if config.speculative == "ngram":
            ignored.append("speculative")
        if ignored:
            raise Unsupported(
                f"{ignored[0]} does not work with JAX. Leave it out, or use --backend torch on CPUs or GPUs.",
                param=ignored[0],
            )
    elif config.device == "tpu":
        raise Unsupported(f"backend {config.backend} does not run on TPUs. Use --backend jax.", param="backend")
    elif config.tensor_parallel not in (1, "auto") and config.has_tiers:
        name = config.tier_settings[0]
        raise Unsupported(f"{name} does not work with tensor_parallel. Leave one of them out.", param=name)
    elif config.tensor_parallel not in (1, "auto") and (reason := why_undivided(config)) is not None:
        raise reason


def why_undivided(config: EngineConfig) -> Unsupported | None:
    """Why settings other than the number of devices keep torch from dividing a model; None if none do."""
    if not can_divide(config.backend, config.device):
        return Unsupported(
            f"tensor_parallel is {config.tensor_parallel}, but the model would run on one device. Leave it out; to try "
            "it on a CPU, add --backend torch or --backend jax.",
            param="tensor_parallel",
        )
    if config.quantize in ("int8", "int4"):
        return Unsupported(
            f"Weights in {config.quantize} cannot be divided over devices. Leave out quantize or tensor_parallel.",
            param="quantize",
        )
    if config.deterministic:
        return Unsupported(
            "On several devices the order of sums depends on the batch. Leave out deterministic or tensor_parallel.",
            param="deterministic",
        )
    return None


def check_settings(config: EngineConfig) -> None:
    """Raises BadRequest or Unsupported for a backend that other settings rule out, or that is not installed."""
    check_together(config)
    if runs_on_jax(config):
        _require_jax(config)
        return
    if config.device != "auto" and not DEVICE_KINDS[config.device].has_native_core:
        require_torch(f"device {config.device}", param="device")
    if config.backend == "torch":
        require_torch("backend torch", param="backend")


def require_torch(what: str, *, param: str | None = None) -> None:
    """Raises Unsupported if torch is not installed, with the command that installs it."""
    if not has_torch():
        raise Unsupported(needs(what, "torch"), param=param)


def _require_jax(config: EngineConfig) -> None:
    if not has_jax():
        setting = "backend" if config.backend == "jax" else "device"
        raise Unsupported(needs(f"{setting} {getattr(config, setting)}", "jax"), param=setting)
