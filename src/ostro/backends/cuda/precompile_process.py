"""The process that `precompiling` starts: lists the kernels that a model's steps will need, and compiles each in a fork
of this process, into Triton's cache. Has no GPU: the model is built on the meta device, and nothing is launched.

Each binary has a fork of its own, which inherits all imports: if the compiler crashes, that costs this binary alone.
"""

import gc
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

import msgspec

from ostro.backends.cuda.precompiling import Compiled, Request, frame, receive
from ostro.kernels.gpu.signatures import (
    build,
    build_driver,
    compile_for,
    hash_compiler,
    kernel_name,
    recorded,
    warm_up,
)
from ostro.processes.spawn import die_with_parent
from ostro.system.machine import num_cpus

# More processes would take some 200 MB of memory each, and save no time on the slowest binary.
_MOST_PROCESSES = 32

if TYPE_CHECKING:
    import torch

    from ostro.backends.cuda.part import GpuPart


def main(descriptor: int) -> None:
    die_with_parent()
    # The process that loads the model logs all there is to log about it.
    logging.disable()
    with socket.socket(fileno=descriptor) as connection, suppress(OSError, EOFError):
        moments = {"started": time.time()}
        driver = _fork(build_driver)
        hashing = Thread(target=hash_compiler)
        hashing.start()
        # Import all that `signatures` needs before the request comes.
        import ostro.backends.cuda.runner  # noqa: F401

        moments["imported"] = time.time()
        # Ended before anything is forked again.
        hashing.join()
        os.waitpid(driver, 0)
        # Most of this is the same for any GPU, and there is time until the actual one is known.
        compile_for("9.0")
        with suppress(Exception):
            warm_up(())
        moments["ready"] = time.time()
        while True:
            request = msgspec.msgpack.decode(receive(connection), type=Request)
            moments["asked"] = time.time()
            connection.sendall(frame(_compiled(request, moments)))


def _compiled(request: Request, moments: dict[str, float]) -> Compiled:
    try:
        wanted = signatures(request)
        moments["listed"] = time.time()
        compiled = compile_all(wanted, processes=max(1, min(num_cpus() - 1, _MOST_PROCESSES)))
        moments["compiled"] = time.time()
        return msgspec.structs.replace(compiled, moments=moments)
    except Exception as error:  # noqa: BLE001  whatever is wrong with the model, loading it will tell
        return Compiled(0, {"": f"{type(error).__name__}: {error}"})


def signatures(request: Request) -> list[str]:
    """The signatures of all kernels that the runner will launch before the first step."""
    import torch

    compile_for(request.gpu.capability)
    with torch.inference_mode():
        return recorded(part_of(request, torch.device("meta")).launches(request.settings.kernel_choices, request.gpu))


def part_of(request: Request, device: "torch.device") -> "GpuPart":
    """The model on a device that stands for the GPU."""
    import torch

    from ostro.backends.cuda.part import GpuPart
    from ostro.backends.cuda.quantize import quantize_fp8
    from ostro.backends.cuda.runner import kv_format
    from ostro.backends.torch.devices import pick_dtype
    from ostro.torch_models.build import build_model

    settings = request.settings
    dtype = pick_dtype(settings.dtype, torch.device("cuda"))
    model = build_model(request.model, max_seq_len=settings.max_seq_len, dtype=dtype, device=device)
    if settings.quantize == "fp8":
        quantize_fp8(model)
    return GpuPart(
        model,
        page_size=settings.page_size,
        num_pages=1,
        max_batch_seqs=settings.max_batch_seqs,
        tokens=torch.empty(settings.max_batch_seqs, dtype=torch.int32, device=device),
        captured=0,
        deterministic=settings.deterministic,
        cascades=settings.cascade_attention,
        kv_dtype=kv_format(model, settings),
        gpu=request.gpu,
    )


def compile_all(wanted: Sequence[str], processes: int) -> Compiled:
    """Compiles signatures in order, at most `processes` at a time."""
    # Once, instead of in each fork.
    warm_up(wanted)
    # Otherwise a fork's first garbage collection would copy all that it shares.
    gc.freeze()
    waiting, running, failed, kernels = deque(wanted), dict[int, tuple[str, float]](), dict[str, str](), 0
    slowest = 0.0, ""
    while waiting or running:
        while waiting and len(running) < processes:
            signature = waiting.popleft()
            pid = _fork(lambda: build(signature))  # noqa: B023  called at once, in the fork
            running[pid] = signature, time.monotonic()
        pid, status = os.wait()
        signature, began = running.pop(pid)
        slowest = max(slowest, (time.monotonic() - began, kernel_name(signature)))
        if status == 0:
            kernels += 1
        else:
            failed[kernel_name(signature)] = f"status {os.waitstatus_to_exitcode(status)}"
    seconds, name = slowest
    return Compiled(kernels, failed, slowest=f"{name.rpartition('.')[2]} {seconds:.1f} s" if name else "")


def _fork(run: Callable[[], None]) -> int:
    """Forks a process that calls `run` and ends."""
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        status = 1
        try:
            run()
            status = 0
        finally:
            os._exit(status)
    return pid


if __name__ == "__main__":
    main(int(sys.argv[1]))
