"""What the server keeps of a request is in the ledger, whatever it waits for: memory of the API process against
`ostro_held_bytes`. `bench/held_requests.py` measures the same for many small requests, and what they cost others.
"""

import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from live_server import live_server

from holding import KINDS, SERVER, Holder, anonymous_bytes

NUMBER, SIZE = 24, 900_000
RATIO = 1.5
# What the interpreter and the C library keep of what they have freed, mostly tokenizers' and decoders' working memory.
SLACK = 12 << 20
SETTLE_SECONDS = 60.0
KEY = "sk-held"
pytestmark = pytest.mark.full


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_requests_take_is_in_the_ledger(kind: str, tmp_path: Path) -> None:
    """Items that a request referred to and the first events of streams were not."""
    env = {"OSTRO_API_KEY": f"{KEY},sk-other"}
    with live_server(tmp_path, *SERVER.arguments, faults=SERVER.faults, env=env) as server:
        url, pid = urlsplit(server.url), server.process.pid
        with Holder(url.hostname or "", url.port or 0, pid, KEY, size=SIZE) as holder:
            holder.begin(KINDS[kind])
            before, ledger = anonymous_bytes(pid), holder.ledger()
            holder.hold(KINDS[kind], NUMBER)
            # Those in the background are still being prepared, which takes memory for as long as it lasts.
            deadline = time.monotonic() + SETTLE_SECONDS
            grown, counted = anonymous_bytes(pid) - before, holder.ledger() - ledger
            while grown > RATIO * counted + SLACK and time.monotonic() < deadline:
                time.sleep(0.2)
                grown, counted = anonymous_bytes(pid) - before, holder.ledger() - ledger
    assert counted >= NUMBER * SIZE / 2, "they are held"
    assert grown <= RATIO * counted + SLACK, (grown >> 20, counted >> 20)
