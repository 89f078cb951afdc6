from collections.abc import Hashable

import pytest

from ostro.runner.gpu.graphs import StepGraphs, ladder


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 1000])
def test_every_batch_has_a_size_and_little_padding(most: int) -> None:
    def step(size: int, kind: Hashable) -> None:
        raise AssertionError("nothing is run")

    graphs = StepGraphs(step, idle=lambda: None, most=most, captures=False)
    for rows in range(1, most + 1):
        size = graphs.size_for(rows)
        assert rows <= size <= most
        assert size - rows <= max(1, rows // 2, 7)


def test_sizes_ascend() -> None:
    assert ladder(300) == sorted(set(ladder(300)))


def test_step_runs_directly_where_nothing_is_captured() -> None:
    ran: list[tuple[int, Hashable]] = []
    graphs = StepGraphs(lambda size, kind: ran.append((size, kind)), idle=lambda: None, most=8, captures=False)
    graphs.get(4, "plain")()
    graphs.get(4, "plain")()
    assert ran == [(4, "plain"), (4, "plain")]
