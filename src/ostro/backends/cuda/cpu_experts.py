"""Experts that the CPU computes for a model on a GPU: a program of the native core (`backends.native.expert_steps`),
and the way of rows there and back.

    GPU     router ─ hand_over ─ copy ┐                                         ┌ copy ─ added to the stream
            shared MLP, if there is one ────────────────────────────────────────┘
    CPU                               └ choose ─ expand ─ expert ─ combine ─────┘

The CPU's part is a CUDA host function: it is queued on a stream like a kernel, becomes part of graphs, and runs without
Python. On a CPU, which stands in for a GPU in tests, it is simply called.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ostro.backends.cuda.driver import launch_host_function
from ostro.backends.native.expert_steps import ExpertLowering
from ostro.kernels.cpu.program import Allocate, Program, RowwiseRun
from ostro.kernels.gpu.handover import hand_over
from ostro.kernels.gpu.routing import Routed
from ostro.torch_models.base import Model
from ostro.torch_models.experts import CpuExperts


class CpuMixtures:
    """The experts of some layers. One layer's are computed at a time, in the order of the stream's work."""

    def __init__(self, make: Callable[[Mapping[int, Allocate]], Program], device: torch.device) -> None:
        """`make` makes the program, with memory that the device can read and write."""
        pinned = partial(_zeros, pinned=device.type == "cuda")
        self.program = make(dict.fromkeys((ExpertLowering.GIVEN, ExpertLowering.SUMS), pinned))
        self._given = torch.from_numpy(self.program.buffer(ExpertLowering.GIVEN))
        self._sums = torch.from_numpy(self.program.buffer(ExpertLowering.SUMS))
        self._device = device
        self._staged = torch.zeros_like(self._given, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Graphs refer to those that they have captured.
        self._runs: dict[tuple[int, int], RowwiseRun] = {}

    def __del__(self) -> None:
        # What is queued would run in memory that has been freed.
        if getattr(self, "_stream", None) is not None:
            torch.cuda.synchronize(self._device)

    @property
    def layers(self) -> int:
        return len(self.program.spec.steps) // ExpertLowering.STEPS

    def attach(self, model: Model) -> None:
        """Has a model's layers use these."""
        modules = [module for module in model.modules() if isinstance(module, CpuExperts)]
        assert len(modules) == self.layers
        for layer, module in enumerate(modules):
            module.begin = partial(self._begin, layer, beside=module.shared is not None)
            module.formats = self.program.spec.precision.replace(", ", " and ")

    def _begin(
        self, layer: int, x: Tensor, experts: Tensor, weights: Tensor, slots: Tensor, *, beside: bool
    ) -> Callable[[], Tensor]:
        """See `CpuSums`. `beside` other work of the device, a stream of its own waits for the CPU."""
        sums = torch.empty(len(x), self._sums.shape[1], dtype=torch.float32, device=self._device)
        stream = self._stream if beside else None
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        most = len(self._given)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for start in range(0, len(x), most):
                part = slice(start, start + most)
                self._compute(layer, x[part], Routed(experts[part], weights[part]), slots[part], sums[part])

        # The allocator knows nothing of the other stream: it would give the memory of what nobody holds to this one's
        # next work, before the other one has read it.
        held = [x, experts, weights, slots]

        def wait() -> Tensor:
            if stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(stream)
            held.clear()
            return sums

        return wait

    def _compute(self, layer: int, x: Tensor, routed: Routed, slots: Tensor, sums: Tensor) -> None:
        rows = len(x)
        hand_over(x, routed, slots, self._staged)
        self._given[:rows].copy_(self._staged[:rows], non_blocking=True)
        run = self._run(layer, rows)
        if self._device.type == "cuda":
            launch_host_function(torch.cuda.current_stream(self._device).cuda_stream, run.function, run.argument)
        else:
            run()
        sums.copy_(self._sums[:rows], non_blocking=True)

    def _run(self, layer: int, rows: int) -> RowwiseRun:
        if (layer, rows) not in self._runs:
            first = layer * ExpertLowering.STEPS
            self._runs[layer, rows] = self.program.rowwise_run(first, first + ExpertLowering.STEPS, rows)
        return self._runs[layer, rows]


def _zeros(shape: tuple[int, int], *, pinned: bool) -> npt.NDArray[np.float32]:
    # The array keeps the tensor's memory.
    found: npt.NDArray[np.float32] = torch.zeros(shape, dtype=torch.float32, pin_memory=pinned).numpy()
    return found
