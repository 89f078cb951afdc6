"""The library itself. Where it is missing the other tests here are skipped: that it is there is not left to chance."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ostro.kernels.cpu import library
from ostro.kernels.cpu.library import why_missing


@pytest.mark.skipif(
    shutil.which("c++") is None, reason="needs a C++ compiler, with which an install builds the library"
)
def test_where_there_is_a_compiler_the_library_was_built() -> None:
    assert why_missing() is None


class ForAnotherCpu:
    """A library none of whose instruction sets runs here."""

    def __init__(self, path: str) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., object]:
        def function(*arguments: object) -> object:
            return library._VERSION if name == "ostro_version" else None

        setattr(self, name, function)
        return function


def test_a_library_for_another_cpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a disk with a checkout was moved to another machine."""
    copy = tmp_path / "libostro_native.so"
    copy.touch()
    monkeypatch.setenv("OSTRO_NATIVE_LIBRARY", str(copy))
    monkeypatch.setattr(library, "CDLL", ForAnotherCpu)
    assert "compiled on another" in (why_missing() or "")
