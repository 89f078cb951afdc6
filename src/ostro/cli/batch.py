"""ostro batch: runs a file of requests in OpenAI's batch format together, and writes a file of results.

lines ─> jobs ─> one continuous batch ─> results, in line order
  └──────┴─ invalid requests become results at once, and the others continue
"""

import argparse
import asyncio
import reprlib
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic_core import from_json

from ostro.cli.files import read_lines, written_whole
from ostro.cli.in_process import add_profile_option, profiled, tell_progress
from ostro.cli.options import add_engine_options, engine_config
from ostro.cli.parser import describe
from ostro.engine.request import Request
from ostro.errors import BadRequest, OstroError, UnknownModel
from ostro.frontend.outputs import Completion, embedding
from ostro.frontend.requests import Prompt
from ostro.llm import LLM
from ostro.sampling_params import SamplingParams
from ostro.schemas.batch import BatchError, BatchRequest, BatchResponse, BatchResult
from ostro.schemas.chat import ChatCompletionRequest
from ostro.schemas.completions import CompletionRequest
from ostro.schemas.embeddings import EmbeddingRequest, EmbeddingResponse
from ostro.schemas.generation import GenerationRequest
from ostro.schemas.wire import ErrorBody, WireModel, parse
from ostro.server.dialects.chat.request import chat_request
from ostro.server.dialects.chat.writer import chat_writer
from ostro.server.dialects.chat_preparation import ChatPreparation
from ostro.server.dialects.chat_request import ChatRequest, PreparedChat
from ostro.server.dialects.chat_turn import CompletionReader
from ostro.server.dialects.completions.writer import CompletionWriter
from ostro.server.dialects.writing import new_id


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("requests", type=Path, metavar="FILE", help="requests, one per line; - reads standard input")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results here instead of to stdout")
    describe(
        parser,
        {"ostro batch requests.jsonl --output results.jsonl": "run a file"},
        "Each line is {custom_id, method: POST, url, body}; url is /v1/chat/completions, /v1/completions or "
        "/v1/embeddings. The exit status is 0 if every line succeeded and 1 if any failed; a failed line's result says "
        "why.",
    )
    add_engine_options(parser)
    add_profile_option(parser)


def run(args: argparse.Namespace) -> int:
    lines = _lines(args.requests)
    tell_progress()
    llm = LLM(config=engine_config(args))
    # Opened first: an unwritable path should be reported before the work, not after a night's run.
    with nullcontext(sys.stdout) if args.output is None else written_whole(args.output) as file:
        with profiled(llm, args):
            results = _results(llm, lines)
        file.writelines(result.model_dump_json() + "\n" for result in results)
    failed = sum(not result.succeeded for result in results)
    print(f"{len(results) - failed} completed, {failed} failed", file=sys.stderr)
    return 1 if failed else 0


@dataclass(slots=True)
class _Job:
    """A line being processed: its engine requests, and how their completions become its response."""

    custom_id: str
    requests: list[Request]
    respond: Callable[[list[Completion]], WireModel]
    finished: dict[int, Completion] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return len(self.finished) == len(self.requests)

    def result(self) -> BatchResult:
        try:
            return _answered(self.custom_id, self.respond([self.finished[request.id] for request in self.requests]))
        except OstroError as error:
            return _failed(self.custom_id, error)


def _results(llm: LLM, lines: Sequence[BatchRequest | BatchResult]) -> list[BatchResult]:
    started = [line if isinstance(line, BatchResult) else _started(llm, line) for line in lines]
    _work(llm, [each for each in started if isinstance(each, _Job)])
    return [each if isinstance(each, BatchResult) else each.result() for each in started]


def _work(llm: LLM, jobs: Sequence[_Job]) -> None:
    from tqdm import tqdm

    owners = {request.id: job for job in jobs for request in job.requests}
    requests = [request for job in jobs for request in job.requests]
    with tqdm(total=len(jobs), unit="request", disable=not sys.stderr.isatty()) as bar:
        for id, completion in llm.run(requests):
            job = owners[id]
            job.finished[id] = completion
            if job.done:
                bar.update()


# --- lines ----------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> list[BatchRequest | BatchResult]:
    """The file's requests; an invalid line is replaced by a result that says so."""
    seen: set[str] = set()
    lines = [_line(number, text, seen) for number, text in read_lines(path)]
    if not lines:
        raise BadRequest(f"{path} holds no requests. Write one per line.")
    return lines


def _line(number: int, text: str, seen: set[str]) -> BatchRequest | BatchResult:
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        return _misread(None, "invalid_json_line", f"Line {number} is not valid JSON: {error}.")
    given_id = value.get("custom_id") if isinstance(value, dict) else None
    custom_id = given_id if isinstance(given_id, str) else None
    try:
        request = parse(BatchRequest, value)
    except BadRequest as error:
        code = f"invalid_{error.param}" if error.param in BatchRequest.model_fields else "invalid_request"
        return _misread(custom_id, code, f"Line {number}: {error}")
    if request.custom_id in seen:
        return _misread(custom_id, "duplicate_custom_id", f"Line {number}: an earlier line has the same custom_id.")
    seen.add(request.custom_id)
    return request


def _misread(custom_id: str | None, code: str, message: str) -> BatchResult:
    return BatchResult(
        id=new_id("batch_req_"), custom_id=custom_id, response=None, error=BatchError(code=code, message=message)
    )


def _answered(custom_id: str, body: WireModel, status: int = 200) -> BatchResult:
    response = BatchResponse(status_code=status, request_id=new_id("req_"), body=body)
    return BatchResult(id=new_id("batch_req_"), custom_id=custom_id, response=response, error=None)


def _failed(custom_id: str, error: OstroError) -> BatchResult:
    return _answered(custom_id, ErrorBody.of(error), error.http_status)


# --- endpoints ------------------------------------------------------------------------------------------------------


def _started(llm: LLM, line: BatchRequest) -> _Job | BatchResult:
    try:
        requests, respond = _ENDPOINTS[line.url](llm, line.body)
    except OstroError as error:
        return _failed(line.custom_id, error)
    return _Job(line.custom_id, requests, respond)


# Length of a rendered conversation: the input is in memory already, so this only bounds what a template makes of it.
_MAX_CHARACTERS = 64 << 20

_Work = tuple[list[Request], Callable[[list[Completion]], WireModel]]


def _completions(llm: LLM, body: object) -> _Work:
    request = parse(CompletionRequest, body)
    params, source = request.sampling_params(), request.format_source
    with nullcontext() if source is None else source.named_in_errors():
        requests = _prepared(llm, request, request.prompt, params)
    return requests, lambda done: CompletionWriter(request, done, llm.tokenizer, model=llm.name).whole()


def _chat(llm: LLM, body: object) -> _Work:
    request = parse(ChatCompletionRequest, body)
    chat = chat_request(request, request.sampling_params())
    with nullcontext() if chat.format_source is None else chat.format_source.named_in_errors():
        prepared = asyncio.run(_prepared_chat(llm, request, chat))

    def respond(done: list[Completion]) -> WireModel:
        reader = CompletionReader(done[0], prepared, shows_reasoning=chat.reasoning.include)
        return chat_writer(request, reader, llm.tokenizer, model=llm.name).whole()

    return [prepared.request], respond


async def _prepared_chat(llm: LLM, request: ChatCompletionRequest, chat: ChatRequest) -> PreparedChat:
    constrains = llm.core.runner.spec.constrains
    preparation = ChatPreparation(llm.frontend, constrains=constrains, max_characters=_MAX_CHARACTERS)
    plan, rendered, reading = await preparation.prompt(chat)
    constraint = await preparation.constraint(chat, plan, reading)
    ids = llm.tokenizer.encode_rendered(rendered)
    # The constraint already includes the structured output.
    [made] = _prepared(llm, request, [ids], chat.params.with_changes(structured=None))
    made = replace(
        made,
        constraint=constraint,
        shown_ids=reading.kept_ids,
        predicted_ids=llm.frontend.predicted_ids(chat.prediction),
    )
    return PreparedChat(made, plan, reading)


def _embeddings(llm: LLM, body: object) -> _Work:
    request = parse(EmbeddingRequest, body)
    _check_model(llm, request.model)
    name, kept = request.prompt_name, request.truncate_prompt_tokens
    requests = [llm.prepare_embedding(text, prompt_name=name, truncate_prompt_tokens=kept) for text in request.input]
    num_tokens = sum(len(each.prompt_ids) for each in requests)
    pooling = llm.frontend.pooling

    def respond(done: list[Completion]) -> WireModel:
        vectors = [embedding(each) for each in done]
        if pooling is not None:
            vectors = [pooling.shortened(vector, request.dimensions) for vector in vectors]
        return EmbeddingResponse.of(request, vectors, num_tokens=num_tokens, model=llm.name)

    return requests, respond


_ENDPOINTS: dict[str, Callable[[LLM, object], _Work]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completions,
    "/v1/embeddings": _embeddings,
}


def _prepared(llm: LLM, request: GenerationRequest, prompts: Sequence[Prompt], params: SamplingParams) -> list[Request]:
    _check_model(llm, request.model)
    if request.stream:
        raise BadRequest("stream is not supported in a batch file: leave it out.", param="stream")
    return [
        replace(llm.prepare(prompt, params), cache_salt=request.cache_salt, priority=request.priority)
        for prompt in prompts
    ]


def _check_model(llm: LLM, name: str) -> None:
    if name not in ("default", llm.name):
        raise UnknownModel(
            f"The model {reprlib.repr(name)} is not loaded. Leave model out, or give {llm.name!r} or 'default'."
        )
