"""LoRA adapters on a mesh, beside the weights: tables of all adapters' low-rank terms. Knows no programs and no batch.

The adapters' A matrices are stacked vertically; their B matrices, scaled, stand side by side. All rows of a step are
multiplied by all of A; before they are multiplied by B, each keeps what its own adapter gave:

    A   [ A1 ]        B   [ B1 B2 B2 ]        owners   [ 1 2 2 ]
        [ A2 ]
        [ A2 ]

This takes two matmuls per projection, whatever the batch, where a gather by row would copy matrices for each token. As
in `torch_models.lora`, the terms of a fused projection's parts are one term, whose B has zeros around each part, and a
rank holds what belongs to its part of the matrix beside it:

    inputs cut      A by columns, B whole        the ranks' terms add up, as their products do
    outputs cut     A whole, B by rows           a rank has the outputs that its matrix has
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from ostro.backends.jax.layout import AdapterLayout
from ostro.backends.jax.weights import BY_COLUMNS, BY_ROWS, COPIED, numbers_of, place_pieces
from ostro.errors import BadCheckpoint
from ostro.models.adapter_places import described_terms
from ostro.models.architecture import Architecture, Layer, Projection
from ostro.models.cut import Cut, Share, layer_shares
from ostro.weights.adapter import LowRank
from ostro.weights.arrays import Floats

Adapters = Mapping[str, Mapping[str, LowRank]]
"""Low-rank terms by adapter name, then by the projection that they are added to."""


class Term(NamedTuple):
    """All adapters' terms of one projection; also their specs."""

    a: Any
    """[width, in]"""
    b: Any
    """[out, width]"""


class ByProjection(NamedTuple):
    """One entry for each of a layer's projections; None if no adapter changes it."""

    qkv: Any = None
    output: Any = None
    up: Any = None
    down: Any = None


class AdapterTables(NamedTuple):
    """The tables of all adapters; also their specs."""

    owners: ByProjection
    """The number of the adapter that each entry of the tables' width belongs to."""
    layers: tuple[ByProjection, ...]
    """The terms of each layer."""


@dataclass(frozen=True, slots=True)
class PlacedAdapters:
    layout: AdapterLayout
    tables: AdapterTables

    @classmethod
    def load(
        cls, described: Architecture, adapters: Adapters, cut: Cut, mesh: Mesh, dtype: npt.DTypeLike
    ) -> "PlacedAdapters":
        """Copies a model's adapters onto the mesh, one rank's piece of one table at a time.

        Raises BadCheckpoint if an adapter belongs to another model, or is too large for `dtype`, and UnsupportedModel
        if it changes experts.
        """
        terms = described_terms(described, adapters)
        ranks = {name: {part: len(term.a) for part, term in own.items()} for name, own in terms.items()}
        layout = AdapterLayout.of(described, ranks)
        tables = _Tables(described, layout, terms, cut, mesh, dtype)
        return cls(layout, AdapterTables(tables.owners(), tuple(map(tables.of_layer, described.layers))))

    def specs(self) -> AdapterTables:
        outputs_cut, inputs_cut = Term(COPIED, BY_ROWS), Term(BY_COLUMNS, COPIED)
        layer = ByProjection(qkv=outputs_cut, output=inputs_cut, up=outputs_cut, down=inputs_cut)
        present = ByProjection(
            *(spec if width else None for spec, width in zip(layer, self.layout.widths, strict=True))
        )
        owners = ByProjection(*(None if spec is None else COPIED for spec in present))
        return AdapterTables(owners, (present,) * len(self.tables.layers))


@dataclass(frozen=True, slots=True)
class _Tables:
    """Builds the layers' tables."""

    described: Architecture
    layout: AdapterLayout
    terms: Adapters
    cut: Cut
    mesh: Mesh
    dtype: npt.DTypeLike

    def owners(self) -> ByProjection:
        numbers = (np.array(self.layout.owners(number), np.int32) for number in range(len(self.layout.widths)))
        return ByProjection(*(self.copied(each) if len(each) else None for each in numbers))

    def of_layer(self, layer: Layer) -> ByProjection:
        shares = [layer_shares(self.described.shape, layer, self.cut, rank) for rank in range(self.cut.ranks)]
        by_projection = zip(layer.projections, zip(*shares, strict=True), strict=True)
        return ByProjection(
            *(
                self._term(number, projection, own) if self.layout.widths[number] else None
                for number, (projection, own) in enumerate(by_projection)
            )
        )

    def _term(self, number: int, projection: Projection, shares: tuple[Share, ...]) -> Term:
        a, b = self._whole(number, projection)
        if shares[0].summed:
            return Term(self._by_columns(a, shares), self.copied(b))
        return Term(self.copied(a), self._by_rows(b, shares))

    def _whole(self, number: int, projection: Projection) -> tuple[Floats, Floats]:
        """A and B before they are cut."""
        width = self.layout.widths[number]
        a = np.zeros((width, projection.columns), self.dtype)
        b = np.zeros((projection.rows, width), self.dtype)
        for adapter, start in self.layout.starts[number].items():
            first_row = 0
            for part in projection.parts:
                if (term := self.terms[adapter].get(part.name)) is not None:
                    stop = start + len(term.a)
                    a[start:stop] = self._converted(adapter, part.name, term.a)
                    scaled = self._converted(adapter, part.name, term.b, term.scale)
                    b[first_row : first_row + part.rows, start:stop] = scaled
                    start = stop
                first_row += part.rows
        return a, b

    def _converted(self, adapter: str, part: str, values: Floats, scale: float = 1.0) -> npt.NDArray[Any]:
        with np.errstate(over="ignore"):
            found = (values * np.float32(scale)).astype(self.dtype)
        if not np.isfinite(found).all():
            # In other adapters' rows, infinity would be multiplied by zero, which gives NaN.
            raise BadCheckpoint(
                f"Adapter {adapter!r} changes {part!r} by numbers that are too large for "
                f"{np.dtype(self.dtype).name}. Use a wider dtype, or leave the adapter out."
            )
        return found

    def copied(self, whole: npt.NDArray[Any]) -> jax.Array:
        return place_pieces(self.mesh, whole.shape, COPIED, lambda rank: whole)

    def _by_columns(self, whole: Floats, shares: tuple[Share, ...]) -> jax.Array:
        return place_pieces(self.mesh, whole.shape, BY_COLUMNS, lambda rank: whole[:, numbers_of(shares[rank].columns)])

    def _by_rows(self, whole: Floats, shares: tuple[Share, ...]) -> jax.Array:
        rows = [numbers_of(share.rows) for share in shares]
        height = sum(map(len, rows))
        return place_pieces(self.mesh, (height, whole.shape[1]), BY_ROWS, lambda rank: whole[rows[rank]])
