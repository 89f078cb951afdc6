import math
import warnings
from collections.abc import Sequence as Several
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostro.backends.sampling.logprobs import logprob_table
from ostro.backends.sampling.sampler import sample
from ostro.engine.request import Request
from ostro.engine.sequence import Sequence
from ostro.kernels.gpu.sampling import (
    ALL_BANNED,
    INFINITE,
    NOT_A_NUMBER,
    SamplerTables,
    SlotSettings,
    sample_tokens,
)
from ostro.sampling_params import SamplingParams

NOT_WRITTEN = -7


def sequence_of(entry: SlotSettings) -> Sequence:
    """What the plain sampler is given for the same settings."""
    params = SamplingParams(
        max_tokens=None,
        temperature=entry.temperature,
        top_k=entry.top_k,
        top_p=entry.top_p,
        min_p=entry.min_p,
        repetition_penalty=entry.repetition_penalty,
        presence_penalty=entry.presence_penalty,
        frequency_penalty=entry.frequency_penalty,
    )
    request = Request(id=0, prompt_ids=tuple(entry.prompt_ids) or (0,), params=params, seed=entry.seed)
    seq = Sequence(0, request, choice=entry.choice, max_len=1000)
    seq.token_ids.extend(entry.output_ids)
    return seq


def admitted(entries: Several[SlotSettings], vocab: int, device: torch.device) -> SamplerTables:
    tables = SamplerTables(max(entry.slot for entry in entries) + 2, vocab, device)
    tables.admit(entries)
    return tables


def step(
    logits: Tensor,
    slots: list[int],
    tables: SamplerTables,
    *,
    truncated: bool = True,
    penalties: bool = False,
    candidates: int = 4096,
) -> tuple[list[int], list[int]]:
    device = tables.settings.device
    tokens = torch.full((len(slots),), NOT_WRITTEN, dtype=torch.int64, device=device)
    errors = torch.full((len(slots),), NOT_WRITTEN, dtype=torch.int8, device=device)
    # The interpreter is numpy, which warns of the infinities that the kernels reckon with.
    with np.errstate(all="ignore"):
        sample_tokens(
            logits.to(device),
            torch.tensor(slots, dtype=torch.int32, device=device),
            tables,
            tokens,
            errors,
            truncated=truncated,
            penalties=penalties,
            candidates=candidates,
        )
    return tokens.tolist(), errors.tolist()


def drawn(logits: Tensor, entries: Several[SlotSettings], device: torch.device, candidates: int = 4096) -> list[int]:
    tables = admitted(entries, logits.shape[-1], device)
    tokens, errors = step(
        logits,
        [entry.slot for entry in entries],
        tables,
        truncated=any(entry.truncates for entry in entries),
        penalties=any(entry.penalises for entry in entries),
        candidates=candidates,
    )
    assert errors == [0] * len(entries)
    return tokens


def expected(logits: Tensor, entries: Several[SlotSettings]) -> list[int]:
    return [sampled.token_id for sampled in sample(logits.float(), [sequence_of(entry) for entry in entries])]


def random_logits(rows: int, vocab: int, seed: int, *, tied: bool = False) -> Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return (logits * 4).round() / 4 if tied else logits


WHOLE = [
    SlotSettings(slot=3, seed=-(2**63)),
    SlotSettings(slot=0, seed=2**63 - 1, choice=3, temperature=0.3, output_ids=(1, 2, 3)),
    SlotSettings(slot=1, seed=7, temperature=0.0),
    SlotSettings(slot=5, seed=8, temperature=2.0),
    SlotSettings(slot=4, seed=9, temperature=1e-50),
]
TRUNCATED = [
    SlotSettings(slot=0, seed=1, top_k=1),
    SlotSettings(slot=1, seed=2, top_k=5),
    SlotSettings(slot=2, seed=3, top_k=90, temperature=2.0),
    SlotSettings(slot=3, seed=4, top_p=0.3),
    SlotSettings(slot=4, seed=5, top_p=0.95),
    SlotSettings(slot=5, seed=6, min_p=0.1),
    SlotSettings(slot=6, seed=7, top_k=30, top_p=0.7, min_p=0.01),
    SlotSettings(slot=7, seed=8, top_k=10_000, top_p=1 - 1e-12),
    SlotSettings(slot=8, seed=9, temperature=0.0, top_k=3),
    SlotSettings(slot=9, seed=9),
]


@pytest.mark.parametrize("vocab", [1, 100, 128, 300, 2176])
def test_draws_over_the_whole_vocabulary_are_those_of_the_plain_sampler(vocab: int, device: torch.device) -> None:
    for seed, tied in ((0, False), (1, True)):
        logits = random_logits(len(WHOLE), vocab, seed, tied=tied)
        assert drawn(logits, WHOLE, device) == expected(logits, WHOLE)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("vocab", "tied"), [(100, False), (300, True), (1500, False), (1500, True)])
def test_truncated_draws_are_those_of_the_plain_sampler(vocab: int, tied: bool, device: torch.device) -> None:
    logits = random_logits(len(TRUNCATED), vocab, vocab, tied=tied)
    assert drawn(logits, TRUNCATED, device) == expected(logits, TRUNCATED)


unlikely = st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0])


@st.composite
def entries_of(draw: st.DrawFn, vocab: int, slot: int) -> SlotSettings:
    token = st.integers(0, vocab - 1)
    return SlotSettings(
        slot=slot,
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        choice=draw(st.integers(0, 127)),
        temperature=draw(st.sampled_from([0.0, 1e-40, 1e-6, 0.3, 1.0, 2.0])),
        top_k=draw(st.one_of(st.just(0), st.integers(1, vocab + 2))),
        top_p=draw(st.one_of(st.just(1.0), st.floats(0.01, 0.999))),
        min_p=draw(unlikely),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, -2.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.1, -0.3])),
        prompt_ids=tuple(draw(st.lists(token, min_size=1, max_size=6))),
        output_ids=tuple(draw(st.lists(token, max_size=8))),
    )


@pytest.mark.full
@given(data=st.data(), vocab=st.sampled_from([2, 7, 129, 200]), seed=st.integers(0, 2**32), tied=st.booleans())
@settings(max_examples=12, deadline=None)
def test_any_settings_draw_the_token_of_the_plain_sampler(
    data: st.DataObject, vocab: int, seed: int, tied: bool
) -> None:
    entries = [data.draw(entries_of(vocab, slot)) for slot in range(2)]
    logits = random_logits(2, vocab, seed, tied=tied)
    # Some tokens are banned, never all of them.
    banned = torch.rand(2, vocab - 1, generator=torch.Generator().manual_seed(seed)) < 0.2
    logits[:, 1:].masked_fill_(banned, -math.inf)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert drawn(logits, entries, device) == expected(logits, entries)


def test_half_precision_logits_are_drawn_from_as_they_are(device: torch.device) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        logits = random_logits(3, 300, 5).to(dtype)
        entries = [TRUNCATED[2], TRUNCATED[4], TRUNCATED[9]]
        assert drawn(logits, entries, device) == expected(logits, entries)


def test_more_tokens_than_candidates_are_searched_for_in_the_row(device: torch.device) -> None:
    """Gathering stops beyond the capacity; a nucleus or a tie wider than it must come out the same."""
    logits = random_logits(3, 1100, 6, tied=True)
    logits[2, :40] = 12.0
    entries = [
        SlotSettings(slot=0, seed=1, top_k=8),
        SlotSettings(slot=1, seed=2, top_p=0.2),
        SlotSettings(slot=2, seed=3, top_k=7, top_p=0.9),
    ]
    tokens = expected(logits, entries)
    assert drawn(logits, entries, device, candidates=8) == tokens
    assert drawn(logits, entries, device, candidates=64) == tokens


def test_lowest_ids_are_kept_among_equal_tokens(device: torch.device) -> None:
    logits = torch.zeros(6, 300)
    entries = [SlotSettings(slot=slot, seed=slot, top_k=2) for slot in range(3)]
    entries += [SlotSettings(slot=slot, seed=slot, top_p=2 / 300) for slot in range(3, 6)]
    tokens = drawn(logits, entries, device)
    assert set(tokens) <= {0, 1}
    assert tokens == expected(logits, entries)


def test_banned_tokens_are_never_drawn(device: torch.device) -> None:
    logits = torch.full((4, 400), -math.inf)
    logits[:, [17, 130, 399]] = torch.tensor([0.0, 1.0, -30.0])
    cuts: list[dict[str, float]] = [{}, {"top_k": 10}, {"top_p": 0.999}, {"min_p": 1e-9}]
    entries = [replace(SlotSettings(slot=slot, seed=slot), **cut) for slot, cut in enumerate(cuts)]  # type: ignore[arg-type]
    tokens = drawn(logits, entries, device)
    assert set(tokens) <= {17, 130, 399}
    assert tokens == expected(logits, entries)


def test_best_score_of_negative_zero_equals_zero(device: torch.device) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0]] * 3)
    entries = [
        SlotSettings(slot=0, seed=0, temperature=0.0),
        SlotSettings(slot=1, seed=1, top_k=1),
        SlotSettings(slot=2, seed=2, temperature=1e-9),
    ]
    assert drawn(logits, entries, device) == expected(logits, entries)


@pytest.mark.parametrize("truncation", [{}, {"top_k": 3, "top_p": 0.9}], ids=["whole", "truncated"])
def test_row_without_a_best_score_fails_alone(truncation: dict[str, float], device: torch.device) -> None:
    logits = random_logits(8, 200, 4)
    for first in (0, 4):
        logits[first, 150] = math.nan
        logits[first + 1, 3] = math.inf
        logits[first + 2] = -math.inf
    entries = [
        replace(SlotSettings(slot=slot, seed=slot, temperature=slot // 4), **truncation)  # type: ignore[arg-type]
        for slot in range(8)
    ]
    tables = admitted(entries, 200, device)
    tokens, errors = step(logits, list(range(8)), tables, truncated=bool(truncation))
    assert errors == [NOT_A_NUMBER, INFINITE, ALL_BANNED, 0] * 2
    sampled = sample(logits, [sequence_of(entry) for entry in entries])
    assert [bool(error) for error in errors] == [token.error is not None for token in sampled]
    assert [max(token.token_id, 0) for token in sampled] == tokens


def test_not_a_number_is_reported_even_beside_infinity(device: torch.device) -> None:
    logits = torch.tensor([[math.nan, math.inf, 0.0]] * 2)
    entries = [SlotSettings(slot=0, seed=0), SlotSettings(slot=1, seed=0, temperature=0.0)]
    _, errors = step(logits, [0, 1], admitted(entries, 3, device), truncated=False)
    assert errors == [NOT_A_NUMBER] * 2


def test_padding_rows_write_nothing(device: torch.device) -> None:
    entries = [SlotSettings(slot=0, seed=1, top_k=3, presence_penalty=0.5), SlotSettings(slot=1, seed=2)]
    tables = admitted(entries, 140, device)
    tokens, errors = step(random_logits(3, 140, 1), [-1, 1, -1], tables, penalties=True)
    assert (tokens[0], tokens[2], errors) == (NOT_WRITTEN, NOT_WRITTEN, [NOT_WRITTEN, 0, NOT_WRITTEN])
    assert tables.num_output.tolist() == [0, 1, 0]
    assert tables.last_token.tolist() == [0, tokens[1], 0]
    assert tables.counts is not None
    assert not tables.counts.any()


def test_steps_follow_one_another_without_the_host(device: torch.device) -> None:
    """Positions and counts are kept on the device: the plain sampler is told of each token, the tables are not."""
    entries = [
        SlotSettings(slot=2, seed=5, repetition_penalty=1.5, prompt_ids=(3, 4, 4), output_ids=(4, 9)),
        SlotSettings(slot=0, seed=6, presence_penalty=1.0, frequency_penalty=0.7, prompt_ids=(1,), top_k=4),
        SlotSettings(slot=1, seed=7, prompt_ids=(1, 2)),
        SlotSettings(slot=3, seed=8, temperature=0.0, frequency_penalty=0.3, output_ids=(5,)),
    ]
    tables = admitted(entries, 20, device)
    seqs = [sequence_of(entry) for entry in entries]
    logits = random_logits(4, 20, 3, tied=True)
    for _ in range(5):
        tokens, _ = step(logits, [2, 0, 1, 3], tables, penalties=True)
        assert tokens == [sampled.token_id for sampled in sample(logits, seqs)]
        for seq, token in zip(seqs, tokens, strict=True):
            seq.token_ids.append(token)
    assert tables.counts is not None
    assert tables.num_output.tolist()[:4] == [seqs[row].num_output for row in (1, 2, 0, 3)]
    assert tables.last_token.tolist()[:4] == [seqs[row].token_ids[-1] for row in (1, 2, 0, 3)]
    for row in (0, 1, 3):
        marks = [2 * seqs[row].output_ids.count(token) + (token in entries[row].prompt_ids) for token in range(20)]
        assert tables.counts[entries[row].slot].tolist() == marks


def test_count_stops_at_the_largest(device: torch.device) -> None:
    entry = SlotSettings(
        slot=0, seed=0, temperature=0.0, presence_penalty=0.1, prompt_ids=(1,), output_ids=(1,) * 16383
    )
    tables = admitted([entry], 2, device)
    step(torch.tensor([[0.0, 9.0]]), [0], tables, truncated=False, penalties=True)
    assert tables.counts is not None
    assert tables.counts[0].tolist() == [0, 2 * 16383 + 1]


def test_slot_taken_again_forgets_who_had_it(device: torch.device) -> None:
    entry = SlotSettings(slot=0, seed=1, presence_penalty=2.0, prompt_ids=(1,), output_ids=(2, 3))
    tables = admitted([entry], 30, device)
    logits = random_logits(1, 30, 8)
    step(logits, [0], tables, truncated=False, penalties=True)
    again = SlotSettings(slot=0, seed=4, presence_penalty=-1.0, prompt_ids=(7,), output_ids=(8,))
    tables.admit([again])
    assert step(logits, [0], tables, truncated=False, penalties=True)[0] == expected(logits, [again])


@pytest.mark.full
def test_row_is_drawn_alike_alone_and_in_a_batch(device: torch.device) -> None:
    """A batch of 32 splits the vocabulary into other parts than a row alone."""
    vocab = 2304
    logits = random_logits(32, vocab, 2)
    entries = [SlotSettings(slot=slot, seed=slot) for slot in range(32)]
    together = drawn(logits, entries, device)
    assert together == [drawn(logits[row : row + 1], entries[row : row + 1], device)[0] for row in range(32)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("truncated", [False, True])
def test_graph_draws_a_new_token_each_time_it_is_replayed(truncated: bool) -> None:
    device = torch.device("cuda")
    entries = [replace(entry, slot=slot) for slot, entry in enumerate(TRUNCATED if truncated else WHOLE)]
    count, vocab = len(entries), 32_000
    tables = admitted(entries, vocab, device)
    logits = random_logits(count, vocab, 1).to(device)
    slots = torch.arange(count, dtype=torch.int32, device=device)
    tokens = torch.empty(count, dtype=torch.int32, device=device)
    errors = torch.empty(count, dtype=torch.int8, device=device)

    def draw() -> None:
        sample_tokens(logits, slots, tables, tokens, errors, truncated=truncated, penalties=False)

    draw()
    tables.admit(entries)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draw()
    seqs = [sequence_of(entry) for entry in entries]
    for _ in range(4):
        graph.replay()
        assert tokens.tolist() == [sampled.token_id for sampled in sample(logits.cpu(), seqs)]
        for seq, token in zip(seqs, tokens.tolist(), strict=True):
            seq.token_ids.append(token)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_log_probabilities_of_a_step_do_not_wait_for_the_device() -> None:
    logits = random_logits(4, 32_000, 1).cuda()
    tokens = torch.arange(4, device="cuda")
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            # torch says each time that the mode is a prototype.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        table = logprob_table(logits, tokens, 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(table.cpu(), logprob_table(logits.cpu(), tokens.cpu(), 20), rtol=1e-5, atol=1e-5)
