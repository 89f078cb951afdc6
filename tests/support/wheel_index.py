"""Wheels built here, for the real pip to find in a directory; nothing touches the network."""

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from ostro.sources.pypi import Wheel


def write_wheel(directory: Path, project: str, files: Mapping[str, bytes], version: str = "1.0") -> Path:
    """A wheel of a project, with these files and the metadata that pip wants."""
    stem = f"{project.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    contents = dict(files) | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    directory.mkdir(exist_ok=True)
    path = directory / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**contents, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    return path


def pieces_of(data: bytes, count: int) -> list[bytes]:
    """Pieces of unequal length."""
    cuts = [0, *(len(data) * (2 * number + 1) // (2 * count + 1) for number in range(1, count)), len(data)]
    return [data[start:end] for start, end in pairwise(cuts)]


def write_parts(directory: Path, project: str, pieces: Sequence[bytes]) -> tuple[Wheel, ...]:
    """Wheels PROJECT-part1, … with a piece each, and code that must never run; all that can be pinned of them is."""
    parts = []
    for number, piece in enumerate(pieces, start=1):
        name = f"{project}-part{number}"
        package = name.replace("-", "_")
        member = f"{package}/data/part{number:02}.bin"
        path = write_wheel(directory, name, {f"{package}/__init__.py": b"raise SystemExit", member: piece})
        parts.append(
            Wheel(
                project=name,
                version="1.0",
                sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
                wheel_bytes=path.stat().st_size,
                member=member,
                member_bytes=len(piece),
            )
        )
    return tuple(parts)
