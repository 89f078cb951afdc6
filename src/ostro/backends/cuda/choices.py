"""Which matmuls of few rows our own kernels compute, with which tiling, and which are left to the library: chosen for
each matrix and number of rows, by measurement.

Choices come from the file shipped for a GPU, from what an earlier start measured and kept, from measuring now, or from
a file that the user names:

    ROOT/kernel-choices/DIGEST.json     kept, where the digest covers the GPU, the kernels' code and the libraries

Knows files and shapes; imports no torch and asks no device anything but its name. `measuring` is the clock.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

import ostro.kernels.gpu
from ostro.backends.cuda.fusible import why_unfused
from ostro.config import ResolvedConfig
from ostro.devices import DEVICE_KINDS
from ostro.errors import BadRequest
from ostro.kernels.gpu.tilings import (
    MOST_ROWS,
    ROWS,
    DotTiling,
    EpilogueKind,
    Matmul,
    Multiprocessors,
    SliceTiling,
    Tiling,
    VectorTiling,
    candidates,
    default_vector_tiling,
    fits,
    slice_candidates,
)
from ostro.models.architecture import MLP, Architecture, Experts, GatedDelta, Layer, Projection, Recurrent
from ostro.models.description import Causal, plain_decoder
from ostro.sources.cache import cache_root, locked, publish
from ostro.system.machine import gpu_name

_log = logging.getLogger(__name__)

TRIED: Mapping[int, int] = {1: 3, 8: 3, 16: 3, 64: 3, 128: 2, 256: 1}
"""How many tilings are measured, besides slices, by number of rows: not for all ROWS, as each binary takes a long time
to compile.
"""
LIBRARY: Literal["library"] = "library"
MEASURED_LATER = "measured at the first start"
_SHIPPED = Path(__file__).with_name("shipped_choices")
# Kernels whose speed the choices depend on.
_KERNELS = (
    *("dot_linear", "slice_linear", "vector_linear"),
    *("epilogue", "mlp", "norm", "prologue", "small_batch", "tilings"),
)
_TILINGS: Mapping[str, type[Tiling]] = {"vector": VectorTiling, "dot": DotTiling, "slice": SliceTiling}
_LIBRARIES = ("torch", "triton")

Table: TypeAlias = Mapping[Matmul, Mapping[int, Tiling | None]]
"""Tilings by matmul and largest number of rows; None stands for the library."""
Clock: TypeAlias = Callable[[Matmul, int, Sequence[Tiling | None]], Sequence[float | None]]
"""How long a matmul of this many rows takes with each tiling, or in the library (None), together with the kernels
around it; None for a tiling that cannot run.
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    capability: str
    """The version of its instruction set, such as 9.0."""
    multiprocessors: Multiprocessors

    @property
    def overlaps(self) -> bool:
        """Whether it supports programmatic dependent launch: Hopper or newer."""
        return float(self.capability) >= 9.0


def adding(*, normed: bool, reduced: bool) -> EpilogueKind:
    """The epilogue of a matmul whose result goes to the residual stream: its kernel adds it, unless a norm comes first
    or the ranks' results must be summed.
    """
    return "plain" if normed or reduced else "added"


def described_matmuls(model: Architecture, bits: int, kept: Container[str] = ()) -> Mapping[str, Matmul]:
    """A model's matmuls on one GPU whose kernel can be chosen, by name. Where layers differ, those of the first that
    has such a matrix. The experts' own are not among them, nor matrices whose tensors are `kept` quantised.
    """
    found: dict[str, Matmul] = {}
    for layer in model.layers:
        for name, matrix, epilogue in _matrices(layer):
            if f"{matrix.parts[0].name}.weight" not in kept:
                found.setdefault(name, Matmul(matrix.rows, matrix.columns, bits, epilogue))
    if model.head is not None:
        found["head"] = Matmul(model.shape.vocab_size, model.shape.hidden_size, bits)
    return found


def _matrices(layer: Layer) -> Iterable[tuple[str, Projection, EpilogueKind]]:
    attention, recurrent, mlp = layer.attends, layer.recurrent, layer.mlp
    waits = layer.attention_post_norm is not None or layer.parallel
    added = adding(normed=waits, reduced=False)
    if attention is not None:
        yield "qkv", attention.qkv, "plain"
        yield "output", attention.output, added
    if recurrent is not None:
        yield "recurrent inputs", _with_gates(recurrent), "plain"
        yield "recurrent output", recurrent.output, added
    if isinstance(mlp, Experts):
        yield "router", mlp.whole_router, "plain"
        if mlp.shared is not None:
            yield "shared up", mlp.shared.up, _activated(mlp.shared)
            yield "shared down", mlp.shared.down, "plain"
    elif mlp is not None:
        yield "up", mlp.up, _activated(mlp)
        yield "down", mlp.down, adding(normed=layer.mlp_post_norm is not None, reduced=False)


def _with_gates(mixer: Recurrent) -> Projection:
    """What is multiplied as one matrix."""
    inputs = mixer.inputs
    if not isinstance(mixer, GatedDelta):
        return inputs
    return replace(inputs, parts=(*inputs.parts, *mixer.gates.parts), hub=None)


def _activated(mlp: MLP) -> EpilogueKind:
    return "gated" if mlp.gated else "activated"


@dataclass(frozen=True, slots=True)
class Choices:
    table: Table = field(default_factory=dict)

    def tiling(self, matmul: Matmul, rows: int) -> Tiling | None:
        """The tiling of our own kernel; None if the library computes the matmul, as it does for several rows where
        nothing was chosen. For one row, ours is always faster: without a choice, it takes its default tiling.
        """
        chosen = self.table.get(matmul, {})
        if rows == 1:
            default = default_vector_tiling(matmul.out_features, matmul.in_features, gated=matmul.is_gated)
            return chosen.get(1) or default
        return next((chosen[most] for most in ROWS if rows <= most and most in chosen), None)

    def __or__(self, other: "Choices") -> "Choices":
        """Where both have chosen, the other's choices win."""
        return Choices({**self.table, **other.table})

    def __contains__(self, matmul: Matmul) -> bool:
        return matmul in self.table

    def own_rows(self, matmul: Matmul) -> str:
        """The numbers of rows for which a matmul is ours, as ranges."""
        own = [rows for rows in range(1, MOST_ROWS + 1) if self.tiling(matmul, rows) is not None]
        starts = [rows for rows in own if rows - 1 not in own]
        ends = [rows for rows in own if rows + 1 not in own]
        return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))

    def of(self, matmuls: Iterable[Matmul]) -> "Choices":
        return Choices({each: self.table[each] for each in matmuls if each in self.table})


def choose(matmuls: Iterable[Matmul], gpu: Gpu, clock: Clock) -> Choices:
    """Measures the candidates for each matmul against the library."""
    return Choices(
        {each: {rows: _fastest(each, rows, gpu, clock) for rows in rows_to_try(each, gpu)} for each in matmuls}
    )


def rows_to_try(matmul: Matmul, gpu: Gpu) -> tuple[int, ...]:
    """Row counts to measure. 8 only where slices are tried; otherwise the choice for 16 applies."""
    sliced = bool(slice_candidates(matmul, 8, gpu.multiprocessors))
    return tuple(rows for rows in TRIED if rows != 8 or sliced)


def to_try(matmul: Matmul, rows: int, gpu: Gpu) -> tuple[Tiling, ...]:
    """Our own tilings that are measured for a number of rows in TRIED."""
    device = gpu.multiprocessors
    return *candidates(matmul, rows, device, TRIED[rows]), *slice_candidates(matmul, rows, device)


def conceivable(matmuls: Sequence[Matmul], gpu: Gpu) -> Iterable[Choices]:
    """Choices that together contain every tiling that `choose` may pick."""
    found = {each: {rows: to_try(each, rows, gpu) for rows in rows_to_try(each, gpu)} for each in matmuls}
    for order in range(max((len(tilings) for tried in found.values() for tilings in tried.values()), default=0)):
        yield Choices(
            {
                each: {
                    rows: tilings[min(order, len(tilings) - 1)] if tilings else None for rows, tilings in tried.items()
                }
                for each, tried in found.items()
            }
        )


def _fastest(matmul: Matmul, rows: int, gpu: Gpu, clock: Clock) -> Tiling | None:
    own = to_try(matmul, rows, gpu)
    # For one row, our own kernel is always faster than the library's.
    tried: Sequence[Tiling | None] = own if rows == 1 else (*own, None)
    if len(tried) < 2:
        return tried[0] if tried else None
    times = clock(matmul, rows, tried)
    ran = [(time, order) for order, time in enumerate(times) if time is not None]
    return tried[min(ran)[1]] if ran else None


# ---- what is known without loading a model


def own_kernels(config: ResolvedConfig, described: Causal, kept: Container[str] = ()) -> Mapping[str, str] | None:
    """For each matmul, the numbers of rows for which our own kernel computes it, leaving out matmuls whose
    tensors are `kept` quantised; None if this machine's GPU or the model's shapes on it are not known, or if another
    format or mode decides.
    """
    decided = config.deterministic or config.quantize != "none" or config.tensor_parallel > 1
    if decided:
        return None
    gpu, decoder = gpu_name(), plain_decoder(described, hybrid=True)
    if gpu is None or isinstance(decoder, str) or why_unfused(described) is not None:
        return None
    choices = known_for(config.kernel_choices, gpu)
    if choices is None:
        if config.kernel_choices != "auto":
            return None
        choices = Choices()
    bits = 32 if DEVICE_KINDS["cuda"].compute_dtype(config.dtype) == "float32" else 16
    return {
        name: MEASURED_LATER if config.kernel_choices == "auto" and each not in choices else choices.own_rows(each)
        for name, each in described_matmuls(decoder, bits, kept).items()
    }


# ---- where choices come from


def known(setting: str, gpu: Gpu) -> Choices:
    """What a setting of `kernel_choices` says without measuring anything. Raises BadRequest like `fixed`."""
    if setting == "off":
        return shipped(gpu, similar=True)
    return kept(gpu) | shipped(gpu) if setting == "auto" else fixed(Path(setting), gpu)


def known_for(setting: str, gpu: str) -> Choices | None:
    """Like `known`, for a GPU of which only the name is known; None if no file is for it."""
    paths = [Path(setting)]
    if setting in ("auto", "off"):
        paths = sorted(_SHIPPED.glob("*.json"))
        if setting == "auto":
            paths = [*_kept_files(), *paths]
    found = None
    for path in paths:
        try:
            file = read(path)
        except (OSError, ValueError) as error:
            if setting not in ("auto", "off"):
                raise _unusable(path, error) from error
            continue
        if file.gpu == gpu:
            found = (found or Choices()) | file.choices
    return found


def _kept_files() -> Iterable[Path]:
    """Kept files of the same kernels, for any GPU."""
    for path in sorted((cache_root() / "kernel-choices").glob("*.json")):
        with suppress(OSError, ValueError):
            file = read(path)
            if path.stem == _digest(file.gpu, file.capability, file.multiprocessors):
                yield path


def shipped(gpu: Gpu, *, similar: bool = False) -> Choices:
    """The package's own choices for this GPU, or, if `similar`, also for GPUs with as many multiprocessors of the same
    kind.
    """
    found = Choices()
    for path in sorted(_SHIPPED.glob("*.json")):
        file = read(path)
        alike = (file.capability, file.multiprocessors) == (gpu.capability, gpu.multiprocessors.number)
        if alike and (similar or file.gpu == gpu.name):
            found |= file.choices
    return found


def fixed(path: Path, gpu: Gpu) -> Choices:
    """The choices in a file that the user names. Raises BadRequest if it cannot be read, or is not for this GPU."""
    try:
        file = read(path)
    except (OSError, ValueError) as error:
        raise _unusable(path, error) from error
    if (file.gpu, file.multiprocessors) != (gpu.name, gpu.multiprocessors.number):
        raise BadRequest(
            f"kernel_choices: {path} was measured on {file.gpu} with {file.multiprocessors} multiprocessors, but this "
            f"is {gpu.name} with {gpu.multiprocessors.number}.",
            param="kernel_choices",
        )
    for matmul, rows, tiling in _entries(file.choices.table):
        if tiling is not None and not fits(matmul, rows, tiling, gpu.multiprocessors):
            raise BadRequest(
                f"kernel_choices: in {path}, {tiling} does not fit {matmul} for {rows} rows.", param="kernel_choices"
            )
    return file.choices


def _unusable(path: Path, error: Exception) -> BadRequest:
    return BadRequest(f"kernel_choices: {path} cannot be used: {error}.", param="kernel_choices")


def kept(gpu: Gpu) -> Choices:
    """What earlier starts measured on this GPU with the same kernels. A damaged file counts as none."""
    try:
        file = read(_kept_at(gpu))
    except FileNotFoundError:
        return Choices()
    except (OSError, ValueError) as error:
        _log.warning("%s cannot be used (%s). Its kernels are measured again.", _kept_at(gpu), error)
        return Choices()
    usable = {
        matmul: rows
        for matmul, rows in file.choices.table.items()
        if all(each is None or fits(matmul, most, each, gpu.multiprocessors) for most, each in rows.items())
    }
    return Choices(usable)


def keep(choices: Choices, gpu: Gpu) -> None:
    """Adds choices to those kept for later starts. A cache that cannot be written is only warned about."""
    path = _kept_at(gpu)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Each rank of a model may have measured choices of its own.
        with locked(path.with_name(f"{path.name}.lock"), "kernel choices"):
            unfinished.write_text(written(kept(gpu) | choices, gpu), encoding="utf-8")
            publish(unfinished, path)
    except OSError as error:
        _log.warning(
            "The choice of kernels could not be kept, and is made again at every start: %s. Set OSTRO_CACHE to a "
            "directory that can be written.",
            error,
        )
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)


def _kept_at(gpu: Gpu) -> Path:
    return cache_root() / "kernel-choices" / f"{_digest(gpu.name, gpu.capability, gpu.multiprocessors.number)}.json"


def _digest(gpu: str, capability: str, multiprocessors: int) -> str:
    facts = [gpu, capability, multiprocessors, _kernels_digest()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


@cache
def _kernels_digest() -> str:
    digest = hashlib.sha256()
    directory = Path(ostro.kernels.gpu.__file__ or "").parent
    for name in _KERNELS:
        digest.update((directory / f"{name}.py").read_bytes())
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):
            digest.update(f"{library} {version(library)}".encode())
    return digest.hexdigest()


# ---- the file's format


class ChoicesFile(NamedTuple):
    gpu: str
    capability: str
    multiprocessors: int
    choices: Choices


def written(choices: Choices, gpu: Gpu) -> str:
    """A file's text: a line for each matmul, and one for each number of rows."""
    matmuls = []
    for matmul, rows in choices.table.items():
        entries = ",\n".join(f'    "{most}": {json.dumps(_as_json(tiling))}' for most, tiling in rows.items())
        matmuls.append(f'  {json.dumps(asdict(matmul))[:-1]}, "rows": {{\n{entries}}}}}')
    head = {"gpu": gpu.name, "capability": gpu.capability, "multiprocessors": gpu.multiprocessors.number}
    lines = ",\n".join(matmuls)
    return f'{json.dumps(head)[:-1]}, "products": [\n{lines}\n]}}\n'


def read(path: Path) -> ChoicesFile:
    """Reads a file of choices. Raises ValueError for any other file; its message is a clause about the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 ({error})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    try:
        table = {_matmul(each): _rows(each["rows"]) for each in found["products"]}
        return ChoicesFile(str(found["gpu"]), str(found["capability"]), int(found["multiprocessors"]), Choices(table))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"it does not hold choices of kernels ({type(error).__name__}: {error})") from error


def _matmul(found: Mapping[str, object]) -> Matmul:
    epilogue = found["epilogue"]
    if epilogue not in get_args(EpilogueKind):
        raise ValueError(f"epilogue {epilogue!r}")
    out_features, in_features, bits = (found[name] for name in ("out_features", "in_features", "bits"))
    if not (isinstance(out_features, int) and isinstance(in_features, int) and isinstance(bits, int)):
        raise TypeError(f"sizes {out_features!r}, {in_features!r}, {bits!r}")
    if min(out_features, in_features, bits) < 1:
        raise ValueError(f"sizes {out_features}, {in_features}, {bits}")
    return Matmul(out_features, in_features, bits, cast(EpilogueKind, epilogue))


def _rows(found: Mapping[str, object]) -> dict[int, Tiling | None]:
    rows = {int(most): _tiling(each) for most, each in found.items()}
    if unknown := rows.keys() - set(ROWS):
        raise ValueError(f"rows {sorted(unknown)}, which are not among {ROWS}")
    return rows


def _as_json(tiling: Tiling | None) -> object:
    if tiling is None:
        return LIBRARY
    kernel = next(name for name, kind in _TILINGS.items() if type(tiling) is kind)
    return {"kernel": kernel, **asdict(tiling)}


def _tiling(found: object) -> Tiling | None:
    if found == LIBRARY:
        return None
    if not isinstance(found, dict):
        raise TypeError(f"tiling {found!r}")
    numbers = {name: number for name, number in found.items() if name != "kernel"}
    if not all(isinstance(number, int) for number in numbers.values()):
        raise TypeError(f"tiling {found!r}")
    return _TILINGS[str(found["kernel"])](**numbers)


def _entries(table: Table) -> Iterable[tuple[Matmul, int, Tiling | None]]:
    return ((matmul, most, tiling) for matmul, rows in table.items() for most, tiling in rows.items())
