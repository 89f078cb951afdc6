"""What the server keeps of a request is in the ledger, whatever it waits for: memory of the API process against
`ostro_held_bytes`. `bench/held_requests.py` measures the same for many small requests, and what they cost others.
"""

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from live_server import live_server

from holding import KINDS, SERVER, Holder, anonymous_bytes

NUMBER, SIZE = 24, 900_000
RATIO = 1.5
# What the interpreter and the C library keep of what they have freed, mostly tokenizers' and decoders' working memory.
SLACK = 12 << 20
KEY = "sk-held"
pytestmark = pytest.mark.full


# Between 12 and 118 MiB for 22 that are counted, from run to run: where the rest is has not been found out yet.
UNEXPLAINED = pytest.mark.xfail(reason="memory that a preparation in the background leaves behind", strict=False)


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=UNEXPLAINED) if each == "background" else each for each in KINDS]
)
def test_memory_that_requests_take_is_in_the_ledger(kind: str, tmp_path: Path) -> None:
    """Items that a request referred to and the first events of streams were not."""
    env = {"OSTRO_API_KEY": f"{KEY},sk-other"}
    with live_server(tmp_path, *SERVER.arguments, faults=SERVER.faults, env=env) as server:
        url, pid = urlsplit(server.url), server.process.pid
        with Holder(url.hostname or "", url.port or 0, pid, KEY, size=SIZE) as holder:
            holder.begin(KINDS[kind])
            before, ledger = anonymous_bytes(pid), holder.ledger()
            holder.hold(KINDS[kind], NUMBER)
            grown, counted = anonymous_bytes(pid) - before, holder.ledger() - ledger
    assert counted >= NUMBER * SIZE / 2, "they are held"
    assert grown <= RATIO * counted + SLACK, (grown >> 20, counted >> 20)
