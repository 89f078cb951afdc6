"""Packed weights are used only where every byte is as it was written, nobody else can have written it, and the model's
files are still those that were packed; and they take no more room than the cache allows.
"""

import json
import logging
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from live_server import live_server
from model_directory import write_model
from native_directory import WIDE, generate, load, packed_files, write
from native_models import ModelCheckpoint, needs_library, savable_model
from safetensors.torch import save_file

from ostro import LLM, EngineConfig, SamplingParams
from ostro.backends.model_facts import sample_of
from ostro.backends.native.packed_cache import PackedKey, with_packed_weights
from ostro.backends.native.runner import NativeRunner
from ostro.cli import main
from ostro.kernels.cpu.library import library
from ostro.kernels.cpu.packed_file import damage, digest
from ostro.sources.store import ModelStore

pytestmark = needs_library


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def change_header(data: bytes, change: Callable[[dict[str, object]], None]) -> bytes:
    """With checksums that are right again, as no accident makes them."""
    at, _ = struct.unpack("<QQ", data[16:32])
    header = json.loads(data[at:])
    change(header)
    text = json.dumps(header).encode()
    head = struct.pack("<16sQQQ16x", data[:9], at, len(text), digest(text))
    return head + struct.pack("<Q", digest(head)) + data[64:at] + text


def scale_weights(directory: Path, factor: float) -> None:
    """Other weights in a file of the same size and time."""
    file = directory / "model.safetensors"
    before = file.stat()
    tensors = {name: tensor * factor for name, tensor in ModelCheckpoint(savable_model(WIDE), WIDE).tensors()}
    save_file(tensors, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


# --- what a file holds ------------------------------------------------------------------------------------------------


def zero_the_weights(data: bytearray) -> None:
    [at] = struct.unpack("<Q", data[16:24])
    data[64:at] = bytes(at - 64)


def flip_one_weight(data: bytearray) -> None:
    data[20_000] ^= 1


def move_the_header(data: bytearray) -> None:
    data[16] ^= 64


def cut_the_end(data: bytearray) -> None:
    del data[-1:]


def append_a_byte(data: bytearray) -> None:
    data.append(0)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "harm",
    [zero_the_weights, flip_one_weight, move_the_header, cut_the_end, append_a_byte],
    ids=lambda harm: harm.__name__,
)
def test_a_damaged_file_is_named_moved_aside_and_made_again(
    harm: Callable[[bytearray], None], model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = generate(load(model))
    [file] = packed_files()
    whole = file.read_bytes()
    data = bytearray(whole)
    harm(data)
    file.write_bytes(data)
    assert damage(file) is not None
    runner = load(model)
    assert isinstance(runner, NativeRunner)
    assert generate(runner) == expected
    assert str(file) in caplog.text
    assert packed_files() == [file]
    assert file.read_bytes() == whole
    assert (file.parent.with_name(f"{file.parent.name}.quarantined") / file.name).read_bytes() == data


def far_matrix(header: dict[str, object]) -> None:
    header["matrices"][0]["at"] = 1 << 40  # type: ignore[index]


def near_end_vector(header: dict[str, object]) -> None:
    header["vectors"][0]["count"] = 1 << 30  # type: ignore[index]


def large_matrix(header: dict[str, object]) -> None:
    header["matrices"][1]["rows"] *= 1024  # type: ignore[index]


def matrix_of_no_kind(header: dict[str, object]) -> None:
    header["matrices"][0]["codes"] = 77  # type: ignore[index]


def negative_place(header: dict[str, object]) -> None:
    header["matrices"][0]["at"] = -64  # type: ignore[index]


def wide_panel(header: dict[str, object]) -> None:
    header["panel"] = 0


def no_program(header: dict[str, object]) -> None:
    header["program"] = {"steps": [{"op": 99, "flavour": 1}]}


def other_key(header: dict[str, object]) -> None:
    header["key"] = "of another model"


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "change",
    [far_matrix, near_end_vector, large_matrix, matrix_of_no_kind, negative_place, wide_panel, no_program, other_key],
    ids=lambda change: change.__name__,
)
def test_numbers_out_of_bounds_are_refused_even_with_right_checksums(
    change: Callable[[dict[str, object]], None], model: Path
) -> None:
    expected = generate(load(model))
    [file] = packed_files()
    file.write_bytes(change_header(file.read_bytes(), change))
    assert generate(load(model)) == expected
    assert damage(file) is None


def test_the_checksum_is_that_of_its_plain_twin() -> None:
    def plain(data: bytes, before: int) -> int:
        def turned(value: int) -> int:
            return (value << 13 | value >> 19) & 0xFFFFFFFF

        lanes = [(i + 1) * 0x85EBCA6B & 0xFFFFFFFF for i in range(32)]
        padded = data + bytes(-len(data) % 128)
        for at in range(0, len(padded), 128):
            words = struct.unpack("<32I", padded[at : at + 128])
            lanes = [turned((lane ^ word) * 0x9E3779B1 & 0xFFFFFFFF) for lane, word in zip(lanes, words, strict=True)]
        total = before
        for word in (len(data), *lanes):
            total = (total ^ word) * 0x9E3779B97F4A7C15 % 2**64
            total ^= total >> 29
        return total

    generator = torch.Generator().manual_seed(1)
    for size in (0, 1, 127, 128, 129, 1000, 4096):
        data = bytes(torch.randint(256, (size,), generator=generator).tolist())
        for before in (0, 1 << 63):
            assert library().ostro_digest(data, size, before) == plain(data, before)
    assert digest(b"abc") != digest(b"abc\0")


# --- whose it is ------------------------------------------------------------------------------------------------------


def test_a_file_that_others_can_write_is_made_again(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = generate(load(model))
    [file] = packed_files()
    file.chmod(0o646)
    assert generate(load(model)) == expected
    assert "can be written by other users (mode 646)" in caplog.text
    assert file.stat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_made_again(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = generate(load(model))
    [file] = packed_files()
    os.chown(file, 12345, 12345)
    assert generate(load(model)) == expected
    assert "is owned by user 12345" in caplog.text
    assert file.stat().st_uid == 0


def test_files_are_not_writable_by_others_whatever_the_umask(model: Path) -> None:
    before = os.umask(0)
    try:
        load(model)
    finally:
        os.umask(before)
    [file] = packed_files()
    assert file.stat().st_mode & 0o022 == 0


# --- a death while loading --------------------------------------------------------------------------------------------

LOADING = """
import os, signal, sys
from pathlib import Path
from ostro.backends.native.packed_cache import PackedKey
from ostro.backends.native.packed_cache import with_packed_weights

def use(packed):
    print("loading", flush=True)
    sys.stdin.read()

with_packed_weights(PackedKey(Path(sys.argv[1]).parent.name, "", ""), None, use)
"""


@pytest.mark.full
def test_a_file_that_crashed_a_process_is_moved_aside(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = generate(load(model))
    [file] = packed_files()
    command = [sys.executable, "-c", LOADING, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loading\n"
        # One that is still loading harms nobody.
        inode = file.stat().st_ino
        load(model)
        assert file.stat().st_ino == inode
        process.send_signal(signal.SIGKILL)
    assert generate(load(model)) == expected
    assert f"A process died while it loaded {file}." in caplog.text
    assert file.stat().st_ino != inode
    assert file.parent.with_name(f"{file.parent.name}.quarantined").is_dir()
    # Once: the new one is not under suspicion.
    inode = file.stat().st_ino
    caplog.clear()
    load(model)
    assert (file.stat().st_ino, caplog.text) == (inode, "")


def test_an_error_while_loading_is_no_death(model: Path) -> None:
    load(model)
    [file] = packed_files()
    inode = file.stat().st_ino

    def pack(file: BinaryIO, make_room: Callable[[int], None]) -> None:
        raise AssertionError("there is a file")

    with pytest.raises(ZeroDivisionError):
        with_packed_weights(PackedKey(file.parent.name, "", ""), pack, lambda packed: 1 // 0)
    load(model)
    assert file.stat().st_ino == inode


# --- from which files -------------------------------------------------------------------------------------------------


def test_a_replaced_file_of_the_same_size_and_time_is_packed_again(model: Path) -> None:
    before = generate(load(model))
    scale_weights(model, 3.0)
    after = generate(load(model))
    assert after == generate(load(model, backend="torch")) != before


@pytest.mark.full
def test_offline_and_over_http_a_replaced_model_is_the_one_that_answers(tmp_path: Path) -> None:
    model, other = (write_model(tmp_path / name, seed=seed) for seed, name in enumerate(("tiny", "other")))
    prompt = "the quick brown fox"
    params = SamplingParams(max_tokens=12, temperature=0)

    def offline(directory: Path) -> str:
        [output] = LLM(directory, EngineConfig(kv_memory=4 << 20, backend="native")).generate([prompt], params)
        return output.choices[0].text

    with live_server(tmp_path, str(model), "--kv-memory", "4M", faults="") as server, server.client() as client:

        def online() -> str:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
            answer = client.post("/v1/completions", json=body).raise_for_status().json()
            return str(answer["choices"][0]["text"])

        before = online()
        assert offline(model) == before
        file = model / "model.safetensors"
        status = file.stat()
        file.write_bytes((other / file.name).read_bytes())
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert file.stat().st_size == status.st_size
        assert offline(model) == offline(other) != before
        client.post("/admin/unload/tiny").raise_for_status()
        assert online() == offline(other)


def test_the_same_files_elsewhere_share_their_packed_weights(model: Path, tmp_path: Path) -> None:
    load(model)
    [file] = packed_files()
    moved = model.rename(tmp_path / "moved")
    load(moved)
    assert packed_files() == [file]


def test_a_large_file_is_sampled_from_its_first_byte_to_its_last(tmp_path: Path) -> None:
    file = tmp_path / "large"
    data = bytearray(5 << 20)
    samples = set()
    for at in (None, 0, len(data) // 2, len(data) - 1):
        # A stretch, as every tensor that is retrained differs all over.
        changed = bytearray(data)
        if at is not None:
            changed[max(0, at - (1 << 20)) : at + (1 << 20)] = b"\1" * (
                min(len(data), at + (1 << 20)) - max(0, at - (1 << 20))
            )
        file.write_bytes(changed)
        samples.add(sample_of(file))
    assert len(samples) == 4


# --- room -------------------------------------------------------------------------------------------------------------


def packed_size(model: Path) -> int:
    load(model)
    [file] = packed_files()
    return file.stat().st_size


def test_packed_weights_are_evicted_by_the_limit_the_oldest_first(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = packed_size(model)
    monkeypatch.setenv("OSTRO_CACHE_LIMIT", str(int(2.5 * size)))
    [first] = packed_files()
    os.utime(first.parent, (1, 1))
    for length in (32, 48, 64):
        load(model, max_seq_len=length)
        assert sum(file.stat().st_size for file in packed_files()) <= 2.5 * size
    assert len(packed_files()) == 2
    assert first not in packed_files()


def test_packed_weights_in_use_stay_and_others_are_packed_for_one_run(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    first = load(model)
    [file] = packed_files()
    monkeypatch.setenv("OSTRO_CACHE_LIMIT", str(int(1.5 * file.stat().st_size)))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    second = load(model, max_seq_len=32)
    assert isinstance(second, NativeRunner)
    assert generate(second) == generate(first)
    assert packed_files() == [file]
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "that OSTRO_CACHE_LIMIT allows" in line
    assert f"into an unnamed file in {scratch} that is gone with this process" in line
    assert list(scratch.iterdir()) == []


def test_a_model_makes_room_for_itself_where_only_packed_weights_are_in_the_way(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = packed_size(model)
    ModelStore().make_room(size, limit=int(1.5 * size))
    assert packed_files() == []


def test_packed_weights_are_listed_verified_and_removed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner = load(model, quantize="int8")
    [file] = packed_files()
    name = f"packed/{file.parent.name[:12]}"
    assert main(["models", "list"]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.startswith(f"{name}  ")
    assert " yes " in row
    assert f"{model} (panels of " in row
    assert row.endswith(", int8)")
    assert main(["models", "rm", name]) == 1
    assert "is in use" in capsys.readouterr().err
    del runner
    assert main(["models", "verify"]) == 0
    assert capsys.readouterr().out == f"{name}: good\n"
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    assert main(["models", "verify", name]) == 1
    assert "weights.ostro is damaged: its weights do not have their checksum" in capsys.readouterr().out
    assert main(["models", "rm", name]) == 0
    assert capsys.readouterr().out.startswith(f"removed {name}, ")
    assert packed_files() == []


def test_a_model_that_is_removed_takes_its_packed_weights_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write(tmp_path / "cache" / "objects" / "acme--tiny-0123@abc")
    load(directory)
    assert len(packed_files()) == 1
    assert main(["models", "rm", directory.name]) == 0
    assert packed_files() == []
    assert "removed packed/" in capsys.readouterr().out


def test_weights_packed_by_an_older_ostro_are_swept_away(model: Path, tmp_path: Path) -> None:
    old = tmp_path / "cache" / "packed" / "0123.ostro"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"OSTRO CPU")
    ModelStore().sweep()
    assert not old.exists()
