"""Models' files for the pool: looked up in a thread, downloaded by a separate process, and held while in use."""

import asyncio
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from ostro.config import EngineConfig
from ostro.errors import DownloadFailed, ModelError, ModelNotFound, from_process
from ostro.pool.catalog import ModelSpec
from ostro.pool.entry import Files
from ostro.processes.environment import download_environment
from ostro.processes.log_relay import Logged
from ostro.processes.spawn import kill_group, spawn
from ostro.sources.download_worker import Failed, Fetched, Order, Progress, Word
from ostro.sources.place import find_adapter, find_place
from ostro.sources.progress import Arrived
from ostro.sources.store import ModelStore
from ostro.sources.tokenizer_files import find_tokenizer, naming_tokenizer


class CachedModelFiles:
    """Uses files on this machine in place, and downloads all others into the model cache."""

    def __init__(self, find_seconds: float = 600.0) -> None:
        """`find_seconds` is how long it may take to look for files that are on this machine."""
        self._find_seconds = find_seconds
        self._arrived: dict[str, Arrived] = {}

    def arrived(self, name: str) -> Arrived | None:
        """How much of a model has come, while it is downloaded from a source that tells."""
        return self._arrived.get(name)

    async def find(self, spec: ModelSpec) -> Files | None:
        try:
            async with asyncio.timeout(self._find_seconds):
                return await _in_thread(lambda: _found(spec.config))
        except TimeoutError:
            raise ModelError(
                f"The files of {spec.name} could not be looked up within {self._find_seconds:g} s. Check the disk or "
                "file system that they are on, then load it again."
            ) from None

    async def fetch(self, spec: ModelSpec) -> Files:
        from ostro.backends.choosing import check_without_torch

        # A model that could not be loaded is not worth a download.
        await asyncio.to_thread(check_without_torch, spec.config.model, spec.config)
        process, sock = _spawn(spec.config)
        writer: asyncio.StreamWriter | None = None
        try:
            reader, writer = await asyncio.open_connection(sock=sock)
            fetched = await _outcome(reader, spec.name, partial(self._arrived.__setitem__, spec.name))
            # Until it is killed, the process holds them too.
            files = await _in_thread(lambda: _held(fetched.path, fetched.name, fetched.adapters, fetched.tokenizer))
            assert files is not None
            return files
        finally:
            self._arrived.pop(spec.name, None)
            if writer is None:
                sock.close()
            else:
                writer.close()
            await _end(process)


def sweep_cache() -> None:
    """Deletes the remains of failed downloads, in a thread: it may have to wait for another process."""
    threading.Thread(target=ModelStore().sweep, name="sweep", daemon=True).start()


def _found(config: EngineConfig) -> Files | None:
    place = find_place(config.model)
    if place is None:
        return None
    adapters = []
    for name, reference in config.adapters:
        directory = find_adapter(reference, config.model, place.path)
        if directory is None:
            return None
        adapters.append((name, str(directory)))
    tokenizer: Path | None = None
    if config.tokenizer is not None:
        with naming_tokenizer(config.tokenizer):
            tokenizer = find_tokenizer(config.tokenizer)
        if tokenizer is None:
            return None
    try:
        return _held(str(place.path), place.name, tuple(adapters), None if tokenizer is None else str(tokenizer))
    except ModelNotFound:
        # Evicted in the meantime.
        return None


def _held(path: str, name: str | None, adapters: tuple[tuple[str, str], ...], tokenizer: str | None) -> Files:
    with ExitStack() as held:
        for each in (path, *(directory for _, directory in adapters), *(() if tokenizer is None else (tokenizer,))):
            held.enter_context(ModelStore().hold(Path(each)))
        return Files(path, name, held.pop_all().close, adapters, tokenizer)


async def _in_thread(work: Callable[[], Files | None]) -> Files | None:
    """Runs the work in a thread. If the caller is cancelled, the files are released when it is done."""
    found = asyncio.get_running_loop().run_in_executor(None, work)
    try:
        return await asyncio.shield(found)
    except asyncio.CancelledError:
        found.add_done_callback(_let_go)
        raise


def _let_go(found: asyncio.Future[Files | None]) -> None:
    if not found.cancelled() and found.exception() is None and (files := found.result()) is not None:
        files.close()


def _spawn(config: EngineConfig) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A download worker, and our end of its socket."""
    order = msgspec.json.encode(Order(config.model, config.tokenizer, config.adapters)).decode()
    try:
        return spawn("ostro.sources.download_worker", order, environment=download_environment())
    except OSError as error:
        raise DownloadFailed(f"The download process could not be started ({error}).") from error


async def _outcome(reader: asyncio.StreamReader, name: str, tell: Callable[[Arrived], None]) -> Fetched:
    """The worker's result. Its log records are logged here, and `tell` is called with its progress."""
    while line := await reader.readline():
        match msgspec.json.decode(line, type=Word):
            case Logged() as logged:
                logged.write()
            case Progress(num_bytes=num_bytes, total=total):
                tell(Arrived(num_bytes, total))
            case Failed(error=kind, message=message):
                raise from_process(kind, message, otherwise=DownloadFailed)
            case Fetched() as fetched:
                return fetched
    raise DownloadFailed(
        f"The process that fetched {name} ended before it was done. See its messages, then ask again: what has arrived "
        "is kept."
    )


async def _end(process: subprocess.Popen[bytes]) -> None:
    kill_group(process)
    while process.poll() is None:
        await asyncio.sleep(0.01)
