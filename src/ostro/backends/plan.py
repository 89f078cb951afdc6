"""The plan of a model's memory, and the arithmetic common to all backends' plans. Knows no devices."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ostro.config import ResolvedConfig
from ostro.models.architecture import ModelShape
from ostro.weights.stored import Stored

_LENGTHS = (512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True, slots=True)
class Fit:
    """How many sequences of a given length, prompt plus output, can run at a time."""

    length: int
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes are in bytes of the device's memory: the machine's for a CPU, a GPU's or a TPU's own. With several GPUs or
    TPUs, they are those of each.
    """

    model: str
    device: str
    devices: int
    """How many the model is divided over. Those of a CPU share its memory."""
    runs_on: str
    """The name of the backend."""
    backend: str
    """The backend, and the number formats of weights and KV cache, as a loaded model reports them."""
    precision: str
    not_native: str | None
    """On a CPU, the reason why the native core is not used."""
    memory: int
    """Free memory there, measured or as given."""
    parameters: int
    active_parameters: int
    """Those that a token goes through: fewer than all in a mixture of experts."""
    weights_bytes: int
    """In memory, including the second layout."""
    active_bytes: int
    """Size of the weights that a token goes through, in one layout."""
    second_layout_bytes: int
    page_size: int
    page_bytes: int
    num_pages: int
    kv_bytes: int
    other_bytes: int
    total_bytes: int
    """Weights, KV cache and other, once requests have filled the pages."""
    peak_bytes: int
    """Peak as the system counts it: mapped files count too while a model is loaded or packed."""
    host_bytes: int
    """The machine's own memory, for the processes of all devices: on a CPU, the total."""
    max_seq_len: int
    """Longest sequence that can run: limited by the model's context and by the number of pages."""
    max_batch_seqs: int
    sequences: tuple[Fit, ...]
    stored_as: str | None = None
    """A quantised checkpoint's format, and what becomes of its numbers."""
    own_kernels: Mapping[str, str] | None = None
    """On this machine's GPU, if known: for each matmul the numbers of rows for which our own kernel computes it."""

    @property
    def fits(self) -> bool:
        return self.num_pages > 0 and self.total_bytes <= self.memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The components of a plan."""

    backend: str
    precision: str
    parameters: int
    weights: int
    idle: int = 0
    """Size of the experts' weights that a token does not go through."""
    idle_parameters: int = 0
    second: int = 0
    page: int
    pages: int
    spare: int = 0
    """Pages that hold no tokens."""
    other: int
    peak: int
    """Only counts if it exceeds the total."""
    host: int | None = None
    """None on a CPU, where it is the total."""
    devices: int = 1
    stored_as: str | None = None
    own_kernels: Mapping[str, str] | None = None


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
    kv = (parts.pages + parts.spare) * parts.page
    total = parts.weights + parts.second + kv + parts.other
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
        kv_bytes=kv,
        other_bytes=parts.other,
        total_bytes=total,
        peak_bytes=max(total, parts.peak),
        host_bytes=total if parts.host is None else parts.host,
        max_seq_len=longest,
        max_batch_seqs=config.max_batch_seqs,
        sequences=tuple(
            Fit(length, min(config.max_batch_seqs, parts.pages // -(-length // config.page_size)))
            for length in sorted({*(each for each in _LENGTHS if each < longest), longest} - {0})
        ),
        stored_as=parts.stored_as,
        own_kernels=parts.own_kernels,
    )
