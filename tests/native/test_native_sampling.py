"""Tokens and log-probabilities of the native runner against those of torch's sampler, from the same logits."""

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from native_models import native, needs_library, packed, savable_model
from sampler_oracle import expected_choice, mask_of
from tiny_models import LLAMA, VOCAB

from ostro.backends.native.runner import DRAWN, NativeRunner
from ostro.backends.sampling import sampler
from ostro.backends.sampling.arrays import token_logprob
from ostro.backends.sampling.edits import EDITED, ELSEWHERE, READ
from ostro.backends.sampling.logprobs import position_logprobs
from ostro.engine.batch import Batch, Chunk
from ostro.engine.request import Request
from ostro.engine.runner import SampledToken, TokenLogprob
from ostro.engine.sequence import Sequence
from ostro.sampling_params import SamplingParams

pytestmark = needs_library

CONFIG: Mapping[str, object] = {**LLAMA, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
TOKENS = st.integers(0, VOCAB - 1)
# Some ids lie beyond the vocabulary: they must be passed over.
ANY_ID = st.integers(0, VOCAB + 3)

# One value per field that changes which token is drawn, or what is reported about it.
CHANGES: Mapping[str, Any] = {
    "temperature": 0.0,
    "top_p": 0.3,
    "top_k": 3,
    "min_p": 0.5,
    "top_n_sigma": 0.1,
    "seed": 1234,
    "logit_bias": {5: 100.0},
    "repetition_penalty": 10.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "bad_words": "any",
    "min_tokens": 9,
    "logprobs": 3,
    "prompt_logprobs": 2,
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> NativeRunner:
    path = tmp_path_factory.mktemp("packed") / "weights"
    return native(packed(CONFIG, savable_model(CONFIG), path), pages=64)


def sequence(
    id: int,
    params: SamplingParams,
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    output: tuple[int, ...] = (),
    choice: int = 0,
    eos_ids: frozenset[int] = frozenset(),
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
) -> Sequence:
    request = Request(
        id=id,
        prompt_ids=prompt,
        params=params,
        seed=0 if params.seed is None else params.seed,
        eos_ids=eos_ids,
        bad_word_ids=bad_word_ids,
    )
    seq = Sequence(id, request, choice=choice, max_len=1000)
    seq.token_ids.extend(output)
    # Each has two pages of its own.
    seq.pages.extend([2 * id, 2 * id + 1])
    return seq


def natively(runner: NativeRunner, seqs: list[Sequence]) -> list[SampledToken]:
    output = runner.run(Batch(tuple(Chunk(seq, 0, seq.num_tokens, samples=(seq,)) for seq in seqs)))
    return [output.sampled[seq.id] for seq in seqs]


def logits_of(runner: NativeRunner, seqs: list[Sequence]) -> torch.Tensor:
    """The model's own logits for the sequences' next tokens."""
    plain = SamplingParams(temperature=0)
    natively(runner, [sequence(seq.id, plain, prompt=tuple(seq.token_ids)) for seq in seqs])
    number = runner.program.spec.logits
    assert number is not None
    return torch.from_numpy(runner.program.buffer(number)[: len(seqs), :VOCAB].copy())


def assert_same(ours: SampledToken, theirs: SampledToken) -> None:
    assert (ours.token_id, ours.error) == (theirs.token_id, theirs.error)
    assert (ours.logprob is None) == (theirs.logprob is None)
    if ours.logprob is not None and theirs.logprob is not None:
        assert_alike(ours.logprob, theirs.logprob)


def assert_alike(ours: TokenLogprob, theirs: TokenLogprob) -> None:
    assert (ours.token_id, ours.rank) == (theirs.token_id, theirs.rank)
    assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-6)
    assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
    assert [value for _, value in ours.top] == pytest.approx([value for _, value in theirs.top], abs=1e-6)


def mostly(default: float, low: float, high: float) -> st.SearchStrategy[float]:
    return st.one_of(st.just(default), st.floats(low, high))


# Strategies take longer to build than to draw from: each is built once.
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.none(),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0]),
    top_p=mostly(1.0, 0.01, 0.999),
    top_k=st.one_of(st.just(0), st.integers(1, VOCAB + 2)),
    min_p=mostly(0.0, 0.0, 1.0),
    top_n_sigma=mostly(0.0, 0.1, 3.0),
    seed=st.integers(-(2**63), 2**63 - 1),
    repetition_penalty=mostly(1.0, 0.5, 2.0),
    presence_penalty=mostly(0.0, -2.0, 2.0),
    frequency_penalty=mostly(0.0, -2.0, 2.0),
    logit_bias=st.dictionaries(ANY_ID, st.floats(-5, 5), max_size=3),
    logprobs=st.one_of(st.none(), st.integers(0, 20)),
    min_tokens=st.integers(0, 8),
    stop_token_ids=st.lists(ANY_ID, max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)
ALLOWED = st.none() | st.sets(TOKENS, min_size=1)


@cache
def sequences(id: int) -> st.SearchStrategy[Sequence]:
    return st.builds(
        sequence,
        st.just(id),
        PARAMS,
        prompt=st.lists(TOKENS, min_size=1, max_size=6).map(tuple),
        output=st.lists(TOKENS, max_size=6).map(tuple),
        choice=st.integers(0, 3),
        eos_ids=st.lists(ANY_ID, max_size=2).map(frozenset),
        bad_word_ids=st.lists(st.lists(ANY_ID, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    )


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_settings_give_the_tokens_and_scores_of_torchs_sampler(data: st.DataObject, runner: NativeRunner) -> None:
    seqs = [data.draw(sequences(id)) for id in range(data.draw(st.integers(1, 4)))]
    for seq in seqs:
        if (allowed := data.draw(ALLOWED)) is not None:
            seq.mask = mask_of(allowed)
    logits = logits_of(runner, seqs)
    for row, seq in zip(logits.tolist(), seqs, strict=True):
        # Weights differ in their last digits, which may decide where two tokens are as good.
        assume(expected_choice(row, seq).margin > 1e-5)
    for ours, theirs in zip(natively(runner, seqs), sampler.sample(logits, seqs), strict=True):
        assert_same(ours, theirs)


def test_every_field_is_honoured_by_someone_who_is_named() -> None:
    """A new field of SamplingParams that the native core would ignore fails here, and when the core is imported."""
    groups = (DRAWN, EDITED, READ, ELSEWHERE)
    names = [each.name for each in fields(SamplingParams)]
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert set(CHANGES) == DRAWN | EDITED | READ


@pytest.mark.cases(7)
@pytest.mark.parametrize("name", sorted(DRAWN | EDITED | {"logprobs"}))
def test_every_field_changes_what_the_native_core_draws_and_to_what_torch_draws(
    name: str, runner: NativeRunner
) -> None:
    """Over many seeds: a field that is ignored would change nothing."""
    before, after, expected = [], [], []
    for seed in range(20):
        neutral = SamplingParams(max_tokens=None, temperature=1.0, seed=seed)
        [first] = natively(runner, [sequence(0, neutral)])
        # What was drawn is already in the output, so that a penalty meets it again.
        output = (first.token_id, 7)
        [plain] = natively(runner, [sequence(0, neutral, output=output)])
        changed = neutral if name == "bad_words" else neutral.with_changes(**{name: CHANGES[name]})
        bad_words = ((plain.token_id,),) if name == "bad_words" else ()
        seq = sequence(0, changed, output=output, bad_word_ids=bad_words, eos_ids=frozenset({plain.token_id}))
        before.append(plain)
        after += natively(runner, [seq])
        expected += sampler.sample(logits_of(runner, [seq]), [seq])
    for ours, theirs in zip(after, expected, strict=True):
        assert_same(ours, theirs)
    assert before != after


def test_choices_that_share_a_row_of_logits_are_changed_once(runner: NativeRunner) -> None:
    params = SamplingParams(n=3, temperature=1.0, logit_bias={4: 3.0}, repetition_penalty=1.7, logprobs=2)
    seqs = [sequence(0, params, choice=choice) for choice in range(3)]
    for number, seq in enumerate(seqs):
        seq.id = number
    output = runner.run(Batch((Chunk(seqs[0], 0, 3, samples=tuple(seqs)),)))
    logits = logits_of(runner, seqs[:1]).expand(3, -1)
    for seq, theirs in zip(seqs, sampler.sample(logits, seqs), strict=True):
        assert_same(output.sampled[seq.id], theirs)


def test_a_row_with_every_token_banned_fails_alone(runner: NativeRunner) -> None:
    banned = tuple((token,) for token in range(VOCAB))
    seqs = [
        sequence(0, SamplingParams(temperature=0, logprobs=1)),
        sequence(1, SamplingParams(temperature=1.0, logprobs=1), bad_word_ids=banned),
        sequence(2, SamplingParams(temperature=0, presence_penalty=1.0), output=(5,)),
    ]
    good, failed, also = natively(runner, seqs)
    assert failed.error is not None
    assert "Every token is banned" in failed.error
    assert good.error is None
    assert also.error is None


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5, "logit_bias": {9: 4.0}}])
def test_a_masked_draw_is_the_free_draw_from_logits_without_the_banned_tokens(
    settings: dict[str, Any], runner: NativeRunner
) -> None:
    """With the model's own log-probabilities: a mask changes what is drawn, not how likely the model found it."""
    drawn = set()
    for seed in range(30):
        params = SamplingParams(**{"temperature": 1.0, "seed": seed, "logprobs": 2, **settings})
        allowed = {(seed * 7 + step) % VOCAB for step in (0, 3, 4, 31)} | {9, VOCAB - 1}
        seq = sequence(0, params)
        logits = logits_of(runner, [seq])
        seq.mask = mask_of(allowed)
        [ours] = natively(runner, [seq])
        banned = logits.clone()
        banned[0, [token for token in range(VOCAB) if token not in allowed]] = -math.inf
        seq.mask = None
        [theirs] = sampler.sample(banned, [seq])
        [own] = position_logprobs(logits, [ours.token_id], 2)
        assert ours.token_id == theirs.token_id
        assert ours.logprob is not None
        assert_alike(ours.logprob, own)
        drawn.add(ours.token_id)
    assert len(drawn) > 3


def test_a_row_whose_mask_and_bans_leave_nothing_fails_alone(runner: NativeRunner) -> None:
    seqs = [sequence(id, SamplingParams(temperature=1.0), bad_word_ids=((4,), (5,))) for id in range(2)]
    seqs[1].mask = mask_of({4, 5})
    good, failed = natively(runner, seqs)
    assert good.error is None
    assert failed.error is not None
    assert "Every token is banned" in failed.error
    assert sampler.sample(logits_of(runner, seqs), seqs)[1].error == failed.error


@pytest.mark.full
@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.one_of(st.integers(-8, 8).map(lambda n: n / 4), st.floats(-40, 40, width=32)), min_size=1),
    data=st.data(),
)
def test_logprob_rank_and_top_are_torchs(logits: list[float], data: st.DataObject) -> None:
    target, top = data.draw(st.integers(0, len(logits) - 1)), data.draw(st.integers(0, 20))
    [theirs] = position_logprobs(torch.tensor([logits]), [target], top)
    assert_alike(token_logprob(np.array(logits, np.float32), target, top), theirs)


@pytest.mark.parametrize("vocab", [2560, 2600, 5000])
def test_the_most_likely_of_many_that_tie_are_torchs(vocab: int) -> None:
    """Rows long enough that only the best of each block are looked at first."""
    logits = torch.randn(20, vocab, generator=torch.Generator().manual_seed(vocab)).mul(2).round()
    logits[0] = 1.0
    logits[1, -1] = 100.0
    for row, top in enumerate((1, 2, 5, 19, 20) * 4):
        [theirs] = position_logprobs(logits[row : row + 1], [vocab - 1], top)
        assert_alike(token_logprob(logits[row].numpy(), vocab - 1, top), theirs)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_give_a_non_finite_logprob(bad: float) -> None:
    row = np.array([0.5, bad, 1.0, -2.0], np.float32)
    assert math.isnan(token_logprob(row, 0, 3).logprob) or math.isinf(token_logprob(row, 0, 3).logprob)


def test_banned_tokens_have_no_probability() -> None:
    row = np.array([0.5, -math.inf, 1.0], np.float32)
    found = token_logprob(row, 1, 3)
    assert found.logprob == -math.inf
    assert [token for token, _ in found.top] == [2, 0, 1]


def test_rows_of_a_real_vocabulary_have_the_same_scores_wherever_they_lie(tmp_path: Path) -> None:
    logits = np.random.default_rng(0).standard_normal((5, 50257)).astype(np.float32) * 4
    wide = np.zeros((5, 50432), np.float32)
    wide[:, :50257] = logits
    for row in range(5):
        assert token_logprob(wide[row, :50257], 7, 20) == token_logprob(logits[row].copy(), 7, 20)
