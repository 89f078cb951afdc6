"""The CUDA driver before torch is imported, on a library that stands for it."""

import ctypes
from typing import Any

import pytest

from ostro.backends.cuda.choices import Gpu
from ostro.backends.cuda.driver import first_gpu, open_context
from ostro.kernels.gpu.tilings import Multiprocessors

H200 = Gpu("NVIDIA H200", "9.0", Multiprocessors(132, 220 << 10))


class Driver:
    """An H200, whose functions fail from the named one on."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.contexts = failing, 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name == self.failing:
            return lambda *_: 100
        return super().__getattribute__(name)

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return flags

    def cuDeviceGet(self, device: Any, index: int) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:  # noqa: N802
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: int, device: ctypes.c_int) -> int:  # noqa: N802
        value._obj.value = {16: 132, 75: 9, 76: 0, 97: 227 << 10}[which]
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:  # noqa: N802
        self.contexts += 1
        return 0


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_gpu_is_described_as_torch_will_describe_it(visible: pytest.MonkeyPatch) -> None:
    visible.setattr(ctypes, "CDLL", lambda _: Driver())
    assert first_gpu() == H200
    visible.setenv("CUDA_VISIBLE_DEVICES", "")
    assert first_gpu() is None


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"])
def test_driver_that_fails_is_no_error(visible: pytest.MonkeyPatch, failing: str) -> None:
    driver = Driver(failing)
    visible.setattr(ctypes, "CDLL", lambda _: driver)
    assert first_gpu() == (H200 if failing == "cuDevicePrimaryCtxRetain" else None)
    open_context()
    assert driver.contexts == (failing == "cuDeviceGetAttribute")
