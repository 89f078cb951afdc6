"""A runner without a device: a step takes as long as a table says, on a clock that nobody waits for."""

from collections.abc import Callable

from ostro.engine.batch import Batch
from ostro.engine.runner import RunnerSpec, SampledToken, Step, StepOutput
from ostro.simulation.costs import Work


class ClockRunner:
    strides = 0
    failure = None

    def __init__(self, spec: RunnerSpec, seconds: Callable[[Work], float]) -> None:
        self._spec = spec
        self._seconds = seconds
        self.now = 0.0
        """The host's time: it moves on to the end of what the host waits for."""
        self._free_at = 0.0
        """When the device has done all that was launched."""
        self.busy_seconds = 0.0

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def occupy(self, seconds: float, *, after: float = 0.0) -> float:
        """Gives the device so much to do, after all that it has been given. Returns when that is done."""
        self._free_at = max(self.now, self._free_at, after) + seconds
        return self._free_at

    def launch(self, batch: Batch) -> Step:
        seconds = self._seconds(Work.of(batch))
        self.busy_seconds += seconds
        ends = self.occupy(seconds)

        def results() -> StepOutput:
            self.now = max(self.now, ends)
            vocab = self._spec.vocab_size
            # Tokens that no other request has in this place, so that answers are not taken for one another's.
            return StepOutput(
                {
                    seq.id: SampledToken((seq.request.seed + 7919 * chunk.end) % vocab)
                    for chunk in batch.chunks
                    for seq in chunk.samples
                }
            )

        return Step(results)
