"""Keeps the figures of `bench/results` over time in `bench/history.json`, from which a page of the docs is made.

python tools/bench_history.py             # after a benchmark saved its results: adds what changed
python tools/bench_history.py --from-git  # anew, from all versions of the files that git has
"""

import argparse
import datetime
import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
HISTORY = ROOT / "bench" / "history.json"
# Significant digits.
_DIGITS = 4

Keys = tuple[str | int, ...]


@dataclass(frozen=True)
class Shown:
    """The figures of one file of results. Of a list of runs the median counts."""

    title: str
    command: str
    machine: str
    figures: Mapping[str, Keys]
    """By their names with units."""


def _gpu(model: str, *workloads: str) -> Shown:
    figures: dict[str, Keys] = {f"{each}, tokens/s": (each, "tokens_per_second") for each in workloads}
    return Shown(
        f"{model} on a GPU",
        f"python bench/gpu.py all --config bench/configs/{model}.json --save",
        "NVIDIA H200, random weights",
        figures,
    )


def _cpu(what: str, *, peer: bool = False) -> Keys:
    return "rows", f"default, {what}, llama.cpp", "theirs" if peer else "ostro"


_CORES = "2-core aarch64 CPU"
SHOWN: Mapping[str, Shown] = {
    "cpu.json": Shown(
        "The default model on a CPU",
        "python bench/cpu.py --save",
        _CORES,
        {
            "1 stream, tokens/s": _cpu("1 stream: decode"),
            "llama.cpp": _cpu("1 stream: decode", peer=True),
            "8 streams, tokens/s": _cpu("8 streams: decode"),
            "llama.cpp's": _cpu("8 streams: decode", peer=True),
        },
    ),
    "first_token.json": Shown(
        "From a cold start to the first token", "python bench/first_token.py", _CORES, {"seconds": ("seconds",)}
    ),
    "health.json": Shown(
        "From the start of a server",
        "python bench/health.py",
        _CORES,
        {"to `/healthz`, s": ("median_healthz_seconds",), "to `/readyz`, s": ("median_readyz_seconds",)},
    ),
    "h200/llama-3.1-8b.json": _gpu("llama-3.1-8b", "single", "batch8", "nano", "chat256"),
    "h200/llama-3.2-1b.json": _gpu("llama-3.2-1b", "single", "batch8"),
    "h200/qwen3-0.6b.json": _gpu("qwen3-0.6b", "single", "batch8", "nano", "chat256"),
    "h200/qwen3-4b.json": _gpu("qwen3-4b", "single", "batch8"),
    "h200/qwen3-30b-a3b.json": _gpu("qwen3-30b-a3b", "single", "batch8", "nano"),
    "h200/gemma-3-1b.json": _gpu("gemma-3-1b", "single", "batch8"),
    "h200/http-qwen3-0.6b.json": Shown(
        "HTTP against offline, on a GPU",
        "python bench/gpu_http.py",
        "NVIDIA H200",
        {"share of the speed": ("ratio",), "ready after, s": ("ready_seconds",)},
    ),
    "http_fake.json": Shown(
        "What HTTP carries, without a model",
        "python bench/http_streams.py",
        _CORES,
        {"64 streams, tokens/s": ("flat out", "median_tokens_per_second")},
    ),
    "http_vs_offline.json": Shown(
        "HTTP against offline, on a CPU",
        "python bench/http_vs_offline.py",
        _CORES,
        {"share of the speed, 1 stream": ("rows", 0, "ratio"), "8 streams": ("rows", 1, "ratio")},
    ),
    "offline.json": Shown(
        "Against transformers, on torch",
        "python bench/offline.py",
        _CORES,
        {"times as fast, 1 request": ("rows", 0, "speedup")},
    ),
    "speculative.json": Shown(
        "Drafts",
        "python bench/speculative.py",
        "2-core x86-64 CPU",
        {"times as fast, edits": ("edits", "speedup"), "prose": ("prose", "speedup")},
    ),
    "quantized_accuracy.json": Shown(
        "Accuracy of int8 on torch",
        "python bench/quantized_accuracy.py",
        _CORES,
        {"perplexity": ("rows", 0, "perplexity"), "in int8": ("rows", 1, "perplexity")},
    ),
    "kv_persist.json": Shown(
        "Kept prefixes",
        "python bench/kv_persist.py",
        _CORES,
        {"4,000 tokens computed, s": ("runs", 0, "seconds"), "found on disk, s": ("runs", 1, "seconds")},
    ),
    "prefill_decode.json": Shown(
        "Gaps between tokens while long prompts are computed",
        "python bench/prefill_decode.py",
        "2-core CPU",
        {"p99 in one server, times that alone": ("p99_ratio", "one"), "in two": ("p99_ratio", "apart")},
    ),
    "pool.json": Shown(
        "Swapping models", "python bench/pool.py", _CORES, {"a swap, times a cold load": ("swap_over_cold",)}
    ),
    "score.json": Shown(
        "Scoring a thousand continuations", "python bench/score.py", _CORES, {"times as fast as one by one": ("ratio",)}
    ),
    "hrm.json": Shown("HRM, eight sequences", "python bench/hrm.py", _CORES, {"times as fast as one": ("ratio",)}),
    "ray.json": Shown(
        "Ray Serve",
        "python bench/ray_serve.py",
        "2-core CPU",
        {"share of the server's speed": ("direct", "way", "share_of_speed")},
    ),
    "router.json": Shown(
        "Choosing a replica",
        "python bench/router.py",
        "2-core CPU",
        {"among 1, µs": ("costs", 0, "median_microseconds"), "among 100, µs": ("costs", 1, "median_microseconds")},
    ),
    "event_loop.json": Shown(
        "`/healthz` beside the worst requests", "python bench/event_loop.py", _CORES, {"p99, s": ("worst_p99_seconds",)}
    ),
    "fairness.json": Shown(
        "Waiting beside a flood of another key's requests",
        "python bench/fairness.py",
        _CORES,
        {"times that alone": ("attacks", "flood", "times_idle")},
    ),
}
LEFT_OUT: Mapping[str, str] = {
    "embeddings.json": "docs/api/embeddings.md has its table",
    "fp8_accuracy.json": "docs/gpu.md has its table",
    "h200/cpu_experts.json": "docs/gpu.md has its figures",
    "hostile_structures.json": "what is refused, not how fast",
    "hrm_experts.json": "as hrm.json, with experts",
    "lora.json": "docs/lora.md has its table",
    "outside.json": "how two measuring programs agree",
    "simulator.json": "how predictions agree with measurements: docs/simulate.md",
    "simulator_sleeping.json": "as simulator.json",
    "structured.json": "docs/structured-outputs.md has its table",
    "xeon/1b.json": "ratios in rounds, to llama.cpp and to a former commit",
    "xeon/gpt-oss.json": "as xeon/two-cores.json, of another shape",
    "xeon/threads-16.json": "as xeon/1b.json, of more shapes",
    "xeon/threads-4.json": "as xeon/threads-16.json, with four threads",
    "xeon/two-cores.json": "as xeon/1b.json, with two threads",
}


def extract(shown: Shown, results: object) -> dict[str, float]:
    """The figures that these results have: older ones may lack some."""
    found = {name: _figure(results, keys) for name, keys in shown.figures.items()}
    return {name: value for name, value in found.items() if value is not None}


def _figure(results: Any, keys: Keys) -> float | None:
    for key in keys:
        try:
            results = results[key]
        except (KeyError, IndexError, TypeError):
            return None
    if isinstance(results, str | dict):
        return None
    return float(f"{median(results) if isinstance(results, list) else results:.{_DIGITS}g}")


History = dict[str, list[dict[str, Any]]]


def read() -> History:
    found: History = json.loads(HISTORY.read_text(encoding="utf-8"))
    return found


def with_current(history: History, commit: str, date: str) -> History:
    """The history with what the files say now, where that is news."""
    for name, shown in SHOWN.items():
        _add(history, name, commit, date, extract(shown, json.loads((RESULTS / name).read_text(encoding="utf-8"))))
    return history


def _add(history: History, name: str, commit: str, date: str, figures: Mapping[str, float]) -> None:
    rows = history.setdefault(name, [])
    if figures and (not rows or rows[-1]["figures"] != figures):
        rows.append({"commit": commit, "date": date, "figures": dict(figures)})


def _from_git() -> History:
    history: History = {}
    for name, shown in SHOWN.items():
        for commit, date in _versions(f"bench/results/{name}"):
            _add(
                history, name, commit, date, extract(shown, json.loads(_git("show", f"{commit}:bench/results/{name}")))
            )
    return history


def _versions(path: str) -> Iterator[tuple[str, str]]:
    for line in _git("log", "--reverse", "--diff-filter=AM", "--format=%h %as", "--", path).splitlines():
        commit, _, date = line.partition(" ")
        yield commit, date


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Keeps the figures of bench/results over time.")
    parser.add_argument("--from-git", action="store_true", help="from all versions that git has")
    if parser.parse_args().from_git:
        kept = _from_git()
    else:
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        kept = with_current(read(), _git("rev-parse", "--short=8", "HEAD").strip(), today)
    HISTORY.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
