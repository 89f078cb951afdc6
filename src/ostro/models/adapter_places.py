"""Which projections of a model an adapter's terms are for. Imports no torch and no arrays."""

from collections.abc import Mapping
from typing import Protocol, TypeVar

from ostro.errors import BadCheckpoint


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix that the term is added to: outputs, inputs."""


TermT = TypeVar("TermT", bound=Shaped)


def placed(
    adapter: str, terms: Mapping[str, TermT], projections: Mapping[str, tuple[int, int]], *, backbone: str
) -> dict[str, TermT]:
    """The terms by the full names of their projections, whose shapes are given.

    An adapter's names may lack the backbone's. A term without a projection, or misshapen, is an error.
    """
    found: dict[str, TermT] = {}
    for given, term in terms.items():
        name = given if given in projections else f"{backbone}.{given}"
        if name not in projections:
            raise BadCheckpoint(
                f"Adapter {adapter!r} changes {given!r}, which this model does not have; it may be made for another."
            )
        if term.shape != projections[name]:
            raise BadCheckpoint(
                f"Adapter {adapter!r} changes {given!r} as a matrix of shape {term.shape}, but this model's has shape "
                f"{projections[name]}; it may be made for another."
            )
        found[name] = term
    return found
