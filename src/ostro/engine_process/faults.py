"""Fault injection for tests: an engine that crashes, hangs or is slow. Off unless OSTRO_FAULTS is set.

OSTRO_FAULTS is a list such as "fake,crash_after=20":

fake             runs no model: tokens come from the fake runner
answers=FILE     with fake: scripted answers, a JSON list of pairs: a key and its answers, as token ids (`fake.Script`)
load_seconds=S   loading takes S seconds longer, without any CPU time
load_work=S      loading takes S seconds longer, with some CPU time
crash_loading    dies while it loads
crash_after=N    dies after N steps
crash_length=N   dies in a step of a request whose prompt has N tokens
follow=S         with fake: follows another host's engine, which ends after S seconds
stall_after=N    hangs after N steps
step_seconds=S   each step takes S seconds longer
"""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ostro.backends.fake import Script
from ostro.engine.sequence import Sequence

_WORK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Faults:
    fake: bool = False
    answers: str | None = None
    load_seconds: float = 0.0
    load_work: float = 0.0
    crash_loading: bool = False
    crash_after: int | None = None
    crash_length: int | None = None
    follow: float | None = None
    stall_after: int | None = None
    step_seconds: float = 0.0

    @classmethod
    def from_environment(cls) -> Self:
        given = dict(item.partition("=")[::2] for item in os.environ.get("OSTRO_FAULTS", "").split(",") if item)
        unknown = given.keys() - set(cls.__slots__)
        if unknown:
            raise ValueError(f"OSTRO_FAULTS: unknown {', '.join(sorted(unknown))}")
        return cls(
            fake="fake" in given,
            answers=given.get("answers"),
            load_seconds=float(given.get("load_seconds", 0.0)),
            load_work=float(given.get("load_work", 0.0)),
            crash_loading="crash_loading" in given,
            crash_after=int(given["crash_after"]) if "crash_after" in given else None,
            crash_length=int(given["crash_length"]) if "crash_length" in given else None,
            follow=float(given["follow"]) if "follow" in given else None,
            stall_after=int(given["stall_after"]) if "stall_after" in given else None,
            step_seconds=float(given.get("step_seconds", 0.0)),
        )

    def scripts(self) -> list[Script]:
        if self.answers is None:
            return []
        return [Script(*entry) for entry in json.loads(Path(self.answers).read_text(encoding="utf-8"))]

    def before_load(self) -> None:
        time.sleep(self.load_seconds)
        end = time.monotonic() + self.load_work
        while time.monotonic() < end:
            began = time.process_time()
            while time.process_time() - began < _WORK_SECONDS:
                pass
            time.sleep(_WORK_SECONDS)
        if self.crash_loading:
            os._exit(70)

    def before_running(self, running: Iterable[Sequence]) -> None:
        if self.crash_length is not None and any(seq.num_prompt == self.crash_length for seq in running):
            os._exit(70)

    def before_step(self, step: int) -> None:
        if self.crash_after is not None and step >= self.crash_after:
            os._exit(70)
        while self.stall_after is not None and step >= self.stall_after:
            time.sleep(1)
        if self.step_seconds:
            time.sleep(self.step_seconds)
