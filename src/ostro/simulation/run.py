"""Runs the levels of a load on a simulated fleet, and reports them as `ostro bench` reports those of a server."""

import time
from collections.abc import Callable
from itertools import count, islice
from typing import NamedTuple

import msgspec

from ostro.measure.bench.figures import Slo, figures
from ostro.measure.bench.jobs import Level
from ostro.measure.bench.outcomes import Outcome
from ostro.measure.bench.preflight import probing
from ostro.measure.bench.run import Bench, BenchOptions, LevelRun
from ostro.measure.bench.workload import Workload
from ostro.measure.report.wording import duration, percent, rate
from ostro.simulation.costs import CostTable, TierPages
from ostro.simulation.fleet import Fleet
from ostro.simulation.prompts import Answers, PromptTokens
from ostro.simulation.routing import Routing


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True):
    table: CostTable
    workload: Workload
    levels: list[Level]
    replicas: int = 1
    routing: Routing = "prefix"
    prefix_caching: bool = True
    tiers: TierPages | None = None
    slo: Slo | None = None
    cost_per_hour: float | None = None
    """The price of all replicas."""


class FleetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What happened in the replicas during a level; a benchmark from outside does not see it."""

    replicas: int
    replicas_used: int
    steps: int
    preemptions: int
    pages_evicted: int
    busy_share: float
    """Share of the time in which devices were busy."""
    kv_mean: float
    """Share of the KV cache in use while an engine has work, on average and at most."""
    kv_most: float
    prompt_tokens: int
    """Prompt tokens looked up in the prefix cache, and how many were found: in the KV cache, or in lower tiers."""
    hit_tokens: int
    pages_stored: int = 0
    """Pages copied to host memory, and fetched from there."""
    pages_fetched_host: int = 0
    pages_spilled: int = 0
    """Pages handed on to be written to disk, some of which a slow disk drops; and pages fetched from there."""
    pages_fetched_disk: int = 0
    wall_seconds: float
    """How long the simulation itself took."""


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    bench: Bench
    fleets: list[FleetFigures]
    """Figures, one entry per level."""

    def as_json(self) -> dict[str, object]:
        told = self.bench.as_json()
        levels = told["levels"]
        assert isinstance(levels, list)
        joined = [
            level | {"fleet": msgspec.to_builtins(fleet)} for level, fleet in zip(levels, self.fleets, strict=True)
        ]
        return told | {"simulated": True, "levels": joined}

    def lines(self) -> list[str]:
        """Lines for what a benchmark's table has no rows for."""
        return [
            line for run, fleet in zip(self.bench.levels, self.fleets, strict=True) for line in _fleet_lines(run, fleet)
        ]


def _fleet_lines(run: LevelRun, fleet: FleetFigures) -> list[str]:
    name, speed = run.level.name, run.figures.requests / max(fleet.wall_seconds, 1e-9)
    return [
        f"{name}: {fleet.replicas_used:,} of {fleet.replicas:,} replicas used, devices {percent(fleet.busy_share)} "
        f"busy, {fleet.steps:,} steps, {fleet.preemptions:,} preemptions",
        f"{name}: KV cache {percent(fleet.kv_mean)} in use on average, {percent(fleet.kv_most)} at most, "
        f"{fleet.pages_evicted:,} pages evicted",
        f"{name}: {fleet.hit_tokens:,} of {fleet.prompt_tokens:,} prompt tokens found"
        + (f"; pages {_moved(fleet)}" if _moved(fleet) else ""),
        f"{name}: simulated in {duration(fleet.wall_seconds)}, {rate(speed)} requests/s",
    ]


def _moved(fleet: FleetFigures) -> str:
    """Pages moved between tiers; empty if none were."""
    host = f"to host memory {fleet.pages_stored:,} and back {fleet.pages_fetched_host:,}" if fleet.pages_stored else ""
    disk = f"to disk {fleet.pages_spilled:,} and back {fleet.pages_fetched_disk:,}" if fleet.pages_spilled else ""
    return ", ".join(each for each in (host, disk) if each)


def simulate(options: SimulationOptions) -> Simulation:
    table = options.table
    costs = table.endpoint(options.workload.endpoint)
    workload = msgspec.structs.replace(options.workload, model=table.model, words=costs.words)
    fleet = Fleet(
        table,
        costs,
        replicas=options.replicas,
        routing=options.routing,
        prefix_caching=options.prefix_caching,
        tiers=options.tiers,
    )
    tokens = PromptTokens(costs, table.engine.vocab_size)
    # On a real server under measurement, a trace's first prompt is in the cache too.
    prompt, output_len = probing(workload).prompt(~0, ~0)
    fleet.send(~0, tokens.of(prompt), output_len, lambda _: None)
    fleet.run()
    levels: list[LevelRun] = []
    fleets: list[FleetFigures] = []
    for level in options.levels:
        began = time.perf_counter()
        load = _Load(fleet, workload, level, tokens)
        load.warm_up()
        seen = _Seen(fleet)
        outcomes = load.run()
        levels.append(
            LevelRun(
                level=level,
                figures=figures(outcomes, slo=options.slo, cost_per_hour=options.cost_per_hour),
                burdens=[],
                outcomes=outcomes,
            )
        )
        fleets.append(seen.figures(options.replicas, time.perf_counter() - began))
    bench = Bench(
        options=BenchOptions(
            url=f"simulation, {options.replicas:,} x {table.device}",
            headers={},
            workload=workload,
            levels=options.levels,
            timeout=0.0,
            processes=0,
            slo=options.slo,
            self_test=False,
            cost_per_hour=options.cost_per_hour,
        ),
        machine=table.machine,
        began=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        levels=levels,
        self_test=None,
        notes=[],
        whole=True,
    )
    return Simulation(bench=bench, fleets=fleets)


class _Load:
    """The clients of one level."""

    def __init__(self, fleet: Fleet, workload: Workload, level: Level, tokens: PromptTokens) -> None:
        self._fleet = fleet
        self._workload = msgspec.structs.replace(workload, speed=level.value) if level.kind == "trace" else workload
        self._level = level
        self._tokens, self._answers = tokens, Answers(workload)
        self._outcomes: list[Outcome] = []
        self._began = 0.0

    def warm_up(self) -> None:
        """Sends requests that do not count, each client one after the other."""
        indices = iter(range(self._level.warmup))

        def send_next() -> None:
            if (index := next(indices, None)) is not None:
                self._send(~index, lambda _: send_next())

        for _ in range(self._clients):
            send_next()
        self._fleet.run()

    def run(self) -> list[Outcome]:
        """The outcomes, in request order."""
        self._began = self._fleet.now
        if self._level.kind == "concurrency":
            self._closed()
        else:
            self._open()
        self._fleet.run()
        return sorted(self._outcomes, key=lambda each: each.index)

    @property
    def _clients(self) -> int:
        return int(self._level.value) if self._level.kind == "concurrency" else 1

    def _closed(self) -> None:
        level = self._level
        indices = count() if level.requests is None else iter(range(level.requests))

        def send_next() -> None:
            if level.duration is not None and self._fleet.now - self._began >= level.duration:
                return
            if (index := next(indices, None)) is not None:
                self._send(index, answered)

        def answered(outcome: Outcome) -> None:
            self._note(outcome)
            send_next()

        for _ in range(self._clients):
            send_next()

    def _open(self) -> None:
        level, workload = self._level, self._workload
        times = (
            workload.replayed() if level.kind == "trace" else workload.due(level.value, level.burstiness, level.number)
        )
        coming = enumerate(islice(times, level.requests))

        def plan_next() -> None:
            # One at a time: a trace may have millions.
            if (found := next(coming, None)) is None or (level.duration is not None and found[1] >= level.duration):
                return
            index, due = found

            def send() -> None:
                self._send(index, self._note)
                plan_next()

            self._fleet.at(self._began + due, send)

        plan_next()

    def _send(self, index: int, answered: Callable[[Outcome], None]) -> None:
        prompt, output_len = self._workload.prompt(index, self._level.number)
        answer = self._answers.of(index, self._level.number, prompt)
        self._fleet.send(index, self._tokens.of(prompt, answer), output_len, answered)

    def _note(self, outcome: Outcome) -> None:
        self._outcomes.append(msgspec.structs.replace(outcome, start=outcome.start - self._began))


class _Seen:
    """The replicas' totals before a level."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._counters, self._began, self._sums = fleet.counters, fleet.now, _Sums.of(fleet)
        for replica in fleet.replicas:
            replica.most_pages = 0

    def figures(self, replicas: int, wall_seconds: float) -> FleetFigures:
        now, before = self._fleet.counters, self._counters
        evicted, busy, work_seconds, page_seconds = (
            after - earlier for after, earlier in zip(_Sums.of(self._fleet), self._sums, strict=True)
        )
        pages = self._fleet.num_pages
        seconds = self._fleet.now - self._began
        return FleetFigures(
            replicas=replicas,
            replicas_used=sum(1 for _ in self._fleet.replicas),
            steps=now.steps - before.steps,
            preemptions=now.preemptions - before.preemptions,
            pages_evicted=int(evicted),
            busy_share=busy / (replicas * seconds) if seconds else 0.0,
            kv_mean=page_seconds / (pages * work_seconds) if work_seconds else 0.0,
            kv_most=max((each.most_pages for each in self._fleet.replicas), default=0) / pages,
            prompt_tokens=now.cache_queries - before.cache_queries,
            hit_tokens=now.cache_hits - before.cache_hits,
            pages_stored=now.stored_pages - before.stored_pages,
            pages_fetched_host=now.fetched_pages - before.fetched_pages,
            pages_spilled=now.spilled_pages - before.spilled_pages,
            pages_fetched_disk=now.fetched_disk_pages - before.fetched_disk_pages,
            wall_seconds=wall_seconds,
        )


class _Sums(NamedTuple):
    """Totals over all replicas."""

    evicted: float
    busy_seconds: float
    work_seconds: float
    page_seconds: float

    @classmethod
    def of(cls, fleet: Fleet) -> "_Sums":
        each = [
            (one.core.scheduler.kv.num_evicted, one.runner.busy_seconds, one.work_seconds, one.page_seconds)
            for one in fleet.replicas
        ]
        return cls(*(sum(values) for values in zip(*each, strict=True))) if each else cls(0, 0.0, 0.0, 0.0)
