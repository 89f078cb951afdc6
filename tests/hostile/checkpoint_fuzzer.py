"""Plans for, loads and generates with mutated checkpoints: each is refused by name or gives right tokens, and nothing
dies.

    make fuzz-checkpoints                                       # 50,000 of them
    make fuzz-checkpoints ARGS="--count 2000 --seed 7"
    make fuzz-checkpoints ARGS="--seed 7 --only 1234"           # one again, with its traceback
    make fuzz-checkpoints ARGS="--only-subjects 'qwen3_5*,gguf-qwen3_5*'"

A case is its seed and its number: what is changed, and how, follows from these. A subject is a checkpoint that is
changed: a family or variant (`lfm2`, `lfm2-biases`), a GGUF file (`gguf-Q8_0`, `gguf-lfm2-F32`), a quantized one
(`quantized-awq`), a pickle or an adapter. `--only-subjects` takes patterns of their names, as a shell has them, and
numbers the cases of those subjects alone. Cases run in forked children, so that a
signal, a hang or an abort is noticed and pinned to its case; the next child goes on after it.

    refused     by an error of `ostro.errors`
    same        the tokens of the model before it was changed
    right       other tokens, which torch finds as likely as any for the same files
    near tie    other tokens, which torch finds so if its activations are moved as rounding may move them
    torch       it runs on torch, which is what native results are held to

Whatever else happens is a finding: a signal, an untyped exception, more than MOST_CPU_SECONDS, memory beyond the limit,
wrong tokens. The exit status is 1 if there are any. The last line also says by how much a child's memory grew.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from random import Random
from unittest.mock import patch

import torch
from checkpoint_mutations import VOCAB, Files, Subject, mutated, subjects
from torch import Tensor

from ostro.backends.loading import load_runner
from ostro.backends.native.runner import NativeRunner
from ostro.backends.planning import plan
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.runner import ModelRunner, TokenLogprob
from ostro.errors import OstroError
from ostro.kernels.cpu.library import GROUP
from ostro.sampling_params import MAX_LOGPROBS, SamplingParams
from ostro.torch_models.layers import Matrix
from ostro.weights import open_checkpoint

PROMPT, LENGTH = tuple(range(9)), 3
MOST_SECONDS, MOST_BYTES = 60, 2 << 30
# Of the case alone, without what its results are compared with. Time on the CPU, as the machine may be busy, and ten
# times what the slowest takes on a quick one: shared cores may run at a third of their speed.
MOST_CPU_SECONDS = 10.0
# A child's cases: memory is compared after the first few, when all code has run once, and after all.
CASES_A_CHILD, WARM_CASES = 2500, 250
# How much less likely than the best a native token may be by torch's numbers: rounded activations move scores.
FLOAT_GAP, QUANTIZED_GAP = 0.05, 2.0
# Where a changed weight brings two keys to a near tie, rounding decides between them, and scores move by any amount.
# Such a token is right if torch finds it likely in one of this many runs with activations that are moved as far.
NOISY_RUNS = 64
# One in this many checkpoints whose tokens stay the same is compared with torch too.
CLOSELY = 8


@dataclass
class Report:
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    slowest: float = 0.0
    """CPU seconds of the slowest case."""
    growth: int = 0
    """Most bytes by which a child's memory grew over its cases."""

    @property
    def num_cases(self) -> int:
        return sum(self.outcomes.values()) + len(self.findings)


def fuzz(
    count: int, seed: int, *, first: int = 0, kind: "type[Bench] | None" = None, only_subjects: str = ""
) -> Report:
    """Runs the cases from `first` on, in children; says what became of them."""
    report, started = Report(), time.monotonic()
    # No threads before a fork, and none to wait for after it.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=_fast_directory()) as scratch:
        bench = (kind or Bench)(Path(scratch), seed)
        bench.keep(only_subjects)
        at, end = first, first + count
        while at < end:
            at = _run_child(bench, at, min(end, at + CASES_A_CHILD), report)
    report.seconds = time.monotonic() - started
    return report


def _fast_directory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _run_child(bench: "Bench", first: int, end: int, report: Report) -> int:
    """Where to go on: at the end, or after the case that ended the child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        status = 1
        try:
            _limit_memory()
            with os.fdopen(write, "w", buffering=1) as results:
                for number in range(first, end):
                    print(json.dumps([number, "began", "", 0.0, 0]), file=results)
                    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
                    outcome, detail = bench.outcome(number)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    if number == min(first + WARM_CASES, end - 1):
                        warm = _resident()
                    grown = _resident() - warm if number == end - 1 else 0
                    print(json.dumps([number, outcome, detail, bench.seconds, grown]), file=results)
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    number, outcome = first, "began"
    with os.fdopen(read) as results:
        for line in results:
            number, outcome, detail, seconds, grown = json.loads(line)
            report.slowest, report.growth = max(report.slowest, seconds), max(report.growth, grown)
            if outcome not in ("began", "finding") and seconds > MOST_CPU_SECONDS:
                outcome, detail = "finding", f"took {seconds:.1f} s"
            if outcome == "finding":
                report.findings.append(f"{bench.label(number)}: {detail}")
            elif outcome != "began":
                report.outcomes[outcome] += 1
    _, status = os.waitpid(child, 0)
    if status:
        cause = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "an abort"
        report.findings.append(f"{bench.label(number)}: ended by {cause}")
        return number + 1
    return end


def _resident() -> int:
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def _limit_memory() -> None:
    """An allocation that a file asks for is an error here, and no burden for the machine. Sanitizers need more."""
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        return
    with suppress(OSError):
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))


class Bench:
    """One seed's cases: what they are made of, and where they lie."""

    seconds = 0.0
    """CPU time of the latest case."""
    only = ""
    """The option that chose its subjects, for labels."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.seed = root, seed
        self.subjects = subjects()
        self.references = {each.name: self._reference(each) for each in self.subjects}

    def keep(self, patterns: str) -> None:
        """Leaves only subjects whose names match one of the patterns, which commas separate; all if there is none."""
        if not patterns:
            return
        self.only = f"--only-subjects '{patterns}' "
        self.subjects = [
            each for each in self.subjects if any(map(partial(fnmatchcase, each.name), patterns.split(",")))
        ]
        if not self.subjects:
            raise SystemExit(f"No subject's name matches {patterns}.")

    def label(self, number: int) -> str:
        return f"{self.only}--seed {self.seed} --only {number} ({self._subject(number)[0].name})"

    def outcome(self, number: int) -> tuple[str, str]:
        subject, random = self._subject(number)
        self.seconds = 0.0
        with self._files(self._mutated(subject, random)) as directory:
            try:
                return self._run(subject, directory, looks_closely=number % CLOSELY == 0)
            except OstroError as error:
                return "refused", error.message
            except Exception:  # noqa: BLE001 - which ones there are is what is to be found out
                return "finding", traceback.format_exc()

    def _subject(self, number: int) -> tuple[Subject, Random]:
        random = Random(f"{self.seed}/{number}")
        return random.choice(self.subjects), random

    def _mutated(self, subject: Subject, random: Random) -> Files:
        return mutated(subject, random)

    def _files(self, files: Files) -> "_Case":
        return _Case(self.root / "case", files)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the block's time as the case's own."""
        began = time.process_time()
        try:
            yield
        finally:
            self.seconds += time.process_time() - began

    def _reference(self, subject: Subject) -> list[int]:
        with self._files(subject.files) as directory:
            return _tokens(_runner(subject, directory, "auto"), subject)

    def _run(self, subject: Subject, directory: Path, *, looks_closely: bool) -> tuple[str, str]:
        with self.timed():
            plan_for_gpu(subject, directory)
            runner = _runner(subject, directory, "auto")
            tokens = _tokens(runner, subject)
        if not isinstance(runner, NativeRunner):
            return "torch", ""
        # Few changes leave all tokens as they are by being ignored: a part of them is looked at more closely.
        if tokens == self.references[subject.name] and not looks_closely:
            return "same", ""
        try:
            twin = _runner(subject, directory, "torch")
            gaps = _gaps(twin, tokens, subject.adapter)
        except OstroError as error:
            return "finding", f"the native core ran what torch refuses: {error.message}"
        if max(gaps) <= (QUANTIZED_GAP if subject.quantized else FLOAT_GAP):
            return "right", ""
        if subject.quantized and any(
            max(_noisy_gaps(twin, tokens, seed, subject.adapter)) <= QUANTIZED_GAP for seed in range(NOISY_RUNS)
        ):
            return "near tie", ""
        return "finding", f"tokens {tokens} are wrong by torch: {gaps} less likely than the best"


class _Case:
    """A directory with the files, and a cache of its own, as long as the block runs."""

    def __init__(self, directory: Path, files: Files) -> None:
        self._directory, self._files = directory, files

    def __enter__(self) -> Path:
        shutil.rmtree(self._directory, ignore_errors=True)
        for name, data in self._files.items():
            path = self._directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        os.environ["OSTRO_CACHE"] = str(self._directory / "cache")
        return self._directory

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def plan_for_gpu(subject: Subject, directory: Path) -> None:
    """A GPU may refuse what a CPU runs; headers must crash neither."""
    config = EngineConfig(device="cuda", adapters=_adapters(subject, directory))
    with suppress(OstroError):
        plan(directory / subject.model, config, memory=1 << 30)


def _adapters(subject: Subject, directory: Path) -> tuple[tuple[str, str], ...]:
    return () if subject.adapter is None else ((subject.adapter, str(directory / subject.adapter)),)


def _runner(subject: Subject, directory: Path, backend: str) -> ModelRunner:
    config = EngineConfig(
        device="cpu",
        backend=backend,  # type: ignore[arg-type]
        kv_memory=1 << 20,
        max_batch_tokens=32,
        max_batch_seqs=2,
        threads=1,
        adapters=_adapters(subject, directory),
    )
    return load_runner(open_checkpoint(directory / subject.model), config)


def _tokens(runner: ModelRunner, subject: Subject) -> list[int]:
    core = EngineCore(runner, adapters=() if subject.adapter is None else (subject.adapter,))
    params = SamplingParams(max_tokens=LENGTH, temperature=0)
    core.add(Request(id=0, prompt_ids=PROMPT, params=params, seed=0, adapter=subject.adapter))
    found: list[int] = []
    for gain in _gains(core):
        found += gain
    assert len(found) == LENGTH, "as many tokens as were asked for"
    assert all(0 <= token < VOCAB for token in found), "tokens of the vocabulary"
    return found


def _gains(core: EngineCore) -> Iterator[list[int]]:
    while core.has_work:
        for gain in core.step():
            if gain.error is not None:
                raise OstroError(gain.error)
            yield gain.token_ids


def _gaps(runner: ModelRunner, tokens: Sequence[int], adapter: str | None = None) -> list[float]:
    """How much less likely each token is than the best at its place. The last is never read: its row, or that of its
    place, may hold a NaN.
    """
    core = EngineCore(runner, adapters=() if adapter is None else (adapter,))
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS)
    prompt = (*PROMPT, *tokens[:-1])
    request = Request(id=0, prompt_ids=prompt, params=params, seed=0, prompt_logprobs_from=len(PROMPT), adapter=adapter)
    core.add(request)
    found: list[TokenLogprob] = []
    while core.has_work:
        for gain in core.step():
            if gain.error is not None:
                raise OstroError(gain.error)
            found += gain.prompt_logprobs + gain.logprobs
    # One that is not listed is no likelier than the last that is.
    listed = [(each.top[0][1], dict(each.top), each.top[-1][1]) for each in found]
    return [best - each.get(token, last) for (best, each, last), token in zip(listed, tokens, strict=True)]


def _noisy_gaps(runner: ModelRunner, tokens: Sequence[int], seed: int, adapter: str | None = None) -> list[float]:
    """The same with inputs of products that are moved at random by up to what codes of 8 bits may round away."""
    dice = torch.Generator().manual_seed(seed)

    def moved(self: Matrix, x: Tensor, bias: Tensor | None = None) -> Tensor:
        groups = x.reshape(*x.shape[:-1], -1, GROUP if x.shape[-1] % GROUP == 0 else x.shape[-1])
        half_a_step = groups.abs().amax(-1, keepdim=True) / 254
        noise = torch.rand(groups.shape, generator=dice) * 2 - 1
        return exact(self, (groups + half_a_step * noise).reshape(x.shape), bias)

    exact = Matrix.matmul
    with patch.object(Matrix, "matmul", moved):
        return _gaps(runner, tokens, adapter)


def run_command(description: str | None, kind: type[Bench], count: int = 50_000) -> int:
    """A fuzzer's command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="run this case alone, in this process")
    parser.add_argument("--only-subjects", default="", metavar="PATTERN,…", help="change these checkpoints alone")
    options = parser.parse_args()
    if options.only is not None:
        with tempfile.TemporaryDirectory(dir=_fast_directory()) as scratch:
            bench = kind(Path(scratch), options.seed)
            bench.keep(options.only_subjects)
            outcome, detail = bench.outcome(options.only)
        print(outcome, detail)
        return 1 if outcome == "finding" else 0
    report = fuzz(options.count, options.seed, first=options.first, kind=kind, only_subjects=options.only_subjects)
    for finding in report.findings:
        print(finding)
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items()))
    print(
        f"the slowest case took {report.slowest:.2f} s of CPU time; a child grew by {report.growth >> 20} MiB at most"
    )
    print(f"{report.num_cases} cases in {report.seconds:.0f} s: {told}; {len(report.findings)} findings")
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(run_command(__doc__, Bench))
