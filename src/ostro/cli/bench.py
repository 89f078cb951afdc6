"""ostro bench: load-tests a server with an OpenAI-compatible API and reports latency and throughput."""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from pydantic_core import from_json

from ostro.cli.files import written_whole
from ostro.cli.load_options import add_load_options, add_report_options, check_above_zero, check_least, levels, workload
from ostro.cli.parser import describe
from ostro.client.target import check_key, key_in_environment
from ostro.errors import BadRequest
from ostro.measure.bench.figures import Slo
from ostro.measure.bench.jobs import Level, Progress
from ostro.measure.bench.page import page
from ostro.measure.bench.run import BenchOptions, bench
from ostro.measure.bench.table import table
from ostro.measure.bench.wire import Target
from ostro.measure.report.wording import duration, rate


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
    group = add_load_options(parser)
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="always generate exactly --output-len tokens (default: on for random prompts, if the server supports it)",
    )
    group.add_argument("--body", metavar="JSON", help='extra fields for every request, such as {"temperature": 0}')
    group = parser.add_argument_group("measuring and output")
    add_report_options(group, "all that serves the load")
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
    check_least(args, "processes", 1)
    for name in ("timeout", "cost_per_hour"):
        check_above_zero(args, name)
    load = workload(args, ignore_eos=args.ignore_eos, body=_body(args.body))
    headers = _headers(args)
    Target.of(args.url, headers)
    return BenchOptions(
        url=args.url,
        headers=headers,
        workload=load,
        levels=levels(args, len(load.items)),
        timeout=args.timeout,
        processes=args.processes,
        slo=None if args.slo is None else Slo.parsed(args.slo),
        self_test=not args.no_self_test,
        cost_per_hour=args.cost_per_hour,
    )


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
