"""Sends `BoundedHttp` conversations of all kinds: what comes out is what an independent reader finds in them.

    make fuzz-http                                       # a million messages
    make fuzz-http ARGS="--count 20000 --seed 7"
    make fuzz-http ARGS="--count 2000 --sockets"         # over real connections
    make fuzz-http ARGS="--seed 7 --only 1234"           # one conversation again, with what became of it

A case is its seed and its number. Many run at once over fake connections, on a clock that jumps: each connection has
to end by itself. Cases run in a forked child, so that a signal, a hang or an abort is noticed; the next one goes on
after it.

    plain       all of its requests were answered, in their order, and with their bodies
    refused     so were those before the first odd one; that one was refused, or never ended
    read        odd requests, too, came out as h11 reads them
    lenient     an odd request came out that h11 refuses, for a reason listed in `http_oracle`
    left        the client left before the end

Whatever else happens is a finding: a request that nobody sent, bytes of one read as another's, one that is answered
twice or in another's place, a connection that stays, an exception, a signal, a hang, memory that grows. The exit status
is 1 if there are any.
"""

import argparse
import asyncio
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TextIO

import uvicorn
import uvloop
from fake_wire import FakeWire, wire_config
from http_grammar import Conversation, conversation
from http_oracle import Finding, Witness, outcome
from jumping_loop import run_in_jumping_time

from ostro.server.http.protocol import BoundedHttp

# Conversations that run at once, and the processor time that they may take: they usually take some 20 ms.
BATCH, MOST_SECONDS = 64, 2.0
# All timers of a connection, and the body's reader, have run out by then.
LONGER_THAN_ALL = 300.0
# Bytes, which the largest cases scatter over more pages, and blocks. Measured every so many batches.
MOST_GROWTH, MEASURED_EVERY = (32 << 20, 10_000), 25


@dataclass
class Report:
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    num_messages: int = 0
    seconds: float = 0.0
    held: list[tuple[int, int]] = field(default_factory=list)
    """Bytes of memory and Python's blocks of it, every so often."""

    @property
    def growth(self) -> tuple[int, int]:
        """From the first tenth of the run to its end."""
        if not self.held:
            return 0, 0
        (bytes_then, blocks_then), (bytes_now, blocks_now) = self.held[len(self.held) // 10], self.held[-1]
        return bytes_now - bytes_then, blocks_now - blocks_then

    @property
    def num_cases(self) -> int:
        return sum(self.outcomes.values()) + len(self.findings)

    def __str__(self) -> str:
        grown, blocks = self.growth
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(self.outcomes.items()))
        return (
            f"{self.num_cases} conversations with {self.num_messages} messages in {self.seconds:.0f} s, "
            f"memory {grown / 2**20:+.1f} MiB and {blocks:+} blocks: {told}; {len(self.findings)} findings"
        )


class Cases:
    """One seed's conversations, over fake connections."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def label(self, number: int) -> str:
        return f"--seed {self._seed} --only {number}"

    def conversation(self, number: int) -> Conversation:
        return conversation(Random(f"{self._seed}/{number}"))

    def run(self, numbers: range, report: Report) -> None:
        cases = [self.conversation(number) for number in numbers]
        outcomes = self.outcomes(cases)
        for number, case, (kind, detail) in zip(numbers, cases, outcomes, strict=True):
            report.num_messages += case.num_messages
            if kind == "finding":
                report.findings.append(f"{self.label(number)}: {detail}\n    sent: {case.data!r}")
            else:
                report.outcomes[kind] += 1

    def outcomes(self, cases: Sequence[Conversation]) -> list[tuple[str, str]]:
        witness = Witness()
        config = wire_config(witness)
        wires: list[FakeWire] = []

        async def converse() -> None:
            wires.extend(FakeWire(config, port=number) for number in range(len(cases)))
            await asyncio.gather(*map(_speak, cases, wires))
            await asyncio.sleep(LONGER_THAN_ALL)

        run_in_jumping_time(converse())
        return [_judged(case, witness, port, wire) for port, (case, wire) in enumerate(zip(cases, wires, strict=True))]


async def _speak(case: Conversation, wire: FakeWire) -> None:
    for piece in case.pieces:
        wire.client_sends(piece)
        if case.pause is not None:
            await asyncio.sleep(case.pause)
    if case.leaves:
        wire.client_leaves()


def _judged(case: Conversation, witness: Witness, port: int, wire: FakeWire) -> tuple[str, str]:
    if wire.error is not None:
        return "finding", f"the protocol raised {wire.error!r}"
    if not wire.is_closed:
        return "finding", "the connection stays open"
    if case.leaves:
        return "left", ""
    try:
        return outcome(case, witness.seen[port], bytes(wire.sent)), ""
    except Finding as finding:
        return "finding", f"{finding}\n    answered: {bytes(wire.sent)!r}"


# --- over sockets -----------------------------------------------------------------------------------------------------


class Impatient(BoundedHttp):
    head_seconds = read_seconds = 5.0


class SocketCases(Cases):
    def outcomes(self, cases: Sequence[Conversation]) -> list[tuple[str, str]]:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_over_sockets(cases))


async def _over_sockets(cases: Sequence[Conversation]) -> list[tuple[str, str]]:
    witness = Witness(body_seconds=5.0)
    server = uvicorn.Server(wire_config(witness, keep_alive=1, kind=Impatient))
    with socket.create_server(("127.0.0.1", 0), backlog=2 * BATCH) as listening:
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        found = await asyncio.gather(*(_over_socket(case, witness, listening.getsockname()) for case in cases))
        server.should_exit = True
        await serving
    return found


async def _over_socket(case: Conversation, witness: Witness, address: tuple[str, int]) -> tuple[str, str]:
    reader, writer = await asyncio.open_connection(*address)
    sent, is_cut, port = b"", False, writer.get_extra_info("sockname")[1]
    try:
        for piece in case.pieces:
            if writer.is_closing():
                break
            writer.write(piece)
            await asyncio.sleep(0)
        while not case.leaves and (part := await asyncio.wait_for(reader.read(65536), 30)):
            sent += part
    except ConnectionError:
        # A server that closes without having read everything may take back what it has sent.
        is_cut = True
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    if case.leaves:
        return "left", ""
    try:
        return outcome(case, witness.seen[port], sent, may_be_cut=is_cut), ""
    except Finding as finding:
        return "finding", f"{finding}\n    answered: {sent!r}"


# --- runs -------------------------------------------------------------------------------------------------------------


def fuzz(cases: Cases, count: int, first: int = 0) -> Report:
    """Runs the cases from `first` on, in children; says what became of them."""
    report, started = Report(), time.monotonic()
    at, end = first, first + count
    while at < end:
        at = _run_child(cases, at, end, report)
    if any(grown > most for grown, most in zip(report.growth, MOST_GROWTH, strict=True)):
        report.findings.append("memory grows")
    report.seconds = time.monotonic() - started
    return report


def _run_child(cases: Cases, first: int, end: int, report: Report) -> int:
    """Where to go on: at the end, or after the batch that ended the child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        status = 1
        try:
            with os.fdopen(writing, "w", buffering=1) as results:
                _work(cases, range(first, end, BATCH), end, results)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    at = first
    with os.fdopen(reading) as results:
        for line in results:
            at, outcomes, findings, num_messages, held = json.loads(line)
            report.outcomes.update(outcomes)
            report.findings += findings
            report.num_messages += num_messages
            report.held += held
    _, status = os.waitpid(child, 0)
    if status:
        cause = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "an abort"
        report.findings.append(f"{cases.label(at)} or one of the next {BATCH - 1}: ended by {cause}")
        return min(end, at + BATCH)
    return end


def _work(cases: Cases, firsts: range, end: int, results: TextIO) -> None:
    logging.disable()
    for first in firsts:
        report, last = Report(), min(end, first + BATCH)
        # Processor time: waiting takes none, and a busy machine adds none.
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        cases.run(range(first, last), report)
        signal.setitimer(signal.ITIMER_PROF, 0)
        held = [_held()] if last == end or (first // BATCH) % MEASURED_EVERY == 0 else []
        print(json.dumps((last, report.outcomes, report.findings, report.num_messages, held)), file=results)


def _held() -> tuple[int, int]:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return resident, sys.getallocatedblocks()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=400_000, help="conversations, of some 2.7 messages each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first conversation")
    parser.add_argument("--only", type=int, help="run this one alone, in this process")
    parser.add_argument("--sockets", action="store_true", help="over real connections, which takes longer")
    options = parser.parse_args()
    cases = (SocketCases if options.sockets else Cases)(options.seed)
    if options.only is not None:
        case = cases.conversation(options.only)
        [(kind, detail)] = cases.outcomes([case])
        print(f"{case}\n{kind} {detail}")
        return 1 if kind == "finding" else 0
    report = fuzz(cases, options.count, options.first)
    for finding in report.findings:
        print(finding)
    print(report)
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
