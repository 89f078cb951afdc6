"""Tiny models of every family that can be divided over up to eight ranks, and ranks that are threads."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from every_family import DIVISIBLE
from native_models import ModelCheckpoint
from torch import Tensor

from ostro.models.architecture import Architecture
from ostro.models.cut import cut
from ostro.models.registry import describe
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model
from ostro.torch_models.loading import load_weights
from ostro.torch_models.shard import Shard

T = TypeVar("T")


FAMILIES = DIVISIBLE


class ThreadGroup:
    """Ranks that are threads of one process. Only one runs at a time: Triton's interpreter has global state."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.turn = threading.Lock()
        self._barrier = threading.Barrier(ranks)
        self._given: list[Tensor] = [torch.empty(0)] * ranks

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """Every rank's tensor. The caller holds the turn, and passes it to the others while it waits."""
        self._given[rank] = x.clone()
        self._wait()
        given = list(self._given)
        self._wait()
        return given

    def run(self, part: Callable[[int], T]) -> list[T]:
        """Each rank's result."""

        def in_turn(rank: int) -> T:
            with self.turn:
                return part(rank)

        with ThreadPoolExecutor(self.ranks) as threads:
            return list(threads.map(in_turn, range(self.ranks)))

    def abort(self) -> None:
        """Releases the other ranks after one has failed."""
        self._barrier.abort()

    def _wait(self) -> None:
        self.turn.release()
        try:
            self._barrier.wait()
        finally:
            self.turn.acquire()


class ThreadCollective:
    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self._group.exchange(self._rank, x)).sum(0)

    def max(self, x: Tensor) -> Tensor:
        return torch.stack(self._group.exchange(self._rank, x)).amax(0)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._group.exchange(self._rank, x), 1)

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._group.exchange(self._rank, x)[0])


def divided(config: Mapping[str, object], model: Model, group: ThreadGroup) -> list[Model]:
    """The ranks' parts of a model, loaded from its tensors."""
    described = describe(config)
    assert isinstance(described, Architecture)
    parts = []
    for rank in range(group.ranks):
        shard = Shard(rank, cut(described, group.ranks), ThreadCollective(group, rank))
        part = build_model(config, dtype=torch.float32, shard=shard)
        load_weights(part, ModelCheckpoint(model, config).tensors())
        parts.append(part)
    return parts
