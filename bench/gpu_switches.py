"""What each optional way to compute a step is worth on one GPU: a model of a named shape, weights random.

    python bench/gpu_switches.py single batch8 nano --config bench/configs/qwen3-0.6b.json
    python bench/gpu_switches.py shared --switches cascade --config bench/configs/llama-3.1-8b.json
    python bench/gpu_switches.py batch8 --switches slices --always choices mixed splits --config …

One engine is measured with none of the switches, with each of them alone, and with all, by turns: each variant keeps
its own graphs, so that the runs which count capture nothing. Figures are the better of two runs, and ratios are to the
variant with none. Switches that are `--always` on are on in every variant.

    choices    our own kernels where measuring says that they are faster, instead of where the shipped file says so
    slices     the slice kernel where it is chosen, instead of what `--before` has or, for other matrices, what is
               measured as the fastest without it
    mixed      steps with prompts of few tokens as graphs
    cascade    rows that share a prefix read it together
    splits     decode attention in long parts
"""

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from gpu import defaults, engine, run
from workloads import WORKLOADS


class Switches:
    """The switches of an engine that was made with all of them on. `unsliced` replaces choices of the slice kernel."""

    def __init__(self, core, unsliced=None) -> None:  # type: ignore[no-untyped-def]
        from ostro.backends.cuda.choices import Choices, known
        from ostro.backends.cuda.measuring import this_gpu
        from ostro.backends.cuda.mixed_graphs import max_graph_tokens

        runner = core.runner
        self._runner, self._part, self._decoder = runner, runner.part, runner.part.decoder
        self._measured = self._decoder.choices
        self._shipped, self._unsliced = self._measured, unsliced or Choices()
        if runner.device.type == "cuda":
            self._shipped = known("off", this_gpu(runner.device)).of(self._decoder.matmuls)
        self._long_parts, self._short_parts = self._part.attention.scratch, short_parts(self._part.attention.scratch)
        self._prefixes, self._most_tokens = runner._prefixes, max_graph_tokens(runner.model)
        self._made: dict[frozenset[str], list[tuple[dict[Any, Any], Any]]] = {}
        self._used: frozenset[str] | None = None

    @property
    def by_name(self) -> Mapping[str, Callable[[bool], None]]:
        return {
            "choices": self._set_choices,
            "slices": self._set_slices,
            "mixed": self._set_mixed,
            "cascade": self._set_cascade,
            "splits": self._set_splits,
        }

    def use(self, names: frozenset[str]) -> None:
        """Exactly these, with the graphs that were captured for them before."""
        graphs = [self._part.graphs, self._part.mixed.graphs, self._runner._draws]
        if self._used is not None:
            self._made[self._used] = [(each._graphs, each._pool) for each in graphs]
        self._used = names
        for each, (made, pool) in zip(graphs, self._made.get(names, [({}, None) for _ in graphs]), strict=True):
            each._graphs, each._pool = made, pool
        for name, switch in self.by_name.items():
            switch(name in names)

    def _set_choices(self, on: bool) -> None:
        self._decoder.choices = self._measured if on else self._shipped

    def _set_slices(self, on: bool) -> None:
        """After `_set_choices`."""
        if not on:
            self._decoder.choices |= self._unsliced.of(sliced(self._decoder.choices))

    def _set_mixed(self, on: bool) -> None:
        self._part.mixed.most = self._most_tokens if on else 0

    def _set_cascade(self, on: bool) -> None:
        self._runner._prefixes = self._prefixes if on else None

    def _set_splits(self, on: bool) -> None:
        self._part.attention.scratch = self._long_parts if on else self._short_parts


def sliced(choices: Any) -> list[Any]:
    """The matmuls that the slice kernel computes for some number of rows."""
    from ostro.kernels.gpu.tilings import SliceTiling

    return [
        each for each, rows in choices.table.items() if any(isinstance(tiling, SliceTiling) for tiling in rows.values())
    ]


def without_slices(core, before: Path | None) -> Any:  # type: ignore[no-untyped-def]
    """Choices for the matmuls that the slice kernel computes: those of a file, or else measured."""
    from ostro.backends.cuda.choices import Choices, choose, fixed
    from ostro.backends.cuda.compiling import _clock
    from ostro.backends.cuda.measuring import l2_cache_bytes, this_gpu

    decoder, device = core.runner.part.decoder, core.runner.device
    gpu, matmuls = this_gpu(device), sliced(decoder.choices)
    given = Choices() if before is None else fixed(before, gpu).of(matmuls)
    with patch("ostro.backends.cuda.choices.slice_candidates", return_value=()):
        clock = _clock(decoder, cache_bytes=l2_cache_bytes(device))
        measured = choose([each for each in matmuls if each not in given], gpu, clock)
    for matmul in matmuls:
        print(f"# {matmul}")
        for name, choices in (("with", decoder.choices), ("without", measured | given)):
            print(f"#   {name:7} " + ", ".join(f"{rows}: {each}" for rows, each in choices.table[matmul].items()))
    return measured | given


def short_parts(scratch: Any) -> Any:
    """Scratch memory for the former tuning."""
    from ostro.kernels.gpu.decode_attention import DecodeScratch, DecodeTuning

    return DecodeScratch(
        scratch.max_rows,
        scratch.heads,
        scratch.kv_heads,
        scratch.head_dim,
        scratch.page_size,
        scratch.arrived.device,
        windows=list(scratch.items),
        tuning=DecodeTuning(parts_per_sm=12, resident=3),
        prefix_tuning=None if scratch.prefix is None else scratch.prefix.tuning,
    )


def compare(core, switches: Switches, name: str, variants: Mapping[str, frozenset[str]]) -> None:  # type: ignore[no-untyped-def]
    work = WORKLOADS[name]()
    tokens = sum(each.output for each in work)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for turn in range(3):
        for variant, names in variants.items():
            switches.use(names)
            took, _ = run(core, work)
            # The first turn captures graphs, and compiles what only this variant needs.
            if turn:
                seconds[variant].append(took)
    base = min(seconds["none"])
    for variant, runs in seconds.items():
        rates = " ".join(f"{tokens / each:9.0f}" for each in runs)
        print(f"{name:8} {variant:10} {rates} tok/s  {base / min(runs):.3f}", flush=True)


def main() -> None:
    known = ["choices", "slices", "mixed", "cascade", "splits"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--config", type=Path, required=True, help="a config.json that names the shape")
    parser.add_argument("--switches", nargs="+", choices=known, default=known)
    parser.add_argument("--always", nargs="+", choices=known, default=[])
    parser.add_argument("--before", type=Path, help="a file of --kernel-choices, for what slices are compared with")
    parser.add_argument("--quantize", choices=["none", "fp8"], default="none")
    parser.add_argument("--kv-dtype", choices=["auto", "fp8"], default="auto")
    options = parser.parse_args()
    always, chosen = frozenset[str](options.always), [each for each in options.switches if each not in options.always]
    made = defaults(
        no_cascade_attention="cascade" not in always.union(chosen),
        kernel_choices="auto" if "choices" in always.union(chosen) else "off",
        quantize=options.quantize,
        kv_dtype=options.kv_dtype,
    )
    core = engine(json.loads(options.config.read_text(encoding="utf-8")), made)
    variants = {"none": always, **{name: always | {name} for name in chosen}}
    if len(chosen) > 1:
        variants["all"] = always.union(chosen)
    switches = Switches(core, without_slices(core, options.before) if "slices" in chosen else None)
    for name in options.workloads:
        compare(core, switches, name, variants)


if __name__ == "__main__":
    main()
