"""Compiled kernels that come with the package, so that a first start compiles nothing: entries of Triton's cache in an
archive.

    pack      a cache that was empty before ──> the archive      bench/compile.py --archive
    unpack    the archive ──> the cache, where it lacks them     before the first launch

An entry is named by Triton's own key, a hash of the kernel's source, the compiler and its options. An archive made by
other versions is therefore never wrong, only of no use. Imports neither torch nor Triton.
"""

import hashlib
import io
import json
import logging
import platform
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath

import ostro.kernels.gpu

# For each GPU, by name: the marks of starts whose kernels are all in the archive.
_MARKS = "marks.json"
_GROUP = "__grp__"
# What a launch reads of a compiled kernel. The rest of an entry is the compiler's intermediate forms.
_READ = (".cubin", ".json")

_log = logging.getLogger(__name__)


def archive_path() -> Path | None:
    """Where the archive for this system and this version of Triton is, if there is one. None without Triton."""
    try:
        named = f"{sys.platform}-{platform.machine()}-triton-{version('triton')}.zip"
    except PackageNotFoundError:
        return None
    return Path(ostro.kernels.gpu.__file__ or "").parent / "binaries" / named


def pack(cache: Path, archive: Path, marks: Mapping[str, Sequence[str]]) -> int:
    """Writes an archive of all entries of a cache; returns their number. `marks` are for each GPU, by name, those that
    `unpack` leaves in the cache.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    entries = sorted(entry for entry in cache.iterdir() if entry.is_dir())
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        packed.writestr(_MARKS, json.dumps(marks))
        for entry in entries:
            for file in _packed_files(entry):
                content = _group(file, Path()) if file.name.startswith(_GROUP) else file.read_bytes()
                packed.writestr(f"{entry.name}/{file.name}", content)
    return len(entries)


def unpack(archive: Path, cache: Path, gpu: str | None) -> int:
    """Adds to the cache what it lacks, once for each archive; returns the number of new entries. Whatever is wrong with
    either, kernels are then compiled as without an archive.
    """
    try:
        content = archive.read_bytes()
    except OSError:
        return 0
    done = cache / f"ostro-binaries-{hashlib.sha256(content).hexdigest()[:32]}"
    if done.exists():
        return 0
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            cache.mkdir(parents=True, exist_ok=True)
            added = _unpack_entries(packed, cache)
            marks = json.loads(packed.read(_MARKS)).get(gpu, ())
        for mark in (*marks, done.name):
            (cache / mark).touch()
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        _log.warning("Kernels are compiled anew: %s cannot be unpacked into %s (%s).", archive.name, cache, error)
        return 0
    _log.info("unpacked %d kernels that come with the package", added)
    return added


def _packed_files(entry: Path) -> list[Path]:
    """The files of an entry that are worth keeping: of one without a group, such as a launcher, all."""
    files = sorted(file for file in entry.iterdir() if file.is_file() and file.name != "lock")
    grouped = any(file.name.startswith(_GROUP) for file in files)
    return [file for file in files if not grouped or file.suffix in _READ]


def _group(file: Path, entry: Path) -> bytes:
    """Triton's list of the files of an entry, with their paths in this one."""
    listed = json.loads(file.read_bytes())["child_paths"]
    kept = {name: str(entry / name) for name in listed if PurePosixPath(name).suffix in _READ}
    return json.dumps({"child_paths": kept}).encode()


def _unpack_entries(packed: zipfile.ZipFile, cache: Path) -> int:
    files: dict[str, list[str]] = {}
    for name in packed.namelist():
        entry, _, file = name.partition("/")
        if file:
            files.setdefault(entry, []).append(file)
    missing = {entry: named for entry, named in files.items() if not (cache / entry).exists()}
    for entry, named in missing.items():
        _unpack_entry(packed, cache, entry, named)
    return len(missing)


def _unpack_entry(packed: zipfile.ZipFile, cache: Path, entry: str, files: Sequence[str]) -> None:
    """All of it at once: another process may be looking for it."""
    partial = Path(tempfile.mkdtemp(prefix="ostro-", dir=cache))
    try:
        for file in files:
            path = partial / file
            path.write_bytes(packed.read(f"{entry}/{file}"))
            if file.startswith(_GROUP):
                path.write_bytes(_group(path, cache / entry))
        partial.chmod(0o755)
        partial.rename(cache / entry)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        # Unless another process was faster.
        if not (cache / entry).exists():
            raise
