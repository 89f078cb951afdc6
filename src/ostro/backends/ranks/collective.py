"""Collectives over processes, by torch.distributed's backends: gloo through the host, NCCL between GPUs.

Used without torch's default process group, so that several models of one process can each have their own ranks.
"""

from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from ostro.backends.ranks.messages import Join

# The engine's watchdog limits a step; this limits ranks that wait while another compiles or packs weights.
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

    def connect(self) -> None:
        """Does nothing: making the group connected the ranks."""

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
        """Does nothing: gloo itself notices that a rank is gone."""

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        options = dist.AllreduceOptions()
        options.reduceOp = op
        host = x.float().cpu().contiguous()
        self._group.allreduce([host], options).wait()
        return host if host is x else host.to(x)


class NcclCollective:
    """Between GPUs; its operations are queued on the current stream, and may be captured in graphs.

    Torch's watchdog ends the process if an operation that was not captured takes longer than `_TIMEOUT`.
    """

    def __init__(self, group: Any, ranks: int) -> None:
        self._group, self._ranks = group, ranks

    @classmethod
    def join(cls, join: Join, rank: int) -> Self:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return cls(dist.ProcessGroupNCCL(_store(join), rank, join.ranks, options), join.ranks)

    def connect(self) -> None:
        """The first operation, which connects the ranks. It must not happen in a capture, and may fail."""
        self.sum(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()

    def sum(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.SUM)

    def max(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.MAX)

    def gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self._ranks * len(x), x.shape[1])
        _queued(self._group._allgather_base(out, x.contiguous(), _in_order(AllgatherOptions())))
        return out.unflatten(0, (self._ranks, -1)).transpose(0, 1).reshape(len(x), -1)

    def broadcast(self, x: Tensor) -> None:
        _queued(self._group.broadcast([x], _in_order(dist.BroadcastOptions())))

    def abort(self) -> None:
        """Ends operations that wait for a rank that is gone: NCCL would not notice for minutes.

        Returns only once no graph holds an operation of the group any more, or after `_TIMEOUT`.
        """
        self._group.abort()

    def _reduced(self, x: Tensor, op: Any) -> Tensor:
        options = _in_order(dist.AllreduceOptions())
        options.reduceOp = op
        x = x.contiguous()
        _queued(self._group.allreduce([x], options))
        return x


def _in_order(options: Any) -> Any:
    """Options for the current stream instead of NCCL's own, which would take two events per operation."""
    options.asyncOp = False
    return options


def _queued(work: Any) -> None:
    """NCCL returns nothing to wait for if it used the current stream."""
    if work is not None:
        work.wait()


TorchCollective = GlooCollective | NcclCollective


def join_group(join: Join, rank: int) -> TorchCollective:
    """Makes the rank a member of the group. `connect` comes before anything else that the ranks do together."""
    return GlooCollective(join, rank) if join.backend == "gloo" else NcclCollective.join(join, rank)


def _store(join: Join) -> Any:
    store = dist.FileStore(join.store, join.ranks)
    store.set_timeout(_JOIN_TIMEOUT)
    return store
