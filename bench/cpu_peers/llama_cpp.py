"""llama.cpp's programs: how they are called for a fair comparison, and what they print. Knows nothing of Ostro.

`llama-batched-bench` computes all prompts, and times that; then as many steps as tokens are asked for, of one token for
each stream. Its tokens are drawn at random: it samples nothing, which favours it a little.
"""

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("llama-batched-bench", "llama-perplexity", "llama-quantize", "llama-server")

_FINAL = re.compile(r"Final estimate: PPL = ([0-9.]+)")


@dataclass(frozen=True, slots=True)
class Speed:
    streams: int
    prefill: float
    """Prompt tokens a second, of all streams."""
    decode: float
    """Tokens generated a second, of all streams."""


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    directory: Path
    """Directory of its programs."""
    threads: int
    options: Sequence[str] = field(default=())
    """For every program but the quantiser, such as `-fa on`."""

    def check(self, programs: Sequence[str] = PROGRAMS) -> None:
        """Raises FileNotFoundError that says how to get what is missing."""
        missing = [name for name in programs if not (self.directory / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{self.directory} lacks {', '.join(missing)}. `bench/build_llama_cpp.sh DIR` builds them, and then "
                "they are in DIR/bin."
            )

    @property
    def version(self) -> str:
        said = self._run("llama-server", "--version")
        return next((line for line in said.splitlines() if line.startswith("version")), said.strip())

    def quantize(self, source: Path, target: Path, kind: str) -> None:
        partial = target.with_name(target.name + ".partial")
        self._run("llama-quantize", "--allow-requantize", str(source), str(partial), kind)
        partial.replace(target)

    def speeds(self, model: Path, streams: Sequence[int], prompt: int, output: int) -> list[Speed]:
        """One measurement for each number of streams, by one process, after one that is thrown away."""
        said = self._run(
            "llama-batched-bench",
            *("-m", str(model), "-t", str(self.threads), "-c", str(max(streams) * (prompt + output))),
            *("-npp", str(prompt), "-ntg", str(output), "-npl", ",".join(map(str, [streams[0], *streams]))),
            *("--output-format", "jsonl", *self.options),
        )
        found = parse_speeds(said)[1:]
        if [speed.streams for speed in found] != list(streams):
            raise RuntimeError(f"llama-batched-bench did not measure {list(streams)} streams. It said: {said[-2000:]}")
        return found

    def perplexity(self, model: Path, text: Path, context: int) -> float:
        return parse_perplexity(
            self._run(
                "llama-perplexity",
                *("-m", str(model), "-f", str(text), "-c", str(context), "-t", str(self.threads), *self.options),
            )
        )

    def server(self, model: Path, port: int, *, slots: int, slot_tokens: int) -> list[str]:
        """The command of a server that computes `slots` requests at a time, each of at most `slot_tokens` tokens.

        It stores no finished prompts beside the slots: no request here repeats another.
        """
        return [
            *(str(self.directory / "llama-server"), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)),
            *("-t", str(self.threads), "-c", str(slots * slot_tokens), "--parallel", str(slots)),
            *("--cache-ram", "0", "--no-webui", *self.options),
        ]

    def _run(self, program: str, *arguments: str) -> str:
        """Runs the program; returns everything that it prints."""
        ran = subprocess.run(
            [str(self.directory / program), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if ran.returncode:
            raise RuntimeError(f"{program} ended with status {ran.returncode}: {ran.stdout[-2000:]}")
        return ran.stdout


def parse_speeds(said: str) -> list[Speed]:
    """From `llama-batched-bench --output-format jsonl`, whose lines are among others."""
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return [Speed(line["pl"], line["speed_pp"], line["speed_tg"]) for line in lines]


def parse_perplexity(said: str) -> float:
    found = _FINAL.search(said)
    if found is None:
        raise RuntimeError(f"llama-perplexity told no estimate. It said: {said[-2000:]}")
    return float(found[1])
