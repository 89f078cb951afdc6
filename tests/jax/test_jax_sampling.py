"""The JAX sampler draws what the torch sampler draws: on any number of ranks, without 64-bit numbers."""

from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest
import torch
from jax_models import EVERY_DEGREE
from sampler_oracle import make_seq

from ostro.engine import sequence
from ostro.models.cut import BLOCK
from ostro.runner.honoured import check_honoured
from ostro.runner.jax.mesh import make_mesh
from ostro.runner.jax.programs import Programs, Recipe
from ostro.runner.jax.runner import DRAWN, draw_settings
from ostro.runner.jax.sampling import Drawn, draw, exponentials
from ostro.runner.jax.weights import BY_COLUMNS, COPIED
from ostro.runner.random_stream import exponentials as torch_exponentials
from ostro.runner.random_stream import stream_key
from ostro.runner.sampler import sample
from ostro.sampling_params import SamplingParams

VOCAB, ROWS = 2000, 500
Floats = npt.NDArray[np.float32]


@cache
def compiled(tp: int, *, truncates: bool) -> Callable[..., Drawn]:
    programs, width = Programs(make_mesh(tp)), padded_vocab(tp)
    shapes = [((ROWS, width), np.float32), ((ROWS,), np.int32), ((4, ROWS), np.int32), ((3, ROWS), np.float32)]
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    recipe = Recipe(
        key=("draw",),
        function=partial(draw, truncates=truncates),
        arguments=tuple(arguments),
        specs=(BY_COLUMNS, COPIED, COPIED, COPIED),
        results=Drawn(COPIED, COPIED, COPIED),
    )
    programs.add(recipe)
    return programs[("draw",)]


def padded_vocab(tp: int) -> int:
    return -(-VOCAB // (BLOCK * tp)) * BLOCK * tp


def drawn(logits: Floats, seqs: Sequence[sequence.Sequence], tp: int) -> Drawn:
    """Draws from row i for sequence i."""
    scores = np.full((ROWS, padded_vocab(tp)), -np.inf, np.float32)
    scores[:, :VOCAB] = logits
    integers, floats, truncates = draw_settings(list(enumerate(seqs)), ROWS, VOCAB)
    before = np.zeros(ROWS, np.int32)
    return Drawn(*map(np.asarray, compiled(tp, truncates=truncates)(scores, before, integers, floats)))


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


@pytest.mark.parametrize("tp", EVERY_DEGREE)
def test_equal_scores_are_kept_and_chosen_by_lowest_id_across_ranks(tp: int) -> None:
    logits = np.zeros((ROWS, VOCAB), np.float32)
    greedy = [make_seq(temperature=0.0)] * ROWS
    assert set(drawn(logits, greedy, tp).tokens.tolist()) == {0}
    few = [make_seq(seed=seed, top_k=3) for seed in range(ROWS)]
    assert set(drawn(logits, few, tp).tokens.tolist()) == {0, 1, 2}
    share = [make_seq(seed=seed, top_p=4 / VOCAB) for seed in range(ROWS)]
    assert set(drawn(logits, share, tp).tokens.tolist()) <= {0, 1, 2, 3, 4}


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_row_that_is_not_finite_shows_in_its_peak_and_spoils_no_other(tp: int, poison: float) -> None:
    logits, seqs = random_logits(3), [plain(number) for number in range(ROWS)]
    clean = drawn(logits, seqs, tp).tokens
    logits[7, VOCAB - 1] = poison
    _, tokens, peaks = drawn(logits, seqs, tp)
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
    before, after = (draw_settings(draws, ROWS, VOCAB) for draws in (plain, other))
    assert any((one != two).any() for one, two in zip(before[:2], after[:2], strict=True))
