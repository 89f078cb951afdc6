"""One simulated server: a real engine on a clock, and the requests that have reached it."""

from collections import deque
from collections.abc import Callable

from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.runner import RunnerSpec
from ostro.engine.scheduler import Progress
from ostro.engine.tiers import Tiers
from ostro.errors import BadRequest
from ostro.simulation.clock_runner import ClockRunner
from ostro.simulation.clock_store import ClockStore
from ostro.simulation.costs import TierPages, Work

# What the digests of all pages on disk begin with: there is one model.
_ROOT = b"model"


class Replica:
    def __init__(
        self,
        spec: RunnerSpec,
        seconds: Callable[[Work], float],
        *,
        contention: float = 0.0,
        prefix_caching: bool = True,
        tiers: TierPages | None = None,
    ) -> None:
        self.runner = ClockRunner(spec, seconds, contention)
        self.core = EngineCore(
            self.runner,
            prefix_caching=prefix_caching,
            tiers=None if tiers is None else _tiers(self.runner, tiers),
            clock=lambda: self.runner.now,
        )
        self._inbox: deque[Request] = deque()
        self.is_stepping = False
        """Whether an event for its next step is on its way."""
        self.most_pages = 0
        """The most pages in use at a time."""
        self.work_seconds = 0.0
        """How long the engine had work, and pages in use summed over this time."""
        self.page_seconds = 0.0

    def submit(self, request: Request, answer: tuple[int, ...] = ()) -> None:
        """`answer` is what is generated, as far as that matters."""
        self._inbox.append(request)
        if answer:
            self.runner.answers[request.id] = answer

    @property
    def has_work(self) -> bool:
        return bool(self._inbox) or self.core.has_work

    def step(self, now: float) -> tuple[list[Progress], dict[int, str]]:
        """Takes what has arrived and steps the engine, as an engine process does. Returns the step's progress, and what
        was refused. `backends.now` is when it is known.
        """
        self.runner.now = now
        refused: dict[int, str] = {}
        while self._inbox:
            request = self._inbox.popleft()
            try:
                self.core.add(request)
            except BadRequest as error:
                refused[request.id] = error.message
                self.runner.answers.pop(request.id, None)
        in_use = 0

        def look() -> None:
            # Once the step is scheduled: its pages are allocated, and none is released yet.
            nonlocal in_use
            kv = self.core.scheduler.kv
            in_use = kv.num_pages - kv.available

        progress = self.core.step(look)
        for gain in progress:
            if gain.finish_reason is not None:
                self.runner.answers.pop(gain.request_id, None)
        self.most_pages = max(self.most_pages, in_use)
        self.work_seconds += self.runner.now - now
        self.page_seconds += in_use * (self.runner.now - now)
        return progress, refused


def _tiers(runner: ClockRunner, pages: TierPages) -> Tiers:
    store = ClockStore(runner, pages.copies, num_slots=pages.host, disk_pages=pages.disk)
    return Tiers(store, root=lambda salt: _ROOT if pages.disk else None)
