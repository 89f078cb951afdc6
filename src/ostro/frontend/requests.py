"""Prompts to requests, and progress to text: what `LLM` and the server share. Knows a tokenizer; knows no engine."""

import itertools
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Self

from ostro.answers.probe import profile_of
from ostro.answers.profile import TemplateProfile
from ostro.config import EngineConfig, ToolFormat
from ostro.engine.constraint import Constraint
from ostro.engine.request import Request, Task
from ostro.engine.scheduler import Progress
from ostro.engine.sequence import FinishReason
from ostro.errors import BadRequest, Unsupported, UnsupportedModel
from ostro.frontend.outputs import Choice, Completion, Delta
from ostro.grammar.checker import GrammarChecker
from ostro.sampling_defaults import SamplingDefaults
from ostro.sampling_params import MAX_SEED, SamplingParams
from ostro.text.model_tokenizer import load_tokenizer
from ostro.text.pairs import LatestText, PairPrompt, pair_prompt
from ostro.text.stream import TextStream
from ostro.text.tokenizer import Tokenizer
from ostro.weights import Checkpoint, Pooling
from ostro.weights.pooling import unit
from ostro.weights.relevance import Judge, Ranking, read_judge, read_ranking

Prompt = str | Sequence[int]
Message = Mapping[str, object]

# Tokens to reserve for the output if no limit is set.
_USUAL_ANSWER = 1024


class Sampling(NamedTuple):
    """Sampling settings, prepared once for all prompts of one request."""

    params: SamplingParams
    """The caller's settings, with the model's own defaults for what was left out."""
    bad_word_ids: tuple[tuple[int, ...], ...]
    constraint: Constraint | None = None
    """What the output must match."""


class Frontend:
    """Makes and numbers requests. Does not check what only the engine can know."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        pooling: Pooling | None = None,
        defaults: SamplingDefaults | None = None,
        *,
        ranking: Ranking | None = None,
        judge: Judge | None = None,
        tool_format: ToolFormat = "auto",
    ) -> None:
        """`ranking` is for cross-encoders, `judge` for language models that rank, `pooling` for embedding models."""
        self.name = name
        self.ranking, self.judge = ranking, judge
        # Made here rather than for the first pair, because it blocks on the process that also renders conversations. A
        # template that cannot rank may well chat, so the error is raised only when ranking.
        self._pair_prompt = None if judge is None else _pair_prompt(tokenizer, judge)
        self._tool_format = tool_format
        self._probing = threading.Lock()
        self._profile: TemplateProfile | None = None
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.defaults = defaults or SamplingDefaults()
        # Atomic, because requests may be made in several threads.
        self._ids = itertools.count(1)

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, config: EngineConfig, *, name: str | None = None, tokenizer: Path | None = None
    ) -> Self:
        """The model's frontend, with the tokenizer and the sampling defaults that the settings choose.

        `tokenizer` is the path of the tokenizer that they name, if known.
        """
        chosen = load_tokenizer(config, checkpoint, tokenizer)
        defaults = sampling_defaults(checkpoint, config)
        return cls(
            name or checkpoint.name,
            chosen,
            checkpoint.pooling,
            defaults,
            ranking=read_ranking(checkpoint.config),
            judge=read_judge(checkpoint.path, checkpoint.config),
            tool_format=config.tool_format,
        )

    def sampling(self, params: SamplingParams, constraint: Constraint | None = None) -> Sampling:
        """Prepares the params for `request`; the cost is that of tokenising the bad words. `constraint` is what
        `checker` made of the params' structured output, if they have one.
        """
        return Sampling(self.defaults.fill(params), self.tokenizer.bad_word_ids(params.bad_words), constraint)

    @property
    def profile(self) -> TemplateProfile:
        """What the chat template supports. The first access blocks on the process that renders it: do not use it in an
        event loop, nor while a conversation is being rendered.
        """
        with self._probing:
            if self._profile is None:
                self._profile = profile_of(self.tokenizer, self._tool_format)
            return self._profile

    @property
    def is_probed(self) -> bool:
        """Whether `profile` is available without blocking."""
        return self._profile is not None

    @cached_property
    def checker(self) -> GrammarChecker:
        """The checker of structured outputs; its process starts with the first of them."""
        return GrammarChecker(self.tokenizer)

    def close(self) -> None:
        """Ends the processes that render templates and check structured outputs."""
        self.tokenizer.close()
        if "checker" in self.__dict__:
            self.checker.close()

    def request(self, prompt: Prompt, sampling: Sampling, *, max_len: int, adapter: str | None = None) -> Request:
        """A request to continue the prompt, with the adapter if one is named.

        `max_len` is the context length, which decides how much of the prompt is kept if it may be truncated.
        """
        params = sampling.params
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        ids = _last(ids, params.truncate_prompt_tokens, max_len - _reserved(params, max_len))
        return Request(
            id=next(self._ids),
            prompt_ids=tuple(ids),
            params=params,
            seed=secrets.randbelow(MAX_SEED) if params.seed is None else params.seed,
            eos_ids=self.tokenizer.eos_ids,
            bad_word_ids=sampling.bad_word_ids,
            constraint=sampling.constraint,
            prompt_logprobs_from=None if params.prompt_logprobs is None else 1,
            adapter=adapter,
        )

    def predicted_ids(self, prediction: str) -> tuple[int, ...]:
        """A request's `predicted_ids` for a text that the output is expected to be; none if it is empty."""
        if not prediction:
            return ()
        return tuple(self.tokenizer.encode(prediction, add_special=False, allow_special=False))

    def scoring_request(
        self,
        prompt: Prompt,
        continuation: Prompt,
        *,
        max_len: int,
        one_pass: bool = False,
        adapter: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> Request:
        """A request for the log-probabilities of a continuation. The prompt may be truncated as in SamplingParams."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, truncate_prompt_tokens=truncate_prompt_tokens)
        whole, rest = self._encode_pair(prompt, continuation)
        context = _last(whole, params.truncate_prompt_tokens, max_len - len(rest))
        params = params.with_changes(truncate_prompt_tokens=None)
        request = self.request([*context, *rest], self.sampling(params), max_len=max_len, adapter=adapter)
        return replace(request, prompt_logprobs_from=len(context), one_pass=one_pass)

    def embedding_request(
        self,
        text: Prompt,
        *,
        max_len: int,
        adapter: str | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> Request:
        """A request for a text's embedding, after the model's prompt of that name or its default one; raises
        Unsupported for a model that has none.
        """
        if self.ranking is not None:
            raise Unsupported(
                f"{self.name} is a classifier: it ranks texts (/v1/rerank, /v1/score) but embeds none.", param="model"
            )
        if self.pooling is None:
            raise Unsupported(
                f"{self.name} is not an embedding model: it has no modules.json with a pooling module. "
                "Load one that has, such as a sentence-transformers checkpoint.",
                param="model",
            )
        params = SamplingParams(max_tokens=0, truncate_prompt_tokens=truncate_prompt_tokens)
        if isinstance(text, str):
            text = self.pooling.prompts.named(prompt_name) + text
        elif prompt_name is not None:
            raise BadRequest("Token ids get no prompt: leave prompt_name out, or send text.", param="prompt_name")
        if self.pooling.keeps_start and truncate_prompt_tokens is not None:
            most = max_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
            text = self.tokenizer.encode_start(text, most) if isinstance(text, str) else text[:most]
            params = params.with_changes(truncate_prompt_tokens=None)
        request = self.request(text, self.sampling(params), max_len=max_len, adapter=adapter)
        return replace(request, task=Task.EMBED)

    def pair_request(
        self,
        query: str,
        document: str,
        *,
        max_len: int,
        truncate_prompt_tokens: int | None = None,
        latest: LatestText | None = None,
    ) -> Request:
        """A request for a cross-encoder's output for a pair of texts, which is one number; raises Unsupported for
        other models. `latest` is for a query with several documents.
        """
        if self.ranking is None:
            raise Unsupported(f"{self.name} is not a cross-encoder. Load one to rank texts.", param="model")
        if self.ranking.num_labels != 1:
            raise Unsupported(
                f"{self.name} sorts texts into {self.ranking.num_labels} classes. To rank them, load a cross-encoder "
                "that has one.",
                param="model",
            )
        # Checks the number.
        params = SamplingParams(max_tokens=0, truncate_prompt_tokens=truncate_prompt_tokens)
        most = max_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        ids, second_at = self.tokenizer.encode_pair(query, document, most, latest)
        sampling = self.sampling(params.with_changes(truncate_prompt_tokens=None))
        return replace(self.request(ids, sampling, max_len=max_len), task=Task.EMBED, second_at=second_at)

    def judging_request(
        self,
        query: str,
        document: str,
        answer: int,
        *,
        max_len: int,
        adapter: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> Request:
        """A request for the log-probability of a judge's answer, a token, to a pair of texts."""
        assert self._pair_prompt is not None, "the model is not a judge"
        if isinstance(self._pair_prompt, str):
            raise Unsupported(f"{self.name} cannot rank texts. {self._pair_prompt}", param="model")
        if truncate_prompt_tokens is not None:
            raise Unsupported(
                f"{self.name} reads both texts within a prompt, which is not shortened: leave truncate_prompt_tokens "
                "out, and shorten the texts.",
                param="truncate_prompt_tokens",
            )
        ids = self.tokenizer.encode_prompted(self._pair_prompt, query, document)
        return self.scoring_request(ids, [answer], max_len=max_len, adapter=adapter)

    def solving_request(self, inputs: Sequence[int], *, max_len: int, puzzle: int = 0) -> Request:
        """A request for a token at every position of the inputs at once."""
        request = self.request(inputs, self.sampling(SamplingParams(max_tokens=0)), max_len=max_len)
        return replace(request, task=Task.SOLVE, puzzle=puzzle)

    def collector(self, request: Request) -> "Collector":
        return Collector(self.tokenizer, request, normalize=self.pooling is not None and self.pooling.normalize)

    def _encode_pair(self, prompt: Prompt, continuation: Prompt) -> tuple[list[int], list[int]]:
        """Both texts as the model would see them joined: white space at the border belongs to the continuation."""
        if isinstance(prompt, str) and isinstance(continuation, str):
            # Closing special tokens would end up between the two.
            closing = self.tokenizer.num_closing
            whole = self.tokenizer.encode(prompt + continuation)
            whole = whole[: len(whole) - closing]
            border = len(self.tokenizer.encode(prompt.rstrip())) - closing
        elif not isinstance(prompt, str) and not isinstance(continuation, str):
            whole, border = [*prompt, *continuation], len(prompt)
        else:
            raise BadRequest("A prompt and its continuation must both be texts or both be token ids.", param="prompts")
        if not border:
            raise BadRequest("A continuation is scored after at least one token; the prompt is empty.", param="prompts")
        if border >= len(whole):
            raise BadRequest("A continuation must hold at least one token.", param="continuations")
        return whole[:border], whole[border:]


def _pair_prompt(tokenizer: Tokenizer, judge: Judge) -> PairPrompt | str:
    """The prompt, or the reason why there is none and what to do about it."""
    if tokenizer.chat_template is None:
        return "It ranks by a chat template, and has none. Set chat_template to a .jinja file."
    try:
        return pair_prompt(
            tokenizer.renderer,
            judge.messages,
            add_generation_prompt=judge.add_generation_prompt,
            template_kwargs=judge.variables,
        )
    except (BadRequest, UnsupportedModel) as error:
        return f"{error.message.rstrip('.')}. Set chat_template to a template that ranks."


def _last(ids: Sequence[int], count: int | None, room: int) -> Sequence[int]:
    """The last `count` ids: None for all, and -1 for as many as there is room for, but at least one."""
    if count is None:
        return ids
    return ids[-(max(room, 1) if count == -1 else count) :]


def _reserved(params: SamplingParams, max_len: int) -> int:
    """Tokens that a truncated prompt leaves for the output: the request's limit, or the usual length of an answer."""
    if params.max_tokens is not None:
        return params.max_tokens
    return min(params.default_max_tokens or _USUAL_ANSWER, max_len // 2)


def sampling_defaults(checkpoint: Checkpoint, config: EngineConfig) -> SamplingDefaults:
    """The sampling settings that the model's files recommend; empty if the settings ignore them."""
    if config.generation_config == "ignore":
        return SamplingDefaults()
    return SamplingDefaults.read(checkpoint.generation_config, source=checkpoint.name)


class Collector:
    """Gathers one request's progress into its completion."""

    def __init__(self, tokenizer: Tokenizer, request: Request, *, normalize: bool = False) -> None:
        params = request.params
        self.request = request
        self._stop_ids = request.stop_ids
        self._normalize = normalize
        self._streams = [
            TextStream(tokenizer, request.prompt_ids, params, shown_ids=request.shown_ids) for _ in range(params.n)
        ]
        wants_logprobs = params.logprobs is not None
        self.completion = Completion(
            request.prompt_ids,
            [Choice(index, logprobs=[] if wants_logprobs else None) for index in range(params.n)],
            prompt_logprobs=None if request.prompt_logprobs_from is None else [None] * request.prompt_logprobs_from,
            has_prediction=bool(request.predicted_ids),
        )

    def take(self, step: Progress) -> Delta:
        """Adds a step's progress and returns it as text. A finish reason that the step lacks is a stop string's."""
        choice, stream = self.completion.choices[step.choice], self._streams[step.choice]
        if self.completion.prompt_logprobs is not None:
            self.completion.prompt_logprobs += step.prompt_logprobs
        if step.choice == 0:
            self.completion.num_cached = step.num_cached
            self.completion.embedding = self._vector(step.pooled)
            self.completion.solution = step.solution
        text = stream.push(step.token_ids, last_is_stop=self._ends_in_stop(step))
        if step.finish_reason is not None:
            text += stream.flush()
        token_ids, logprobs = step.token_ids, step.logprobs
        if stream.stopped_by is not None:
            # Drop what the engine generated before it learned of the stop.
            num_wanted = stream.num_tokens - len(choice.token_ids)
            token_ids, logprobs = token_ids[:num_wanted], logprobs[:num_wanted]
        num_accepted = min(step.num_accepted, len(token_ids))
        self.completion.num_accepted += num_accepted
        self.completion.num_rejected += step.num_predicted - num_accepted
        choice.token_ids += token_ids
        if choice.logprobs is not None:
            choice.logprobs += logprobs
        choice.text += text
        choice.error = step.error
        choice.stopped_by = stream.stopped_by
        if stream.stopped_by is not None:
            choice.finish_reason = "stop"
        elif step.finish_reason is not None:
            choice.finish_reason = step.finish_reason.value
        kept = None if choice.logprobs is None else logprobs
        return Delta(step.choice, text, choice.finish_reason, token_ids, kept, step.error)

    def _ends_in_stop(self, step: Progress) -> bool:
        """Whether the last token only ends the choice. A structure's last token is text."""
        stopped = step.finish_reason is FinishReason.STOP and bool(step.token_ids)
        return stopped and step.token_ids[-1] in self._stop_ids

    def _vector(self, pooled: list[float] | None) -> list[float] | None:
        if pooled is None or not self._normalize:
            return pooled
        return unit(pooled)
