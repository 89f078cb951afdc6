"""Collectives over processes, by torch.distributed's backends: gloo through the host, NCCL between GPUs.

Used without torch's default process group, so that several models of one process can each have their own ranks.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ostro.runner.tp.messages import Join

# A step's own limit is the engine's watchdog; this one is for ranks that wait while another compiles or packs weights.
_TIMEOUT = timedelta(minutes=10)
_JOIN_TIMEOUT = timedelta(minutes=2)

# torch's annotations leave out most of what is used here.
dist: Any = torch.distributed


class GlooCollective:
    """For CPUs, and for tests with several ranks on one GPU: GPU tensors go through the host, where they are summed in
    float32.
    """

    def __init__(self, join: Join, rank: int) -> None:
        options = dist.ProcessGroupGloo._Options()
        # Loopback, whatever the host's name resolves to: all ranks are on this machine.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        self._group = dist.ProcessGroupGloo(_store(join), rank, join.ranks, options)
        self._ranks = join.ranks

    def sum(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.MAX)

    def gather(self, x: Tensor) -> Tensor:
        own = x.cpu().contiguous()
        parts = [torch.empty_like(own) for _ in range(self._ranks)]
        self._group.allgather([parts], [own]).wait()
        return torch.cat(parts, 1).to(x.device)

    def broadcast(self, x: Tensor) -> None:
        host = x.cpu()
        self._group.broadcast([host], dist.BroadcastOptions()).wait()
        x.copy_(host)

    def abort(self) -> None:
        """Nothing: gloo notices by itself that a rank is gone."""

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        host = x.float().cpu().contiguous()
        self._group.allreduce([host], options).wait()
        return host if host is x else host.to(x)


class NcclCollective:
    """Between GPUs; its operations are queued on the current stream, and may be captured in graphs."""

    def __init__(self, join: Join, rank: int) -> None:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        self._group = dist.ProcessGroupNCCL(_store(join), rank, join.ranks, options)
        self._group._set_sequence_number_for_group()
        self._ranks = join.ranks
        # The first operation connects the ranks, which must not happen in a capture.
        self.sum(torch.zeros(1, device="cuda"))

    def sum(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.MAX)

    def gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self._ranks, *x.shape)
        self._group._allgather_base(out, x.contiguous(), dist.AllgatherOptions()).wait()
        return out.transpose(0, 1).reshape(len(x), -1)

    def broadcast(self, x: Tensor) -> None:
        self._group.broadcast([x], dist.BroadcastOptions()).wait()

    def abort(self) -> None:
        """Ends operations that wait for a rank that is gone: NCCL would not notice for minutes."""
        self._group.abort()

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        x = x.contiguous()
        self._group.allreduce([x], options).wait()
        return x


TorchCollective = GlooCollective | NcclCollective


def join_group(join: Join, rank: int) -> TorchCollective:
    """Waits for the other ranks."""
    return GlooCollective(join, rank) if join.backend == "gloo" else NcclCollective(join, rank)


def _store(join: Join) -> Any:
    store = dist.FileStore(join.store, join.ranks)
    store.set_timeout(_JOIN_TIMEOUT)
    return store
