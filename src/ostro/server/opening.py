"""Startup messages until the server is ready: where it listens, how far loading is, and how to use it.

Knows the log and the terminal; starts nothing.
"""

import ipaddress
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from ostro.pool.pool import PoolState
from ostro.server.models.served import Models
from ostro.server.models.service import ModelService
from ostro.server.playground import browser

_REMIND_SECONDS = 10.0
_QUESTION = "What is the capital of France?"


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def local_url(self) -> str:
        """The URL for programs on this machine."""
        return browser.page_url(self.host, self.port).removesuffix("/")

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach it."""
        return ipaddress.ip_address(self.host).is_loopback


class Opening:
    """Call `tell` repeatedly: it reports each event once, when it has happened."""

    def __init__(
        self,
        models: Models,
        address: Address,
        *,
        has_page: bool,
        has_keys: bool,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`say` shows text to a person at a terminal; None if there is none."""
        self._models = models
        self._address = address
        self._has_page = has_page
        self._has_keys = has_keys
        self._say = say
        self._log = structlog.stdlib.get_logger("ostro.server")
        self._began = self._reminded = time.monotonic()
        self.is_listening = False
        """Whether `listening` was logged, for programs that wait for it. Requests are accepted even before."""
        self._is_over = False

    def tell(self) -> None:
        if self._is_over:
            return
        if not self.is_listening and self._is_found():
            self.is_listening = True
            self._tell_address()
        if self._models.state is PoolState.READY:
            self._is_over = True
            self._tell_use()
        else:
            self._remind()

    def _is_found(self) -> bool:
        """Whether the only model's files are present. With several models, the others work even if one is missing."""
        return (only := self._models.only) is None or only.service is not None

    def _tell_address(self) -> None:
        address = self._address
        self._log.info("listening", url=address.url, model=self._models.first_name)
        if not self._has_keys and not address.is_private:
            self._log.warning(
                "no API key is set: anyone who can reach this address can use the server", url=address.url
            )
        if self._has_page:
            # The page can be opened while the model loads.
            page = f"{address.local_url}/"
            if self._say is None:
                self._log.info(f"open {page} in a browser")
            if browser.is_at_hand(terminal=sys.stdin.isatty() and sys.stderr.isatty()):
                browser.show(page)

    def _remind(self) -> None:
        """Logs now and then that a slow start is still in progress."""
        now = time.monotonic()
        if now - self._reminded < _REMIND_SECONDS:
            return
        self._reminded = now
        only = self._models.only
        fetching = only is not None and only.state is PoolState.FETCHING
        if fetching and self._say is not None:
            # There is a progress bar already.
            return
        doing = "fetching" if fetching else "loading"
        self._log.info(f"still {doing} {self._models.first_name}", seconds=round(now - self._began))

    def _tell_use(self) -> None:
        if self._say is not None:
            self._say(self._how_to_use())

    def _how_to_use(self) -> str:
        url = self._address.local_url
        page = f"{url}/" if self._has_page else "off: start with --ui to chat in a browser"
        key = "  Set OSTRO_API_KEY there to one of this server's keys.\n" if self._has_keys else ""
        return (
            f"\n  Page   {page}\n  API    {url}/v1\n\n"
            f"  Try it in another terminal:\n\n{self._curl(url)}\n{key}\n"
            "  Ctrl-C stops the server.\n"
        )

    def _curl(self, url: str) -> str:
        """A command that works without changes."""
        key = ' -H "Authorization: Bearer $OSTRO_API_KEY"' if self._has_keys else ""
        first = self._models.pool.catalog.default
        service = None if first is None else self._models.pool.view_of(first).service
        if service is None:
            # The models are only known once their roots have been listed.
            return f"curl {url}/v1/models{key}"
        path, body = _example(service)
        return f"curl {url}{path} -H 'Content-Type: application/json'{key} \\\n  -d '{json.dumps(body)}'"


def _example(service: ModelService) -> tuple[str, dict[str, object]]:
    """A request that the model can answer."""
    if service.ranks:
        return "/v1/rerank", {"query": _QUESTION, "documents": ["It is Paris.", "It is raining."]}
    if service.info is not None and not service.info.generates:
        return "/v1/embeddings", {"input": _QUESTION}
    if service.tokenizer.chat_template is None:
        return "/v1/completions", {"prompt": "The capital of France is", "max_tokens": 32}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": _QUESTION}], "max_tokens": 100}
