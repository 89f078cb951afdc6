"""What compilers made of the core, read from the library itself: prefetches, which they may delete so that nothing but
time shows it, and instructions that not every CPU has.
"""

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


@pytest.fixture(scope="module")
def compiled() -> dict[str, str]:
    found = dict(functions(Path(library()._name)))
    if not any(name.startswith("ostro::") for name in found):
        pytest.skip("the library has no names of functions: it has been stripped")
    return found


def test_loading_the_library_runs_no_code_of_one_instruction_set(compiled: dict[str, str]) -> None:
    """A table that was copied when the library was loaded ended processes on CPUs without AVX-512."""
    begins = re.compile(r"_GLOBAL__sub_I_(?:kernels|matmuls)_")
    assert [name for name in compiled if begins.match(name)] == []


def test_code_for_any_cpu_has_no_wide_registers(compiled: dict[str, str]) -> None:
    for_one_set = re.compile(r"\b(?:avx2|avx512|amx|neon)::")
    wide = {name for name, code in compiled.items() if re.search(r"%[yz]mm|%xmm(?:1[6-9]|[23]\d)", code)}
    assert {name for name in wide if not for_one_set.search(name)} == set()


def test_every_matmul_of_one_row_prefetches_codes_and_scales(compiled: dict[str, str]) -> None:
    """GCC deleted all of these, because `fetch` was not always inlined."""
    prefetches = {
        name: len(PREFETCH.findall(code))
        for name, code in compiled.items()
        if (tile := TILE.search(name)) and tile[3] == "1" and not tile[2] and tile[1] in instruction_sets()
    }
    assert prefetches
    assert {name: count for name, count in prefetches.items() if count < 2} == {}
