"""Engines that stay loaded, measured by turns: figures of one round are compared with each other and no others.

A side is a process with a model in memory. It takes lines on its standard input, and answers each with one of JSON:

                         {"about": TEXT}    once it can be measured
    prefill N            {"seconds": X}     N prompts that it has not seen, until each has a token
    decode STREAMS STEPS {"seconds": X}     so many steps of so many streams, whose prompts are computed before

The others wait meanwhile. A measurement in which something else ran on the machine is told apart: medians are of the
quiet ones where there are any.
"""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from cpu_peers.quiet import Disturbance, counters
from cpu_peers.verdicts import aligned

OSTRO, AGAIN, FORMER, LLAMA, READ = "Ostro", "Ostro again", "former Ostro", "llama.cpp", "plain read"
OTHERS = (LLAMA, FORMER, AGAIN, READ)


@dataclass(frozen=True, slots=True)
class Task:
    streams: int
    """Prompts, or streams that are decoded."""
    decodes: bool

    @property
    def name(self) -> str:
        return f"{self.streams} stream{'s' * (self.streams > 1)}" if self.decodes else "prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured of each model."""

    tasks: Sequence[Task]
    input: int
    """Tokens of a prompt."""
    seconds: float
    """About how long the slowest side may take for one measurement of decoding."""
    most_steps: int
    rounds: int


class Side:
    """A process that is started when this is entered, and gone when it is left."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        takes: Callable[[Task], bool] = lambda _: True,
    ) -> None:
        self.name, self.takes = name, takes
        self.about = ""
        self._command, self._environment = command, environment or {}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self._environment},
        )
        try:
            self.about = str(self._answer()["about"])
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def seconds(self, task: Task, steps: int) -> float:
        assert self._process.stdin is not None
        line = f"decode {task.streams} {steps}" if task.decodes else f"prefill {task.streams}"
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return float(str(self._answer()["seconds"]))

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, object] = json.loads(line)
                return found
        raise RuntimeError(f"{self.name} ended with status {self._process.wait()}.")


@dataclass(frozen=True, slots=True)
class Measured:
    """One task, by each side once."""

    speeds: Mapping[str, float]
    """Tokens a second, by side."""
    disturbance: Disturbance


@dataclass(slots=True)
class Comparison:
    """One task of one model, round by round."""

    model: str
    task: Task
    bars: Mapping[str, float]
    """The least ratio of Ostro to another side."""
    measured: list[Measured] = field(default_factory=list)

    @property
    def quiet(self) -> Sequence[Measured]:
        return [each for each in self.measured if each.disturbance.quiet]

    @property
    def counted(self) -> Sequence[Measured]:
        """The quiet measurements, or all of them where none was quiet."""
        return self.quiet or self.measured

    def speeds(self, side: str) -> list[float]:
        return [each.speeds[side] for each in self.counted if side in each.speeds]

    def ratios(self, side: str) -> list[float]:
        """Of Ostro to another side, within a round."""
        return [each.speeds[OSTRO] / each.speeds[side] for each in self.counted if {OSTRO, side} <= each.speeds.keys()]

    def met(self, side: str) -> bool | None:
        """Whether the median ratio reaches its bar; None without one, or without measurements."""
        ratios = self.ratios(side)
        return statistics.median(ratios) >= self.bars[side] if ratios and side in self.bars else None

    def as_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "task": self.task.name,
            "streams": self.task.streams,
            "bars": dict(self.bars),
            "quiet": len(self.quiet),
            "ratios": {side: quartiles(ratios) for side in OTHERS if (ratios := self.ratios(side))},
            "rounds": [
                {
                    "tokens_per_second": dict(each.speeds),
                    "stolen": each.disturbance.stolen,
                    "pressure": each.disturbance.pressure,
                }
                for each in self.measured
            ],
        }


def compare(
    comparisons: Sequence[Comparison],
    sides: Sequence[Side],
    plan: Plan,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[int]:
    """Measures round after round, for so many seconds at most, and tells the number of each that is done.

    The first round is measured however long it takes. All sides are warmed up before it.
    """
    deadline = clock() + seconds
    steps = {each.task: _steps(each.task, sides, plan) for each in comparisons}
    longest = 0.0
    for number in range(plan.rounds):
        began = clock()
        if number and began + longest > deadline:
            return
        for comparison in comparisons:
            task = comparison.task
            before = counters()
            taken = {side.name: side.seconds(task, steps[task]) for side in in_turn(sides, number) if side.takes(task)}
            tokens = task.streams * (steps[task] if task.decodes else plan.input)
            speeds = {name: tokens / seconds for name, seconds in taken.items()}
            comparison.measured.append(Measured(speeds, before.until(counters())))
        longest = max(longest, clock() - began)
        yield number + 1


def in_turn(sides: Sequence[Side], number: int) -> list[Side]:
    """Each side is as often before any other as after it, and as often first."""
    start = number // 2 % len(sides)
    turned = [*sides[start:], *sides[:start]]
    return turned if number % 2 == 0 else turned[::-1]


def _steps(task: Task, sides: Sequence[Side], plan: Plan) -> int:
    """As many steps for all sides: contexts grow alike. Warms the sides up."""
    few = min(4, plan.most_steps)
    slowest = max(side.seconds(task, few) for side in sides if side.takes(task)) / few
    return max(few, min(plan.most_steps, round(plan.seconds / slowest))) if task.decodes else 0


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The median between the quartiles."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def table(comparisons: Sequence[Comparison]) -> str:
    """A line for each task of each model. Ratios are medians within a round, with their quartiles."""
    others = [side for side in OTHERS if any(each.ratios(side) for each in comparisons)]
    head = ["", f"{OSTRO}, tokens/s", LLAMA]
    for side in others:
        head += [f"{OSTRO} / {side}", *(["met"] if any(side in each.bars for each in comparisons) else [])]
    lines = [[*head, "quiet rounds"]]
    for each in comparisons:
        if not each.measured:
            continue
        line = [f"{each.model}, {each.task.name}", _median(each.speeds(OSTRO)), _median(each.speeds(LLAMA))]
        for side in others:
            line.append(_spread(each.ratios(side)))
            if any(side in other.bars for other in comparisons):
                line.append({True: "yes", False: f"NO (≥ {each.bars.get(side, 0):g})", None: ""}[each.met(side)])
        lines.append([*line, f"{len(each.quiet)} of {len(each.measured)}"])
    verdicts = [met for each in comparisons for side in each.bars if (met := each.met(side)) is not None]
    text = aligned(lines, left=[0])
    text += f"\n{verdicts.count(True)} of {len(verdicts)} bars met"
    if restless := sum(not each.quiet for each in comparisons if each.measured):
        text += f"; {restless} of {len(lines) - 1} lines have no quiet round, and count disturbed ones"
    return text


def _median(values: Sequence[float]) -> str:
    if not values:
        return "–"
    middle = statistics.median(values)
    return f"{middle:.4g}" if middle < 1000 else f"{middle:,.0f}"


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "–"
    low, middle, high = quartiles(ratios)
    return f"{middle:.2f} [{low:.2f}–{high:.2f}]"
