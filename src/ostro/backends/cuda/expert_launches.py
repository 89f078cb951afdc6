"""Launches that compile the kernels of mixtures of experts: see `compiling`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from ostro.backends.cuda.layer_plan import LayerPlan, MixturePlan, kinds
from ostro.kernels.gpu.experts import Ending, Shared, add_up, inner_rows, outer_rows
from ostro.kernels.gpu.routing import Routed, by_expert, empty_tiles, route, tile_height
from ostro.kernels.gpu.single_experts import single_inner, single_outer

Job: TypeAlias = Callable[[], object]
Jobs: TypeAlias = Iterator[Job]

# With these, tiles have every height that they may have.
_ROWS = tuple(1 << power for power in range(1, 15))


def mixture_launches(layers: Sequence[LayerPlan], like: Tensor, pdl: bool) -> Jobs:
    """`like` is a row of the stream."""
    for layer in kinds(layers):
        if isinstance(layer.mlp, MixturePlan):
            yield from _launches(layer.mlp, layer, like, pdl)


def _launches(mixture: MixturePlan, layer: LayerPlan, like: Tensor, pdl: bool) -> Jobs:
    count, chosen, inner = mixture.count, mixture.chosen, mixture.down.weight.shape[2]
    x, logits = like.new_zeros(1, len(like)), like.new_zeros(1, mixture.router.key.out_features)
    shared = None if mixture.shared is None else Shared(x, logits[:, count] if mixture.gates_shared else None)
    ending = Ending(shared, x.clone(), layer.multiplier) if layer.mlp_post_norm is None else Ending(shared)
    norm = layer.mlp_norm if layer.folds else None
    yield partial(single_inner, x, logits, mixture.up, chosen, mixture.activation, norm=norm, pdl=pdl)
    rows = like.new_zeros(chosen, inner)
    yield partial(single_outer, rows, logits, mixture.down, normalized=mixture.normalized, ending=ending, pdl=pdl)
    yield partial(route, logits, count, chosen, normalized=mixture.normalized, pdl=pdl)
    routed = Routed(integers(like, 1, chosen), like.new_zeros(1, chosen, dtype=torch.float32))
    yield partial(add_up, like.new_zeros(chosen, len(like)), routed, ending, pdl=pdl)
    heights = {tile_height(rows * chosen, count): rows for rows in reversed(_ROWS)}
    for height, number in heights.items():
        # There are none, so that nothing is multiplied.
        tiles = empty_tiles(like.device, number * chosen, count, height)
        x = like.new_zeros(number, len(like))
        yield partial(inner_rows, x, mixture.up, tiles, chosen, mixture.activation, pdl=pdl)
        yield partial(outer_rows, like.new_zeros(number * chosen, inner), mixture.down, tiles, pdl=pdl)
    for number in _ROWS:
        yield partial(by_expert, integers(like, number, chosen), count, tile_height(number * chosen, count), pdl=pdl)


def integers(like: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=like.device)
