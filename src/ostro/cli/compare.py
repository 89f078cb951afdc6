"""ostro compare: two servers or models side by side, on the same prompts and settings."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import from_json

from ostro.cli.files import read_lines, written_whole
from ostro.cli.parser import describe
from ostro.errors import BadRequest, OstroError, Unavailable
from ostro.measure.compare.answers import Prompt
from ostro.measure.compare.report import report
from ostro.measure.compare.run import Comparison, Progress, compare
from ostro.measure.compare.sides import Side, SideOptions, side_of
from ostro.measure.compare.table import table
from ostro.measure.report.wording import percent
from ostro.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        {
            "ostro compare --a http://127.0.0.1:8000 --b http://other:8001/v1 --prompts p.txt": "two servers",
            "ostro compare --a offline:default --b offline:default?quantize=int8 --prompts p.txt": "two precisions",
        },
        "A side is http://… (OpenAI's API), tgi+http://… (Text Generation Inference), ostro+http://… (our /generate) "
        "or offline:MODEL, a model loaded in this process (a path, a short name, a Hub id or `default`; engine "
        "settings as in offline:default?quantize=int8). The exit status is 0; 1 if a side never answered or "
        "--fail-under is not met; 2 for invalid options.",
    )
    for side in "ab":
        group = parser.add_argument_group(f"side {side.upper()}")
        group.add_argument(f"--{side}", required=True, metavar="SIDE", help="a server's address or offline:MODEL")
        group.add_argument(
            f"--model-{side}", metavar="NAME", help="model name (default: the first one the server lists)"
        )
        group.add_argument(
            f"--api-key-{side}",
            metavar="KEY",
            help=f"API key (default: OSTRO_COMPARE_KEY_{side.upper()} in the environment)",
        )
    group = parser.add_argument_group("prompts and sampling")
    group.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help="prompts, one per line; .jsonl: {prompt} or {messages} per line",
    )
    group.add_argument(
        "--chat", action="store_true", help="send each prompt as a user message, through the chat template"
    )
    group.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="tokens to generate at most (%(default)s)"
    )
    group.add_argument(
        "--temperature", type=float, default=0.0, metavar="X", help="sampling temperature (default: 0, greedy)"
    )
    group.add_argument("--top-p", type=float, default=1.0, metavar="X", help="nucleus sampling (default: %(default)s)")
    group.add_argument("--seed", type=int, metavar="N", help="seed for every prompt, on both sides")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop before this string; repeatable"
    )
    group.add_argument("--logprobs", action="store_true", help="request log-probabilities and compare them too")
    group = parser.add_argument_group("run and output")
    group.add_argument(
        "--concurrency", type=int, default=1, metavar="N", help="requests in flight at once (%(default)s)"
    )
    group.add_argument(
        "--warmup", type=int, default=1, metavar="N", help="unmeasured requests to start with (%(default)s)"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="give up after this many seconds of silence (%(default)g)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write all measurements as JSON")
    group.add_argument("--report", type=Path, metavar="FILE", help="write a self-contained HTML report")
    group.add_argument(
        "--fail-under", type=float, metavar="SHARE", help="exit with status 1 if exact agreement is below this share"
    )


def run(args: argparse.Namespace) -> int:
    try:
        plan = _plan(args)
    except BadRequest as error:
        print(f"ostro: {error}", file=sys.stderr)
        return 2
    with ExitStack() as files:
        # Opened first: an unwritable path should be reported before the work, not after it.
        as_json, as_page = (path and files.enter_context(written_whole(path)) for path in (args.json, args.report))
        for name, side in zip("AB", plan.sides, strict=True):
            _prepare(name, side)
        with _progress(len(plan.prompts)) as progress:
            found = compare(
                *plan.sides,
                plan.prompts,
                plan.params,
                concurrency=args.concurrency,
                warmup=args.warmup,
                progress=progress,
            )
        if as_json:
            as_json.write(json.dumps(found.as_json(), indent=1) + "\n")
        if as_page:
            as_page.write(report(found))
    print(table(found))
    return _status(found, args.fail_under)


def _status(found: Comparison, fail_under: float | None) -> int:
    reasons = [f"{name} never answered." for name in found.silent]
    if fail_under is not None and found.summary.exact_share < fail_under:
        reasons.append(f"exact agreement is {percent(found.summary.exact_share)}, below --fail-under {fail_under:g}.")
    for reason in reasons:
        print(f"ostro: {reason}", file=sys.stderr)
    return 1 if reasons else 0


# --- options --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    sides: tuple[Side, Side]
    prompts: list[Prompt]
    params: SamplingParams


def _plan(args: argparse.Namespace) -> _Plan:
    """Raises BadRequest for options that are invalid or that a side cannot express. Contacts no server."""
    for name, least in (("concurrency", 1), ("warmup", 0)):
        if getattr(args, name) < least:
            raise BadRequest(f"--{name} must be at least {least}, got {getattr(args, name)}.", param=name)
    if not args.timeout > 0:
        raise BadRequest(f"--timeout must be above 0 seconds, got {args.timeout:g}.", param="timeout")
    if args.fail_under is not None and not 0 <= args.fail_under <= 1:
        raise BadRequest(f"--fail-under is a share from 0 to 1, got {args.fail_under:g}.", param="fail_under")
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
        stop=tuple(args.stop),
        logprobs=0 if args.logprobs else None,
    )
    prompts = _prompts(args.prompts, chat=args.chat)
    sides = _side(args, "a"), _side(args, "b")
    for name, side in zip("AB", sides, strict=True):
        try:
            side.check(prompts, params)
        except BadRequest as error:
            raise BadRequest(f"{name}: {error}", param=error.param) from error
    return _Plan(sides, prompts, params)


def _side(args: argparse.Namespace, name: str) -> Side:
    def given(option: str) -> str | None:
        value: str | None = getattr(args, f"{option}_{name}")
        return value

    reference: str = getattr(args, name)
    over_http = "http" in reference.partition("://")[0].lower()
    key = given("api_key") or (os.environ.get(f"OSTRO_COMPARE_KEY_{name.upper()}") if over_http else None)
    return side_of(reference, SideOptions(key=key, model=given("model"), timeout=args.timeout))


def _prompts(path: Path, *, chat: bool) -> list[Prompt]:
    lines = read_lines(path)
    prompts = (
        [_from_json(path, number, line) for number, line in lines]
        if path.suffix == ".jsonl"
        else [line for _, line in lines]
    )
    if not prompts:
        raise BadRequest(f"{path} holds no prompts. Write one per line.")
    return [({"role": "user", "content": each},) if chat and isinstance(each, str) else each for each in prompts]


def _from_json(path: Path, number: int, line: str) -> Prompt:
    try:
        value = from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequest(f"{path}, line {number} is not valid JSON: {error}.") from error
    match value:
        case {"prompt": str(text)} if "messages" not in value:
            return text
        case {"messages": [_, *_] as messages} if "prompt" not in value and all(map(_is_message, messages)):
            return tuple(messages)
    raise BadRequest(
        f'{path}, line {number} is neither {{"prompt": text}} nor {{"messages": [{{"role": …, "content": …}}, …]}}.'
    )


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


# --- running --------------------------------------------------------------------------------------------------------


def _prepare(name: str, side: Side) -> None:
    try:
        side.prepare()
    except OstroError as error:
        raise Unavailable(f"{name}: {error}") from error


@contextmanager
def _progress(num_prompts: int) -> Iterator[Progress]:
    """A progress bar per side, on a terminal."""
    from tqdm import tqdm

    with ExitStack() as bars:
        shown: dict[str, tqdm] = {}

        def advance(side: str) -> None:
            if side not in shown:
                bar = tqdm(total=num_prompts, desc=side, unit="prompt", disable=not sys.stderr.isatty())
                shown[side] = bars.enter_context(bar)
            shown[side].update()

        yield advance
