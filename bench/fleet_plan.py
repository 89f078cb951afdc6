"""Which routing and which tiers suit a fleet: `ostro simulate` on conversations, for fleets of several sizes.

    python bench/fleet_plan.py --costs costs-8b.json --work build/plan
    python bench/fleet_plan.py --costs … --work build/plan --replicas 10000 --per-replica 1 --turns 2

Each replica has so many conversations: a first prompt of 8,000 tokens, 500 more in each further turn, answers of 32, as
in `gpu_tiers.py`, and half a minute or so between turns. Twelve of eight turns do not fit into its KV cache, which is
cut down to 12 GiB for that: at its full size a simulation would need as many more conversations to fill it.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

FIRST, FURTHER, OUTPUT = 8000, 500, 32
THINKING = 30.0
KV_BYTES = 12 << 30
ROUTING = ("prefix", "least-loaded", "round-robin")


def conversations(count: int, turns: int, path: Path) -> None:
    """Begun at random times over as long as a user thinks, so that all are under way at the same time."""
    dice = random.Random(count)
    with path.open("w", encoding="utf-8") as file:
        for talk in range(count):
            at = dice.uniform(0, THINKING)
            for turn in range(turns):
                length = FIRST if turn == 0 else FURTHER
                row = {"timestamp": round(at, 4), "conversation": talk, "input_len": length, "output_len": OUTPUT}
                file.write(json.dumps(row) + "\n")
                at += dice.uniform(0.5, 1.5) * THINKING


def simulated(work: Path, costs: Path, replicas: int, trace: Path, routing: str, tiers: list[str]) -> dict[str, Any]:
    table, output = json.loads(costs.read_text(encoding="utf-8")), work / "figures.json"
    pages = KV_BYTES // table["copies"]["page_bytes"]
    command = [sys.executable, "-m", "ostro", "simulate", "--costs", str(costs), "--trace", str(trace)]
    command += ["--replicas", str(replicas), "--routing", routing, "--num-pages", str(pages), *tiers]
    subprocess.run([*command, "--output-file", str(output)], check=True, stdout=subprocess.DEVNULL)
    [level] = json.loads(output.read_text(encoding="utf-8"))["levels"]
    return {"replicas": replicas, "routing": routing, "tiers": tiers, **level["figures"], "fleet": level["fleet"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="directory for traces and results")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 100])
    parser.add_argument("--routing", nargs="+", default=ROUTING, choices=ROUTING)
    parser.add_argument("--per-replica", type=int, default=12, help="conversations")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--kv-host-memory", default="64G")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = []
    print("| replicas | routing | host memory | p50 TTFT | p99 TTFT | prompt tokens found | busy | simulated in |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for replicas in options.replicas:
        trace = options.work / "conversations.jsonl"
        conversations(options.per_replica * replicas, options.turns, trace)
        for routing in options.routing:
            for tiers in ([], ["--kv-host-memory", options.kv_host_memory]):
                row = simulated(options.work, options.costs, replicas, trace, routing, tiers)
                rows.append(row)
                ttft, fleet = row["ttft"], row["fleet"]
                print(
                    f"| {replicas:,} | {routing} | {tiers[1] if tiers else 'none'} | {1e3 * ttft['p50']:,.0f} ms | "
                    f"{1e3 * ttft['p99']:,.0f} ms | {fleet['hit_tokens'] / fleet['prompt_tokens']:.0%} | "
                    f"{fleet['busy_share']:.0%} | {fleet['wall_seconds']:,.0f} s |",
                    flush=True,
                )
    if options.save is not None:
        options.save.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
