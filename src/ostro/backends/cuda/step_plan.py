"""What a step does on a GPU, as data: planned on the host, carried out by every rank. Imports no torch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]
else:
    # The type alone decides how it is decoded.
    Array = np.ndarray


class SamplerKind(NamedTuple):
    """Which variant of the sampler a step needs; each is a graph of its own."""

    truncated: bool
    penalties: bool


class StepKind(NamedTuple):
    """A variant of the decode step; each has its own graph."""

    sampler: SamplerKind | None
    """None if the graph does not sample."""
    keeps_logits: bool
    masks: bool = False
    """Whether tokens are banned by masks first; not if the sampler is None."""
    shares_prefixes: bool = False
    """Whether attention reads the prefixes of groups once: see `Prelude.groups`."""


class Prelude(msgspec.Struct, frozen=True, tag=True):
    """What precedes a step."""

    copies: Sequence[tuple[int, int]]
    """(from, to) pages to copy."""
    cells: Array | None
    """[2, changes]: cells of the page tables, and the pages to write there; None if nothing has changed."""
    adapters: Sequence[tuple[int, int]]
    """Adapters' slots and their numbers of rows, in order; empty if the model has none."""
    state_copies: Sequence[tuple[int, int]] = ()
    """(from, to) slots of recurrent states to copy, in order."""
    groups: Array | None = None
    """int32 [GROUP_ARRAYS, most rows]: single-token rows with common prefixes, for the steps that share them (see
    `kernels.gpu.prefix_attention`); None if those sent before still hold, or if there are none."""


class Decode(msgspec.Struct, frozen=True, tag=True):
    """A step with one token per sequence."""

    size: int
    """Number of rows, including padding up to a graph's size."""
    kind: StepKind
    inputs: Array
    """int32 [FIELDS, most rows]: see `kernels.gpu.step_inputs`."""


class Padding(NamedTuple):
    """The sizes that a step with prompts is padded to; each has its own graph."""

    tokens: int
    singles: int
    """How many of the first tokens may be the only ones of their sequences."""
    tiles: int
    pieces: int = 0
    """Those of chunks that advance recurrent states."""


class StateChunks(msgspec.Struct, frozen=True):
    """Chunks that advance recurrent states; see `kernels.gpu.state_rows`."""

    chunks: Array
    pieces: Array


class Mixed(msgspec.Struct, frozen=True, tag=True):
    """A step with prompts or adapters."""

    inputs: Array
    """int32 [FIELDS, tokens], with a LENGTH for single tokens only."""
    rows: int
    """Number of sequences, each with a row of the page tables."""
    num_single: int
    """Number of rows with one token, which come first."""
    tiles: Array | None
    """int32 [tiles, 4]: the other tokens, for `prefill_attention`."""
    adapted: bool
    padding: Padding | None = None
    """The graph's sizes; None if the step is not a graph."""
    shares_prefixes: bool = False
    """As in `StepKind`, for the rows with one token."""
    states: StateChunks | None = None
    """For a model with recurrent states: the chunks other than the single tokens that come first."""


class Head(msgspec.Struct, frozen=True, tag=True):
    """Logits of some of the latest step's tokens."""

    rows: Array


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """Tells the other ranks to receive tokens that the first rank drew apart from the step."""

    start: int
    stop: int


GpuStep = Prelude | Decode | Mixed | Head | Tokens


def encoded(value: object) -> object:
    """msgspec's hook for arrays."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value).__name__} has no place in a message")


def decoded(kind: type, value: Any) -> object:
    """The inverse of `encoded`."""
    if kind is not np.ndarray:
        raise NotImplementedError(f"{kind.__name__} has no place in a message")
    dtype, shape, data = value
    # Writable, as torch wants it.
    return np.frombuffer(bytearray(data), dtype).reshape(shape)
