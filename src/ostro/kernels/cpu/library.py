"""The native library: ctypes declarations of its functions and structs, documented in native/src."""

import os
import sys
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from functools import cache
from pathlib import Path

from ostro.errors import Unsupported

# Must match native/src/api.cpp.
_VERSION = 16
_SUFFIX = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")

PAGE = 16
"""Tokens per page: compiled into the kernels."""
GROUP = 32
"""Columns that share a scale."""
HEAD_MULTIPLE, MOST_HEAD = 16, 256
"""A head's width must be a multiple of the first, and at most the second."""
STATE_LANES = 32
"""The matrices of recurrent states have columns in tiles of this many."""
MOST_TAPS = 8
TOKEN_NUMBERS = 3
"""Numbers that a head keeps of a draft, beside its vectors."""
BITS = {"none": 0, "int8": 8, "int4": 4}
"""Bits per weight for each value of `quantize`; 0 keeps the stored precision."""


class Op(IntEnum):
    EMBED = 0
    LINEAR = 1
    NORM = 2
    ATTEND = 3
    GATHER = 4
    SOFTCAP = 5
    SAMPLE = 6
    ADAPT = 7
    ACTIVATE = 8
    SCALE = 9
    APPLY = 10
    POSITION = 11
    ROUTE = 12
    EXPAND = 13
    EXPERT = 14
    COMBINE = 15
    GATE = 16
    ATTEND_TEXT = 17
    TYPE = 18
    CHOOSE = 19
    MULTIPLY = 20
    CONVOLVE = 21
    DELTA = 22
    SSM = 23


class After(IntEnum):
    STORE = 0
    ADD = 1
    SILU = 2
    GELU = 3
    EXACT_GELU = 4
    RELU = 5
    CLAMPED_SILU = 6
    SIGMOID = 7
    RELU2 = 8


class Cells(IntEnum):
    """Number format of the KV cache."""

    FLOAT32 = 0
    FLOAT16 = 1
    INT8 = 2

    @property
    def bytes(self) -> int:
        return (4, 2, 1)[self]

    @property
    def slot_bytes(self) -> int:
        """Size of the scale stored with a token's key or value."""
        return 4 if self is Cells.INT8 else 0


CELLS = {"auto": Cells.FLOAT32, "float32": Cells.FLOAT32, "float16": Cells.FLOAT16, "int8": Cells.INT8}
"""The format for each value of `kv_dtype`."""


class CMatrix(Structure):
    _fields_ = (
        ("rows", c_int32),
        ("cols", c_int32),
        ("codes", c_int32),
        ("scales", c_int32),
        ("has_minima", c_int32),
        ("reserved", c_int32),
        ("data", c_void_p),
        ("scale_data", c_void_p),
        ("minimum_data", c_void_p),
    )


class CTerm(Structure):
    _fields_ = (("rank", c_int32), ("reserved", c_int32), ("a", c_void_p), ("b", c_void_p))


class CRecurrence(Structure):
    _fields_ = (
        ("state_at", c_int32),
        ("taps", c_int32),
        ("heads", c_int32),
        ("groups", c_int32),
        ("tiled", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("draft_at", c_int32),
    )


class CStep(Structure):
    _fields_ = (
        ("op", c_int32),
        ("input", c_int32),
        ("out", c_int32),
        ("in_at", c_int32),
        ("out_at", c_int32),
        ("cols", c_int32),
        ("after", c_int32),
        ("layer", c_int32),
        ("rotation", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("cap", c_float),
        ("eps", c_float),
        ("norm_size", c_int32),
        ("bias_size", c_int32),
        ("width", c_int32),
        ("norm", c_void_p),
        ("bias", c_void_p),
        ("matrix", c_void_p),
        ("terms", c_void_p),
        ("num_terms", c_int32),
        ("experts", c_int32),
        ("chosen", c_int32),
        ("normalized", c_int32),
        ("ungated", c_int32),
        ("padding", c_int32),
        ("recurrence", c_void_p),
        ("weights", c_void_p),
        ("weights_size", c_int32),
        ("beside", c_int32),
        ("beside_at", c_int32),
        ("reserved", c_int32),
    )


class CShape(Structure):
    _fields_ = (
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("num_layers", c_int32),
        ("num_pages", c_int32),
        ("cells", c_int32),
        ("max_rows", c_int32),
        ("threads", c_int32),
        ("num_states", c_int32),
        ("state_floats", c_int32),
        ("num_lanes", c_int32),
        ("most_drafts", c_int32),
        ("draft_floats", c_int32),
        ("reserved", c_int32),
    )


class CBuffer(Structure):
    _fields_ = (("rows", c_int32), ("cols", c_int32), ("memory", c_void_p))


class CRotation(Structure):
    _fields_ = (("cosines", c_void_p), ("sines", c_void_p), ("rotated", c_int32), ("positions", c_int32))


class CCapture(Structure):
    _fields_ = (("after", c_int32), ("slot", c_int32))


class CPiece(Structure):
    _fields_ = (
        ("row", c_int32),
        ("start", c_int32),
        ("length", c_int32),
        ("num_pages", c_int32),
        ("pages", c_void_p),
        ("state", c_int32),
        ("num_captures", c_int32),
        ("captures", c_void_p),
        ("drafts", c_int32),
        ("applied", c_int32),
        ("lane", c_int32),
        ("reserved", c_int32),
    )


class CDraw(Structure):
    _fields_ = (
        ("row", c_int32),
        ("top_k", c_int32),
        ("temperature", c_float),
        ("min_p", c_float),
        ("token", c_int32),
        ("best", c_float),
        ("top_p", c_double),
        ("key", c_uint64),
        ("allowed", c_void_p),
        ("num_words", c_int32),
        ("reserved", c_int32),
    )


class CRowwiseRun(Structure):
    _fields_ = (
        ("plan", c_void_p),
        ("begin", c_int32),
        ("end", c_int32),
        ("rows", c_int32),
        ("reserved", c_int32),
    )


class CBatch(Structure):
    _fields_ = (
        ("num_rows", c_int32),
        ("num_pieces", c_int32),
        ("num_asked", c_int32),
        ("num_draws", c_int32),
        ("tokens", c_void_p),
        ("pieces", c_void_p),
        ("asked", c_void_p),
        ("draws", c_void_p),
        ("adapters", c_void_p),
        ("types", c_void_p),
    )


def library() -> CDLL:
    """The library. Raises Unsupported if it was not built."""
    path = _path()
    found = _open(path)
    if isinstance(found, str):
        raise Unsupported(found)
    return found


def why_missing() -> str | None:
    """Why there is no library, and what to do about it; None if there is one."""
    found = _open(_path())
    return found if isinstance(found, str) else None


def is_built() -> bool:
    """Whether there is a library, of whatever version."""
    return _path().is_file()


def instruction_sets() -> list[str]:
    """The instruction sets supported by both the library and this CPU, best first.

    Those better than OSTRO_NATIVE_ISA, if that is set, are left out.
    """
    found: list[str] = []
    while (name := library().ostro_isa(len(found))) is not None:
        found.append(name.decode())
    most = os.environ.get("OSTRO_NATIVE_ISA")
    if not most:
        return found
    if most not in found:
        raise Unsupported(f"OSTRO_NATIVE_ISA={most}: this machine and library have {', '.join(found)}")
    return found[found.index(most) :]


def panel_of(isa: str) -> int:
    return int(library().ostro_panel(isa.encode()))


# Functions that a build of this version may lack: what needs one of them says so.
_LATER = ("ostro_state",)


def _path() -> Path:
    given = os.environ.get("OSTRO_NATIVE_LIBRARY")
    return Path(given) if given else Path(__file__).with_name(f"libostro_native.{_SUFFIX}")


@cache
def _open(path: Path) -> CDLL | str:
    again = "Install Ostro again on a machine with a C++20 compiler."
    if not path.is_file():
        return f"The native core was not built. {again}"
    try:
        found = CDLL(str(path))
        version = found.ostro_version()
    except (OSError, AttributeError) as error:
        return f"The native core cannot be loaded ({error}). {again}"
    if version != _VERSION:
        return f"The native core has version {version}, but this Ostro needs {_VERSION}. {again}"
    if _declared(found).ostro_isa(0) is None:
        return f"The native core has no code for this CPU: it was compiled on another. {again}"
    return found


def _declared(lib: CDLL) -> CDLL:
    signatures = {
        "ostro_isa": (c_char_p, [c_int]),
        "ostro_panel": (c_int, [c_char_p]),
        "ostro_format": (c_int64, [c_int32, c_int, POINTER(CMatrix)]),
        "ostro_packed_bytes": (c_int64, [POINTER(CMatrix), c_int]),
        "ostro_digest": (c_uint64, [c_void_p, c_int64, c_uint64]),
        "ostro_point": (None, [POINTER(CMatrix), c_void_p]),
        "ostro_pack": (None, [c_int32, c_void_p, POINTER(CMatrix), c_int, c_int, c_void_p]),
        "ostro_unpack_row": (None, [POINTER(CMatrix), c_int, c_int, c_void_p]),
        "ostro_plan": (
            c_void_p,
            [c_char_p, POINTER(CShape), c_void_p, c_int, c_void_p, c_int, c_void_p, c_int, c_char_p, c_int],
        ),
        "ostro_free": (None, [c_void_p]),
        "ostro_buffer": (c_void_p, [c_void_p, c_int]),
        "ostro_copy_page": (c_int, [c_void_p, c_int, c_int]),
        "ostro_copy_state": (c_int, [c_void_p, c_int, c_int]),
        "ostro_run": (c_char_p, [c_void_p, POINTER(CBatch), c_int, c_int]),
        "ostro_prepare_rowwise": (c_char_p, [c_void_p, c_int, c_int, c_int, POINTER(CRowwiseRun)]),
        "ostro_run_rowwise": (None, [c_void_p]),
        "ostro_profile": (None, [c_void_p, POINTER(c_double)]),
        "ostro_state": (c_void_p, [c_void_p, c_int]),
        "ostro_page": (c_void_p, [c_void_p, c_int]),
        "ostro_page_bytes": (c_int64, [c_void_p]),
        "ostro_set_polling": (None, [c_void_p, c_int]),
    }
    for name, (result, arguments) in signatures.items():
        if name in _LATER and not hasattr(lib, name):
            continue
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib
