"""How much of the engine's speed on a GPU is left over HTTP: `nano`, all its requests streamed at once on loopback.

    python bench/gpu_http.py --config bench/configs/qwen3-0.6b.json --save

Makes a model directory of the named shape, weights random, and serves it; the clients run in a process of their own and
read streams. The engine alone runs the same workload in another process, before the server starts.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from random_model import write_weights
from serving import Server, serving
from workloads import WORKLOADS

RESULTS = Path(__file__).parent / "results" / "h200"
CLIENTS_PROGRAM = Path(__file__).with_name("stream_clients.py")


def write_model(config: dict[str, object], directory: Path) -> None:
    """config.json, random weights, and a tokenizer in which every id is a word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    write_weights(config, directory)
    size = config["vocab_size"]
    assert isinstance(size, int)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"Ġw{id}" for id in range(len(letters), size)]
    tokenizer = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def offline_seconds(config: Path) -> list[float]:
    program = Path(__file__).with_name("gpu.py")
    ran = subprocess.run(
        [sys.executable, str(program), "nano", "--config", str(config), "--max-batch-tokens", "8192", "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    return [float(each) for each in json.loads(ran.stdout.splitlines()[-1])["seconds"]]


def http_seconds(server: Server) -> float:
    shared = {"temperature": 0.6, "ignore_eos": True, "stream": True}
    work = WORKLOADS["nano"]()
    bodies = [{"prompt": each.prompt, "max_tokens": each.output, **shared} for each in work]
    job = {"host": server.host, "port": server.port, "clients": len(work), "requests": 1, "bodies": bodies}
    ran = subprocess.run(
        [sys.executable, str(CLIENTS_PROGRAM)], input=json.dumps(job), text=True, check=True, capture_output=True
    )
    found = json.loads(ran.stdout)
    assert found["streams"] == len(work), found
    print(json.dumps(found), flush=True)
    return float(found["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--write-model", type=Path, metavar="DIR", help="only write the model there")
    options = parser.parse_args()
    if options.write_model:
        write_model(json.loads(options.config.read_text(encoding="utf-8")), options.write_model)
        return
    total = sum(each.output for each in WORKLOADS["nano"]())
    alone = offline_seconds(options.config)
    with tempfile.TemporaryDirectory() as name:
        # In a process that ends: this one must hold no part of the GPU's memory while the server measures what is free.
        subprocess.run([sys.executable, __file__, "--config", str(options.config), "--write-model", name], check=True)
        began = time.perf_counter()
        with serving(name, "--max-seq-len", "4096", "--max-queue-requests", "4096", "--no-prefix-caching") as server:
            ready = time.perf_counter() - began
            http_seconds(server)
            over = [http_seconds(server), http_seconds(server)]
    ratio = min(alone) / min(over)
    print(f"offline {total / min(alone):.0f} tok/s, over HTTP {total / min(over):.0f}, ratio {ratio:.3f}")
    if options.save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        result = {"offline_seconds": alone, "http_seconds": over, "ratio": ratio, "ready_seconds": ready}
        path = RESULTS / f"http-{options.config.stem}.json"
        path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
