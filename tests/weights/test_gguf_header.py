import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from family_case import Array
from gguf_factory import write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ostro.errors import BadCheckpoint, ModelNotFound, OstroError, UnsupportedModel
from ostro.formats.gguf_header import GGML_TYPES, GgufHeader
from ostro.weights import read_gguf_header
from ostro.weights.gguf_model import describe

METADATA: dict[str, object] = {
    "a.flag": True,
    "a.count": 7,
    "a.rate": 0.5,
    "a.text": "naïve ✓",
    "a.numbers": [1, 2, 3],
    "a.rates": [0.5, 1.5],
    "a.flags": [True, False],
    "a.texts": ["", "one", "zwei", "три"],
}


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    tensors: dict[str, Array] = {
        "matrix.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "half.weight": np.ones(5, dtype=np.float16),
        "cube.weight": np.zeros((2, 3, 4), dtype=np.float32),
    }
    return write_gguf(tmp_path / "small.gguf", "llama", METADATA, tensors)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def handmade(*, version: int = 3, tensors: int = 0, entries: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries) + rest


def test_metadata_of_every_kind_comes_back_as_written(small_file: Path) -> None:
    metadata = read_gguf_header(small_file).metadata
    assert {key: metadata[key] for key in METADATA} == METADATA
    assert metadata["general.architecture"] == "llama"


def test_shapes_are_row_major_and_offsets_point_at_the_data(small_file: Path) -> None:
    header = read_gguf_header(small_file)
    assert [(info.name, info.shape) for info in header.tensors] == [
        ("matrix.weight", (3, 4)),
        ("half.weight", (5,)),
        ("cube.weight", (2, 3, 4)),
    ]
    data = small_file.read_bytes()
    matrix = header.tensors[0]
    stored = np.frombuffer(data[matrix.offset : matrix.offset + matrix.nbytes], np.float32)
    np.testing.assert_array_equal(stored, np.arange(12, dtype=np.float32))


def test_the_header_agrees_with_the_reference_reader(small_file: Path) -> None:
    reference = gguf.GGUFReader(small_file)
    ours = read_gguf_header(small_file)
    assert [(i.name, i.ggml_type, i.offset, i.nbytes) for i in ours.tensors] == [
        (t.name, int(t.tensor_type), t.data_offset, t.n_bytes) for t in reference.tensors
    ]


def test_block_sizes_agree_with_the_reference() -> None:
    for number, ours in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (ours.name, ours.block_size, ours.block_bytes) == (kind.name, *gguf.GGML_QUANT_SIZES[kind])


def test_a_custom_alignment_is_honoured(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "wide.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("one.weight", np.ones(3, dtype=np.float32))
    writer.add_tensor("two.weight", np.full(3, 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert [info.offset % 256 for info in read_gguf_header(tmp_path / "wide.gguf").tensors] == [0, 0]


def test_a_file_cut_short_inside_its_tensors_is_refused_with_its_name(small_file: Path) -> None:
    small_file.write_bytes(small_file.read_bytes()[:-64])
    with pytest.raises(
        BadCheckpoint, match=r"small\.gguf is damaged: it is cut short.*cube\.weight.*Download it again"
    ):
        read_gguf_header(small_file)


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no file .*none\.gguf"):
        read_gguf_header(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "too short"),
        (b"GGUF", "too short"),
        (b"PK\3\4" + bytes(100), "does not begin"),
        (handmade(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (handmade(tensors=2**62, rest=bytes(64)), "claims 4611686018427387904 tensors"),
        (handmade(entries=2**62, rest=bytes(64)), "claims 4611686018427387904 metadata"),
        (handmade(entries=1, rest=struct.pack("<Q", 2**63) + bytes(32)), "past the end"),
        (handmade(entries=1, rest=string(b"k") + struct.pack("<IIQ", 9, 4, 2**60)), "array elements"),
        (handmade(entries=1, rest=string(b"k") + struct.pack("<IIQ", 9, 8, 2**40) + bytes(64)), "array elements"),
        (handmade(entries=1, rest=string(b"k") + struct.pack("<I", 99) + bytes(16)), "unknown metadata type 99"),
        (handmade(entries=1, rest=string(b"k") + struct.pack("<IQ", 8, 2) + b"\xff\xfe" + bytes(9)), "not UTF-8"),
        (handmade(entries=2, rest=2 * (string(b"k") + struct.pack("<II", 4, 1))), "occurs twice"),
        (handmade(tensors=1, rest=string(b"t") + struct.pack("<I", 5) + bytes(60)), "5 dimensions"),
        (handmade(tensors=1, rest=string(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0) + bytes(64)), "impossible shape"),
        (handmade(tensors=1, rest=string(b"t") + struct.pack("<IQIQ", 1, 31, 2, 0) + bytes(64)), "impossible shape"),
        (handmade(tensors=1, rest=string(b"t") + struct.pack("<IQIQ", 1, 1, 0, 8) + bytes(64)), "not aligned"),
        (handmade(tensors=1, rest=string(b"t") + struct.pack("<IQIQ", 1, 2**62, 0, 0) + bytes(64)), "cut short"),
        (handmade(tensors=2, rest=2 * (string(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) + bytes(64)), "same name"),
        (
            handmade(entries=1, rest=string(b"general.alignment") + struct.pack("<II", 4, 0) + bytes(8)),
            "alignment is 0",
        ),
    ],
)
def test_a_malformed_header_is_refused_and_says_why(tmp_path: Path, data: bytes, complaint: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(BadCheckpoint, match=complaint) as caught:
        read_gguf_header(path)
    assert "bad.gguf" in caught.value.message
    assert "\n" not in caught.value.message


def test_arrays_nested_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    path.write_bytes(handmade(entries=1, rest=string(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 2000))
    with pytest.raises(BadCheckpoint, match="nests arrays"):
        read_gguf_header(path)


def test_an_unknown_tensor_type_is_named_with_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    path.write_bytes(handmade(tensors=1, rest=string(b"odd.weight") + struct.pack("<IQIQ", 1, 1, 77, 0) + bytes(64)))
    with pytest.raises(UnsupportedModel, match=r"'odd\.weight' .* unknown type 77"):
        read_gguf_header(path)


_SAME_FILE = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@_SAME_FILE
@given(keep=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(small_file: Path, keep: float) -> None:
    whole = small_file.read_bytes()
    # The file ends in padding that no tensor needs.
    last = read_gguf_header(small_file).tensors[-1]
    cut = small_file.with_name("cut.gguf")
    cut.write_bytes(whole[: int(keep * (last.offset + last.nbytes))])
    with pytest.raises(BadCheckpoint):
        read_gguf_header(cut)


@_SAME_FILE
@given(position=st.floats(0, 1, exclude_max=True), value=st.integers(0, 255))
def test_a_changed_byte_never_raises_anything_but_our_own_errors(small_file: Path, position: float, value: int) -> None:
    data = bytearray(small_file.read_bytes())
    data[int(position * len(data))] = value
    changed = small_file.with_name("changed.gguf")
    changed.write_bytes(data)
    try:
        header = read_gguf_header(changed)
    except OstroError:
        return
    assert all(info.offset + info.nbytes <= len(data) for info in header.tensors)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gemma3", "olmo2"])
def test_blocks_beyond_number_are_refused_before_a_list_is_made_of_them(arch: str) -> None:
    """A list with an entry for each block was made of a number that nothing had checked."""
    header = GgufHeader(Path("model.gguf"), 3, {"general.architecture": arch, f"{arch}.block_count": 2**32 - 1}, ())
    with pytest.raises(BadCheckpoint, match="claims 4294967295 blocks, but the limit is 4096"):
        describe((header,))
