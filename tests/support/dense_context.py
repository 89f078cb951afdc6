"""The plainest context: one sequence, every score and every step of a state written out. The oracle that faster ones
are held to.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ostro.models.architecture import AttentionSpec
from ostro.torch_models.base import Model, RecurrentMixer


class DenseContext:
    """Keeps the keys and values of one sequence, so that it may be fed whole, in chunks or token by token."""

    def __init__(self) -> None:
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.states = DenseStates()

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        if layer in self.cache:
            past_k, past_v = self.cache[layer]
            k, v = torch.cat((past_k, k)), torch.cat((past_v, v))
        self.cache[layer] = (k, v)
        return self._attend(q, k, v, spec, sinks)

    def attend_stored(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        return self._attend(q, *self.cache[layer], spec, None)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
        group = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores.masked_fill(~_visible(len(q), len(k), spec), float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, len(q), 1)), -1)
        weights = scores.softmax(-1)[..., : len(k)]
        return torch.einsum("hqk,khd->qhd", weights, values.float()).flatten(1).to(q.dtype)


class DenseStates:
    """Keeps all inputs of a layer's convolution, and the matrices that its rows have made."""

    def __init__(self) -> None:
        self.inputs: dict[int, Tensor] = {}
        self.matrices: dict[int, Tensor] = {}

    def mix(self, mixer: RecurrentMixer, *rows: Tensor) -> Tensor:
        return mixer.plain(self, *rows)

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        before = self.inputs.get(layer, x.new_zeros(len(weight) - 1, x.shape[1]))
        self.inputs[layer] = known = torch.cat((before, x))
        first = len(before) - len(weight) + 1
        windows = [known[first + row : first + row + len(weight)] for row in range(len(x))]
        rows = torch.stack([(window.float() * weight).sum(0) for window in windows])
        return rows if bias is None else rows + bias

    def recur(self, layer: int, size: tuple[int, int, int], advance: Callable[..., Tensor], *read: Tensor) -> Tensor:
        matrices = self.matrices.setdefault(layer, torch.zeros(1, *size))
        return torch.cat([advance(matrices, *(own[row : row + 1] for own in read)) for row in range(len(read[0]))])


def _visible(queries: int, keys: int, spec: AttentionSpec) -> Tensor:
    """[queries, keys]; the queries are the last of the positions that the keys have."""
    at, of = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)
    same_chunk = at // (spec.chunk or keys) == of // (spec.chunk or keys)
    return (at >= of) & (at - of < (spec.window or keys)) & same_chunk


@torch.inference_mode()
def dense_logits(model: Model, ids: list[int], *, chunk: int | None = None) -> Tensor:
    """[tokens, vocab] of one sequence, fed whole or in chunks."""
    ctx, chunk = DenseContext(), chunk or len(ids)
    rows = []
    for start in range(0, len(ids), chunk):
        part = torch.tensor(ids[start : start + chunk])
        positions = torch.arange(start, start + len(part))
        rows.append(model.logits(model(part, positions, ctx)))
    return torch.cat(rows)
