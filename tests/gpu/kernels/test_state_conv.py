"""Each case is also computed by the plain twin, whose slots keep their inputs in order instead of in a ring."""

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ostro.kernels.gpu.state_conv import convolve_chunks, keep_inputs, short_chunks, short_singles
from ostro.kernels.gpu.state_rows import ChunkTables, SingleRows, StateChunk, chunk_tables
from ostro.kernels.recurrent_state import StateCache, StateRows, StepStates
from ostro.models.architecture import State

SLOTS = 12
# A chunk from the start, one that goes on and is captured twice, short ones, and one of several pieces.
CHUNKS = [
    StateChunk(0, 7, 3, 0, ((1, 4), (2, 5), (7, 6))),
    StateChunk(7, 1, 1, 9, ((1, 7),)),
    StateChunk(8, 2, 0, 1),
    StateChunk(10, 70, 2, 13, ((69, 8),)),
]
ROWS = 80


class Case(NamedTuple):
    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    states: StateCache

    @classmethod
    def of(
        cls,
        device: torch.device,
        positions: dict[int, int],
        *,
        taps: int,
        channels: int,
        bias: bool,
        dtype: torch.dtype,
    ) -> "Case":
        """Slots of sequences that have so many inputs."""
        torch.manual_seed(0)
        states = StateCache(
            [State((taps - 1, channels))], SLOTS, lambda shape, exact: torch.zeros(shape, dtype=dtype, device=device)
        )
        # Slots are farther apart than they are long, and begin with what others left there.
        inputs = torch.randn(SLOTS, taps + 2, channels, device=device).to(dtype)[:, :taps]
        for slot, position in positions.items():
            for before in range(max(0, position - taps + 1), position):
                inputs[slot, before % taps] = states.layer(0).inputs[slot, before - position] = torch.randn(channels)
        weight = torch.randn(taps, channels, device=device)
        return cls(weight, torch.randn(channels, device=device) if bias else None, inputs, states)

    def plain(self, x: Tensor, chunks: Sequence[StateChunk]) -> Tensor:
        rows = [StateRows(own.first, own.rows, own.slot, own.captures) for own in chunks]
        return StepStates(self.states, rows, x.device).convolve(0, x, self.weight, self.bias)

    def check_kept(self, positions: dict[int, int], rtol: float = 0.0) -> None:
        taps = len(self.weight)
        for slot, position in positions.items():
            for before in range(max(0, position - taps + 1), position):
                expected = self.states.layer(0).inputs[slot, before - position]
                torch.testing.assert_close(self.inputs[slot, before % taps], expected, rtol=rtol, atol=0)


def begins(chunks: Sequence[StateChunk]) -> dict[int, int]:
    return {own.slot: own.position for own in chunks}


def ends(chunks: Sequence[StateChunk]) -> dict[int, int]:
    captured = {slot: own.position + rows for own in chunks for rows, slot in own.captures}
    return captured | {own.slot: own.position + own.rows for own in chunks}


def tables(chunks: Sequence[StateChunk], device: torch.device) -> ChunkTables:
    """With a chunk and pieces of none behind, as graphs have them."""
    listed, pieces = (torch.from_numpy(table).to(device) for table in chunk_tables(chunks))
    no_chunk = torch.tensor([[-1, 5, 0, 2]], dtype=torch.int32, device=device)
    unused = torch.tensor([[0, 9, 3, 0], [2, 5, 1, len(chunks)], [1, 1, 1, -3]], dtype=torch.int32, device=device)
    return ChunkTables(torch.cat((listed, no_chunk)), torch.cat((pieces, unused)))


def singles(chunks: Sequence[StateChunk], device: torch.device) -> SingleRows:
    """The chunks' first rows, and then one without a sequence."""
    captured = [own.captures[0][1] if own.captures else -1 for own in chunks]
    return SingleRows(
        torch.tensor([*(own.slot for own in chunks), -1], dtype=torch.int32, device=device),
        torch.tensor([*(own.position for own in chunks), 0], device=device),
        torch.tensor([*captured, -1], dtype=torch.int32, device=device),
    )


@pytest.mark.parametrize(("taps", "channels", "bias"), [(4, 40, True), (3, 130, False), (2, 8, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_chunks_are_convolved_and_their_inputs_kept(
    device: torch.device, taps: int, channels: int, bias: bool, dtype: torch.dtype
) -> None:
    case = Case.of(device, begins(CHUNKS), taps=taps, channels=channels, bias=bias, dtype=dtype)
    x = torch.randn(ROWS, 2 * channels, device=device).to(dtype)[:, channels:]
    out = convolve_chunks(x, case.weight, case.bias, case.inputs, tables(CHUNKS, device), silu=False)
    keep_inputs(x, case.inputs, tables(CHUNKS, device))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, case.plain(x, CHUNKS), rtol=1e-5, atol=1e-5)
    case.check_kept(ends(CHUNKS))


def test_what_is_convolved_may_go_through_silu(device: torch.device) -> None:
    case = Case.of(device, begins(CHUNKS), taps=4, channels=24, bias=True, dtype=torch.float32)
    x = torch.randn(ROWS, 24, device=device)
    out = convolve_chunks(x, case.weight, case.bias, case.inputs, tables(CHUNKS, device), silu=True)
    torch.testing.assert_close(out, torch.nn.functional.silu(case.plain(x, CHUNKS)), rtol=1e-5, atol=1e-5)


def test_slots_of_no_chunk_are_left_alone(device: torch.device) -> None:
    case = Case.of(device, begins(CHUNKS), taps=4, channels=24, bias=False, dtype=torch.float32)
    x, before = torch.randn(ROWS, 24, device=device), case.inputs.clone()
    keep_inputs(x, case.inputs, tables(CHUNKS, device))
    others = [slot for slot in range(SLOTS) if slot not in ends(CHUNKS)]
    assert torch.equal(case.inputs[others], before[others])


@pytest.mark.parametrize("cut", [1, 2, 3, 64, 69])
def test_a_cut_changes_no_bit(device: torch.device, cut: int) -> None:
    case = Case.of(device, {2: 13}, taps=4, channels=24, bias=True, dtype=torch.float32)
    x, other = torch.randn(70, 24, device=device), case.inputs.clone()
    whole = tables([StateChunk(0, 70, 2, 13)], device)
    expected = convolve_chunks(x, case.weight, case.bias, case.inputs, whole, silu=True)
    keep_inputs(x, case.inputs, whole)
    found = []
    for rows, position in ((x[:cut], 13), (x[cut:], 13 + cut)):
        part = tables([StateChunk(0, len(rows), 2, position)], device)
        found.append(convolve_chunks(rows, case.weight, case.bias, other, part, silu=True))
        keep_inputs(rows, other, part)
    assert torch.equal(torch.cat(found), expected)
    latest = [position % 4 for position in range(80, 83)]
    assert torch.equal(other[2, latest], case.inputs[2, latest])


def gated(case: Case, bcu: Tensor, chunks: Sequence[StateChunk]) -> Tensor:
    """LFM2's gates around a convolution, as `torch_models.recurrent.ShortConvolution` has them."""
    b, c, u = bcu.chunk(3, -1)
    return c * case.plain(b * u, chunks).to(c.dtype)


# The interpreter does not round to bfloat16, it truncates.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_short_convolutions_of_chunks(device: torch.device, dtype: torch.dtype) -> None:
    case = Case.of(device, begins(CHUNKS), taps=3, channels=40, bias=False, dtype=dtype)
    bcu = torch.randn(ROWS, 120, device=device).to(dtype)
    out = torch.empty(ROWS, 40, dtype=dtype, device=device)
    short_chunks(bcu, case.weight, case.bias, case.inputs, tables(CHUNKS, device), out)
    torch.testing.assert_close(out, gated(case, bcu, CHUNKS), rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    case.check_kept(ends(CHUNKS), TOLERANCES[dtype])


# A sequence's first row, its second, and one far in; two of them captured.
SINGLES = [StateChunk(0, 1, 3, 0, ((1, 4),)), StateChunk(1, 1, 1, 1), StateChunk(2, 1, 0, 9, ((1, 7),))]


@pytest.mark.parametrize(("taps", "bias"), [(4, True), (3, False), (2, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_short_convolutions_of_single_rows(device: torch.device, taps: int, bias: bool, dtype: torch.dtype) -> None:
    case = Case.of(device, begins(SINGLES), taps=taps, channels=40, bias=bias, dtype=dtype)
    bcu = torch.randn(4, 120, device=device).to(dtype)
    out, before = torch.full((4, 40), 7.0, dtype=dtype, device=device), case.inputs.clone()
    short_singles(bcu, case.weight, case.bias, case.inputs, singles(SINGLES, device), out)
    expected = gated(case, bcu[:3], SINGLES)
    torch.testing.assert_close(out[:3], expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    assert not out[3].any()
    case.check_kept(ends(SINGLES), TOLERANCES[dtype])
    others = [slot for slot in range(SLOTS) if slot not in ends(SINGLES)]
    assert torch.equal(case.inputs[others], before[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_rows_have_the_bits_of_chunks(device: torch.device, dtype: torch.dtype) -> None:
    case = Case.of(device, begins(SINGLES), taps=3, channels=40, bias=True, dtype=dtype)
    bcu, other = torch.randn(3, 120, device=device).to(dtype), case.inputs.clone()
    alone, chunked = (torch.empty(3, 40, dtype=dtype, device=device) for _ in range(2))
    rows = SingleRows(*(each[:3] for each in singles(SINGLES, device)))
    short_singles(bcu, case.weight, case.bias, case.inputs, rows, alone)
    short_chunks(bcu, case.weight, case.bias, other, tables(SINGLES, device), chunked)
    assert torch.equal(alone, chunked)
    assert torch.equal(case.inputs, other)
