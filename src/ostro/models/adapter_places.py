"""Assigns an adapter's terms to a model's projections. Imports no torch and no numpy."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, Self, TypeVar

from ostro.errors import BadCheckpoint, UnsupportedModel
from ostro.models.architecture import Architecture, Part, Projection, RowScale
from ostro.models.row_order import RowOrder


class Pickable(Protocol):
    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix that the term is added to: [out, in]."""

    def picked(self, outputs: Sequence[int], inputs: Sequence[int]) -> Self:
        """The term of some of the outputs, with all inputs in another order."""


class Reorderable(Pickable, Protocol):
    def ordered(self, order: RowOrder | None) -> Self:
        """The term with its outputs in our order, where a checkpoint's differs."""

    def scaled(self, scales: Sequence[RowScale]) -> Self:
        """The term with its outputs, in our order, multiplied as the matrix is on loading; none multiply nothing."""


TermT = TypeVar("TermT", bound=Pickable)
ReorderableT = TypeVar("ReorderableT", bound=Reorderable)


class HubTensor(NamedTuple):
    """A projection that only Hub checkpoints have, or have in another order."""

    shape: tuple[int, int]
    rows: dict[str, list[int]]
    """By the name of each of our parts that is made of it: the numbers of its rows."""
    columns: list[int]


def hub_tensors(projections: Iterable[Projection]) -> dict[str, HubTensor]:
    """Those that the projections' parts are made of, by name."""
    found: dict[str, HubTensor] = {}
    for each in projections:
        if each.hub is None:
            continue
        columns = list(range(each.columns)) if each.hub.columns is None else each.hub.columns.stored(each.columns)
        for part, of_hub in zip(each.parts, each.hub.parts, strict=True):
            tensor = found.setdefault(of_hub.name, HubTensor((of_hub.rows, each.columns), {}, columns))
            order = of_hub.order
            tensor.rows[part.name] = list(range(part.rows)) if order is None else order.stored(part.rows)
    return found


def described_terms(
    described: Architecture, adapters: Mapping[str, Mapping[str, ReorderableT]]
) -> dict[str, dict[str, ReorderableT]]:
    """All adapters' terms, keyed by the names of the projections' parts, with their rows in our order.

    Raises BadCheckpoint if an adapter belongs to another model, UnsupportedModel if it changes experts.
    """
    experts = described.expert_names
    found = [(part, each) for layer in described.layers for each in layer.projections for part in each.parts]
    shapes = {part.name: (part.rows, each.columns) for part, each in found}
    parts, hub = {part.name: (part, each) for part, each in found}, hub_tensors(each for _, each in found)
    return {
        adapter: {
            name: loaded(term, *parts[name])
            for name, term in placed(
                adapter,
                terms,
                shapes,
                backbone=described.backbone,
                experts=experts,
                hub=hub,
                folded=described.folded,
            ).items()
        }
        for adapter, terms in adapters.items()
    }


def loaded(term: ReorderableT, part: Part, projection: Projection) -> ReorderableT:
    """A term of a checkpoint's matrix as one of ours."""
    return term.ordered(part.order).scaled(projection.matrix_scales(part))


def placed(
    adapter: str,
    terms: Mapping[str, TermT],
    projections: Mapping[str, tuple[int, int]],
    *,
    backbone: str,
    experts: frozenset[str] = frozenset(),
    hub: Mapping[str, HubTensor],
    folded: bool = False,
) -> dict[str, TermT]:
    """The terms, keyed by the full names of their projections, whose shapes are given.

    An adapter's names may omit the backbone prefix. A term without a projection or with the wrong shape is an error,
    and so is one for a matrix of `experts`. Terms for `hub` become those of the projections that are made of it. None
    fits matrices that are `folded`.
    """
    if folded:
        raise UnsupportedModel(
            f"Adapter {adapter!r} cannot be added to this GGUF file, whose matrices were multiplied by factors that it "
            "does not name. Use the base model in safetensors."
        )
    found: dict[str, TermT] = {}
    shapes = {**projections, **{name: tensor.shape for name, tensor in hub.items()}}
    for given, term in terms.items():
        name = given if given in shapes else f"{backbone}.{given}"
        if not experts.isdisjoint((given, name)):
            raise UnsupportedModel(
                f"Adapter {adapter!r} changes {given!r}, which belongs to a mixture of experts. Adapters can only "
                "change attention there: train one that leaves out experts and routers, or merge this one into its "
                "base model."
            )
        if name not in shapes:
            raise BadCheckpoint(
                f"Adapter {adapter!r} changes {given!r}, which this model does not have; the adapter may have been "
                "made for another model."
            )
        if term.shape != shapes[name]:
            raise BadCheckpoint(
                f"Adapter {adapter!r} changes {given!r} as a matrix of shape {term.shape}, but this model's has shape "
                f"{shapes[name]}; the adapter may have been made for another model."
            )
        if name in hub:
            tensor = hub[name]
            found |= {part: term.picked(rows, tensor.columns) for part, rows in tensor.rows.items()}
        else:
            found[name] = term
    return found
