"""Cost tables and loads for tests of the simulator."""

from typing import Any

import msgspec

from ostro.measure.bench.jobs import Level
from ostro.measure.bench.workload import Span, Workload
from ostro.simulation.costs import (
    FORMAT,
    CopyTimes,
    CostTable,
    DiskCopies,
    EndpointCosts,
    EngineShape,
    HostCopies,
    StepTimes,
)
from ostro.simulation.run import Simulation, SimulationOptions, simulate

COPIES = CopyTimes(
    page_bytes=1024,
    host=HostCopies(pause=0.0, out=0.002, back=0.001, staged=4),
    disk=DiskCopies(pause=0.0, write=0.008, read=0.004, waiting=16),
)


def cost_table(*, request: float = 0.0, event: float = 0.0, **shape: Any) -> CostTable:
    """Steps of 1 ms a row, and of 1 ms a token of prompts plus 10."""
    sizes = {"page_size": 4, "num_pages": 256, "max_seq_len": 256, "max_batch_tokens": 32, "max_batch_seqs": 8}
    costs = EndpointCosts(request=request, prompt_token=0.0, tokens_per_word=1.0, tokens_before=4, tokens_after=2)
    return CostTable(
        format=FORMAT,
        model="tiny",
        device="cpu",
        engine=EngineShape(**{**sizes, "vocab_size": 1000, **shape}),
        step=StepTimes(
            decode=[(1, 0.001), (8, 0.008)],
            mixed=[(1, 0.011), (32, 0.042)],
            sampled=0.0,
            decode_context=0.0,
            prompt_context=0.0,
        ),
        event=event,
        copies=COPIES,
        endpoints={"chat": costs, "completions": msgspec.structs.replace(costs, tokens_before=0, tokens_after=0)},
    )


def load(*, inputs: Span = Span(4, 24), outputs: Span = Span(1, 12), **rest: Any) -> Workload:  # noqa: B008  frozen
    return Workload(**{"endpoint": "completions", "input_len": inputs, "output_len": outputs, **rest})


def at_rate(rate: float, requests: int) -> Level:
    return Level(kind="rate", value=rate, number=0, requests=requests)


def by_clients(clients: int, requests: int, warmup: int = 0) -> Level:
    return Level(kind="concurrency", value=clients, number=0, requests=requests, warmup=warmup)


def simulated(
    level: Level, table: CostTable | None = None, workload: Workload | None = None, **rest: Any
) -> Simulation:
    options = SimulationOptions(table=table or cost_table(), workload=workload or load(), levels=[level], **rest)
    return simulate(options)
