from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ostro.kernels.gpu.delta import DeltaWeights, delta_chunks, delta_plain, delta_singles
from ostro.kernels.gpu.state_rows import ChunkTables, KeptState, SingleRows, StateChunk, chunk_tables

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS, SLOTS = 2, 6, 12, 20, 4, 8
KEYS, VALUES = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
CHANNELS = 2 * KEYS + VALUES


class Layer(NamedTuple):
    weights: DeltaWeights
    mixed: Tensor
    gates: Tensor
    state: KeptState

    @property
    def matrices(self) -> Tensor:
        assert self.state.matrices is not None
        return self.state.matrices

    def copied(self) -> "Layer":
        """With states of its own."""
        return self._replace(state=KeptState(self.state.inputs.clone(), self.matrices.clone()))

    def out(self) -> Tensor:
        return torch.full((len(self.mixed), VALUES), torch.nan, dtype=self.mixed.dtype, device=self.mixed.device)

    def plain(self, chunks: Sequence[StateChunk]) -> Tensor:
        out = self.out()
        delta_plain(self.mixed, self.gates, self.weights, self.state, chunks, out)
        return out

    def computed(self, chunks: Sequence[StateChunk], exact: bool = True, padded: bool = False) -> Tensor:
        out = self.out()
        tables = [torch.from_numpy(own) for own in chunk_tables(chunks)]
        if padded:
            tables[0] = torch.cat((tables[0], torch.tensor([[-1, 0, 0, 0], [-1, 7, 1, 2]], dtype=torch.int32)))
            tables[1] = torch.cat((tables[1], torch.tensor([[0, 5, 2, 0], [0, 0, -1, 0]], dtype=torch.int32)))
        on_device = ChunkTables(*(own.to(self.mixed.device) for own in tables))
        delta_chunks(self.mixed, self.gates, self.weights, self.state, on_device, out, exact=exact)
        return out


def layer(
    device: torch.device, rows: int, *, tiled: bool = False, bias: bool = False, dtype: torch.dtype = torch.float32
) -> Layer:
    """Gates are columns of the same matrix."""
    torch.manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    weights = DeltaWeights(
        drawn(TAPS, CHANNELS),
        drawn(CHANNELS) if bias else None,
        drawn(VALUE_HEADS),
        drawn(VALUE_HEADS) / 2 - 1,
        1 + drawn(VALUE_DIM) / 4,
        1e-6,
        tiled,
    )
    row = drawn(rows, CHANNELS + VALUES + 2 * VALUE_HEADS, dtype=dtype)
    # Between a slot's parts there are those of other layers.
    inputs = drawn(SLOTS, 3, TAPS, CHANNELS, dtype=dtype)[:, 1]
    matrices = drawn(SLOTS, 2, VALUE_HEADS, KEY_DIM, VALUE_DIM)[:, 1]
    mixed, gates = row.split_with_sizes((CHANNELS + VALUES, 2 * VALUE_HEADS), 1)
    return Layer(weights, mixed, gates, KeptState(inputs, matrices))


def assert_alike(one: Layer, other: Layer, tolerance: float = 1e-5) -> None:
    assert torch.equal(one.state.inputs, other.state.inputs)
    torch.testing.assert_close(one.matrices, other.matrices, rtol=tolerance, atol=tolerance)


def singles(some: Layer, slots: list[int], positions: list[int], captured: list[int]) -> Tensor:
    device, out = some.mixed.device, some.out()
    rows = SingleRows(
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(captured, dtype=torch.int32, device=device),
    )
    delta_singles(some.mixed, some.gates, some.weights, some.state, rows, out)
    return out


@pytest.mark.parametrize(("tiled", "bias"), [(False, True), pytest.param(True, False, marks=pytest.mark.full)])
def test_single_rows_equal_the_plain_twin(device: torch.device, tiled: bool, bias: bool) -> None:
    ours = layer(device, 4, tiled=tiled, bias=bias)
    theirs = ours.copied()
    slots, positions, captured = [3, 0, 5, 1], [0, 2, 9, 100], [-1, 7, -1, 2]
    out = singles(ours, slots, positions, captured)
    plain = theirs.plain(
        [
            StateChunk(row, 1, slot, position, () if also < 0 else ((1, also),))
            for row, (slot, position, also) in enumerate(zip(slots, positions, captured, strict=True))
        ]
    )
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)


def test_rows_without_a_slot_are_zeros_and_change_nothing(device: torch.device) -> None:
    ours = layer(device, 2)
    before = ours.copied()
    assert not singles(ours, [-1, -1], [0, 5], [3, -1]).any()
    assert_alike(ours, before, 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_may_be_half_precise(device: torch.device, dtype: torch.dtype) -> None:
    one, chunked = layer(device, 3, dtype=dtype), layer(device, 3, dtype=dtype)
    theirs = one.copied()
    chunks = [StateChunk(row, 1, row, 5) for row in range(3)]
    plain = theirs.plain(chunks)
    for out in (singles(one, [0, 1, 2], [5, 5, 5], [-1, -1, -1]), chunked.computed(chunks)):
        torch.testing.assert_close(out, plain, rtol=1e-2, atol=1e-2)
    assert_alike(one, theirs)
    assert_alike(chunked, theirs)


@pytest.mark.parametrize(("tiled", "bias"), [(False, True), pytest.param(True, False, marks=pytest.mark.full)])
def test_chunks_equal_the_plain_twin(device: torch.device, tiled: bool, bias: bool) -> None:
    ours = layer(device, 22, tiled=tiled, bias=bias)
    theirs = ours.copied()
    chunks = [
        StateChunk(1, 18, 3, 0, ((1, 0), (17, 7))),
        StateChunk(19, 1, 4, 2),
        StateChunk(20, 2, 5, 1, ((1, 2), (2, 6))),
    ]
    out, plain = ours.computed(chunks, padded=True), theirs.plain(chunks)
    assert plain[0].isnan().all()
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert_alike(ours, theirs)


@pytest.mark.full
def test_chunks_longer_than_a_piece_equal_the_plain_twin(device: torch.device) -> None:
    ours = layer(device, 70)
    theirs = ours.copied()
    chunks = [StateChunk(0, 70, 3, 6)]
    torch.testing.assert_close(ours.computed(chunks), theirs.plain(chunks), rtol=1e-4, atol=1e-5)
    assert_alike(ours, theirs)


@pytest.mark.parametrize("tiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_blocks_equal_the_plain_twin(device: torch.device, tiled: bool) -> None:
    ours = layer(device, 20, tiled=tiled, bias=True)
    theirs = ours.copied()
    chunks = [StateChunk(1, 17, 3, 5, ((16, 7),))]
    out, plain = ours.computed(chunks, exact=False), theirs.plain(chunks)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert_alike(ours, theirs)


@pytest.mark.full
@pytest.mark.parametrize("faster", [0.0, 4.0])
def test_blocks_of_many_pieces_equal_the_plain_twin_whatever_is_forgotten(device: torch.device, faster: float) -> None:
    ours = layer(device, 142)
    ours.weights.decay.add_(faster)
    theirs = ours.copied()
    chunks = [
        StateChunk(1, 135, 3, 0, ((1, 0), (1, 1), (17, 7))),
        StateChunk(136, 1, 4, 2),
        StateChunk(137, 2, 5, 1, ((2, 6),)),
    ]
    out, plain = ours.computed(chunks, exact=False, padded=True), theirs.out()
    delta_plain(theirs.mixed, theirs.gates, theirs.weights, theirs.state, chunks, plain, torch.float64)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert_alike(ours, theirs)


@pytest.mark.full
def test_blocks_of_keys_that_are_alike_equal_the_plain_twin(device: torch.device) -> None:
    ours = layer(device, 64)
    ours.mixed[:] = ours.mixed[:1] + ours.mixed / 16
    ours.weights.decay.sub_(8)
    theirs = ours.copied()
    chunks = [StateChunk(0, 64, 3, 5)]
    out, plain = ours.computed(chunks, exact=False), theirs.out()
    delta_plain(theirs.mixed, theirs.gates, theirs.weights, theirs.state, chunks, plain, torch.float64)
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-4)
    assert_alike(ours, theirs, 1e-4)


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 1e-5)])
def test_blocks_of_half_precise_rows(device: torch.device, dtype: torch.dtype, tolerance: float) -> None:
    """States are bounded by their size, for bfloat16 rounds the operands, too."""
    ours = layer(device, 70, dtype=dtype)
    theirs = ours.copied()
    chunks = [StateChunk(0, 70, 3, 6)]
    out, plain = ours.computed(chunks, exact=False), theirs.plain(chunks)
    assert float((out - plain).norm() / plain.norm()) < 1e-2
    assert torch.equal(ours.state.inputs, theirs.state.inputs)
    assert float((ours.matrices[3] - theirs.matrices[3]).norm() / theirs.matrices[3].norm()) < tolerance


def test_any_cut_has_the_same_bits(device: torch.device) -> None:
    rows = 7
    whole = layer(device, rows)
    out = whole.computed([StateChunk(0, rows, 0, 3)])
    for cuts in ([1, 2, 3], [5]):
        cut = layer(device, rows)
        parts = []
        for first, end in zip([0, *cuts], [*cuts, rows], strict=True):
            chunk = StateChunk(first, end - first, 0, 3 + first, ((1, 6),))
            parts.append(cut.computed([chunk])[first:end])
        assert torch.equal(torch.cat(parts), out)
        assert torch.equal(cut.matrices[0], whole.matrices[0])
        assert torch.equal(cut.state.inputs[0], whole.state.inputs[0])


def test_nothing_is_done_for_no_rows(device: torch.device) -> None:
    ours = layer(device, 3)
    before = ours.copied()
    assert ours.computed([]).isnan().all()
    assert_alike(ours, before, 0.0)
