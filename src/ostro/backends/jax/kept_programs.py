"""Compiled programs of earlier starts, in the cache: loading one takes a tenth of a second and no tracing. Knows files;
knows no models.

ROOT/programs/DIGEST/NAME     the checksum of a program, then the program as JAX serialises it

The digest covers whatever a program depends on: the model's description, the shapes, the devices, the versions of Ostro
and JAX, and Ostro's own code. A serialised program is code, so a file that another user could have written is not read.
A damaged program is compiled again, as are all those of a directory whose loading crashed a process.
"""

import hashlib
import logging
import os
import pickle
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from ostro.sources.cache import cache_root, publish
from ostro.sources.locks import discard, has_dead_mark, marked, touch
from ostro.system.file_trust import why_untrusted
from ostro.version import __version__

_log = logging.getLogger(__name__)

_MOST_DIRECTORIES = 16
# Raised by unpickling for changed or damaged data, and by XLA for a program that it cannot run.
_UNLOADABLE = (
    *(AttributeError, EOFError, ImportError, LookupError, RuntimeError, TypeError, ValueError),
    pickle.UnpicklingError,
)
_CHECKSUM_BYTES = hashlib.sha256().digest_size


class KeptPrograms:
    """The programs of one digest."""

    def __init__(self, mesh: Mesh, facts: Sequence[object]) -> None:
        """`facts` say what the programs depend on besides the devices and versions."""
        self._devices = list(mesh.devices.flat)
        self._directory = cache_root() / "programs" / _digest([*_surroundings(mesh), *facts])
        if has_dead_mark(self._directory):
            _log.warning("A process died while it loaded programs from %s. They are compiled again.", self._directory)
            try:
                discard(self._directory)
            except OSError:
                # On a read-only disk they stay, and are left alone.
                self._directory = self._directory.with_name(f"{self._directory.name}.{os.getpid()}")
        touch(self._directory)
        self._is_writable = True

    def load(self, name: str, arguments: Any, results: Any) -> Any:
        """The program compiled for this name; None if there is no usable one. `arguments` and `results` have
        the structure of its arguments and results.
        """
        path = self._path(name)
        try:
            serialised = _read(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            _log.warning("%s %s. It is compiled again.", path, error)
            return None
        client, tree = self._devices[0].client, jax.tree.structure
        try:
            with marked(self._directory):
                return serialize_executable.deserialize_and_load(
                    serialised, tree((arguments, {})), tree(results), client, self._devices
                )
        except _UNLOADABLE as error:
            _log.warning("%s cannot be loaded (%s). It is compiled again.", path, error)
            return None

    def save(self, name: str, compiled: Any) -> None:
        """Keeps a program for later starts, if it can be serialised and the cache can be written; warns once if not."""
        if not self._is_writable:
            return
        try:
            serialised, _, _ = serialize_executable.serialize(compiled)
            self._write(self._path(name), serialised)
        except (ValueError, RuntimeError) as error:
            # NotImplementedError, for what cannot be serialised, is a RuntimeError.
            _log.debug("a program cannot be cached: %s", error)
        except OSError as error:
            self._is_writable = False
            _log.warning(
                "Programs cannot be kept in %s (%s), so they are compiled at every start. Free some space, or set "
                "OSTRO_CACHE to a directory that can be written.",
                self._directory.parent,
                error.strerror or error,
            )

    def drop_oldest(self) -> None:
        """Deletes the least recently used programs, if there are many."""
        with suppress(OSError):
            found = [path for path in self._directory.parent.iterdir() if path.is_dir()]
            for old in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[_MOST_DIRECTORIES:]:
                discard(old)

    def _path(self, name: str) -> Path:
        return self._directory / hashlib.sha256(name.encode()).hexdigest()[:32]

    def _write(self, path: Path, serialised: bytes) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        # Independent of the umask: a file that others can write is not read.
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(serialised).digest() + serialised)
            publish(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


def _read(path: Path) -> bytes:
    """The serialised program. Raises ValueError with the rest of a sentence if it must not be used."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        if (reason := why_untrusted(descriptor, group_may_write=False)) is not None:
            raise ValueError(reason)
        checksum, serialised = file.read(_CHECKSUM_BYTES), file.read()
    if hashlib.sha256(serialised).digest() != checksum:
        raise ValueError("is damaged: it does not have its checksum")
    return serialised


def _digest(facts: Sequence[object]) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _surroundings(mesh: Mesh) -> list[object]:
    """What any program depends on."""
    device = mesh.devices.flat[0]
    return [
        software(),
        (device.client.platform_version, device.platform, device.device_kind),
        [each.id for each in mesh.devices.flat],
        _cpu_features(),
    ]


def software() -> dict[str, str]:
    """What any program depends on besides the hardware: versions, code and flags, by name."""
    package = Path(__file__).parents[2]
    traced = [package / name for name in ("models", "backends", "kernels/gpu")]
    sources = sorted(path for directory in traced for path in directory.rglob("*.py"))
    return {
        "ostro": __version__,
        "ostro's code": hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest(),
        **{package: _version(package) for package in ("jax", "jaxlib", "jax-triton", "triton")},
        **{name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_features() -> list[str]:
    """Programs for CPUs use every instruction that the machine has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return list(os.uname())
    return sorted({line for line in lines if line.startswith(("flags", "Features", "CPU part"))})
