"""Weights that are integers times scales: w = (code - zero) · scale, with a zero and a scale per group of columns."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ostro.weights.arrays import Bytes, Floats
from ostro.weights.forms import Form
from ostro.weights.quantized import blocks
from ostro.weights.quantized.blocks import GROUP
from ostro.weights.quantized.weight import Packing, QuantizedWeight, repacked_at_best

Codes = npt.NDArray[np.uint8]
Zeros = npt.NDArray[np.int16]


def grid_packing(*, bits: int, symmetric: bool, columns: int, group: int | None, scales: str) -> Packing:
    """`group` is None if columns of several groups are mixed; `scales` is their stored format."""
    form = None if group is None else Form("int", bits, min(group, columns))
    whole = columns % GROUP == 0 and group is not None and (group % GROUP == 0 or group >= columns)
    if not whole or (bits == 8 and not symmetric):
        return repacked_at_best(columns, form)
    if not symmetric:
        return Packing("Q4_1", "repacked with scales and zero points rounded to float16", form)
    how = "repacked exactly" if scales == "F16" else "repacked with scales in float16"
    return Packing("Q4_0" if bits == 4 else "Q8_0", how, form)


@dataclass(frozen=True, slots=True)
class Grid:
    shape: tuple[int, int]
    bits: int
    codes: Callable[[slice], Codes]
    """Some rows' codes, unsigned."""
    scales: Floats
    """[rows or 1, groups]"""
    scale_format: str
    zeros: Zeros
    """[rows or 1, groups or 1]"""
    group: int
    """Consecutive columns that share a scale."""
    group_of: npt.NDArray[np.int32] | None = None
    """Each column's group, if they are not consecutive."""

    def weight(self) -> QuantizedWeight:
        middle = 1 << (self.bits - 1)
        symmetric = bool((self.zeros == middle).all())
        own = replace(
            self,
            # Stored by rows, because it is read by rows.
            scales=np.ascontiguousarray(self.scales),
            zeros=np.full((1, 1), middle, np.int16) if symmetric else np.ascontiguousarray(self.zeros),
            group_of=None if self._is_in_order() else self.group_of,
        )
        packing = grid_packing(
            bits=self.bits,
            symmetric=symmetric,
            columns=self.shape[1],
            group=self.group if own.group_of is None else None,
            scales=self.scale_format,
        )
        exactly = {"Q4_0": own.q4_0, "Q4_1": own.q4_1, "Q8_0": own.q8_0}
        at_best = packing == repacked_at_best(self.shape[1], packing.form)
        repack = None if at_best else exactly[packing.format]
        return QuantizedWeight(self.shape, packing, own.decode, repack, source=own)

    def decode(self, rows: slice) -> Floats:
        codes = self.codes(rows).astype(np.int16)
        codes -= self._by_column(self.zeros, rows)
        values = codes.astype(np.float32)
        values *= self._by_column(self.scales, rows)
        return values

    def q4_0(self, rows: slice) -> Bytes:
        return blocks.q4_0(self.codes(rows), self._by_block(self.scales, rows))

    def q4_1(self, rows: slice) -> Bytes:
        scales, zeros = self._by_block(self.scales, rows), self._by_block(self.zeros, rows)
        return blocks.q4_1(self.codes(rows), scales, -zeros.astype(np.float32) * scales)

    def q8_0(self, rows: slice) -> Bytes:
        signed = (self.codes(rows) ^ np.uint8(128)).view(np.int8)
        return blocks.q8_0(signed, self._by_block(self.scales, rows))

    def _is_in_order(self) -> bool:
        if self.group_of is None:
            return True
        return bool((self.group_of == np.arange(self.shape[1]) // self.group).all())

    def _by_column(self, table: npt.NDArray[Any], rows: slice) -> npt.NDArray[Any]:
        own = table if len(table) == 1 else table[rows]
        if own.shape[1] == 1:
            return own
        if self.group_of is not None:
            return own[:, self.group_of]
        return np.repeat(own, self.group, axis=1)[:, : self.shape[1]]

    def _by_block(self, table: npt.NDArray[Any], rows: slice) -> npt.NDArray[Any]:
        """A row's numbers, one per block of columns; each block lies within a group."""
        num_rows, num_blocks = rows.stop - rows.start, self.shape[1] // GROUP
        own = table if len(table) == 1 else table[rows]
        if own.shape[1] > 1:
            own = np.repeat(own, self.group // GROUP, axis=1)[:, :num_blocks]
        return np.broadcast_to(own, (num_rows, num_blocks))
