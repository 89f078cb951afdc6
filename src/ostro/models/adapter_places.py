"""Assigns an adapter's terms to a model's projections. Imports no torch and no numpy."""

from collections.abc import Mapping
from typing import Protocol, TypeVar

from ostro.errors import BadCheckpoint


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix that the term is added to: [out, in]."""


TermT = TypeVar("TermT", bound=Shaped)


def placed(
    adapter: str, terms: Mapping[str, TermT], projections: Mapping[str, tuple[int, int]], *, backbone: str
) -> dict[str, TermT]:
    """The terms, keyed by the full names of their projections, whose shapes are given.

    An adapter's names may omit the backbone prefix. A term without a projection or with the wrong shape is an error.
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
