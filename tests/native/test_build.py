"""How the package is built: with the native core where a C++ compiler is, without it and saying so where none is.

Each test builds a copy of the tree, by pip, in a virtual environment of this file's own.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIBRARY = "ostro/kernels/cpu/libostro_native"
NOT_BUILT = "The native CPU core was not built, and without it models need the extra torch."
SDIST = "from scikit_build_core.build import build_sdist; build_sdist('dist')"


@dataclass(frozen=True)
class Builder:
    python: Path

    def pip(self, *arguments: str, cwd: Path, **variables: str) -> str:
        """What it said. Fails where pip does."""
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments]
        return self.run(command, cwd, variables)

    def run(self, command: Sequence[str], cwd: Path, variables: dict[str, str]) -> str:
        env = {name: value for name, value in os.environ.items() if name not in ("CXX", "CXXFLAGS", "CMAKE_ARGS")}
        ran = subprocess.run(command, cwd=cwd, env=env | variables, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    directory = tmp_path_factory.mktemp("builder")
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    python = str(directory / "bin" / "python")
    wanted = ["scikit-build-core>=1.0", *(name for name in ("cmake", "ninja") if shutil.which(name) is None)]
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"pip cannot fetch {', '.join(wanted)} here")
    return Builder(Path(python))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """All that the package is built from, as a clone has it."""
    copy = tmp_path / "tree"
    built = shutil.ignore_patterns("__pycache__", "libostro_native.*", "CMakeFiles", "CMakeCache.txt")
    for name in ("src", "native"):
        shutil.copytree(ROOT / name, copy / name, ignore=built)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture
def compiler() -> str:
    found = shutil.which("c++")
    if found is None:
        pytest.skip("there is no C++ compiler here")
    return found


def sources(tree: Path) -> set[str]:
    return {str(path.relative_to(tree / "src")) for path in (tree / "src/ostro").rglob("*") if path.is_file()}


def wheel_of(tree: Path) -> zipfile.ZipFile:
    [path] = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


def packaged(wheel: zipfile.ZipFile) -> set[str]:
    return {name for name in wheel.namelist() if name.startswith("ostro/")}


def reason_without(wheel: zipfile.ZipFile, scratch: Path) -> str:
    """What the package of the wheel says of the library's absence."""
    wheel.extractall(scratch)
    program = "import ostro; from ostro.kernels.cpu.library import why_missing; print(ostro.__file__, why_missing())"
    # Without `site` the editable install is not there to be found first.
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(scratch), sysconfig.get_path("purelib")])}
    ran = subprocess.run([sys.executable, "-S", "-c", program], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith(str(scratch))
    return ran.stdout


def test_a_wheel_holds_the_library_beside_the_sources(builder: Builder, tree: Path, compiler: str) -> None:
    said = builder.pip("wheel", "-v", "--no-build-isolation", "--no-deps", "-w", "dist", ".", cwd=tree, CXX=compiler)
    assert NOT_BUILT not in said
    with wheel_of(tree) as wheel:
        [library] = packaged(wheel) - sources(tree)
        assert library.startswith(LIBRARY)
        assert packaged(wheel) >= sources(tree)
        # Of a platform, and of no Python in particular.
        assert wheel.filename is not None
        assert "-py3-none-" in wheel.filename
        assert "-any." not in wheel.filename
        loaded = ctypes.CDLL(wheel.extract(library, tree / "unpacked"))
        assert loaded.ostro_version() > 0


def test_a_source_distribution_holds_what_the_library_is_built_from(builder: Builder, tree: Path) -> None:
    (tree / "src" / f"{LIBRARY}.so").write_bytes(b"an editable install's")
    builder.run([str(builder.python), "-c", SDIST], tree, {})
    [path] = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    native = {str(path.relative_to(tree)) for path in (tree / "native/src").iterdir()}
    assert native
    assert native | {"native/CMakeLists.txt", "native/editable/CMakeLists.txt", "src/ostro/py.typed"} <= names
    assert not any("libostro_native" in name for name in names)


@pytest.mark.parametrize("failure", ["no compiler", "a compiler that fails", "sources that do not compile"])
def test_without_a_compiler_the_rest_is_installed_and_says_so(
    failure: str, builder: Builder, tree: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if failure == "sources that do not compile":
        cxx = request.getfixturevalue("compiler")
        (tree / "native/src/api.cpp").write_text("#error\n")
    else:
        cxx = "/nonexistent/c++" if failure == "no compiler" else shutil.which("false") or "false"
    said = builder.pip("wheel", "-v", "--no-build-isolation", "--no-deps", "-w", "dist", ".", cwd=tree, CXX=cxx)
    assert NOT_BUILT in said
    with wheel_of(tree) as wheel:
        assert packaged(wheel) == sources(tree)
        assert "The native core was not built." in reason_without(wheel, tmp_path / "unpacked")


def test_an_editable_install_has_the_library_among_the_sources(builder: Builder, tree: Path, compiler: str) -> None:
    arguments = ("install", "-v", "--no-build-isolation", "--no-deps", "-e", ".")
    assert NOT_BUILT not in builder.pip(*arguments, cwd=tree, CXX=compiler)
    [library] = (tree / "src").glob(f"{LIBRARY}.*")
    assert ctypes.CDLL(str(library)).ostro_version() > 0
    # Without a compiler none is left: it would be one of other sources.
    (tree / "native/editable/CMakeCache.txt").unlink()
    assert NOT_BUILT in builder.pip(*arguments, cwd=tree, CXX="/nonexistent/c++")
    assert not library.exists()
    where = [str(builder.python), "-c", "import importlib.util as u; print(u.find_spec('ostro').origin)"]
    assert builder.run(where, tree.parent, {}).strip() == str(tree / "src/ostro/__init__.py")


@pytest.mark.parametrize("how", ["option", "variable"])
def test_it_can_be_left_out(how: str, builder: Builder, tree: Path) -> None:
    """No compiler is looked for, and no CMake."""
    option = ("-C", "wheel.cmake=false") if how == "option" else ()
    variables = {} if how == "option" else {"SKBUILD_WHEEL_CMAKE": "false"}
    arguments = ("wheel", "-v", "--no-build-isolation", "--no-deps", *option, "-w", "dist", ".")
    assert "CMake" not in builder.pip(*arguments, cwd=tree, CXX="/nonexistent/c++", **variables)
    with wheel_of(tree) as wheel:
        assert packaged(wheel) == sources(tree)
        assert wheel.filename is not None
        assert wheel.filename.endswith("-py3-none-any.whl")
