"""Measures how long an engine's steps and page copies take, and fits the table to that. Knows no device and no server.

Each scenario sets up steps of one kind and times them on the real engine: rows that decode, after short and long
contexts; chunks of prompts, at the beginning and after a cached prefix; prompts beside rows that decode. The median of
each is one point; the curves go through the points.

A store does copies in order, so pages that are fetched after they were stored tell how long both took.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from statistics import mean, median
from typing import NamedTuple, Protocol

import msgspec

from ostro.engine.batch import Batch
from ostro.engine.core import EngineCore
from ostro.engine.page_store import Arrival, Fetch, PageStore, Spill, Store
from ostro.engine.request import Request
from ostro.engine.runner import ModelRunner, RunnerSpec, Step, StepOutput
from ostro.errors import BadRequest
from ostro.sampling_params import SamplingParams
from ostro.simulation.costs import (
    FORMAT,
    CopyTimes,
    CostTable,
    DiskCopies,
    EngineShape,
    HostCopies,
    Knot,
    StepTimes,
    Work,
    at,
)

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_SHORT, _LONG = 8, 512
"""Contexts, in tokens; the long one is a whole step's tokens if that is more."""
_LONG_STEPS = 8
"""Most steps to spend on computing the long contexts of several rows."""
_BESIDE = 16
"""Rows that decode beside a prompt."""
_DECODE_STEPS = 6
_COPIES = 64
"""Pages to copy."""
ROUNDS = 3
# Largest share of a step's time that attention or sampling may take, however noisy the times are.
_MOST_SHARE = 0.98


class Point(NamedTuple):
    """A kind of step, and how long it took."""

    work: Work
    seconds: float


def measure_steps(
    runner: ModelRunner, params: SamplingParams, *, rounds: int = ROUNDS, watch: Callable[[str], None] = lambda _: None
) -> StepTimes:
    """Runs every scenario a few times, sampling by `params`. `watch` is told which one. Nothing else may use the runner
    meanwhile.
    """
    if not (runner.spec.generates and runner.spec.keeps_kv):
        raise BadRequest("Only models that generate text with a KV cache can be measured for a simulation.")
    points: defaultdict[str, list[Point]] = defaultdict(list)
    trial = _Trial(runner, params)
    for number in range(rounds):
        for name, scenario in _scenarios(trial, runner.spec):
            watch(f"{name}, {number + 1} of {rounds}")
            points[name].append(scenario())
    return fit(Point(found[0].work, median([each.seconds for each in found])) for found in points.values())


def _scenarios(trial: "_Trial", spec: RunnerSpec) -> Iterable[tuple[str, Callable[[], Point]]]:
    most_rows = min(spec.max_batch_seqs, spec.num_pages // 2)
    longest = min(spec.max_seq_len, spec.num_pages * spec.page_size // 2)
    rows = [each for each in _ROWS if each < most_rows] + [most_rows]
    chunks = [each for each in _CHUNKS if each < min(spec.max_batch_tokens, longest)]
    # With long contexts a step's budget covers fewer tokens, but never more.
    chunks.append(min(spec.max_batch_tokens, longest - 1))
    # In whole pages, so that all of it is cached.
    long = max(min(max(_LONG, spec.max_batch_tokens), longest // 2) // spec.page_size, 1) * spec.page_size

    def decoding(rows: int, context: int) -> tuple[str, Callable[[], Point]]:
        return f"{rows} rows, context {context}", lambda: trial.decode(rows, context)

    def prompt(tokens: int, cached: int, beside: int) -> tuple[str, Callable[[], Point]]:
        name = f"prompt of {tokens}, {cached} cached, beside {beside} rows"
        return name, lambda: trial.prompt(tokens, cached=cached, beside=beside)

    for each in rows:
        yield decoding(each, _SHORT)
    room = min(_LONG_STEPS * spec.max_batch_tokens, spec.num_pages * spec.page_size // 2)
    for each in rows:
        if each * long <= room:
            yield decoding(each, long)
    for each in chunks:
        yield prompt(each, 0, 0)
    middle = chunks[len(chunks) // 2]
    yield prompt(middle, long, 0)
    beside = min(_BESIDE, most_rows - 1)
    if beside > 0:
        yield prompt(max(middle - beside, 2), 0, beside)


class Stores(Protocol):
    """Each tier below a runner's pages by itself: `CopyTimes` says what the numbers mean."""

    @property
    def page_bytes(self) -> int: ...
    @property
    def host(self) -> PageStore | None: ...
    @property
    def staged(self) -> int: ...
    @property
    def disk(self) -> PageStore | None: ...
    @property
    def waiting(self) -> int: ...


def measure_engine(
    runner: ModelRunner,
    params: SamplingParams,
    stores: Stores | None,
    *,
    model: str,
    machine: dict[str, object],
    rounds: int = ROUNDS,
    watch: Callable[[str], None] = lambda _: None,
) -> CostTable:
    """Measures the engine's part of the table, without endpoints."""
    steps = measure_steps(runner, params, rounds=rounds, watch=watch)
    watch("copies of pages")
    return CostTable(
        format=FORMAT,
        model=model,
        device=runner.spec.device,
        engine=EngineShape.of(runner.spec),
        step=steps,
        event=0.0,
        endpoints={},
        copies=None if stores is None else measure_copies(stores, runner.spec.num_pages),
        machine=machine,
    )


def measure_copies(stores: Stores, num_pages: int) -> CopyTimes:
    """Overwrites some of the runner's pages: nothing else may use them."""
    host = disk = None
    if stores.host is not None:
        host = measure_host(stores.host, num_pages, staged=stores.staged)
    if stores.disk is not None:
        pages = num_pages if stores.host is None else stores.host.num_slots
        disk = measure_disk(stores.disk, pages, waiting=stores.waiting)
        if host is not None:
            # The disk reads slots directly, so the engine does not pause for a copy.
            disk = msgspec.structs.replace(disk, pause=0.0)
    return CopyTimes(page_bytes=stores.page_bytes, host=host, disk=disk)


def measure_host(store: PageStore, num_pages: int, *, staged: int, rounds: int = ROUNDS) -> HostCopies:
    """Copies pages to slots and back, overwriting some of the runner's `num_pages`. Nothing else may use them."""
    count = min(_COPIES, store.num_slots, num_pages // 2)
    stores = [Store(page, page) for page in range(count)]
    trials = [
        _copied(store, stores, Fetch(ticket, tuple(range(count)), tuple(range(count, 2 * count))))
        for ticket in range(1, rounds + 1)
    ]
    pause, out, back = (median(times) / count for times in zip(*trials, strict=True))
    return HostCopies(pause=pause / 2, out=out, back=back, staged=staged)


def measure_disk(store: PageStore, num_pages: int, *, waiting: int, rounds: int = ROUNDS) -> DiskCopies:
    """Writes pages to disk and reads them back, overwriting some of the runner's `num_pages`. Nothing else may use
    them.
    """
    count = min(_COPIES, waiting, num_pages // 2)
    trials = []
    for ticket in range(1, rounds + 1):
        digests = tuple(bytes([ticket, page]) * 16 for page in range(count))
        spills = [Spill(digest, page=page) for page, digest in enumerate(digests)]
        trials.append(_copied(store, spills, Fetch(ticket, digests, tuple(range(count, 2 * count)))))
    pause, write, read = (median(times) / count for times in zip(*trials, strict=True))
    return DiskCopies(pause=pause, write=write, read=read, waiting=waiting)


def _copied(store: PageStore, down: Sequence[Store | Spill], up: Fetch) -> tuple[float, float, float]:
    """How long the caller was blocked, and how long the copies down and back up took."""
    began = time.perf_counter()
    store.carry_out([*down, up])
    held_up = time.perf_counter() - began
    arrived: list[Arrival] = []
    while not arrived:
        arrived = store.arrivals(timeout=1.0)
    seconds = time.perf_counter() - began
    [arrival] = arrived
    if arrival.num_good < len(up.pages):
        raise BadRequest("Pages that were copied did not come back. Is the disk full? Choose another with TMPDIR.")
    return held_up, max(seconds - arrival.seconds, 0.0), arrival.seconds


class _Trial:
    """Steps an engine through scenarios, and times the steps of the kind in question."""

    def __init__(self, runner: ModelRunner, params: SamplingParams) -> None:
        self._runner = _Watched(runner)
        self._params = params
        self._dice = random.Random(0)
        self._ids = count(1)

    def decode(self, rows: int, context: int) -> Point:
        core = self._engine()
        for _ in range(rows):
            # Long enough that none ends before all have begun, whatever the budget.
            self._add(core, self._tokens(context), 4096)
        return self._timed(core, lambda work: work.rows == rows and not work.prompt_tokens, _DECODE_STEPS)

    def prompt(self, tokens: int, *, cached: int, beside: int) -> Point:
        core = self._engine()
        prefix = self._tokens(cached)
        if cached:
            self._add(core, prefix, 1)
            while core.has_work:
                core.step()
        for _ in range(beside):
            self._add(core, self._tokens(_SHORT), 4096)
        while beside and self._runner.due.rows < beside:
            core.step()
        self._add(core, (*prefix, *self._tokens(tokens)), 1)
        return self._timed(core, lambda work: work.prompt_tokens > 0, 1)

    def _engine(self) -> EngineCore:
        """A new engine, whose prefix cache is empty."""
        self._runner.due = Work()
        return EngineCore(self._runner)

    def _timed(self, core: EngineCore, wanted: Callable[[Work], bool], steps: int) -> Point:
        """The median of the first `steps` wanted steps. Earlier steps are not timed, and later work is aborted."""
        times: list[float] = []
        works: list[Work] = []
        before = time.perf_counter()
        self._runner.due = Work()
        while len(times) < steps and core.has_work:
            self._runner.is_new = False
            core.step()
            now = time.perf_counter()
            if self._runner.is_new:
                if wanted(self._runner.due):
                    times.append(now - before)
                    works.append(self._runner.due)
                before = now
        core.scheduler.abort_all()
        while core.has_work:
            core.step()
        if not times:
            raise BadRequest("The engine has too little memory for keys and values to be measured. Give it more.")
        return Point(works[len(works) // 2], median(times))

    def _add(self, core: EngineCore, prompt: tuple[int, ...], max_tokens: int) -> None:
        most = core.scheduler.max_len - len(prompt)
        params = self._params.with_changes(max_tokens=min(max_tokens, most), ignore_eos=True)
        core.add(Request(id=next(self._ids), prompt_ids=prompt, params=params, seed=0))

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._dice.randrange(self._runner.spec.vocab_size) for _ in range(count))


class _Watched:
    """A runner that notes which step's results were taken last."""

    strides = 0

    def __init__(self, inner: ModelRunner) -> None:
        self._inner = inner
        self.due = Work()
        self.is_new = False

    @property
    def failure(self) -> str | None:
        return self._inner.failure

    @property
    def spec(self) -> RunnerSpec:
        return self._inner.spec

    def launch(self, batch: Batch) -> Step:
        step, work = self._inner.launch(batch), Work.of(batch)

        def results() -> StepOutput:
            output = step.results()
            self.due, self.is_new = work, True
            return output

        return Step(results, step.sample)


def fit(points: Iterable[Point]) -> StepTimes:
    """The table that fits the points best. Needs points with and without prompts."""
    points = list(points)
    decoding = [each for each in points if not each.work.prompt_tokens]
    alone = [each for each in points if each.work.prompt_tokens and not each.work.rows]
    beside = [each for each in points if each.work.prompt_tokens and each.work.rows]
    decode_context = _slope([(each.work.rows, each.work.decode_context, each.seconds) for each in decoding])
    prompt_context = _slope([(each.work.prompt_tokens, each.work.prompt_context, each.seconds) for each in alone])

    def bare(point: Point) -> float:
        """The point's time without attention."""
        work = point.work
        attending = decode_context * work.decode_context + prompt_context * work.prompt_context
        return point.seconds - attending

    decode = _knots((each.work.rows, bare(each)) for each in decoding)
    mixed = _knots((each.work.prompt_tokens, bare(each)) for each in alone)
    # A prompt's last chunk samples one row itself.
    extra = [
        (bare(each) - at(mixed, each.work.rows + each.work.prompt_tokens)) / (each.work.sampled - 1)
        for each in beside
        if each.work.sampled > 1
    ]
    most = _MOST_SHARE * min(seconds for _, seconds in mixed)
    sampled = min(max(mean(extra), 0.0), most) if extra else 0.0
    return StepTimes(
        decode=decode,
        mixed=[(tokens, seconds - sampled) for tokens, seconds in mixed],
        sampled=sampled,
        decode_context=decode_context,
        prompt_context=prompt_context,
    )


def _slope(points: Sequence[tuple[int, int, float]]) -> float:
    """Seconds per unit of context, from points (group, context, seconds); each group has its own base level."""
    groups: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    for group, context, seconds in points:
        groups[group].append((context, seconds))
    above = below = 0.0
    for found in groups.values():
        middle, level = mean(context for context, _ in found), mean(seconds for _, seconds in found)
        above += sum((context - middle) * (seconds - level) for context, seconds in found)
        below += sum((context - middle) ** 2 for context, _ in found)
    # However noisy the times are, no step takes negative time without its context.
    most = min((_MOST_SHARE * seconds / context for _, context, seconds in points if context), default=0.0)
    return min(max(above / below, 0.0), most) if below else 0.0


def _knots(points: Iterable[Knot]) -> list[Knot]:
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for tokens, seconds in points:
        groups[tokens].append(seconds)
    return [(tokens, mean(groups[tokens])) for tokens in sorted(groups)]
