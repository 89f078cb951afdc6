"""Hypothesis profiles, signals, certificates, and the device for tests of GPU kernels.

A property test tries an eighth of its examples, and all of them with `HYPOTHESIS_PROFILE=full`, as in `make test-all`.
Each run tries new ones, except in CI, which repeats the same examples, so a red build stays red.
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
from examples import IS_FULL, examples
from hypothesis import is_hypothesis_test, settings
from products import mark_cases, mark_products

pytest_plugins = ("browser_fixtures", "client_fixtures")

# JAX is an extra, and Triton there is for Linux alone. `tests/jax` itself would be found as a package named jax.
HAS_TRITON = find_spec("triton") is not None
collect_ignore_glob = [*([] if find_spec("jaxlib") else ["jax/*"]), *([] if HAS_TRITON else ["gpu/*"])]

# Before any test's module declares a kernel: that is when Triton decides whether it is interpreted.
if HAS_TRITON:
    import triton_device  # noqa: F401

# Two loaded cores make any time limit on a single example a source of false alarms.
settings.register_profile("ostro", deadline=None, derandomize="CI" in os.environ, max_examples=examples(100))
settings.load_profile("ostro")

# `make test &` and `nohup make test` have signals ignored, and whatever is started inherits that. A handler is not
# inherited: the programs that tests interrupt begin with the defaults, as they would in a terminal.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

PRODUCTS = frozenset({"backends", "gpu", "jax", "kernels", "models", "native", "parallel", "parity", "weights"})
"""Folders whose products of parameters `make test` does not run whole."""

_make_context = ssl.create_default_context


@functools.cache
def _public_trust() -> ssl.SSLContext:
    return _make_context(cafile=certifi.where())


def _create_default_context(*args: Any, **options: Any) -> ssl.SSLContext:
    return _make_context(*args, **options) if args or options != {"cafile": certifi.where()} else _public_trust()


# Every client of httpx parses all public certificates, which takes 40 ms, and tests speak plain HTTP.
ssl.create_default_context = _create_default_context


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Property tests with all their examples, and most cases of products, are part of the full matrices. Before `-m`
    selects by markers.
    """
    for item in items:
        is_property = isinstance(item, pytest.Function) and is_hypothesis_test(item.obj)
        if IS_FULL and (is_property or item.get_closest_marker("examples")):
            item.add_marker("full")
    mark_cases(items)
    mark_products(item for item in items if PRODUCTS.intersection(item.path.parts))


def pytest_collection_finish() -> None:
    """Freezes imported objects: garbage collection would otherwise spend half a second on them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def what_stays_open_is_noticed() -> Iterator[None]:
    """At the end of the module that left it open, and not in whatever test runs when garbage is next collected."""
    yield
    gc.collect()


@pytest.fixture(autouse=True, scope="session")
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers of tests are listed in a directory of their own, and not in that of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Whatever ran before in this process."""
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
