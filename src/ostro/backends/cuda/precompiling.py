"""Has a model's kernels compiled by other processes, from its description, while its weights are loaded.

    this process         start, begin ── imports ── weights ──────── wait ── launches, which find what is compiled
    precompile_process     imports ──────── list ── fork, fork, … ───┘

It begins as soon as it is started, if the driver can say what GPU there is. Asking it and creating the GPU's context
happen in a thread while this process imports torch. Kernels that come with the package are unpacked before
(`shipped_binaries`); if those are all that a model needs, no process is started.

Threads of this process could compile only once the weights are loaded, and would run the compiler's Python part, an
eighth of the work, one at a time. What the processes do not compile, for whatever reason, the launches compile, as they
would without them. Imports no torch, so that the process can start before it.
"""

import hashlib
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from threading import Lock, Thread

import msgspec

import ostro.backends.cuda
import ostro.kernels.gpu
from ostro.backends.cuda import shipped_binaries
from ostro.backends.cuda.choices import Gpu
from ostro.backends.cuda.driver import first_gpu, open_context
from ostro.config import EngineConfig, ResolvedConfig
from ostro.devices import DEVICE_KINDS
from ostro.errors import BadRequest
from ostro.models.registry import describe
from ostro.processes.environment import engine_environment
from ostro.processes.spawn import kill_group, spawn
from ostro.system.machine import num_cpus

LENGTH = struct.Struct("<I")
_LONGEST = 1 << 24
# Many times what compiling takes, even on two busy CPUs.
_MOST_SECONDS = 300.0
_LIBRARIES = ("torch", "triton")
# The settings that decide which kernels there are.
_SETTINGS = (
    "max_seq_len",
    "dtype",
    "quantize",
    "kv_dtype",
    "page_size",
    "max_batch_seqs",
    "deterministic",
    "cascade_attention",
    "kernel_choices",
)

_log = logging.getLogger(__name__)


class Request(msgspec.Struct, frozen=True):
    """A model, as its config.json has it, and where and how it will run."""

    model: dict[str, object]
    settings: ResolvedConfig
    gpu: Gpu


class Compiled(msgspec.Struct, frozen=True):
    """The answer to a request, once all is compiled."""

    kernels: int
    failed: Mapping[str, str]
    """Names of kernels that could not be compiled, with the reason."""
    moments: Mapping[str, float] = msgspec.field(default_factory=dict)
    """When each stage ended, in seconds since the epoch."""
    slowest: str = ""
    """The kernel that took longest, and how long."""


class Precompiler:
    """A handle on the process. It ends with this process, or when it is closed."""

    def __init__(self, done: Path | None = None) -> None:
        """Leaves an empty file `done` when all is compiled. Raises OSError if no process can be started."""
        # It must not take memory on the GPU, and a process that is to be forked must have one thread.
        environment = {**engine_environment(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process, self._socket = spawn("ostro.backends.cuda.precompile_process", environment=environment)
        self._done = done
        self._begun: Request | None = None
        # Requests without an answer.
        self._open = 0
        self._lock = Lock()

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, request: Request) -> None:
        """Returns before anything is compiled. Only the latest request counts, and the same one again is the same."""
        # A valid config may hold numbers and texts that no message can.
        with self._lock, suppress(OSError, ValueError, TypeError, OverflowError, RecursionError):
            if request == self._begun:
                return
            self._socket.sendall(frame(request))
            self._begun = request
            self._open += 1

    def wait(self) -> Compiled | None:
        """Waits until all kernels are compiled. None if nothing was begun, the process ended, or it takes minutes."""
        if not self._open:
            return None
        started = time.monotonic()
        try:
            self._socket.settimeout(_MOST_SECONDS)
            while self._open:
                self._open -= 1
                compiled = msgspec.msgpack.decode(receive(self._socket), type=Compiled)
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            reason = "takes too long" if isinstance(error, TimeoutError) else "has ended"
            _log.warning("Kernels are compiled one by one: the process that compiles them ahead %s.", reason)
            return None
        for name, reason in compiled.failed.items():
            _log.debug("%s was not compiled ahead: %s", name, reason)
        waited = time.monotonic() - started
        _log.info("compiled %d kernels, in %.1f s beyond loading the weights", compiled.kernels, waited)
        if self._done is not None and not compiled.failed:
            with suppress(OSError):
                self._done.touch()
        return compiled

    def close(self) -> None:
        kill_group(self._process)
        self._process.wait()
        self._socket.close()


@contextmanager
def precompiler(model: Mapping[str, object], config: EngineConfig) -> Iterator[Precompiler | None]:
    """A `Precompiler` for the time it takes to load a model onto a GPU. None where it would not help: with one CPU,
    without Triton's compiler, and if an earlier start with the same model, settings and code has left the kernels in
    its cache.
    """
    cache = _triton_cache()
    done = cache / mark(model, config)
    started = None
    if _compiles() and not config.deterministic and not done.exists():
        _unpack_shipped(cache)
        if num_cpus() > 1 and not done.exists():
            started = _started(done)
    ahead = Thread(target=_before_torch, args=(model, config, started), daemon=True)
    ahead.start()
    try:
        yield started
    finally:
        ahead.join()
        if started is not None:
            started.close()


def mark(model: Mapping[str, object], config: EngineConfig) -> str:
    """The name of the empty file that says in Triton's cache that all kernels of a start are there."""
    return f"ostro-{_digest(model, config)}"


def _unpack_shipped(cache: Path) -> None:
    archive = shipped_binaries.archive_path()
    if archive is not None and archive.exists():
        gpu = first_gpu()
        shipped_binaries.unpack(archive, cache, None if gpu is None else gpu.name)


def _started(done: Path) -> Precompiler | None:
    try:
        return Precompiler(done)
    except OSError as error:
        _log.warning("Kernels are compiled one by one: no process could be started (%s).", error.strerror)
        return None


def _before_torch(model: Mapping[str, object], config: EngineConfig, started: Precompiler | None) -> None:
    """Has the process begin, then makes the GPU's context."""
    if started is not None and (gpu := first_gpu()) is not None:
        # A wrong setting is reported when the model is loaded.
        with suppress(BadRequest):
            started.begin(Request(dict(model), DEVICE_KINDS["cuda"].resolve(config), gpu))
    open_context()


def frame(message: msgspec.Struct) -> bytes:
    content = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(content)) + content


def receive(connection: socket.socket) -> bytes:
    """The next message. Raises EOFError if the other end is closed, or announces an implausible length."""
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    if length > _LONGEST:
        raise EOFError
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes:
    content = b""
    while len(content) < length:
        part = connection.recv(length - len(content))
        if not part:
            raise EOFError
        content += part
    return content


def _compiles() -> bool:
    return find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")


def _triton_cache() -> Path:
    """Where Triton keeps what it compiles: its own rule, without the half second of importing it."""
    home = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~"))
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def _described(model: Mapping[str, object]) -> object:
    """What a config says about the model: others may say the same."""
    try:
        return repr(describe(dict(model)))
    except Exception:  # noqa: BLE001  whatever is wrong with the model, loading it will tell
        return sorted(map(str, model.items()))


def _digest(model: Mapping[str, object], config: EngineConfig) -> str:
    facts = json.dumps([_described(model), {name: getattr(config, name) for name in _SETTINGS}], default=str)
    digest = hashlib.sha256(facts.encode())
    for package in (ostro.kernels.gpu, ostro.backends.cuda):
        for path in sorted(Path(package.__file__ or "").parent.glob("*.py")):
            digest.update(path.read_bytes())
    for library in _LIBRARIES:
        with suppress(PackageNotFoundError):
            digest.update(f"{library} {version(library)}".encode())
    return digest.hexdigest()[:32]
