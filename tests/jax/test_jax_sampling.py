"""The JAX sampler draws what the torch sampler draws: on any number of ranks, without 64-bit numbers."""

from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
import pytest
import torch
from jax_models import EVERY_DEGREE
from sampler_oracle import make_seq

from ostro.backends.jax.draw_inputs import DRAWN, DrawWriter
from ostro.backends.jax.edit_inputs import WORD_BITS, EditInputs, packed_edits
from ostro.backends.jax.logprobs import Logprobs, logprobs
from ostro.backends.jax.mesh import make_mesh
from ostro.backends.jax.programs import Programs, Recipe
from ostro.backends.jax.sampling import NUM_SETTINGS, DrawKind, Drawn, draw, exponentials
from ostro.backends.jax.weights import BY_COLUMNS, COPIED
from ostro.backends.sampling.arrays import token_logprob
from ostro.backends.sampling.edits import check_honoured
from ostro.backends.sampling.random_stream import exponentials as torch_exponentials
from ostro.backends.sampling.random_stream import stream_key
from ostro.backends.sampling.sampler import sample
from ostro.engine import sequence
from ostro.models.cut import BLOCK
from ostro.sampling_params import SamplingParams

VOCAB, ROWS = 2000, 500
Floats = npt.NDArray[np.float32]


class Results(NamedTuple):
    tokens: npt.NDArray[np.int32]
    peaks: Floats


@cache
def compiled(tp: int, kind: DrawKind) -> Callable[..., Drawn]:
    programs, width = Programs(make_mesh(tp)), padded_vocab(tp)
    shapes = [((ROWS, width), np.float32), ((ROWS,), np.int32), ((NUM_SETTINGS, ROWS), np.int32)]
    specs = [BY_COLUMNS, COPIED, COPIED]
    if kind is DrawKind.EDITED:
        integers, floats = EditInputs.sizes(ROWS)
        shapes += [((ROWS, width // WORD_BITS), np.uint32), ((integers,), np.int32), ((floats,), np.float32)]
        specs += [BY_COLUMNS, COPIED, COPIED]
    recipe = Recipe(
        key=("draw",),
        function=partial(draw, kind=kind),
        arguments=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes),
        specs=tuple(specs),
        results=Drawn(COPIED, COPIED),
    )
    programs.add(recipe)
    return programs[("draw",)]


def padded_vocab(tp: int) -> int:
    return -(-VOCAB // (BLOCK * tp)) * BLOCK * tp


def drawn(
    logits: Floats,
    seqs: Sequence[sequence.Sequence],
    tp: int,
    *,
    edited: bool = False,
    last: npt.NDArray[np.int32] | None = None,
) -> Results:
    """Draws from row i for sequence i. `last` holds the tokens that are pending in rows."""
    scores = padded(logits, tp)
    packed, kind = DrawWriter(VOCAB).write(list(enumerate(seqs)), ROWS)
    before, edits = np.zeros(ROWS, np.int32) if last is None else last, tuple[Any, ...]()
    if edited:
        words = padded_vocab(tp) // WORD_BITS
        changes = packed_edits(seqs, lambda id: -1 - id, rows=ROWS, vocab=VOCAB, words=words)
        assert changes is not None
        kind, edits = DrawKind.EDITED, changes
    return Results(*Drawn(*compiled(tp, kind)(scores, before, packed, *edits)).on_host())


def padded(logits: Floats, tp: int) -> Floats:
    scores = np.full((ROWS, padded_vocab(tp)), -np.inf, np.float32)
    scores[:, :VOCAB] = logits
    return scores


def random_logits(seed: int) -> Floats:
    """Some rows are rounded, so that many scores are equal; some are nearly flat."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 1, (ROWS, VOCAB)) * random.choice([0.2, 1.5, 4.0], (ROWS, 1))
    rounded = random.random((ROWS, 1)) < 0.2
    drawn: Floats = np.where(rounded, np.round(logits), logits).astype(np.float32)
    return drawn


def plain(number: int) -> sequence.Sequence:
    """Greedy, or a temperature with or without min-p."""
    random = np.random.default_rng(number)
    temperature = float(random.choice([0.0, 0.3, 0.8, 1.0, 1.7]))
    return make_seq(seed=number, temperature=temperature, min_p=float(random.choice([0.0, 0.05])))


def truncating(number: int) -> sequence.Sequence:
    """Top-k, top-p, or both, perhaps with min-p."""
    random = np.random.default_rng(number)
    return make_seq(
        seed=number,
        temperature=float(random.choice([0.3, 0.8, 1.0, 1.7])),
        top_k=int(random.choice([0, 1, 5, 40, 700])),
        top_p=float(random.choice([0.1, 0.5, 0.9, 0.95, 0.999, 1.0])),
        min_p=float(random.choice([0.0, 0.0, 0.02])),
    )


def changing(number: int) -> sequence.Sequence:
    """All changes of scores that are made on the device, several of them in most rows."""
    random = np.random.default_rng(number)

    def ids(count: int, below: int = VOCAB) -> tuple[int, ...]:
        return tuple(random.integers(0, below, count).tolist())

    def maybe(*values: float) -> float:
        return float(random.choice([0.0, *values]))

    # Few tokens, so that outputs repeat themselves, and those that have high scores are among them.
    prompt, output = ids(int(random.integers(1, 40))), ids(int(random.integers(0, 30)), 20)
    return make_seq(
        prompt=prompt,
        output=output,
        seed=number,
        temperature=maybe(0.7, 1.0),
        top_p=float(random.choice([1.0, 0.9])),
        repetition_penalty=float(random.choice([1.0, 0.8, 1.3])),
        presence_penalty=maybe(0.5, -0.3),
        frequency_penalty=maybe(0.25, 0.1),
        logit_bias={token: float(random.normal(0, 3)) for token in ids(int(maybe(5)))},
        bad_word_ids=((int(random.integers(0, 20)),), (*output[-1:], 3)),
        min_tokens=int(maybe(10, 35)),
        stop_token_ids=(1, 2),
        allowed=None if random.random() < 0.5 else {1, *ids(300)},
    )


@pytest.mark.full
@pytest.mark.parametrize("tp", EVERY_DEGREE)
def test_changes_of_scores_on_the_device_give_the_torch_samplers_tokens(tp: int) -> None:
    logits = random_logits(900 + tp)
    seqs = [changing(number) for number in range(ROWS * tp, ROWS * (tp + 1))]
    expected = [token.token_id for token in sample(torch.from_numpy(logits.copy()), seqs)]
    assert drawn(logits, seqs, tp, edited=True).tokens.tolist() == expected
    assert (drawn(logits, seqs, tp).tokens != expected).mean() > 0.3


@pytest.mark.full
@pytest.mark.parametrize("tp", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_penalties_count_the_token_that_is_still_on_the_device(tp: int) -> None:
    """It is new to some rows, and others have it in their prompt, in their output, or in both."""
    random, logits = np.random.default_rng(4), random_logits(77)
    last = np.array([random.integers(0, 40) for _ in range(ROWS)], np.int32)
    pending, known = [], []
    for number in range(ROWS):
        settings: dict[str, Any] = {
            "prompt": tuple(random.integers(0, 40, 8).tolist()),
            "output": tuple(random.integers(0, 40, 12).tolist()),
            "seed": number,
            "temperature": float(number % 2),
            "repetition_penalty": float(random.choice([1.0, 1.6])),
            "presence_penalty": float(random.choice([0.0, 1.5])),
            "frequency_penalty": float(random.choice([0.0, 0.9])),
        }
        pending.append(make_seq(**settings))
        pending[-1].id = number
        pending[-1].expect()
        known.append(make_seq(**{**settings, "output": (*settings["output"], int(last[number]))}))
    # The pending tokens are likely ones.
    logits[:, :40] += 4
    expected = [token.token_id for token in sample(torch.from_numpy(logits.copy()), known)]
    assert drawn(logits, pending, tp, edited=True, last=last).tokens.tolist() == expected


def test_what_a_program_cannot_change_is_left_to_the_host() -> None:
    def is_packed(*seqs: sequence.Sequence) -> bool:
        return packed_edits(seqs, int, rows=8, vocab=VOCAB, words=64) is not None

    assert is_packed(make_seq(repetition_penalty=1.2, prompt=tuple(range(VOCAB))))
    assert not is_packed(*[make_seq(repetition_penalty=1.2, prompt=tuple(range(VOCAB)))] * 3)
    assert not is_packed(make_seq(top_n_sigma=1.0))


@pytest.mark.full
@pytest.mark.parametrize("tp", EVERY_DEGREE)
def test_log_probabilities_are_those_of_numpy(tp: int) -> None:
    """Equal scores are listed by lower id, across ranks too."""
    programs = Programs(make_mesh(tp))
    shapes = [((ROWS, padded_vocab(tp)), np.float32), ((ROWS,), np.int32), ((2, ROWS), np.int32)]
    recipe = Recipe(
        key=("logprobs",),
        function=partial(logprobs, top=20),
        arguments=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes),
        specs=(BY_COLUMNS, COPIED, COPIED),
        results=COPIED,
    )
    programs.add(recipe)
    random, logits = np.random.default_rng(tp), random_logits(tp)
    rows, tokens = random.integers(0, ROWS, ROWS, np.int32), random.integers(0, VOCAB, ROWS, np.int32)
    found = Logprobs.of(programs[("logprobs",)](padded(logits, tp), rows, np.stack((tokens, rows))))
    for number, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        entry, expected = found.entry(number, number % 21), token_logprob(logits[row], int(token), number % 21)
        assert (entry.token_id, entry.rank) == (expected.token_id, expected.rank)
        assert [id for id, _ in entry.top] == [id for id, _ in expected.top]
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-5)
        assert [value for _, value in entry.top] == pytest.approx([value for _, value in expected.top], abs=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("kind", [plain, truncating])
@pytest.mark.parametrize("tp", EVERY_DEGREE)
def test_the_tokens_of_thousands_of_rows_are_the_torch_samplers(
    kind: Callable[[int], sequence.Sequence], tp: int
) -> None:
    """Ten thousand rows over all parameters, and not one difference."""
    for batch in range({1: 6, 2: 1, 4: 1, 8: 2}[tp]):
        logits = random_logits(100 * tp + batch)
        seqs = [kind(number) for number in range(ROWS * batch, ROWS * (batch + 1))]
        expected = [token.token_id for token in sample(torch.from_numpy(logits), seqs)]
        assert drawn(logits, seqs, tp).tokens.tolist() == expected


def test_random_numbers_are_those_of_torch_to_float32() -> None:
    keys = [stream_key(seed, 0, 1) for seed in range(200)]
    words = np.array(keys, np.int64).view(np.uint64)
    halves = ((words >> np.uint64(32)).astype(np.uint32), words.astype(np.uint32))
    found = np.asarray(jax.jit(exponentials)(halves, np.arange(3000, dtype=np.uint32)))
    expected = torch_exponentials(torch.tensor(keys), 3000).numpy()
    np.testing.assert_allclose(found, expected, rtol=3e-7)


@pytest.mark.full
@pytest.mark.parametrize("tp", EVERY_DEGREE)
def test_equal_scores_are_kept_and_chosen_by_lowest_id_across_ranks(tp: int) -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    greedy = [make_seq(temperature=0.0)] * ROWS
    assert set(drawn(logits, greedy, tp).tokens.tolist()) == {0}
    few = [make_seq(seed=seed, top_k=3) for seed in range(ROWS)]
    assert set(drawn(logits, few, tp).tokens.tolist()) == {0, 1, 2}
    share = [make_seq(seed=seed, top_p=4 / VOCAB) for seed in range(ROWS)]
    assert set(drawn(logits, share, tp).tokens.tolist()) <= {0, 1, 2, 3, 4}


@pytest.mark.full
@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.full), 8])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_row_that_is_not_finite_shows_in_its_peak_and_spoils_no_other(tp: int, poison: float) -> None:
    logits, seqs = random_logits(3), [plain(number) for number in range(ROWS)]
    clean = drawn(logits, seqs, tp).tokens
    logits[7, VOCAB - 1] = poison
    tokens, peaks = drawn(logits, seqs, tp)
    others = np.arange(ROWS) != 7
    assert not np.isfinite(peaks[7])
    assert np.isfinite(peaks[others]).all()
    assert (tokens[others] == clean[others]).all()


def test_a_field_that_the_sampler_would_ignore_is_refused_by_name() -> None:
    """The check runs when the runner is imported: nobody can add a parameter and forget about JAX."""
    check_honoured("the JAX runner", DRAWN)
    wider = make_dataclass("Wider", [("tilt", float, 0.0)], bases=(SamplingParams,), frozen=True, kw_only=True)
    with pytest.raises(AssertionError, match="the JAX runner would ignore tilt"):
        check_honoured("the JAX runner", DRAWN, wider)


@pytest.mark.parametrize("name", sorted(DRAWN))
def test_every_field_of_the_draw_reaches_the_program(name: str) -> None:
    changed: dict[str, Any] = {"temperature": 0.3, "top_p": 0.5, "top_k": 2, "min_p": 0.4, "seed": 9}
    plain, other = ([(0, make_seq(**settings))] for settings in ({}, {name: changed[name]}))
    writer = DrawWriter(VOCAB)
    before, after = (writer.write(draws, ROWS)[0] for draws in (plain, other))
    assert (before != after).any()
