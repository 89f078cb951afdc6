"""All that the scheduler knows about a device: the ModelRunner protocol, its spec, and a step's output."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ostro.engine.batch import Batch
from ostro.engine.results import NOT_FINITE, Solution, TokenLogprob

__all__ = ["NOT_FINITE", "ModelRunner", "RunnerSpec", "SampledToken", "Solution", "Step", "StepOutput", "TokenLogprob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSpec:
    """A runner's capacities and capabilities."""

    page_size: int
    num_pages: int
    max_seq_len: int
    vocab_size: int
    max_batch_tokens: int = 512
    """Most tokens and most sequences per step."""
    max_batch_seqs: int = 64
    context_price: float = 0.0
    """Cost of attending to one earlier token, relative to computing a token without context. The token budget accounts
    for it, because with a long context most of the work is attention."""
    steps_ahead: int = 0
    """How many further steps to launch before waiting for a step's results."""
    keeps_kv: bool = True
    """Whether the model has a KV cache. Without one, each position whose logits are needed takes a pass over all tokens
    up to it, and pages only count seats: a page holds a whole sequence, and there are two per sequence."""
    generates: bool = True
    """Whether the model has logits: one saved without its head only embeds."""
    num_puzzles: int = 0
    """Puzzles that a solve request may name; 0 if the model takes no such requests."""
    constrains: bool = False
    """Whether sampling honours a sequence's mask. If not, constrained requests are refused."""
    masks_late: bool = False
    """Whether a step may begin before all of its masks are known: `Step.sample`."""
    max_sampled: int = 0
    """Most positions that a step may sample from, each draft's included; 0 if the runner takes no drafts. A runner with
    states takes them only if it can drop the rejected ones: `Chunk.state`."""
    num_states: int = 0
    """Slots for recurrent states, numbered from 0; 0 if all that the model keeps is in pages. A slot holds the states
    of all layers after some tokens of one sequence. A slot that padding needs is the runner's own, and not counted."""
    state_bytes: int = 0
    """Bytes of one slot."""
    state_every: int = 1
    """A state can be captured after a multiple of this many tokens: 1 if anywhere. `Chunk.captures`."""
    is_invariant: bool = False
    """Whether a row's results are the same, to the last bit, whatever else the step computes."""
    pages_bytes: int = 0
    """Host memory that pages and states will take as they fill."""
    device_bytes: int = 0
    """Memory of each device, for weights and pages; 0 on a CPU."""
    device: str = "cpu"
    """The kind of device that computes: "cpu", "cuda", "tpu" or "mps"."""
    devices: int = 1
    """Number of devices that the model is divided over."""
    backend: str = ""
    """The implementation, for display: "native (neon)", "torch (cpu)"."""
    precision: str = ""
    """The formats of weights, keys and values, for display."""
    num_programs: int = 0
    """Programs compiled before the first step, and the time that it took."""
    compile_seconds: float = 0.0


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    """Why no token could be sampled for this row. The sequence ends; the rest of the batch goes on."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One step's results, keyed by sequence id."""

    sampled: dict[int, SampledToken] = field(default_factory=dict)
    followed: dict[int, list[SampledToken]] = field(default_factory=dict)
    """What was sampled after each of the chunk's drafts, in order, as if all drafts up to it were right."""
    scored: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """One entry per scored position of the sequence's chunk, in order."""
    pooled: dict[int, list[float]] = field(default_factory=dict)
    solved: dict[int, Solution] = field(default_factory=dict)
    outer_steps: int = 0
    """For models that refine their states in outer steps: how many were taken, and how many early halting saved."""
    saved_steps: int = 0
    recompiles: int = 0
    """For runners that compile programs before the first step: how many were compiled since. There should be none."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was launched."""

    results: Callable[[], StepOutput]
    """Waits until the step is done."""
    sample: Callable[[], None] | None = None
    """Does the sampling that the step deferred, if any, with the sequences' current masks. Call it once the results of
    all earlier steps are applied."""


class ModelRunner(Protocol):
    @property
    def strides(self) -> int:
        """Parts of long steps done so far: shows the watchdog that the runner makes progress within a step."""

    @property
    def failure(self) -> str | None:
        """Why it cannot run another step, such as a lost process; None while it can."""

    @property
    def spec(self) -> RunnerSpec: ...

    def launch(self, batch: Batch) -> Step:
        """Starts to compute the batch's chunks, write their keys and values into pages, and sample where asked.

        Steps run in the order of their launch. The last token of a chunk may be pending: then the step before this one
        samples it. If such a sequence has a matcher, which only happens with `masks_late`, the mask for its next token
        is not known yet: the step defers its sampling.
        """
        ...
