"""Random Llamas of some shapes, computed by turns by Ostro, llama.cpp and a plain read of as many bytes."""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cpu_peers.ostro_worker import SLACK
from cpu_peers.random_llama import KINDS, OWN_KINDS, SHAPES, bytes_per_token, write_random_llama
from cpu_peers.rounds import AGAIN, FORMER, LLAMA, OSTRO, READ, Comparison, Plan, Side, Task, compare

TURNS = "llama-turns"
_HERE = Path(__file__).parent
_SYNC_SECONDS = 30.0

# The least ratio of Ostro to llama.cpp, by streams decoded; and of prompts.
_DECODE: Mapping[int, float] = {1: 1.2, 8: 1.6, 32: 1.6}
_PREFILL = 1.8
_MIXTURE: Mapping[int, float] = {1: 1.2, 8: 1.2, 32: 1.2}
# Of models that keep a state, whatever the task.
_HYBRID = 1.1
_READ = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """What is measured, and with what."""

    work: Path
    llama: Path
    """Directory of `llama-turns`."""
    threads: int
    backend: str
    kinds: Sequence[str]
    plan: Plan
    control: bool
    """Whether a second Ostro is measured, which shows what differs without a reason."""
    former: Path | None
    """Sources of another Ostro."""

    def measure(
        self,
        parts: Sequence[str],
        seconds: float,
        told: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> Iterator[list[Comparison]]:
        """Gives a model's comparisons as soon as there are any; they fill while this runs, round by round.

        Each model has an equal share of the time that is left when it begins.
        """
        deadline = clock() + seconds
        kinds = [kind for kind in self.kinds if kind in KINDS]
        models = [(part, kind) for part in parts for kind in OWN_KINDS.get(part, kinds)]
        reader = self._reader()
        for number, (part, kind) in enumerate(models):
            began = clock()
            if began >= deadline:
                told(f"No time was left for {', '.join(f'{part} {kind}' for part, kind in models[number:])}.")
                return
            share = (deadline - began) / (len(models) - number)
            comparisons = [Comparison(f"{part} {kind}", task, _bars(part, task)) for task in self.plan.tasks]
            with ExitStack() as stack:
                sides = []
                for side in self._sides(part, kind, self.made(part, kind), reader):
                    sides.append(stack.enter_context(side))
                    told(f"{part} {kind}: {side.name}: {side.about} ({clock() - began:.1f} s)")
                yield comparisons
                _write_back()
                for done in compare(comparisons, sides, self.plan, began + share - clock(), clock):
                    told(f"{part} {kind}: round {done}, {clock() - began:.1f} s")
                    yield comparisons

    def made(self, part: str, kind: str) -> Path:
        """The model's file, written on first use."""
        path = self.work / f"random-{part}.{kind}.gguf"
        if not path.is_file():
            self.work.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            write_random_llama(partial, SHAPES[part], kind)
            partial.replace(path)
        return path

    def _sides(self, part: str, kind: str, model: Path, reader: Path) -> list[Side]:
        plan = self.plan
        streams = max((task.streams for task in plan.tasks if task.decodes), default=1)
        prompts = max((task.streams for task in plan.tasks if not task.decodes), default=1)
        tokens = streams * (plan.input + plan.most_steps + SLACK + 1) + 4 * prompts * plan.input
        settings: dict[str, object] = {"device": "cpu", "threads": self.threads, "speculative": "off"}
        # States take half of it at most.
        states = 2 * (streams + prompts) * SHAPES[part].state_bytes
        settings["kv_memory"] = tokens * SHAPES[part].kv_bytes + 2 * states
        if self.backend != "auto":
            settings["backend"] = self.backend
        job = {"task": "turns", "model": str(model), "settings": settings, "streams": streams, "input": plan.input}

        def ostro(name: str, source: Path | None = None) -> Side:
            given = job if source is None else {**job, "source": str(source)}
            environment = {"OSTRO_CACHE": str(self.work / ("cache" if source is None else "cache-former"))}
            if source is not None:
                environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
            command = [sys.executable, str(_HERE / "ostro_worker.py"), json.dumps(given)]
            return Side(name, command, environment=environment)

        numbers = (self.threads, streams, prompts, plan.input, plan.most_steps)
        found = [ostro(OSTRO), Side(LLAMA, [str(self.llama / TURNS), str(model), *map(str, numbers)])]
        if self.former is not None:
            found.append(ostro(FORMER, former_sources(self.former, self.work)))
        if self.control:
            found.append(ostro(AGAIN))
        size = bytes_per_token(SHAPES[part], kind)
        found.append(
            Side(
                READ,
                [str(reader), str(size), str(self.threads)],
                takes=lambda task: task.decodes and task.streams == 1,
            )
        )
        return found

    def _reader(self) -> Path:
        source, program = _HERE / "read_bandwidth.cpp", self.work / "read-bandwidth"
        self.work.mkdir(parents=True, exist_ok=True)
        options = ["-O3", "-march=native", "-std=c++17", "-pthread"]
        subprocess.run(["c++", *options, str(source), "-o", str(program)], check=True)
        return program


def former_sources(path: Path, work: Path) -> Path:
    """The `src` of a checkout, or of an archive of one, with its native core built."""
    root = path
    if not path.is_dir():
        root = work / f"former-{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
        if not root.is_dir():
            partial = root.with_name(root.name + ".partial")
            with tarfile.open(path) as archive:
                archive.extractall(partial, filter="data")
            partial.replace(root)
    sources = root / "src"
    if not (sources / "ostro").is_dir():
        raise FileNotFoundError(f"{path} holds no src/ostro.")
    if not list((sources / "ostro" / "kernels" / "cpu").glob("libostro_native.*")):
        build_native(root, work / f"build-{root.name}")
    return sources


def build_native(root: Path, build: Path) -> None:
    """Builds a checkout's native core into its sources, as an editable install does."""
    configure = ["cmake", "-S", str(root / "native"), "-B", str(build), "-DSKBUILD_STATE=editable"]
    for command in (configure, ["cmake", "--build", str(build), "--parallel"]):
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if ran.returncode:
            raise RuntimeError(f"{root} could not be built: {ran.stdout[-2000:]}")


def _bars(part: str, task: Task) -> dict[str, float]:
    if SHAPES[part].hybrid:
        return {LLAMA: _HYBRID}
    if SHAPES[part].experts:
        return {LLAMA: _MIXTURE[task.streams]} if task.decodes and task.streams in _MIXTURE else {}
    if not task.decodes:
        return {LLAMA: _PREFILL}
    bars = {LLAMA: _DECODE[task.streams]} if task.streams in _DECODE else {}
    return {**bars, READ: _READ} if task.streams == 1 else bars


def _write_back() -> None:
    """So that files just made are not written to disk during the first rounds."""
    try:
        subprocess.run(["sync"], timeout=_SYNC_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
