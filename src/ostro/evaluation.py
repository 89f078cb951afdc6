"""lm-evaluation-harness on an LLM in process, without a server:

    import lm_eval
    from ostro import LLM
    from ostro.evaluation import Evaluated

    lm_eval.simple_evaluate(Evaluated(LLM("./my-model")), tasks=["arc_easy"])

Requires the extra `eval`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ostro.errors import BadRequest
from ostro.frontend.outputs import Score
from ostro.llm import LLM
from ostro.sampling_params import NEUTRAL, SamplingParams
from ostro.system.requirements import needs

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ImportError(needs("ostro.evaluation", "eval")) from error

_MAX_TOKENS = 256


class Evaluated(LM):
    """Runs all requests of a kind in one call to the engine, which batches them and shares prompt prefixes."""

    def __init__(self, llm: LLM, *, progress: bool = False) -> None:
        super().__init__()
        self.llm = llm
        self.progress = progress

    @property
    def tokenizer_name(self) -> str:
        return self.llm.name

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Scores continuations after their contexts; an empty context becomes the token that starts a text.

        As elsewhere in the harness, what is too long is truncated at the start.
        """
        pairs = [self._pair(*request.args) for request in requests]
        scores = self.llm.score([prompt for prompt, _ in pairs], [rest for _, rest in pairs], progress=self.progress)
        return [(score.logprob, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Scores whole texts, in windows of the context length."""
        windows: list[tuple[int, list[int], list[int]]] = []
        for number, request in enumerate(requests):
            ids = self.llm.tokenizer.encode(request.args[0], add_special=False)
            rolling = get_rolling_token_windows(ids, self._prefix, self._longest - 1, 1)
            windows += [(number, *make_disjoint_window(window)) for window in rolling]
        scores: Sequence[Score] = self.llm.score(
            [context for _, context, _ in windows], [rest for _, _, rest in windows], progress=self.progress
        )
        totals = [0.0] * len(requests)
        for (number, _, _), score in zip(windows, scores, strict=True):
            totals[number] += score.logprob
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Truncates a prompt at its start to make room for the requested output, but keeps half of the context."""
        prompts, params = [], []
        for request in requests:
            text, asked = request.args
            wanted = _params(asked)
            ids = self.llm.tokenizer.encode(text) or [self._prefix]
            num_wanted = wanted.max_tokens or 0
            prompt = ids[-max(self._longest - num_wanted, self._longest // 2, 1) :]
            prompts.append(prompt)
            params.append(wanted.with_changes(max_tokens=min(num_wanted, self._longest - len(prompt))))
        return [each.text for each in self.llm.generate(prompts, params, progress=self.progress)]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        tokenizer = self.llm.tokenizer
        if tokenizer.chat_template is None:
            raise BadRequest("This model has no chat template. Leave apply_chat_template out.", param="messages")
        return tokenizer.renderer.render(chat_history, add_generation_prompt=add_generation_prompt)

    @property
    def _longest(self) -> int:
        return self.llm.core.scheduler.max_len

    @property
    def _prefix(self) -> int:
        """The token before a text whose first token is scored too."""
        tokenizer = self.llm.tokenizer
        if tokenizer.bos_id is not None:
            return tokenizer.bos_id
        return min(tokenizer.eos_ids, default=0)

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encodes both as one text: white space at the border belongs to the continuation."""
        ids = self.llm.tokenizer.encode(context + continuation)
        border = len(self.llm.tokenizer.encode(context.rstrip()))
        if not border:
            ids, border = [self._prefix, *ids], 1
        num_cut = max(len(ids) - self._longest, 0)
        # If the continuation alone is too long, its first remaining token becomes the context of the others.
        border = max(border - num_cut, 1)
        return ids[num_cut : num_cut + border], ids[num_cut + border :]


def _params(asked: Mapping[str, Any]) -> SamplingParams:
    """A task's generation settings, interpreted like the harness's own models do.

    A temperature implies sampling, `do_sample=False` is greedy whatever the temperature, and the default is 0.
    """
    until = asked.get("until") or ()
    found = normalize_gen_kwargs(dict(asked), _MAX_TOKENS)
    # Set explicitly: scores must not depend on defaults in a model's files.
    chosen: dict[str, object] = {**NEUTRAL, "temperature": 0.0}
    chosen |= {name: found[name] for name in ("temperature", "top_p") if name in found}
    return SamplingParams(
        max_tokens=found["max_gen_toks"],
        stop=(until,) if isinstance(until, str) else tuple(stop for stop in until if stop),
    ).with_changes(**chosen)
