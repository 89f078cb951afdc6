"""NCCL's collective, whose calls gloo's groups take too: what it asks of a group, and what it makes of the results."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

from ostro.backends.ranks.collective import NcclCollective

RANKS = 3
dist: Any = torch.distributed


@pytest.fixture(scope="module")
def collectives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NcclCollective]]:
    store = tmp_path_factory.mktemp("store") / "store"
    with ThreadPoolExecutor(RANKS) as threads:
        yield list(threads.map(lambda rank: NcclCollective(gloo(store, rank), RANKS), range(RANKS)))


def gloo(store: Path, rank: int) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(dist.FileStore(str(store), RANKS), rank, RANKS, options)


def given(rank: int) -> Tensor:
    return torch.arange(6, dtype=torch.float32).view(2, 3) * (1 - 2 * (rank % 2)) + 10 * rank


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("sum", torch.stack([given(rank) for rank in range(RANKS)]).sum(0)),
        ("max", torch.stack([given(rank) for rank in range(RANKS)]).amax(0)),
        ("gather", torch.cat([given(rank) for rank in range(RANKS)], 1)),
    ],
)
def test_every_rank_gets_the_same(collectives: list[NcclCollective], operation: str, expected: Tensor) -> None:
    with ThreadPoolExecutor(RANKS) as threads:
        found = list(threads.map(lambda rank: getattr(collectives[rank], operation)(given(rank)), range(RANKS)))
    assert all(torch.equal(each, expected) for each in found)


def test_part_of_a_tensor_is_gathered_in_order(collectives: list[NcclCollective]) -> None:
    with ThreadPoolExecutor(RANKS) as threads:
        found = list(threads.map(lambda rank: collectives[rank].gather(given(rank).T[:2]), range(RANKS)))
    assert all(torch.equal(each, torch.cat([given(rank).T[:2] for rank in range(RANKS)], 1)) for each in found)


def test_the_first_ranks_tokens_go_to_all(collectives: list[NcclCollective]) -> None:
    tokens = [torch.full((5,), rank, dtype=torch.int32) for rank in range(RANKS)]
    with ThreadPoolExecutor(RANKS) as threads:
        list(threads.map(lambda rank: collectives[rank].broadcast(tokens[rank][1:4]), range(RANKS)))
    assert [each.tolist() for each in tokens] == [[0] * 5, [1, 0, 0, 0, 1], [2, 0, 0, 0, 2]]
