"""Loads mutations of a small, real packed file: python tests/hostile/packed_fuzzer.py --count 50000 --seed 1

Its model is a Llama; `--family qwen3_5` makes it another family of tests/families, with that family's steps.

unsealed   damage as disks and dying writers do it: bits, bytes, ranges, truncations, and every field of the header with
           other values. It must be refused; every so often the whole load is run, which must pack anew, to the same
           bytes, and give the right tokens.
sealed     fields of the header with other values and checksums that are right again, which only a forger does. What is
           out of bounds must be refused by an error of ours; what is not runs, to whatever tokens.

Cases are numbered, and a case is the same whenever its number and the seed are. They run in forked children, so that a
signal is noticed and pinned to its case.
"""

import argparse
import json
import logging
import mmap
import os
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from every_family import config_of
from native_directory import WIDE, generate, load, packed_files, write

from ostro.backends.native.runner import NativeRunner
from ostro.config import EngineConfig
from ostro.devices import DEVICE_KINDS
from ostro.errors import OstroError
from ostro.kernels.cpu.library import instruction_sets
from ostro.kernels.cpu.packed_file import BadPackedFile, PackedFile, digest

BATCH = 500
BATCH_SECONDS = 300
ROOM_BYTES = 2 << 30
Json = dict[str, object] | list[object]
Path_ = tuple[str | int, ...]

VALUES: tuple[object, ...] = (0, 1, -1, 7, 64, 4096, 2**31 - 1, 2**31, 2**40, 2**63, 2**64, -(2**31), 0.5, 1e300)
VALUES += ("", "x", None, True, [], {})
DELETE = object()


@dataclass
class Report:
    count: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


class Fuzzer:
    """One model and its packed file, in a directory of its own."""

    def __init__(self, directory: Path, seed: int, full_every: int, family: str = "llama") -> None:
        os.environ["OSTRO_CACHE"] = str(directory / "cache")
        self.model = write(directory / "model", config_of(family, WIDE))
        self.seed, self.full_every = seed, full_every
        self.tokens = in_child(lambda: generate(load(self.model)))
        [self.file] = packed_files()
        self.whole = self.file.read_bytes()
        self.key = self.file.parent.name
        at, nbytes = struct.unpack("<QQ", self.whole[16:32])
        self.header_at = at
        self.header = json.loads(self.whole[at : at + nbytes])
        places = list(leaves(self.header))
        self.fields = [(place, value, sealed) for place in places for value in CHANGES for sealed in (False, True)]
        random.Random(seed).shuffle(self.fields)

    def case(self, number: int) -> str:
        """Runs one case; returns how it came out. AssertionError where it should not have."""
        rng = random.Random(f"{self.seed}/{number}")
        # By turns, until every field had every value.
        if number % 2 == 0 and number // 2 < len(self.fields):
            place, value, sealed = self.fields[number // 2]
            data = self.with_header(changed(self.header, place, value), sealed=sealed)
        else:
            sealed = rng.random() < 0.2
            data = self.with_header(self.random_header(rng), sealed=sealed) if sealed else self.damaged(rng)
        write_over(self.file, data)
        if sealed:
            return self.check_sealed()
        if data == self.whole:
            return "unchanged"
        if self.full_every and number % self.full_every == 0:
            return self.check_full()
        return self.check_unsealed()

    def check_unsealed(self) -> str:
        try:
            PackedFile.open(self.file, key=self.key)
        except BadPackedFile as error:
            return "refused" if str(self.file) in error.message else "refused without its name"
        raise AssertionError("a damaged file was opened")

    def check_full(self) -> str:
        assert generate(load(self.model)) == self.tokens, "wrong tokens"
        assert self.file.read_bytes() == self.whole, "not packed anew"
        return "packed anew"

    def check_sealed(self) -> str:
        try:
            packed = PackedFile.open(self.file, key=self.key)
            config = DEVICE_KINDS["cpu"].resolve(EngineConfig(kv_memory=4 << 20))
            generate(NativeRunner.sized(packed, config, isa=instruction_sets()[0], threads=1))
        except OstroError:
            return "forged, refused"
        return "forged, within bounds"

    # --- mutations --------------------------------------------------------------------------------------------------

    def with_header(self, header: Json, *, sealed: bool) -> bytes:
        text = json.dumps(header).encode()
        # Unsealed, the header's checksum alone has to tell: all else is right.
        checksum = digest(text) if sealed else struct.unpack("<Q", self.whole[32:40])[0]
        head = struct.pack("<16sQQQ16x", self.whole[:9], self.header_at, len(text), checksum)
        return head + struct.pack("<Q", digest(head)) + self.whole[64 : self.header_at] + text

    def random_header(self, rng: random.Random) -> Json:
        header: Json = self.header
        for _ in range(rng.randint(1, 3)):
            places = list(leaves(header))
            if not places:
                break
            place = rng.choice(places)
            header = changed(header, place, rng.choice((*CHANGES, rng.randint(-(2**40), 2**40), rng.randint(0, 300))))
        return header

    def damaged(self, rng: random.Random) -> bytes:
        data = bytearray(self.whole)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            rng.choice(DAMAGES)(data, rng)
        return bytes(data)


# --- damages ----------------------------------------------------------------------------------------------------------


def flip_bit(data: bytearray, rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def flip_bit_of_head(data: bytearray, rng: random.Random) -> None:
    if len(data) >= 64:
        data[rng.randrange(64)] ^= 1 << rng.randrange(8)


def set_number_of_head(data: bytearray, rng: random.Random) -> None:
    if len(data) >= 64:
        at = rng.choice((16, 24, 32, 40, 48, 56))
        data[at : at + 8] = struct.pack(
            "<Q", rng.choice((0, 1, 64, len(data), 2**31, 2**63, 2**64 - 1, rng.getrandbits(64)))
        )


def set_range(data: bytearray, rng: random.Random) -> None:
    """Zeros, ones or noise: what a page that was never written, or of another file, looks like."""
    start = rng.randrange(len(data) + 1)
    length = min(rng.choice((1, 8, 64, 512, 4096, 65536, len(data))), len(data) - start)
    data[start : start + length] = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))


def cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data) + 1) :]


def append(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.choice((1, 64, 4096)))


def swap_blocks(data: bytearray, rng: random.Random) -> None:
    size = rng.choice((4, 64, 128, 4096))
    if len(data) > 2 * size:
        one, two = (rng.randrange(len(data) - size) // size * size for _ in range(2))
        data[one : one + size], data[two : two + size] = data[two : two + size], data[one : one + size]


def remove_block(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.choice((1, 64, 4096))]


DAMAGES: tuple[Callable[[bytearray, random.Random], None], ...] = (
    *(flip_bit, flip_bit_of_head, set_number_of_head, set_range, cut, append, swap_blocks, remove_block),
)
CHANGES: tuple[object, ...] = (*VALUES, DELETE)


def leaves(value: object, place: Path_ = ()) -> Iterator[Path_]:
    """Every field, and every list and table as a whole."""
    if place:
        yield place
    items: Iterator[tuple[str | int, object]] = iter(())
    if isinstance(value, dict):
        items = iter(value.items())
    elif isinstance(value, list):
        items = iter(enumerate(value))
    for name, each in items:
        yield from leaves(each, (*place, name))


def changed(value: Json, place: Path_, new: object) -> Json:
    """A copy with one field changed."""
    copy = dict(value) if isinstance(value, dict) else list(value)
    first, rest = place[0], place[1:]
    if rest:
        copy[first] = changed(copy[first], rest, new)  # type: ignore[index, arg-type]
    elif new is DELETE:
        del copy[first]  # type: ignore[arg-type]
    else:
        copy[first] = new  # type: ignore[index]
    return copy


def write_over(file: Path, data: bytes) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with os.fdopen(descriptor, "wb", buffering=0) as target:
        target.write(data)


# --- children ---------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], list[int]]) -> list[int]:
    """What `work` returns in a child: this process starts no threads, and can be forked again."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)
        os.write(writing, json.dumps(work()).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        found: list[int] = json.loads(answer.read())
    os.waitpid(child, 0)
    return found


def run_batch(fuzzer: Fuzzer, first: int, last: int, report: Report) -> int:
    """Runs cases in a child from the first on; returns the first that was not run."""
    progress = mmap.mmap(-1, 8)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reading)
        work(fuzzer, range(first, last), progress, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        lines = answer.read().decode().splitlines()
    _, status = os.waitpid(child, 0)
    for line in lines:
        number, outcome, detail = json.loads(line)
        report.count += 1
        report.outcomes[outcome] += 1
        if detail:
            report.failures.append(f"case {number}: {detail}")
    if status == 0:
        return last
    [at] = struct.unpack("<q", progress[:8])
    report.count += 1
    report.outcomes["died"] += 1
    report.failures.append(f"case {at}: ended by {describe(status)}")
    return int(at) + 1


def work(fuzzer: Fuzzer, numbers: range, progress: mmap.mmap, writing: int) -> None:
    """Never returns."""
    signal.alarm(BATCH_SECONDS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
    with os.fdopen(writing, "wb", buffering=0) as answer:
        for number in numbers:
            progress[:8] = struct.pack("<q", number)
            detail = None
            try:
                outcome = fuzzer.case(number)
            except BaseException:  # noqa: BLE001  # whatever it is, it is this case's
                outcome, detail = "failed", traceback.format_exc()
            answer.write(json.dumps([number, outcome, detail]).encode() + b"\n")
    os._exit(0)


def describe(status: int) -> str:
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit status {status >> 8}"


def fuzz(count: int, seed: int, full_every: int, first: int = 0, family: str = "llama") -> Report:
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        fuzzer = Fuzzer(Path(scratch), seed, full_every, family)
        at, end = first, first + count
        while at < end:
            at = run_batch(fuzzer, at, min(end, at + BATCH), report)
            # A child that died leaves what it wrote.
            write_over(fuzzer.file, fuzzer.whole)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description="Loads mutations of a packed file.")
    parser.add_argument("--count", type=int, default=1000, help="how many cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument(
        "--full-every", type=int, default=100, help="load the whole model for every Nth case; 0 for never"
    )
    parser.add_argument("--family", default="llama", help="the model's family, as tests/families names it")
    args = parser.parse_args()
    logging.disable()
    started = time.monotonic()
    report = fuzz(args.count, args.seed, args.full_every, args.first, args.family)
    for failure in report.failures[:20]:
        print(failure)
    print(f"{report.count} cases in {time.monotonic() - started:.0f} s, seed {args.seed}: {dict(report.outcomes)}")
    print(f"{len(report.failures)} failures")
    assert not report.outcomes["refused without its name"]
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
