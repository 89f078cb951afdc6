"""The engine: a scheduler and a runner, step by step. Knows token ids only: no text, no sockets, no tensors.

A device that is fed one step ahead never waits for the host:

    device   │ step 1 ──────│ step 2 ──────│ step 3 ──────│
    host     │ begin 2 …… results of 1 │ begin 3 …… results of 2 │

What a constrained sequence may sample in step 2 depends on what it sampled in step 1. So a step may begin with its
sampling deferred: `results of 1` yield the masks, then `sample 2` is launched while the device still computes.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from ostro.engine.batch import Batch
from ostro.engine.constraint import Prototype
from ostro.engine.kv import salt_of
from ostro.engine.profile import Profile, Recorded
from ostro.engine.request import Request
from ostro.engine.runner import ModelRunner, Step
from ostro.engine.scheduler import Limits, Progress, Scheduler
from ostro.engine.speculation import Speculation
from ostro.engine.states import Spacing
from ostro.engine.tiers import Tiers
from ostro.errors import BadRequest

# Seconds to wait for pages from a lower tier before looking for new requests.
_LONGEST_WAIT = 0.05


class _Launched(NamedTuple):
    batch: Batch
    step: Step
    launched: float
    """Launch time on the engine's clock."""


class EngineCore:
    def __init__(
        self,
        runner: ModelRunner,
        limits: Limits | None = None,
        *,
        prefix_caching: bool = True,
        pages_per_seq: int | None = None,
        adapters: Collection[str] = (),
        speculation: Speculation | None = None,
        tiers: Tiers | None = None,
        spacing: Spacing | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`adapters` names the adapters that the runner has loaded. `pages_per_seq` bounds a sequence's length.
        `speculation` drafts tokens, if the runner can verify them. `tiers` keep this runner's evicted pages.
        `spacing` is that of snapshots of recurrent states. `clock` times the steps, in seconds.
        """
        self.runner = runner
        self.tiers = tiers
        spec = runner.spec
        limits = limits or Limits(max_batch_tokens=spec.max_batch_tokens, max_batch_seqs=spec.max_batch_seqs)
        self.scheduler = Scheduler(
            spec,
            limits,
            prefix_caching=prefix_caching,
            pages_per_seq=pages_per_seq,
            adapters=adapters,
            speculation=speculation,
            tiers=tiers,
            spacing=spacing,
        )
        # Steps in flight: launched, but their results are not applied yet.
        self._under_way: deque[_Launched] = deque()
        self._clock = clock
        # When the latest results arrived.
        self._arrived = 0.0
        self._profile: Profile | None = None

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._under_way) or self.scheduler.kv.is_moving

    def check(self, request: Request) -> None:
        """Raises BadRequest for a request that can never run."""
        self.scheduler.check(request)

    def add(self, request: Request, prototype: Prototype | None = None) -> None:
        """Queues a request; raises BadRequest for one that can never run. `prototype` is its constraint, compiled."""
        self.scheduler.add(request, prototype)

    def abort(self, request_id: int, choice: int | None = None) -> None:
        self.scheduler.abort(request_id, choice)

    def num_found(self, prompt_ids: Sequence[int], adapter: str | None = None) -> int:
        """How many tokens of a prompt without a cache salt are cached here or found in lower tiers."""
        return self.scheduler.kv.num_found(list(prompt_ids), salt_of(adapter))

    def look(self, done: Callable[[], None]) -> None:
        """Finds out what other engines have shared by now, and then calls `done`, perhaps in another thread."""
        if self.tiers is None:
            done()
        else:
            self.tiers.store.look(done)

    def offer(self, prompt_ids: Sequence[int], adapter: str | None, done: Callable[[int], None]) -> None:
        """Shares a prompt with other engines, as far as it is computed here. `done` is told, within this call or a
        later step, how many of its tokens they find.
        """
        self.scheduler.kv.offer(list(prompt_ids), salt_of(adapter), done)

    def offer_all(self, done: Callable[[], None]) -> None:
        """Shares all prefixes that the device holds with other engines, within later steps. Then calls `done`."""
        if self.tiers is None:
            done()
        else:
            self.tiers.offer_all(done)

    def step(self, scheduled: Callable[[], None] = lambda: None) -> list[Progress]:
        """Launches the next step, applies the results that are due, and returns each sequence's progress from them.

        Returns an empty list if there is nothing to do, or nothing is due yet. `scheduled` is called before anything is
        computed.
        """
        if (profile := self._profile) is not None:
            return profile.step(self._step, self.runner, scheduled)
        return self._step(self.runner, scheduled)

    def _step(self, runner: ModelRunner, scheduled: Callable[[], None]) -> list[Progress]:
        try:
            self._take_arrivals()
            batch = self.scheduler.schedule()
            scheduled()
            if self.tiers is not None:
                self.tiers.carry_out()
            if batch is not None:
                launched = self._clock()
                self._under_way.append(_Launched(batch, runner.launch(batch), launched))
                self.scheduler.advance(batch)
            if batch is None and not self._under_way:
                # Nothing else to wait for. Keep it short: requests may arrive or be aborted meanwhile.
                self._take_arrivals(_LONGEST_WAIT)
            if len(self._under_way) <= (0 if batch is None else runner.spec.steps_ahead):
                return []
            due = self._under_way.popleft()
            output = due.step.results()
            self._note(due)
            gains = self.scheduler.apply(due.batch, output)
            if self._under_way and (sample := self._under_way[0].step.sample):
                sample()
        except BaseException:
            # The device's memory is in an unknown state, and page copies may be lost: no sequence can go on.
            self._under_way.clear()
            self.scheduler.abort_all()
            raise
        return gains

    def _take_arrivals(self, timeout: float = 0.0) -> None:
        if self.tiers is not None and self.tiers.is_moving:
            for arrival in self.tiers.store.arrivals(timeout):
                self.scheduler.take_arrival(arrival)

    def _note(self, step: "_Launched") -> None:
        """Reports a step's duration, since its launch or since the end of the step before: to speculation if the step
        only decoded, otherwise to the tiers, which fetch what takes longer to compute.
        """
        before, self._arrived = self._arrived, self._clock()
        if (speculation := self.scheduler.speculation) is None and self.tiers is None:
            return
        seconds, num_tokens = self._arrived - max(before, step.launched), step.batch.num_tokens
        if not step.batch.decodes:
            if self.tiers is not None:
                self.tiers.costs.note_prompt(num_tokens, seconds)
        elif speculation is not None:
            speculation.note_step(num_tokens, seconds)

    def start_profile(
        self,
        path: Path,
        *,
        max_steps: int,
        ended: Callable[[Recorded], None],
        writing: Callable[[], None] = lambda: None,
    ) -> None:
        """Profiles the next `max_steps` steps, or those until `end_profile`, into a file; then calls `ended`, in the
        thread that stepped last or ended it. Before, it calls `writing`: no step is taken while the file is written.

        Raises BadRequest during another profile, and ProfileFailed if the runner's profiler does not start.
        """
        if self._profile is not None:
            raise BadRequest("The model is already being profiled. Try again once that profile has ended.")

        def done(recorded: Recorded) -> None:
            self._profile = None
            ended(recorded)

        self._profile = Profile(self.runner, path, max_steps, done, writing)

    def end_profile(self) -> None:
        """Ends the profile early; does nothing if there is none."""
        if (profile := self._profile) is not None:
            profile.end()

    def close(self) -> None:
        """Ends the tiers; no step may follow."""
        if self.tiers is not None:
            self.tiers.close()

    def check_integrity(self) -> None:
        """Asserts that no page is lost or owned twice."""
        self.scheduler.check_integrity()
