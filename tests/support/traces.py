"""Reads a profile as Perfetto would."""

import gzip
import json
from pathlib import Path
from typing import NamedTuple


class Span(NamedTuple):
    name: str
    began: float
    ended: float
    args: dict[str, object]

    def holds(self, other: "Span") -> bool:
        return self.began <= other.began and other.ended <= self.ended


def read_spans(path: Path) -> list[Span]:
    """The spans of a gzipped Chrome trace, by their beginnings."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    complete = [event for event in events if event.get("ph") == "X"]
    assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in complete)
    spans = [Span(each["name"], each["ts"], each["ts"] + each["dur"], each.get("args", {})) for each in complete]
    return sorted(spans, key=lambda span: (span.began, -span.ended))


def named(spans: list[Span], name: str) -> list[Span]:
    """Those of that name, with or without counts behind it."""
    return [span for span in spans if span.name.partition(":")[0] == name]
