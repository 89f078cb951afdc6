"""Ostro on the CPU against llama.cpp and transformers: the same files, the same machine, one run.

    bench/build_llama_cpp.sh build/llama.cpp
    python bench/cpu.py --llama build/llama.cpp/bin --work DIR --save     # all parts: hours
    python bench/cpu.py 135m 1b --llama DIR --work DIR --minutes 10 --out DIR
    python bench/cpu.py 1b --llama DIR --work DIR --threads 4 --variants q4_0,q4_k_m --against former.tar
    python bench/cpu.py offline perplexity --llama DIR --work DIR --variants q4_0 --runs 1

--work is for the files that both engines run, made on first use. Both have as many threads, prompts of 128 random
tokens, and 128 tokens to generate, greedily and whatever the model says of an end.

Of random weights, which need no download, by engines that stay loaded and take turns in each round, task by task, and
turns in being first. Ratios are medians of those within a round, with their quartiles; rounds in which something else
ran on the machine are left out. A second Ostro shows what differs for no reason, a plain read of as many bytes what one
stream could reach. All are kept to as many CPUs as there are threads.

    135m, 1b, 3b   Llamas of these sizes
    moe            a mixture of 32 experts: 1.3 billion weights, 0.4 billion of them active
    gpt-oss        a quarter of gpt-oss-20b's layers, always in MXFP4

Of the default model, by processes of their own, one at a time, which alternate too:

    offline        prompt tokens a second; tokens generated a second once all streams have their first
    perplexity     of a fixed text, in windows of 512 tokens whose second halves count
    http           clients in a closed loop: output tokens a second of wall time, and to the first token (p50)
    start          from the process's start to the first token streamed; memory after a request
    load           requests of a few tokens at a steady rate, in 8 bits: the slowest hundredth
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpu_peers import machine
from cpu_peers.llama_cpp import PROGRAMS, LlamaCpp
from cpu_peers.machine import pin
from cpu_peers.model_files import ModelFiles, tensor_types
from cpu_peers.parts import PARTS, VARIANTS, Setup
from cpu_peers.random_llama import SHAPES
from cpu_peers.rounds import Comparison, Plan, Task
from cpu_peers.rounds import table as rounds_table
from cpu_peers.shapes import TURNS, Shapes
from cpu_peers.verdicts import Row, table, with_spread
from ostro.system.machine import num_cpus

HERE = Path(__file__).parent
# The first three chapters of Lewis Carroll's Alice's Adventures in Wonderland (1865), in the public domain: Project
# Gutenberg's edition 2.9, as the Canterbury corpus has it (alice29.txt), its repeated empty lines taken out.
TEXT = HERE / "texts" / "alice.txt"
RESULTS = HERE / "results" / "cpu.json"


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    parts = args.parts or [*SHAPES, *PARTS]
    shapes = [part for part in parts if part in SHAPES]
    others = [part for part in parts if part in PARTS]
    llama = LlamaCpp(args.llama, args.threads, args.llama_options.split())
    try:
        llama.check([*([TURNS] if shapes else []), *(PROGRAMS if others else [])])
    except FileNotFoundError as error:
        parser.error(str(error))
    # So that what was started is ended, and what was measured is told.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if shapes:
        _measure_shapes(args, shapes)
    return _measure_default_model(args, llama, others) if others else 0


def _measure_shapes(args: argparse.Namespace, parts: Sequence[str]) -> None:
    about = {
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv[1:],
        "threads": args.threads,
        "cpus": pin(args.threads),
        "input_tokens": args.input,
        "machine": machine.describe(),
    }
    tasks = [Task(args.prompts, decodes=False), *(Task(streams, decodes=True) for streams in args.streams)]
    shapes = Shapes(
        work=args.work,
        llama=args.llama,
        threads=args.threads,
        backend=args.backend,
        kinds=args.variants,
        plan=Plan(tasks=tasks, input=args.input, seconds=args.seconds, most_steps=args.output, rounds=args.rounds),
        control=args.control,
        former=args.against,
    )
    _tell(machine.in_one_line(about["machine"]))
    seconds = args.minutes * 60 if args.minutes else float("inf")
    by_model: dict[str, list[Comparison]] = {}
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        _tell(line)

    try:
        for comparisons in shapes.measure(parts, seconds, tell):
            by_model[comparisons[0].model] = comparisons
            _keep(args.out, {**about, "log": told}, by_model)
    finally:
        # On any end, a signal's too.
        print(rounds_table([each for comparisons in by_model.values() for each in comparisons]), flush=True)
        _keep(args.out, {**about, "log": told}, by_model)


def _keep(directory: Path | None, about: Mapping[str, Any], by_model: Mapping[str, Sequence[Comparison]]) -> None:
    if directory is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    comparisons = [each for of_model in by_model.values() for each in of_model]
    record = {"run": about, "comparisons": [each.as_json() for each in comparisons]}
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    for name, content in (("rounds.json", text), ("rounds.txt", rounds_table(comparisons) + "\n")):
        partial = directory / f"{name}.partial"
        partial.write_text(content, encoding="utf-8")
        partial.replace(directory / name)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _measure_default_model(args: argparse.Namespace, llama: LlamaCpp, parts: Sequence[str]) -> int:
    setup = Setup(
        llama=llama,
        files=ModelFiles(args.work, llama),
        threads=args.threads,
        backend=args.backend,
        variants=args.variants,
        runs=args.runs,
        streams=args.streams,
        input=args.input,
        output=args.output,
        transformers=args.transformers,
        waves=args.waves,
        load_rate=args.load_rate,
        load_seconds=args.load_seconds,
        load_input=args.load_input,
        load_output=args.load_output,
        text=TEXT,
        context=args.context,
    )
    record = _describe(args, setup)
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for part in parts:
        found: list[Row] = []
        try:
            for row in PARTS[part](setup):
                found.append(row)
                _tell(f"{row.name}: {with_spread(row.ostro)}, {row.peer} {with_spread(row.theirs)} {row.unit}")
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            # An hour's other parts should not be lost for it.
            failed[part] = str(error)
            _tell(f"{part} failed: {error}")
        rows += found
        if args.save:
            _save(args.results, record, found)
    print(table(rows))
    for part, why in failed.items():
        print(f"{part} failed: {why}")
    return 1 if failed else 0


def _save(path: Path, run: dict[str, Any], rows: Sequence[Row]) -> None:
    """Each row says of which run it is. Rows of earlier runs stay, unless they compare the same."""
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"models": {}, "rows": {}}
    about = {name: value for name, value in run.items() if name != "models"}
    models = {**before["models"], **run["models"]}
    found = {**before["rows"], **{f"{row.name}, {row.peer}": {**row.as_json(), "run": about} for row in rows}}
    text = json.dumps({"models": models, "rows": found}, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _describe(args: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    """What is compared. Loads each variant once, which also fills Ostro's caches."""
    models = {}
    for name in args.variants:
        path = setup.files.variant(name)
        tensors, runner = tensor_types(path), setup.ostro("describe", path)["runner"]
        models[name] = {"file": path.name, "bytes": path.stat().st_size, "tensors": tensors, "ostro": runner}
        _tell(f"{name}: {path.name}, {_words(tensors)}; Ostro: {runner}")
    load_average = os.getloadavg()[0]
    if load_average > 0.5:
        _tell(f"The machine is busy (load {load_average:.1f}): figures will be worth little.")
    return {
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "load_average": round(load_average, 2),
        "threads": args.threads,
        "backend": args.backend,
        "runs": args.runs,
        "input_tokens": args.input,
        "output_tokens": args.output,
        "llama_cpp": setup.llama.version,
        "llama_options": args.llama_options,
        "models": models,
    }


def _words(types: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(types.items(), key=lambda item: -item[1]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", type=_part, metavar="PART", help=f"of {', '.join([*SHAPES, *PARTS])} (all)")
    parser.add_argument("--llama", type=Path, required=True, metavar="DIR", help="of llama.cpp's programs")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="for model files; 9 GB with 3b")
    parser.add_argument("--variants", type=_variants, default=list(VARIANTS), help=",".join(VARIANTS))
    parser.add_argument("--runs", type=int, default=3, help="of the default model (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="of random weights, at most (%(default)s)")
    parser.add_argument("--minutes", type=float, metavar="X", help="for random weights, all together")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="X", help="of decoding in a round (%(default)g)")
    parser.add_argument("--prompts", type=int, default=4, metavar="N", help="in a round's prefill (%(default)s)")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="PATH",
        help="of another Ostro to measure too: a checkout or an archive",
    )
    parser.add_argument("--no-control", dest="control", action="store_false", help="no second Ostro beside the first")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for rounds.json and rounds.txt, of random weights")
    parser.add_argument("--streams", type=_numbers, default=[1, 8, 32], metavar="N,…", help="and clients over HTTP")
    parser.add_argument("--input", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--output", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=num_cpus(), help="of each engine (%(default)s)")
    parser.add_argument("--backend", choices=("auto", "native", "torch"), default="auto", help="Ostro's --backend")
    parser.add_argument("--llama-options", default="", metavar="TEXT", help="for llama.cpp, such as '-fa off -ub 256'")
    parser.add_argument("--transformers", action="store_true", help="in `offline` too, up to 8 streams")
    parser.add_argument("--context", type=int, default=512, help="of perplexity's windows (%(default)s)")
    parser.add_argument("--waves", type=int, default=2, help="requests of each client over HTTP (%(default)s)")
    parser.add_argument("--load-rate", type=float, default=10.0, metavar="X", help="requests a second (%(default)g)")
    parser.add_argument("--load-seconds", type=float, default=60.0, metavar="S")
    parser.add_argument("--load-input", type=int, default=16, metavar="TOKENS")
    parser.add_argument("--load-output", type=int, default=8, metavar="TOKENS")
    parser.add_argument("--save", action="store_true", help="what was measured, as JSON; rows of earlier runs stay")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="where --save does (cpu.json)")
    return parser


def _part(name: str) -> str:
    if name not in (known := [*SHAPES, *PARTS]):
        raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(known)}")
    return name


def _variants(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(VARIANTS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: choose of {', '.join(VARIANTS)}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
