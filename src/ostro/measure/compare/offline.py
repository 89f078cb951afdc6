"""A model in this process as one side: `offline:REF`, with engine settings after a question mark.

offline:default?quantize=int8      offline:./model?dtype=bfloat16&device=cuda      offline:./brain?hrm_halting=true
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self
from urllib.parse import parse_qsl

from ostro.config import EngineConfig
from ostro.engine.request import Request
from ostro.engine.runner import TokenLogprob
from ostro.errors import BadRequest, OstroError
from ostro.frontend.outputs import Delta
from ostro.frontend.requests import Collector
from ostro.llm import LLM
from ostro.measure.compare.answers import Outcome, Prompt, Recorder, Token, token_name
from ostro.sampling_params import SamplingParams
from ostro.weights import open_checkpoint

_TEXTS = frozenset(
    {
        "tokenizer",
        "chat_template",
        "generation_config",
        "tool_format",
        "device",
        "dtype",
        "quantize",
        "kv_dtype",
        "backend",
        "model_config",
        "hrm_config",
        "hrm_dialect",
    }
)
_NUMBERS = frozenset(
    {
        "max_seq_len",
        "tensor_parallel",
        "max_batch_tokens",
        "max_batch_seqs",
        "threads",
        "kv_memory",
        "hrm_num_heads",
        "hrm_h_cycles",
        "hrm_l_cycles",
        "hrm_h_layers",
        "hrm_l_layers",
        "hrm_steps",
    }
)
_SWITCHES = frozenset({"hrm_halting"})
_KNOWN = _TEXTS | _NUMBERS | _SWITCHES


class Offline:
    def __init__(self, reference: str, config: EngineConfig) -> None:
        self.reference = reference
        self.model = ""
        self._config = config
        self._llm: LLM | None = None

    @classmethod
    def of(cls, reference: str) -> Self:
        """`offline:` is optional; raises BadRequest for an unknown setting."""
        ref, _, query = reference.removeprefix("offline:").partition("?")
        settings: dict[str, object] = {}
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name not in _KNOWN:
                known = ", ".join(sorted(_KNOWN))
                raise BadRequest(f"{reference}: {name} is not a setting here. The settings are {known}.", param=name)
            settings[name] = _value(reference, name, value)
        model = None if ref in ("", "default") else ref
        return cls(reference, EngineConfig(model=model, **settings))  # type: ignore[arg-type]

    def check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        pass

    def prepare(self) -> None:
        self.model = open_checkpoint(self._config.model, model_config=self._config.model_config).name

    def open(self) -> None:
        self._llm = LLM(config=self._config)

    def answers(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, concurrency: int
    ) -> Iterator[tuple[int, Outcome]]:
        assert self._llm is not None, "open it first"
        llm, waiting = self._llm, deque(enumerate(prompts))
        under_way: dict[int, _Job] = {}
        try:
            while waiting or under_way:
                while waiting and len(under_way) < concurrency:
                    index, prompt = waiting.popleft()
                    recorder = Recorder()
                    try:
                        request = _request(llm, prompt, params)
                        llm.core.add(request)
                    except OstroError as error:
                        yield index, recorder.failure(str(error))
                        continue
                    under_way[request.id] = _Job(index, Collector(llm.tokenizer, request), recorder)
                for done in _step(llm, under_way):
                    yield done.index, done.outcome()
        finally:
            for id in under_way:
                llm.core.abort(id)

    def close(self) -> None:
        self._llm = None


@dataclass(slots=True)
class _Job:
    """A prompt in progress."""

    index: int
    collector: Collector
    recorder: Recorder

    @property
    def finished(self) -> bool:
        return self.collector.completion.finished

    def take(self, delta: Delta, names: Sequence[str]) -> None:
        logprobs: Sequence[TokenLogprob | None] = delta.logprobs or [None] * len(delta.token_ids)
        tokens = [
            Token(name, id, None if entry is None else entry.logprob)
            for name, id, entry in zip(names, delta.token_ids, logprobs, strict=True)
        ]
        self.recorder.add(delta.text, tokens)
        self.recorder.finish_reason = delta.finish_reason

    def outcome(self) -> Outcome:
        choice = self.collector.completion.choices[0]
        if choice.finish_reason == "error":
            return self.recorder.failure(choice.error or "The model gave no usable output for this prompt.")
        self.recorder.counted = len(choice.token_ids)
        return self.recorder.answer()


def _value(reference: str, name: str, value: str) -> str | int | bool:
    if name in _SWITCHES:
        if value not in ("true", "false"):
            raise BadRequest(f"{reference}: {name} must be true or false, got {value!r}.", param=name)
        return value == "true"
    if name in _NUMBERS:
        if not value.isdecimal():
            raise BadRequest(f"{reference}: {name} must be a number, got {value!r}.", param=name)
        return int(value)
    return value


def _request(llm: LLM, prompt: Prompt, params: SamplingParams) -> Request:
    return llm.prepare(prompt if isinstance(prompt, str) else llm.chat_prompt(prompt), params)


def _step(llm: LLM, under_way: dict[int, _Job]) -> list[_Job]:
    """Runs one engine step; returns the jobs that it finished."""
    ended = []
    for step in llm.core.step():
        job = under_way[step.request_id]
        delta = job.collector.take(step)
        job.take(delta, [token_name(llm.tokenizer.token_bytes(id)) for id in delta.token_ids])
        if delta.finish_reason and step.finish_reason is None:
            llm.core.abort(step.request_id, step.choice)
        if job.finished:
            ended.append(under_way.pop(step.request_id))
    return ended
