"""Cost tables: what is read, what is refused, and what the measured points make of them."""

import random
from typing import Any

import msgspec
import pytest
from simulated import cost_table

from ostro.backends.fake import FakeRunner
from ostro.errors import BadRequest
from ostro.sampling_params import SamplingParams
from ostro.simulation.costs import StepTimes, Work, at, read_table, step_seconds, with_shape
from ostro.simulation.measuring import Point, fit, measure_steps


def _changed(place: str, value: object) -> bytes:
    told = msgspec.to_builtins(cost_table())
    inner: Any = told
    *path, last = place.split(".")
    for name in path:
        inner = inner[name]
    inner[last] = value
    return msgspec.json.encode(told)


def test_a_table_is_read_as_it_was_written() -> None:
    assert read_table(msgspec.json.encode(cost_table()), "t.json") == cost_table()


def test_a_table_from_before_copies_were_measured_is_read() -> None:
    told = msgspec.to_builtins(cost_table())
    del told["copies"]
    assert read_table(msgspec.json.encode(told), "t.json").copies is None


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ("format", "ostro step costs 9", "format"),
        ("engine.page_size", 0, "engine.page_size"),
        ("engine.num_pages", 1 << 40, "engine.num_pages"),
        ("engine.page_size", "4", "engine.page_size"),
        ("engine.steps_ahead", -1, "engine.steps_ahead"),
        ("step.decode", [], "step.decode"),
        ("step.decode", [[2, 0.1], [1, 0.2]], "step.decode"),
        ("step.mixed", [[1, -0.1]], "step.mixed at 1"),
        ("step.mixed", [[1, 0.0]], "step.mixed takes no time"),
        ("step.sampled", -1.0, "step.sampled"),
        ("endpoints.chat.request", -1.0, "endpoints.chat.request"),
        ("endpoints.chat.tokens_before", 1 << 40, "endpoints.chat"),
        ("endpoints.chat.tokens_per_word", 0.0, "endpoints.chat.tokens_per_word"),
        ("copies.page_bytes", 0, "copies.page_bytes must be from 1"),
        ("copies.host.out", -1.0, "copies.host.out"),
        ("copies.host.staged", 0, "copies.host.staged"),
        ("copies.disk.waiting", 1 << 40, "copies.disk.waiting"),
        ("copies.disk.surprise", 1, "surprise"),
        ("surprise", 1, "surprise"),
    ],
)
def test_malformed_table_is_refused_by_name(place: str, value: object, named: str) -> None:
    with pytest.raises(BadRequest, match=named) as caught:
        read_table(_changed(place, value), "t.json")
    assert caught.value.message.startswith("t.json")


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_invalid_json_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest, match=r"t\.json is not a valid cost table"):
        read_table(data, "t.json")


def test_curves_are_linear_between_knots_and_beyond_them() -> None:
    knots = [(2, 1.0), (4, 3.0), (8, 4.0)]
    assert [at(knots, tokens) for tokens in (1, 2, 3, 4, 6, 8, 12)] == [1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 5.0]
    assert at([(4, 3.0)], 100) == 3.0
    assert at([(4, 3.0), (8, 2.0)], 100) == 2.0


def test_other_capacities_leave_the_costs() -> None:
    changed = with_shape(cost_table(), {"num_pages": 7})
    assert (changed.engine.num_pages, changed.step) == (7, cost_table().step)


def test_a_fit_finds_the_table_that_made_the_points() -> None:
    true = StepTimes(
        decode=[(1, 0.010), (4, 0.025), (16, 0.060)],
        mixed=[(16, 0.050), (64, 0.150), (256, 0.600)],
        sampled=0.0005,
        decode_context=4e-6,
        prompt_context=3e-6,
    )
    works = [Work(rows=rows, sampled=rows, decode_context=rows * 20) for rows in (1, 4, 16)]
    works += [Work(rows=4, sampled=4, decode_context=4 * 500)]
    works += [Work(prompt_tokens=each, sampled=1, prompt_context=each * each // 2) for each in (16, 64, 256)]
    works += [Work(prompt_tokens=64, sampled=1, prompt_context=64 * 512 + 64 * 32)]
    works += [Work(prompt_tokens=48, rows=16, sampled=17, decode_context=16 * 20, prompt_context=48 * 24)]
    seconds = step_seconds(msgspec.structs.replace(cost_table(), step=true))
    found = fit(Point(work, seconds(work)) for work in works)
    for name in ("sampled", "decode_context", "prompt_context"):
        assert getattr(found, name) == pytest.approx(getattr(true, name))
    for name in ("decode", "mixed"):
        for mine, right in zip(getattr(found, name), getattr(true, name), strict=True):
            assert mine == pytest.approx(right)


def test_noise_never_makes_a_table_that_is_refused() -> None:
    dice = random.Random(1)
    works = [Work(rows=rows, sampled=rows, decode_context=rows * context) for rows in (1, 2) for context in (20, 500)]
    works += [Work(prompt_tokens=each, sampled=1, prompt_context=each * each // 2) for each in (16, 32)]
    works += [Work(prompt_tokens=each, sampled=1, prompt_context=each * 512) for each in (16, 32)]
    works += [Work(prompt_tokens=16, rows=16, sampled=17, decode_context=320)]
    for _ in range(500):
        step = fit(Point(work, 10 ** dice.uniform(-4, 0)) for work in works)
        table = msgspec.structs.replace(cost_table(), step=step)
        assert read_table(msgspec.json.encode(table), "t.json") == table


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_an_engine_is_measured_through_all_its_kinds_of_steps(steps_ahead: int) -> None:
    runner = FakeRunner(
        num_pages=2048, max_seq_len=4096, max_batch_tokens=128, max_batch_seqs=8, steps_ahead=steps_ahead, strict=False
    )
    told: list[str] = []
    found = measure_steps(runner, SamplingParams(max_tokens=None), rounds=1, watch=told.append)
    assert [rows for rows, _ in found.decode] == [1, 2, 4, 8]
    assert [tokens for tokens, _ in found.mixed] == [16, 32, 64, 128]
    assert all(seconds > 0 for _, seconds in found.decode)
    assert any("beside 7 rows" in each for each in told)
    assert any("512 cached" in each for each in told)


def test_a_model_without_a_kv_cache_cannot_be_measured() -> None:
    with pytest.raises(BadRequest, match="KV cache"):
        measure_steps(FakeRunner(keeps_kv=False), SamplingParams(max_tokens=None))
