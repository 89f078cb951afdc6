from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ostro.kernels.decode_attention import SlotRun, equally_spaced
from ostro.kernels.paged_attention import KVCache, PagedAttention, Piece, reference_attention, runs, slots_of
from ostro.models.architecture import AttentionSpec

PAGE, KV_HEADS, GROUP, DIM = 4, 2, 3, 8


@st.composite
def steps(draw: st.DrawFn) -> list[Piece]:
    """Sequences at any stage, their pages scattered or in runs."""
    lengths = st.just(1) if draw(st.booleans()) else st.integers(1, 12)
    extents = draw(st.lists(st.tuples(st.integers(0, 40), lengths), min_size=1, max_size=6))
    needed = [-(-(start + length) // PAGE) for start, length in extents]
    pool = list(range(sum(needed)))
    if draw(st.booleans()):
        draw(st.randoms()).shuffle(pool)
    pieces, offset = [], 0
    for (start, length), count in zip(extents, needed, strict=True):
        pieces.append(
            Piece(offset, start, length, [pool.pop() if draw(st.booleans()) else pool.pop(0) for _ in range(count)])
        )
        offset += length
    return pieces


def attention_step(pieces: list[Piece], *, masks: bool = True) -> tuple[PagedAttention, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    tokens = sum(piece.length for piece in pieces)
    slots = PAGE * (1 + max(page for piece in pieces for page in piece.pages))
    cache = torch.randn(2, 2, KV_HEADS, slots, DIM)
    q = torch.randn(tokens, KV_HEADS * GROUP, DIM)
    k, v = torch.randn(2, tokens, KV_HEADS, DIM)
    return PagedAttention(KVCache.of(cache), pieces, PAGE, masks=masks), q, k, v


SPECS = [*(AttentionSpec(scale=1.0, window=size) for size in (None, 3, 10, 100))]
SPECS += [AttentionSpec(scale=1.0, chunk=size) for size in (1, 5, 8, 100)]


@given(steps(), st.sampled_from(SPECS), st.booleans(), st.booleans())
def test_fast_path_equals_the_plain_twin_wherever_pages_lie(
    pieces: list[Piece], spec: AttentionSpec, masks: bool, sunk: bool
) -> None:
    ctx, q, k, v = attention_step(pieces, masks=masks)
    sinks = 2 * torch.randn(KV_HEADS * GROUP) if sunk else None
    fast = ctx.attend(1, q, k, v, spec, sinks)
    grouped = q.view(-1, KV_HEADS, GROUP, DIM)
    plain = torch.cat([reference_attention(ctx, 1, grouped, piece, spec, sinks) for piece in pieces]).flatten(1)
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)


@given(steps(), st.sampled_from(SPECS), st.booleans(), st.integers(1, 5000))
def test_blocks_of_queries_give_what_all_queries_at_once_give(
    pieces: list[Piece], spec: AttentionSpec, sunk: bool, block_bytes: int
) -> None:
    ctx, q, k, v = attention_step(pieces)
    ctx.store(1, k, v)
    grouped, sinks = q.view(-1, KV_HEADS, GROUP, DIM), torch.randn(KV_HEADS * GROUP) if sunk else None
    for piece in pieces:
        whole = reference_attention(ctx, 1, grouped, piece, spec, sinks)
        blocks = reference_attention(ctx, 1, grouped, piece, spec, sinks, block_bytes=block_bytes)
        torch.testing.assert_close(blocks, whole, atol=1e-5, rtol=1e-5)


class _LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.nbytes = max(self.nbytes, found.nbytes)
        return found


@pytest.mark.parametrize("spec", [SPECS[0], AttentionSpec(scale=1.0, window=100), AttentionSpec(scale=1.0, softcap=9)])
def test_scores_of_a_long_prompt_stay_within_the_budget(spec: AttentionSpec) -> None:
    """All at once, they took gigabytes at ordinary prompts of large models on a GPU."""
    tokens, budget = 1024, 1 << 20
    ctx, q, _, _ = attention_step([piece := Piece(0, 0, tokens, range(tokens // PAGE))])
    with _LargestTensor() as largest:
        reference_attention(ctx, 0, q.view(-1, KV_HEADS, GROUP, DIM), piece, spec, block_bytes=budget)
    assert 4 * KV_HEADS * GROUP * tokens * tokens > 20 * budget
    assert largest.nbytes <= budget // 4


def test_equally_spaced_sequences_attend_in_one_call() -> None:
    lanes = [SlotRun(100 * lane, 100 * lane + length, lane) for lane, length in enumerate([60, 40, 100, 51])]
    assert equally_spaced(lanes, 400, masks=True) == [lanes]
    assert [len(group) for group in equally_spaced(lanes, 400, masks=False)] == [1, 1, 1, 1]
    shared = [SlotRun(0, 64, row) for row in range(5)]
    assert equally_spaced(shared, 400, masks=False) == [shared]


def test_rows_do_not_reach_into_the_next_or_beyond_the_cache() -> None:
    close = [SlotRun(0, 90, 0), SlotRun(50, 100, 1)]
    assert len(equally_spaced(close, 400, masks=True)) == 2
    at_the_end = [SlotRun(0, 90, 0), SlotRun(300, 350, 1)]
    assert len(equally_spaced(at_the_end, 350, masks=True)) == 2


def test_much_shorter_runs_are_not_padded_to_the_longest() -> None:
    uneven = [SlotRun(0, 100, 0), SlotRun(100, 101, 1), SlotRun(200, 201, 2)]
    assert [len(group) for group in equally_spaced(uneven, 400, masks=True)] == [2, 1]


@given(steps())
def test_keys_and_values_are_stored_where_the_pages_say_and_nowhere_else(pieces: list[Piece]) -> None:
    ctx, q, k, v = attention_step(pieces)
    [cache] = ctx.cache.stacks
    before = cache.clone()
    ctx.attend(1, q, k, v, AttentionSpec(scale=1.0))
    where = [
        piece.pages[position // PAGE] * PAGE + position % PAGE
        for piece in pieces
        for position in range(piece.start, piece.end)
    ]
    assert slots_of(pieces, PAGE) == where
    before[1, 0][:, where], before[1, 1][:, where] = k.transpose(0, 1), v.transpose(0, 1)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("spec", [AttentionSpec(scale=1.0, window=3), AttentionSpec(scale=1.0, chunk=4)])
def test_a_token_attends_from_the_first_position_of_its_window_or_chunk(spec: AttentionSpec) -> None:
    for start in range(12):
        ctx, q, k, v = attention_step([Piece(0, start, 1, [0, 1, 2])])
        attended = ctx.attend(0, q, k, v, spec)
        keys, values = ctx.cache.layer(0)
        values[:, : spec.first(start)] = 1e6
        assert torch.equal(ctx.attend(0, q, k, v, spec), attended)
        keys[:, spec.first(start)] += 1.0
        assert not torch.equal(ctx.attend(0, q, k, v, spec), attended) or spec.first(start) == start


def test_softcapped_scores_differ_from_plain_ones() -> None:
    ctx, q, k, v = attention_step([Piece(0, 5, 3, [0, 1])])
    capped = ctx.attend(0, q, k, v, AttentionSpec(scale=1.0, softcap=0.5))
    plain = ctx.attend(0, q, k, v, AttentionSpec(scale=1.0))
    assert not torch.allclose(capped, plain)


@pytest.mark.parametrize(
    ("pages", "first", "end", "expected"),
    [
        ([3, 4, 5], 0, 12, [(12, 24)]),
        ([3, 4, 5], 2, 9, [(14, 21)]),
        ([3, 9, 10], 0, 10, [(12, 16), (36, 42)]),
        ([5, 4], 0, 8, [(20, 24), (16, 20)]),
        ([7], 3, 4, [(31, 32)]),
        ([7], 0, 0, []),
    ],
)
def test_neighbouring_pages_form_one_run(
    pages: list[int], first: int, end: int, expected: list[tuple[int, int]]
) -> None:
    assert runs(pages, PAGE, first, end) == expected
