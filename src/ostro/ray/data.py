"""Offline batches on Ray Data: `dataset.map_batches(OstroPredictor, …)`. Does not import Ray, which calls it.

dataset = ray.data.from_items([{"prompt": "Once upon a time"}, …])
dataset.map_batches(OstroPredictor, fn_constructor_kwargs={"model": "./model"}, concurrency=2, batch_size=256)
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ostro.config import EngineConfig
from ostro.errors import BadRequest
from ostro.llm import LLM
from ostro.sampling_params import SamplingParams

Column = Any
"""A numpy array, or a list."""


class OstroPredictor:
    """One loaded model per actor. Adds columns to a batch: each row's generated text, finish reason, and token counts.
    Requests within a batch are batched continuously, so large batches are best.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        params: SamplingParams | None = None,
        config: EngineConfig | None = None,
        prompt_column: str = "prompt",
        text_column: str = "text",
    ) -> None:
        """The prompt column contains texts or conversations: lists of {"role", "content"} messages."""
        self._params = params or SamplingParams()
        self._prompt_column = prompt_column
        self._text_column = text_column
        self._llm = LLM(model, config)

    def __call__(self, batch: Mapping[str, Column]) -> dict[str, Column]:
        if self._prompt_column not in batch:
            raise BadRequest(
                f"The batch has no column {self._prompt_column!r} but {', '.join(batch)}. Name it with prompt_column.",
                param="prompt_column",
            )
        prompts = [self._prompt(each) for each in batch[self._prompt_column]]
        completions = self._llm.generate(prompts, self._params)
        choices = [completion.choices[0] for completion in completions]
        return {
            **batch,
            self._text_column: [choice.text for choice in choices],
            "finish_reason": [choice.finish_reason for choice in choices],
            # A failed request has an error in place of the rest of its text; others are complete.
            "error": [choice.error or "" for choice in choices],
            "prompt_tokens": [len(completion.prompt_ids) for completion in completions],
            "completion_tokens": [completion.num_generated for completion in completions],
        }

    def _prompt(self, given: object) -> str | list[int]:
        if isinstance(given, str):
            return given
        messages: Sequence[Mapping[str, object]] = list(given)  # type: ignore[call-overload]
        return self._llm.chat_prompt(messages, reasoning=self._params.structured is None)
