"""Steps of mixtures of experts: those of a decoder's layers, and programs of nothing else, for a model whose other
parts are on a GPU. Imports neither torch nor numpy.
"""

from collections.abc import Sequence

from ostro.backends.native.layer_steps import BUFFER_COLS, LayerSteps, Read
from ostro.backends.native.sinks import Sink, padded
from ostro.backends.native.support import ACTIVATIONS, GATED
from ostro.kernels.cpu.library import HEAD_MULTIPLE, Op
from ostro.kernels.cpu.program_spec import BufferSpec, ProgramSpec
from ostro.models.architecture import ExpertMatrices, Experts
from ostro.models.expert_layers import ExpertLayers


def chosen_of(mixture: Experts) -> dict[str, int]:
    """What all steps of a mixture state."""
    return {"experts": mixture.count, "chosen": mixture.chosen}


class ExpertSteps(LayerSteps):
    def _multiply(self, mixture: Experts, read: Read, slots: int, slots_out: int) -> None:
        """Multiplies rows, whose experts are known, by their experts' matrices."""
        which = chosen_of(mixture)
        self._add(
            op=Op.EXPAND,
            **read._asdict(),
            out=slots,
            cols=mixture.up.columns,
            after=(GATED if mixture.gated else ACTIVATIONS)[mixture.activation],
            ungated=not mixture.gated,
            bias=self._expert_biases(mixture.up, by_turns=mixture.gated),
            matrix=self._pack_experts(mixture.up, by_turns=mixture.gated),
            **which,
        )
        self._add(
            op=Op.EXPERT,
            input=slots,
            out=slots_out,
            cols=mixture.down.columns,
            bias=self._expert_biases(mixture.down),
            matrix=self._pack_experts(mixture.down),
            **which,
        )

    def _slot_buffers(self, mixtures: Sequence[Experts]) -> list[BufferSpec]:
        """Rows per token and expert: inner states, outputs."""
        inner = max(padded(each.down.columns, self._panel) for each in mixtures)
        chosen = max(each.chosen for each in mixtures)
        return [
            BufferSpec(cols=padded(inner, BUFFER_COLS), per_token=chosen),
            BufferSpec(cols=padded(self._shape.hidden_size, BUFFER_COLS), per_token=chosen),
        ]

    def _pack_experts(self, matrices: ExpertMatrices, *, by_turns: bool = False) -> int:
        rows, cols = matrices.experts * matrices.rows, matrices.columns
        self._count_precision(self._sink.kind(next(matrices.tensors()).name), rows * cols, cols, self._bits)
        self._tensors.append([f"{part.name}{matrices.weight}" for part in matrices.parts])
        return self._sink.experts(matrices, bits=self._bits, by_turns=by_turns)

    def _expert_biases(self, matrices: ExpertMatrices, *, by_turns: bool = False) -> int | None:
        return None if matrices.bias is None else self._sink.expert_biases(matrices, by_turns=by_turns)


class ExpertLowering(ExpertSteps):
    """A layer's steps read rows, each with the numbers of its experts behind it and then their weights, and store
    the rows' weighted sums. Its layers share their buffers: they run one at a time.
    """

    GIVEN, SUMS, _SLOTS, _SLOTS_OUT = range(4)
    STEPS = 4
    """Per layer."""

    def __init__(self, layers: ExpertLayers, sink: Sink, *, bits: int) -> None:
        super().__init__(layers.shape, sink, bits=bits)
        self._mixtures = layers.mixtures

    def program(self) -> ProgramSpec:
        for mixture in self._mixtures:
            self._mixture(mixture)
        shape = self._shape
        chosen = max(mixture.chosen for mixture in self._mixtures)
        return ProgramSpec(
            # It attends to nothing.
            heads=1,
            kv_heads=1,
            head_dim=HEAD_MULTIPLE,
            num_layers=1,
            max_seq_len=shape.max_seq_len,
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            buffers=[
                BufferSpec(cols=padded(shape.hidden_size + 2 * chosen, BUFFER_COLS)),
                # Not padded: it is copied whole.
                BufferSpec(cols=shape.hidden_size),
                *self._slot_buffers(self._mixtures),
            ],
            rotations=[],
            steps=self._steps,
            hidden=self.SUMS,
            logits=None,
            head_step=len(self._steps),
            logits_step=len(self._steps),
            tensors=self._tensors,
            precision=self._precision,
        )

    def _mixture(self, mixture: Experts) -> None:
        which, hidden = chosen_of(mixture), self._shape.hidden_size
        self._add(op=Op.CHOOSE, input=self.GIVEN, in_at=hidden, **which)
        self._multiply(mixture, Read(self.GIVEN), self._SLOTS, self._SLOTS_OUT)
        self._add(op=Op.COMBINE, input=self._SLOTS_OUT, out=self.SUMS, cols=hidden, **which)
