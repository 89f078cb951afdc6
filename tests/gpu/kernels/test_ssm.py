"""Each case is also computed by the model's own mixer, as torch computes it."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ostro.kernels.gpu.ssm import SsmWeights, ssm_chunks, ssm_singles
from ostro.kernels.gpu.state_rows import ChunkTables, KeptState, SingleRows, StateChunk, chunk_tables
from ostro.kernels.recurrent_state import StateCache, StateRows, StepStates
from ostro.models.architecture import Convolution, Mamba2, Norm, Part, Projection
from ostro.torch_models import recurrent

SLOTS = 9


def described(*, norm: Norm | None, gates_normed: bool = False, heads: int = 6, head_dim: int = 12) -> Mamba2:
    """A mixer of two groups; every size that may be mistaken for another is different."""
    width, channels = heads * head_dim, heads * head_dim + 2 * 2 * 16
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        state_size=16,
        groups=2,
        inputs=Projection(width, (Part("in_proj", width + channels + heads),)),
        conv=Convolution("conv", channels, 4, bias=True),
        decay="decay",
        step_bias="step_bias",
        skip="skip",
        norm=norm,
        norm_groups=2 if norm is not None else 1,
        gates_normed=gates_normed,
        output=Projection(width, (Part("out_proj", width),)),
    )


class Mixer:
    """A mixer, slots of both kinds, and weights as kernels take them."""

    def __init__(
        self, own: Mamba2, positions: dict[int, int], device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        self.module = recurrent.Mamba2(own, 0).to(device)
        for parameter in self.module.parameters():
            parameter.data.normal_()
        self.module.in_proj = self.module.out_proj = torch.nn.Identity()  # type: ignore[assignment]
        self.device, self.dtype = device, dtype

        def zeros(shape: tuple[int, ...], exact: bool) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32 if exact else dtype, device=device)

        self.states = StateCache([own.state], SLOTS, zeros)
        heads, taps = (own.heads, own.head_dim, own.state_size), own.conv.taps
        # Slots are farther apart than they are long, and begin with what others left there.
        matrices = torch.randn(SLOTS, 2, *heads, device=device)[:, 1]
        inputs = torch.randn(SLOTS, taps + 1, own.conv.channels, device=device).to(dtype)[:, :taps]
        self.kept = KeptState(inputs, matrices)
        known = self.states.layer(0)
        assert known.matrices is not None
        for slot, position in positions.items():
            if position:
                known.matrices[slot] = matrices[slot] = torch.randn(heads)
            for before in range(max(0, position - taps + 1), position):
                known.inputs[slot, before - position] = inputs[slot, before % taps]
        conv, norm = self.module.conv, self.module.norm
        assert conv.bias is not None
        self.weights = SsmWeights(
            conv.weight.data,
            conv.bias.data,
            self.module.decay.weight.data,
            self.module.step_bias.weight.data,
            self.module.skip.weight.data,
            None if norm is None else norm.weight.data,
            1e-5,
            own.norm_groups,
            own.gates_normed,
            own.head_dim,
            own.state_size,
            own.groups,
        )

    def inputs(self, rows: int) -> Tensor:
        """Strided, as parts of wider rows are."""
        width = self.weights.width + self.weights.channels + self.weights.heads
        return torch.randn(rows, width + 3, device=self.device).to(self.dtype)[:, :width]

    def out(self, rows: int) -> Tensor:
        return torch.full((rows, self.weights.width), 7.0, dtype=self.dtype, device=self.device)

    def expected(self, x: Tensor, chunks: Sequence[StateChunk]) -> Tensor:
        rows = [StateRows(own.first, own.rows, own.slot, own.captures) for own in chunks]

        class Context:
            states = StepStates(self.states, rows, self.device)

        return self.module(x, None, Context())  # type: ignore[no-any-return]

    def check_kept(self, chunks: Sequence[StateChunk], tolerance: float) -> None:
        known, taps = self.states.layer(0), len(self.weights.taps)
        assert known.matrices is not None
        assert self.kept.matrices is not None
        for slot, position in ends(chunks).items():
            torch.testing.assert_close(self.kept.matrices[slot], known.matrices[slot], rtol=tolerance, atol=tolerance)
            for before in range(max(0, position - taps + 1), position):
                assert torch.equal(self.kept.inputs[slot, before % taps], known.inputs[slot, before - position])


def begins(chunks: Sequence[StateChunk]) -> dict[int, int]:
    return {own.slot: own.position for own in chunks}


def ends(chunks: Sequence[StateChunk]) -> dict[int, int]:
    captured = {slot: own.position + rows for own in chunks for rows, slot in own.captures}
    return captured | {own.slot: own.position + own.rows for own in chunks}


def tables(chunks: Sequence[StateChunk], device: torch.device) -> ChunkTables:
    """With a chunk and pieces of none behind, as graphs have them."""
    listed, pieces = (torch.from_numpy(table).to(device) for table in chunk_tables(chunks))
    no_chunk = torch.tensor([[-1, 5, 0, 2]], dtype=torch.int32, device=device)
    unused = torch.tensor([[0, 9, 3, 0], [2, 5, 1, len(chunks)]], dtype=torch.int32, device=device)
    return ChunkTables(torch.cat((listed, no_chunk)), torch.cat((pieces, unused)))


NORM = Norm("norm", 72, 1e-5)
FULL = pytest.mark.full
GATES = {
    "normed gate": described(norm=NORM),
    "gated norm": described(norm=NORM, gates_normed=True),
    "gate alone": described(norm=None),
}
# Two sequences' first rows, a second one, and one far in; two of them captured.
SINGLES = [
    StateChunk(0, 1, 3, 0, ((1, 4),)),
    StateChunk(1, 1, 1, 1),
    StateChunk(2, 1, 0, 9, ((1, 7),)),
    StateChunk(3, 1, 5, 0),
]
# From the start with captures, one that goes on, and one row.
CHUNKS = [StateChunk(0, 5, 3, 0, ((1, 4), (3, 6))), StateChunk(5, 4, 1, 9, ((4, 7),)), StateChunk(9, 1, 0, 1)]


@pytest.mark.parametrize("gate", ["normed gate", "gate alone", pytest.param("gated norm", marks=FULL)])
def test_single_rows_advance_their_states(device: torch.device, gate: str) -> None:
    mixer = Mixer(GATES[gate], begins(SINGLES), device)
    x, out = mixer.inputs(5), mixer.out(5)
    assert mixer.kept.matrices is not None
    before = mixer.kept.matrices.clone()
    rows = SingleRows(
        torch.tensor([3, 1, 0, 5, -1], dtype=torch.int32, device=device),
        torch.tensor([0, 1, 9, 0, 0], device=device),
        torch.tensor([4, -1, 7, -1, -1], dtype=torch.int32, device=device),
    )
    ssm_singles(x, mixer.weights, mixer.kept, rows, out)
    torch.testing.assert_close(out[:4], mixer.expected(x[:4], SINGLES), rtol=1e-4, atol=1e-4)
    assert not out[4].any()
    mixer.check_kept(SINGLES, 1e-4)
    others = [slot for slot in range(SLOTS) if slot not in ends(SINGLES)]
    assert torch.equal(mixer.kept.matrices[others], before[others])


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("gate", ["gated norm", *(pytest.param(other, marks=FULL) for other in list(GATES)[::2])])
def test_chunks_advance_their_states(device: torch.device, gate: str, exact: bool) -> None:
    mixer = Mixer(GATES[gate], begins(CHUNKS), device)
    x, out = mixer.inputs(10), mixer.out(10)
    ssm_chunks(x, mixer.weights, mixer.kept, tables(CHUNKS, device), out, exact=exact)
    torch.testing.assert_close(out, mixer.expected(x, CHUNKS), rtol=1e-4, atol=1e-4)
    mixer.check_kept(CHUNKS, 1e-4)


@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=FULL)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=FULL)])
def test_rows_may_be_half_precise(device: torch.device, dtype: torch.dtype, exact: bool) -> None:
    mixer = Mixer(GATES["normed gate"], begins(CHUNKS), device, dtype)
    x, out = mixer.inputs(10), mixer.out(10)
    ssm_chunks(x, mixer.weights, mixer.kept, tables(CHUNKS, device), out, exact=exact)
    torch.testing.assert_close(out, mixer.expected(x, CHUNKS), rtol=2e-2, atol=2e-2)
    mixer.check_kept(CHUNKS, 1e-4)


@pytest.mark.full
@pytest.mark.parametrize("exact", [True, False])
def test_a_long_chunk_has_several_pieces(device: torch.device, exact: bool) -> None:
    chunk = StateChunk(0, 70, 2, 3, ((66, 4),))
    mixer = Mixer(described(norm=None, heads=2, head_dim=5), begins([chunk]), device)
    x, out = mixer.inputs(70), mixer.out(70)
    ssm_chunks(x, mixer.weights, mixer.kept, tables([chunk], device), out, exact=exact)
    torch.testing.assert_close(out, mixer.expected(x, [chunk]), rtol=1e-4, atol=1e-4)
    mixer.check_kept([chunk], 1e-4)


@pytest.mark.parametrize(
    "cuts", [(1, 4, 5), *(pytest.param(cuts, marks=FULL) for cuts in ((1, 2, 3, 4, 5), (2, 6), (5, 6)))]
)
def test_cuts_and_captures_change_no_bit(device: torch.device, cuts: tuple[int, ...]) -> None:
    mixer = Mixer(GATES["normed gate"], {2: 3}, device)
    x, whole, other = (
        mixer.inputs(7),
        mixer.out(7),
        KeptState(*(each.clone() for each in mixer.kept if each is not None)),
    )
    ssm_chunks(x, mixer.weights, mixer.kept, tables([StateChunk(0, 7, 2, 3, ((4, 5),))], device), whole, exact=True)
    found = []
    for start, end in zip((0, *cuts), (*cuts, 7), strict=True):
        found.append(mixer.out(end - start))
        part = tables([StateChunk(0, end - start, 2, 3 + start)], device)
        ssm_chunks(x[start:end], mixer.weights, other, part, found[-1], exact=True)
    assert torch.equal(torch.cat(found), whole)
    assert other.matrices is not None
    assert mixer.kept.matrices is not None
    assert torch.equal(other.matrices[2], mixer.kept.matrices[2])


@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=FULL)])
def test_steps_of_any_size_are_survived(device: torch.device, exact: bool) -> None:
    """t is softplus of what may be far from zero."""
    mixer = Mixer(GATES["gate alone"], begins(CHUNKS), device)
    x, out = mixer.inputs(10), mixer.out(10)
    x[:, -6:] = torch.tensor([-200.0, -30.0, -8.0, 5.0, 30.0, 200.0], device=device)
    ssm_chunks(x, mixer.weights, mixer.kept, tables(CHUNKS, device), out, exact=exact)
    torch.testing.assert_close(out, mixer.expected(x, CHUNKS), rtol=1e-4, atol=1e-3)
