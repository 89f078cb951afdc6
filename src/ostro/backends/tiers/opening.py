"""Opens the tiers below a runner's pages that the settings ask for: host memory, disk, or both.

What identifies a page on disk is all that its keys and values depend on: the model's files, its settings, what computes
it, and an adapter's files. So a page is never found by another model, or by another version of this one.
"""

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ostro.backends.native.identity import model_facts
from ostro.backends.native.runner import NativeRunner
from ostro.backends.tiers.disk_store import DiskStore, HostPages
from ostro.backends.tiers.page_bundles import PageBundles
from ostro.backends.tiers.page_disk import PageDisk
from ostro.backends.tiers.page_file import Bytes, PageFile, PageFileUnusable, file_bytes, open_page_file
from ostro.config import EngineConfig
from ostro.engine.page_store import PageStore
from ostro.engine.radix import Salt
from ostro.engine.runner import ModelRunner
from ostro.engine.tiers import Tiers
from ostro.errors import BadRequest, ModelError, Unsupported
from ostro.sources.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ostro.sources.page_files import page_file_name, pages_root
from ostro.system.machine import free_memory
from ostro.version import __version__
from ostro.weights import Checkpoint

if TYPE_CHECKING:
    from ostro.backends.cuda.host_store import HostStore
    from ostro.backends.cuda.runner import GpuRunner

_DISK_SIZE = _SHARED_SIZE = 20 << 30
_TRIAL_PAGES = 64
# Below a GPU, host memory for pages on their way to disk, and as much for those on their way back.
_PASSING_BYTES = 256 << 20
_FEWEST_PASSING = 4

_log = logging.getLogger(__name__)


def open_tiers(checkpoint: Checkpoint, config: EngineConfig, runner: ModelRunner) -> Tiers | None:
    """None if the settings ask for none, or the disk that they ask for cannot be used, which is logged. Raises
    Unsupported for a runner that has no tiers.
    """
    if not config.has_tiers:
        return None
    if isinstance(runner, NativeRunner):
        identity = _identity(checkpoint, config, runner, runner.program.page_bytes)
        disk = _open_disk(checkpoint, config, identity, runner.program.page_bytes)
        if disk is None:
            return None
        store = DiskStore(runner.program, disk, outlives=config.kv_persist)
        return Tiers(store, root=_roots(identity, config))
    if (gpu := _one_gpu(runner)) is not None:
        return _below_gpu(checkpoint, config, gpu)
    setting = config.tier_settings[0]
    raise Unsupported(
        f"{setting} does not work on {runner.spec.backend}: it is for the native CPU core and for one NVIDIA GPU. "
        "Leave it out.",
        param=setting,
    )


class TrialStores(NamedTuple):
    """Each tier that a runner can have, small and by itself, to time its copies."""

    page_bytes: int
    host: PageStore | None
    staged: int
    """Pages that can be on their way to host memory."""
    disk: PageStore | None
    waiting: int
    """Pages that can wait to be written."""


@contextmanager
def trial_stores(runner: ModelRunner) -> Iterator[TrialStores | None]:
    """None for a runner that has no tiers. The disk is that of temporary files; None if these cannot be written."""
    if isinstance(runner, NativeRunner):
        with _trial_disk(runner.program, runner.program.page_bytes) as (store, disk):
            yield TrialStores(runner.program.page_bytes, None, 0, store, disk.most_waiting if disk is not None else 0)
        return
    gpu = _one_gpu(runner)
    if gpu is None:
        yield None
        return
    host = gpu.host_store(_TRIAL_PAGES)
    with closing(host), _trial_disk(_Slots(host), gpu.page_bytes) as (store, _):
        yield TrialStores(gpu.page_bytes, host, host.most_staged, store, _passing(gpu.page_bytes))


@contextmanager
def _trial_disk(pages: HostPages, page_bytes: int) -> Iterator[tuple[DiskStore, PageDisk] | tuple[None, None]]:
    directory, limit = Path(tempfile.gettempdir()), file_bytes(_TRIAL_PAGES, page_bytes)
    try:
        file = open_page_file(directory, None, identity=bytes(32), page_bytes=page_bytes, limit=limit)
    except PageFileUnusable as error:
        _log.warning("the disk is not measured: %s", error)
        yield None, None
        return
    disk = PageDisk(file)
    with closing(DiskStore(pages, disk, outlives=False)) as store:
        yield store, disk


class _Slots:
    """Host memory below a GPU, as pages of a disk's."""

    def __init__(self, host: "HostStore") -> None:
        self._host = host

    def page(self, number: int) -> Bytes:
        return self._host.slot(number)


def _one_gpu(runner: ModelRunner) -> "GpuRunner | None":
    if runner.spec.device != "cuda" or runner.spec.devices != 1:
        return None
    # Needs triton, which machines without a GPU may lack.
    from ostro.backends.cuda.runner import GpuRunner

    return runner if isinstance(runner, GpuRunner) else None


def _passing(page_bytes: int) -> int:
    return max(_FEWEST_PASSING, _PASSING_BYTES // page_bytes)


def _below_gpu(checkpoint: Checkpoint, config: EngineConfig, runner: "GpuRunner") -> Tiers | None:
    """Pages on disk come and go through host memory, which takes some more for that."""
    from ostro.backends.cuda.host_disk_store import HostDiskStore

    page_bytes = runner.page_bytes
    num_slots = _slots_bytes(config.kv_host_memory or 0) // page_bytes
    if config.kv_host_memory is not None and not num_slots:
        raise BadRequest(
            f"kv_host_memory has no room for a page, which takes {page_bytes} bytes. Raise it.", param="kv_host_memory"
        )
    if config.kv_disk is None and not config.kv_persist and config.kv_shared is None:
        return Tiers(_host_store(config, runner, num_slots))
    identity = _identity(checkpoint, config, runner, page_bytes)
    disk = _open_disk(checkpoint, config, identity, page_bytes)
    if disk is None:
        return Tiers(_host_store(config, runner, num_slots)) if num_slots else None
    passing = _passing(page_bytes)
    store = HostDiskStore(
        _host_store(config, runner, num_slots + 2 * passing),
        disk,
        num_slots=num_slots,
        num_incoming=passing,
        outlives=config.kv_persist,
    )
    return Tiers(store, root=_roots(identity, config))


def _host_store(config: EngineConfig, runner: "GpuRunner", num_slots: int) -> "HostStore":
    """Raises ModelError if there is not so much memory to pin."""
    try:
        return runner.host_store(num_slots)
    except MemoryError as error:
        disk = config.tier_settings[0]
        advice = f"Free some, or leave {disk} out" if config.kv_host_memory is None else "Lower kv_host_memory"
        raise ModelError(f"{error}. {advice}.") from error


def _slots_bytes(asked: int) -> int:
    """Raises BadRequest if there is not so much memory: it is taken at once, and pinned."""
    if asked > (free := free_memory()):
        raise BadRequest(
            f"kv_host_memory is {asked / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of this machine's memory are free. "
            "Lower it.",
            param="kv_host_memory",
        )
    return asked


def _identity(
    checkpoint: Checkpoint, config: EngineConfig, runner: "NativeRunner | GpuRunner", page_bytes: int
) -> bytes:
    spec = runner.spec
    how = [__version__, spec.backend, spec.precision, spec.page_size, page_bytes, config.quantize, config.max_seq_len]
    facts = [how, runner.computes_with, dict(checkpoint.config), model_facts(checkpoint)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()


def _open_disk(checkpoint: Checkpoint, config: EngineConfig, identity: bytes, page_bytes: int) -> PageDisk | None:
    file = _open_file(checkpoint, config, identity, page_bytes)
    bundles = _open_bundles(config, identity, page_bytes)
    if file is None and bundles is None:
        return None
    disk = PageDisk(file, bundles)
    if config.kv_persist and disk.num_records:
        _log.info("found %d cached pages on disk", len(disk))
    return disk


def _open_bundles(config: EngineConfig, identity: bytes, page_bytes: int) -> PageBundles | None:
    if config.kv_shared is None:
        return None
    directory, limit = Path(config.kv_shared).expanduser(), config.kv_shared_size or _SHARED_SIZE
    try:
        bundles = PageBundles(directory, identity=identity, page_bytes=page_bytes, limit=limit)
    except PageFileUnusable as error:
        _log.warning("prefixes are not shared with other engines: %s", error)
        return None
    if not bundles.most_pages:
        _log.warning(
            "prefixes are not shared with other engines: kv_shared_size has no room for a page of %d bytes", page_bytes
        )
        return None
    # Engines find one another's prefixes only under the same name.
    _log.info("found %d pages of other engines in %s", len(bundles), bundles.directory)
    return bundles


def _open_file(checkpoint: Checkpoint, config: EngineConfig, identity: bytes, page_bytes: int) -> PageFile | None:
    if config.kv_disk is None and not config.kv_persist:
        return None
    directory = Path(config.kv_disk).expanduser() if config.kv_disk is not None else pages_root()
    name = page_file_name(checkpoint.name, checkpoint.path) if config.kv_persist else None
    limit = config.kv_disk_size or _DISK_SIZE
    try:
        file = open_page_file(directory, name, identity=identity, page_bytes=page_bytes, limit=limit)
    except PageFileUnusable as error:
        _log.warning("prefixes are not kept on disk: %s", error)
        return None
    if not file.num_records:
        _log.warning("prefixes are not kept on disk: kv_disk_size has no room for a page of %d bytes", page_bytes)
    return file


def _roots(identity: bytes, config: EngineConfig) -> Callable[[Salt], bytes | None]:
    """What pages on disk begin with: nothing of requests with a salt, which say that their text is nobody else's."""
    adapters = {name: _content_of(Path(path).expanduser()) for name, path in config.adapters}

    def root(salt: Salt) -> bytes | None:
        adapter, own = salt if isinstance(salt, tuple) else (None, salt)
        if own:
            return None
        return identity if adapter is None else hashlib.sha256(identity + adapters[adapter]).digest()

    return root


def _content_of(directory: Path) -> bytes:
    """Of what an adapter is read from; a training run may leave much more beside it."""
    digest = hashlib.sha256()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        with (directory / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()
