"""A torch model, or one rank's part of it, with its KV cache: carries out a step's plan. Knows no sequences."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ostro.backends.memory import second_layout_fits
from ostro.backends.torch.step_plan import Forward, Logits
from ostro.kernels.paged_attention import KVCache, PagedAttention
from ostro.kernels.recurrent_state import StateCache, StepStates
from ostro.system.machine import free_memory
from ostro.torch_models.base import Model
from ostro.torch_models.decoder import Table
from ostro.torch_models.layers import Matrix
from ostro.torch_models.lora import Adapters


class TorchPart:
    def __init__(
        self,
        model: Model,
        *,
        page_size: int,
        num_pages: int,
        num_states: int = 0,
        adapters: Adapters | None = None,
        ranks: int = 1,
    ) -> None:
        """One of `ranks`, each of which has a process on this machine."""
        shape, parameter = model.shape, next(model.parameters())
        self.model, self.adapters, self.page_size = model, adapters, page_size
        self.device = parameter.device
        heads = [(own.num_kv_heads, own.head_dim) for own in map(shape.of_layer, range(shape.num_layers))]
        self.cache = KVCache.of_heads(heads, num_pages * page_size, lambda sizes: _zeros(sizes, parameter))
        self.states = StateCache(model.states, num_states, lambda size, exact: _state(size, parameter, exact))
        self._packed, self._ranks = False, ranks
        self._hidden = parameter.new_empty(0)

    def forward(self, step: Forward) -> Tensor:
        """Hidden states of all tokens in the step. Idempotent except for the copies, if layers keep no states."""
        if not self._packed and len(step.ids) > 1:
            self._pack_weights()
        if self.adapters is not None:
            self.adapters.begin(step.adapters)
        self._copy_pages(step.copies)
        for source, target in step.state_copies:
            self.states.copy(source, target)
        if step.fresh:
            self.states.clear(step.fresh)
        states = StepStates(self.states, step.states, self.device) if step.states else None
        self._hidden = self.model(
            torch.tensor(step.ids, device=self.device),
            torch.tensor(list(step.positions()), device=self.device),
            PagedAttention(self.cache, step.pieces, self.page_size, masks=step.masks, states=states),
        )
        return self._hidden

    def carry_out(self, message: object) -> None:
        """Carries out a message from the first rank."""
        match message:
            case Forward():
                self.forward(message)
            case Logits():
                self.logits(message)

    def logits(self, asked: Logits) -> Tensor:
        """Logits of the asked tokens of the latest step."""
        return self.model.logits(self._hidden if asked.rows is None else self._hidden[asked.rows])

    def _pack_weights(self) -> None:
        """Trades memory for speed once several tokens are computed together, unless memory is short."""
        self._packed = True
        modules = self.model.modules()
        matrices = [each for each in modules if isinstance(each, Matrix) and not isinstance(each, Table)]
        # The other ranks need as much of the same memory.
        size = self._ranks * sum(matrix.weight.nbytes for matrix in matrices)
        if self.device.type == "cpu" and second_layout_fits(size, free_memory()):
            for matrix in matrices:
                matrix.pack()

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        size = self.page_size
        for source, target in copies:
            self.cache.copy(source * size, target * size, size)


def _state(size: tuple[int, ...], like: Tensor, exact: bool) -> Tensor:
    """Zeros for a part of all slots, in float32 or like the parameter."""
    return _zeros(size, like if not exact else like.new_empty(0, dtype=torch.float32))


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros that on a CPU take no memory until they are touched."""
    if like.device.type == "cpu" and like.dtype == torch.float32:
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.zeros(shape, dtype=like.dtype, device=like.device)
