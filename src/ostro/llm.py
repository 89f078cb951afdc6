"""The engine for Python programs: `LLM().generate(...)`, in one process, without a server.

Text becomes token ids here, and ids become text again; the engine below knows ids only.
"""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from ostro.answers.plan import plan_answer
from ostro.answers.tools import ReasoningSettings
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.profile import MOST_STEPS, Recorded, new_trace
from ostro.engine.request import Request
from ostro.engine.speculation import speculation
from ostro.errors import BadRequest, ProfileFailed
from ostro.frontend.driver import Driver
from ostro.frontend.outputs import Completion, Delta, Ranked, Score, Solution, embedding, ranked, score, solution
from ostro.frontend.relevance import relevance_inputs, relevance_request, relevance_scores
from ostro.frontend.requests import Frontend, Message, Prompt, Sampling
from ostro.grammar.compiler import GrammarCompiler
from ostro.sampling_defaults import SamplingDefaults
from ostro.sampling_params import SamplingParams
from ostro.sources.store import ModelStore
from ostro.text.chat import is_about_tools
from ostro.text.pairs import LatestText
from ostro.text.tokenizer import Tokenizer
from ostro.weights import open_checkpoint

Adapter = str | Sequence[str | None] | None


class LLM:
    """A loaded model: `LLM()` is the default model, `LLM("path, short name or Hub id")` any other.

    Calls may come from several threads and be awaited by many tasks; they share each step of the engine.

    `adapters` maps names to LoRA adapters, which are PEFT directories. A call's `adapter` is one name for all prompts,
    or one per prompt; None is the base model.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        config: EngineConfig | None = None,
        *,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        # torch, if the model needs it, takes seconds to import: check everything else first.
        from ostro.backends.choosing import check_without_torch
        from ostro.backends.loading import load_runner
        from ostro.backends.tiers.opening import open_tiers

        self.config = config or EngineConfig()
        if model is not None:
            self.config = replace(self.config, model=str(model))
        if adapters is not None:
            self.config = replace(self.config, adapters=tuple((name, str(path)) for name, path in adapters.items()))
        check_without_torch(self.config.model, self.config)
        checkpoint = open_checkpoint(self.config.model, model_config=self.config.model_config)
        # Keeps the model's files from being deleted as long as this object lives.
        weakref.finalize(self, ModelStore().hold(checkpoint.path).close)
        self.name = checkpoint.name
        self._frontend = Frontend.load(checkpoint, self.config)
        runner = load_runner(checkpoint, self.config)
        self.core = EngineCore(
            runner,
            prefix_caching=self.config.prefix_caching,
            pages_per_seq=self.config.pages_per_seq,
            adapters=self.config.adapter_names,
            speculation=speculation(self.config.speculative, runner.spec),
            tiers=open_tiers(checkpoint, self.config, runner),
        )
        if self.core.tiers is not None:
            weakref.finalize(self, self.core.close)
        frontend = self._frontend
        grammars = GrammarCompiler(lambda: frontend.tokenizer, self.core.runner.spec.vocab_size)
        self._driver = Driver(self.core, frontend.collector, grammars)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._frontend.tokenizer

    @property
    def frontend(self) -> Frontend:
        return self._frontend

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """The model's own defaults for what SamplingParams leave out."""
        return self._frontend.defaults

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapter = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Completes the prompts, texts or token ids, with continuous batching; one result per prompt, in order.

        `params` is one for all or one per prompt. A prompt that cannot run fails the call before anything is generated.
        """
        return self._finish(self._prepare_all(prompts, params, adapter), progress=progress)

    async def agenerate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: Adapter = None,
    ) -> list[Completion]:
        """Like `generate`, without blocking the event loop. Cancelling it aborts what is unfinished."""
        # Long texts take a while to tokenise.
        requests = await asyncio.to_thread(self._prepare_all, prompts, params, adapter)
        finished: dict[int, Completion] = {}
        async with aclosing(self._driver.adrive(requests)) as pieces:
            async for piece in pieces:
                if piece.is_last:
                    finished[piece.collector.request.id] = piece.collector.completion
        return [finished[request.id] for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Iterator[Delta]:
        """Completes one prompt and yields its text as it is generated. Closing the iterator aborts the generation."""
        return self._deltas(self.prepare(prompt, params or SamplingParams(), adapter=adapter))

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Like `stream`, without blocking the event loop. Closing or cancelling it aborts the generation."""
        request = await asyncio.to_thread(self.prepare, prompt, params or SamplingParams(), adapter=adapter)
        async with aclosing(self._driver.adrive([request])) as pieces:
            async for piece in pieces:
                yield piece.delta

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Completion:
        """Answers a conversation of {"role", "content"} messages, using the model's chat template. A structured answer
        comes without reasoning.
        """
        params = params or SamplingParams(max_tokens=None)
        prompt = self.chat_prompt(messages, reasoning=params.structured is None)
        return self.generate([prompt], params, adapter=adapter)[0]

    def chat_prompt(self, messages: Sequence[Message], *, reasoning: bool = True) -> list[int]:
        """The token ids of a conversation, up to the start of the model's answer. Tool calls and their results are
        written as text if the chat template would drop them. Without `reasoning`, it is turned off if the template can
        do that, and closed if the prompt opens it: what follows is the answer.
        """
        if reasoning and not any(map(is_about_tools, messages)):
            return self.tokenizer.encode_chat(messages)
        settings = None if reasoning else ReasoningSettings(enabled=False)
        plan = plan_answer(messages, self._frontend.profile, reasoning=settings)
        ids = self.tokenizer.encode_chat(plan.messages, template_kwargs=plan.template_kwargs)
        reading = plan.reading(self.tokenizer.decode(ids, skip_special=False))
        if reasoning or reading.markers is None or not reading.in_reasoning:
            return ids
        return [*ids, *self.tokenizer.encode(f"\n{reading.markers.end}\n\n", add_special=False)]

    def score(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Prompt],
        *,
        one_pass: bool = False,
        adapter: Adapter = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool = False,
    ) -> list[Score]:
        """Log-probability of each continuation after its prompt, and whether greedy decoding would produce it.

        `one_pass` is for models that also see later tokens: it scores a whole continuation in one pass, which is much
        faster, but not a likelihood. `truncate_prompt_tokens` keeps this many of a prompt's last tokens; -1 keeps as
        many as fit in the context.
        """
        if len(prompts) != len(continuations):
            raise BadRequest(
                f"Give as many continuations as prompts, got {len(prompts)} prompts and {len(continuations)}.",
                param="continuations",
            )
        triples = zip(prompts, continuations, _for_each(adapter, len(prompts)), strict=True)
        requests = [
            self.prepare_scoring(
                prompt, continuation, one_pass=one_pass, adapter=name, truncate_prompt_tokens=truncate_prompt_tokens
            )
            for prompt, continuation, name in triples
        ]
        return [score(completion) for completion in self._finish(requests, progress=progress)]

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        adapter: Adapter = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[list[float]]:
        """One embedding per text, pooled as the model's own configuration says.

        `dimensions` shortens them, if the model was trained for that. `prompt_name` names one of the model's prompts,
        such as "query". `truncate_prompt_tokens` keeps this many tokens, the first ones for an encoder and the last
        ones for a decoder; -1 keeps as many as fit in the context.
        """
        batch = _as_list(texts)
        requests = [
            self.prepare_embedding(
                text, adapter=name, prompt_name=prompt_name, truncate_prompt_tokens=truncate_prompt_tokens
            )
            for text, name in zip(batch, _for_each(adapter, len(batch)), strict=True)
        ]
        vectors = [embedding(completion) for completion in self._finish(requests)]
        pooling = self._frontend.pooling
        return vectors if pooling is None else [pooling.shortened(vector, dimensions) for vector in vectors]

    def relevance(self, pairs: Sequence[tuple[str, str]], *, truncate_prompt_tokens: int | None = None) -> list[float]:
        """How relevant each pair's second text is to the first: by a cross-encoder, by a language model that judges, or
        by the cosine of embeddings.

        `truncate_prompt_tokens` shortens each pair, or each text to embed, to this many tokens; -1 to what fits.
        """
        latest = LatestText()
        requests = [
            self._checked(
                relevance_request(
                    self._frontend,
                    each,
                    max_len=self._max_len,
                    latest=latest,
                    truncate_prompt_tokens=truncate_prompt_tokens,
                )
            )
            for each in relevance_inputs(self._frontend, pairs)
        ]
        completions = self._finish(requests)
        return relevance_scores(self._frontend, pairs, completions)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[Ranked]:
        """The documents in order of `frontend.relevance` to the query, the best `top_n` of them."""
        if top_n is not None and top_n < 1:
            raise BadRequest(f"top_n must be at least 1, got {top_n}.", param="top_n")
        pairs = [(query, document) for document in documents]
        return ranked(self.relevance(pairs, truncate_prompt_tokens=truncate_prompt_tokens), top_n)

    def solve(self, inputs: Sequence[Sequence[int]], puzzle_ids: Sequence[int] | None = None) -> list[Solution]:
        """Predicts a token for every position of each puzzle at once, with an HRM of upstream's dialect.

        `puzzle_ids` has one id per puzzle; the default is 0, which stands for none in particular.
        """
        chosen = [0] * len(inputs) if puzzle_ids is None else puzzle_ids
        if len(chosen) != len(inputs):
            raise BadRequest(
                f"{len(inputs)} inputs need as many puzzle_ids, got {len(chosen)}.",
                param="puzzle_ids",
            )
        requests = [
            self._checked(self._frontend.solving_request(each, puzzle=puzzle, max_len=self._max_len))
            for each, puzzle in zip(inputs, chosen, strict=True)
        ]
        return [solution(completion) for completion in self._finish(requests)]

    @contextmanager
    def profile(self, directory: str | Path, *, max_steps: int = MOST_STEPS) -> Iterator[Path]:
        """Profiles the first steps in the block. Yields the path of the trace, which is complete when the block is
        left: gzipped Chrome trace JSON, for ui.perfetto.dev.
        """
        path, outcomes = new_trace(Path(directory), self.name), list[Recorded]()
        self.core.start_profile(path, max_steps=max_steps, ended=outcomes.append)
        try:
            yield path
        finally:
            self.core.end_profile()
        if (error := outcomes[0].error) is not None:
            raise ProfileFailed(error)

    def prepare(self, prompt: Prompt, params: SamplingParams, *, adapter: str | None = None) -> Request:
        """The engine's request for a prompt; raises BadRequest if it could never run."""
        return self._prepare(prompt, self._sampling(params), adapter)

    def prepare_scoring(
        self,
        prompt: Prompt,
        continuation: Prompt,
        *,
        one_pass: bool = False,
        adapter: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> Request:
        """The engine's request for a score; raises BadRequest if it could never run."""
        return self._checked(
            self._frontend.scoring_request(
                prompt,
                continuation,
                max_len=self._max_len,
                one_pass=one_pass,
                adapter=adapter,
                truncate_prompt_tokens=truncate_prompt_tokens,
            )
        )

    def prepare_embedding(
        self,
        text: Prompt,
        *,
        adapter: str | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> Request:
        """The engine's request for a text's embedding; raises Unsupported for a model that has none."""
        return self._checked(
            self._frontend.embedding_request(
                text,
                max_len=self._max_len,
                adapter=adapter,
                prompt_name=prompt_name,
                truncate_prompt_tokens=truncate_prompt_tokens,
            )
        )

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Completion]]:
        """Runs prepared requests together; yields (request id, completion) of each as it finishes."""
        with closing(self._driver.drive(requests)) as pieces:
            for piece in pieces:
                if piece.is_last:
                    yield piece.collector.request.id, piece.collector.completion

    def _deltas(self, request: Request) -> Iterator[Delta]:
        with closing(self._driver.drive([request])) as pieces:
            for piece in pieces:
                yield piece.delta

    def _prepare_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: Adapter,
    ) -> list[Request]:
        batch = _as_list(prompts)
        if isinstance(params, Sequence):
            each = [self._sampling(own) for own in params]
        else:
            each = [self._sampling(params or SamplingParams())] * len(batch)
        if len(each) != len(batch):
            raise BadRequest(f"{len(batch)} prompts need as many sampling params, got {len(each)}.", param="params")
        chosen = _for_each(adapter, len(batch))
        return [self._prepare(prompt, own, name) for prompt, own, name in zip(batch, each, chosen, strict=True)]

    def _sampling(self, params: SamplingParams) -> Sampling:
        structured = params.structured
        return self._frontend.sampling(params, None if structured is None else self._frontend.checker.check(structured))

    def _prepare(self, prompt: Prompt, sampling: Sampling, adapter: str | None) -> Request:
        return self._checked(self._frontend.request(prompt, sampling, max_len=self._max_len, adapter=adapter))

    @property
    def _max_len(self) -> int:
        return self.core.scheduler.max_len

    def _checked(self, request: Request) -> Request:
        self.core.check(request)
        return request

    def _finish(self, requests: Sequence[Request], *, progress: bool = False) -> list[Completion]:
        from tqdm import tqdm

        finished: dict[int, Completion] = {}
        with tqdm(total=len(requests), unit="prompt", disable=not progress) as bar:
            for id, completion in self.run(requests):
                finished[id] = completion
                bar.update()
        return [finished[request.id] for request in requests]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Wraps a single prompt in a list."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _for_each(adapter: Adapter, count: int) -> Sequence[str | None]:
    """One adapter per prompt."""
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if len(adapter) != count:
        raise BadRequest(f"{count} prompts need as many adapters, or one name, got {len(adapter)}.", param="adapter")
    return adapter
