"""Faults on purpose, for tests: an engine that crashes, hangs or is slow. Off unless OSTRO_FAULTS is set.

OSTRO_FAULTS is a list such as "fake,crash_after=20": `fake` runs no model, `crash_after` and `stall_after` count steps,
`step_seconds` makes each step take at least so long.
"""

import os
import time
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Faults:
    fake: bool = False
    crash_after: int | None = None
    stall_after: int | None = None
    step_seconds: float = 0.0

    @classmethod
    def from_environment(cls) -> Self:
        given = dict(item.partition("=")[::2] for item in os.environ.get("OSTRO_FAULTS", "").split(",") if item)
        unknown = given.keys() - {"fake", "crash_after", "stall_after", "step_seconds"}
        if unknown:
            raise ValueError(f"OSTRO_FAULTS: unknown {', '.join(sorted(unknown))}")
        return cls(
            fake="fake" in given,
            crash_after=int(given["crash_after"]) if "crash_after" in given else None,
            stall_after=int(given["stall_after"]) if "stall_after" in given else None,
            step_seconds=float(given.get("step_seconds", 0.0)),
        )

    def before_step(self, step: int) -> None:
        if self.crash_after is not None and step >= self.crash_after:
            os._exit(70)
        while self.stall_after is not None and step >= self.stall_after:
            time.sleep(1)
        time.sleep(self.step_seconds)
