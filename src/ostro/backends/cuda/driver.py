"""What is asked of the CUDA driver itself: about the first GPU and for its context, before the slow import of torch;
and host functions, for which torch has no call.
"""

import ctypes
import os
from contextlib import suppress

from ostro.backends.cuda.choices import Gpu
from ostro.kernels.gpu.tilings import Multiprocessors

# Kept free for what kernels need besides their blocks.
SPARE_SHARED_MEMORY = 7 << 10

_LIBRARY = "libcuda.so.1"
_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_MEMORY = 16, 75, 76, 97
_LONGEST_NAME = 256


def first_gpu() -> Gpu | None:
    """As `measuring.this_gpu` will describe it; None if there is none, or it cannot be asked. Takes no memory on it."""
    try:
        library, device = _first_device()
        name = ctypes.create_string_buffer(_LONGEST_NAME)
        _call(library.cuDeviceGetName, name, _LONGEST_NAME, device)
        number, major, minor, memory = (
            _attribute(library, which, device) for which in (_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_MEMORY)
        )
    except (OSError, AttributeError):
        return None
    multiprocessors = Multiprocessors(number, memory - SPARE_SHARED_MEMORY)
    return Gpu(name.value.decode(errors="replace"), f"{major}.{minor}", multiprocessors)


def open_context() -> None:
    """Makes the first GPU's primary context, which torch will use. Does nothing if that fails: torch will say why."""
    with suppress(OSError, AttributeError):
        library, device = _first_device()
        _call(library.cuDevicePrimaryCtxRetain, ctypes.byref(ctypes.c_void_p()), device)


def launch_host_function(stream: int, function: int, argument: int) -> None:
    """Queues a call of a C function on a stream, or captures it. Such a function must not call CUDA."""
    library = ctypes.CDLL(_LIBRARY)
    _call(library.cuLaunchHostFunc, ctypes.c_void_p(stream), ctypes.c_void_p(function), ctypes.c_void_p(argument))


def _first_device() -> tuple[ctypes.CDLL, ctypes.c_int]:
    """Raises OSError if there is none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        raise OSError("no GPU is visible")
    library, device = ctypes.CDLL(_LIBRARY), ctypes.c_int()
    _call(library.cuInit, 0)
    _call(library.cuDeviceGet, ctypes.byref(device), 0)
    return library, device


def _attribute(library: ctypes.CDLL, which: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _call(library.cuDeviceGetAttribute, ctypes.byref(value), which, device)
    return value.value


def _call(function: "ctypes._NamedFuncPointer", *arguments: object) -> None:
    if function(*arguments):
        raise OSError(f"{_LIBRARY} reports an error")
