"""ostro simulate: predicts how servers handle a load, with the real engine on a virtual clock; measures its costs."""

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from ostro.cli.files import read_text, written_whole
from ostro.cli.in_process import tell_progress
from ostro.cli.load_options import add_load_options, add_report_options, check_above_zero, check_least, levels, workload
from ostro.cli.options import memory_size
from ostro.cli.own_server import own_server
from ostro.cli.parser import describe
from ostro.config import EngineConfig
from ostro.errors import BadRequest
from ostro.measure.bench.figures import Slo
from ostro.measure.bench.page import page
from ostro.measure.bench.run import describe_machine
from ostro.measure.bench.table import table as table_of
from ostro.measure.bench.workload import WORDS
from ostro.sampling_params import SamplingParams
from ostro.simulation.costs import read_table, tier_pages, with_shape
from ostro.simulation.routing import Routing
from ostro.simulation.run import SimulationOptions, simulate

if TYPE_CHECKING:
    from ostro.llm import LLM

_SHAPE = {
    "num_pages": "pages of each replica's KV cache",
    "max_batch_tokens": "most tokens per step",
    "max_batch_seqs": "most sequences per step",
}
_TIERS = {
    "kv_host_memory": "each replica's host memory for prefixes that its KV cache has no room for, such as 64G",
    "kv_disk_size": "each replica's disk for prefixes that its memory has no room for, such as 500G",
}
# The simulator's own memory grows with them.
_MOST_REPLICAS = 100_000
_ONLY_TO_MEASURE = ("measure", "model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        {
            "ostro simulate --measure costs.json": "measure the default model on this machine",
            "ostro simulate --costs costs.json --rate 2,4,8": "predict `ostro bench --rate 2,4,8`",
            "ostro simulate --costs costs.json --trace t.jsonl --replicas 100": "replay a trace on 100 servers",
        },
        "The exit status is 0; 1 if no request succeeded or the measurement failed; 2 for invalid options.",
    )
    group = parser.add_argument_group("costs (choose one)")
    which = group.add_mutually_exclusive_group(required=True)
    which.add_argument("--costs", type=Path, metavar="FILE", help="simulate servers whose costs are in this file")
    which.add_argument(
        "--measure", type=Path, metavar="FILE", help="measure costs on this machine and write them to this file"
    )
    group.add_argument("--model", metavar="REF", help="with --measure: the model (default: smollm2-135m)")
    group = parser.add_argument_group("servers")
    group.add_argument("--replicas", type=int, default=1, metavar="N", help="servers with an engine each (%(default)s)")
    group.add_argument(
        "--routing", choices=get_args(Routing), default="prefix", help="who gets a request (%(default)s)"
    )
    for name, meaning in _SHAPE.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=int, metavar="N", help=f"{meaning} (default: as measured)")
    for name, meaning in _TIERS.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=memory_size, metavar="SIZE", help=f"{meaning} (default: none)")
    group.add_argument(
        "--no-prefix-caching", action="store_true", help="do not reuse the KV cache of shared prompt prefixes"
    )
    group.add_argument("--endpoint", choices=("chat", "completions"), default="chat", help="API to call (%(default)s)")
    add_load_options(parser)
    group = parser.add_argument_group("output")
    add_report_options(group, "one replica")
    group.add_argument("--output-file", type=Path, metavar="FILE", help="write the whole result as JSON")
    group.add_argument("--plot", type=Path, metavar="FILE", help="write a self-contained HTML report")
    defaults = {action.dest: action.default for action in parser._actions if action.dest != argparse.SUPPRESS}
    parser.set_defaults(defaults=defaults)


def run(args: argparse.Namespace) -> int:
    try:
        if args.measure is not None:
            _refuse_others(args)
        else:
            options = _options(args)
    except BadRequest as error:
        print(f"ostro: {error}", file=sys.stderr)
        return 2
    return _measure(args) if args.measure is not None else _simulate(args, options)


def _simulate(args: argparse.Namespace, options: SimulationOptions) -> int:
    with ExitStack() as files:
        # Opened first: an unwritable path should be reported before the work, not after it.
        as_json, as_page = (path and files.enter_context(written_whole(path)) for path in (args.output_file, args.plot))
        found = simulate(options)
        if as_json:
            as_json.write(json.dumps(found.as_json(), indent=1) + "\n")
        if as_page:
            as_page.write(page(found.bench))
    print(table_of(found.bench), "\n".join(found.lines()), sep="\n\n")
    if not found.bench.succeeded:
        print("ostro: no request succeeded.", file=sys.stderr)
        return 1
    return 0


def _options(args: argparse.Namespace) -> SimulationOptions:
    """Raises BadRequest for invalid options."""
    if args.model is not None:
        raise BadRequest("--model is for --measure: a cost table has its model.", param="model")
    check_least(args, "replicas", 1)
    if args.replicas > _MOST_REPLICAS:
        raise BadRequest(f"--replicas must be at most {_MOST_REPLICAS}, got {args.replicas}.", param="replicas")
    check_above_zero(args, "cost_per_hour")
    load = workload(args)
    table = read_table(read_text(args.costs).encode(), str(args.costs))
    changes = {name: getattr(args, name) for name in _SHAPE if getattr(args, name) is not None}
    table = with_shape(table, changes)
    table.endpoint(args.endpoint)
    tiers = tier_pages(table, host_memory=args.kv_host_memory, disk_size=args.kv_disk_size)
    if tiers is not None and args.no_prefix_caching:
        flag = "--kv-disk-size" if args.kv_host_memory is None else "--kv-host-memory"
        raise BadRequest(f"{flag} keeps cached prefixes. Leave out --no-prefix-caching.", param="no_prefix_caching")
    return SimulationOptions(
        table=table,
        workload=load,
        levels=levels(args, len(load.items)),
        replicas=args.replicas,
        routing=args.routing,
        prefix_caching=not args.no_prefix_caching,
        tiers=tiers,
        slo=None if args.slo is None else Slo.parsed(args.slo),
        cost_per_hour=None if args.cost_per_hour is None else args.cost_per_hour * args.replicas,
    )


def _refuse_others(args: argparse.Namespace) -> None:
    """Refuses load options with --measure, which puts a load of its own on the model."""
    given: Sequence[str] = [
        name
        for name, default in args.defaults.items()
        if name not in _ONLY_TO_MEASURE and getattr(args, name, default) != default
    ]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise BadRequest(f"{flags} cannot be used with --measure. Use --model alone.", param=given[0])


def _measure(args: argparse.Namespace) -> int:
    # Slow to import, and a simulation needs neither.
    from ostro.backends.tiers.opening import trial_stores
    from ostro.llm import LLM
    from ostro.simulation.measuring import measure_engine
    from ostro.simulation.server_costs import probe_server, with_server

    with written_whole(args.measure) as file:
        tell_progress()
        _say("Starting a server to measure what it adds to its engine …")
        key = secrets.token_urlsafe(24)
        with own_server(args.model, lambda _seconds, _doing: None, key=key) as client:
            longest = client.models().data[0].max_model_len or 2048
            probes = probe_server(client.url, {"Authorization": f"Bearer {key}"}, max_seq_len=longest)
        # After the server has ended: on a GPU, its memory is needed.
        config = EngineConfig(serving=True)
        llm = LLM(config=config if args.model is None else replace(config, model=args.model))
        runner = llm.core.runner
        params = llm.sampling_defaults.fill(SamplingParams(max_tokens=None))
        with trial_stores(runner) as stores:
            engine = measure_engine(
                runner,
                params,
                stores,
                model=llm.name,
                machine=describe_machine(),
                watch=lambda what: _say(f"Timing {what}"),
            )
        found: Any = msgspec.to_builtins(
            with_server(engine, probes, chat_prefix=_chat_prefix(llm) if "chat" in probes.alone else None)
        )
        file.write(json.dumps(found, indent=1) + "\n")
    print(f"{args.measure}: {llm.name} on {runner.spec.backend}. Simulate it with --costs {args.measure}.")
    return 0


def _chat_prefix(llm: "LLM") -> int:
    """Number of tokens that all conversations share before their first words."""
    one, other = (llm.chat_prompt([{"role": "user", "content": word}]) for word in WORDS[:2])
    return next((at for at, (mine, yours) in enumerate(zip(one, other, strict=False)) if mine != yours), 0)


def _say(words: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{words}", end="", file=sys.stderr, flush=True)
