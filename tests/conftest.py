"""Hypothesis profiles, signals, certificates, and the device for tests of GPU kernels.

`default` tries new examples in each run; `ci` repeats the same examples, so a red build stays red.
"""

import functools
import gc
import os
import signal
import ssl
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import certifi
import pytest
import torch
from hypothesis import settings
from triton_device import DEVICE

pytest_plugins = ("browser_fixtures", "client_fixtures")

# An extra. `tests/jax` itself would be found as a package named jax.
collect_ignore_glob = [] if find_spec("jaxlib") else ["jax/*"]

# Two loaded cores make any time limit on a single example a source of false alarms.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")

# `make test &` and `nohup make test` have signals ignored, and whatever is started inherits that. A handler is not
# inherited: the programs that tests interrupt begin with the defaults, as they would in a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

_make_context = ssl.create_default_context


@functools.cache
def _public_trust() -> ssl.SSLContext:
    return _make_context(cafile=certifi.where())


def _create_default_context(*args: Any, **options: Any) -> ssl.SSLContext:
    return _make_context(*args, **options) if args or options != {"cafile": certifi.where()} else _public_trust()


# Every client of httpx parses all public certificates, which takes 40 ms, and tests speak plain HTTP.
ssl.create_default_context = _create_default_context


def pytest_collection_finish() -> None:
    """What has been imported stays: no collection of garbage need look at it again, which would take half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def what_stays_open_is_noticed() -> Iterator[None]:
    """At the end of the module that left it open, and not in whatever test runs when garbage is next collected."""
    yield
    gc.collect()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Whatever ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    return DEVICE
