"""Structured outputs against free ones, in one run: what masks cost, and what jump-forward gains.

    python bench/constrained.py                        # 1, 8 and 32 streams, medians of 5
    python bench/constrained.py --streams 8 --repeats 3
    python bench/constrained.py --cpu-time             # one thread's CPU time, on a machine that is busy

The default model, on whatever runs it here, writes calls of tools, each stream by the signature of one. Its free twin
writes as many tokens after the same prompt. Both run in turn, so that a busy moment of the machine hits both, and the
prefix cache is emptied before each run. Grammars are compiled before: a server keeps them, too.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ostro import LLM, Completion, EngineConfig, SamplingParams, StructuredOutput

RESULTS = Path(__file__).parent / "results"


def _text(longest: int = 24) -> dict[str, object]:
    return {"type": "string", "maxLength": longest}


def _whole(least: int, most: int) -> dict[str, object]:
    return {"type": "integer", "minimum": least, "maximum": most}


# As tools are given to chat models: names, and the properties of their arguments, all of them required.
TOOLS: Mapping[str, Mapping[str, object]] = {
    "get_current_weather": {"location": _text(), "unit": {"enum": ["celsius", "fahrenheit"]}, "days": _whole(1, 14)},
    "calculate_loan_payment": {
        "principal_amount": _whole(1, 999_999),
        "annual_interest_rate": {"type": "number"},
        "loan_term_years": _whole(1, 40),
    },
    "create_calendar_event": {
        "event_title": _text(),
        "start_date": {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"},
        "duration_minutes": _whole(5, 600),
        "reminder_enabled": {"type": "boolean"},
    },
    "search_restaurants": {
        "cuisine_type": {"enum": ["italian", "japanese", "mexican", "indian", "french"]},
        "price_range": {"enum": ["cheap", "moderate", "expensive"]},
        "maximum_distance_km": _whole(1, 50),
        "open_now": {"type": "boolean"},
    },
    "send_email_message": {"recipient_address": _text(), "subject_line": _text(), "is_urgent": {"type": "boolean"}},
    "convert_currency": {
        "amount": {"type": "number"},
        "source_currency": {"enum": ["EUR", "USD", "GBP", "JPY"]},
        "target_currency": {"enum": ["EUR", "USD", "GBP", "JPY"]},
    },
}


@dataclass(frozen=True, slots=True)
class Row:
    streams: int
    jump_forward: bool
    tokens: int
    forced_tokens: int
    free_seconds: list[float]
    constrained_seconds: list[float]
    free_tokens_per_second: float
    constrained_tokens_per_second: float
    ratio: float


def call_schema(name: str) -> dict[str, object]:
    properties = TOOLS[name]
    arguments = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def prompts_of(llm: LLM, names: Sequence[str]) -> list[list[int]]:
    asked = "Call the tool {} with arguments of your own for request number {}. Answer with JSON only."
    return [
        llm.chat_prompt([{"role": "user", "content": asked.format(name, number)}]) for number, name in enumerate(names)
    ]


def measure(llm: LLM, streams: int, repeats: int, clock: Callable[[], float], *, jump_forward: bool) -> Row:
    names = [list(TOOLS)[number % len(TOOLS)] for number in range(streams)]
    prompts, scheduler = prompts_of(llm, names), llm.core.scheduler
    constrained = [
        SamplingParams(
            max_tokens=300,
            temperature=1.0,
            seed=number,
            structured=StructuredOutput.from_schema(call_schema(name), jump_forward=jump_forward),
        )
        for number, name in enumerate(names)
    ]

    def run(params: Sequence[SamplingParams]) -> tuple[float, list[Completion]]:
        scheduler.kv.clear_cache()
        start = clock()
        completions = llm.generate(prompts, params)
        return clock() - start, completions

    forced = scheduler.counters.forced_tokens
    _, written = run(constrained)
    forced = scheduler.counters.forced_tokens - forced
    for completion, name in zip(written, names, strict=True):
        assert completion.choices[0].finish_reason == "stop", completion.text
        assert json.loads(completion.text)["name"] == name
    lengths = [completion.num_generated for completion in written]
    # The same rows in the same steps, were it not for forced tokens.
    free = [
        SamplingParams(max_tokens=length, temperature=1.0, seed=number, ignore_eos=True)
        for number, length in enumerate(lengths)
    ]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats):
        for is_free in (True, False):
            seconds[is_free].append(run(free if is_free else constrained)[0])
    medians = {is_free: statistics.median(each) for is_free, each in seconds.items()}
    return Row(
        streams=streams,
        jump_forward=jump_forward,
        tokens=sum(lengths),
        forced_tokens=forced,
        free_seconds=seconds[True],
        constrained_seconds=seconds[False],
        free_tokens_per_second=sum(lengths) / medians[True],
        constrained_tokens_per_second=sum(lengths) / medians[False],
        ratio=statistics.median(a / b for a, b in zip(seconds[True], seconds[False], strict=True)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--save", type=Path, help=f"such as {RESULTS.name}/constrained.json")
    args = parser.parse_args()

    llm = LLM(config=EngineConfig(threads=1 if args.cpu_time else "auto"))
    clock = time.process_time if args.cpu_time else time.perf_counter
    rows = []
    print(f"{'streams':>7} {'jump-forward':>12} {'forced':>7} {'free tok/s':>11} {'tok/s':>9} {'ratio':>7}")
    for streams in args.streams:
        for jump_forward in (False, True):
            row = measure(llm, streams, args.repeats, clock, jump_forward=jump_forward)
            rows.append(row)
            print(
                f"{row.streams:>7} {'on' if jump_forward else 'off':>12} {row.forced_tokens / row.tokens:>7.1%} "
                f"{row.free_tokens_per_second:>11.1f} {row.constrained_tokens_per_second:>9.1f} {row.ratio:>7.1%}",
                flush=True,
            )
    if args.save is not None:
        record = {
            "model": llm.name,
            "backend": llm.core.runner.spec.backend,
            "seconds": "CPU time of one thread" if args.cpu_time else "wall clock",
            "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
            "rows": [asdict(row) for row in rows],
        }
        args.save.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
