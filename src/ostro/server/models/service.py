"""One model for many concurrent callers: text in, text out. Combines the tokenizer and the engine's handle; knows no
HTTP.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ostro.config import EngineConfig
from ostro.engine.admission import AdmissionRules
from ostro.engine.constraint import Constraint
from ostro.engine.counters import EngineCounters
from ostro.engine.request import Request
from ostro.engine_process.handle import EngineHandle, Sleep, State, Stream
from ostro.engine_process.messages import Heartbeat, Located, ModelInfo, Profiled
from ostro.errors import BadRequest, ContextLengthExceeded, ModelError, OstroError
from ostro.frontend.outputs import Completion, Delta
from ostro.frontend.relevance import (
    Pair,
    RelevanceInput,
    relevance_inputs,
    relevance_request,
    relevance_scores,
    tokens_read,
)
from ostro.frontend.requests import Frontend, Message, Prompt, Sampling
from ostro.processes.allocator import give_back_free_memory
from ostro.sampling_defaults import SamplingDefaults
from ostro.sampling_params import SamplingParams
from ostro.server.dialects.chat_preparation import ChatPreparation
from ostro.server.dialects.chat_request import ChatRequest, PreparedChat
from ostro.text.pairs import LatestText
from ostro.text.tokenizer import ChatText, Tokenizer
from ostro.weights import Pooling, open_checkpoint

if TYPE_CHECKING:
    from ostro.server.models.remote_prefill import RemotePrefill

__all__ = ["Generation", "ModelService", "State"]

# Shorter texts are tokenised faster than a thread wakes up.
_LONG_TEXT = 2_000
# Characters tokenised in a thread before another request gets a turn.
_BATCH = 50_000
# Longer texts, in characters, leave enough freed memory behind to be worth a malloc_trim.
_VERY_LONG_TEXT = 200_000
# Cost of a request besides its text, in characters tokenised.
_EACH = 50
_THREADS = 2
# How long after its start a model first counts as idle.
_SETTLING_SECONDS = 2.0
# Longest text that is tokenised at all: this many characters, or this many per token of the context if that is more.
_LONGEST_TEXT = 1 << 20
_CHARACTERS_A_TOKEN = 8

_T = TypeVar("_T")


class Generation:
    """Streams one request's text; iterate it once. `completion` holds everything generated so far.

    Each item holds the deltas of all choices since the last one. Close it with `aclose` (or `contextlib.aclosing`):
    this aborts an unfinished request in the engine. Raises Unavailable if the engine is not ready, or dies.
    """

    def __init__(
        self, handle: EngineHandle, frontend: Frontend, request: Request, prefill: "RemotePrefill | None" = None
    ) -> None:
        self.request = request
        self._prefill = prefill
        self._collector = frontend.collector(request)
        self.completion: Completion = self._collector.completion
        self.first_token: float | None = None
        """Arrival time of the first token, by `time.monotonic`."""
        self._stream: Stream | None = None
        self._deltas = self._run(handle)

    @property
    def began(self) -> float | None:
        """When the engine's first step with it began, by the same clock."""
        return None if self._stream is None else self._stream.began

    async def offered(self) -> int:
        """Number of prompt tokens that other engines can find, for an ended request with `shares_prompt`."""
        assert self._stream is not None
        assert self._stream.offered is not None
        return await self._stream.offered

    @property
    def preemptions(self) -> int:
        return 0 if self._stream is None else self._stream.preemptions

    async def run(self) -> Completion:
        """Runs it to its end."""
        async with aclosing(self._deltas):
            async for _ in self._deltas:
                pass
        return self.completion

    def __aiter__(self) -> AsyncGenerator[list[Delta], None]:
        return self._deltas

    async def __anext__(self) -> list[Delta]:
        return await self._deltas.__anext__()

    async def aclose(self) -> None:
        await self._deltas.aclose()

    async def _run(self, handle: EngineHandle) -> AsyncGenerator[list[Delta], None]:
        if self._prefill is not None:
            await self._prefill.ask(handle, self.request)
        stream = self._stream = handle.submit(self.request)
        take = self._collector.take
        try:
            async for steps in stream:
                if self.first_token is None and any(step.token_ids for step in steps):
                    self.first_token = time.monotonic()
                deltas = []
                for step in steps:
                    delta = take(step)
                    if step.finish_reason is None and delta.finish_reason is not None:
                        # A stop string: the engine, which knows no text, would continue.
                        stream.finish_choice(step.choice)
                    deltas.append(delta)
                yield deltas
        finally:
            stream.close()


class ModelService:
    """Use within one event loop. `start` starts loading, `settled` waits for the outcome, `stop` ends everything."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        path: str | None = None,
        name: str | None = None,
        tokenizer: str | None = None,
        stall_seconds: float = 60.0,
        load_stall_seconds: float = 600.0,
        prefill: "RemotePrefill | None" = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        """`path` is the location of the model's files, if known, and `name` the model's name at their source.
        `tokenizer` is the location of a separate tokenizer, if settings name one and it is known. `prefill` has long
        prompts computed by another server. `sleep` paces the engine's supervision.
        """
        self.config = config
        self._prefill = prefill
        self._tokenizer_path = None if tokenizer is None else Path(tokenizer)
        self._handle = EngineHandle(
            config,
            path=path,
            name=name,
            stall_seconds=stall_seconds,
            load_stall_seconds=load_stall_seconds,
            sleep=sleep,
        )
        self._frontend: Frontend | None = None
        self._admission: AdmissionRules | None = None
        self._loading: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="text")

    @property
    def state(self) -> State:
        """READY once the engine is ready and the tokenizer is loaded."""
        if self._handle.state is State.READY and self._frontend is None:
            return State.LOADING
        return self._handle.state

    @property
    def failure(self) -> OstroError | None:
        """Why the model cannot be served, once that is final."""
        return self._handle.failure

    @property
    def refusal(self) -> OstroError | None:
        """Why this host never takes requests: another host does."""
        return self._handle.refusal

    @property
    def info(self) -> ModelInfo | None:
        return self._handle.info

    @property
    def heartbeat(self) -> Heartbeat:
        """The engine's latest counters. They start over with a new engine process."""
        return self._handle.heartbeat

    @property
    def counters(self) -> EngineCounters:
        """The engine's counters, across restarts."""
        return self._handle.counters

    @property
    def restarts(self) -> int:
        return self._handle.restarts

    @property
    def engine_pid(self) -> int | None:
        return self._handle.pid

    @property
    def num_requests(self) -> int:
        """Requests in the engine."""
        return self._handle.num_streams

    @property
    def name(self) -> str:
        if self._frontend is not None:
            return self._frontend.name
        return _name_of(self.config.model)

    @property
    def ranks(self) -> bool:
        """Whether the model is a classifier, which neither embeds nor generates."""
        return self._frontend is not None and self._frontend.ranking is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises Unavailable before it is loaded."""
        return self._loaded().tokenizer

    @property
    def sampling_defaults(self) -> SamplingDefaults | None:
        """The model's own sampling defaults; None before its files are read."""
        return None if self._frontend is None else self._frontend.defaults

    @property
    def pooling(self) -> Pooling | None:
        return None if self._frontend is None else self._frontend.pooling

    async def start(self) -> None:
        """Starts loading the model and its tokenizer; does not wait for them."""
        self._handle.start()
        self._loading = asyncio.create_task(self._load_frontend(), name="tokenizer")

    async def settled(self) -> None:
        """Waits until requests are accepted; raises the error if loading fails."""
        assert self._loading is not None, "start the service first"
        await self._handle.settled()
        await asyncio.wait([self._loading])
        if self.state is not State.READY:
            # The engine died meanwhile, or the tokenizer could not be loaded.
            await self._handle.settled()

    async def stop(self) -> None:
        """Ends the engine. Unfinished requests fail with Unavailable."""
        await self._handle.stop()
        if self._prefill is not None:
            await self._prefill.close()
        if self._loading is not None:
            await asyncio.wait([self._loading])
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.wait([self._preparing])
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._frontend is not None:
            self._frontend.close()

    async def offer_all(self) -> None:
        """Shares all cached prefixes with other engines in the background, if the settings say so."""
        await self._handle.offer_all()

    async def profile(self, path: Path, *, seconds: float, max_steps: int) -> Profiled:
        """Profiles the engine into a file: see `EngineHandle.profile`."""
        return await self._handle.profile(str(path), seconds=seconds, max_steps=max_steps)

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        turn: int = 0,
        adapter: str | None = None,
    ) -> Request:
        """The engine's request for a prompt, text or token ids; raises BadRequest if it could never run."""
        [request] = await self.prepare_all(
            [prompt], params, cache_salt=cache_salt, priority=priority, turn=turn, adapter=adapter
        )
        return request

    async def prepare_all(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        turn: int = 0,
        adapter: str | None = None,
    ) -> list[Request]:
        """The engine's requests for the prompts, all with the same params."""
        frontend, admission = self._ready()
        constraint = None if params.structured is None else await frontend.checker.check_async(params.structured)
        sampling = await self._sampling(frontend, params, constraint)

        def make(prompt: Prompt) -> Request:
            if params.truncate_prompt_tokens is None:
                _check_fits(prompt, frontend.tokenizer, admission, "prompt")
            _check_text(prompt, admission, "prompt")
            request = frontend.request(prompt, sampling, max_len=admission.max_len, adapter=adapter)
            request = replace(request, cache_salt=cache_salt, priority=priority, turn=turn)
            admission.check(request)
            return request

        return await self._make_all(make, prompts, len)

    async def prepare_chat(self, chat: ChatRequest, *, turn: int = 0, adapter: str | None = None) -> PreparedChat:
        """The engine's request for a conversation's next message, rendered by the model's chat template."""
        frontend, admission = self._ready()
        if chat.params.truncate_prompt_tokens is None:
            _check_fits(_last_words(chat.messages), frontend.tokenizer, admission, "messages")
        preparation = self._chat_preparation()
        plan, rendered, reading = await preparation.prompt(chat)
        sampling = await self._sampling(frontend, chat.params, None)

        def make(rendered: ChatText) -> Request:
            ids = frontend.tokenizer.encode_rendered(rendered)
            _check_text(chat.prediction, admission, "prediction")
            request = frontend.request(ids, sampling, max_len=admission.max_len, adapter=adapter)
            request = replace(
                request,
                cache_salt=chat.cache_salt,
                priority=chat.priority,
                turn=turn,
                predicted_ids=frontend.predicted_ids(chat.prediction),
            )
            if chat.fits_output:
                request = _fitted(request, admission.max_len)
            admission.longest(request, prompt="messages")
            return request

        length = len(rendered.text) + len(chat.prediction)
        [request] = await self._make_all(make, [rendered], lambda _: length)
        constraint = await preparation.constraint(chat, plan, reading)
        request = replace(request, constraint=constraint, shown_ids=reading.kept_ids)
        admission.check(request, prompt="messages")
        return PreparedChat(request, plan, reading)

    async def prepare_scoring(
        self,
        pairs: Sequence[tuple[Prompt, Prompt]],
        *,
        one_pass: bool = False,
        cache_salt: str = "",
        adapter: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[Request]:
        """The engine's requests for the log-likelihoods of continuations, each after its prompt; `one_pass` as in
        `Request`.
        """
        frontend, admission = self._ready()

        def make(pair: tuple[Prompt, Prompt]) -> Request:
            prompt, continuation = pair
            _check_fits(continuation, frontend.tokenizer, admission, "continuations")
            if truncate_prompt_tokens is None:
                _check_fits(prompt, frontend.tokenizer, admission, "prompts")
            _check_text(continuation, admission, "continuations")
            _check_text(prompt, admission, "prompts")
            request = frontend.scoring_request(
                prompt,
                continuation,
                max_len=admission.max_len,
                one_pass=one_pass,
                adapter=adapter,
                truncate_prompt_tokens=truncate_prompt_tokens,
            )
            request = replace(request, cache_salt=cache_salt)
            admission.check(request, prompt="prompts")
            return request

        return await self._make_all(make, pairs, lambda pair: len(pair[0]) + len(pair[1]))

    async def prepare_embeddings(
        self,
        texts: Sequence[Prompt],
        *,
        adapter: str | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[Request]:
        """The engine's requests for the texts' embeddings; raises Unsupported for a model that has none."""
        frontend, admission = self._ready()

        def make(text: Prompt) -> Request:
            if truncate_prompt_tokens is None:
                _check_fits(text, frontend.tokenizer, admission, "input")
            _check_text(text, admission, "input")
            request = frontend.embedding_request(
                text,
                max_len=admission.max_len,
                adapter=adapter,
                prompt_name=prompt_name,
                truncate_prompt_tokens=truncate_prompt_tokens,
            )
            admission.check(request, prompt="input")
            return request

        return await self._make_all(make, texts, len)

    async def prepare_relevance(
        self,
        pairs: Sequence[Pair],
        *,
        fields: tuple[str, str],
        adapter: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[Request]:
        """The engine's requests for `relevance_scores`. `fields` are the request's names of the pairs' texts."""
        frontend, admission = self._ready()
        latest = LatestText()

        def make(reading: RelevanceInput) -> Request:
            for text, field in zip(reading.texts, fields, strict=True):
                if text is None:
                    continue
                if truncate_prompt_tokens is None:
                    _check_fits(text, frontend.tokenizer, admission, field)
                _check_text(text, admission, field)
            request = relevance_request(
                frontend,
                reading,
                max_len=admission.max_len,
                latest=latest,
                adapter=adapter,
                truncate_prompt_tokens=truncate_prompt_tokens,
            )
            first, second = (len(text or "") for text in reading.texts)
            admission.check(request, prompt=fields[second >= first])
            return request

        return await self._make_all(make, relevance_inputs(frontend, pairs), lambda reading: reading.num_characters)

    def relevance_scores(self, pairs: Sequence[Pair], completions: Sequence[Completion]) -> list[float]:
        return relevance_scores(self._loaded(), pairs, completions)

    def tokens_read(self, completions: Sequence[Completion]) -> int:
        return tokens_read(self._loaded(), completions)

    async def prepare_solving(self, puzzles: Sequence[tuple[Sequence[int], int]]) -> list[Request]:
        """The engine's requests to solve puzzles, each given as its inputs and its id: a token for every position.
        Raises Unsupported for models other than HRM.
        """
        frontend, admission = self._ready()

        def make(puzzle: tuple[Sequence[int], int]) -> Request:
            inputs, number = puzzle
            request = frontend.solving_request(inputs, puzzle=number, max_len=admission.max_len)
            admission.check(request, prompt="inputs")
            return request

        return await self._make_all(make, puzzles, lambda puzzle: len(puzzle[0]))

    def stream(self, request: Request) -> Generation:
        """Runs a prepared request. It is submitted when first read, and aborted when closed or cancelled."""
        return Generation(self._handle, self._loaded(), request, self._prefill)

    async def complete(self, request: Request) -> Completion:
        """Runs a prepared request to its end."""
        return await self.stream(request).run()

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """Completes one prompt, text or token ids."""
        return await self.complete(await self.prepare(prompt, params or SamplingParams()))

    async def stream_generate(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Completes one prompt and streams the text. Closing the generator aborts the request."""
        generation = self.stream(await self.prepare(prompt, params or SamplingParams()))
        async with aclosing(generation):
            async for deltas in generation:
                for delta in deltas:
                    yield delta

    async def _load_frontend(self) -> None:
        try:
            located = await self._handle.located()
        except OstroError:
            # The engine's handle has the reason, and reports it on request.
            return
        loop = asyncio.get_running_loop()
        loading = loop.run_in_executor(self._threads, _open_frontend, located, self.config, self._tokenizer_path)
        [outcome] = await asyncio.gather(loading, return_exceptions=True)
        if isinstance(outcome, Frontend):
            self._frontend = outcome
            # Readiness does not depend on it: the first chat request waits for it.
            loop.run_in_executor(self._threads, lambda: outcome.profile)
            self._preparing = asyncio.create_task(self._prepare_when_idle(outcome), name="preparing")
        elif isinstance(outcome, OstroError):
            await self._handle.fail(outcome)
        else:
            # Fail on any other exception too, or callers would wait forever.
            await self._handle.fail(ModelError(f"The tokenizer of {located.name} cannot be loaded ({outcome!r})."))

    async def _prepare_when_idle(self, frontend: Frontend) -> None:
        """What the first structured output would otherwise wait for; the engine does its own part."""
        # Whatever is wrong: the first structured output will say it.
        with suppress(Exception):
            await self._handle.settled()
            await asyncio.sleep(_SETTLING_SECONDS)
            while self.num_requests:
                await asyncio.sleep(_SETTLING_SECONDS)
            info = self.info
            if info is not None and info.generates and info.constrains:
                await frontend.checker.start_async()

    def _loaded(self) -> Frontend:
        if self._frontend is None:
            raise self._handle.unavailable()
        return self._frontend

    def _ready(self) -> tuple[Frontend, AdmissionRules]:
        frontend, info = self._loaded(), self.info
        if info is None or self._handle.state is not State.READY:
            raise self._handle.unavailable()
        if self._admission is None:
            self._admission = AdmissionRules(
                max_len=info.max_len,
                vocab_size=info.vocab_size,
                generates=info.generates,
                keeps_kv=info.keeps_kv,
                num_puzzles=info.num_puzzles,
                adapters=info.adapters,
                constrains=info.constrains,
            )
        return frontend, self._admission

    async def render_chat(self, chat: ChatRequest) -> ChatText:
        """The text of the prompt that `prepare_chat` tokenises, for callers that only count or show it. Raises
        BadRequest if the messages or the text are too long.
        """
        _, rendered, _ = await self._chat_preparation().prompt(chat)
        return rendered

    def _chat_preparation(self) -> ChatPreparation:
        frontend, admission = self._ready()
        return ChatPreparation(frontend, constrains=admission.constrains, max_characters=_most_characters(admission))

    def check_text(self, text: str, name: str) -> None:
        """Raises BadRequest for a text that is too long to be tokenised. `name` is the request's field."""
        _, admission = self._ready()
        _check_text(text, admission, name)

    async def run_off_loop(self, work: Callable[[], _T]) -> _T:
        """Runs slow text processing in one of the model's own few threads, so that it does not block other models.
        Raises Unavailable if the service is stopped before a thread is free.
        """
        if self._handle.state is State.STOPPED:
            raise self._handle.unavailable()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # `stop` has cancelled the work; the caller itself was not cancelled.
            raise self._handle.unavailable() from None

    async def _sampling(self, frontend: Frontend, params: SamplingParams, constraint: Constraint | None) -> Sampling:
        if not params.bad_words:
            return frontend.sampling(params, constraint)
        return await self.run_off_loop(partial(frontend.sampling, params, constraint))

    async def _make_all(
        self, make: Callable[[_T], Request], items: Sequence[_T], length: Callable[[_T], int]
    ) -> list[Request]:
        """Tokenises off the event loop, unless there is little to tokenise.

        Works in batches, so that a request with many long prompts shares the threads with others.
        """
        if sum(map(length, items)) + _EACH * len(items) <= _LONG_TEXT:
            return list(map(make, items))
        requests: list[Request] = []
        for batch in _batches(items, length):
            requests += await self.run_off_loop(partial(_make_batch, make, batch, sum(map(length, batch))))
        return requests


def _make_batch(make: Callable[[_T], Request], batch: Sequence[_T], num_characters: int) -> list[Request]:
    try:
        return list(map(make, batch))
    finally:
        if num_characters > _VERY_LONG_TEXT:
            give_back_free_memory()


def _batches(items: Sequence[_T], length: Callable[[_T], int]) -> Iterator[Sequence[_T]]:
    """Runs of items that take a few milliseconds to tokenise, or a single one that takes longer."""
    begin = size = 0
    for end, item in enumerate(items, 1):
        size += length(item) + _EACH
        if size >= _BATCH or end == len(items):
            yield items[begin:end]
            begin, size = end, 0


def _open_frontend(located: Located, config: EngineConfig, tokenizer: Path | None) -> Frontend:
    checkpoint = open_checkpoint(Path(located.path), model_config=config.model_config)
    frontend = Frontend.load(checkpoint, config, name=located.name, tokenizer=tokenizer)
    frontend.tokenizer.start()
    return frontend


def _fitted(request: Request, max_len: int) -> Request:
    """Lowers `max_tokens` to what fits into the context, if anything does."""
    room, asked = max_len - len(request.prompt_ids), request.params.max_tokens
    if asked is None or not 0 < room < asked:
        return request
    return replace(request, params=request.params.with_changes(max_tokens=room))


def _name_of(reference: str | None) -> str:
    """The name of a model before its files are found."""
    return "default" if reference is None else Path(reference.partition("@")[0]).name


def _check_text(text: Prompt, admission: AdmissionRules, name: str) -> None:
    """Raises BadRequest for a text that is too long to tokenise, which takes 250 bytes of memory per character."""
    most = _most_characters(admission)
    if isinstance(text, str) and len(text) > most:
        raise BadRequest(
            f"{name} has a text of {len(text)} characters; for a context of {admission.max_len} tokens, at most {most} "
            "characters are tokenised. Send a shorter text.",
            param=name,
        )


def _most_characters(admission: AdmissionRules) -> int:
    return max(_LONGEST_TEXT, _CHARACTERS_A_TOKEN * admission.max_len)


def _check_fits(text: Prompt, tokenizer: Tokenizer, admission: AdmissionRules, name: str) -> None:
    """Raises ContextLengthExceeded, with the least possible number of tokens, for a text that cannot fit."""
    if isinstance(text, str) and (fewest := tokenizer.fewest_tokens(text)) > admission.max_len:
        raise ContextLengthExceeded(limit=admission.max_len, prompt=fewest, output=0, param=name)


def _last_words(messages: Sequence[Message]) -> str:
    """The last user message, stripped. Templates may drop other messages and white space, but never this."""
    content = messages[-1].get("content") if messages and messages[-1].get("role") == "user" else None
    return content.strip() if isinstance(content, str) else ""
