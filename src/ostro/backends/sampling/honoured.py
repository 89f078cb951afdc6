"""Who honours each field of SamplingParams. A field that a sampler would ignore in silence is an error when it is
imported.
"""

from dataclasses import fields

from ostro.sampling_params import SamplingParams

EDITED = frozenset(
    {
        "logit_bias",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "bad_words",
        "min_tokens",
        "top_n_sigma",
    }
)
"""Honoured by changing scores before the draw: `backends.sampling.edits`."""
READ = frozenset({"logprobs", "prompt_logprobs"})
"""Honoured by reading logits: `backends.sampling.array_logprobs`."""
ELSEWHERE = frozenset(
    {
        "n",
        "max_tokens",
        "default_max_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "truncate_prompt_tokens",
        "skip_special_tokens",
        "include_stop_in_output",
        "structured",
        "unset",
    }
)
"""Honoured by the engine and by whoever makes text of tokens."""


def check_honoured(sampler: str, drawn: frozenset[str], params: type[SamplingParams] = SamplingParams) -> None:
    """Raises AssertionError for a field that is neither in `drawn`, which the sampler's draw honours, nor above."""
    unknown = {each.name for each in fields(params)} - (drawn | EDITED | READ | ELSEWHERE)
    assert not unknown, f"{sampler} would ignore {', '.join(sorted(unknown))}: say in {__name__} who honours them"
