"""The library itself. Where it is missing the other tests here are skipped: that it is there is not left to chance."""

import shutil

import pytest

from ostro.kernels.cpu.library import why_missing


@pytest.mark.skipif(
    shutil.which("c++") is None, reason="needs a C++ compiler, with which an install builds the library"
)
def test_where_there_is_a_compiler_the_library_was_built() -> None:
    assert why_missing() is None
