"""Drafts leave the states, and give the results, of steps without drafts, to the last bit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from torch import Tensor

from ostro.kernels.recurrent_state import StateCache, StateRows, StepStates
from ostro.models.architecture import State
from ostro.torch_models.recurrent import delta_step, ssm_step

HEADS, ROWS, COLUMNS, CHANNELS, TAPS = 3, 5, 7, 11, 4
SLOTS = 6
STATE = State((TAPS - 1, CHANNELS), (HEADS, ROWS, COLUMNS))
WIDTHS = {
    delta_step: ((HEADS, ROWS), (HEADS, ROWS), (HEADS, COLUMNS), (HEADS,), (HEADS,)),
    ssm_step: ((HEADS, ROWS), (HEADS, COLUMNS), (HEADS, COLUMNS), (HEADS,)),
}
ADVANCES = pytest.mark.parametrize("advance", WIDTHS)


@dataclass
class Layer:
    """One layer. Each sequence's tokens are drawn from their positions, which for wrong drafts are ones far away."""

    advance: Callable[..., Tensor]
    cache: StateCache = field(
        default_factory=lambda: StateCache(
            [STATE], SLOTS, lambda size, exact: torch.zeros(size, dtype=torch.float32 if exact else torch.bfloat16)
        )
    )

    def step(self, *asked: tuple[int, Sequence[int], StateRows]) -> Iterator[list[Tensor]]:
        """What is computed for each sequence's tokens but drafts."""
        with torch.inference_mode():
            states = StepStates(self.cache, [rows for *_, rows in asked], torch.device("cpu"))
            read = [self._token(sequence, at) for sequence, tokens, _ in asked for at in tokens]
            x, *others = (torch.stack(each) for each in zip(*read, strict=True))
            weight = torch.linspace(-1, 1, TAPS * CHANNELS).view(TAPS, CHANNELS)
            both = (
                states.convolve(0, x.bfloat16(), weight, None),
                states.recur(0, (HEADS, ROWS, COLUMNS), self.advance, *others).flatten(1),
            )
            for _, _, rows in asked:
                yield [each[rows.offset : rows.offset + rows.known] for each in both]

    def _token(self, sequence: int, at: int) -> tuple[Tensor, ...]:
        drawn = torch.Generator().manual_seed(1000 * sequence + at)
        numbers = [torch.randn(size, generator=drawn) for size in ((CHANNELS,), *WIDTHS[self.advance])]
        return (*numbers[:-1], numbers[-1].sigmoid())

    def state(self, slot: int) -> list[Tensor]:
        kept = self.cache.layer(0)
        assert kept.matrices is not None
        return [kept.inputs[slot].clone(), kept.matrices[slot].clone()]


def equal(ours: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


@cache
def plain(advance: Callable[..., Tensor], sequence: int, tokens: int) -> tuple[list[Tensor], list[Tensor]]:
    """One sequence token by token: what is computed, and the state in the end."""
    layer = Layer(advance)
    found = [next(layer.step((sequence, range(at, at + 1), StateRows(0, 1, 0)))) for at in range(tokens)]
    return [torch.cat(each) for each in zip(*found, strict=True)], layer.state(0)


@ADVANCES
@pytest.mark.parametrize("drafts", range(1, 9))
def test_any_number_of_accepted_drafts_gives_the_state_of_steps_without_drafts(
    advance: Callable[..., Tensor], drafts: int
) -> None:
    """Beside another sequence; the next step has drafts as well, and captures a state within its tokens."""
    for accepted in range(drafts + 1):
        layer = Layer(advance)
        first = [*range(5), *range(5, 5 + accepted), *range(900, 900 + drafts - accepted)]
        [known, other] = layer.step(
            (1, first, StateRows(0, len(first), 2, drafts=drafts, lane=1)),
            (2, range(3), StateRows(len(first), 3, 4)),
        )
        assert equal(known, plain(advance, 1, 5)[0])
        assert equal(layer.state(2), plain(advance, 1, 5)[1])
        end = 5 + accepted
        second = [*range(end, end + 4), 950, 951]
        [other_next, next_known] = layer.step(
            (2, range(3, 5), StateRows(0, 2, 4)),
            (1, second, StateRows(2, 6, 2, ((3, 5),), drafts=2, accepted=accepted, lane=1)),
        )
        results, state = plain(advance, 1, end + 4)
        assert equal(next_known, [each[end:] for each in results])
        assert equal(layer.state(2), state)
        assert equal(layer.state(5), plain(advance, 1, end + 3)[1])
        assert equal([torch.cat(each) for each in zip(other, other_next, strict=True)], plain(advance, 2, 5)[0])
        # None of the second step's drafts was right.
        [last] = layer.step((1, range(end + 4, end + 5), StateRows(0, 1, 2, lane=1)))
        assert equal(last, [each[end + 4 :] for each in plain(advance, 1, end + 5)[0]])
        assert equal(layer.state(2), plain(advance, 1, end + 5)[1])


@ADVANCES
def test_drafts_wait_in_their_lanes_while_other_sequences_go_on(advance: Callable[..., Tensor]) -> None:
    layer = Layer(advance)
    list(layer.step((1, range(6), StateRows(0, 6, 0, drafts=3, lane=0))))
    list(layer.step((2, range(6), StateRows(0, 6, 1, drafts=2, lane=1))))
    [one, two] = layer.step(
        (1, range(5, 6), StateRows(0, 1, 0, accepted=2, lane=0)),
        (2, range(6, 7), StateRows(1, 1, 1, accepted=2, lane=1)),
    )
    assert equal(one, [each[5:] for each in plain(advance, 1, 6)[0]])
    assert equal(two, [each[6:] for each in plain(advance, 2, 7)[0]])


@pytest.mark.full
@ADVANCES
@torch.inference_mode()
def test_tens_of_thousands_of_tokens_stay_near_float64(advance: Callable[..., Tensor]) -> None:
    """With heads that forget within a token, and others that hardly ever do."""
    torch.manual_seed(0)
    heads, rows, columns, tokens, together = 4, 16, 16, 32_768, 128
    kept = torch.tensor([0.1, 0.9, 0.999, 0.99999]).double()
    single, double = (torch.zeros(1, heads, rows, columns, dtype=each) for each in (torch.float32, torch.float64))
    furthest = largest = 0.0
    for _ in range(tokens // together):
        q, k, v = (torch.randn(together, 1, heads, size, dtype=torch.float64) for size in (rows, rows, columns))
        k /= k.norm(dim=-1, keepdim=True)
        read = [(q, k, v, torch.rand(together, 1, heads).double()), (k / 16, v, v)][advance is ssm_step]
        for token in range(together):
            first, *others = (each[token] for each in read)
            given = [first, *others, kept[None]] if advance is ssm_step else [first, *others[:2], kept[None], others[2]]
            exact = advance(double, *given)
            found = advance(single, *(each.float() for each in given))
        furthest = max(furthest, (found - exact).abs().max().item())
        largest = max(largest, exact.abs().max().item())
    assert single.isfinite().all()
    assert furthest < 1e-4 * largest
