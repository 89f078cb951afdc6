"""How long /healthz waits while requests come whose every field is as large as it may be.

    python bench/event_loop.py                          # every case, against a server with the fake engine
    python bench/event_loop.py --only bad_words --no-save

Each field is at its maximum alone, once with one prompt and once with 2,048, and then all of them together. The engine
is the fake one: what is measured is the API process, and a model would compete with it for the machine's cores.
"""

import argparse
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from health import RESULTS, Latency, latency_during
from ostro.sampling_params import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
)
from ostro.schemas.chat import MAX_PARTS
from ostro.schemas.completions import MAX_BAD_WORD_CHARACTERS_OF_ALL, MAX_LOGIT_BIAS_OF_ALL
from ostro.schemas.fields import MAX_CHARACTERS, MAX_PROMPTS, MAX_TOKENS
from serving import serving

BAR_SECONDS = 0.2
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def _words(count: int, length: int) -> list[str]:
    """Distinct words of the given length with long common prefixes."""
    return [f"{number:06d}".rjust(length, "a") for number in range(count)]


def fields(prompts: int) -> dict[str, dict[str, Any]]:
    """The largest value of each field, by name, in a request of `prompts` prompts."""
    letters = min(MAX_BAD_WORD_CHARACTERS, MAX_BAD_WORD_CHARACTERS_OF_ALL // prompts)
    words = min(MAX_BAD_WORDS, letters // 6)
    biases = min(MAX_LOGIT_BIAS, MAX_LOGIT_BIAS_OF_ALL // prompts)
    return {
        "bad_words": {"bad_words": _words(words, letters // words)},
        "logit_bias": {"logit_bias": {str(token): -1.0 for token in range(biases)}},
        "stop": {"stop": _words(MAX_STOPS, MAX_STOP_CHARACTERS // MAX_STOPS)},
        "stop_token_ids": {"stop_token_ids": list(range(1000, 1000 + MAX_STOP_TOKEN_IDS))},
        "logprobs": {"logprobs": MAX_LOGPROBS, "echo": True},
        "prompt_logprobs": {"prompt_logprobs": MAX_LOGPROBS},
        "cache_salt": {"cache_salt": "s" * 256},
    }


def everything(prompts: int) -> dict[str, Any]:
    """All fields at once."""
    return {name: value for field in fields(prompts).values() for name, value in field.items()}


def cases() -> dict[str, tuple[str, bytes]]:
    """By name, where to post what."""
    made: dict[str, tuple[str, bytes]] = {}
    for count in (1, MAX_PROMPTS):
        prompts = [f"Once upon a time number {number}" for number in range(count)]
        for name, asked in {**fields(count), "all fields": everything(count)}.items():
            made[f"{name}, {count} prompts"] = COMPLETIONS, _body(prompt=prompts, max_tokens=2, **asked)
        made[f"stream, {count} prompts"] = COMPLETIONS, _body(prompt=prompts, max_tokens=2, stream=True)
    made["n"] = COMPLETIONS, _body(prompt="Once", max_tokens=2, n=MAX_CHOICES, **everything(1))
    text = "a b, " * (MAX_CHARACTERS // 5)
    made["longest text"] = COMPLETIONS, _body(prompt=text)
    made["longest message"] = CHAT, _body(messages=[{"role": "user", "content": text}], truncate_prompt_tokens=9)
    made["message of markers"] = CHAT, _body(messages=[{"role": "user", "content": "<" * (1 << 20)}])
    made["most messages"] = CHAT, _body(messages=[{"role": "user", "content": "Hi"}] * 4096)
    parts = [{"type": "text", "text": "a"}] * MAX_PARTS
    made["most parts"] = CHAT, _body(messages=[{"role": "user", "content": parts}] * 8, truncate_prompt_tokens=9)
    made["too many parts"] = CHAT, _body(messages=[{"role": "user", "content": parts}] * 35)
    made["most token ids"] = COMPLETIONS, _body(prompt=[1] * (MAX_TOKENS - 1))
    made["commas in a string, then strings"] = (
        COMPLETIONS,
        b'{"prompt": "' + b"," * 600_000 + b'"' + b'""' * 3_000_000,
    )
    made["escapes"] = COMPLETIONS, b'{"prompt": "' + b"\\n" * (30 << 20) + b'"}'
    made["/tokenize"] = "/tokenize", _body(prompt=text[: 1 << 20], return_token_strs=True)
    made["/detokenize"] = "/detokenize", _body(tokens=[1] * (MAX_TOKENS - 1))
    return made


def _body(**asked: Any) -> bytes:
    return json.dumps(asked).encode()


def _told(name: str, run: Latency) -> str:
    return (
        f"{name:34} {run.body_bytes / 1e6:5.1f} MB  {run.status} after {run.post_seconds:6.2f} s   "
        f"/healthz p50 {run.p50 * 1e3:6.1f} ms, p99 {run.p99 * 1e3:6.1f} ms, max {run.max * 1e3:6.1f} ms "
        f"of {run.probes}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--no-save", action="store_true")
    args = parser.parse_args()
    runs: dict[str, Latency] = {}
    with serving(env={"OSTRO_FAULTS": "fake"}) as server:
        for name, (path, body) in cases().items():
            if args.only in name:
                runs[name] = latency_during(server, body, path)
                print(_told(name, runs[name]), flush=True)
    worst = max(runs.values(), key=lambda run: run.p99)
    print(f"worst p99 {worst.p99 * 1e3:.1f} ms; the bar is {BAR_SECONDS * 1e3:.0f} ms")
    if not args.no_save and not args.only:
        record = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "bar_p99_seconds": BAR_SECONDS,
            "worst_p99_seconds": worst.p99,
            "healthz": {name: asdict(run) for name, run in runs.items()},
        }
        Path(RESULTS / "event_loop.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
