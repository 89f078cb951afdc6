"""Small tiers on temporary files, to time what copies take."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from ostro.backends.tiers.disk_store import DiskStore, HostPages
from ostro.backends.tiers.page_disk import PageDisk
from ostro.backends.tiers.page_file import PageFileUnusable, file_bytes, open_page_file
from ostro.engine.page_store import PageStore

TRIAL_PAGES = 64

_log = logging.getLogger(__name__)


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
def trial_disk(pages: HostPages, page_bytes: int) -> Iterator[tuple[DiskStore, PageDisk] | tuple[None, None]]:
    directory, limit = Path(tempfile.gettempdir()), file_bytes(TRIAL_PAGES, page_bytes)
    try:
        file = open_page_file(directory, None, identity=bytes(32), page_bytes=page_bytes, limit=limit)
    except PageFileUnusable as error:
        _log.warning("the disk is not measured: %s", error)
        yield None, None
        return
    disk = PageDisk(file)
    with closing(DiskStore(pages, disk, outlives=False)) as store:
        yield store, disk
