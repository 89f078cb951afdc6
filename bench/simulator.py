"""How well `ostro simulate` predicts `ostro bench` on this machine, on three traces that it was not fitted to.

    python bench/simulator.py --work build/simulator
    python bench/simulator.py --work build/simulator --rounds 3 --save
    python bench/simulator.py --work build/simulator --seed 7
    python bench/simulator.py --work build/simulator --step-seconds 0.06

A round measures the costs, replays each trace on a server, and simulates it with these costs. Over several rounds
medians are compared, since a machine is not as fast at one time as at another. Each trace is replayed at the speed that
keeps the machine about half busy. --seed draws traces that nobody has looked at; --share takes only a part of each, to
try the program.

With --step-seconds the server's engine runs no model: its steps sleep for so long. That shows what the simulator knows
of schedules, caches and HTTP, without what it measures of steps, on a machine that is too busy for the whole.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from ostro.config import EngineConfig
from ostro.devices import DEVICE_KINDS
from ostro.measure.bench.workload import WORDS
from ostro.simulation.costs import FORMAT, CostTable, EngineShape, StepTimes
from ostro.simulation.server_costs import probe_server, with_server
from serving import serving

RESULTS = Path(__file__).parent / "results"
MOST_OFF = 0.15
BUSY = 0.5
FIGURES: Mapping[str, Callable[[Any], float]] = {
    "output tokens/s": lambda figures: figures["output_tokens_per_second"],
    "TTFT p50": lambda figures: figures["ttft"]["p50"],
    "TTFT p99": lambda figures: figures["ttft"]["p99"],
    "TPOT p50": lambda figures: figures["tpot"]["p50"],
}
HELD_TO = ("output tokens/s", "TTFT p50")


def conversations(dice: random.Random) -> list[dict[str, Any]]:
    """Short prompts and answers, one by one at random times."""
    at, found = 0.0, []
    for _ in range(40):
        at += dice.expovariate(1.0)
        found.append({"timestamp": at, "input_len": dice.randint(50, 300), "output_len": dice.randint(16, 64)})
    return found


def bursts(dice: random.Random) -> list[dict[str, Any]]:
    """Eight at a time."""
    sizes = [(burst, dice.randint(40, 120), dice.randint(16, 48)) for burst in range(4) for _ in range(8)]
    return [{"timestamp": 8.0 * burst, "input_len": length, "output_len": output} for burst, length, output in sizes]


def documents(dice: random.Random) -> list[dict[str, Any]]:
    """Long prompts, half of each the same, and short answers."""
    shared = dice.choices(WORDS, k=300)
    at, found = 0.0, []
    for _ in range(24):
        at += dice.expovariate(1.0)
        words = shared + dice.choices(WORDS, k=dice.randint(100, 500))
        found.append({"timestamp": at, "prompt": " ".join(words), "output_len": dice.randint(4, 24)})
    return found


TRACES = {"conversations": conversations, "bursts": bursts, "documents": documents}


def ostro(*args: str) -> None:
    subprocess.run([sys.executable, "-m", "ostro", *args], check=True, stdout=subprocess.DEVNULL)


def run_round(work: Path, model: list[str], step_seconds: float | None) -> dict[str, dict[str, Any]]:
    """By trace, the figures that were measured and those that were predicted."""
    costs, env = work / "costs.json", {}
    if step_seconds is None:
        ostro("simulate", "--measure", str(costs), *(["--model", *model] if model else []))
    else:
        env["OSTRO_FAULTS"] = f"fake,step_seconds={step_seconds}"
        costs.write_bytes(msgspec.json.encode(_constant(step_seconds, env)))
    speeds = {name: _speed(work, costs, name) for name in TRACES}
    found: dict[str, dict[str, Any]] = {}
    with serving("--host", "127.0.0.1", *model, env=env) as server:
        url = f"http://{server.host}:{server.port}"
        for seed, (name, speed) in enumerate(speeds.items(), 1):
            # Words of its own, so that no trace finds another's prompts in the server's cache.
            replay = ["--trace", str(work / f"{name}.jsonl"), "--speed", f"{speed:.6g}", "--seed", str(seed)]
            found[name] = {
                "speed": speed,
                "measured": _figures(work, "bench", "--url", url, "--no-self-test", *replay),
                "predicted": _figures(work, "simulate", "--costs", str(costs), *replay)["figures"],
            }
            told = found[name]["measured"]
            found[name] |= {"measured": told["figures"], "load_average": os.getloadavg()[0]}
    return found


def _constant(seconds: float, env: Mapping[str, str]) -> CostTable:
    """The costs of a server whose steps all take so long."""
    resolved = DEVICE_KINDS["cpu"].resolve(EngineConfig(serving=True))
    shape = EngineShape(
        page_size=resolved.page_size,
        num_pages=4096,
        max_seq_len=8192,
        max_batch_tokens=resolved.max_batch_tokens,
        max_batch_seqs=resolved.max_batch_seqs,
        vocab_size=49152,
    )
    step = StepTimes(decode=[(1, seconds)], mixed=[(1, seconds)], sampled=0.0, decode_context=0.0, prompt_context=0.0)
    engine = CostTable(format=FORMAT, model="fake", device="sleep", engine=shape, step=step, event=0.0, endpoints={})
    with serving("--host", "127.0.0.1", env=env) as server:
        return with_server(engine, probe_server(f"http://{server.host}:{server.port}", {}, max_seq_len=8192))


def _speed(work: Path, costs: Path, name: str) -> float:
    """How fast to replay a trace, so that the machine is about half busy: by what it takes one after the other."""
    rows = [json.loads(line) for line in (work / f"{name}.jsonl").read_text().splitlines()]
    path = work / "packed.jsonl"
    path.write_text("".join(json.dumps(row | {"timestamp": 0.0}) + "\n" for row in rows))
    packed = _figures(work, "simulate", "--costs", str(costs), "--trace", str(path))["figures"]["seconds"]
    return float(BUSY * rows[-1]["timestamp"] / packed)


def _figures(work: Path, *args: str) -> Any:
    output = work / "figures.json"
    ostro(*args, "--output-file", str(output))
    return json.loads(output.read_text())["levels"][0]


def compared(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in TRACES:
        found[name] = {}
        for label, pick in FIGURES.items():
            measured, predicted = (
                median(pick(each[name][side]) for each in rounds) for side in ("measured", "predicted")
            )
            off = predicted / measured - 1
            found[name][label] = {"measured": measured, "predicted": predicted, "off": off}
            kept = "" if label not in HELD_TO else "   kept" if abs(off) <= MOST_OFF else "   MISSED"
            print(f"{name:<15}{label:<17}{measured:>10.4g}{predicted:>10.4g}{off:>+9.1%}{kept}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="directory for traces and results")
    parser.add_argument("--model", help="the default model if left out")
    parser.add_argument("--step-seconds", type=float, help="no model: steps that sleep for so long")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, help="draw traces of one's own")
    parser.add_argument("--share", type=float, default=1.0, help="of each trace's requests")
    parser.add_argument("--save", action="store_true", help="write to bench/results")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for name, make in TRACES.items():
        rows = make(random.Random(name if args.seed is None else f"{args.seed}/{name}"))
        rows = rows[:: round(1 / args.share)]
        (args.work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rounds = []
    for number in range(args.rounds):
        print(f"round {number + 1}, load average {os.getloadavg()[0]:.1f}", flush=True)
        rounds.append(run_round(args.work, [args.model] if args.model else [], args.step_seconds))
        found = compared(rounds)
    kept = all(abs(found[name][label]["off"]) <= MOST_OFF for name in TRACES for label in HELD_TO)
    if args.save:
        path = RESULTS / ("simulator.json" if args.step_seconds is None else "simulator_sleeping.json")
        told = {"seed": args.seed, "most_off": MOST_OFF, "kept": kept, "compared": found, "rounds": rounds}
        path.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
