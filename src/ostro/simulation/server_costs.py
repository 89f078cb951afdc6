"""Measures what a server adds to its engine: the difference between load on it and the same load on a simulated one."""

from collections.abc import Mapping
from contextlib import nullcontext
from statistics import median

import msgspec

from ostro.errors import OstroError, ServerError
from ostro.measure.bench.figures import figures
from ostro.measure.bench.jobs import Level
from ostro.measure.bench.outcomes import EMPTY, Outcome
from ostro.measure.bench.run import BenchOptions, bench
from ostro.measure.bench.workload import Endpoint, Span, Workload
from ostro.simulation.costs import CostTable, EndpointCosts
from ostro.simulation.run import SimulationOptions, simulate

_REQUESTS = 10
_STREAMS = 16
_BURST, _BURSTS = 8, 4
# Most seconds that a second of the API process's work adds to an engine on the same cores.
_MOST_CONTENTION = 2.0
_LONGEST = 320
_TIMEOUT = 600.0


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A load, and the server's outcomes under it."""

    workload: Workload
    """The load, adapted to the server."""
    level: Level
    outcomes: list[Outcome]


class Probes(msgspec.Struct, frozen=True, kw_only=True):
    alone: dict[Endpoint, Probe]
    """One request at a time, prompts of all lengths."""
    together: Probe
    """Many streams at a time."""
    bursts: Probe
    """Requests for single tokens, several at a time."""


def probe_server(url: str, headers: Mapping[str, str], *, max_seq_len: int) -> Probes:
    """Puts load on a server that has nothing else to do. Leaves chat out if the model has no template for it."""
    alone: dict[Endpoint, Probe] = {}
    names: tuple[Endpoint, ...] = ("completions", "chat")
    longest = max(min(max_seq_len, _LONGEST) - 8, 2)
    one = Level(kind="concurrency", value=1, number=0, requests=_REQUESTS, warmup=1)
    for name in names:
        lengths = Span(max(longest // 8, 1), longest)
        load = Workload(endpoint=name, output_len=Span(2, 2), input_len=lengths, ignore_eos=True)
        try:
            alone[name] = _probed(load, one, url, headers)
        except ServerError:
            if name == "completions":
                raise
    tokens = min(48, max(max_seq_len - 16, 2))
    load = Workload(endpoint="completions", output_len=Span(tokens, tokens), input_len=Span(8, 8), ignore_eos=True)
    many = Level(kind="concurrency", value=_STREAMS, number=0, requests=_STREAMS, warmup=1)
    together = _probed(load, many, url, headers)
    name = "chat" if "chat" in alone else "completions"
    lengths = Span(longest // 8 or 1, longest // 3 or 1)
    load = Workload(endpoint=name, output_len=Span(1, 1), input_len=lengths, ignore_eos=True)
    burst = Level(kind="concurrency", value=_BURST, number=0, requests=_BURST * _BURSTS, warmup=1)
    return Probes(alone=alone, together=together, bursts=_probed(load, burst, url, headers))


def _probed(load: Workload, level: Level, url: str, headers: Mapping[str, str]) -> Probe:
    options = BenchOptions(
        url=url,
        headers=headers,
        workload=load,
        levels=[level],
        timeout=_TIMEOUT,
        processes=1,
        slo=None,
        self_test=False,
    )
    found = bench(options, lambda _: nullcontext(lambda _: None))
    outcomes = found.levels[0].outcomes
    # A single token may have no text: any sampled token may be a special one. Such an answer has no first arrival.
    failed = next((each for each in outcomes if each.error not in (None, EMPTY)), None)
    if failed is not None:
        raise OstroError(f"The server failed while it was measured: {failed.error}, {failed.detail}.")
    return Probe(workload=found.options.workload, level=level, outcomes=outcomes)


def with_server(table: CostTable, probes: Probes, *, chat_prefix: int | None = None) -> CostTable:
    """The engine's table, with the costs of the probed server around it. `chat_prefix` is how many tokens the chat
    template puts before a message, if known; otherwise it is derived from what the cache held, in whole pages.
    """
    # Events come first: the remaining cost is the request's.
    free = msgspec.structs.replace(
        table, endpoints={name: _free(probe, chat_prefix) for name, probe in probes.alone.items()}
    )
    told = msgspec.structs.replace(free, event=_event(free, probes.together))
    endpoints: dict[Endpoint, EndpointCosts] = {}
    for name, probe in probes.alone.items():
        request, prompt_token = _line(probe.outcomes, _simulated(told, probe))
        endpoints[name] = msgspec.structs.replace(told.endpoints[name], request=request, prompt_token=prompt_token)
    whole = msgspec.structs.replace(told, endpoints=endpoints)
    return msgspec.structs.replace(whole, contention=_contention(whole, probes.bursts))


def _free(probe: Probe, chat_prefix: int | None) -> EndpointCosts:
    """The endpoint's token counts, with all costs at zero."""
    words = probe.workload.words
    # Random prompts have nothing in common but what the template puts before them.
    shared = min(each.cached_tokens or 0 for each in probe.outcomes)
    if chat_prefix is not None and probe.workload.endpoint == "chat":
        shared = chat_prefix
    before = min(shared, round(words.around))
    return EndpointCosts(
        request=0.0,
        prompt_token=0.0,
        tokens_per_word=words.per_word,
        tokens_before=before,
        tokens_after=round(words.around) - before,
    )


def _event(table: CostTable, probe: Probe) -> float:
    served, alone = figures(probe.outcomes).itl, figures(_simulated(table, probe)).itl
    if served is None or alone is None:
        return 0.0
    return max(served.p50 - alone.p50, 0.0) / min(probe.level.value, table.engine.max_batch_seqs)


def _contention(table: CostTable, probe: Probe) -> float:
    """Fitted to bursts, in which the engine computes while the API process still passes on requests."""
    served, free, slowed = (
        figures(each).ttft
        for each in (
            probe.outcomes,
            _simulated(table, probe),
            _simulated(msgspec.structs.replace(table, contention=1.0), probe),
        )
    )
    if served is None or free is None or slowed is None or slowed.p50 <= free.p50:
        return 0.0
    return min(max((served.p50 - free.p50) / (slowed.p50 - free.p50), 0.0), _MOST_CONTENTION)


def _simulated(table: CostTable, probe: Probe) -> list[Outcome]:
    options = SimulationOptions(table=table, workload=probe.workload, levels=[probe.level])
    return simulate(options).bench.levels[0].outcomes


def _line(served: list[Outcome], alone: list[Outcome]) -> tuple[float, float]:
    """Seconds that a server takes beyond its engine: for an empty prompt, and per prompt token."""
    extra = sorted(
        (real.input_tokens or 0, real.ttft - simulated.ttft)
        for real, simulated in zip(served, alone, strict=True)
        if real.ttft is not None and simulated.ttft is not None
    )
    half = len(extra) // 2
    short, long = extra[:half], extra[half:]
    # Medians of the halves, because a single stall would tilt a line through all points.
    tokens, rise = (median(each[at] for each in long) - median(each[at] for each in short) for at in (0, 1))
    per_token = max(rise / tokens, 0.0) if tokens > 0 else 0.0
    return max(median(seconds - per_token * tokens for tokens, seconds in extra), 0.0), per_token
