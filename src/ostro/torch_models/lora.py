"""LoRA: low-rank terms beside one shared copy of a model's weights, selected per row by its sequence's adapter.

    y = x Wᵀ + (x Aᵀ)(scale · B)ᵀ

A step's rows are sorted by adapter. Neighbouring adapters with equal numbers of rows share one batched matmul with a
view of their stacked matrices:

    rows      - - - | a a | b b | c c c | d d d        - is the base alone
    matmuls           └─ one ──┘  └──── one ────┘

Adapters of the same shape, that is with the same ranks for the same projections, share a stack, so no rank is padded.
For a fused projection, the parts' As are concatenated, and each B fills its part's columns. The zeros cost less than a
matmul per part would:

    A   [ Aq Ak Av ]ᵀ        B   [ Bq  0  0 ]
                                 [  0 Bk  0 ]
                                 [  0  0 Bv ]

With several ranks, each has its share of a term, and `Linear.reduce` sums the ranks' partial results:

    inputs cut      A by columns, B whole        the ranks' terms add up, as their products do
    outputs cut     A whole, B by rows           a rank has the outputs that its matrix has

Knows projections and rows; knows no files and no requests.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ostro.models.adapter_places import HubTensor, hub_tensors, placed
from ostro.models.architecture import RowScale
from ostro.models.row_order import RowOrder
from ostro.torch_models.base import Model
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.layers import Linear


class LowRank(Protocol):
    """An adapter's update of one matrix: scale · B A."""

    @property
    def a(self) -> npt.NDArray[np.float32]:
        """[rank, in]"""

    @property
    def b(self) -> npt.NDArray[np.float32]:
        """[out, rank]"""

    @property
    def scale(self) -> float: ...
    def scaled(self, scales: Sequence[RowScale]) -> "LowRank": ...
    @property
    def shape(self) -> tuple[int, int]: ...
    def ordered(self, order: RowOrder | None) -> "LowRank":
        """The term with its outputs in our order, where a checkpoint's differs."""

    def picked(self, outputs: Sequence[int], inputs: Sequence[int]) -> "LowRank":
        """The term of some of the outputs, with all inputs in another order."""


class Adapters:
    """One model's adapters, and the assignment of the current step's rows to them."""

    def __init__(self, model: Model, adapters: Mapping[str, Mapping[str, LowRank]]) -> None:
        """Takes each adapter's terms, keyed by projection name in the base checkpoint. Does not change the model."""
        like = next(model.parameters())
        places, hub = _places(model), _hub_tensors(model)
        terms = {name: _by_module(name, model, places, hub, terms) for name, terms in adapters.items()}
        by_shape: dict[frozenset[tuple[str, int, int]], list[str]] = {}
        for name, modules in terms.items():
            shape = frozenset(
                (path, part.start, len(term.a)) for path, parts in modules.items() for part, term in parts
            )
            by_shape.setdefault(shape, []).append(name)
        groups = list(by_shape.values())
        self._seats = [(stack, index) for stack, names in enumerate(groups) for index in range(len(names))]
        self._slots = {name: slot for slot, name in enumerate(name for names in groups for name in names)}
        self._stacks: dict[str, list[_Stack | None]] = {}
        for path in {path for modules in terms.values() for path in modules}:
            module = model.get_submodule(path)
            assert isinstance(module, Linear)
            self._stacks[path] = [
                _stacked([terms[name][path] for name in names], module.shape[0], like)
                if path in terms[names[0]]
                else None
                for names in groups
            ]
        self.begin(())

    def attach(self, model: Model) -> None:
        """Makes the model's projections add the adapters' terms. A module that is replaced later loses them."""
        for path, stacks in self._stacks.items():
            module = model.get_submodule(path)
            assert isinstance(module, Linear)
            module.adapt = _Correction(self, stacks)

    @property
    def nbytes(self) -> int:
        """Memory taken by the adapters."""
        stacks = [stack for stacks in self._stacks.values() for stack in stacks if stack is not None]
        return sum(stack.a.nbytes + stack.b.nbytes for stack in stacks)

    def slot(self, name: str | None) -> int:
        """The adapter's index; -1 for none. Rows sorted by it need the fewest matmuls."""
        return -1 if name is None else self._slots[name]

    def begin(self, rows: Iterable[tuple[int, int]]) -> bool:
        """Assigns the next step's rows: slots and row counts, in order. Returns whether any row has an adapter."""
        self.runs = _runs(rows, self._seats)
        self.lengths = [run.rows for run in self.runs]
        self.adapted = any(run.stack >= 0 for run in self.runs)
        return self.adapted


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """Consecutive rows, equally many for each of `count` adapters from `first` on in a stack; stack -1 is the base."""

    stack: int
    first: int
    count: int
    rows: int

    def extended(self, other: "AdapterRun") -> "AdapterRun | None":
        """Both merged, if the other's adapter is next in the stack and has the same number of rows."""
        follows = (other.stack, other.first) == (self.stack, self.first + self.count) and self.stack >= 0
        if not follows or self.rows != self.count * other.rows:
            return None
        return AdapterRun(self.stack, self.first, self.count + 1, self.rows + other.rows)


def _runs(rows: Iterable[tuple[int, int]], seats: Sequence[tuple[int, int]]) -> list[AdapterRun]:
    runs: list[AdapterRun] = []
    for slot, own in groupby(rows, key=lambda each: each[0]):
        stack, index = seats[slot] if slot >= 0 else (-1, 0)
        run = AdapterRun(stack, index, 1, sum(count for _, count in own))
        if runs and (joined := runs[-1].extended(run)):
            runs[-1] = joined
        else:
            runs.append(run)
    return runs


class _Stack:
    """The matrices of same-shaped adapters for one projection, in matmul layout."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        """[adapters, in, rank] and [adapters, rank, out], the scale included."""
        self.a, self.b = a, b
        self.each = list(zip(a, b, strict=True))


class _Correction:
    """All adapters' terms for one projection."""

    def __init__(self, step: Adapters, stacks: Sequence[_Stack | None]) -> None:
        self._step = step
        # The final None is the base's, found as stack -1.
        self._stacks = [*stacks, None]

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """Adds to y, in place. x is [rows, in], y [rows, out]."""
        step = self._step
        if not step.adapted:
            return
        # The lower-level name, because `split` costs as much as a matmul.
        pieces = zip(step.runs, x.split_with_sizes(step.lengths), y.split_with_sizes(step.lengths), strict=True)
        for run, rows, own in pieces:
            stack = self._stacks[run.stack]
            if stack is None:
                continue
            if run.count == 1:
                a, b = stack.each[run.first]
                own.addmm_(rows.mm(a), b)
            else:
                among = slice(run.first, run.first + run.count)
                inner = torch.bmm(rows.reshape(run.count, -1, rows.shape[1]), stack.a[among])
                own.view(run.count, -1, own.shape[1]).baddbmm_(inner, stack.b[among])


class _Term(NamedTuple):
    """A module's share of a `LowRank`."""

    a: npt.NDArray[np.float32]
    b: npt.NDArray[np.float32]
    scale: float


@dataclass(frozen=True, slots=True)
class _Place:
    """A projection in a checkpoint: these rows of the matrix of the module at `path`."""

    path: str
    rows: slice
    shape: tuple[int, int]
    """The whole projection's."""
    outputs: tuple[range, ...]
    """The outputs and inputs of the projection that this rank holds."""
    inputs: tuple[range, ...]
    order: RowOrder | None = None
    scales: tuple[RowScale, ...] = ()
    """Factors of the matrix's rows."""

    def share(self, term: LowRank) -> _Term:
        term = term.ordered(self.order).scaled(self.scales)
        a = np.concatenate([term.a[:, own.start : own.stop] for own in self.inputs], 1)
        b = np.concatenate([term.b[own.start : own.stop] for own in self.outputs])
        return _Term(a, b, term.scale)


def _places(model: Model) -> dict[str, _Place]:
    """All projections of the layers, keyed by name in a checkpoint."""
    places: dict[str, _Place] = {}
    for path, module in model.named_modules():
        if not isinstance(module, Linear) or not path.startswith(f"{model.backbone_name}."):
            continue
        out_features, in_features = module.shape
        if (own := module.own) is None:
            whole = (range(out_features),)
            places[path] = _Place(
                path, slice(0, out_features), (out_features, in_features), whole, (range(in_features),)
            )
            continue
        described, first = own.described, 0
        for part, outputs in zip(described.parts, own.rows(), strict=True):
            rows = slice(first, first + sum(map(len, outputs)))
            shape, scales = (part.rows, described.columns), described.matrix_scales(part)
            places[part.name] = _Place(path, rows, shape, outputs, own.share.columns, part.order, scales)
            first = rows.stop
    return places


def _hub_tensors(model: Model) -> Mapping[str, HubTensor]:
    layers = model.described.layers if isinstance(model, Decoder) else ()
    return hub_tensors(each for layer in layers for each in layer.projections)


_Part = tuple[slice, _Term]
"""A term and the rows of the matrix that it applies to: a part of a fused projection, or all."""


def _by_module(
    adapter: str,
    model: Model,
    places: Mapping[str, _Place],
    hub: Mapping[str, HubTensor],
    terms: Mapping[str, LowRank],
) -> dict[str, list[_Part]]:
    """An adapter's terms, keyed by module. A term without a place or with the wrong shape is an error."""
    found: dict[str, list[_Part]] = {}
    shapes = {name: place.shape for name, place in places.items()}
    described = model.described if isinstance(model, Decoder) else None
    found_terms = placed(
        adapter,
        terms,
        shapes,
        backbone=model.backbone_name,
        experts=described.expert_names if described else frozenset(),
        hub=hub,
        folded=described is not None and described.folded,
    )
    for name, term in found_terms.items():
        place = places[name]
        found.setdefault(place.path, []).append((place.rows, place.share(term)))
    return {path: sorted(parts, key=lambda part: part[0].start) for path, parts in found.items()}


def _stacked(adapters: Sequence[Sequence[_Part]], out_features: int, like: Tensor) -> _Stack:
    """The stack of adapters of the same shape."""
    a = torch.stack([torch.from_numpy(np.concatenate([term.a for _, term in parts]).T) for parts in adapters]).to(like)
    b = torch.zeros(len(adapters), a.shape[2], out_features).to(like)
    for own, parts in zip(b, adapters, strict=True):
        first = 0
        for rows, term in parts:
            own[first : first + len(term.a), rows] = torch.from_numpy(term.b.T) * term.scale
            first += len(term.a)
    return _Stack(a.contiguous(), b)
