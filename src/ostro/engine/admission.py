"""Admission: whether a request could ever run. Checked by the API process, then by the scheduler. Knows a few facts
about the model; changes nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass

from ostro.engine.request import Request, Task
from ostro.errors import BadRequest, ContextLengthExceeded, Unsupported

# The largest integer that a message can carry.
_MOST = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    max_len: int
    """Longest sequence that can run, prompt and output together."""
    vocab_size: int
    generates: bool = True
    keeps_kv: bool = True
    num_puzzles: int = 0
    adapters: Collection[str] = ()
    constrains: bool = False

    def check(self, request: Request, *, prompt: str = "prompt") -> None:
        """Raises BadRequest for a request that could never run. `prompt` is the caller's name for the prompt."""
        params = request.params
        if not self.generates and request.task is not Task.EMBED:
            raise Unsupported(
                "This model comes without a language-model head: it embeds or ranks text but cannot generate it."
            )
        if request.adapter is not None and request.adapter not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise BadRequest(f"There is no adapter {request.adapter!r} here; loaded: {known}.", param="adapter")
        if request.one_pass and self.keeps_kv:
            raise Unsupported("This model is causal: its exact log-likelihood takes one pass. Ask for that instead.")
        if request.task is Task.SOLVE:
            self._check_puzzle(request.puzzle)
        if request.constraint is not None and not self.constrains:
            raise Unsupported(
                "This model's runner cannot hold its output to a grammar or schema. Leave the structured output out, "
                "or serve the model on another device.",
                param="structured",
            )
        if request.constraint is not None:
            self._check_constrained(request)
        if params.structured is not None and request.constraint is None:
            raise Unsupported("Structured outputs are not available here: leave them out.", param="structured")
        self.longest(request, prompt=prompt)
        # Ids outside the vocabulary would index beyond the model's tables.
        self._check_ids(prompt, request.prompt_ids)
        self._check_ids("prediction", request.predicted_ids)
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        for name, value in (
            ("min_tokens", params.min_tokens),
            ("top_k", params.top_k),
            ("priority", request.priority),
            ("turn", request.turn),
        ):
            if abs(value) > _MOST:
                raise BadRequest(f"{name} must be at most {_MOST}, got {value}.", param=name)

    def longest(self, request: Request, *, prompt: str = "prompt") -> int:
        """Length at which the request's sequences end: prompt and max_tokens, within the context."""
        params, length = request.params, len(request.prompt_ids)
        output = params.max_tokens
        if not length:
            raise BadRequest("The prompt is empty: give at least one token.", param=prompt)
        if output is None:
            if length >= self.max_len:
                raise ContextLengthExceeded(limit=self.max_len, prompt=length, output=1, param=prompt)
            most = params.default_max_tokens or self.max_len
            return min(self.max_len, length + max(most, params.min_tokens))
        if length + output > self.max_len:
            raise ContextLengthExceeded(limit=self.max_len, prompt=length, output=output, param=prompt)
        return length + output

    def _check_constrained(self, request: Request) -> None:
        """Raises BadRequest for settings that conflict with a structure, which decides where the output may end."""
        if request.task is not Task.GENERATE or request.one_pass:
            raise BadRequest("Only generated text can have a structure: leave it out.", param="structured")
        for name in ("ignore_eos", "min_tokens"):
            if getattr(request.params, name):
                raise BadRequest(
                    f"{name} cannot be combined with a structured output or tools, which decide where the output may "
                    "end. Leave one of them out.",
                    param=name,
                )

    def _check_puzzle(self, puzzle: int) -> None:
        if not self.num_puzzles:
            raise Unsupported(
                "This model cannot predict all positions at once: /hrm/solve is for HRM checkpoints of upstream's "
                "dialect. Ask /generate or /v1/completions for a continuation.",
                param="model",
            )
        if not 0 <= puzzle < self.num_puzzles:
            raise BadRequest(
                f"puzzle_ids holds {puzzle}, but the model knows puzzles from 0 to {self.num_puzzles - 1} only.",
                param="puzzle_ids",
            )

    def _check_ids(self, name: str, ids: Collection[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            bad = next(token for token in ids if not 0 <= token < self.vocab_size)
            raise BadRequest(
                f"{name} holds token id {bad}, but the vocabulary ends at {self.vocab_size - 1}.", param=name
            )
