import hashlib
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.sources.base import Checksum, ObjectInfo
from ostro.sources.checksum import check
from ostro.sources.crc64 import Crc64

DATA = random.Random(2).randbytes(3000)


def crc64nvme(*pieces: bytes) -> bytes:
    crc = Crc64()
    for piece in pieces:
        crc.update(piece)
    return crc.digest()


def bitwise_crc64(data: bytes) -> bytes:
    state = 2**64 - 1
    for byte in data:
        state ^= byte
        for _ in range(8):
            state = (state >> 1) ^ (0x9A6C9329AC4BC9B5 if state & 1 else 0)
    return (state ^ (2**64 - 1)).to_bytes(8, "big")


def test_crc64_has_the_value_of_its_definition() -> None:
    assert crc64nvme(b"123456789").hex() == "ae8b14860a799888"
    assert crc64nvme(b"").hex() == "0000000000000000"


@given(size=st.integers(0, 5000), cut=st.integers(0, 5000), seed=st.integers())
def test_crc64_by_lanes_is_crc64_bit_by_bit(size: int, cut: int, seed: int) -> None:
    data = random.Random(seed).randbytes(size)
    assert crc64nvme(data[:cut], data[cut:]) == bitwise_crc64(data)


@pytest.mark.parametrize("sizes", [(), (1000, 1000, 1000), (1500, 1, 1499), (3000,)])
def test_a_file_is_compared_whole_or_in_parts(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    parts = [DATA[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    of_parts = b"".join(hashlib.md5(part).digest() for part in parts)
    info = ObjectInfo("key", 3000, "1", Checksum("md5", hashlib.md5(of_parts if sizes else DATA).digest(), sizes))
    (tmp_path / "file").write_bytes(DATA)
    assert check(tmp_path / "file", info)[1] is None
    (tmp_path / "file").write_bytes(DATA[:-1] + bytes([DATA[-1] ^ 1]))
    assert "its MD5 is" in str(check(tmp_path / "file", info)[1])
    (tmp_path / "file").write_bytes(DATA[:-1])
    assert check(tmp_path / "file", info)[1] == "it has 2999 bytes instead of 3000"
