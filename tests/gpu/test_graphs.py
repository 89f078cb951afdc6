from collections.abc import Hashable

import pytest
import torch

from ostro.backends.cuda.graphs import StepGraphs, ladder


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 1000])
def test_every_batch_has_a_size_and_little_padding(most: int) -> None:
    def step(size: int, kind: Hashable) -> None:
        raise AssertionError("nothing is run")

    graphs = StepGraphs(step, idle=lambda: None, most=most, captured=0)
    for rows in range(1, most + 1):
        size = graphs.size_for(rows)
        assert rows <= size <= most
        assert size - rows <= max(1, rows // 2, 7)


def test_sizes_ascend() -> None:
    assert ladder(300) == sorted(set(ladder(300)))


def test_step_runs_directly_where_nothing_is_captured() -> None:
    ran: list[tuple[int, Hashable]] = []
    graphs: StepGraphs[Hashable] = StepGraphs(
        lambda size, kind: ran.append((size, kind)), idle=lambda: None, most=8, captured=0
    )
    graphs.get(4, "plain")()
    graphs.get(4, "plain")()
    assert ran == [(4, "plain"), (4, "plain")]


def test_batches_beyond_the_largest_captured_one_run_directly_and_smaller_ones_fit_below_it() -> None:
    graphs: StepGraphs[Hashable] = StepGraphs(lambda size, kind: None, idle=lambda: None, most=64, captured=20)
    assert [graphs.size_for(rows) for rows in (16, 17, 20, 21, 64)] == [16, 20, 20, 24, 64]
    assert ladder(64, 1000) == ladder(64)


@pytest.mark.gpu
def test_a_limit_on_graphs_is_kept() -> None:
    calls: list[int] = []
    total = torch.zeros(1, device="cuda")

    def step(size: int, kind: Hashable) -> None:
        calls.append(size)
        total.add_(1)

    graphs = StepGraphs(step, idle=lambda: None, most=64, captured=20)
    captured, direct = graphs.get(20, None), graphs.get(24, None)
    calls.clear()
    total.zero_()
    captured()
    assert calls == []
    direct()
    assert calls == [24]
    assert total.item() == 2
