"""What speculation brings on a CPU: `--speculative auto` against `off`, the same requests, one run.

    python bench/speculative.py                          # all parts with the default model: a quarter of an hour
    python bench/speculative.py edits prose --runs 3
    python bench/speculative.py --model REF --save

Both engines live in this process and take turns, request by request, so that a busy moment of the machine favours
neither; of several runs of the same request the fastest counts. Times are from the first token to the last. Where
other programs keep the machine busy, take --threads 1 and look at the speedup in CPU time.

    rows       a step of 1 to 16 rows of one sequence, as verifying drafts takes: milliseconds, and relative to one row
    edits      functions of Python's standard library, in a chat that asks for a change and the whole code; one stream
    predicted  the same, with the code as the request's `prediction`
    prose      Alice's Adventures in Wonderland, continued at temperature 0.8; one stream
    streams    32 streams of that at once, and 32 of the edits
    identity   1,000 prompts with drafts wherever there is a match, whatever they cost: every token must be the same
"""

import argparse
import ast
import json
import os
import platform
import random
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ostro.config import EngineConfig
from ostro.engine.batch import Batch, Chunk
from ostro.engine.request import Request
from ostro.engine.runner import ModelRunner
from ostro.engine.sequence import Sequence
from ostro.engine.speculation import NgramSpeculation
from ostro.llm import LLM
from ostro.sampling_params import SamplingParams

HERE = Path(__file__).parent
TEXT = HERE / "texts" / "alice.txt"
RESULTS = HERE / "results" / "speculative.json"
STDLIB = Path(sysconfig.get_paths()["stdlib"])
MODULES = (
    *("base64", "bisect", "calendar", "configparser", "copy", "csv", "difflib"),
    *("fnmatch", "glob", "heapq", "shlex", "shutil", "statistics", "textwrap"),
)
TASKS = (
    "Rename `{name}` to `{name}_v2` in this code. Reply with the whole code only.",
    "Add type hints to this code and answer with the whole code.",
    "Add a comment at the top of this code, and repeat the code.",
)


@dataclass(frozen=True)
class Timed:
    tokens: int
    seconds: float
    cpu_seconds: float
    token_ids: tuple[int, ...]


class Bench:
    def __init__(self, settings: EngineConfig, runs: int, count: int) -> None:
        self.runs, self.count = runs, count
        self.off = LLM(config=replace(settings, speculative="off"))
        self.on = LLM(config=replace(settings, speculative="ngram"))

    # --- parts

    def rows(self) -> dict[str, object]:
        """The runner's own time for a step, without the engine around it."""
        runner = self.off.core.runner
        found: dict[str, object] = {}
        for context in (128, 1024):
            times = _step_times(runner, context, (1, 2, 3, 4, 6, 8, 12, 16))
            found[f"context {context}"] = {
                str(rows): f"{1000 * seconds:.2f} ms, {seconds / times[1]:.2f}x" for rows, seconds in times.items()
            }
        return found

    def edits(self) -> dict[str, object]:
        return self._one_stream([self._edit(*each) for each in _functions(self.count)])

    def predicted(self) -> dict[str, object]:
        functions = _functions(self.count)
        texts = [self.on.frontend.predicted_ids(code) for _, _, code in functions]
        made = [replace(self._edit(*each), predicted_ids=ids) for each, ids in zip(functions, texts, strict=True)]
        return self._one_stream(made)

    def prose(self) -> dict[str, object]:
        return self._one_stream([self._prose(seed) for seed in range(self.count)])

    def streams(self) -> dict[str, object]:
        prose = [self._prose(seed, 400) for seed in range(32)]
        edits = [self._edit(*each) for each in _functions(32)]
        return {
            kind: self._many_streams([_of_tokens(request, 64) for request in requests])
            for kind, requests in (("prose", prose), ("edits", edits))
        }

    def identity(self, number: int = 1000) -> dict[str, object]:
        self.on.core.scheduler.speculation = _Eager()
        before = self._drafts()
        requests = [self._mixed(seed) for seed in range(number)]
        differing = 0
        for at in range(0, number, 8):
            part = requests[at : at + 8]
            with_drafts, without = _finish(self.on, part), _finish(self.off, part)
            differing += sum(a != b for a, b in zip(with_drafts, without, strict=True))
        drafted, accepted = (now - then for now, then in zip(self._drafts(), before, strict=True))
        self.on.core.scheduler.speculation = NgramSpeculation()
        return {"prompts": number, "drafted": drafted, "accepted": accepted, "differing": differing}

    # --- requests

    def _edit(self, task: int, name: str, code: str) -> Request:
        asked = f"{TASKS[task].format(name=name)}\n\n```python\n{code}\n```"
        prompt = self.off.chat_prompt([{"role": "user", "content": asked}])
        return self.off.prepare(prompt, SamplingParams(max_tokens=300, temperature=0))

    def _prose(self, seed: int, characters: int = 1200) -> Request:
        params = SamplingParams(max_tokens=160, temperature=0.8, seed=seed, ignore_eos=True)
        return self.off.prepare(_window(TEXT.read_text(encoding="utf-8"), seed, characters), params)

    def _mixed(self, seed: int) -> Request:
        chance = random.Random(seed)
        code = (STDLIB / f"{chance.choice(MODULES)}.py").read_text(encoding="utf-8")
        text = _window(code if seed % 2 else TEXT.read_text(encoding="utf-8"), seed, chance.randint(80, 400))
        params = SamplingParams(
            max_tokens=chance.randint(8, 40),
            temperature=(0.0, 0.0, 0.7, 1.3)[seed % 4],
            top_p=chance.choice((1.0, 0.9)),
            repetition_penalty=chance.choice((1.0, 1.0, 1.1)),
            logprobs=chance.choice((None, None, 0)),
            seed=seed,
            ignore_eos=True,
        )
        return self.off.prepare(text, params)

    # --- measuring

    def _drafts(self) -> tuple[int, int]:
        counters = self.on.core.scheduler.counters
        return counters.drafted_tokens, counters.accepted_tokens

    def _one_stream(self, requests: Seq[Request]) -> dict[str, object]:
        found: list[tuple[Timed, Timed]] = []
        before = self._drafts()
        for request in requests:
            found.append(self._both(partial(_timed, request)))
        drafted, accepted = (now - then for now, then in zip(self._drafts(), before, strict=True))
        return {
            "requests": len(requests),
            "accepted of drafted": f"{accepted} of {drafted}",
            "speedup, median": round(statistics.median(off.seconds / on.seconds for off, on in found), 3),
            **_compared(found),
        }

    def _many_streams(self, requests: Seq[Request]) -> dict[str, object]:
        return _compared([self._both(partial(_timed_all, requests))])

    def _both(self, run: Callable[[LLM], Timed]) -> tuple[Timed, Timed]:
        """The fastest run of each, in turns."""
        pairs = [(run(self.off), run(self.on)) for _ in range(self.runs)]
        return (
            min((off for off, _ in pairs), key=lambda each: each.seconds),
            min((on for _, on in pairs), key=lambda each: each.seconds),
        )


def _compared(found: Seq[tuple[Timed, Timed]]) -> dict[str, object]:
    """Runs without drafts against the same with them."""
    tokens, took, cpu = (
        [sum(getattr(pair[side], name) for pair in found) for side in (0, 1)]
        for name in ("tokens", "seconds", "cpu_seconds")
    )
    return {
        "tokens": tokens[0],
        "tokens a second, off": round(tokens[0] / took[0], 1),
        "tokens a second, on": round(tokens[1] / took[1], 1),
        "speedup": round(took[0] / took[1] * tokens[1] / tokens[0], 3),
        "speedup in CPU time": round(cpu[0] / cpu[1] * tokens[1] / tokens[0], 3),
        "differing": sum(off.token_ids != on.token_ids for off, on in found),
    }


class _Eager(NgramSpeculation):
    """Believes that further rows cost next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        for rows in (1, 16, 64):
            super().note_step(rows, 1.0 + rows / 1000)

    def note_step(self, rows: int, seconds: float) -> None:
        """Learns nothing, so that it never gives up."""


def _timed(request: Request, llm: LLM) -> Timed:
    core = llm.core
    core.scheduler.kv.clear_cache()
    core.add(request)
    ids: list[int] = []
    first, first_cpu = 0.0, 0.0
    while core.has_work:
        gains = core.step()
        if gains and not ids:
            first, first_cpu = time.perf_counter(), time.process_time()
        ids += [token for gain in gains for token in gain.token_ids]
    return Timed(max(1, len(ids) - 1), time.perf_counter() - first, time.process_time() - first_cpu, tuple(ids))


def _timed_all(requests: Seq[Request], llm: LLM) -> Timed:
    """All at once; from the step that gave the last of them its first token."""
    core = llm.core
    core.scheduler.kv.clear_cache()
    found: dict[int, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        core.add(request)
    begun, begun_cpu, before = 0.0, 0.0, 0
    while core.has_work:
        for gain in core.step():
            found[gain.request_id] += gain.token_ids
        if not begun and all(found.values()):
            begun, begun_cpu = time.perf_counter(), time.process_time()
            before = sum(map(len, found.values()))
    total = sum(map(len, found.values()))
    ids = tuple(token for id in sorted(found) for token in found[id])
    return Timed(total - before, time.perf_counter() - begun, time.process_time() - begun_cpu, ids)


def _finish(llm: LLM, requests: Seq[Request]) -> list[tuple[object, ...]]:
    """Each request's tokens, and their log-probabilities if it asks for them."""
    core = llm.core
    found: dict[int, tuple[list[int], list[object]]] = {request.id: ([], []) for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        for gain in core.step():
            tokens, logprobs = found[gain.request_id]
            tokens += gain.token_ids
            logprobs += gain.logprobs
    return [tuple(found[request.id]) for request in requests]


def _step_times(runner: ModelRunner, context: int, numbers: Seq[int], repeats: int = 15) -> dict[int, float]:
    """Seconds of the fastest step by number of rows, all but one of them drafts, after a context."""
    spec, chance = runner.spec, random.Random(0)

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(chance.randrange(spec.vocab_size) for _ in range(number))

    request = Request(id=1, prompt_ids=tokens(context + 1), params=SamplingParams(temperature=0), seed=0)
    seq = Sequence(1, request, max_len=context + 1 + max(numbers))
    seq.pages = list(range(-(-seq.max_len // spec.page_size)))
    for at in range(0, context, 128):
        runner.launch(Batch((Chunk(seq, at, min(128, context - at)),))).results()
    fastest = dict.fromkeys(numbers, float("inf"))
    for _ in range(repeats):
        for rows in numbers:
            batch = Batch((Chunk(seq, context, 1, (seq,), drafts=tokens(rows - 1)),))
            began = time.perf_counter()
            runner.launch(batch).results()
            fastest[rows] = min(fastest[rows], time.perf_counter() - began)
    return fastest


def _of_tokens(request: Request, number: int) -> Request:
    return replace(request, params=request.params.with_changes(max_tokens=number, ignore_eos=True))


def _functions(count: int) -> list[tuple[int, str, str]]:
    """Functions and classes of 600 to 2,200 characters, each with the number of a task."""
    found = []
    for module in MODULES:
        source = (STDLIB / f"{module}.py").read_text(encoding="utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                code = ast.get_source_segment(source, node) or ""
                if 600 < len(code) < 2200:
                    found.append((node.name, code))
    random.Random(0).shuffle(found)
    return [(at % len(TASKS), name, code) for at, (name, code) in enumerate(found[:count])]


def _window(text: str, seed: int, length: int) -> str:
    start = random.Random(seed).randrange(max(1, len(text) - length))
    return text[start : start + length]


PARTS = ("rows", "edits", "predicted", "prose", "streams", "identity")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--model")
    parser.add_argument("--backend", choices=["auto", "native", "torch"], default="auto")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--count", type=int, default=12, help="requests of a part with one stream")
    parser.add_argument(
        "--threads", type=int, default="auto", help="on a busy machine, 1 is the fairest: no thread waits for another"
    )
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    settings = EngineConfig(model=args.model, backend=args.backend, threads=args.threads, kv_memory=1 << 30)
    bench = Bench(settings, args.runs, args.count)
    about = {
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "load_average": round(os.getloadavg()[0], 2),
        "model": bench.off.name,
        "runner": f"{bench.off.core.runner.spec.backend}, {bench.off.core.runner.spec.precision}",
        "runs": args.runs,
        "threads": args.threads,
    }
    print(json.dumps(about), file=sys.stderr)
    wrong = 0
    for part in args.parts or PARTS:
        found = getattr(bench, part)()
        print(json.dumps({part: found}, indent=2), flush=True)
        wrong += sum(each.get("differing", 0) for each in (found, *found.values()) if isinstance(each, dict))
        if args.save:
            saved = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
            saved[part] = found | {"run": about}
            RESULTS.write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
