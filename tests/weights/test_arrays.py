"""Weights as numpy arrays are the numbers that torch reads from the same files."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from model_directory import pickle_weights
from native_directory import WIDE, write
from safetensors.torch import save_file

from ostro.errors import UnsupportedModel
from ostro.weights import open_checkpoint
from ostro.weights.arrays import WeightArray, array_of, read_safetensors

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    return path


def all_bits(dtype: torch.dtype) -> torch.Tensor:
    """Every number of a narrow dtype, infinities and NaNs among them; many of a wide one."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype).reshape(16, 16)
    if dtype.itemsize == 2:
        return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype).reshape(256, 256)
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_the_one_that_torch_reads(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = all_bits(dtype)
    path = save(tmp_path / "w.safetensors", {"w": tensor, "not wanted": torch.ones(3)})
    ((name, array),) = read_safetensors(path, frozenset({"w"}))
    assert name == "w"
    assert array.is_float
    assert array.shape == tuple(tensor.shape)
    np.testing.assert_array_equal(array.floats(), tensor.float().numpy())
    np.testing.assert_array_equal(array_of(tensor).floats(), tensor.float().numpy())


@pytest.mark.parametrize("shape", [(), (0,), (5,), (0, 4), (4, 0), (3, 2, 4)])
def test_tensors_of_any_shape_keep_it(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = torch.randn(shape, dtype=torch.bfloat16)
    ((_, array),) = read_safetensors(save(tmp_path / "w.safetensors", {"w": tensor}), frozenset({"w"}))
    assert array.shape == shape
    np.testing.assert_array_equal(array.floats(), tensor.float().numpy())


def test_a_header_of_odd_length_moves_no_number(tmp_path: Path) -> None:
    """Numbers then begin at odd addresses, where vector instructions may not read them."""
    path = save(tmp_path / "w.safetensors", {"w": torch.randn(8, 8)})
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + size])).encode()
    header += b" " * (1 - len(header) % 2)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    ((_, array),) = read_safetensors(path, frozenset({"w"}))
    assert array.row_addresses()[0] % 8 == 0
    np.testing.assert_array_equal(array.floats().tobytes(), data[8 + size :])


def test_integers_are_named_and_are_no_floats(tmp_path: Path) -> None:
    path = save(tmp_path / "w.safetensors", {"w": torch.ones(2, 2, dtype=torch.int8)})
    ((_, array),) = read_safetensors(path, frozenset({"w"}))
    assert not array.is_float
    assert array.format_name == "int8"


def test_rows_in_another_order_are_found_at_their_addresses() -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    stored = WeightArray.of(values)
    moved = WeightArray(stored.format, stored.shape, stored.raw, np.array([2, 0, 3, 1]))
    np.testing.assert_array_equal(moved.floats(), values[[2, 0, 3, 1]])
    np.testing.assert_array_equal(moved.row_addresses(), stored.row_addresses()[[2, 0, 3, 1]])


def test_a_matrix_whose_columns_are_stored_gives_its_numbers_and_where_its_columns_lie() -> None:
    stored = WeightArray.of(np.arange(6, dtype=np.float32).reshape(3, 2))
    array = WeightArray("F32", (2, 3), stored.raw, transposed=True)
    assert array.floats().tolist() == [[0, 2, 4], [1, 3, 5]]
    assert array.row_addresses().tolist() == stored.row_addresses().tolist()


def test_pickles_give_the_same_arrays_as_safetensors(tmp_path: Path) -> None:
    directory = write(tmp_path / "model", WIDE, torch.bfloat16)
    expected = {name: array.floats() for name, array in open_checkpoint(directory).arrays()}
    found = dict(open_checkpoint(pickle_weights(directory)).arrays())
    assert found.keys() == expected.keys()
    for name, floats in expected.items():
        assert found[name].format == "BF16"
        np.testing.assert_array_equal(found[name].floats(), floats)


def test_integers_are_no_weights() -> None:
    """One in a quantised checkpoint raised a KeyError."""
    with pytest.raises(UnsupportedModel, match="type U32 cannot be unpacked"):
        WeightArray.of(np.ones((2, 2), np.uint32)).floats()
