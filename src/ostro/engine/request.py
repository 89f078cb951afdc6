"""A request to the engine: token ids and sampling settings. Knows no text and no tensors."""

from dataclasses import dataclass
from enum import StrEnum

from ostro.engine.constraint import Constraint
from ostro.sampling_params import SamplingParams


class Task(StrEnum):
    GENERATE = "generate"
    EMBED = "embed"
    """A vector for the whole prompt; from a classifier, a number for each label."""
    SOLVE = "solve"
    """Predicts a token for every position of the prompt at once; only for an HRM of upstream's dialect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as the engine admits it. `seed` is already resolved."""

    id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_ids: frozenset[int] = frozenset()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs_from: int | None = None
    """First prompt position whose log-probability is wanted; earlier ones may come from the prefix cache."""
    one_pass: bool = False
    """Whether to score all of these in one pass, in which a position also sees later tokens. For models without a KV
    cache, which otherwise take one pass per position."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    adapter: str | None = None
    """The LoRA adapter to apply; None is the base model."""
    priority: int = 0
    """Scheduling priority; lower runs first."""
    turn: int = 0
    """Order within a priority, for callers that share the engine fairly; ties by arrival."""
    tenant: str = ""
    """The tenant who sent the request: tenants get equal shares of the batch and its pages."""
    predicted_ids: tuple[int, ...] = ()
    """The caller's prediction of all or most of the output: another text for `engine.speculation` to draft from. It
    never changes the output."""
    task: Task = Task.GENERATE
    constraint: Constraint | None = None
    """What the output of each choice must match."""
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that are not stripped when the output is detokenised. The engine ignores them."""
    shares_prompt: bool = False
    """Whether to share the prompt with other engines when the request ends. The answer is `Offered`; the scheduler
    ignores it."""
    anchors: tuple[int, ...] = ()
    """Where messages end in the prompt: a later prompt probably has the same tokens up to one of these. Models with
    recurrent states keep snapshots there, of the last four at most. Empty: behind each of `eos_ids` in the prompt."""
    second_at: int = 0
    """Where the second text of a pair begins, for encoders that tell the two apart; 0 if there is none."""
    puzzle: int = 0
    """The puzzle whose embedding an HRM sees before the tokens; 0 if none in particular."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end a choice."""
        params = self.params
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)
