"""Prefetches in the compiled matmuls: compilers may delete them, and then nothing but time shows it."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ostro.kernels.cpu.library import instruction_sets, library, why_missing

pytestmark = pytest.mark.skipif(why_missing() is not None, reason="needs the native library")

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
# A matmul's tile: its template arguments are the form, of which unpacked codes are negative, then panels and rows.
TILE = re.compile(r"\b(\w+)::Product::compute<[\w:]*\{(-?)\d+[^}]*\}, \d+, (\d+)\b")
PREFETCH = re.compile(r"\t(?:prefetch|prfu?m)")


def functions(path: Path) -> Iterator[tuple[str, str]]:
    """The name and instructions of each function in a library."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("needs objdump")
    command = [objdump, "--disassemble", "--demangle", "--no-show-raw-insn", str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    for block in said.stdout.split("\n\n"):
        name, _, code = block.lstrip("\n").partition("\n")
        found = FUNCTION.match(name)
        if found:
            yield found[1], code


def test_every_matmul_of_one_row_prefetches_codes_and_scales() -> None:
    """GCC deleted all of these, because `fetch` was not always inlined."""
    found = dict(functions(Path(library()._name)))
    if not any(name.startswith("ostro::") for name in found):
        pytest.skip("the library has no names of functions: it has been stripped")
    prefetches = {
        name: len(PREFETCH.findall(code))
        for name, code in found.items()
        if (tile := TILE.search(name)) and tile[3] == "1" and not tile[2] and tile[1] in instruction_sets()
    }
    assert prefetches
    assert {name: count for name, count in prefetches.items() if count < 2} == {}
