"""ostro stop: ends servers of this user, which first finish the requests that they are answering."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence

from ostro.cli.parser import describe
from ostro.cli.servers import named, only, running_servers, shown
from ostro.cli.terminal import Terminal
from ostro.errors import BadRequest, NotAllowed, RequestTimeout, Unreachable
from ostro.system.server_records import ServerRecord, is_running

_POLL_SECONDS = 0.1
# Beyond the time for its requests: to unload models and share prefixes.
_GRACE_SECONDS = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "servers",
        nargs="*",
        metavar="SERVER",
        help="a model's name, a process id, a port or an address, as shown by `ostro ps`",
    )
    parser.add_argument("--all", action="store_true", help="end all of your servers on this machine")
    parser.add_argument("--now", action="store_true", help="do not wait for requests that are being answered")
    describe(
        parser,
        {
            "ostro stop": "end the only server that runs",
            "ostro stop http://127.0.0.1:8000": "end the one at this address",
            "ostro stop --all": "end all",
        },
        "A server that is told to stop takes no new requests, finishes those that it has within --drain-timeout of "
        "`ostro serve`, and exits.",
    )


def run(args: argparse.Namespace) -> int:
    chosen = _chosen(args, running_servers())
    terminal = Terminal()
    stopping = [record for record in chosen if _tell(record, now=args.now)]
    began = time.monotonic()
    try:
        for record in stopping:
            _wait(record, terminal, began, now=args.now)
    except KeyboardInterrupt:
        terminal.status("")
        print("ostro: They go on stopping.", file=sys.stderr)
        raise
    return 0


def _chosen(args: argparse.Namespace, servers: Sequence[ServerRecord]) -> list[ServerRecord]:
    if args.all:
        if args.servers:
            raise BadRequest("--all ends every server: leave it or the names out.")
        if not servers:
            print("None of your servers runs here.")
        return list(servers)
    if args.servers:
        # One may be named twice, by its address and its process id.
        found = [named(target, servers) for target in args.servers]
        return [record for index, record in enumerate(found) if record not in found[:index]]
    if not servers:
        raise Unreachable(
            "None of your servers runs here. One that another user or a container runs is theirs to stop, and one "
            "that was started with --no-listed ends with `kill PID`."
        )
    return [only(servers, "Say which, or give --all.")]


def _tell(record: ServerRecord, *, now: bool) -> bool:
    """Returns whether it was still running."""
    if not is_running(record):
        return False
    try:
        os.kill(record.pid, signal.SIGTERM)
        if now:
            # A second signal means now. Two of a kind could arrive as one.
            os.kill(record.pid, signal.SIGINT)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise NotAllowed(f"{shown(record)} runs as another user. Ask them, or use `sudo kill {record.pid}`.") from error
    return True


def _wait(record: ServerRecord, terminal: Terminal, began: float, *, now: bool) -> None:
    patience = (0.0 if now else record.drain_seconds) + _GRACE_SECONDS
    while is_running(record):
        waited = time.monotonic() - began
        if waited > patience:
            terminal.status("")
            cure = f"kill -9 {record.pid}" if now else f"ostro stop --now {record.pid}"
            raise RequestTimeout(f"{shown(record)} still runs after {waited:.0f} s. End it with `{cure}`.")
        terminal.status(f"Stopping {record.url}: {waited:.0f} s{_doing(record)}")
        time.sleep(_POLL_SECONDS)
    terminal.status("")
    print(f"Stopped {shown(record)} after {time.monotonic() - began:.1f} s.", flush=True)


def _doing(record: ServerRecord) -> str:
    current = next((each for each in running_servers() if each.pid == record.pid), None)
    left = None if current is None else current.requests_left
    return f" · {left} request{'' if left == 1 else 's'} to finish" if left else ""
