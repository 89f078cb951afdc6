"""An event loop whose clock jumps to what is next: an hour passes in a moment, and always in the same order.

For what uses no threads, sockets or processes. To wait for what never comes is an error.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

_LONGEST = 36_000.0


class _JumpingSelector(selectors.DefaultSelector):
    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "all wait for what will never happen"
        self.now += max(0.0, timeout)
        return super().select(0)


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_in_jumping_time(main: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(_LONGEST):
            await main

    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        runner.run(limited())


def in_jumping_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        run_in_jumping_time(test())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run
