"""The engine for Python programs: `LLM().generate(...)`, in one process, without a server.

Text becomes token ids here, and ids become text again; the engine below knows ids only.
"""

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.request import Request, Task
from ostro.engine.scheduler import Limits, Progress
from ostro.engine.sequence import FinishReason
from ostro.errors import BadRequest, SequenceFailed, Unsupported
from ostro.outputs import Choice, Completion, Delta, Score
from ostro.sampling_params import MAX_SEED, SamplingParams
from ostro.text.stream import TextStream
from ostro.text.tokenizer import Tokenizer
from ostro.weights import Pooling

Prompt = str | Sequence[int]
Message = Mapping[str, object]


class LLM:
    """A loaded model: `LLM()` is the embedded default one, `LLM("path or Hub id")` any other."""

    def __init__(self, model: str | Path | None = None, config: EngineConfig | None = None) -> None:
        # torch takes seconds to import, and nothing else of the package needs it before a model is loaded.
        from ostro.runner.torch_runner import load_runner
        from ostro.weights import open_checkpoint

        config = config or EngineConfig()
        self.config = config if model is None else replace(config, model=str(model))
        checkpoint = open_checkpoint(self.config.model)
        self.name = checkpoint.name
        self.pooling = checkpoint.pooling
        self.tokenizer = Tokenizer.load(
            Path(self.config.tokenizer) if self.config.tokenizer else checkpoint.tokenizer_path,
            chat_template=self.config.chat_template,
        )
        self.core = EngineCore(
            load_runner(checkpoint, self.config),
            Limits(max_batch_tokens=self.config.max_batch_tokens, max_batch_seqs=self.config.max_batch_seqs),
            prefix_caching=self.config.prefix_caching,
        )
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Completes the prompts, texts or token ids, batched continuously; one result for each, in order.

        `params` is one for all or one for each. A prompt that cannot run fails the call before anything is generated.
        """
        batch = _as_list(prompts)
        each = [params or SamplingParams()] * len(batch) if not isinstance(params, Sequence) else params
        if len(each) != len(batch):
            raise BadRequest(f"{len(batch)} prompts need as many sampling params, got {len(each)}.", param="params")
        requests = [self.prepare(prompt, p) for prompt, p in zip(batch, each, strict=True)]
        return self._finish(requests, progress=progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Completes one prompt, text as it comes. Closing the iterator ends the generation."""
        request = self.prepare(prompt, params or SamplingParams())
        return (delta for _, delta in self._drive([request]))

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Completion:
        """Answers a conversation of {"role", "content"} messages by the model's chat template."""
        return self.generate([self.chat_prompt(messages)], params or SamplingParams(max_tokens=None))[0]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids that ask the model for the next message."""
        return self.tokenizer.encode_chat(messages)

    def score(self, prompts: Sequence[Prompt], continuations: Sequence[Prompt]) -> list[Score]:
        """Log-probability of each continuation after its prompt, and whether greedy decoding would give it."""
        if len(prompts) != len(continuations):
            raise BadRequest(
                f"prompts and continuations must be equally many, got {len(prompts)} and {len(continuations)}.",
                param="continuations",
            )
        requests = []
        for prompt, continuation in zip(prompts, continuations, strict=True):
            context, rest = self._encode_pair(prompt, continuation)
            request = self.prepare(context + rest, SamplingParams(max_tokens=0, prompt_logprobs=0))
            requests.append(replace(request, prompt_logprobs_from=len(context)))
        return [_score(completion) for completion in self._finish(requests)]

    def embed(self, texts: Prompt | Sequence[Prompt]) -> list[list[float]]:
        """One vector for each text, pooled as the model's own configuration says."""
        requests = [self.prepare_embedding(text) for text in _as_list(texts)]
        return [completion.embedding or [] for completion in self._finish(requests)]

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Request:
        """The engine's request for a prompt; raises BadRequest if it could never run."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self._num_requests += 1
        request = Request(
            id=self._num_requests,
            prompt_ids=tuple(ids),
            params=params,
            seed=secrets.randbelow(MAX_SEED) if params.seed is None else params.seed,
            eos_ids=self.tokenizer.eos_ids,
            bad_word_ids=self.tokenizer.bad_word_ids(params.bad_words),
            prompt_logprobs_from=None if params.prompt_logprobs is None else 1,
        )
        self.core.check(request)
        return request

    def prepare_embedding(self, text: Prompt) -> Request:
        """The engine's request for a text's vector; raises Unsupported for a model that gives none."""
        if self.pooling is None:
            raise Unsupported(
                f"{self.name} is not an embedding model: it has no modules.json with a pooling module. "
                "Load one that has, such as a sentence-transformers checkpoint."
            )
        return replace(self.prepare(text, SamplingParams(max_tokens=0)), task=Task.EMBED)

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Completion]]:
        """Runs prepared requests together; (request id, completion) of each as it finishes."""
        for collector, _ in self._drive(requests):
            if collector.completion.finished:
                yield collector.request.id, collector.completion

    def _finish(self, requests: Sequence[Request], *, progress: bool = False) -> list[Completion]:
        from tqdm import tqdm

        finished: dict[int, Completion] = {}
        with tqdm(total=len(requests), unit="prompt", disable=not progress) as bar:
            for id, completion in self.run(requests):
                finished[id] = completion
                bar.update()
        return [finished[request.id] for request in requests]

    def _drive(self, requests: Iterable[Request]) -> "Iterator[tuple[_Collector, Delta]]":
        """Steps the engine until the requests are done. What is unfinished when the caller leaves is aborted."""
        collectors: dict[int, _Collector] = {}
        try:
            for request in requests:
                self.core.add(request)
                collectors[request.id] = _Collector(self.tokenizer, request, self.pooling)
            while collectors:
                for step in self.core.step():
                    collector = collectors[step.request_id]
                    delta = collector.take(step)
                    if delta.finish_reason and step.finish_reason is None:
                        self.core.abort(step.request_id, step.choice)
                    if collector.completion.finished:
                        del collectors[step.request_id]
                    yield collector, delta
        finally:
            for id in collectors:
                self.core.abort(id)

    def _encode_pair(self, prompt: Prompt, continuation: Prompt) -> tuple[list[int], list[int]]:
        """Both texts as the model would see them joined: white space at the border belongs to the continuation."""
        if isinstance(prompt, str) and isinstance(continuation, str):
            bare = prompt.rstrip()
            whole = self.tokenizer.encode(prompt + continuation)
            context = self.tokenizer.encode(bare)
            rest = whole[len(context) :]
        elif not isinstance(prompt, str) and not isinstance(continuation, str):
            context, rest = list(prompt), list(continuation)
            whole = context + rest
        else:
            raise BadRequest("A prompt and its continuation must both be texts or both be token ids.", param="prompts")
        if not context:
            raise BadRequest("A continuation is scored after at least one token; the prompt is empty.", param="prompts")
        if not rest:
            raise BadRequest("A continuation must hold at least one token.", param="continuations")
        return whole[: len(context)], rest


class _Collector:
    """Gathers one request's progress into its completion."""

    def __init__(self, tokenizer: Tokenizer, request: Request, pooling: Pooling | None) -> None:
        params = request.params
        self.request = request
        self._pooling = pooling
        wants_logprobs = params.logprobs is not None
        self.completion = Completion(
            request.prompt_ids,
            [Choice(index, logprobs=[] if wants_logprobs else None) for index in range(params.n)],
            prompt_logprobs=None if request.prompt_logprobs_from is None else [None] * request.prompt_logprobs_from,
        )
        self._streams = [TextStream(tokenizer, request.prompt_ids, params) for _ in range(params.n)]

    def take(self, step: Progress) -> Delta:
        """What the step added, as text. A finish reason that the step does not have is a stop string's."""
        choice, stream = self.completion.choices[step.choice], self._streams[step.choice]
        choice.token_ids += step.token_ids
        if choice.logprobs is not None:
            choice.logprobs += step.logprobs
        if self.completion.prompt_logprobs is not None:
            self.completion.prompt_logprobs += step.prompt_logprobs
        if step.choice == 0:
            self.completion.num_cached = step.num_cached
            self.completion.embedding = self._vector(step.pooled)
        text = stream.push(step.token_ids, last_is_stop=step.finish_reason is FinishReason.STOP)
        if step.finish_reason is not None:
            text += stream.flush()
        choice.text += text
        choice.error = step.error
        choice.stopped_by = stream.stopped_by
        if stream.stopped_by is not None:
            choice.finish_reason = "stop"
        elif step.finish_reason is not None:
            choice.finish_reason = step.finish_reason.value
        return Delta(step.choice, text, choice.finish_reason)

    def _vector(self, pooled: list[float] | None) -> list[float] | None:
        if pooled is None or self._pooling is None or not self._pooling.normalize:
            return pooled
        length = math.hypot(*pooled) or 1.0
        return [value / length for value in pooled]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A lone prompt as a list of one."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _score(completion: Completion) -> Score:
    scored = [logprob for logprob in completion.prompt_logprobs or () if logprob is not None]
    if error := completion.choices[0].error:
        raise SequenceFailed(error)
    return Score(
        logprob=sum(logprob.logprob for logprob in scored),
        is_greedy=all(logprob.rank == 1 for logprob in scored),
        num_tokens=len(scored),
    )
