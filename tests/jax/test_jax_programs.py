"""Every batch within a runner's capacities has a shape that holds it; and programs are compiled by a few threads."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.backends.jax.inputs import StepInputs
from ostro.backends.jax.programs import Key, Recipe, _compilers
from ostro.backends.jax.sampling import DrawKind
from ostro.backends.jax.shapes import Sizes, StepShape, smallest_shape
from ostro.errors import ModelError
from ostro.system.machine import num_cpus

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
    integers = StepInputs.padding(shape, num_slots=40)
    inputs = StepInputs.cut(integers, shape)
    assert len(integers) == shape.num_integers
    assert inputs.slots.tolist() == [40] * 8
    assert inputs.tile_first.tolist() == [8] * 3
    assert inputs.tile_length.tolist() == [0] * 3
    inputs.table[1, 7] = 5
    assert integers[15] == 5


def test_the_table_comes_first_so_that_it_is_aligned_whatever_the_shape() -> None:
    """With tiles of 128 tokens, eight rows put it at an address that a GPU's kernel refused."""
    shape = StepShape(tokens=64, tiles=9, width=128, rows=8, pages=8)
    integers = np.arange(shape.num_integers, dtype=np.int32)
    assert StepInputs.cut(integers, shape).table.ravel().tolist() == list(range(64))


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (("copy",), "copy"),
        (("draw", 8, DrawKind.EDITED), "draw 8, edited"),
        (
            ("generate", StepShape(tokens=8, tiles=8, width=1, rows=8, pages=8, adapted=True), DrawKind.TRUNCATED),
            "generate of 8 tokens in tiles of 1, 8 rows, with adapters, truncated",
        ),
    ],
)
def test_a_programs_name_lists_what_it_is_for(key: Key, name: str) -> None:
    assert Recipe(key=key, function=print, arguments=(), specs=(), results=None).name == name


def test_programs_that_nobody_wants_any_more_are_not_compiled() -> None:
    """If one failed, its error waited for all others, which take minutes."""
    begun, over = [], threading.Event()

    def compile_() -> None:
        begun.append(time.monotonic())
        assert over.wait(60)

    with _compilers() as threads:
        futures = [threads.submit(compile_) for _ in range(100)]
        futures[-1].add_done_callback(lambda _: over.set())
    assert len(begun) <= min(8, num_cpus())
    assert futures[-1].cancelled()
