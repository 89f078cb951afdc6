"""Runs a whole benchmark, level by level, and collects the results."""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import msgspec

from ostro.measure.bench.figures import Figures, Slo, figures
from ostro.measure.bench.jobs import Burden, Level, Progress
from ostro.measure.bench.load_workers import LoadWorkers, load_workers
from ostro.measure.bench.outcomes import Outcome
from ostro.measure.bench.preflight import preflight
from ostro.measure.bench.self_test import SelfTest, self_test
from ostro.measure.bench.workload import Workload
from ostro.measure.report.wording import duration, percent, rate
from ostro.version import __version__

Watch = Callable[[Level], AbstractContextManager[Callable[[Progress], None]]]

_BUSY = 0.8
_LATE = 0.01
_FEW = 0.98


class BenchOptions(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    headers: Mapping[str, str]
    """Contains the API key: never show it."""
    workload: Workload
    levels: Sequence[Level]
    timeout: float
    processes: int
    slo: Slo | None
    self_test: bool
    cost_per_hour: float | None = None
    """The price of everything that serves the load."""


class LevelRun(msgspec.Struct, frozen=True, kw_only=True):
    level: Level
    figures: Figures
    burdens: list[Burden]
    """One per load process."""
    outcomes: list[Outcome]
    """In request order."""


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    options: BenchOptions
    """Including what the preflight found out about the server."""
    machine: dict[str, object]
    began: str
    levels: list[LevelRun]
    self_test: SelfTest | None
    notes: list[str]
    whole: bool
    """False if it was interrupted."""

    @property
    def succeeded(self) -> int:
        return sum(run.figures.succeeded for run in self.levels)

    def as_json(self) -> dict[str, object]:
        options, workload = self.options, self.options.workload
        settings = msgspec.to_builtins(workload)
        settings["items"] = len(workload.items)
        return {
            "format": "ostro bench 1",
            "began": self.began,
            "interrupted": not self.whole,
            "server": {"url": options.url, "model": workload.model},
            "settings": {
                **settings,
                "headers": sorted(options.headers.keys()),
                "timeout": options.timeout,
                "processes": options.processes,
                "slo": None if options.slo is None else options.slo.limits,
                "cost_per_hour": options.cost_per_hour,
            },
            "machine": self.machine,
            "notes": self.notes,
            "self_test": msgspec.to_builtins(self.self_test),
            "levels": [_level_json(run) for run in self.levels],
        }


def bench(options: BenchOptions, watch: Watch) -> Bench:
    """Runs all levels, or as many as finish before an interrupt."""
    found = preflight(options.workload, options.url, options.headers, options.timeout)
    options = msgspec.structs.replace(options, workload=found.workload)
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    machine = describe_machine()
    levels: list[LevelRun] = []
    whole, tested = True, None
    with load_workers(options.processes) as load:
        try:
            for level in options.levels:
                with watch(level) as progress:
                    done, whole = _run(options, level, load, progress)
                levels.append(done)
                if not whole:
                    break
            if options.self_test and whole:
                busiest = max(levels, key=lambda run: run.figures.output_tokens_per_second)
                tested = self_test(load, busiest.outcomes)
        except KeyboardInterrupt:
            whole = False
    if not levels:
        raise KeyboardInterrupt
    return Bench(
        options=options,
        machine=machine,
        began=began,
        levels=levels,
        self_test=tested,
        notes=[*found.notes, *_notes(options, levels, tested)],
        whole=whole,
    )


def _run(
    options: BenchOptions, level: Level, load: LoadWorkers, progress: Callable[[Progress], None]
) -> tuple[LevelRun, bool]:
    """The level, and whether it ran to completion."""
    speed = level.value if level.kind == "trace" else 1.0
    workload = msgspec.structs.replace(options.workload, speed=speed)
    shares, whole = load.run(
        level, workload, url=options.url, headers=options.headers, timeout=options.timeout, progress=progress
    )
    outcomes = sorted((each for share in shares for each in share.outcomes), key=lambda each: each.index)
    unfinished = sum(share.unfinished for share in shares)
    found = LevelRun(
        level=level,
        figures=figures(outcomes, unfinished=unfinished, slo=options.slo, cost_per_hour=options.cost_per_hour),
        burdens=[share.burden for share in shares],
        outcomes=outcomes,
    )
    return found, whole


def _notes(options: BenchOptions, levels: Sequence[LevelRun], tested: SelfTest | None) -> list[str]:
    """Reasons why the figures may not mean what they seem to."""
    notes = []
    for run in levels:
        name, found = run.level.name, run.figures
        if found.unfinished:
            notes.append(f"{name}: stopped early; {found.unfinished} requests in flight were aborted.")
        if found.resent:
            notes.append(
                f"{name}: {found.resent} requests were resent on a new connection, because the server had closed the "
                "kept-alive one without an answer. The time lost is included."
            )
        if 0 < found.counted_by_events < found.succeeded:
            notes.append(f"{name}: for {found.counted_by_events} answers, events are counted as tokens.")
        if options.workload.ignore_eos and found.ended_early:
            notes.append(
                f"{name}: {found.ended_early} of {found.succeeded} answers were shorter than requested: "
                "the server does not honour ignore_eos."
            )
        if found.tokens_per_event is not None and not _FEW < found.tokens_per_event < 1 / _FEW:
            notes.append(
                f"{name}: an event carried {found.tokens_per_event:.2f} tokens on average. ITL is the time "
                "between events, TPOT the time per token."
            )
        busiest = max(burden.cpu_share for burden in run.burdens)
        if busiest > _BUSY:
            notes.append(
                f"{name}: the load generator itself used {percent(busiest)} of a core, so it may have been the "
                "bottleneck. Spread it with --processes."
            )
        lag = max(burden.lag_p99 for burden in run.burdens)
        if lag > _LATE:
            notes.append(
                f"{name}: the load generator was held up by {duration(lag)} (p99): the machine was too busy for "
                "accurate timing. Run it elsewhere, or with more --processes."
            )
        if found.late is not None and found.late.p99 > _LATE:
            notes.append(
                f"{name}: requests went out up to {duration(found.late.max)} late ({duration(found.late.p99)} p99)."
            )
    if tested is not None and tested.cpu_share > _BUSY:
        notes.append(f"The self-test's {rate(tested.events_per_second)} events/s are the load generator's limit.")
    return notes


def _level_json(run: LevelRun) -> dict[str, object]:
    level = run.level
    return {
        "name": level.name,
        level.kind: level.value,
        "requests_asked": level.requests,
        "duration": level.duration,
        "burstiness": level.burstiness,
        "warmup": level.warmup,
        "figures": msgspec.to_builtins(run.figures),
        "load_generator": msgspec.to_builtins(run.burdens),
        "requests": [_outcome_json(each) for each in run.outcomes],
    }


def _outcome_json(outcome: Outcome) -> dict[str, object]:
    told: dict[str, object] = msgspec.to_builtins(outcome)
    told["arrivals"] = [round(at, 6) for at in outcome.arrivals]
    return told | {"ttft": outcome.ttft, "itl": outcome.itl, "tpot": outcome.tpot}


def describe_machine() -> dict[str, object]:
    """The machine that generates the load."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "ostro": __version__,
    }
