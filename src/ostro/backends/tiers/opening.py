"""Opens the tiers below a runner's pages that the settings ask for: host memory, disk, or both.

What identifies a page on disk is all that its keys and values depend on: the model's files, its settings, what computes
it, and an adapter's files. So a page is never found by another model, or by another version of this one.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

from ostro.backends.model_facts import model_facts
from ostro.backends.tiers.disk_store import TrialStores
from ostro.backends.tiers.page_bundles import PageBundles
from ostro.backends.tiers.page_disk import PageDisk
from ostro.backends.tiers.page_file import PageFile, PageFileUnusable, open_page_file
from ostro.config import EngineConfig
from ostro.engine.page_store import PageStore
from ostro.engine.radix import Salt
from ostro.engine.runner import ModelRunner, RunnerSpec
from ostro.engine.tiers import Tiers
from ostro.errors import Unsupported
from ostro.sources.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ostro.sources.page_files import page_file_name, pages_root
from ostro.version import __version__
from ostro.weights import Checkpoint

_DISK_SIZE = _SHARED_SIZE = 20 << 30

_log = logging.getLogger(__name__)


def open_tiers(checkpoint: Checkpoint, config: EngineConfig, runner: ModelRunner) -> Tiers | None:
    """None if the settings ask for none, or if the disk cannot be used, which is logged. Raises Unsupported for a
    runner that has no tiers.
    """
    if not config.has_tiers:
        return None
    setting = config.tier_settings[0]
    if not isinstance(runner, TieredRunner) or runner.spec.devices != 1:
        raise Unsupported(
            f"{setting} does not work on {runner.spec.backend}: it is for the native CPU core and for one NVIDIA GPU. "
            "Leave it out.",
            param=setting,
        )
    if runner.spec.num_states and not runner.stores_states:
        # Pages without the states behind them are of no use to anybody.
        raise Unsupported(
            f"{setting} does not work with models whose layers keep recurrent states on {runner.spec.backend}: its "
            "tiers hold pages only. Leave it out, or serve the model on the native CPU core.",
            param=setting,
        )
    runner.check_tiers(config)
    identity = _identity(checkpoint, config, runner)
    disk = _open_disk(checkpoint, config, identity, runner.page_bytes)
    store = runner.page_store(config, disk)
    if store is None:
        return None
    pages_per_state = max(1, -(-runner.spec.state_bytes // runner.page_bytes))
    if disk is None:
        return Tiers(store, pages_per_state=pages_per_state)
    return Tiers(store, root=_roots(identity, config), pages_per_state=pages_per_state)


@runtime_checkable
class TieredRunner(Protocol):
    """A runner whose pages can have tiers below them."""

    @property
    def spec(self) -> RunnerSpec: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def stores_states(self) -> bool:
        """Whether its tiers hold recurrent states too."""

    @property
    def computes_with(self) -> list[str]:
        """What its results depend on besides the model."""

    def check_tiers(self, config: EngineConfig) -> None:
        """Raises BadRequest for sizes that it does not support."""

    def page_store(self, config: EngineConfig, disk: PageDisk | None) -> PageStore | None:
        """The tiers that the settings ask for, on this disk; None if there are none without one."""

    def trial_stores(self) -> AbstractContextManager[TrialStores]:
        """Each of its tiers, small and on its own."""


@contextmanager
def trial_stores(runner: ModelRunner) -> Iterator[TrialStores | None]:
    """None for a runner that has no tiers. The disk is that of temporary files; None if these cannot be written."""
    if not isinstance(runner, TieredRunner) or runner.spec.devices != 1:
        yield None
        return
    with runner.trial_stores() as stores:
        yield stores


def _identity(checkpoint: Checkpoint, config: EngineConfig, runner: TieredRunner) -> bytes:
    spec, size = runner.spec, runner.page_bytes
    how = [__version__, spec.backend, spec.precision, spec.page_size, size, config.quantize, config.max_seq_len]
    how += [spec.state_bytes, spec.state_every]
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
        _log.warning("prefixes are not shared with other engines: %s. Set kv_shared to another directory.", error)
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
        _log.warning("prefixes are not kept on disk: %s. Set kv_disk to another directory.", error)
        return None
    if not file.num_records:
        _log.warning("prefixes are not kept on disk: kv_disk_size has no room for a page of %d bytes", page_bytes)
    return file


def _roots(identity: bytes, config: EngineConfig) -> Callable[[Salt], bytes | None]:
    """The root digest of a chain of pages on disk. None for requests with a salt: their text is not for others."""
    adapters = {name: _content_of(Path(path).expanduser()) for name, path in config.adapters}

    def root(salt: Salt) -> bytes | None:
        adapter, own = salt if isinstance(salt, tuple) else (None, salt)
        if own:
            return None
        return identity if adapter is None else hashlib.sha256(identity + adapters[adapter]).digest()

    return root


def _content_of(directory: Path) -> bytes:
    """A digest of the files that an adapter is read from; a training run may leave many more beside them."""
    digest = hashlib.sha256()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        with (directory / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()
