"""Options of commands that put load on a server or on a simulation: how many requests, when, with what contents."""

import argparse
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic_core import from_json

from ostro.cli.files import read_lines
from ostro.errors import BadRequest
from ostro.measure.bench.jobs import Level
from ostro.measure.bench.workload import Item, Messages, Span, Workload

_INPUT, _OUTPUT, _REQUESTS = 128, 128, 100


def add_load_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Returns the option group for request contents, so that a command can add to it."""
    group = parser.add_argument_group("load (choose one; one run per value)")
    kind = group.add_mutually_exclusive_group()
    kind.add_argument(
        "--concurrency",
        metavar="N,…",
        help="closed loop: this many clients, each sending one request at a time (default: 1)",
    )
    kind.add_argument(
        "--rate",
        metavar="X,…",
        help="open loop: requests per second, sent at random times whether or not earlier ones finished",
    )
    kind.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="replay a trace: JSON lines with timestamp (s), prompt or input_len, output_len and perhaps conversation",
    )
    group = parser.add_argument_group("amount of load")
    group.add_argument("--requests", type=int, metavar="N", help=f"requests per run (default: {_REQUESTS})")
    group.add_argument("--duration", type=float, metavar="S", help="stop starting requests after this many seconds")
    group.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="unmeasured requests before each run (%(default)s)"
    )
    group.add_argument("--speed", default="1", metavar="X,…", help="speed-up factor for replaying a trace (1)")
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="X", help="1 is a Poisson process, lower is burstier (1)"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed for prompts, lengths and arrival times (%(default)s)"
    )
    group = parser.add_argument_group("requests")
    what = group.add_mutually_exclusive_group()
    what.add_argument("--prompt", metavar="TEXT", help="send this prompt with every request")
    what.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="cycle through prompts, one per line; .jsonl: {prompt} or {messages} per line",
    )
    what.add_argument(
        "--input-len", metavar="N or A-B", help=f"length of random prompts, in tokens (default: {_INPUT})"
    )
    group.add_argument(
        "--output-len", "--max-tokens", dest="output_len", metavar="N or A-B", help=f"tokens to generate ({_OUTPUT})"
    )
    group.add_argument(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="N",
        help="number of leading tokens that all random prompts share",
    )
    group.add_argument(
        "--vocab-size", type=int, metavar="N", help="send random token ids below N instead of words (completions only)"
    )
    return group


def add_report_options(group: argparse._ArgumentGroup, cost_of: str) -> None:
    """`cost_of` names what the hourly cost covers, for the help text."""
    group.add_argument(
        "--slo", metavar="LIMITS", help="also report goodput under these limits: ttft=500ms,itl=50ms,tpot=50ms,e2e=5s"
    )
    group.add_argument(
        "--cost-per-hour", type=float, metavar="X", help=f"price of {cost_of}: also report the cost per million tokens"
    )


def workload(
    args: argparse.Namespace, *, ignore_eos: bool | None = None, body: Mapping[str, Any] | None = None
) -> Workload:
    """Raises BadRequest for invalid options."""
    _check_numbers(args)
    if args.trace and (args.prompt is not None or args.prompts):
        raise BadRequest("--trace has prompts of its own. Leave out --prompt and --prompts.", param="trace")
    if args.trace and args.input_len is not None:
        raise BadRequest("--trace has lengths of its own. Leave out --input-len.", param="input_len")
    items = []
    if args.prompt is not None:
        items = [Item(prompt=args.prompt)]
    elif args.prompts or args.trace:
        items = _items(args.prompts or args.trace, args.endpoint, timed=bool(args.trace))
    random = not items or any(item.prompt is None for item in items)
    if args.vocab_size is not None and (args.endpoint == "chat" or not random):
        raise BadRequest("--vocab-size is for random prompts of --endpoint completions.", param="vocab_size")
    if args.shared_prefix and not random:
        raise BadRequest("--shared-prefix is for random prompts.", param="shared_prefix")
    return Workload(
        endpoint=args.endpoint,
        model=args.model,
        output_len=_span("output-len", args.output_len or str(_OUTPUT)),
        items=items,
        input_len=_span("input-len", args.input_len or str(_INPUT)),
        shared_prefix=args.shared_prefix,
        vocab_size=args.vocab_size,
        ignore_eos=(random or bool(args.trace)) if ignore_eos is None else ignore_eos,
        body=dict(body or {}),
        seed=args.seed,
    )


def levels(args: argparse.Namespace, trace_length: int) -> list[Level]:
    """Raises BadRequest for invalid options."""
    kind: Literal["concurrency", "rate", "trace"]
    if args.trace:
        kind, values = "trace", _numbers("speed", args.speed)
        requests = min(trace_length, args.requests or trace_length)
    else:
        if args.speed != "1":
            raise BadRequest("--speed is for a --trace.", param="speed")
        kind = "concurrency" if args.rate is None else "rate"
        values = _numbers(kind, args.rate if args.rate is not None else args.concurrency or "1")
        requests = args.requests or (None if args.duration else _REQUESTS)
    if args.burstiness != 1 and kind != "rate":
        raise BadRequest("--burstiness is for --rate.", param="burstiness")
    if kind == "concurrency" and any(value != int(value) for value in values):
        raise BadRequest(f"--concurrency takes whole numbers, got {args.concurrency!r}.", param="concurrency")
    return [
        Level(
            kind=kind,
            value=value,
            number=number,
            requests=requests,
            duration=args.duration,
            burstiness=args.burstiness,
            warmup=args.warmup,
        )
        for number, value in enumerate(values)
    ]


def _check_numbers(args: argparse.Namespace) -> None:
    for name, least in (("requests", 1), ("warmup", 0), ("shared_prefix", 0), ("vocab_size", 1)):
        check_least(args, name, least)
    for name in ("duration", "burstiness"):
        check_above_zero(args, name)


def check_least(args: argparse.Namespace, name: str, least: int) -> None:
    value = getattr(args, name)
    if value is not None and value < least:
        raise BadRequest(f"--{name.replace('_', '-')} must be at least {least}, got {value}.", param=name)


def check_above_zero(args: argparse.Namespace, name: str) -> None:
    value = getattr(args, name)
    if value is not None and not 0 < value < math.inf:
        raise BadRequest(f"--{name.replace('_', '-')} must be above 0, got {value:g}.", param=name)


def _numbers(name: str, text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or any(not 0 < value < math.inf for value in values):
        raise BadRequest(f"--{name} takes numbers above 0 with commas between them, got {text!r}.", param=name)
    return values


def _span(name: str, text: str) -> Span:
    low, _, high = text.partition("-")
    try:
        span = Span(int(low), int(high or low))
    except ValueError:
        span = Span(0, 0)
    if not 1 <= span.low <= span.high:
        raise BadRequest(f"--{name} takes a number of tokens or a range such as 100-1024, got {text!r}.", param=name)
    return span


def _items(path: Path, endpoint: str, *, timed: bool) -> list[Item]:
    """A file's requests, sorted by time if they have any."""
    lines = read_lines(path)
    if not lines:
        raise BadRequest(f"{path} holds no requests. Write one per line.")
    if path.suffix != ".jsonl" and not timed:
        return [Item(prompt=line) for _, line in lines]
    items: list[tuple[Item, str | None]] = []
    for number, line in lines:
        value = _object(path, number, line)
        item, conversation = _item(value, endpoint, timed=timed), _conversation(value) if timed else None
        if item is None:
            needs = 'a "timestamp" in seconds and ' if timed else ""
            raise BadRequest(f'{path}, line {number} must have {needs}a "prompt", "messages" (chat) or "input_len".')
        if conversation is not None and (endpoint != "chat" or item.prompt is not None):
            raise BadRequest(f'{path}, line {number}: a "conversation" has an "input_len", and is for --endpoint chat.')
        items.append((item, conversation))
    items.sort(key=lambda found: found[0].at)
    began, turns = items[0][0].at, defaultdict[str, list[int]](list)
    found = []
    for at, (item, conversation) in enumerate(items):
        earlier = None if conversation is None else list(turns[conversation])
        found.append(msgspec.structs.replace(item, at=item.at - began, earlier=earlier))
        if conversation is not None:
            turns[conversation].append(at)
    return found


def _conversation(value: Mapping[str, Any]) -> str | None:
    match value.get("conversation"):
        case str() | int() as name if not isinstance(name, bool):
            return str(name)
    return None


def _item(value: Mapping[str, Any], endpoint: str, *, timed: bool) -> Item | None:
    prompt = _prompt(value, endpoint)
    input_len = _number(value, "input_len", "input_length")
    output_len = _number(value, "output_len", "output_length", "max_tokens", "output_tokens_count")
    at = _number(value, "timestamp") if timed else 0.0
    if at is None or (prompt is None and input_len is None):
        return None
    return Item(
        prompt=prompt,
        input_len=None if input_len is None else max(int(input_len), 1),
        output_len=None if output_len is None else max(int(output_len), 1),
        at=at,
    )


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"{path}, line {number} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise BadRequest(f"{path}, line {number} is not a JSON object.")
    return value


def _prompt(value: Mapping[str, Any], endpoint: str) -> str | Messages | None:
    match value:
        case {"prompt": str(text)}:
            return text
        case {"messages": [{}, *_] as messages} if endpoint == "chat" and all(isinstance(x, dict) for x in messages):
            return list(messages)
    return None


def _number(value: Mapping[str, Any], *names: str) -> float | None:
    found = next((value[name] for name in names if name in value), None)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) and found >= 0 else None
