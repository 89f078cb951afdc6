"""What steps and requests cost on one kind of server, as a measured table. Knows no clock and no engine.

A step's time is that of the tokens it computes, plus what they attend to, plus what sampling takes:

    only decoding       decode(rows)                      + decode_context × earlier tokens of all rows
    with prompts        mixed(tokens) + sampled × rows    + the same + prompt_context × pairs of tokens in prompts

Steps that only decode have a curve of their own, because devices run them differently: matrix-vector kernels on a CPU,
CUDA graphs on a GPU.

Copies to and from the tiers below the KV cache take a time per page, beside the steps.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

import msgspec

from ostro.engine.batch import Batch
from ostro.engine.runner import RunnerSpec
from ostro.errors import BadRequest
from ostro.measure.bench.workload import Endpoint, WordTokens

FORMAT = "ostro step costs 1"

Knot = tuple[int, float]
"""A number of tokens, and the seconds that they take."""

# No engine has larger numbers, and the simulator would allocate that much.
_MOST = 1 << 26
_MOST_PAGE_BYTES = 1 << 40


class EngineShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Capacities of the engine that was measured: `RunnerSpec` says what they mean."""

    page_size: int
    num_pages: int
    max_seq_len: int
    max_batch_tokens: int
    max_batch_seqs: int
    vocab_size: int
    steps_ahead: int = 0
    context_price: float = 0.0

    @classmethod
    def of(cls, spec: RunnerSpec) -> "EngineShape":
        return cls(**{name: getattr(spec, name) for name in cls.__struct_fields__})

    def spec(self) -> RunnerSpec:
        return RunnerSpec(**msgspec.structs.asdict(self), backend="simulated")


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times of steps, in seconds."""

    decode: list[Knot]
    """Times by rows, for steps that only decode."""
    mixed: list[Knot]
    """Times by tokens, for steps with prompts."""
    sampled: float
    """Time per row sampled in a step with prompts."""
    decode_context: float
    """Time per earlier token that a single row attends to."""
    prompt_context: float
    """Time per pair of a prompt token and an earlier token."""


class HostCopies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies between a GPU's pages and host memory, in seconds per page."""

    pause: float
    """The engine's own time to have a page copied either way."""
    out: float
    back: float
    staged: int
    """Pages that can be on their way out at once: the next step waits while there are more."""


class DiskCopies(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies between host memory and a disk, in seconds per page."""

    pause: float
    """The engine's own time to have a page written."""
    write: float
    read: float
    waiting: int
    """Pages that can wait to be written: further ones are dropped."""


class CopyTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    page_bytes: int
    host: HostCopies | None = None
    """Copies to and from host memory; None if pages are already there."""
    disk: DiskCopies | None = None


class EndpointCosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Costs outside the engine, for requests to one endpoint."""

    request: float
    """Seconds from the client to the engine and from the engine's first token back, for an empty prompt."""
    prompt_token: float
    """Additional seconds per prompt token."""
    tokens_per_word: float
    tokens_before: int
    """Tokens that the chat template puts before and after a prompt."""
    tokens_after: int

    @property
    def words(self) -> WordTokens:
        return WordTokens(per_word=self.tokens_per_word, around=float(self.tokens_before + self.tokens_after))


class CostTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: str
    model: str
    device: str
    engine: EngineShape
    step: StepTimes
    event: float
    """Seconds that each streamed token adds to its step: the API process shares the machine with the engine."""
    endpoints: dict[Endpoint, EndpointCosts]
    contention: float = 0.0
    """Seconds added to a step for each second in which the API process is busy with requests."""
    copies: CopyTimes | None = None
    """Times of page copies; None if the engine has no tiers, or they were not measured."""
    machine: dict[str, object] = {}

    def endpoint(self, name: Endpoint) -> EndpointCosts:
        if name not in self.endpoints:
            known = ", ".join(self.endpoints) or "none"
            raise BadRequest(
                f"The cost table has no costs for --endpoint {name} (it has {known}). Measure them, or choose another.",
                param="endpoint",
            )
        return self.endpoints[name]


def read_table(data: bytes, name: str) -> CostTable:
    """Raises BadRequest, naming the field, if the data is not a valid table."""
    try:
        found = msgspec.json.decode(data, type=CostTable)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise BadRequest(f"{name} is not a valid cost table: {error}. Run `ostro simulate --measure`.") from error
    try:
        _check(found)
    except ValueError as error:
        raise BadRequest(f"{name} is not a valid cost table: {error}. Measure it again.") from error
    return found


def _check(table: CostTable) -> None:
    if table.format != FORMAT:
        raise ValueError(f"its format is {table.format!r}, not {FORMAT!r}")
    shape = table.engine
    for field in EngineShape.__struct_fields__:
        _check_capacity(f"engine.{field}", shape, field)
    for name in ("decode", "mixed"):
        _check_curve(f"step.{name}", getattr(table.step, name))
    for field in ("sampled", "decode_context", "prompt_context"):
        _check_seconds(f"step.{field}", getattr(table.step, field))
    _check_seconds("event", table.event)
    _check_seconds("contention", table.contention)
    if table.copies is not None:
        _check_copies(table.copies)
    for endpoint, costs in table.endpoints.items():
        for field in EndpointCosts.__struct_fields__:
            _check_seconds(f"endpoints.{endpoint}.{field}", getattr(costs, field))
        if not 1e-3 <= costs.tokens_per_word <= 1e3:
            raise ValueError(f"endpoints.{endpoint}.tokens_per_word must be from 0.001 to 1000")
        if costs.tokens_before + costs.tokens_after > _MOST:
            raise ValueError(f"endpoints.{endpoint} has more tokens around a prompt than any model takes")


def _check_copies(copies: CopyTimes) -> None:
    _check_number("copies.page_bytes", copies.page_bytes, 1, _MOST_PAGE_BYTES)
    for tier, times in (("host", copies.host), ("disk", copies.disk)):
        for field in () if times is None else times.__struct_fields__:
            name, value = f"copies.{tier}.{field}", getattr(times, field)
            if field in ("staged", "waiting"):
                _check_number(name, value, 1, _MOST)
            else:
                _check_seconds(name, value)


def _check_capacity(name: str, shape: EngineShape, field: str) -> None:
    _check_number(name, getattr(shape, field), 0 if field in ("steps_ahead", "context_price") else 1, _MOST)


def _check_number(name: str, value: float, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, and is {value}")


def _check_curve(name: str, knots: list[Knot]) -> None:
    if not knots:
        raise ValueError(f"{name} is empty")
    if any(left[0] >= right[0] for left, right in pairwise(knots)) or knots[0][0] < 1:
        raise ValueError(f"{name} must have numbers of tokens from 1 on, in increasing order")
    for tokens, seconds in knots:
        _check_seconds(f"{name} at {tokens}", seconds)
    if not any(seconds for _, seconds in knots):
        raise ValueError(f"{name} takes no time")


def _check_seconds(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number from 0 on, and is {value}")


def at(knots: list[Knot], tokens: int) -> float:
    """The curve's value: linear between knots, extrapolated from the last two, constant below the first."""
    where = min(bisect_left(knots, tokens, key=lambda knot: knot[0]), len(knots) - 1)
    if where == 0:
        return knots[0][1]
    (low, low_seconds), (high, high_seconds) = knots[where - 1 : where + 1]
    slope = (high_seconds - low_seconds) / (high - low)
    # Noise can make the last knot the cheaper one, but a step larger than any measured is never cheaper.
    return high_seconds + (max(0.0, slope) if tokens > high else slope) * (tokens - high)


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a step's time depends on."""

    rows: int = 0
    """Chunks of one token, from sequences that decode."""
    prompt_tokens: int = 0
    sampled: int = 0
    decode_context: int = 0
    prompt_context: int = 0

    @classmethod
    def of(cls, batch: Batch) -> "Work":
        rows = prompt_tokens = sampled = decode_context = prompt_context = 0
        for chunk in batch.chunks:
            length = chunk.length
            if length == 1:
                rows += 1
                decode_context += chunk.start
            else:
                prompt_tokens += length
                prompt_context += length * chunk.start + length * length // 2
            sampled += len(chunk.samples)
        return cls(
            rows=rows,
            prompt_tokens=prompt_tokens,
            sampled=sampled,
            decode_context=decode_context,
            prompt_context=prompt_context,
        )


def step_seconds(table: CostTable) -> Callable[[Work], float]:
    """A function for how long a step takes. It caches points of the curves, because there are millions of steps."""
    times, event = table.step, table.event
    decode: dict[int, float] = {}
    mixed: dict[int, float] = {}

    def seconds(work: Work) -> float:
        if work.prompt_tokens:
            tokens = work.rows + work.prompt_tokens
            found = _looked_up(mixed, times.mixed, tokens) + times.sampled * work.sampled
        else:
            found = _looked_up(decode, times.decode, work.rows)
        found += times.decode_context * work.decode_context + times.prompt_context * work.prompt_context
        return found + event * work.sampled

    return seconds


def _looked_up(known: dict[int, float], knots: list[Knot], tokens: int) -> float:
    if tokens not in known:
        known[tokens] = at(knots, tokens)
    return known[tokens]


def with_shape(table: CostTable, changes: Mapping[str, int]) -> CostTable:
    """The table of an engine with other capacities. Raises BadRequest for capacities that no table may have."""
    shape = msgspec.structs.replace(table.engine, **changes)
    for field in changes:
        try:
            _check_capacity(f"--{field.replace('_', '-')}", shape, field)
        except ValueError as error:
            raise BadRequest(f"{error}.", param=field) from error
    return msgspec.structs.replace(table, engine=shape)


class TierPages(NamedTuple):
    """The tiers below each replica's KV cache, in pages."""

    copies: CopyTimes
    host: int
    disk: int


def tier_pages(table: CostTable, *, host_memory: int | None, disk_size: int | None) -> TierPages | None:
    """Tiers of these sizes in bytes; None if neither is given. Raises BadRequest if the table does not say how long
    their copies take, or if there is no room for a page.
    """
    if host_memory is None and disk_size is None:
        return None
    copies = table.copies
    if copies is None:
        raise _not_measured("--kv-disk-size" if host_memory is None else "--kv-host-memory")
    if host_memory is not None and copies.host is None:
        raise _not_measured("--kv-host-memory")
    if disk_size is not None and copies.disk is None:
        raise _not_measured("--kv-disk-size")
    return TierPages(
        copies,
        _pages("--kv-host-memory", host_memory, copies.page_bytes),
        _pages("--kv-disk-size", disk_size, copies.page_bytes),
    )


def _pages(flag: str, size: int | None, page_bytes: int) -> int:
    """Pages that fit into the size; 0 if none is given."""
    if size is None:
        return 0
    if not page_bytes <= size <= _MOST * page_bytes:
        raise BadRequest(f"{flag} must have room for 1 to {_MOST} pages of {page_bytes} bytes, and is {size}.")
    return size // page_bytes


def _not_measured(flag: str) -> BadRequest:
    return BadRequest(
        f"{flag} needs to know how long copies of pages take, and the cost table does not say. Measure it where a "
        f"server takes {flag}, or leave it out."
    )
