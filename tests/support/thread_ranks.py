"""The other ranks of a runner as threads, for Triton's interpreter."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue

import torch
from divided_models import ThreadGroup

from ostro.backends.ranks.messages import ToRank, decode_to_rank, encode
from ostro.backends.torch.load import Part


class ThreadRanks:
    """Carry out what the first rank sends, by way of the messages' bytes."""

    can_capture = False
    failure = None

    def __init__(self, group: ThreadGroup, parts: Sequence[Part]) -> None:
        """The parts of all ranks but the first. The first, which calls this, has the turn from now on."""
        self.ranks = group.ranks
        self.longest = 0
        self._group = group
        self._queues = [SimpleQueue[bytes | None]() for _ in parts]
        self._threads = [
            threading.Thread(target=self._work, args=(part, queue))
            for part, queue in zip(parts, self._queues, strict=True)
        ]
        group.turn.acquire()
        for thread in self._threads:
            thread.start()

    def send(self, message: ToRank) -> None:
        data = encode(message)
        self.longest = max(self.longest, len(data))
        for queue in self._queues:
            queue.put(data)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)
        self._group.turn.release()
        for thread in self._threads:
            thread.join()

    def _work(self, part: Part, queue: "SimpleQueue[bytes | None]") -> None:
        while (data := queue.get()) is not None:
            try:
                with self._group.turn, torch.inference_mode():
                    part.carry_out(decode_to_rank(data))
            except BaseException:
                self._group.abort()
                raise
