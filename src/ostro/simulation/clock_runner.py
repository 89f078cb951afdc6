"""A runner without a device: a step takes as long as a table says, on a clock that nobody waits for."""

from collections.abc import Callable

from ostro.engine.batch import Batch
from ostro.engine.runner import RunnerSpec, SampledToken, Step, StepOutput
from ostro.engine.sequence import Sequence
from ostro.simulation.costs import Work


class ClockRunner:
    strides = 0
    failure = None

    def __init__(self, spec: RunnerSpec, seconds: Callable[[Work], float], contention: float = 0.0) -> None:
        """`contention` is what a step takes longer for each second that the API process works beside it."""
        self._spec = spec
        self._seconds, self._contention = seconds, contention
        self.api_free_at = 0.0
        """When the API process has passed on all requests so far."""
        self.now = 0.0
        """The host's time: it moves on to the end of what the host waits for."""
        self._free_at = 0.0
        """When the device has done all that was launched."""
        self.busy_seconds = 0.0
        self.answers: dict[int, tuple[int, ...]] = {}
        """By request: the tokens that it generates, and others after them."""

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    def occupy(self, seconds: float, *, after: float = 0.0) -> float:
        """Gives the device so much to do, after all that it has been given. Returns when that is done."""
        self._free_at = max(self.now, self._free_at, after) + seconds
        return self._free_at

    def launch(self, batch: Batch) -> Step:
        seconds = self._seconds(Work.of(batch))
        beside = min(seconds, self.api_free_at - max(self.now, self._free_at))
        seconds += self._contention * max(0.0, beside)
        self.busy_seconds += seconds
        ends = self.occupy(seconds)

        def results() -> StepOutput:
            self.now = max(self.now, ends)
            return StepOutput(
                {seq.id: SampledToken(self._sampled(seq, chunk.end)) for chunk in batch.chunks for seq in chunk.samples}
            )

        return Step(results)

    def _sampled(self, seq: Sequence, end: int) -> int:
        answer, at = self.answers.get(seq.request.id, ()), end - seq.num_prompt
        # If it is not known, a token that no other request has in this place: no answer is taken for another's.
        return answer[at] if at < len(answer) else (seq.request.seed + 7919 * end) % self._spec.vocab_size
