"""The server that a client talks to: address, keys, timeouts, and when to try again. The parts of a client that do no
I/O.
"""

import os
import random
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from ipaddress import ip_address
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from ostro.client.calls import Question
from ostro.errors import (
    BadRequest,
    BodyTimeout,
    ModelError,
    OstroError,
    RequestTimeout,
    ServerError,
    TryLater,
    Unavailable,
    Unreachable,
)
from ostro.schemas.models import Readiness


def check_key(key: str) -> str | None:
    """None for an empty key; raises BadRequest for one that cannot be sent in a header."""
    if not (key.isascii() and key.isprintable()):
        raise BadRequest("A key must be printable ASCII on one line. Check the given key.", param="api_key")
    return key or None


def key_in_environment(name: str) -> str:
    """The first key of a variable that may list several, as a server's does. Empty if there is none."""
    return os.environ.get(name, "").partition(",")[0].strip()


_FIRST_SECONDS = 0.5
_MOST_SECONDS = 8.0
# If the server asks to wait longer than this, give up.
_MOST_PATIENCE_SECONDS = 60.0
_BAD_GATEWAY = 502


class Tries:
    """The attempts of one call: whether and when to retry. Does not wait itself."""

    def __init__(self, *, max_retries: int, timeout: float) -> None:
        self._left = max_retries
        self._num_failed = 0
        self._deadline = time.monotonic() + timeout

    @property
    def remaining(self) -> float:
        """Seconds until the timeout; always positive, to serve as an attempt's own timeout."""
        return max(self._deadline - time.monotonic(), 0.001)

    def wait_after(self, error: OstroError) -> float:
        """Seconds to wait before the next attempt; raises the error if there should be none."""
        seconds = self._seconds(error)
        if self._left <= 0 or not _is_transient(error) or seconds > min(self.remaining, _MOST_PATIENCE_SECONDS):
            raise error
        self._left -= 1
        self._num_failed += 1
        return seconds

    def _seconds(self, error: OstroError) -> float:
        """At least as long as the server asks, with jitter to spread out clients that were refused together."""
        backoff = min(_FIRST_SECONDS * 2**self._num_failed, _MOST_SECONDS) * random.uniform(0.5, 1.0)
        asked = error.retry_after * random.uniform(1.0, 1.1) if isinstance(error, TryLater) else 0.0
        return max(float(backoff), asked)


def _is_transient(error: OstroError) -> bool:
    """Whether a retry may succeed.

    A request that failed in the server (500) or took too long there (504) would do so again.
    """
    if isinstance(error, ServerError) and error.status == _BAD_GATEWAY:
        return True
    return isinstance(error, TryLater | BodyTimeout | Unreachable)


_CONNECT_SECONDS = 10.0
_MOST_IDLE = 64


@dataclass(frozen=True)
class Target:
    url: str
    """The server's URL, without /v1 and without a trailing slash."""
    key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    max_retries: int = 2

    @classmethod
    def of(cls, base_url: str, api_key: str | None, admin_key: str | None, timeout: float, max_retries: int) -> Self:
        """Raises BadRequest for invalid values; omitted keys are read from the environment."""
        if not timeout > 0:
            raise BadRequest(f"timeout must be above 0 seconds, got {timeout}.", param="timeout")
        if max_retries < 0:
            raise BadRequest(f"max_retries must be at least 0, got {max_retries}.", param="max_retries")
        url = check_address(base_url).removesuffix("/v1")
        key = check_key(key_in_environment("OSTRO_API_KEY") if api_key is None else api_key)
        admin = check_key(key_in_environment("OSTRO_ADMIN_KEY") if admin_key is None else admin_key)
        return cls(url, key, admin, timeout, max_retries)

    def tries(self) -> Tries:
        return Tries(max_retries=self.max_retries, timeout=self.timeout)

    def request(self, question: Question, timeout: float) -> dict[str, Any]:
        """The arguments of httpx's `stream`."""
        return {
            "method": question.method,
            "url": self.url + question.path,
            "headers": self._headers(question),
            "content": question.content,
            "timeout": httpx.Timeout(timeout, connect=min(timeout, _CONNECT_SECONDS)),
        }

    def options(self) -> dict[str, Any]:
        """The options of httpx's client. No proxies for local servers; no TLS setup, which is slow, unless needed."""
        return {
            "trust_env": not self._is_local,
            "verify": ssl.create_default_context() if self.url.lower().startswith("https:") else False,
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=_MOST_IDLE),
        }

    @contextmanager
    def translated_errors(self, timeout: float) -> Iterator[None]:
        """Translates connection errors into ours."""
        try:
            yield
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise RequestTimeout(f"{self.url} was silent for {timeout:.3g} s. Allow a longer timeout.") from error
        except httpx.ConnectTimeout as error:
            raise Unreachable(f"{self.url} cannot be reached: it does not respond. Is the address right?") from error
        except httpx.ConnectError as error:
            raise Unreachable(f"{self.url} cannot be reached: {_why(error)}. Is the server up?") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unreachable(
                f"{self.url} broke off: {_why(error)}. Ask again; the server's log may say why."
            ) from error

    @cached_property
    def _is_local(self) -> bool:
        host = urlsplit(self.url).hostname or ""
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def _headers(self, question: Question) -> Mapping[str, str]:
        key = (self.admin_key if question.for_admins else None) or self.key
        headers = {"Accept": question.accept, "User-Agent": "ostro"}
        if question.content:
            headers["Content-Type"] = "application/json"
        return headers if key is None else headers | {"Authorization": f"Bearer {key}"}


class Awaited:
    """A server that should become ready: interprets its answers and their absence."""

    pause = 0.2

    def __init__(self, target: Target, timeout: float) -> None:
        self._url = target.url
        self._timeout = timeout
        self._tries = Tries(max_retries=0, timeout=timeout)

    def is_over(self, found: Readiness | Unreachable | RequestTimeout) -> bool:
        """Whether it is ready; raises OstroError if it never will be, or not in time."""
        state = found.status if isinstance(found, Readiness) else "not answering"
        if state == "failed":
            raise ModelError(f"{self._url} could not load its model. Its log says why.")
        if state != "ready" and self._tries.remaining <= self.pause:
            raise Unavailable(f"{self._url} was still {state} after {self._timeout:g} s. Its log says more.")
        return state == "ready"


def check_address(url: str) -> str:
    """Strips a trailing slash; raises BadRequest if it is not a server address."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise BadRequest(f"The address is invalid: {error}. Write it as http://HOST:PORT.", param="base_url") from error
    try:
        known = parts.hostname is not None and parts.port != 0
    except ValueError:
        known = False
    if parts.username is not None or parts.password is not None:
        raise BadRequest("Addresses appear in messages: pass the key separately, not in the URL.", param="base_url")
    if not known or parts.scheme.lower() not in ("http", "https") or parts.query or parts.fragment:
        raise BadRequest(f"{url!r} is not a server address. Write it as http://HOST:PORT.", param="base_url")
    return url.rstrip("/")


def _why(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
