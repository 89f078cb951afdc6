"""ostro ps: this user's servers on this machine, with their models, memory, addresses and uptimes."""

import argparse
import json
import time
from collections.abc import Sequence

from ostro.cli.parser import describe
from ostro.cli.servers import models_of, running_servers
from ostro.cli.tables import print_table, size
from ostro.system.processes import tree_bytes
from ostro.system.server_records import ServerRecord

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, with memory in bytes and times in seconds")
    describe(
        parser,
        {"ostro ps": "list them", "ostro ps --json": "the same for programs"},
        "Memory is that of a server and its engines; what processes share counts in parts. Servers list themselves in "
        "~/.local/state/ostro/servers (XDG_STATE_HOME), unless started with --no-listed.",
    )


def run(args: argparse.Namespace) -> int:
    servers = running_servers()
    if args.json:
        print(json.dumps([_described(record) for record in servers], indent=2))
    elif servers:
        print_table(_rows(servers))
    else:
        print("None of your servers runs here. Start one with `ostro serve`.")
    return 0


def _rows(servers: Sequence[ServerRecord]) -> list[tuple[str, ...]]:
    on_devices = [_device_bytes(record) for record in servers]
    rows: list[tuple[str, ...]] = [("PID", "ADDRESS", "STATE", "UPTIME", "MEMORY", "MODELS")]
    rows += [
        (str(record.pid), record.url, record.state, uptime(_age(record)), _memory(record, taken), models_of(record))
        for record, taken in zip(servers, on_devices, strict=True)
    ]
    return rows


def _memory(record: ServerRecord, on_devices: int) -> str:
    taken = tree_bytes(record.pid)
    own = "unknown" if taken is None else size(taken)
    return f"{own} + {size(on_devices)} on devices" if on_devices else own


def _device_bytes(record: ServerRecord) -> int:
    return sum(model.device_bytes for model in record.models)


def _described(record: ServerRecord) -> dict[str, object]:
    """For programs."""
    return {
        "pid": record.pid,
        "url": record.url,
        "state": record.state,
        "models": [{"name": model.name, "state": model.state} for model in record.models],
        "memory_bytes": tree_bytes(record.pid),
        "device_memory_bytes": _device_bytes(record),
        "started": record.started,
        "uptime_seconds": round(_age(record), 1),
        "needs_key": record.has_keys,
        "version": record.version,
    }


def _age(record: ServerRecord) -> float:
    return max(0.0, time.time() - record.started)


def uptime(seconds: float) -> str:
    """In its two largest units."""
    left = int(seconds)
    parts: list[str] = []
    for length, unit in _UNITS:
        if left >= length or (unit == "s" and not parts):
            parts.append(f"{left // length} {unit}")
            left %= length
        elif parts:
            break
    return " ".join(parts[:2])
