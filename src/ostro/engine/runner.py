"""All that the scheduler knows about a device: the ModelRunner protocol, its spec, and a step's output."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ostro.engine.batch import Batch
from ostro.engine.logprob import TokenLogprob

__all__ = ["NOT_FINITE", "ModelRunner", "RunnerSpec", "SampledToken", "Solution", "Step", "StepOutput", "TokenLogprob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSpec:
    """What a runner can hold."""

    page_size: int
    num_pages: int
    max_seq_len: int
    vocab_size: int
    max_batch_tokens: int = 512
    """Most tokens, and most sequences, of a step."""
    max_batch_seqs: int = 64
    context_price: float = 0.0
    """What a token costs for each token before it, where one without any costs 1: a step's work is bounded by that,
    since with a long context most of it is attention."""
    steps_ahead: int = 0
    """How many steps to begin before the results of the one before them are asked for."""
    keeps_kv: bool = True
    """Whether what was computed for a token stays. Without, each position that something is asked of takes a pass over
    all tokens up to it, and a page is a seat: as long as a sequence may be, and there are two for each sequence."""
    generates: bool = True
    """Whether the model has logits: one saved without its head only embeds."""
    num_puzzles: int = 0
    """Puzzles that a request to solve may name; 0 where the model does not take such requests."""
    constrains: bool = False
    """Whether it samples only what a sequence's matcher allows. Without, constrained requests are refused."""
    masks_late: bool = False
    """Whether a step may begin before all of its masks are known: `Step.sample`."""
    pages_bytes: int = 0
    """Memory of the host that pages take as they are filled, and not before."""
    device_bytes: int = 0
    """Memory of the GPU, weights and pages, where there is one."""
    device: str = "cpu"
    """The kind of device that computes: "cpu" or "cuda"."""
    backend: str = ""
    """What computes, in words: "native (neon)", "torch (cpu)"."""
    precision: str = ""
    """What weights, keys and values are kept in, in words."""


class SampledToken(NamedTuple):
    token_id: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    """Why no token could be drawn for this row; the sequence ends, its neighbours go on."""


NOT_FINITE = (
    "The model gave a number that is not finite: its weights hold NaN or infinity, or overflow its dtype. "
    "Check its checkpoint, or load it in a wider dtype."
)
"""Why a sequence fails whose logits, log-probabilities or vector are of no use."""


@dataclass(frozen=True, slots=True)
class Solution:
    """One sequence's answer to a request to solve."""

    predictions: list[int]
    """The likeliest token at each position."""
    steps: int
    """Outer steps that were taken."""
    q_halt: float
    """The q-head's two logits after the last step."""
    q_continue: float

    @property
    def halted(self) -> bool:
        """Whether the model itself would stop there."""
        return self.q_halt > self.q_continue


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One step's results, keyed by sequence id."""

    sampled: dict[int, SampledToken] = field(default_factory=dict)
    scored: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """For the positions of this step's chunk that were to be scored, in order."""
    pooled: dict[int, list[float]] = field(default_factory=dict)
    solved: dict[int, Solution] = field(default_factory=dict)
    outer_steps: int = 0
    """Of models that refine their states in steps: how many were taken, and how many halting early has saved."""
    saved_steps: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was begun."""

    results: Callable[[], StepOutput]
    """Waits for its end."""
    sample: Callable[[], None] | None = None
    """Samples by the masks of now what the step has left, if it has: to be called when all results of the steps before
    it are taken in."""


class ModelRunner(Protocol):
    strides: int
    """Parts of steps done so far, if steps are long: a watchdog sees from it that the runner makes progress."""

    @property
    def spec(self) -> RunnerSpec: ...

    def launch(self, batch: Batch) -> Step:
        """Begins to compute the batch's chunks, write their keys and values into pages, and sample where asked.

        Steps run in the order of their launch. The last token of a chunk may be pending: then the step before this one
        samples it. If such a sequence has a matcher, which happens with `masks_late` alone, the mask for its next token
        is not known yet: the step leaves its sampling for later.
        """
        ...
