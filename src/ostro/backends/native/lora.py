"""LoRA on the native core: steps that add low-rank terms to matmuls, with one packed copy of the base weights.

    x Wᵀ                  LINEAR ── ADAPT
    act(gates) * ups      LINEAR ── ADAPT ── ACTIVATE      instead of one LINEAR that also activates

ADAPT adds to each row the term of its sequence's adapter, (x Aᵀ)(scale · B)ᵀ. For a fused projection, the parts' As are
stacked, and each B writes its part's columns, as in `torch_models.lora`. The packed file contains only the base model,
so all sets of adapters share it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ostro.backends.native.packing import by_turns
from ostro.backends.native.sinks import padded
from ostro.backends.native.support import GATED
from ostro.kernels.cpu.library import After, Op
from ostro.kernels.cpu.program import Adapted, Term
from ostro.kernels.cpu.program_spec import BufferSpec, ProgramSpec, StepSpec
from ostro.models.adapter_places import described_terms
from ostro.models.architecture import Architecture
from ostro.weights.adapter import LowRank


class NativeAdapters:
    """A model's adapters, keyed by the names used in requests."""

    def __init__(self, described: Architecture, adapters: Mapping[str, Mapping[str, LowRank]]) -> None:
        """Raises BadCheckpoint if an adapter belongs to another model."""
        projections = [each for layer in described.layers for each in layer.projections]
        self._rows = {part.name: part.rows for each in projections for part in each.parts}
        self._terms = list(described_terms(described, adapters).values())
        self._numbers = {name: number for number, name in enumerate(adapters)}

    def number(self, name: str | None) -> int:
        """An adapter's index; -1 for none."""
        return -1 if name is None else self._numbers[name]

    def adapted(self, base: ProgramSpec, panel: int) -> Adapted:
        """The base program with the adapters' steps added."""
        steps = _Steps(base)
        for step in base.steps:
            names = base.tensors[step.matrix] if step.op is Op.LINEAR and step.matrix is not None else []
            projections = [name.removesuffix(".weight") for name in names]
            terms = [self._term(each, projections, step.after in GATED.values(), panel) for each in self._terms]
            steps.add(step, terms if any(term is not None for term in terms) else ())
        return steps.adapted()

    def _term(self, adapter: Mapping[str, LowRank], projections: Sequence[str], gated: bool, panel: int) -> Term | None:
        """An adapter's term for one matmul, in the order of the matmul's output columns."""
        found = [name for name in projections if name in adapter]
        if not found:
            return None
        rank, rows = sum(len(adapter[name].a) for name in found), sum(self._rows[name] for name in projections)
        b = np.zeros((rank, padded(rows, panel)), np.float32)
        first_rank = first_row = 0
        for name in projections:
            end = first_row + self._rows[name]
            if (term := adapter.get(name)) is not None:
                b[first_rank : first_rank + len(term.a), first_row:end] = term.b.T * np.float32(term.scale)
                first_rank += len(term.a)
            first_row = end
        if gated:
            b = np.stack([by_turns(row, panel) for row in b[:, :rows]])
        return Term(np.ascontiguousarray(np.concatenate([adapter[name].a for name in found])), np.ascontiguousarray(b))


class _Steps:
    """Builder for an adapted program."""

    def __init__(self, base: ProgramSpec) -> None:
        self._base = base
        self._buffers, self._wide = list(base.buffers), len(base.buffers)
        self._steps: list[StepSpec] = []
        self._starts: list[int] = []
        """New index of each of the base program's steps."""
        self._terms: dict[int, Sequence[Term | None]] = {}

    def add(self, step: StepSpec, terms: Sequence[Term | None]) -> None:
        self._starts.append(len(self._steps))
        width = next((term.b.shape[1] for term in terms if term is not None), 0)
        if not width:
            self._steps.append(step)
            return
        gated = step.after in GATED.values()
        product = replace(step, out=self._wide_buffer(width), out_at=0, after=After.STORE) if gated else step
        self._terms[len(self._steps) + 1] = terms
        self._steps += [product, replace(product, op=Op.ADAPT, after=After.STORE, bias=None, matrix=None, width=width)]
        if gated:
            to = {"out": step.out, "out_at": step.out_at, "after": step.after, "width": width // 2}
            self._steps.append(StepSpec(op=Op.ACTIVATE, input=product.out, **to))  # type: ignore[arg-type]

    def adapted(self) -> Adapted:
        starts = [*self._starts, len(self._steps)]
        head, logits = starts[self._base.head_step], starts[self._base.logits_step]
        spec = replace(self._base, steps=self._steps, buffers=self._buffers, head_step=head, logits_step=logits)
        return Adapted(spec, self._terms)

    def _wide_buffer(self, width: int) -> int:
        """Holds gates and ups before activation. Shared by all layers."""
        widest = max([width, *(each.cols for each in self._buffers[self._wide :])])
        self._buffers[self._wide :] = [BufferSpec(cols=widest)]
        return self._wide
