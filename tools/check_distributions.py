"""Checks wheels and the source distribution before they are published: names, metadata, contents, sizes.

python tools/check_distributions.py dist               # what `make dist` wrote on this machine
python tools/check_distributions.py dist --complete    # a release: a wheel for every platform

What a wheel holds of `src/ostro` is compared with what git tracks there. Knows nothing of how the files were built.
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAME, VERSION = PROJECT["name"], PROJECT["version"]

# What PyPI takes of a new project, a file.
MOST_BYTES = 100_000_000
# By a release's wheel each: `python -m auditwheel show` and cibuildwheel's settings say which glibc and macOS.
PLATFORMS = {
    "Linux on x86-64": r"manylinux_\d+_\d+_x86_64",
    "Linux on arm64": r"manylinux_\d+_\d+_aarch64",
    "macOS on Apple silicon": r"macosx_\d+_\d+_arm64",
    "macOS on x86-64": r"macosx_\d+_\d+_x86_64",
}
CORE = re.compile(rf"{NAME}/kernels/cpu/libostro_native\.(so|dylib)")
# The libraries that auditwheel puts beside a package, and the kernels that `bench/compile.py --archive` puts into it.
GRAFTED = (f"{NAME}.libs/", f"{NAME}/kernels/gpu/binaries/")
# What a source distribution must have for a build of it to succeed.
SOURCES = ("LICENSE", "README.md", "pyproject.toml", "native/CMakeLists.txt", "PKG-INFO")
NEVER = re.compile(r"(^|/)(\.git|\.venv|\.env|build|dist|__pycache__|\.mypy_cache)(/|$)|\.pyc$")


@dataclass(frozen=True)
class WheelName:
    """ostro-1.0-py3-none-manylinux_2_28_x86_64.whl, in parts."""

    project: str
    version: str
    python: str
    abi: str
    platforms: tuple[str, ...]

    @classmethod
    def of(cls, path: Path) -> "WheelName | None":
        """None for a name that is no wheel's."""
        match path.name.removesuffix(".whl").split("-"):
            case [project, version, python, abi, platforms]:
                return cls(project, version, python, abi, tuple(platforms.split(".")))
        return None


def tracked_files() -> frozenset[str]:
    """The package's files as a wheel names them. Those that are neither tracked nor ignored count: they are to be.
    Where git does not answer, as in an unpacked archive, all count that are not made from others.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src/ostro"]
    try:
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        found = (path.relative_to(ROOT / "src") for path in (ROOT / "src" / "ostro").rglob("*") if path.is_file())
        return frozenset(path.as_posix() for path in found if not _is_made(path))
    listed = ran.stdout.splitlines()
    return frozenset(name.removeprefix("src/") for name in listed if (ROOT / name).is_file())


def _is_made(path: Path) -> bool:
    return "__pycache__" in path.parts or "binaries" in path.parts or path.name.startswith("libostro_native.")


def complaints(files: Sequence[Path], *, complete: bool = False) -> Iterator[str]:
    """What is wrong with these files, a sentence each."""
    tracked = tracked_files()
    wheels = [path for path in files if path.suffix == ".whl"]
    sources = [path for path in files if path.name.endswith(".tar.gz")]
    for path in set(files) - {*wheels, *sources}:
        yield f"{path.name} is neither a wheel nor a source distribution. Delete it, or run make dist."
    if len(sources) != 1:
        yield f"There are {len(sources)} source distributions, and a release has one."
    if not wheels:
        yield "There is no wheel."
    for path in files:
        if (size := path.stat().st_size) > MOST_BYTES:
            yield f"{path.name} has {size / 1e6:.0f} MB, more than the {MOST_BYTES / 1e6:.0f} that PyPI takes."
    platforms: list[str] = []
    for path in wheels:
        yield from (f"{path.name}: {each}" for each in _wheel_complaints(path, tracked))
        name = WheelName.of(path)
        platforms += name.platforms if name is not None else ()
    for path in sources:
        yield from (f"{path.name}: {each}" for each in _source_complaints(path, tracked))
    if complete:
        for platform, tag in PLATFORMS.items():
            if not any(re.fullmatch(tag, each) for each in platforms):
                yield f"There is no wheel for {platform}."
        yield from (f"{each} is no platform that an index takes." for each in platforms if each.startswith("linux_"))


def _wheel_complaints(path: Path, tracked: frozenset[str]) -> Iterator[str]:
    name = WheelName.of(path)
    if name is None or (name.project, name.version) != (NAME, VERSION):
        yield f"its name is not that of {NAME} {VERSION}, the version in pyproject.toml"
        return
    if (name.python, name.abi) != ("py3", "none"):
        yield f"it is for {name.python}-{name.abi}, and one wheel should serve every Python 3"
    info = f"{NAME}-{VERSION}.dist-info/"
    with zipfile.ZipFile(path) as archive:
        held = [each for each in archive.namelist() if not each.endswith("/")]
        metadata = HeaderParser().parsestr(archive.read(f"{info}METADATA").decode())
        entry_points = archive.read(f"{info}entry_points.txt").decode()
    yield from _metadata_complaints(metadata["Name"], metadata["Version"], metadata["Requires-Python"])
    if "ostro = ostro.cli:main" not in entry_points.replace("=", " = ").replace("  ", " "):
        yield "it does not install the command ostro"
    if not any(each.startswith(info) and each.endswith("LICENSE") for each in held):
        yield "it does not hold the licence"
    if not any(CORE.fullmatch(each) for each in held):
        yield "it has no native core, which OSTRO_NATIVE_REQUIRED=1 makes an error of the build"
    yield from (f"it lacks {each}" for each in sorted(tracked.difference(held)))
    beyond = (each for each in held if not each.startswith((info, *GRAFTED)) and not CORE.fullmatch(each))
    yield from (f"it holds {each}, which is none of the package's files" for each in sorted({*beyond} - tracked))


def _source_complaints(path: Path, tracked: frozenset[str]) -> Iterator[str]:
    stem = f"{NAME}-{VERSION}"
    if path.name != f"{stem}.tar.gz":
        yield f"its name is not {stem}.tar.gz"
        return
    with tarfile.open(path) as archive:
        held = {member.name.removeprefix(f"{stem}/") for member in archive.getmembers() if member.isfile()}
        listed = archive.extractfile(f"{stem}/PKG-INFO")
        metadata = HeaderParser().parsestr(listed.read().decode() if listed is not None else "")
    yield from _metadata_complaints(metadata["Name"], metadata["Version"], metadata["Requires-Python"])
    yield from (f"it lacks {each}" for each in SOURCES if each not in held)
    yield from (f"it lacks src/{each}" for each in sorted(tracked) if f"src/{each}" not in held)
    strays = (each for each in sorted(held) if NEVER.search(each) or CORE.fullmatch(each.removeprefix("src/")))
    yield from (f"it holds {each}, which nobody needs" for each in strays)


def _metadata_complaints(name: str | None, version: str | None, python: str | None) -> Iterator[str]:
    if (name, version, python) != (NAME, VERSION, PROJECT["requires-python"]):
        yield f"its metadata is of {name} {version} for Python {python}, which pyproject.toml does not say"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Checks wheels and the source distribution before they are published.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--complete", action="store_true", help="there must be a wheel for every platform")
    args = parser.parse_args(argv)
    files = sorted(path for path in args.directory.iterdir() if path.is_file()) if args.directory.is_dir() else []
    for path in files:
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path.name}")
    found = list(complaints(files, complete=args.complete))
    for each in found:
        print(each, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
