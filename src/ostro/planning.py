"""How much memory a model will take, from its config and its files' headers. Reads no weights and imports no torch.

    ┌─ weights ────────────────────┬─ keys and values ──────────┬─ other ──────────────────────────────┐
    │ as they are kept; on a CPU a │ pages: taken as sequences  │ Python, torch and its libraries, and │
    │ second layout, if it fits    │ come, then kept            │ what one step needs besides          │
    └──────────────────────────────┴────────────────────────────┴──────────────────────────────────────┘

Follows what `runner.load` does and asks `runner.memory` what it asks. Tests hold them together: by shape for every
family, by bytes for whole engines.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ostro.config import EngineConfig
from ostro.errors import BadCheckpoint, BadRequest, ModelError, Unsupported, UnsupportedModel
from ostro.machine import device_here, free_memory, gpu_memory
from ostro.models.config import ConfigReader
from ostro.runner.memory import (
    gpu_step_bytes,
    num_pages,
    page_bytes,
    pages_beside,
    second_layout_fits,
)
from ostro.weights import Checkpoint, GgufCheckpoint, open_outline
from ostro.weights.adapter import WEIGHTS as ADAPTER
from ostro.weights.gguf_header import GGML_TYPES
from ostro.weights.hf_checkpoint import PICKLE_SUFFIXES, HfCheckpoint, renamer
from ostro.weights.hrm_checkpoint import HrmCheckpoint
from ostro.weights.levanter_checkpoint import LevanterCheckpoint

_MIB = 1 << 20
# Measured, less the model: Python and torch, loaded; then with what BLAS keeps once tokens were computed; and what
# oneDNN keeps if it has laid out weights. Another build of torch may take a few dozen megabytes more or less.
_LOADED, _PROCESS, _ONEDNN = 230 * _MIB, 260 * _MIB, 25 * _MIB
# What is left of unpacking GGUF blocks, in the pools that allocators keep for each thread, and of the vocabulary.
_UNPACKING = 96 * _MIB
# With a GPU: what the driver takes of its memory, and what the process takes of the host's.
_GPU_CONTEXT = 600 * _MIB
_GPU_PROCESS = 3072 * _MIB
# Rows alive at a time, of the widest that a layer makes of a token: gate, up, their product, and the stream.
_ROWS_ALIVE = 4
# Tensors that are unpacked ahead of the one that is copied.
_UNPACKED_AHEAD = 5
# In 4 bits so many weights share a scale and a minimum of two bytes each, in 8 bits a row has a scale of four.
_GROUP, _SCALE = 32, 4

_LENGTHS = (512, 2048, 8192, 32768, 131072)
_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Fit:
    """How many sequences of one length, prompt and output together, run at a time."""

    length: int
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes are bytes of the device's memory: the machine's for a CPU, the GPU's for a GPU."""

    model: str
    device: str
    memory: int
    """What is free there, or was said to be."""
    parameters: int
    weights_bytes: int
    """As they are kept, the second layout included."""
    second_layout_bytes: int
    page_size: int
    page_bytes: int
    num_pages: int
    kv_bytes: int
    other_bytes: int
    total_bytes: int
    """Weights, keys and values, and other, once requests have filled the pages."""
    peak_bytes: int
    """The most that the system will have counted: while a model is loaded, mapped files count too."""
    host_bytes: int
    """Of the machine's own memory: on a CPU the total."""
    max_seq_len: int
    """Longest sequence that can run: the model's context, or what all pages hold."""
    max_batch_seqs: int
    sequences: tuple[Fit, ...]

    @property
    def fits(self) -> bool:
        return self.num_pages > 0 and self.total_bytes <= self.memory


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
    if isinstance(model, HrmCheckpoint):
        raise Unsupported(
            f"{model.name} is an HRM, which keeps no keys and values: what it takes does not depend on how many "
            "sequences run. Load it to see."
        )
    shape = read_shape(model.config, config.max_seq_len)
    if device == "cpu":
        return _on_cpu(model, config, shape, free_memory() if memory is None else memory)
    total_and_free = gpu_memory() if memory is None else (memory, memory)
    if total_and_free is None:
        raise BadRequest("device is 'cuda', but there is no GPU here. Say how much memory it has: --memory 80G.")
    return _on_gpu(model, config, shape, *total_and_free)


# --- devices --------------------------------------------------------------------------------------------------------


def _on_cpu(checkpoint: Checkpoint, config: EngineConfig, shape: "Shape", memory: int) -> Plan:
    assert config.page_size is not None
    assert config.max_batch_tokens is not None
    assert config.max_batch_seqs is not None
    itemsize = _ITEMSIZE["float32"]
    weights = _count(checkpoint, shape, config, itemsize)
    leftover = _UNPACKING if weights.unpacked else 0
    logits = 2 * config.max_batch_seqs * shape.vocab_size
    step = (config.max_batch_tokens * _ROWS_ALIVE * shape.widest + logits) * itemsize
    free = max(0, memory - _PROCESS - leftover - weights.kept)
    second = weights.kept_plain if second_layout_fits(weights.kept_plain, free) else 0
    try:
        pages = num_pages(
            shape,
            page_size=config.page_size,
            itemsize=itemsize,
            kv_memory=config.kv_memory,
            max_batch_seqs=config.max_batch_seqs,
            limit=config.kv_memory_limit,
            # What was asked for counts as it is: whether it fits is for the plan to say.
            free=free if config.kv_memory is None else sys.maxsize,
        )
    except ModelError:
        pages = 0
    return _plan(
        checkpoint.name,
        "cpu",
        config,
        shape,
        weights,
        memory=memory,
        second=second,
        page=page_bytes(shape, config.page_size, itemsize),
        pages=pages,
        spare=0,
        other=_PROCESS + leftover + (_ONEDNN if second else 0) + step,
        loading=_LOADED + leftover + weights.kept + weights.mapped + weights.unpacked + weights.staged,
    )


def _on_gpu(checkpoint: Checkpoint, config: EngineConfig, shape: "Shape", total: int, free: int) -> Plan:
    assert config.page_size is not None
    assert config.max_batch_tokens is not None
    assert config.max_batch_seqs is not None
    itemsize = _ITEMSIZE["bfloat16" if config.dtype == "auto" else config.dtype]
    kv_itemsize = 1 if config.kv_dtype == "fp8" else itemsize
    weights = _count(checkpoint, shape, config, itemsize)
    step = gpu_step_bytes(
        shape, itemsize=kv_itemsize, max_batch_tokens=config.max_batch_tokens, max_batch_seqs=config.max_batch_seqs
    )
    page = page_bytes(shape, config.page_size, kv_itemsize)
    try:
        pages = pages_beside(
            page,
            free=sys.maxsize if config.kv_memory is not None else max(0, free - _GPU_CONTEXT - weights.kept),
            total=total,
            step=step,
            kv_memory=config.kv_memory,
            utilization=config.gpu_memory_utilization,
            limit=config.kv_memory_limit,
        )
    except ModelError:
        pages = 0
    return _plan(
        checkpoint.name,
        "cuda",
        config,
        shape,
        weights,
        memory=free,
        second=0,
        page=page,
        pages=pages,
        # One takes what rows write that only fill up a batch.
        spare=1 if pages else 0,
        other=_GPU_CONTEXT + step,
        loading=0,
    )


def _plan(
    name: str,
    device: str,
    config: EngineConfig,
    shape: "Shape",
    weights: "_Weights",
    *,
    memory: int,
    second: int,
    page: int,
    pages: int,
    spare: int,
    other: int,
    loading: int,
) -> Plan:
    assert config.page_size is not None
    assert config.max_batch_seqs is not None
    total = weights.kept + second + (pages + spare) * page + other
    longest = min(shape.max_seq_len, pages * config.page_size)
    return Plan(
        model=name,
        device=device,
        memory=memory,
        parameters=weights.parameters,
        weights_bytes=weights.kept + second,
        second_layout_bytes=second,
        page_size=config.page_size,
        page_bytes=page,
        num_pages=pages,
        kv_bytes=(pages + spare) * page,
        other_bytes=other,
        total_bytes=total,
        peak_bytes=max(total, loading),
        host_bytes=total if device == "cpu" else _GPU_PROCESS,
        max_seq_len=longest,
        max_batch_seqs=config.max_batch_seqs,
        sequences=tuple(
            Fit(length, min(config.max_batch_seqs, pages // -(-length // config.page_size)))
            for length in sorted({*(each for each in _LENGTHS if each < longest), longest} - {0})
        ),
    )


# --- weights --------------------------------------------------------------------------------------------------------

_IN_LAYER = re.compile(r"(^|\.)(layers|h)\.\d+\.")
_LORA_B = re.compile(r"base_model\.model\.(?P<parent>.+)\.(?P<part>\w+)\.lora_B(?:\.default)?\.weight")
# Projections that models compute as one, wherever files hold them apart.
_FUSED = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"}))


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One weight of the model, as its header tells."""

    name: str
    shape: tuple[int, ...]

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    def kept_bytes(self, quantize: str, itemsize: int) -> int:
        """As the runners keep it: vectors as they are, matrices in as many bits as was asked for."""
        in_layer = _IN_LAYER.search(self.name) is not None
        if quantize == "none" or len(self.shape) != 2 or (quantize == "fp8" and not in_layer):
            return self.values * itemsize
        if quantize == "int4" and in_layer and self.shape[-1] % _GROUP == 0:
            return self.values // 2 + self.values // _GROUP * _SCALE
        return self.values + self.shape[0] * _SCALE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    parameters: int
    kept: int
    kept_plain: int
    """Of matrices that are not quantised: what a second layout takes."""
    mapped: int
    """Bytes of files that are mapped at a time while they are read."""
    unpacked: int
    """Most bytes of unpacked blocks that wait to be copied."""
    staged: int
    """Bytes of what is brought to fewer bits at a time, before it is."""


def _count(checkpoint: Checkpoint, shape: "Shape", config: EngineConfig, itemsize: int) -> _Weights:
    quantize, few_bits = config.quantize, config.quantize in ("int8", "int4")
    if isinstance(checkpoint, GgufCheckpoint):
        tensors = [_Tensor(weight.name, weight.info.shape) for weight in checkpoint.weights]
        mapped = sum(weight.info.nbytes for weight in checkpoint.weights)
        packed = [w.info for w in checkpoint.weights if GGML_TYPES[w.info.ggml_type].name not in ("F32", "F16", "BF16")]
        sizes = sorted((math.prod(info.shape) * 4 for info in packed), reverse=True)
    elif isinstance(checkpoint, HfCheckpoint):
        tensors = list(_hf_tensors(checkpoint, shape))
        mapped, sizes = max(path.stat().st_size for path in checkpoint.files), []
    elif isinstance(checkpoint, LevanterCheckpoint):
        tensors = [_Tensor(name, weight.hub_shape) for weight in checkpoint.weights for name in weight.names]
        # Of a stacked array as much as shares a chunk is read at a time: all layers at worst.
        mapped, sizes = max(math.prod(each.hub_shape) * len(each.names) * 4 for each in checkpoint.weights), []
    else:
        raise Unsupported(f"{checkpoint.name} is of a kind whose memory cannot be planned. Load it to see.")
    adapters = sum(_adapter_values(Path(path).expanduser() / ADAPTER, tensors) for _, path in config.adapters)
    plain = [tensor.values * itemsize for tensor in tensors]
    # A matrix at a time; with adapters the whole model, which they look at first.
    staged = 0 if not few_bits else sum(plain) if config.adapters else max(plain, default=0)
    return _Weights(
        parameters=sum(tensor.values for tensor in tensors),
        kept=sum(tensor.kept_bytes(quantize, itemsize) for tensor in tensors) + adapters * itemsize,
        kept_plain=sum(t.values * itemsize for t in tensors if len(t.shape) == 2) if quantize == "none" else 0,
        mapped=mapped,
        unpacked=sum(sizes[:_UNPACKED_AHEAD]),
        staged=staged,
    )


def _adapter_values(path: Path, base: Sequence[_Tensor]) -> int:
    """Numbers of an adapter as they are kept: where projections are one matrix, each B is as tall as that."""
    rows = {tensor.name.removesuffix(".weight"): tensor.shape[0] for tensor in base}
    values = 0
    for tensor in _file_tensors(path):
        match = _LORA_B.fullmatch(tensor.name)
        if match is None:
            values += tensor.values
            continue
        parts = next((fused for fused in _FUSED if match["part"] in fused), {match["part"]})
        # An adapter of the layers alone leaves out what they are in.
        places = ({f"{prefix}{match['parent']}.{part}" for part in parts} for prefix in ("", "model."))
        height = max(sum(rows.get(name, 0) for name in names) for names in places)
        values += max(height, tensor.shape[0]) * tensor.shape[1]
    return values


def _hf_tensors(checkpoint: HfCheckpoint, shape: "Shape") -> Iterator[_Tensor]:
    rename = renamer(checkpoint.config)
    for path, names in checkpoint.files.items():
        if path.suffix in PICKLE_SUFFIXES:
            # It has no header. Its size is that of its numbers, whose width config.json tells.
            stored = checkpoint.config.get("torch_dtype") or checkpoint.config.get("dtype")
            values = path.stat().st_size // _ITEMSIZE.get(str(stored), 4)
            yield _Tensor("layers.0.all", (values // shape.hidden_size, shape.hidden_size))
            continue
        for tensor in _file_tensors(path):
            if tensor.name in names and (name := rename(tensor.name)) is not None:
                yield _Tensor(name, tensor.shape)


def _file_tensors(path: Path) -> list[_Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return [_Tensor(name, tuple(file.get_slice(name).get_shape())) for name in file.keys()]  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"Cannot read {path}: {error}.") from error


# --- shapes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """As `models.base.ModelShape`, read without building the model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    widest: int
    """The longest row that a layer makes of a token."""


def read_shape(config: Mapping[str, object], max_seq_len: int | None = None) -> Shape:
    reader = ConfigReader(config)
    names = reader.texts("architectures") or (reader.text("model_type", "(none named)"),)
    for read, known in KNOWN.items():
        if not known.isdisjoint(names):
            return read(reader, max_seq_len)
    raise UnsupportedModel(f"Architecture {', '.join(names)} is not supported.")


def _decoder_shape(config: ConfigReader, max_seq_len: int | None) -> Shape:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", hidden // heads)
    return Shape(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        max_seq_len=_served(max_seq_len, *_contexts(config)),
        widest=max(config.integer("intermediate_size"), heads * head_dim),
    )


def _hrm_text_shape(config: ConfigReader, max_seq_len: int | None) -> Shape:
    shape = _decoder_shape(config, max_seq_len)
    depth = config.integer("num_layers_per_stack", shape.num_layers)
    head_dim = config.integer("head_dim", 128)
    return replace(
        shape,
        num_layers=depth * config.integer("H_cycles", 2) * (config.integer("L_cycles", 3) + 1),
        num_kv_heads=shape.num_heads,
        head_dim=head_dim,
        widest=max(config.integer("intermediate_size"), 4 * shape.num_heads * head_dim),
    )


def _gpt2_shape(config: ConfigReader, max_seq_len: int | None) -> Shape:
    hidden, heads, positions = config.integer("n_embd"), config.integer("n_head"), config.integer("n_positions")
    return Shape(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=config.integer("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_seq_len=_served(max_seq_len, positions, positions),
        widest=config.integer("n_inner", 4 * hidden),
    )


def _contexts(config: ConfigReader) -> tuple[int, int]:
    """The context that is served unless one is asked for, and the longest that may be: see `models.rope`."""
    positions = config.integer("max_position_embeddings")
    table = ConfigReader(config.table("rope_scaling") or config.table("rope_parameters") or {})
    original = "original_max_position_embeddings"
    before = config.integer(original, table.integer(original, positions))
    if table.get("long_factor") is not None:
        return min(before, positions), positions
    if table.text("rope_type", table.text("type", "default")) == "yarn":
        return positions, max(positions, int(before * table.number("factor", 1.0)))
    return positions, positions


def _served(asked: int | None, usual: int, longest: int) -> int:
    if asked is not None and asked > longest:
        raise BadRequest(
            f"max_seq_len is {asked}, but the model knows only {longest} positions; lower it to {longest} or less.",
            param="max_seq_len",
        )
    return asked or usual


def _names(*families: str) -> frozenset[str]:
    """A family's model_type, and its architecture with a head and without."""
    return frozenset(name for family in families for name in family.split())


KNOWN: Mapping[Callable[[ConfigReader, int | None], Shape], frozenset[str]] = {
    _gpt2_shape: _names("gpt2 GPT2LMHeadModel GPT2Model"),
    _hrm_text_shape: _names("hrm_text HrmTextForCausalLM HrmTextModel"),
    _decoder_shape: _names(
        "gemma2 Gemma2ForCausalLM Gemma2Model",
        "gemma3_text Gemma3ForCausalLM Gemma3TextModel",
        "llama LlamaForCausalLM LlamaModel",
        "mistral MistralForCausalLM MistralModel",
        "olmo2 Olmo2ForCausalLM Olmo2Model",
        "phi3 Phi3ForCausalLM Phi3Model",
        "qwen2 Qwen2ForCausalLM Qwen2Model",
        "qwen3 Qwen3ForCausalLM Qwen3Model",
    ),
}
"""How the shape of each architecture is read, by the names that config.json may give it."""
