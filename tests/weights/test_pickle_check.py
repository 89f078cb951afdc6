"""Pickles of a few bytes that ask for gigabytes or years are refused before any unpickler reads them."""

import json
import resource
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch
from model_directory import write_model

from ostro.errors import BadCheckpoint
from ostro.formats.pickle_check import MAX_VALUES, check_pickle
from ostro.formats.torch_archive import check_torch_file, tensor_shapes
from ostro.weights import open_checkpoint

TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00K\x02K\x03\x86tR"


def pairs_of_pairs(depth: int) -> bytes:
    """A tuple of two that are each a tuple of two, and so on: few bytes, and 2^depth values."""
    # The tuple below is on the stack; from the memo comes the same once more.
    return b"Nq\x00" + b"".join(b"h%c\x86q%c" % (level, level + 1) for level in range(depth))


BOMBS = {
    "memo": b"\x80\x02Nr" + struct.pack("<I", 2**27) + b"0N.",
    "memo-behind-others": b"\x80\x02]q\x00Nr" + struct.pack("<I", 2**31 - 1) + b"a.",
    "hash": b"\x80\x02}" + pairs_of_pairs(60) + b"Ns.",
    "hash-behind-a-call": b"\x80\x02}ctorch._utils\n_rebuild_parameter\n" + pairs_of_pairs(60) + b"RNs.",
    "depth": b"\x80\x02}N" + b"\x85" * 1_000_000 + b"Ns.",
    "wide": b"\x80\x02}(" + b"N" * (MAX_VALUES + 1) + b"tNs.",
    "the same hash many times": b"\x80\x02}((" + b"N" * 8000 + b"tq\x00N" + b"h\x00N" * 3000 + b"u.",
    "text": b"\x80\x02X\xff\xff\xff\xffabc.",
    "long text": b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"abc.",
    "long bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"abc.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N.",
    "long integer": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"abc.",
    "decimal integer": b"\x80\x02L" + b"9" * 100_000 + b"L\n.",
    "copies": b"\x80\x02(N" + b"2" * 1000 + b"t.",
    "no stop": b"\x80\x02N",
    "nothing to take": b"\x80\x02\x86.",
    "across a mark": b"\x80\x02N(R.",
    "no mark": b"\x80\x02Nt.",
    "no global": b"\x80\x02cabc",
    "empty memo": b"\x80\x02h\x00.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_no_torch_save_wrote_is_refused(name: str) -> None:
    with pytest.raises(UnpicklingError):
        check_pickle(BOMBS[name])


def archive(path: Path, pickle: bytes, name: str = "a/data.pkl") -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(name, pickle)
        file.writestr("a/version", "3\n")
    return path


@pytest.mark.parametrize("name", ["memo", "hash"])
def test_a_bomb_touches_no_memory_and_takes_no_time(tmp_path: Path, name: str) -> None:
    """An archive of 139 bytes touched a gigabyte, and another one would have hashed until the end of the world."""
    path = archive(tmp_path / "x.pt", BOMBS[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadCheckpoint, match=r"x\.pt cannot be read as a file of tensors"):
        tensor_shapes(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


@pytest.mark.parametrize("name", ["a/data.pkl", "data.pkl", "a/b/xdata.pkl", "a/constants.pkl"])
def test_torchs_own_reader_never_sees_a_bomb(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadCheckpoint, match=r"x\.pt cannot be read"):
        check_torch_file(archive(tmp_path / "x.pt", BOMBS["hash"], name))


def test_a_directory_with_a_bomb_is_refused_when_it_is_read(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    archive(tmp_path / "pytorch_model.bin", BOMBS["hash"])
    with pytest.raises(BadCheckpoint, match=r"pytorch_model\.bin cannot be read as a file of tensors \(it holds"):
        list(open_checkpoint(tmp_path).arrays())


def test_a_bomb_in_the_format_before_archives_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    data = (tmp_path / "old.bin").read_bytes()
    check_torch_file(tmp_path / "old.bin")
    at = 0
    for _ in range(3):
        at = check_pickle(data, at)
    (tmp_path / "bomb.bin").write_bytes(data[:at] + BOMBS["hash"])
    with pytest.raises(BadCheckpoint, match=r"bomb\.bin cannot be read"):
        check_torch_file(tmp_path / "bomb.bin")


def test_what_torch_saves_passes(tmp_path: Path) -> None:
    shared = torch.ones(4, 4, dtype=torch.bfloat16)
    state: dict[str, object] = {f"layer.{number}.weight": torch.ones(2, 3) for number in range(400)}
    state |= {
        "tied": shared,
        "view": shared[1:],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "empty": torch.ones(0),
    }
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(3)).sum().backward()
    optimizer.step()
    whole = {
        "model": OrderedDict(state),
        "optimizer": optimizer.state_dict(),
        "step": 70_000,
        "lr": 1e-3,
        "random": torch.get_rng_state(),
        "args": {"size": (1, 2**40, -1), "name": "é", "none": None, "on": True, "list": [1, [2.5]]},
    }
    torch.save(whole, tmp_path / "x.pt")
    check_torch_file(tmp_path / "x.pt")
    assert tensor_shapes(tmp_path / "x.pt")["layer.7.weight"] == (2, 3)
    torch.save(module.state_dict(), tmp_path / "module.pt")
    assert (
        json.dumps(tensor_shapes(tmp_path / "module.pt"))
        == '{"0.weight": [3, 3], "0.bias": [3], "1.weight": [3], "1.bias": [3]}'
    )
