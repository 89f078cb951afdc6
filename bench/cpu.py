"""Ostro on the CPU against llama.cpp and transformers: the same files, the same machine, one run.

    bench/build_llama_cpp.sh build/llama.cpp
    python bench/cpu.py --llama build/llama.cpp/bin --work DIR --save     # all parts, medians of 3: most of an hour
    python bench/cpu.py offline perplexity --llama DIR --work DIR --variants q4_0 --runs 1
    python bench/cpu.py offline --llama DIR --work DIR --transformers

--work is for the files that both engines run, made on first use. Each engine runs in processes of its own, one at a
time; they take turns, and take turns in being first, so that a busy moment of the machine favours neither. Both have as
many threads, prompts of 128 random tokens, and 128 tokens to generate, greedily and whatever the model says of an end.

    offline      prompt tokens a second; tokens generated a second once all streams have their first
    1b           the same on a Llama of a billion random weights
    moe          the same on a mixture of 32 experts: 1.3 billion random weights, 0.4 billion of them active
    perplexity   of a fixed text, in windows of 512 tokens whose second halves count
    http         clients in a closed loop: output tokens a second of wall time, and to the first token (p50)
    start        from the process's start to the first token streamed; memory after a request
    load         requests of a few tokens at a steady rate, in 8 bits: the slowest hundredth
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cpu_peers.llama_cpp import LlamaCpp
from cpu_peers.model_files import ModelFiles, tensor_types
from cpu_peers.parts import PARTS, VARIANTS, Setup
from cpu_peers.verdicts import Row, table, with_spread

HERE = Path(__file__).parent
# The first three chapters of Lewis Carroll's Alice's Adventures in Wonderland (1865), in the public domain: Project
# Gutenberg's edition 2.9, as the Canterbury corpus has it (alice29.txt), its repeated empty lines taken out.
TEXT = HERE / "texts" / "alice.txt"
RESULTS = HERE / "results" / "cpu.json"


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    llama = LlamaCpp(args.llama, args.threads, args.llama_options.split())
    try:
        llama.check()
    except FileNotFoundError as error:
        parser.error(str(error))
    # So that what was started is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
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
    for part in args.parts or PARTS:
        found: list[Row] = []
        try:
            for row in PARTS[part](setup):
                found.append(row)
                told = f"{row.name}: {with_spread(row.ostro)}, {row.peer} {with_spread(row.theirs)} {row.unit}"
                print(told, file=sys.stderr, flush=True)
        except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
            # An hour's other parts should not be lost for it.
            failed[part] = str(error)
            print(f"{part} failed: {error}", file=sys.stderr, flush=True)
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
    for name, path in _models(args, setup):
        tensors, runner = tensor_types(path), setup.ostro("describe", path)["runner"]
        models[name] = {"file": path.name, "bytes": path.stat().st_size, "tensors": tensors, "ostro": runner}
        print(f"{name}: {path.name}, {_words(tensors)}; Ostro: {runner}", file=sys.stderr, flush=True)
    load_average = os.getloadavg()[0]
    if load_average > 0.5:
        print(f"The machine is busy (load {load_average:.1f}): figures will be worth little.", file=sys.stderr)
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


def _models(args: argparse.Namespace, setup: Setup) -> Iterator[tuple[str, Path]]:
    for variant in args.variants:
        yield variant, setup.files.variant(variant)
        if variant != "default" and "1b" in (args.parts or PARTS):
            yield f"1B {variant}", setup.files.one_billion(variant)


def _words(types: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(types.items(), key=lambda item: -item[1]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", type=_part, metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--llama", type=Path, required=True, metavar="DIR", help="of llama.cpp's programs")
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="for model files; 5 GB with 1b")
    parser.add_argument("--variants", type=_variants, default=list(VARIANTS), help=",".join(VARIANTS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--streams", type=_numbers, default=[1, 8, 32], metavar="N,…", help="and clients over HTTP")
    parser.add_argument("--input", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--output", type=int, default=128, metavar="TOKENS")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each engine (%(default)s)")
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
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(PARTS)}")
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
