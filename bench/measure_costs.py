"""The costs of an engine alone, for `ostro simulate`: a model of a named shape, weights random, and no server.

    python bench/measure_costs.py --config bench/configs/llama-3.1-8b.json --output costs-8b.json

Steps and copies of pages are timed as `ostro simulate --measure` times them, where a model's files or the HTTP server
are not at hand. What a server would add counts as nothing, and a word as one token.
"""

import argparse
import gc
import json
from dataclasses import replace
from pathlib import Path

import msgspec

from gpu import defaults, random_model, settings
from ostro.measure.bench.workload import Endpoint
from ostro.simulation.costs import EndpointCosts, read_table
from ostro.simulation.measuring import ROUNDS, measure_engine

NO_SERVER = EndpointCosts(request=0.0, prompt_token=0.0, tokens_per_word=1.0, tokens_before=0, tokens_after=0)
ENDPOINTS: dict[Endpoint, EndpointCosts] = {"chat": NO_SERVER, "completions": NO_SERVER}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="a config.json that names the shape")
    parser.add_argument("--output", type=Path, required=True, help="the cost table")
    parser.add_argument("--max-seq-len", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    import platform

    import torch

    from ostro.backends.loading import make_runner
    from ostro.backends.tiers.opening import trial_stores
    from ostro.sampling_params import SamplingParams
    from ostro.version import __version__

    shared = defaults(max_batch_tokens=None, max_seq_len=options.max_seq_len)
    config = json.loads(options.config.read_text(encoding="utf-8"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runner = make_runner(random_model(config, shared, device), replace(settings(shared), serving=True))
    gc.collect()
    gc.freeze()
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    with trial_stores(runner) as stores:
        table = measure_engine(
            runner,
            SamplingParams(max_tokens=None, temperature=0.6),
            stores,
            model=options.config.stem,
            machine={"device": name, "torch": str(torch.__version__), "ostro": __version__},
            rounds=options.rounds,
            watch=lambda what: print(what, flush=True),
        )
    table = msgspec.structs.replace(table, device=name, endpoints=ENDPOINTS)
    text = json.dumps(msgspec.to_builtins(table), indent=1) + "\n"
    assert read_table(text.encode(), str(options.output)) == table
    options.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
