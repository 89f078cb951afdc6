"""ostro bench: load-tests a server with an OpenAI-compatible API and reports latency and throughput."""

import argparse
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
from pydantic_core import from_json

from ostro.cli.files import read_lines, written_whole
from ostro.cli.parser import describe
from ostro.client.keys import check_key, key_in_environment
from ostro.errors import BadRequest
from ostro.measure.bench.figures import Slo
from ostro.measure.bench.jobs import Level, Progress
from ostro.measure.bench.page import page
from ostro.measure.bench.run import BenchOptions, bench
from ostro.measure.bench.table import table
from ostro.measure.bench.wire import Target
from ostro.measure.bench.workload import Item, Messages, Span, Workload
from ostro.measure.report.wording import duration, rate

_INPUT, _OUTPUT, _REQUESTS = 128, 128, 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        {
            "ostro bench": "one client against the server at localhost:8000",
            "ostro bench --concurrency 1,8,32 --requests 200": "one run per number of clients",
            "ostro bench --rate 2,4 --duration 60 --plot r.html": "at fixed request rates, with an HTML report",
        },
        "The exit status is 0; 1 if the server cannot be reached or no request succeeded; 2 for invalid options; 130 "
        "if interrupted, after printing the results so far.",
    )
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        default="http://localhost:8000",
        metavar="URL",
        help="the server's address, with or without /v1 (%(default)s)",
    )
    group.add_argument(
        "--model", default="", metavar="NAME", help="model name (default: the first one the server lists)"
    )
    group.add_argument("--api-key", metavar="KEY", help="API key (default: OSTRO_API_KEY in the environment)")
    group.add_argument(
        "--header", action="append", default=[], metavar="NAME: VALUE", help="extra header to send; repeatable"
    )
    group.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="API to call (%(default)s)")
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds allowed for a whole response (%(default)g)"
    )
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
        help="replay a trace: JSON lines with timestamp (s), prompt or input_len, and output_len",
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
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="always generate exactly --output-len tokens (default: on for random prompts, if the server supports it)",
    )
    group.add_argument("--body", metavar="JSON", help='extra fields for every request, such as {"temperature": 0}')
    group = parser.add_argument_group("measuring and output")
    group.add_argument(
        "--slo", metavar="LIMITS", help="also report goodput under these limits: ttft=500ms,itl=50ms,tpot=50ms,e2e=5s"
    )
    group.add_argument(
        "--processes", type=int, default=1, metavar="N", help="processes that generate the load (%(default)s)"
    )
    group.add_argument("--no-self-test", action="store_true", help="skip measuring the benchmark's own overhead")
    group.add_argument("--output-file", type=Path, metavar="FILE", help="write all measurements as JSON")
    group.add_argument("--plot", type=Path, metavar="FILE", help="write a self-contained HTML report")


def run(args: argparse.Namespace) -> int:
    try:
        options = _options(args)
    except BadRequest as error:
        print(f"ostro: {error}", file=sys.stderr)
        return 2
    with ExitStack() as files:
        # Opened first: an unwritable path should be reported before the work, not after it.
        as_json, as_page = (path and files.enter_context(written_whole(path)) for path in (args.output_file, args.plot))
        found = bench(options, _watched)
        if as_json:
            as_json.write(json.dumps(found.as_json(), indent=1) + "\n")
        if as_page:
            as_page.write(page(found))
    print(table(found))
    if not found.whole:
        return 128 + signal.SIGINT
    if not found.succeeded:
        print("ostro: no request succeeded.", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _watched(level: Level) -> Iterator[Callable[[Progress], None]]:
    """A progress bar for a level, on a terminal."""
    from tqdm import tqdm

    with tqdm(total=level.requests, desc=level.name, unit="req", disable=not sys.stderr.isatty()) as bar:
        failed = tokens = 0
        ttfts: list[float] = []

        def advance(news: Progress) -> None:
            nonlocal failed, tokens
            failed, tokens = failed + news.failed, tokens + news.tokens
            ttfts.extend(news.ttfts)
            seconds = bar.format_dict["elapsed"]
            told = [f"{rate(tokens / seconds)} tok/s" if seconds else "", f"{news.running} running"]
            told += [f"TTFT {duration(median(ttfts))}"] if ttfts else []
            told += [f"{failed} failed"] if failed else []
            bar.set_postfix_str(", ".join(told), refresh=False)
            bar.update(news.finished)

        yield advance


# --- options --------------------------------------------------------------------------------------------------------


def _options(args: argparse.Namespace) -> BenchOptions:
    """Raises BadRequest for invalid options. Contacts no server."""
    for name, least in (("requests", 1), ("warmup", 0), ("processes", 1), ("shared_prefix", 0), ("vocab_size", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise BadRequest(f"--{name.replace('_', '-')} must be at least {least}, got {value}.", param=name)
    for name in ("timeout", "duration", "burstiness"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise BadRequest(f"--{name} must be above 0, got {value:g}.", param=name)
    workload = _workload(args)
    headers = _headers(args)
    Target.of(args.url, headers)
    return BenchOptions(
        url=args.url,
        headers=headers,
        workload=workload,
        levels=_levels(args, len(workload.items)),
        timeout=args.timeout,
        processes=args.processes,
        slo=None if args.slo is None else Slo.parsed(args.slo),
        self_test=not args.no_self_test,
    )


def _workload(args: argparse.Namespace) -> Workload:
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
        ignore_eos=(random or bool(args.trace)) if args.ignore_eos is None else args.ignore_eos,
        body=_body(args.body),
        seed=args.seed,
    )


def _levels(args: argparse.Namespace, trace_length: int) -> list[Level]:
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


def _headers(args: argparse.Namespace) -> dict[str, str]:
    headers = {}
    if key := check_key(args.api_key or key_in_environment("OSTRO_API_KEY")):
        headers["Authorization"] = f"Bearer {key}"
    for header in args.header:
        name, colon, value = (part.strip() for part in header.partition(":"))
        if not (name and colon) or not header.isascii() or not header.isprintable():
            raise BadRequest("--header takes `Name: value`.", param="header")
        # In this spelling, it replaces a default header instead of being sent in addition.
        headers[name.title()] = value
    return headers


def _body(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        body = from_json(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise BadRequest('--body takes a JSON object such as {"temperature": 0}.', param="body")
    return body


# --- files ----------------------------------------------------------------------------------------------------------


def _items(path: Path, endpoint: str, *, timed: bool) -> list[Item]:
    """A file's requests, sorted by time if they have any."""
    lines = read_lines(path)
    if not lines:
        raise BadRequest(f"{path} holds no requests. Write one per line.")
    if path.suffix != ".jsonl" and not timed:
        return [Item(prompt=line) for _, line in lines]
    items = []
    for number, line in lines:
        item = _item(_object(path, number, line), endpoint, timed=timed)
        if item is None:
            needs = 'a "timestamp" in seconds and ' if timed else ""
            raise BadRequest(f'{path}, line {number} must have {needs}a "prompt", "messages" (chat) or "input_len".')
        items.append(item)
    items.sort(key=lambda item: item.at)
    return [msgspec.structs.replace(item, at=item.at - items[0].at) for item in items]


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
