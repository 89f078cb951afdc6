"""The floor that GPU benchmarks are measured against: its arithmetic on sizes that can be computed by hand."""

from collections import Counter
from dataclasses import replace

import pytest
from every_family import TINY

from floor import H200, Rates, Weights, floor_seconds, hit, steps
from ostro.models.architecture import Architecture
from ostro.models.registry import describe
from workloads import Work

NO_LIMIT = 1e30
SLOW_MEMORY = Rates(bytes_per_second=1.0, flops_per_second=NO_LIMIT, fp8_flops_per_second=NO_LIMIT)
SLOW_MATHS = Rates(bytes_per_second=NO_LIMIT, flops_per_second=1.0, fp8_flops_per_second=2.0)

# The tiny Llama: 2 layers, hidden size 16, 4 heads of 4 numbers, 2 of them for keys, inner size 24, 32 tokens.
LAYERS = 2 * (16 * (16 + 8 + 8) + 16 * 16 + 3 * 16 * 24)
HEAD = 16 * 32
KEY_BYTES = 2 * 2 * 2 * 4 * 2
"""Bytes of one token's keys and values in both layers, 2 per number."""


def architecture(name: str = "llama", **changes: object) -> Architecture:
    described = describe({**TINY[name], **changes})
    assert isinstance(described, Architecture)
    return described


def test_first_step_computes_prompts_and_each_further_one_continues_those_that_are_not_finished() -> None:
    work = [Work([1, 2, 3], 1), Work([4, 5], 3)]
    prompts, second, third = steps(work, {None})
    assert (prompts.tokens, prompts.sampled, prompts.read) == (5, 2, Counter())
    assert prompts.attended == {None: (1 + 2 + 3) + (1 + 2)}
    assert [(each.tokens, each.sampled) for each in (second, third)] == [(1, 1), (1, 1)]
    assert [each.read[None] for each in (second, third)] == [3, 4]
    assert [each.attended[None] for each in (second, third)] == [3, 4]


def test_a_shared_beginning_is_computed_once_and_read_once_a_step() -> None:
    work = [Work([1, 2, 3, 4, end], 2) for end in (7, 8, 9)]
    prompts, second = steps(work, {None})
    assert prompts.tokens == 4 + 3
    # The shared tokens attend once, and each own one to all five.
    assert prompts.attended == {None: (1 + 2 + 3 + 4) + 3 * 5}
    assert second.read == {None: 4 + 3 * 2}
    assert second.attended == {None: 3 * 6}


def test_equal_prompts_each_compute_their_last_token() -> None:
    prompts, _ = steps([Work([1, 2, 3], 2)] * 4, {None})
    assert prompts.tokens == 2 + 4


def test_windows_bound_what_is_read_and_attended_to() -> None:
    work = [Work([1, 2, 3, 4, 5, 6], 3)]
    prompts, second, third = steps(work, {4, None})
    assert prompts.attended == {4: 1 + 2 + 3 + 4 + 4 + 4, None: 21}
    assert [each.read for each in (second, third)] == [{4: 4, None: 7}, {4: 4, None: 8}]


def test_shared_prefix_is_read_only_where_some_window_reaches() -> None:
    work = [Work([1, 2, 3, 4, end], 3) for end in (7, 8)]
    _, second, third = steps(work, {3})
    # Six tokens each, the last three of them at 3, 4 and 5: one shared, two own.
    assert second.read == {3: 1 + 2 * 2}
    assert third.read == {3: 2 * 3}
    assert third.attended == {3: 2 * 3}


def test_memory_bound_steps_read_all_weights_and_each_key() -> None:
    found = floor_seconds(architecture(), [Work([1, 2, 3], 3)], rates=SLOW_MEMORY)
    assert found == pytest.approx(3 * 2 * (LAYERS + HEAD) + (4 + 5) * KEY_BYTES)


def test_compute_bound_steps_multiply_each_row() -> None:
    found = floor_seconds(architecture(), [Work([1, 2, 3], 2)], rates=SLOW_MATHS)
    rows = 2 * LAYERS * (3 + 1) + 2 * HEAD * (1 + 1)
    pairs = 2 * 4 * 16 * ((1 + 2 + 3) + 4)
    assert found == pytest.approx(rows + pairs)


def test_each_step_is_bound_by_what_is_longer_in_it() -> None:
    """The maximum of sums is less than the sum of maxima: with many rows arithmetic rules, with the last few memory."""
    # Reading the weights takes as long as multiplying two rows.
    rates = Rates(bytes_per_second=1.0, flops_per_second=2.0, fp8_flops_per_second=2.0)
    # As large as its weights, without keys to speak of.
    described = architecture(intermediate_size=2000)
    sizes = 2 * (16 * (16 + 8 + 8) + 16 * 16 + 3 * 16 * 2000) + HEAD
    work = [Work([each], output) for each, output in enumerate([2, 2, 2, 2, 3])]
    # One step of five prompts, one of five rows, one of a single row.
    assert floor_seconds(described, work, rates=rates) == pytest.approx(sizes * (5 + 5 + 2), rel=0.01)


def test_weights_and_keys_of_fewer_bits_take_fewer_bytes_but_for_the_head() -> None:
    work = [Work([1, 2, 3], 2)]
    keys = 4 * KEY_BYTES
    for quantize, size in {"none": 2.0, "fp8": 1.0, "int4": 0.53125}.items():
        found = floor_seconds(architecture(), work, rates=SLOW_MEMORY, quantize=quantize)
        assert found == pytest.approx(2 * (size * LAYERS + 2 * HEAD) + keys)
    half = floor_seconds(architecture(), work, rates=SLOW_MEMORY, fp8_kv=True)
    assert half == pytest.approx(2 * 2 * (LAYERS + HEAD) + keys / 2)


def test_plain_mlps_have_two_matrices_and_windows_hold_in_their_layers_only() -> None:
    work = [Work(list(range(20)), 2)]
    narrow = architecture("gemma3", layer_types=["sliding_attention", "full_attention"], sliding_window=8)
    wide = architecture("gemma3", layer_types=["full_attention"] * 2)
    saved = (21 - 8) * KEY_BYTES / 2
    assert floor_seconds(wide, work, rates=SLOW_MEMORY) - floor_seconds(narrow, work, rates=SLOW_MEMORY) == saved
    plain = architecture("gpt2")
    matrices = 2 * (16 * 48 + 16 * 16 + 2 * 16 * 64) + HEAD
    assert floor_seconds(plain, [Work([1], 1)], rates=SLOW_MEMORY) == 2 * matrices


def test_step_of_a_mixture_reads_the_experts_hit_and_multiplies_by_the_experts_chosen() -> None:
    assert [hit(tokens, 128, 8) for tokens in (0, 1)] == [0, 8]
    assert hit(8, 128, 8) == pytest.approx(51.6, abs=0.1)
    assert hit(5, 3, 3) == 3
    described, expert = architecture("qwen3_moe"), 3 * 16 * 8
    shared = LAYERS - 2 * 3 * 16 * 24 + 2 * 16 * 4
    # Two of four experts in each layer; two tokens hit three of them on average.
    read = 2 * (shared + 2 * 3 * expert + HEAD) + 2 * (shared + 2 * 2 * expert + HEAD) + 3 * KEY_BYTES
    assert floor_seconds(described, [Work([1, 2], 2)], rates=SLOW_MEMORY) == pytest.approx(read)
    rows = 2 * (shared + 2 * 2 * expert) * (2 + 1) + 2 * HEAD * 2
    pairs = 2 * 4 * 16 * ((1 + 2) + 3)
    assert floor_seconds(described, [Work([1, 2], 2)], rates=SLOW_MATHS) == pytest.approx(rows + pairs)


def test_each_step_writes_the_states_and_all_but_the_first_read_them() -> None:
    described = architecture("qwen3_5")
    # A matrix per value head in float32, and three inputs of each channel that is convolved, in 16 bits.
    state = 6 * 12 * 48 * 4 + 3 * (2 * 2 * 12 + 6 * 48) * 2
    stateless = replace(described, layers=tuple(layer for layer in described.layers if layer.recurrent is None))
    work = [Work([1, 2], 3), Work([3, 4, 5], 3)]
    [of_all, of_attention] = [floor_seconds(each, work, rates=SLOW_MEMORY) for each in (described, stateless)]
    weights = 3 * 2 * (Weights.of(described).shared - Weights.of(stateless).shared)
    assert of_all - of_attention == weights + 2 * (1 + 2 + 2) * state


@pytest.mark.parametrize("name", [name for name in TINY if name != "hrm_text"])
def test_every_family_has_a_floor(name: str) -> None:
    assert floor_seconds(architecture(name), [Work([1, 2], 2)], rates=H200) > 0
