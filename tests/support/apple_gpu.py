"""An Apple GPU as torch shows it, on a machine without one: its tensors lie in the CPU's memory, but say that they are
on `mps`, do not mix with the CPU's, and know no float64. Only what torch itself would do on the device is replaced.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

MPS, CPU = torch.device("mps"), torch.device("cpu")


class _AppleTensor(Tensor):
    held: Tensor
    device = property(lambda self: MPS)

    @staticmethod
    def __new__(cls, inner: Tensor) -> "_AppleTensor":
        assert inner.dtype != torch.float64, "an Apple GPU has no float64"
        # As a view, it may have a base that was made outside inference mode.
        with torch.inference_mode(False):
            made: _AppleTensor = Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                device=CPU,
            )
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        assert "for_cpu" not in str(func), f"{func} runs on CPUs only"
        assert "mkldnn" not in str(func), f"{func} runs on CPUs only"
        if func.__name__.split(".")[0] not in ("_to_copy", "copy_", "index"):
            # Apart from these, numbers are the only tensors of the CPU that torch takes.
            others = [each for each in tree_flatten((args, kwargs))[0] if type(each) is Tensor and each.dim()]
            assert not others, f"{func} mixes devices"
        found = func(*tree_map(_inner, args), **tree_map(_inner, kwargs or {}))
        if func._schema.is_mutable:
            return args[0]
        return tree_map(lambda each: _AppleTensor(each) if isinstance(each, Tensor) else each, found)


def _inner(value: Any) -> Any:
    if isinstance(value, _AppleTensor):
        return value.held
    return CPU if _is_mps(value) else value


def _is_mps(value: object) -> bool:
    return value == "mps" if isinstance(value, str) else value == MPS


# These only take or return devices.
_KNOWING = (torch.device, torch._C._nn._parse_to)


class _Torch(TorchFunctionMode):
    """Makes tensors on the device, and takes them off it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        ours = bool(args) and isinstance(args[0], _AppleTensor)
        if ours and (func is Tensor.cpu or (func is Tensor.to and CPU in (*args, *kwargs.values()))):
            return func(*tree_map(_inner, args), **tree_map(_inner, kwargs)).clone()
        if func not in _KNOWING and any(map(_is_mps, (*args, *kwargs.values()))):
            found = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
            return args[0] if ours and found is args[0].held else _AppleTensor(found)
        return func(*args, **kwargs)


@contextmanager
def apple_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with _Torch():
        yield
