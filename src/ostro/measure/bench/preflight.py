"""Probes a server before measuring it: its model, the fields it accepts, and how it counts our words in tokens."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ostro.client.failures import words
from ostro.errors import BadAnswer, ModelNotFound, ServerError, Unreachable
from ostro.measure.bench.outcomes import Outcome, read
from ostro.measure.bench.wire import CONNECTION, Pool, Recording, Target
from ostro.measure.bench.workload import PATHS, Span, WordTokens, Workload

_MOST_WORDS = 400


@dataclass(frozen=True, slots=True)
class Preflight:
    workload: Workload
    """The requested workload, adapted to this server."""
    notes: list[str] = field(default_factory=list)


def preflight(workload: Workload, url: str, headers: Mapping[str, str], timeout: float) -> Preflight:
    """Sends a few one-token requests. Raises an OstroError if the server cannot be used."""

    async def look() -> Preflight:
        pool = Pool(target, timeout)
        try:
            return await _look(workload, target, pool, url)
        finally:
            await pool.close()

    target = Target.of(url, headers)
    return asyncio.run(look())


async def _look(workload: Workload, target: Target, pool: Pool, url: str) -> Preflight:
    if not workload.model:
        workload = msgspec.structs.replace(workload, model=await _model(target, pool, url))
    workload, answer, notes = await _accepted(workload, target, pool, url)
    if answer.input_tokens is None and answer.counted_by == "events":
        notes.append("The server reports no token counts: events count as output tokens, input tokens are not counted.")
    if workload.has_random_prompts and workload.vocab_size is None:
        counted = await _word_tokens(workload, target, pool)
        if counted is None:
            notes.append("The number of tokens per word is unknown: lengths of random prompts are in words.")
        else:
            workload = msgspec.structs.replace(workload, words=counted)
    return Preflight(workload, notes)


async def _model(target: Target, pool: Pool, url: str) -> str:
    recording = await pool.ask(target.request("/models"))
    _check(recording, url, "/models")
    try:
        listed = msgspec.json.decode(recording.body)
    except msgspec.DecodeError:
        listed = None
    match listed:
        case {"data": [{"id": str(model)}, *_]}:
            return model
    raise ModelNotFound(f"{url} lists no model at {target.base}/models. Name one with --model.")


async def _accepted(workload: Workload, target: Target, pool: Pool, url: str) -> tuple[Workload, Outcome, list[str]]:
    """The workload without fields that the server rejects."""
    path = PATHS[workload.endpoint]
    notes = []
    first: Recording | None = None
    for leave_out in ((), ("ignore_eos",), ("include_usage",), ("ignore_eos", "include_usage")):
        if any(not getattr(workload, name) for name in leave_out):
            continue
        tried = msgspec.structs.replace(workload, **dict.fromkeys(leave_out, False))
        recording = await pool.ask(target.request(path, _probe(tried)))
        first = first or recording
        if recording.status in (400, 422):
            continue
        _check(recording, url, path)
        if "ignore_eos" in leave_out:
            notes.append("The server rejects ignore_eos: answers end where the model ends them.")
        if "include_usage" in leave_out:
            notes.append("The server rejects stream_options.")
        return tried, read(recording, index=0, began=recording.sent, max_tokens=1), notes
    assert first is not None
    _check(first, url, path)
    raise AssertionError("a refusal passed the check")


async def _word_tokens(workload: Workload, target: Target, pool: Pool) -> WordTokens | None:
    """Tokens per word, from the server's token counts for a short and a long prompt of our words."""
    longest = max([workload.input_len.high, *(item.input_len or 0 for item in workload.items)])
    long = max(min(longest, _MOST_WORDS), 2)
    counted = []
    for number in (short := max(long // 4, 1), long):
        asked = msgspec.structs.replace(
            workload, items=[], shared_prefix=0, input_len=Span(number, number), output_len=Span(1, 1)
        )
        body, _ = asked.request(~0, ~number)
        recording = await pool.ask(target.request(PATHS[workload.endpoint], body))
        answer = read(recording, index=0, began=recording.sent, max_tokens=1)
        if answer.input_tokens is None:
            return None
        counted.append(answer.input_tokens)
    per_word = (counted[1] - counted[0]) / (long - short)
    if per_word <= 0:
        return None
    return WordTokens(per_word=per_word, around=max(counted[0] - short * per_word, 0.0))


def probing(workload: Workload) -> Workload:
    """The workload with one-token answers, for the requests that a benchmark sends first."""
    items = [msgspec.structs.replace(item, output_len=1) for item in workload.items[:1]]
    return msgspec.structs.replace(workload, output_len=Span(1, 1), items=items)


def _probe(workload: Workload) -> bytes:
    return probing(workload).request(~0, ~0)[0]


def _check(recording: Recording, url: str, path: str) -> None:
    if recording.failure == CONNECTION:
        raise Unreachable(f"{url} cannot be reached: {recording.detail}. Is the server up?")
    if recording.failure is not None:
        raise BadAnswer(f"{url} did not answer {path}: {recording.failure}, {recording.detail}.")
    if recording.status != 200:
        raise ServerError(
            f"{url} answered {path} with HTTP {recording.status}: {words(recording.body)}", status=recording.status
        )
