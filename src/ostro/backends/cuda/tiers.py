"""Tiers below a GPU's pages: host memory, and a disk that is reached through it."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from ostro.backends.cuda.host_disk_store import HostDiskStore
from ostro.backends.cuda.host_store import HostStore
from ostro.backends.tiers.disk_store import TRIAL_PAGES, TrialStores, trial_disk
from ostro.backends.tiers.page_disk import PageDisk
from ostro.backends.tiers.page_file import Bytes
from ostro.config import EngineConfig
from ostro.engine.page_store import PageStore
from ostro.errors import BadRequest, ModelError
from ostro.system.machine import free_memory

# Host memory for pages on their way to disk, and as much for those on their way back.
_PASSING_BYTES = 256 << 20
_FEWEST_PASSING = 4

MakeHostStore = Callable[[int], HostStore]


def check_host_memory(config: EngineConfig, page_bytes: int) -> None:
    """Raises BadRequest if the host memory, which is taken at once and pinned, is more than is free or less than a page
    takes.
    """
    asked = config.kv_host_memory
    if asked is None:
        return
    if asked > (free := free_memory()):
        raise BadRequest(
            f"kv_host_memory is {asked / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of this machine's memory are free. "
            "Lower it.",
            param="kv_host_memory",
        )
    if asked < page_bytes:
        raise BadRequest(
            f"kv_host_memory has no room for a page, which takes {page_bytes} bytes. Raise it.", param="kv_host_memory"
        )


def page_store(
    host_store: MakeHostStore, config: EngineConfig, disk: PageDisk | None, page_bytes: int
) -> PageStore | None:
    """Pages move to and from disk through host memory, which needs some extra memory for that."""
    num_slots = (config.kv_host_memory or 0) // page_bytes
    if disk is None:
        return pinned_store(host_store, config, num_slots) if num_slots else None
    passing = _passing(page_bytes)
    return HostDiskStore(
        pinned_store(host_store, config, num_slots + 2 * passing),
        disk,
        num_slots=num_slots,
        num_incoming=passing,
        outlives=config.kv_persist,
    )


@contextmanager
def trial_stores(host_store: MakeHostStore, page_bytes: int) -> Iterator[TrialStores]:
    host = host_store(TRIAL_PAGES)
    with closing(host), trial_disk(_Slots(host), page_bytes) as (store, _):
        yield TrialStores(page_bytes, host, host.most_staged, store, _passing(page_bytes))


class _Slots:
    """Host memory below a GPU, in units of a disk's pages."""

    def __init__(self, host: HostStore) -> None:
        self._host = host

    def page(self, number: int) -> Bytes:
        return self._host.slot(number)


def _passing(page_bytes: int) -> int:
    return max(_FEWEST_PASSING, _PASSING_BYTES // page_bytes)


def pinned_store(host_store: MakeHostStore, config: EngineConfig, num_slots: int) -> HostStore:
    """Raises ModelError if there is not enough memory to pin."""
    try:
        return host_store(num_slots)
    except MemoryError as error:
        disk = config.tier_settings[0]
        advice = f"Free some, or leave {disk} out" if config.kv_host_memory is None else "Lower kv_host_memory"
        raise ModelError(f"{error}. {advice}.") from error
