"""Assigns an adapter's terms to a model's projections. Imports no torch and no numpy."""

from collections.abc import Mapping
from typing import Protocol, Self, TypeVar

from ostro.errors import BadCheckpoint, UnsupportedModel
from ostro.models.architecture import Architecture
from ostro.models.row_order import RowOrder


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix that the term is added to: [out, in]."""


class Reorderable(Shaped, Protocol):
    def ordered(self, order: RowOrder | None) -> Self:
        """The term with its outputs in our order, where a checkpoint's differs."""


TermT = TypeVar("TermT", bound=Shaped)
ReorderableT = TypeVar("ReorderableT", bound=Reorderable)


def described_terms(
    described: Architecture, adapters: Mapping[str, Mapping[str, ReorderableT]]
) -> dict[str, dict[str, ReorderableT]]:
    """All adapters' terms, keyed by the names of the projections' parts, with their rows in our order.

    Raises BadCheckpoint if an adapter belongs to another model, UnsupportedModel if it changes experts.
    """
    experts = described.expert_names
    found = [(part, each) for layer in described.layers for each in layer.projections for part in each.parts]
    shapes = {part.name: (part.rows, each.columns) for part, each in found}
    orders = {part.name: part.order for part, _ in found}
    return {
        adapter: {
            name: term.ordered(orders[name])
            for name, term in placed(adapter, terms, shapes, backbone=described.backbone, experts=experts).items()
        }
        for adapter, terms in adapters.items()
    }


def placed(
    adapter: str,
    terms: Mapping[str, TermT],
    projections: Mapping[str, tuple[int, int]],
    *,
    backbone: str,
    experts: frozenset[str] = frozenset(),
) -> dict[str, TermT]:
    """The terms, keyed by the full names of their projections, whose shapes are given.

    An adapter's names may omit the backbone prefix. A term without a projection or with the wrong shape is an error,
    and so is one for a matrix of `experts`.
    """
    found: dict[str, TermT] = {}
    for given, term in terms.items():
        name = given if given in projections else f"{backbone}.{given}"
        if not experts.isdisjoint((given, name)):
            raise UnsupportedModel(
                f"Adapter {adapter!r} changes {given!r}, which belongs to a mixture of experts. Adapters can only "
                "change attention there: train one that leaves out experts and routers, or merge this one into its "
                "base model."
            )
        if name not in projections:
            raise BadCheckpoint(
                f"Adapter {adapter!r} changes {given!r}, which this model does not have; the adapter may have been "
                "made for another model."
            )
        if term.shape != projections[name]:
            raise BadCheckpoint(
                f"Adapter {adapter!r} changes {given!r} as a matrix of shape {term.shape}, but this model's has shape "
                f"{projections[name]}; the adapter may have been made for another model."
            )
        found[name] = term
    return found
