"""Every batch within a runner's capacities has a shape that holds it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.errors import ModelError
from ostro.runner.jax.inputs import StepInputs
from ostro.runner.jax.shapes import Sizes, StepShape, smallest_shape

CAPACITIES = st.integers(1, 2000)


def tiles_of(lengths: list[int], width: int) -> int:
    return sum(-(-length // width) for length in lengths)


@given(CAPACITIES, CAPACITIES, st.lists(st.integers(1, 300), min_size=1, max_size=60))
def test_every_batch_fits_into_a_shape_and_all_its_tiles_too(tokens: int, rows: int, lengths: list[int]) -> None:
    lengths = lengths[:rows]
    while sum(lengths) > tokens and len(lengths) > 1:
        lengths.pop()
    lengths[0] = min(lengths[0], tokens)
    sizes = Sizes(page_size=16, num_pages=10, max_batch_tokens=tokens, max_batch_seqs=rows)
    fitting = [shape for shape in sizes.shapes(1000) if shape.holds(sum(lengths), len(lengths), longest=max(lengths))]
    assert fitting
    for shape in fitting:
        assert tiles_of(lengths, shape.width) <= shape.tiles
        assert shape.pages * 16 >= 1000
        assert shape.pages % 8 == 0


def test_a_step_beyond_the_capacities_is_an_error() -> None:
    shapes = Sizes(page_size=16, num_pages=10, max_batch_tokens=64, max_batch_seqs=8).shapes(100)
    assert smallest_shape(shapes, tokens=8, sequences=8, longest=1) == shapes[0]
    assert smallest_shape(shapes, tokens=8, sequences=7, longest=2) == shapes[1]
    with pytest.raises(ModelError, match="a step of 65 tokens in 2 sequences"):
        smallest_shape(shapes, tokens=65, sequences=2, longest=64)


def test_shapes_are_few_and_grow() -> None:
    shapes = Sizes(page_size=16, num_pages=10, max_batch_tokens=2048, max_batch_seqs=256).shapes(4096)
    assert [shape.rows for shape in shapes if shape.width == 1] == [8, 32, 128, 256]
    assert [shape.tokens for shape in shapes if shape.width > 1] == [64, 256, 1024, 2048]


def test_padding_is_written_nowhere_and_attends_to_nothing() -> None:
    shape = StepShape(tokens=8, tiles=3, width=4, rows=2, pages=8)
    integers, inputs = StepInputs.padding(shape, num_slots=40)
    assert len(integers) == shape.num_integers
    assert inputs.slots.tolist() == [40] * 8
    assert inputs.tile_first.tolist() == [8] * 3
    assert inputs.tile_length.tolist() == [0] * 3
    inputs.table[1, 7] = 5
    assert integers[-1] == 5
