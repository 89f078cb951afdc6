"""Hours of mixed traffic on a real server whose engines are killed, frozen and swapped, and every answer checked.

    make soak                                     # an hour
    make soak ARGS="--hours 8 --rate 6 --report soak.json"

Models: `steady`, the default model on the native core, pinned; `red` and `blue`, tiny and native; `base`, tiny and with
two adapters, so on torch. There is room for three, so they are swapped. First a quiet server answers every request
alone, without a prefix cache: those are the references. Then another server gets rounds of traffic from clients with
several keys, some of whom read streams and some hang up half-way, while engines are

    killed      SIGKILL
    hung        SIGSTOP, until the server has replaced them
    paused      SIGSTOP and SIGCONT, which must fail nobody; the API process, too

`steady` is only ever paused: none of its requests may fail, and its process lives as long as the server. A request to
another model may fail only with the error for an engine that is down, and only while one is; it is sent again until it
is answered, or refused because engines died twice while they ran it. All the while others attack the server with a key
of their own, and without one: broken messages, bodies and streams that stall, hard schemas, wrong shapes. Each round
ends in silence: all pages must be free or cached then, and memory, descriptors and threads are recorded. The exit
status is 1 if an answer was wrong, a request was lost, a page leaked, or something grew.
"""

import argparse
import asyncio
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import torch
from live_server import LiveServer, live_server
from model_directory import write_model
from peft_directory import random_adapter
from soak_attackers import KEY as ATTACKER
from soak_attackers import Target, under_attack
from soak_cases import Answer, Case, Manner, Refusal, ask, make_cases
from soak_watch import Holdings, engines_of, growth

from ostro.torch_models.build import build_model
from ostro.weights import open_checkpoint

STEADY = "steady"
KEYS = tuple(f"tenant-{number}" for number in range(6))
ADMIN = "operator"
STALL_SECONDS, PAUSE_SECONDS = 60, 2.0
FAULTS = ("kill", "pause engine", "kill", "pause server", "kill", "pause engine", "hang")
PATIENCE_SECONDS = 240.0
# Of an engine that died, and of one that hung while it loaded.
DOWN = ("unavailable", "model_error")
BURST, MOST_UNDER_WAY = 12, 48
# Tokens: tiny models are fast, and their outputs long enough for engines to die in the midst of them.
LONGEST, LONGEST_TINY = 24, 100

Cases = dict[Case, Answer]


@dataclass
class Options:
    hours: float
    rate: float
    round_seconds: float
    fault_seconds: float
    cases: int
    seed: int
    model: str | None
    adapters: bool
    max_growth: int
    report: Path | None


@dataclass
class Ledger:
    """What happened so far."""

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    server: list[Holdings] = field(default_factory=list)
    steady: list[Holdings] = field(default_factory=list)
    pages: list[dict[str, int]] = field(default_factory=list)
    """Pages of each model that were neither free nor cached in the silence after a round."""

    def violate(self, what: str) -> None:
        print(f"VIOLATION: {what}", flush=True)
        self.violations.append(what)


def write_world(directory: Path, options: Options) -> tuple[Path, list[str], list[str]]:
    """The config file of a server; its models that come and go; and all names that answer."""
    swinging = ["red", "blue"]
    for seed, name in enumerate(swinging):
        write_model(directory / "models" / name, seed=seed + 1)
    names = [STEADY, *swinging]
    if options.adapters:
        base = write_model(directory / "models" / "base", seed=3)
        config = json.loads((base / "config.json").read_text())
        model = build_model(config, dtype=torch.float32, device=torch.device("meta"))
        for seed, name in enumerate(("french", "latin")):
            random_adapter(directory / "models" / name, model, seed=seed, base="base")
        swinging.append("base")
        names += ["base", "french", "latin"]
    settings = {
        "model": f"{STEADY}={open_checkpoint(options.model).path}",
        "models": [str(directory / "models")],
        "pin": [STEADY],
        "max_models": len(swinging),
        "kv_memory": "64M",
        # So small that all of it is in use after a minute: growth is a leak then, not a cache that fills.
        "model_settings": {name: {"kv_memory": "1M"} for name in swinging},
        "api_key": [*KEYS, ATTACKER],
        # As small, and full as soon.
        "response_store": "1M",
        "admin_key": [ADMIN],
        "stall_timeout": STALL_SECONDS,
        "load_stall_timeout": STALL_SECONDS,
        "load_timeout": 300,
    }
    file = directory / "ostro.yaml"
    # Every JSON text is a YAML one.
    file.write_text(json.dumps(settings))
    return file, swinging, names


def connect(server: LiveServer) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_SECONDS, limits=limits, trust_env=False)


async def references(server: LiveServer, cases: Sequence[Case]) -> Cases:
    async with connect(server) as client:
        return {case: await ask(client, case, Manner.WHOLE, KEYS[0]) for case in cases}


class Outages:
    """When an engine was down by our doing."""

    def __init__(self) -> None:
        self._ended = -math.inf

    def begin(self) -> None:
        self._ended = math.inf

    def end(self) -> None:
        self._ended = time.monotonic()

    def explain(self, case: Case, began: float, refusal: Refusal) -> bool:
        """Whether a request that began then may have failed like this: not if it began after the engine was back."""
        return began <= self._ended and case.model != STEADY and refusal.code in DOWN


class Traffic:
    """Sends requests at a rate and enters into the ledger how each ended."""

    def __init__(self, cases: Cases, options: Options, outages: Outages, ledger: Ledger) -> None:
        self._cases = cases
        self._options = options
        self._outages = outages
        self._ledger = ledger
        self._dice = random.Random(options.seed)
        self._under_way: set[asyncio.Task[None]] = set()
        self._deaths: Counter[Case] = Counter()

    async def run(self, client: httpx.AsyncClient, popular: Sequence[str], enough: Callable[[], bool]) -> None:
        """Sends requests until it is enough; returns once all have ended. A few ask for models that are not popular."""
        self._favoured = [case for case in self._cases if case.model in popular]
        everything = list(self._cases)
        async with asyncio.TaskGroup() as self._group:
            while not enough():
                case = self._dice.choice(everything if self._dice.random() < 0.02 else self._favoured)
                self._send(client, case)
                await asyncio.sleep(self._dice.expovariate(self._options.rate))

    def burst(self, client: httpx.AsyncClient) -> None:
        """Many requests at once: they make batches, and an engine that dies now has something to lose."""
        for case in self._dice.sample(self._favoured, min(BURST, len(self._favoured))):
            self._send(client, case)

    def _send(self, client: httpx.AsyncClient, case: Case) -> None:
        """Unless a server that is down has left so many waiting that it would only take longer to come back."""
        if len(self._under_way) < MOST_UNDER_WAY:
            task = self._group.create_task(self._one(client, case))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _one(self, client: httpx.AsyncClient, case: Case) -> None:
        what = f"{case.model} {case.path} {(manner := self._dice.choice(case.manners))}"
        key, patience = self._dice.choice(KEYS), self._dice.choice((1, 2, 5))
        self._ledger.counts["requests"] += 1
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (began := time.monotonic()) < deadline:
            try:
                answer = await ask(client, case, manner, key, patience=patience)
            except Refusal as refusal:
                if refusal.code == "request_refused" and self._deaths[case] >= 2:
                    self._ledger.counts["refused after two deaths"] += 1
                    return
                if not self._outages.explain(case, began, refusal):
                    self._ledger.violate(f"{what}: {refusal}")
                    return
                self._deaths[case] += 1
                self._ledger.counts["asked again"] += 1
                await asyncio.sleep(1)
            except (httpx.HTTPError, ValueError, LookupError) as error:
                self._ledger.violate(f"{what}: {error!r}")
                return
            else:
                self._judge(case, manner, answer)
                return
        self._ledger.violate(f"{what}: lost, no answer for {PATIENCE_SECONDS:.0f} s")

    def _judge(self, case: Case, manner: Manner, answer: Answer) -> None:
        reference = self._cases[case]
        right = answer.begins(reference) if manner is Manner.LEAVE else answer.agrees(reference)
        if right:
            self._ledger.counts[f"right, {manner}"] += 1
        else:
            self._ledger.violate(f"{case} {manner}: {answer} is not {reference}")


class Saboteur:
    """Injects one fault after another, and waits out the effects of each."""

    def __init__(
        self, server: LiveServer, steady: int, traffic: Traffic, options: Options, outages: Outages, ledger: Ledger
    ) -> None:
        self._server = server
        self._traffic = traffic
        self._steady = steady
        self._options = options
        self._outages = outages
        self._ledger = ledger
        self._dice = random.Random(options.seed)
        self.faults = 0

    async def run(self, client: httpx.AsyncClient) -> None:
        while True:
            await asyncio.sleep(self._options.fault_seconds)
            self._traffic.burst(client)
            await asyncio.sleep(self._dice.uniform(0.0, 0.3))
            kind = FAULTS[self.faults % len(FAULTS)]
            if kind == "pause server":
                await self._pause(self._server.process.pid)
            elif kind == "pause engine":
                await self._pause(self._dice.choice(engines_of(self._server.process.pid)))
            elif victims := [pid for pid in engines_of(self._server.process.pid) if pid != self._steady]:
                await self._fell(client, self._dice.choice(victims), kind)
            else:
                # The burst has one loaded; the next round of this loop will find it.
                continue
            self.faults += 1
            self._ledger.counts[kind] += 1

    async def _pause(self, pid: int) -> None:
        # An engine may have made room for another since we looked.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(PAUSE_SECONDS)
            finally:
                os.kill(pid, signal.SIGCONT)

    async def _fell(self, client: httpx.AsyncClient, pid: int, kind: str) -> None:
        self._outages.begin()
        try:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
            async with asyncio.timeout(STALL_SECONDS + PATIENCE_SECONDS):
                while pid in engines_of(self._server.process.pid):
                    await asyncio.sleep(0.2)
                await until_all_answer(client)
        except TimeoutError:
            self._ledger.violate(f"{kind}: the engine was not replaced")
        finally:
            self._outages.end()


async def until_all_answer(client: httpx.AsyncClient) -> None:
    """Every model that has an engine, or is about to have one."""
    for model in await stats(client):
        if model["parent"] is None and model["state"] not in ("available", "draining"):
            body = {"model": model["id"], "prompt": "the", "max_tokens": 1}
            while (await client.post("/v1/completions", json=body, headers=_bearer(KEYS[0]))).status_code != 200:
                await asyncio.sleep(0.2)


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def stats(client: httpx.AsyncClient) -> list[dict[str, object]]:
    answer = await client.get("/admin/stats", headers=_bearer(ADMIN))
    answer.raise_for_status()
    return list(answer.json()["models"])


async def pages_in_use(client: httpx.AsyncClient) -> dict[str, int]:
    """Pages of each loaded model that are neither free nor cached."""
    return await _sum_metrics(client, {"ostro_pages_total": 1, "ostro_pages_free": -1, "ostro_pages_cached": -1})


async def requests_under_way(client: httpx.AsyncClient) -> dict[str, int]:
    return await _sum_metrics(client, {"vllm:num_requests_running": 1, "vllm:num_requests_waiting": 1})


async def _sum_metrics(client: httpx.AsyncClient, signs: Mapping[str, int]) -> dict[str, int]:
    """By model."""
    answer = await client.get("/metrics", headers=_bearer(ADMIN))
    sums: Counter[str] = Counter()
    for line in answer.text.splitlines():
        name, _, rest = line.partition("{")
        if name in signs:
            labels, _, value = rest.partition("} ")
            sums[labels.partition('model_name="')[2].partition('"')[0]] += signs[name] * int(float(value))
    return dict(sums)


async def silence(server: LiveServer, steady: int, swinging: Sequence[str], ledger: Ledger) -> None:
    """Nobody asks for anything: pages come back, models that come and go are unloaded, and what is left is counted."""
    async with connect(server) as client:
        deadline = time.monotonic() + PATIENCE_SECONDS
        # What attackers started in the background runs to its end.
        while any((under_way := await requests_under_way(client)).values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
        if any(under_way.values()):
            ledger.violate(f"requests under way though nobody asks: {under_way}")
        deadline = time.monotonic() + 60
        while any((used := await pages_in_use(client)).values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.5)
        ledger.pages.append(used)
        if any(used.values()):
            ledger.violate(f"pages in use though nobody asks: {used}")
        for name in swinging:
            await client.post(f"/admin/unload/{name}", headers=_bearer(ADMIN))
        while len(engines_of(server.process.pid)) > 1 and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
    # The server notices that the connections above are closed.
    await asyncio.sleep(1)
    if engines_of(server.process.pid) != [steady]:
        ledger.violate(f"engines after all others were unloaded: {engines_of(server.process.pid)}, not {[steady]}")
        return
    ledger.server.append(Holdings.of(server.process.pid))
    ledger.steady.append(Holdings.of(steady))


async def soak(server: LiveServer, cases: Cases, swinging: Sequence[str], options: Options) -> Ledger:
    ledger, outages = Ledger(), Outages()
    [steady] = engines_of(server.process.pid)
    traffic = Traffic(cases, options, outages, ledger)
    saboteur = Saboteur(server, steady, traffic, options, outages, ledger)
    began = time.monotonic()
    number = 0
    while time.monotonic() - began < options.hours * 3600:
        # One model rests each round, so that every round begins with loads and some requests cause swaps.
        resting = swinging[number % len(swinging)]
        popular = popular_models(cases, resting)
        ledger.counts += await one_round(server, traffic, saboteur, popular, options.round_seconds)
        await silence(server, steady, swinging, ledger)
        number += 1
        print(_line(time.monotonic() - began, ledger), flush=True)
    return ledger


def popular_models(cases: Cases, resting: str) -> list[str]:
    family = {"base", "french", "latin"} if resting == "base" else {resting}
    return sorted({case.model for case in cases} - family)


async def one_round(
    server: LiveServer, traffic: Traffic, saboteur: Saboteur, popular: Sequence[str], seconds: float
) -> Counter[str]:
    """For these seconds, and for as long as it takes until something was broken. Returns the attacks it withstood."""
    attacks: Counter[str] = Counter()
    until, faults_before = time.monotonic() + seconds, saboteur.faults
    async with (
        connect(server) as client,
        under_attack(target_of(server, popular), random.Random(saboteur.faults), attacks),
    ):
        sabotage = asyncio.create_task(saboteur.run(client))
        try:
            await traffic.run(client, popular, lambda: time.monotonic() > until and saboteur.faults > faults_before)
        finally:
            sabotage.cancel()
            with suppress(asyncio.CancelledError):
                await sabotage
    return attacks


def target_of(server: LiveServer, models: Sequence[str]) -> Target:
    address = httpx.URL(server.url)
    assert address.port is not None
    return Target(address.host, address.port, tuple(models), STEADY)


def _line(seconds: float, ledger: Ledger) -> str:
    faults = ", ".join(f"{ledger.counts[kind]} {kind}" for kind in dict.fromkeys(FAULTS))
    return (
        f"{seconds / 60:6.1f} min | server {ledger.server[-1] if ledger.server else '?'} | "
        f"{STEADY} {ledger.steady[-1] if ledger.steady else '?'} | {ledger.counts['requests']} requests, "
        f"{ledger.counts['asked again']} asked again, {len(ledger.violations)} violations | {faults}"
    )


def check_growth(ledger: Ledger, max_growth: int) -> dict[str, dict[str, float]]:
    """By process, from the first silences after warm-up to the last ones. Too much of it is a violation."""
    grown: dict[str, dict[str, float]] = {}
    for name, curve in {"server": ledger.server, STEADY: ledger.steady}.items():
        if len(curve) < 2:
            continue
        grown[name] = {what: growth([float(asdict(each)[what]) for each in curve]) for what in asdict(curve[0])}
        # Thread pools start their threads when they need them first, which may be late.
        for what, bar in {"anonymous_bytes": max_growth, "descriptors": 0, "threads": 4}.items():
            if grown[name][what] > bar:
                ledger.violate(f"{name}: {what} grew by {grown[name][what]:.0f}, more than {bar}")
    return grown


def report(options: Options, ledger: Ledger, grown: Mapping[str, object]) -> dict[str, object]:
    return {
        "hours": options.hours,
        "rate": options.rate,
        "counts": dict(ledger.counts),
        "growth": grown,
        "violations": ledger.violations,
        "server": [asdict(each) for each in ledger.server],
        STEADY: [asdict(each) for each in ledger.steady],
        "pages_in_use": ledger.pages,
    }


def run(options: Options, directory: Path) -> Ledger:
    config, swinging, names = write_world(directory, options)
    env = {"OSTRO_CACHE": str(directory / "cache")}
    dice = random.Random(options.seed)
    asked = [
        case
        for name in names
        for case in make_cases(name, options.cases, dice, longest=LONGEST if name == STEADY else LONGEST_TINY)
    ]
    quiet = directory / "quiet"
    quiet.mkdir()
    alone = ("--no-prefix-caching", "--max-batch-seqs", "4")
    with live_server(quiet, "--config", str(config), *alone, faults="", env=env, cold=True) as server:
        cases = asyncio.run(references(server, asked))
    print(f"{len(cases)} references", flush=True)
    with live_server(directory, "--config", str(config), faults="", env=env, cold=True) as server:
        ledger = asyncio.run(soak(server, cases, swinging, options))
    grown = check_growth(ledger, options.max_growth)
    print(json.dumps({"counts": ledger.counts, "growth": grown, "violations": ledger.violations}, indent=2))
    if options.report is not None:
        options.report.write_text(json.dumps(report(options, ledger, grown), indent=2) + "\n", encoding="utf-8")
    return ledger


def parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second, on average (default: 4)")
    parser.add_argument("--round", dest="round_seconds", type=float, default=120.0, help="seconds between silences")
    parser.add_argument("--fault-every", dest="fault_seconds", type=float, default=15.0, help="seconds between faults")
    parser.add_argument("--cases", type=int, default=200, help="different requests a model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="the steady model, in place of the default model")
    parser.add_argument("--no-adapters", dest="adapters", action="store_false", help="native models only")
    parser.add_argument("--max-growth", type=int, default=5_000_000, help="bytes a process (default: 5 MB)")
    parser.add_argument("--report", type=Path, help="a JSON file for the curve and the counts")
    return Options(**vars(parser.parse_args(arguments)))


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="ostro-soak-") as directory:
        return 1 if run(options, Path(directory)).violations else 0


if __name__ == "__main__":
    sys.exit(main())
