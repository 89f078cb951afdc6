"""The kernels of a mixture of experts on a GPU: their results against the model's own layer, and their times against
reading the weights that they need.

    python bench/kernels/experts.py                                    # Qwen3-30B-A3B's sizes, 1 to 4096 rows
    python bench/kernels/experts.py --config CONFIG --rows 1 8 --layers 8

Several layers take turns, so that no weight is read from the cache. Rows are random, and choose experts evenly; which
they hit is counted. `together` is a layer's mixture with all kernels overlapping as in a step; the others are timed
alone, without overlaps. `--search` also times other heights and shapes of tiles.

    python bench/kernels/experts.py --rows 8 64 256 4096 --search
"""

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from ostro.kernels.gpu import experts as kernel_module
from ostro.kernels.gpu import single_experts as single_module
from ostro.kernels.gpu.experts import Ending, Matrices, TileShape, add_up, inner_rows, outer_rows
from ostro.kernels.gpu.routing import by_expert, route, tile_height
from ostro.kernels.gpu.single_experts import single_inner, single_outer
from ostro.kernels.gpu.small_batch import UNUSABLE
from ostro.kernels.gpu.tilings import VectorTiling
from ostro.models.architecture import Architecture, Experts
from ostro.models.registry import describe
from ostro.torch_models import experts as twins

CONFIGS = Path(__file__).parents[1] / "configs"
BYTES_PER_SECOND = 4.3e12
ROUNDS = 5
# Of the largest number, between bfloat16 results that were rounded at different places.
TOLERANCE = 0.02


def random_layers(described: Experts, number: int) -> list[twins.Experts]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = [twins.Experts(described) for _ in range(number)]
    torch.set_default_dtype(before)
    for layer in made:
        for parameter in layer.parameters():
            parameter.data.normal_(0.0, 0.02)
    return made


def mixed(layer: twins.Experts, described: Experts, x: Tensor, logits: Tensor, *, pdl: bool) -> Tensor:
    """The mixture's output, computed as in `backends.cuda.fused`."""
    up, down = (Matrices(each.weight, each.bias) for each in (layer.up, layer.down))
    chosen = described.chosen
    if len(x) == 1:
        inner = single_inner(x, logits, up, chosen, described.activation, pdl=pdl)
        return single_outer(inner, logits, down, normalized=described.normalized, ending=Ending(), pdl=pdl)
    return mixed_rows(layer, described, x, logits, pdl=pdl)


def mixed_rows(layer: twins.Experts, described: Experts, x: Tensor, logits: Tensor, *, pdl: bool) -> Tensor:
    up, down = (Matrices(each.weight, each.bias) for each in (layer.up, layer.down))
    count, chosen = described.count, described.chosen
    routed = route(logits, count, chosen, normalized=described.normalized, pdl=pdl)
    rows = by_expert(routed.experts, count, tile_height(routed.experts.numel(), count), pdl=pdl)
    outer = outer_rows(inner_rows(x, up, rows, chosen, described.activation, pdl=pdl), down, rows, pdl=pdl)
    return add_up(outer, routed, Ending(), pdl=pdl)


def check(layer: twins.Experts, described: Experts, x: Tensor, logits: Tensor) -> float:
    """The largest difference to the layer's own result, as a share of its largest number."""
    expected = layer.mixed(x, logits[:, : described.count]).float()
    given = mixed(layer, described, x, logits, pdl=torch.cuda.get_device_capability() >= (9, 0)).float()
    return float((given - expected).abs().max() / expected.abs().max())


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Time of one call, in a graph of all."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    taken = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(float(start.elapsed_time(end)) * 1e3 / len(calls))
    return sorted(taken)[ROUNDS // 2]


def kernels(
    layers: Sequence[twins.Experts], described: Experts, x: Tensor, logits: Sequence[Tensor]
) -> dict[str, list[Callable[[], object]]]:
    """Each kernel's call for every layer."""
    count, chosen, act = described.count, described.chosen, described.activation
    found: dict[str, list[Callable[[], object]]] = {}

    def note(name: str, call: Callable[..., Tensor], *args: object, **options: object) -> Tensor:
        found.setdefault(name, []).append(partial(call, *args, **options))
        return call(*args, **options)

    for layer, scores in zip(layers, logits, strict=True):
        up, down = (Matrices(each.weight, each.bias) for each in (layer.up, layer.down))
        if len(x) == 1:
            inner = note("inner", single_inner, x, scores, up, chosen, act)
            note("outer", single_outer, inner, scores, down, normalized=described.normalized, ending=Ending())
            continue
        routed = route(scores, count, chosen, normalized=described.normalized)
        found.setdefault("route", []).append(partial(route, scores, count, chosen, normalized=described.normalized))
        height = tile_height(routed.experts.numel(), count)
        rows = by_expert(routed.experts, count, height)
        found.setdefault("by expert", []).append(partial(by_expert, routed.experts, count, height))
        inner = note("inner", inner_rows, x, up, rows, chosen, act)
        outer = note("outer", outer_rows, inner, down, rows)
        note("sum", add_up, outer, routed, Ending())
    return found


SHAPES = {
    "gated": {
        16: [(64, 128, 4, 3), (64, 128, 4, 5), (64, 64, 4, 10), (128, 64, 4, 3), (128, 64, 8, 6)],
        32: [(64, 128, 4, 2), (64, 128, 4, 4), (64, 64, 4, 9), (128, 64, 8, 5)],
        64: [(64, 128, 4, 2), (64, 64, 4, 8), (128, 64, 8, 5)],
        128: [(64, 64, 4, 3), (64, 64, 8, 3), (64, 128, 8, 3), (128, 64, 8, 3)],
    },
    "plain": {
        16: [(128, 128, 4, 3), (64, 128, 4, 5), (64, 64, 4, 10), (128, 64, 4, 10), (256, 64, 8, 6)],
        32: [(128, 128, 4, 2), (64, 128, 4, 4), (128, 64, 4, 9), (256, 64, 8, 5)],
        64: [(128, 128, 4, 2), (64, 64, 4, 6), (256, 64, 8, 4)],
        128: [(128, 64, 4, 3), (128, 64, 8, 3), (256, 64, 8, 3)],
    },
}
"""Further shapes: outputs, inputs, warps, stages."""


def search(layers: Sequence[twins.Experts], described: Experts, x: Tensor, logits: Sequence[Tensor]) -> None:
    count, chosen, act = described.count, described.chosen, described.activation
    routed = [route(own, count, chosen, normalized=described.normalized) for own in logits]
    usual = tile_height(routed[0].experts.numel(), count)
    for height in sorted({max(16, usual // 2), usual, min(128, 2 * usual)}):
        lists = [by_expert(own.experts, count, height) for own in routed]
        inner = [
            inner_rows(x, Matrices(each.up.weight, each.up.bias), rows, chosen, act)
            for each, rows in zip(layers, lists, strict=True)
        ]
        calls: dict[str, list[Callable[[], object]]] = {
            "gated": [
                partial(inner_rows, x, Matrices(each.up.weight, each.up.bias), rows, chosen, act)
                for each, rows in zip(layers, lists, strict=True)
            ],
            "plain": [
                partial(outer_rows, own, Matrices(each.down.weight, each.down.bias), rows)
                for own, each, rows in zip(inner, layers, lists, strict=True)
            ],
        }
        for kind, table in (("gated", kernel_module.GATED), ("plain", kernel_module.UNGATED)):
            for shape in (table[height], *map(TileShape._make, SHAPES[kind][height])):
                with patch.dict(table, {height: shape}):
                    try:
                        took = f"{microseconds(calls[kind]):8.1f} µs"
                    except UNUSABLE as error:
                        took = f"{type(error).__name__}"
                print(f"  height {height:3} {kind} {tuple(shape)!s:18} {took}", flush=True)


def search_single(layers: Sequence[twins.Experts], described: Experts, x: Tensor, logits: Sequence[Tensor]) -> None:
    """Together, with either tiling of one kernel, and with the kernels for several rows."""
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    for name, tilings in {
        "INNER": [(4, 256, 4), (8, 256, 4), (16, 256, 4), (8, 256, 8), (16, 256, 8), (2, 256, 2)],
        "OUTER": [(8, 256, 4), (8, 256, 8), (2, 256, 2), (4, 512, 4)],
    }.items():
        for tiling in tilings:
            with patch.object(single_module, name, VectorTiling(*tiling)):
                calls = [partial(mixed, *each, pdl=pdl) for each in _uses(layers, described, x, logits)]
                alone = kernels(layers, described, x, logits)["inner" if name == "INNER" else "outer"]
                print(
                    f"  {name} {tiling!s:12} together {microseconds(calls):6.1f} µs, alone {microseconds(alone):6.1f}"
                )
    calls = [partial(mixed_rows, *each, pdl=pdl) for each in _uses(layers, described, x, logits)]
    print(f"  as several rows {microseconds(calls):6.1f} µs", flush=True)


def _uses(
    layers: Sequence[twins.Experts], described: Experts, x: Tensor, logits: Sequence[Tensor]
) -> list[tuple[twins.Experts, Experts, Tensor, Tensor]]:
    return [(layer, described, x, own) for layer, own in zip(layers, logits, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIGS / "qwen3-30b-a3b.json")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 32, 64, 128, 256, 1024, 4096, 16384])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--search", action="store_true", help="time other heights and shapes of tiles, too")
    options = parser.parse_args()
    model = describe(json.loads(options.config.read_text(encoding="utf-8")))
    assert isinstance(model, Architecture)
    described = next(layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts))
    torch.manual_seed(0)
    layers = random_layers(described, options.layers)
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    size = (described.up.rows * described.up.columns + described.down.rows * described.down.columns) * 2
    with torch.inference_mode():
        for number in options.rows:
            x = torch.randn(number, model.shape.hidden_size, dtype=torch.bfloat16, device="cuda")
            logits = [layer.router(x) for layer in layers]
            worst = max(check(layer, described, x, own) for layer, own in zip(layers, logits, strict=True))
            assert worst < TOLERANCE, f"{number} rows differ by {worst:.3f} of the largest number"
            chosen = [own[:, : described.count].float().topk(described.chosen).indices for own in logits]
            hit = sum(len(each.unique()) for each in chosen) / len(chosen)
            floor = hit * size / BYTES_PER_SECOND * 1e6
            pairs = zip(layers, logits, strict=True)
            took = microseconds([partial(mixed, layer, described, x, own, pdl=pdl) for layer, own in pairs])
            flops = 2 * number * described.chosen * size / 2 / took / 1e6
            alone = {name: microseconds(calls) for name, calls in kernels(layers, described, x, logits).items()}
            parts = ", ".join(f"{name} {each:.1f}" for name, each in alone.items())
            print(
                f"rows={number:5} together {took:8.1f} µs ({floor / took:4.0%} of {hit:5.1f} experts' bytes, "
                f"{flops:5.0f} TFLOP/s); alone: {parts}; difference {worst:.4f}",
                flush=True,
            )
            if options.search:
                (search_single if number == 1 else search)(layers, described, x, logits)


if __name__ == "__main__":
    main()
