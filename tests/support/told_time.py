"""Time that passes when a test says so, for whatever takes its `sleep` as an argument."""

import asyncio
from dataclasses import dataclass, field


@dataclass
class ToldTime:
    now: float = 0.0
    _sleepers: list[tuple[float, asyncio.Future[None]]] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, woken))
        await woken

    async def let_pass(self, seconds: float) -> None:
        """Wakes sleepers whose time has come, in turn; one that sleeps again within these seconds is woken again."""
        end = self.now + seconds
        while due := [sleeper for sleeper in self._sleepers if sleeper[0] <= end]:
            self.now, woken = sleeper = min(due, key=lambda sleeper: sleeper[0])
            self._sleepers.remove(sleeper)
            if not woken.done():
                woken.set_result(None)
            # Until the woken task sleeps again or has done what it woke for.
            for _ in range(10):
                await asyncio.sleep(0)
        self.now = end
