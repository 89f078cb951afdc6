"""A model's step as data: its operations and their buffers. Imports no numpy."""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import msgspec

from ostro.errors import BadCheckpoint
from ostro.kernels.cpu.library import After, Op

_Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceSpec:
    """A mixer's sizes, and where its part of a sequence's state is: see native/src/plan.h."""

    state_at: int
    taps: int = 0
    heads: int = 0
    groups: int = 0
    tiled: bool = False
    rows: int = 0
    cols: int = 0
    draft_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """One operation. Refers to buffers, vectors and matrices by number; fields that it does not use keep defaults."""

    op: Op
    input: int = 0
    out: int = 0
    in_at: int = 0
    out_at: int = 0
    cols: int = 0
    width: int = 0
    after: After = After.STORE
    layer: int = 0
    rotation: int = -1
    window: int = 0
    scale: float = 1.0
    cap: float = 0.0
    eps: float = 0.0
    experts: int = 0
    chosen: int = 0
    normalized: bool = False
    ungated: bool = False
    norm: int | None = None
    bias: int | None = None
    matrix: int | None = None
    weights: int | None = None
    """The vector of a mixer's own numbers, or of a router's."""
    beside: int = 0
    beside_at: int = 0
    recurrence: RecurrenceSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationSpec:
    frequencies: int
    """The number of a vector: radians per position, for each pair of dimensions."""
    factor: float = 1.0
    """Multiplies cosines and sines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    cols: int
    asked: bool = False
    """Whether it has a row per requested row rather than per token."""
    per_token: int = 1
    """Rows per token: one for each of its experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """A whole program except its weights; stored as JSON in a packed file."""

    heads: _Size
    kv_heads: _Size
    head_dim: _Size
    num_layers: _Size
    max_seq_len: _Size
    vocab_size: _Size
    hidden_size: _Size
    buffers: list[BufferSpec]
    rotations: list[RotationSpec]
    steps: list[StepSpec]
    hidden: int
    """The buffer of normed states of the requested rows; for an encoder, of pooled states."""
    logits: int | None
    """The buffer of their logits; None without a head."""
    states: int = 0
    """The buffer of all rows' states."""
    labels: int | None = None
    """The number of logits if they are not for tokens but a classifier's."""
    head_step: int
    """The first step that runs for requested rows only; `logits_step` is the first that computes logits."""
    logits_step: int
    tensors: list[list[str]] = field(default_factory=list)
    """The checkpoint tensors in each matrix, in order."""
    state_floats: int = 0
    """Numbers in a sequence's recurrent state, and of what is kept of a draft."""
    draft_floats: int = 0
    precision: str = ""
    """The weights' formats, in words."""

    @property
    def state_bytes(self) -> int:
        return 4 * self.state_floats

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ProgramSpec":
        """BadCheckpoint if a field is missing, unknown, or has the wrong type."""
        try:
            spec = msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise bad_program(str(error)) from error
        if spec.to_json() != values:
            raise bad_program("it has fields that this Ostro does not know")
        return spec


def bad_program(why: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"The packed weights describe a step that cannot run: {why}. Delete them; they are made again."
    )
