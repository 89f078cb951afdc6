"""From `ostro generate` typed to its first token on the screen, on a warm cache.

python bench/first_token.py
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
COMMAND = [sys.executable, "-m", "ostro", "generate", "Once upon a time", "--max-tokens", "2"]


def seconds_to_first_token() -> float:
    started = time.perf_counter()
    with subprocess.Popen(COMMAND, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        return time.perf_counter() - started


def main() -> None:
    seconds_to_first_token()  # fetches the model if it is not there, and warms the page cache
    seconds = [seconds_to_first_token() for _ in range(5)]
    print(f"median {statistics.median(seconds):.2f} s of {', '.join(f'{s:.2f}' for s in seconds)}")
    record = {"command": "ostro generate 'Once upon a time'", "seconds": seconds}
    (RESULTS / "first_token.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
