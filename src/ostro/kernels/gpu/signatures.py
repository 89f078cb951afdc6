"""Kernel launches as text, from which a process without a GPU can compile what the launches will need.

    recorded   calls that launch kernels, on tensors without memory ──> a signature for each binary they would compile
    build      a signature ──> the binary in Triton's cache, under the key that a launch will look up

A signature is what Triton itself writes about a launch for `JITFunction.preload`: types, alignment, constants and
options. Only for processes that never launch a kernel: what stands in for the driver knows a target and no device.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.runtime import JITFunction, driver

_WARP = 32

_log = logging.getLogger(__name__)


class _TargetOnly:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_for(capability: str) -> None:
    """From now on, this process compiles for NVIDIA GPUs of this capability, such as 9.0, and can launch nothing."""
    driver.set_active(_TargetOnly(GPUTarget("cuda", int(capability.replace(".", "")), _WARP)))


def recorded(calls: Iterable[Callable[[], object]]) -> list[str]:
    """The signatures of what the calls launch, in order and without repeats. A call that fails counts for what it
    launched before.
    """
    digest_sources()
    found: dict[str, None] = {}

    def note(*, compile: dict[str, Any], **_: object) -> bool:
        found[compile["specialization_data"]] = None
        # Neither compiled nor launched.
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        for call in calls:
            try:
                call()
            except Exception as error:  # noqa: BLE001  the launch itself will raise it again
                _log.debug("%s launches nothing: %s", call, error)
    finally:
        knobs.runtime.jit_cache_hook = before
    return list(found)


def kernel_name(signature: str) -> str:
    """The kernel's dotted name, with its module."""
    return str(json.loads(signature)["name"])


def build(signature: str) -> None:
    """Compiles a signature, unless the cache has it. Raises whatever Triton does."""
    kernel = _kernel(signature)
    _build_launcher(kernel.preload(signature))


def digest_sources() -> None:
    """Has Triton hash the sources of all kernels that are imported, one by one and each after those it calls. While one
    thread hashes a source, another may take its placeholder for the hash; and a hash includes a called kernel's
    constants only if that was hashed before. Either way, a launch would look up a key that nobody has compiled.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("ostro.kernels.gpu."):
            for each in vars(module).values():
                if isinstance(each, JITFunction):
                    _digest(each)


def _digest(kernel: JITFunction[Any]) -> None:
    if kernel.hash is not None:
        return
    known = kernel.fn.__globals__
    for name in kernel.fn.__code__.co_names:
        called = known.get(name)
        if isinstance(called, JITFunction) and called is not kernel:
            _digest(called)
    _ = kernel.cache_key


def prepare_keys() -> None:
    """Has Triton compute what the keys of all kernels that are imported have in common, in a thread of its own: no
    kernel may be launched meanwhile.
    """
    hash_compiler()
    digest_sources()


def hash_compiler() -> None:
    """Has Triton hash itself for the keys of its cache: its library of 300 MB, which takes up to a second. May run in a
    thread of its own while others import or wait.
    """
    with suppress(ImportError, OSError):
        for module in ("triton.runtime.cache", "triton.compiler.compiler"):
            if (key := getattr(import_module(module), "triton_key", None)) is not None:
                key()
                return


def warm_up(wanted: Iterable[str]) -> None:
    """Has Triton compute what it caches in memory for later compilations: its own hash, the assembler's version, and
    the hash of each kernel's source.
    """
    triton.compile(ASTSource(_empty_kernel, {}), target=driver.active.get_current_target())
    for kernel in {kernel_name(each): _kernel(each) for each in wanted}.values():
        _digest(kernel)


def build_driver() -> None:
    """Compiles the library through which Triton calls the CUDA driver, for the process that will need it."""
    with suppress(Exception):
        nvidia.CudaUtils()


@triton.jit
def _empty_kernel() -> None:
    pass


def _kernel(signature: str) -> Any:
    module, _, name = kernel_name(signature).rpartition(".")
    return getattr(import_module(module), name)


def _build_launcher(compiled: Any) -> None:
    """Up to Triton 3.6, a C compiler makes a launcher for each signature's types, which is cached as well."""
    if hasattr(nvidia, "make_launcher"):
        with suppress(Exception):
            nvidia.CudaLauncher(compiled.src, compiled.metadata)
