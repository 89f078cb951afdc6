"""The plan of a model's memory, and the arithmetic common to all backends' plans. Knows no devices."""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ostro.config import EngineConfig, ResolvedConfig
from ostro.models.architecture import ModelShape
from ostro.sources.files import ADAPTER_WEIGHTS
from ostro.weights.stored import Stored, TensorHeader, safetensors_headers

_LENGTHS = (512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class Fit:
    """How many sequences of a given length, prompt plus output, can run at a time."""

    length: int
    sequences: int


@dataclass(frozen=True, slots=True)
class CpuPart:
    """What the CPU computes for a model on a GPU: the experts of some layers."""

    layers: int
    nbytes: int
    """The part of the machine's own memory that this takes, with a step's buffers."""
    formats: str
    """The formats of these experts' weights, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes are in bytes of the device's memory: the machine's for a CPU, a GPU's or a TPU's own. With several GPUs or
    TPUs, they are those of each.
    """

    model: str
    device: str
    devices: int
    """Number of devices that the model is divided over. Those of a CPU share its memory."""
    runs_on: str
    """The name of the backend."""
    backend: str
    """The backend, and the number formats of weights and KV cache, as a loaded model reports them."""
    precision: str
    not_native: str | None
    """On a CPU, the reason why the native core is not used."""
    memory: int
    """Free memory of the device, measured or as given."""
    parameters: int
    active_parameters: int
    """Parameters that a token uses: fewer than all in a mixture of experts."""
    weights_bytes: int
    """Size of the weights in memory, including the second layout."""
    active_bytes: int
    """Size of the weights that a token uses, in one layout."""
    second_layout_bytes: int
    page_size: int
    page_bytes: int
    num_pages: int
    kv_bytes: int
    other_bytes: int
    total_bytes: int
    """Weights, KV cache, states and other, once requests have filled the pages and states."""
    peak_bytes: int
    """Peak as the system counts it: mapped files count too while a model is loaded or packed."""
    fits_device: bool
    host_bytes: int
    """The machine's own memory, for the processes of all devices: on a CPU, the total."""
    cpu: CpuPart | None
    """The experts that the CPU computes for a model on a GPU; part of `host_bytes`."""
    movable: int
    """Layers on the GPU whose experts the CPU could compute; counted for a model that does not fit."""
    host_memory: int | None
    """Free memory of this machine, if it has to hold experts; None if it does not, or if the plan is for another."""
    max_seq_len: int
    """Longest sequence that can run: limited by the model's context and by the number of pages."""
    max_batch_seqs: int
    sequences: tuple[Fit, ...]
    stored_as: str | None = None
    """A quantised checkpoint's format, and what becomes of its numbers."""
    state_bytes: int = 0
    """Size of a sequence's recurrent state, for which there are `num_states` slots; 0 for a model without states."""
    num_states: int = 0
    own_kernels: Mapping[str, str] | None = None
    """On this machine's GPU, if known: for each matmul the numbers of rows for which our own kernel computes it."""

    @property
    def fits(self) -> bool:
        return self.fits_device and self.fits_host

    @property
    def fits_host(self) -> bool:
        """Whether this machine's own memory holds what has to be there."""
        return self.host_memory is None or self.host_bytes <= self.host_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The components of a plan."""

    backend: str
    precision: str
    parameters: int
    weights: int
    idle: int = 0
    """Size of the experts' weights that a token does not use."""
    idle_parameters: int = 0
    second: int = 0
    page: int
    pages: int
    spare: int = 0
    """Pages that hold no tokens."""
    state: int = 0
    states: int = 0
    """Size of a recurrent state, and the number of slots for such."""
    other: int
    peak: int
    """Peak memory; counts only if it exceeds the total."""
    host: int | None = None
    """Host memory; None on a CPU, where it is the total."""
    cpu: CpuPart | None = None
    """Experts in that memory."""
    movable: int = 0
    """Layers with others that could be there; counted for a model that does not fit."""
    devices: int = 1
    stored_as: str | None = None
    own_kernels: Mapping[str, str] | None = None

    @property
    def kv(self) -> int:
        return (self.pages + self.spare) * self.page

    @property
    def total(self) -> int:
        return self.weights + self.second + self.kv + self.states * self.state + self.other

    def fits(self, free: int) -> bool:
        """Whether this much of the device's memory is enough."""
        return self.pages > 0 and bool(self.states) == bool(self.state) and self.total <= free

    @property
    def seats(self) -> int:
        """The most sequences whose states fit."""
        return self.states if self.state else sys.maxsize


def stored_as(stored: Stored, packings: Iterable[str]) -> str | None:
    """A quantised Hub checkpoint's format and how its weights are kept in memory, in words; None for any other.

    `packings` has one entry for each tensor that is quantised.
    """
    if stored.quantization is None:
        return None
    sizes = (tensor.values for tensor in stored.tensors if tensor.repacked is not None)
    counts: Counter[str] = Counter()
    for packing, values in zip(packings, sizes, strict=True):
        counts[packing] += values
    return "; ".join((stored.quantization, *(packing for packing, _ in counts.most_common())))


def put_together(
    name: str,
    config: ResolvedConfig,
    shape: ModelShape,
    memory: int,
    parts: Parts,
    *,
    runs_on: str,
    not_native: str | None,
) -> Plan:
    longest = min(shape.max_seq_len, min(parts.pages, config.pages_per_seq or parts.pages) * config.page_size)
    return Plan(
        model=name,
        device=config.device,
        devices=parts.devices,
        runs_on=runs_on,
        backend=parts.backend,
        precision=parts.precision,
        not_native=not_native,
        memory=memory,
        parameters=parts.parameters,
        active_parameters=parts.parameters - parts.idle_parameters,
        weights_bytes=parts.weights + parts.second,
        active_bytes=parts.weights - parts.idle,
        second_layout_bytes=parts.second,
        page_size=config.page_size,
        page_bytes=parts.page,
        num_pages=parts.pages,
        kv_bytes=parts.kv,
        other_bytes=parts.other,
        total_bytes=parts.total,
        peak_bytes=max(parts.total, parts.peak),
        fits_device=parts.fits(memory),
        host_bytes=parts.total if parts.host is None else parts.host,
        cpu=parts.cpu,
        movable=parts.movable,
        host_memory=None,
        max_seq_len=longest,
        max_batch_seqs=config.max_batch_seqs,
        sequences=tuple(
            Fit(length, min(config.max_batch_seqs, parts.seats, parts.pages // -(-length // config.page_size)))
            for length in sorted({*(each for each in _LENGTHS if each < longest), longest} - {0})
        ),
        stored_as=parts.stored_as,
        state_bytes=parts.state,
        num_states=parts.states,
        own_kernels=parts.own_kernels,
    )


_LORA_A = re.compile(r"base_model\.model\.(?P<target>.+)\.lora_A(?:\.default)?\.weight")
_LORA_B = re.compile(r"base_model\.model\.(?P<parent>.+)\.(?P<part>\w+)\.lora_B(?:\.default)?\.weight")
# Projections that models fuse, even if files store them separately.
_FUSED = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"}))


def adapter_values(config: EngineConfig, base: Sequence[TensorHeader]) -> int:
    """Number of values of all adapters in memory: with fused projections, each B has the fused matrix's height."""
    return sum(_values(Path(path).expanduser() / ADAPTER_WEIGHTS, base) for _, path in config.adapters)


def adapter_ranks(config: EngineConfig, backbone: str) -> dict[str, dict[str, int]]:
    """The ranks of all adapters, by the projections that they change, which they may name without the backbone."""
    ranks: dict[str, dict[str, int]] = {}
    for adapter, path in config.adapters:
        own = ranks.setdefault(adapter, {})
        for tensor in safetensors_headers(Path(path).expanduser() / ADAPTER_WEIGHTS):
            if match := _LORA_A.fullmatch(tensor.name):
                own |= dict.fromkeys((match["target"], f"{backbone}.{match['target']}"), tensor.shape[0])
    return ranks


def _values(path: Path, base: Sequence[TensorHeader]) -> int:
    rows = {tensor.name.removesuffix(".weight"): tensor.shape[0] for tensor in base}
    values = 0
    for tensor in safetensors_headers(path):
        match = _LORA_B.fullmatch(tensor.name)
        if match is None:
            values += tensor.values
            continue
        parts = next((fused for fused in _FUSED if match["part"] in fused), {match["part"]})
        # An adapter saved from the bare backbone omits its prefix.
        places = ({f"{prefix}{match['parent']}.{part}" for part in parts} for prefix in ("", "model."))
        height = max(sum(rows.get(name, 0) for name in names) for names in places)
        values += max(height, tensor.shape[0]) * tensor.shape[1]
    return values
