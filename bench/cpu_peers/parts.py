"""What `bench/cpu.py` measures, part by part, and the bars. Each part gives its rows as they are found."""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from cpu_peers.llama_cpp import LlamaCpp, Speed
from cpu_peers.model_files import ModelFiles
from cpu_peers.servers import Served, free_port, load, running
from cpu_peers.verdicts import Bar, Row
from ostro.weights import read_gguf_header

VARIANTS = ("q4_0", "q4_k_m", "q8_0", "default")

# By variant: of tokens generated, by streams; and of prompts.
DECODE_BARS: Mapping[str, Mapping[int, float]] = {
    "q4_0": {1: 1.1, 8: 1.2, 32: 1.3},
    "q4_k_m": {1: 1.1, 8: 1.2, 32: 1.3},
    "q8_0": {1: 1.1, 8: 1.2, 32: 1.3},
    "default": {1: 1.7, 8: 3.0, 32: 3.5},
}
PREFILL_BARS = {"q4_0": 1.3, "q4_k_m": 1.3, "q8_0": 1.5, "default": 5.0}
HTTP_BARS = {1: 1.15, 8: 1.15, 32: 1.15}
TTFT_BARS = {8: 1.0, 32: 1.0}
PERPLEXITY_BAR = Bar("ratio", most=1.005)
# Of weights in 32 bits, where both engines must come to the same; llama.cpp keeps keys and values in 16.
SAME_DEFINITION = Bar("ratio", least=0.999, most=1.001)
START_BAR = Bar("value", most=2.0)
MEMORY_BAR = Bar("excess", most=250.0)
LOAD_BAR = Bar("value", most=2.0)

# What llama-server computes at a time where nobody says how many clients there are.
_START_SLOTS, _LOAD_SLOTS = 8, 32
_SERVER, _PROGRAMS = "llama-server", "llama.cpp"
_HERE = Path(__file__).parent

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Options from the command line."""

    llama: LlamaCpp
    files: ModelFiles
    threads: int
    backend: str
    variants: Sequence[str]
    runs: int
    streams: Sequence[int]
    input: int
    output: int
    transformers: bool
    waves: int
    load_rate: float
    load_seconds: float
    load_input: int
    load_output: int
    text: Path
    context: int

    @property
    def few_streams(self) -> list[int]:
        """Numbers of streams for slow measurements."""
        return [streams for streams in self.streams if streams <= 8] or [1]

    def once(self) -> "Setup":
        return replace(self, runs=1)

    def by_turns(self, ours: Callable[[int], T], theirs: Callable[[int], T]) -> tuple[list[T], list[T]]:
        """Runs both in turn, alternating which goes first; each receives the run's number."""
        found: tuple[list[T], list[T]] = ([], [])
        for run in range(self.runs):
            for side in (0, 1) if run % 2 == 0 else (1, 0):
                found[side].append((ours, theirs)[side](run))
        return found

    def of_servers(self, model: Path, slots: int, measure: Callable[[Served, int], T]) -> tuple[list[T], list[T]]:
        """Measures Ostro's server and llama.cpp's in turn, each started for its run."""

        def ours(run: int) -> T:
            port = free_port()
            with running(self._ostro_server(model, port), port) as served:
                return measure(served, run)

        def theirs(run: int) -> T:
            port = free_port()
            # A slot's last token is out of reach.
            command = self.llama.server(model, port, slots=slots, slot_tokens=self.input + self.output + 64)
            with running(command, port) as served:
                return measure(served, run)

        return self.by_turns(ours, theirs)

    def ostro(self, task: str, model: Path, job: Mapping[str, object] | None = None) -> dict[str, Any]:
        """The answer of Ostro's engine, in a process of its own."""
        # The peers guess no tokens, and random weights repeat themselves.
        settings: dict[str, object] = {"device": "cpu", "threads": self.threads, "speculative": "off"}
        if self.backend != "auto":
            settings["backend"] = self.backend
        return _worker("ostro_worker.py", {"task": task, "model": str(model), "settings": settings, **(job or {})})

    def _ostro_server(self, model: Path, port: int) -> list[str]:
        command = [sys.executable, "-m", "ostro", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--device", "cpu", "--threads", str(self.threads), "--no-access-log"]
        return command if self.backend == "auto" else [*command, "--backend", self.backend]


# --- without a server -----------------------------------------------------------------------------------------------


def offline(setup: Setup) -> Iterator[Row]:
    for variant in setup.variants:
        model = setup.files.variant(variant)
        ours, theirs = _speeds(setup, model, setup.streams)
        yield from speed_rows(variant, _PROGRAMS, ours, theirs, DECODE_BARS[variant], PREFILL_BARS[variant])
        few = [streams for streams in setup.streams if streams in setup.few_streams]
        if setup.transformers and few and variant == "default":
            job = {"model": str(model), "streams": few, "input": setup.input, "output": setup.output}
            peers = [
                _read_speeds(_worker("transformers_worker.py", {**job, "threads": setup.threads, "seed": run}))
                for run in range(setup.runs)
            ]
            ours = [[speed for speed in run if speed.streams in few] for run in ours]
            yield from speed_rows(variant, "transformers", ours, peers, {}, None)


def perplexity(setup: Setup) -> Iterator[Row]:
    """Once for each engine: it comes out the same each time."""
    for variant in ("f32", *setup.variants):
        model = setup.files.variant(variant)
        found = setup.ostro("perplexity", model, {"text": str(setup.text), "context": setup.context})
        if variant == "f32":
            _check_tokens(setup, model, found["ids"])
        theirs = setup.llama.perplexity(model, setup.text, setup.context)
        bar = SAME_DEFINITION if variant == "f32" else PERPLEXITY_BAR
        yield Row(f"{variant}: perplexity", "", [found["perplexity"]], _PROGRAMS, [theirs], bar)


def speed_rows(
    name: str,
    peer: str,
    ours: Sequence[Sequence[Speed]],
    theirs: Sequence[Sequence[Speed]],
    decode_bars: Mapping[int, float],
    prefill_bar: float | None,
) -> Iterator[Row]:
    """From runs, each with a speed for each number of streams."""
    for mine, their in zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        label = f"{name}, {_counted(mine[0].streams, 'stream')}"
        for what, least in (("decode", decode_bars.get(mine[0].streams)), ("prefill", prefill_bar)):
            values, peers = ([getattr(speed, what) for speed in side] for side in (mine, their))
            yield Row(f"{label}: {what}", "tokens/s", values, peer, peers, _at_least(least))


def _speeds(setup: Setup, model: Path, streams: Sequence[int]) -> tuple[list[list[Speed]], list[list[Speed]]]:
    job = {"streams": streams, "input": setup.input, "output": setup.output}
    return setup.by_turns(
        lambda run: _read_speeds(setup.ostro("speed", model, {**job, "seed": run})),
        lambda _: setup.llama.speeds(model, streams, setup.input, setup.output),
    )


def _read_speeds(found: Mapping[str, Any]) -> list[Speed]:
    return [Speed(**speed) for speed in found["speeds"]]


def _check_tokens(setup: Setup, model: Path, ids: list[int]) -> None:
    """Raises RuntimeError if llama.cpp makes other tokens of the text."""
    port = free_port()
    with running(setup.llama.server(model, port, slots=1, slot_tokens=256), port) as served:
        served.first_token()
        theirs = served.ask("/tokenize", {"content": setup.text.read_text(encoding="utf-8").removesuffix("\n")})
    if theirs["tokens"] != ids:
        raise RuntimeError(
            f"Of the text Ostro makes {len(ids)} tokens, llama.cpp {len(theirs['tokens'])}, not the same."
        )


def _worker(program: str, job: Mapping[str, object]) -> dict[str, Any]:
    """The answer of one of this package's programs to a job."""
    ran = subprocess.run(
        [sys.executable, str(_HERE / program), json.dumps(job)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        raise RuntimeError(f"{program} ended with status {ran.returncode}: {ran.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


# --- with one -------------------------------------------------------------------------------------------------------


def over_http(setup: Setup) -> Iterator[Row]:
    for variant in setup.variants:
        model = setup.files.variant(variant)
        for clients in setup.streams:
            options = ["--concurrency", str(clients), "--requests", str(max(clients * setup.waves, 4))]
            options += ["--warmup", "2", "--vocab-size", str(_vocab_size(model))]
            options += ["--input-len", str(setup.input), "--output-len", str(setup.output)]

            def measure(served: Served, run: int, options: Sequence[str] = tuple(options)) -> tuple[float, float]:
                served.first_token()
                figures = load(served, [*options, "--seed", str(run)])
                return figures["output_tokens_per_second"], figures["ttft"]["p50"]

            ours, theirs = setup.of_servers(model, clients, measure)
            label = f"{variant}, {_counted(clients, 'client')} over HTTP"
            figures = (
                ("output", "tokens/s", _at_least(HTTP_BARS.get(clients))),
                ("TTFT p50", "s", _at_most(TTFT_BARS.get(clients))),
            )
            yield from _columns(label, figures, ours, theirs)


def start(setup: Setup) -> Iterator[Row]:
    for variant in setup.variants:
        model = setup.files.variant(variant)
        request = {"prompt": _prompt(model, setup.input), "max_tokens": setup.output, "temperature": 0}

        def measure(
            served: Served, _: int, request: Mapping[str, object] = {**request, "ignore_eos": True}
        ) -> tuple[float, float, float]:
            seconds = served.first_token()
            served.ask("/v1/completions", request)
            memory = served.memory()
            return seconds, memory.proportional / 1e6, memory.resident / 1e6

        # The first start of either reads files that later ones find in memory, and may write a cache.
        setup.once().of_servers(model, _START_SLOTS, measure)
        ours, theirs = setup.of_servers(model, _START_SLOTS, measure)
        figures = (
            ("start to first token", "s", START_BAR),
            ("memory", "MB", MEMORY_BAR),
            ("memory, shared pages counted by each process", "MB", None),
        )
        yield from _columns(variant, figures, ours, theirs)


def steady_load(setup: Setup) -> Iterator[Row]:
    """Once for each engine, in 8 bits: its hundreds of requests are a spread of their own."""
    model = setup.files.variant("q8_0")
    options = ["--rate", f"{setup.load_rate:g}", "--duration", f"{setup.load_seconds:g}", "--warmup", "4"]
    options += ["--input-len", str(setup.load_input), "--output-len", str(setup.load_output)]
    options += ["--vocab-size", str(_vocab_size(model))]

    def measure(served: Served, _: int) -> tuple[float, float]:
        served.first_token()
        figures = load(served, options)
        return figures["e2e"]["p50"], figures["e2e"]["p99"]

    ours, theirs = setup.once().of_servers(model, _LOAD_SLOTS, measure)
    label = f"q8_0, {setup.load_rate:g} requests/s of {setup.load_input} tokens in, {setup.load_output} out"
    yield from _columns(label, (("E2E p50", "s", None), ("E2E p99", "s", LOAD_BAR)), ours, theirs)


def _columns(
    label: str,
    figures: Sequence[tuple[str, str, Bar | None]],
    ours: Sequence[Sequence[float]],
    theirs: Sequence[Sequence[float]],
) -> Iterator[Row]:
    """A row for each figure, of runs that each have all of them."""
    for (what, unit, bar), mine, their in zip(figures, zip(*ours, strict=True), zip(*theirs, strict=True), strict=True):
        yield Row(f"{label}: {what}", unit, mine, _SERVER, their, bar)


# --- small ----------------------------------------------------------------------------------------------------------


def _at_least(ratio: float | None) -> Bar | None:
    return None if ratio is None else Bar("ratio", least=ratio)


def _at_most(ratio: float | None) -> Bar | None:
    return None if ratio is None else Bar("ratio", most=ratio)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"


def _prompt(model: Path, length: int) -> list[int]:
    dice, vocab_size = random.Random(0), _vocab_size(model)
    return [dice.randrange(vocab_size) for _ in range(length)]


def _vocab_size(model: Path) -> int:
    tokens = read_gguf_header(model).metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    return len(tokens)


PARTS: Mapping[str, Callable[[Setup], Iterator[Row]]] = {
    "offline": offline,
    "perplexity": perplexity,
    "http": over_http,
    "start": start,
    "load": steady_load,
}
