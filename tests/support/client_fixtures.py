"""One server for the tests of client libraries, which answers from their scripts."""

from collections.abc import Iterator

import pytest
from live_server import LiveServer


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    # Here, since it loads a tokenizer, and every process of the tests imports this module.
    from client_process import SCRIPTS

    with SCRIPTS.served(tmp_path_factory.mktemp("scripted")) as live:
        yield live
