"""Methods made from descriptions of endpoints: same name, arguments and documentation."""

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import TypeVar

Method = TypeVar("Method", bound=Callable[..., object])


def documented(method: Method, endpoint: Callable[..., object]) -> Method:
    """The method, with what `help` shows of the endpoint; what it gives is the client's, and not a description."""
    update_wrapper(method, endpoint)
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [this, *inspect.signature(endpoint).parameters.values()]
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return method
