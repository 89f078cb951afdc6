"""The engine: a scheduler and a runner, one step at a time. Knows token ids only: no text, no sockets, no tensors."""

from ostro.engine.request import Request
from ostro.engine.scheduler import Limits, Progress, Scheduler
from ostro.runner.base import ModelRunner


class EngineCore:
    def __init__(self, runner: ModelRunner, limits: Limits | None = None, *, prefix_caching: bool = True) -> None:
        self.runner = runner
        self.scheduler = Scheduler(runner.spec, limits or Limits(), prefix_caching=prefix_caching)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def check(self, request: Request) -> None:
        """Raises BadRequest for a request that can never run."""
        self.scheduler.check(request)

    def add(self, request: Request) -> None:
        """Queues a request; raises BadRequest for one that can never run."""
        self.scheduler.add(request)

    def abort(self, request_id: int, choice: int | None = None) -> None:
        self.scheduler.abort(request_id, choice)

    def step(self) -> list[Progress]:
        """One step of all that runs; what each sequence gained. An empty list if nothing is to do."""
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        try:
            output = self.runner.run(batch)
        except BaseException:
            # The device's memory is in an unknown state, and page copies of this batch may be lost: nobody goes on.
            self.scheduler.abort_all()
            raise
        return self.scheduler.apply(batch, output)

    def check_integrity(self) -> None:
        """Asserts that no page is lost or owned twice."""
        self.scheduler.check_integrity()
