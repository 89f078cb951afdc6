"""Files of torch.save's, read without torch: the same values as torch reads, and torch is left what is not plain."""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from ostro.errors import BadCheckpoint, OstroError
from ostro.formats.torch_archive import placed_tensors
from ostro.weights.arrays import WeightArray, array_of
from ostro.weights.tensor_files import pickled_arrays, read_pickle

WHOLE = torch.arange(24, dtype=torch.float32).reshape(4, 6)
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def save(path: Path, content: object, **options: bool) -> Path:
    torch.save(content, path, **options)
    return path


def read(path: Path) -> dict[str, WeightArray]:
    """Without torch, which the file must allow."""
    assert placed_tensors(path) is not None
    return dict(pickled_arrays(path, frozenset()))


def bits(weight: WeightArray) -> tuple[tuple[int, ...], bytes]:
    return weight.shape, weight.raw.tobytes()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_every_format_has_torchs_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    values = (torch.randn(5, 16, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    [(name, weight)] = read(save(tmp_path / "x.bin", {"a": values})).items()
    assert (name, bits(weight)) == ("a", bits(array_of(values)))
    assert weight.is_float is dtype.is_floating_point


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "whole": lambda: WHOLE,
    "transposed": lambda: WHOLE.T,
    "rows": lambda: WHOLE[1:3],
    "columns": lambda: WHOLE[:, 2:5],
    "every other": lambda: WHOLE[::2, ::3],
    "permuted": lambda: WHOLE.reshape(2, 3, 4).permute(2, 0, 1),
    "one row": lambda: WHOLE[2:3].T,
    "number": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 6),
    "parameter": lambda: torch.nn.Parameter(WHOLE[1:]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_have_torchs_values(layout: str, tmp_path: Path) -> None:
    tensor = LAYOUTS[layout]()
    [weight] = read(save(tmp_path / "x.bin", {"a": tensor})).values()
    assert weight.shape == tuple(tensor.shape)
    assert np.array_equal(weight.floats(), tensor.detach().numpy())


def test_tied_weights_share_their_bytes(tmp_path: Path) -> None:
    weights = read(save(tmp_path / "x.bin", {"a": WHOLE, "b": WHOLE, "c": WHOLE[1:]}))
    assert np.shares_memory(weights["a"].raw, weights["b"].raw)
    assert np.shares_memory(weights["a"].raw, weights["c"].raw)


@pytest.mark.parametrize("wrapper", [None, "model", "state_dict", "model_state_dict"])
def test_a_modules_state_is_found_where_trainers_keep_it(wrapper: str | None, tmp_path: Path) -> None:
    state = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).state_dict()
    content: object = state if wrapper is None else {wrapper: state, "step": 7, "loss": 0.5, "args": {"lr": [1e-3]}}
    path = save(tmp_path / "x.bin", content)
    expected = {name: bits(array_of(tensor)) for name, tensor in read_pickle(path, frozenset())}
    assert {name: bits(weight) for name, weight in read(path).items()} == expected


@pytest.mark.parametrize(
    "content",
    [
        {"a": torch.ones(1).expand(4, 4)},
        {"a": torch.ones(4, dtype=torch.complex64)},
        {"a": torch.ones(4).to(torch.float8_e4m3fn)},
        {"a": torch.eye(3).to_sparse()},
        {"a": torch.ones(2), "size": torch.Size([2])},
    ],
    ids=["expanded", "complex", "float8", "sparse", "more than tensors"],
)
def test_what_is_not_plain_is_left_to_torch(content: dict[str, object], tmp_path: Path) -> None:
    assert placed_tensors(save(tmp_path / "x.bin", content)) is None


def test_the_format_before_archives_is_left_to_torch(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": WHOLE}, _use_new_zipfile_serialization=False)
    assert placed_tensors(path) is None
    [(name, weight)] = pickled_arrays(path, frozenset())
    assert (name, bits(weight)) == ("a", bits(array_of(WHOLE)))


class Exploit:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("it ran",)


def test_code_in_a_pickle_is_refused_and_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "x.bin", {"a": WHOLE, "b": Exploit()})
    with pytest.raises(BadCheckpoint, match="more than tensors"):
        list(pickled_arrays(path, frozenset()))
    assert capsys.readouterr().out == ""


# --- damage ---------------------------------------------------------------------------------------------------------


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None], method: int = zipfile.ZIP_STORED) -> Path:
    """The archive with other entries; None leaves one out."""
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in held.items():
            if (changed := change(name, data)) is not None:
                archive.writestr(name, changed)
    return path


@pytest.mark.parametrize("kept", [None, 0, 95])
def test_values_that_are_missing_are_noticed(kept: int | None, tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": WHOLE})
    rewritten(path, lambda name, data: data if "/data/" not in name else None if kept is None else data[:kept])
    with pytest.raises(BadCheckpoint, match="values of a are not all there"):
        placed_tensors(path)


@pytest.mark.parametrize(
    ("offset", "sizes", "strides"),
    [
        (1, (4, 6), (6, 1)),
        (0, (4, 6), (7, 1)),
        (0, (2,), (2**62,)),
        (2**62, (1,), (1,)),
        (-1, (1,), (1,)),
        (0, (-1,), (1,)),
        (0, (2,), (-1,)),
        (0, (2, 2), (2,)),
        (0, (2.0,), (1,)),
        (0, [2], [1]),
    ],
)
def test_no_place_lies_outside_of_the_file(
    offset: object, sizes: object, strides: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle may say anything of a tensor; what it says is checked against the bytes that are there."""

    class Forged(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return ("storage", torch.FloatStorage, "0", "cpu", 24) if value is stored_there else None

    class Tensor:
        def __reduce__(self) -> tuple[object, ...]:
            return torch._utils._rebuild_tensor_v2, (stored_there, offset, sizes, strides, False, OrderedDict())

    # So that it is pickled by this name.
    monkeypatch.setattr(torch.FloatStorage, "__module__", "torch")
    stored_there, listing = object(), io.BytesIO()
    Forged(listing, 2).dump({"a": Tensor()})
    path = save(tmp_path / "x.bin", {"a": WHOLE})
    rewritten(path, lambda name, data: listing.getvalue() if name.endswith("data.pkl") else data)
    with pytest.raises(BadCheckpoint):
        placed_tensors(path)


def test_compressed_entries_are_left_to_torch(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": torch.zeros(4096)})
    assert placed_tensors(rewritten(path, lambda _, data: data, zipfile.ZIP_DEFLATED)) is None


def test_the_other_byte_order_is_left_to_torch(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": WHOLE})
    assert placed_tensors(rewritten(path, lambda name, data: b"big" if name.endswith("byteorder") else data)) is None


def test_damaged_bytes_raise_nothing_but_our_errors(tmp_path: Path) -> None:
    path = save(tmp_path / "x.bin", {"a": WHOLE, "b": WHOLE.T.clone(), "c": WHOLE.half()})
    whole, random = path.read_bytes(), Random(3)
    for _ in range(300):
        data = bytearray(whole[: random.choice([len(whole), random.randrange(len(whole))])])
        for _ in range(random.randrange(1, 6)):
            at = random.randrange(len(data) + 1)
            data[at : at + random.choice([1, 4])] = random.choice(
                [random.randbytes(1), struct.pack("<I", random.choice([0, 2**31, 2**32 - 1])), b""]
            )
        path.write_bytes(data)
        try:
            for _, weight in pickled_arrays(path, frozenset()):
                weight.raw.sum()
        except OstroError:
            pass
