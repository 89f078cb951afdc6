"""The API as it is: endpoints, request fields against OpenAI's and vLLM's, fields of answers."""

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, cast, get_type_hints

from openai.types import (
    Completion,
    CreateEmbeddingResponse,
    completion_create_params,
    embedding_create_params,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import Response
from pydantic import BaseModel

from docs_reference.attributes import notes
from docs_reference.markup import code, codes, table
from ostro.sampling_params import PARAMETERS, SamplingParams
from ostro.schemas import chat, completions, embeddings, messages, models, native, responses, tokenizer, wire
from ostro.schemas.chat import ChatCompletionRequest
from ostro.schemas.completions import CompletionRequest
from ostro.schemas.embeddings import EmbeddingRequest
from ostro.schemas.fields import Prompts
from ostro.schemas.generation import GenerationRequest, TokenBiases, Words
from ostro.schemas.native import GenerateRequest, LoglikelihoodRequest, SolveRequest
from ostro.schemas.structured import StructuredFields
from ostro.schemas.tokenizer import DetokenizeRequest, TokenizeRequest
from ostro.schemas.wire import RequestModel, WireModel
from ostro.server.api_docs.document import document
from ostro.server.app import build_app
from ostro.server.models.served import Models

Schema = Mapping[str, Any]

OPENAI: Mapping[type[RequestModel], tuple[type, ...]] = {
    ChatCompletionRequest: (
        chat_create_params.CompletionCreateParamsBase,
        chat_create_params.CompletionCreateParamsStreaming,
    ),
    CompletionRequest: (
        completion_create_params.CompletionCreateParamsBase,
        completion_create_params.CompletionCreateParamsStreaming,
    ),
    EmbeddingRequest: (embedding_create_params.EmbeddingCreateParams,),
}
_SAMPLING_EXTRAS = (
    "allowed_token_ids bad_words cache_salt ignore_eos include_stop_str_in_output kv_transfer_params length_penalty "
    "logits_processors min_p min_tokens priority prompt_logprobs repetition_penalty request_id return_token_ids "
    "return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens stop_token_ids structured_outputs "
    "top_k truncate_prompt_tokens use_beam_search vllm_xargs"
)
# Request fields that vLLM adds to OpenAI's, as its documentation of the OpenAI-compatible server lists them.
VLLM: Mapping[type[RequestModel], frozenset[str]] = {
    ChatCompletionRequest: frozenset(
        f"{_SAMPLING_EXTRAS} add_generation_prompt add_special_tokens chat_template chat_template_kwargs "
        "continue_final_message documents echo include_reasoning media_io_kwargs mm_processor_kwargs".split()
    ),
    CompletionRequest: frozenset(f"{_SAMPLING_EXTRAS} add_special_tokens prompt_embeds response_format".split()),
    EmbeddingRequest: frozenset(["add_special_tokens", "priority", "truncate_prompt_tokens"]),
}
# What OpenAI's package calls the answers that we send, too.
_OPENAI_ANSWERS: Mapping[type[WireModel], type[BaseModel]] = {
    chat.ChatCompletionResponse: ChatCompletion,
    chat.ChatCompletionChunk: ChatCompletionChunk,
    completions.CompletionResponse: Completion,
    completions.CompletionChunk: Completion,
    embeddings.EmbeddingResponse: CreateEmbeddingResponse,
    responses.ResponseObject: Response,
}
# What has many forms, in words.
_FORMS = {
    str(Prompts): "text, token ids, or a list of such",
    str(Words): "text, or a list of texts",
    str(TokenBiases): "object of numbers",
}
_SECTIONS: Mapping[str, tuple[type[RequestModel], tuple[type[WireModel], ...]]] = {
    "chat": (ChatCompletionRequest, (chat.ChatCompletionResponse, chat.ChatCompletionChunk)),
    "completions": (CompletionRequest, (completions.CompletionResponse, completions.CompletionChunk)),
    "embeddings": (EmbeddingRequest, (embeddings.EmbeddingResponse,)),
    "rerank": (embeddings.RerankRequest, (embeddings.RerankResponse,)),
    "score": (embeddings.ScoreRequest, (embeddings.ScoreResponse,)),
    "generate": (GenerateRequest, (native.GenerateResponse, native.GenerateEvent, native.GenerateUsageEvent)),
    "loglikelihood": (LoglikelihoodRequest, (native.LoglikelihoodResponse, native.PseudoLoglikelihoodResponse)),
    "solve": (SolveRequest, (native.SolveResponse,)),
    "tokenize": (TokenizeRequest, (tokenizer.TokenizeResponse,)),
    "detokenize": (DetokenizeRequest, (tokenizer.DetokenizeResponse, tokenizer.TokenizerInfo)),
    "responses": (responses.CreateResponse, (responses.ResponseObject,)),
    "messages": (messages.CreateMessage, (messages.AssistantMessage, messages.MessagesError)),
}
# Requests whose tables leave out the fields of a base, which has a table of its own.
_BASES: Mapping[type[RequestModel], type[RequestModel]] = {
    ChatCompletionRequest: GenerationRequest,
    CompletionRequest: GenerationRequest,
    responses.CreateResponse: GenerationRequest,
    messages.CreateMessage: GenerationRequest,
    GenerateRequest: StructuredFields,
}


def parts() -> dict[str, str]:
    made = {f"request-{name}": request_fields(request) for name, (request, _) in _SECTIONS.items()}
    made |= {f"answer-{name}": answers(kinds) for name, (_, kinds) in _SECTIONS.items()}
    made |= {f"compared-{name}": compared(request) for name, (request, _) in _SECTIONS.items() if request in OPENAI}
    made["request-shared"] = request_fields(GenerationRequest)
    made["endpoints"] = endpoints()
    made["answer-error"] = answers((wire.ErrorBody,))
    made["answer-models"] = answers((models.ModelList,))
    made["refused-fields"] = refused_fields()
    made["sampling-params"] = sampling_params()
    return made


def sampling_params() -> str:
    """The fields of SamplingParams: those that requests have by name, the others in a table."""
    told, rows, same = notes(GenerationRequest), [], []
    for each in fields(SamplingParams):
        if each.name not in PARAMETERS:
            continue
        words = PARAMETERS[each.name].description
        if told.get(each.name) == words:
            same.append(each.name)
        else:
            rows.append((code(each.name), "none" if each.default is None else code(each.default), words))
    return f"The same as in requests: {codes(same)}.\n\n{table(('parameter', 'default', ''), rows)}"


def openai_fields(request: type[RequestModel]) -> frozenset[str]:
    """Fields of the request in OpenAI's installed package."""
    return frozenset(name for params in OPENAI[request] for name in params.__annotations__)


def endpoints() -> str:
    rows = []
    for path, operations in openapi()["paths"].items():
        for method, operation in operations.items():
            content = operation["responses"]["200"]["content"]
            streamed = "yes" if "text/event-stream" in content else ""
            words = " ".join(operation.get("description", "").split())
            rows.append((code(f"{method.upper()} {path}"), words, streamed))
    return table(("endpoint", "what it does", "streams"), rows)


def openapi() -> Schema:
    async def build() -> Schema:
        # Nothing is asked of the models: only what the endpoints say of themselves.
        return document(build_app(cast(Models, None)))

    return asyncio.run(build())


def request_fields(request: type[RequestModel]) -> str:
    """A request's own fields, without those of its base."""
    schema = request.model_json_schema()
    required, properties = schema.get("required", ()), schema["properties"]
    told, hints = notes(request), get_type_hints(request, include_extras=True)
    shared = _BASES[request].model_fields if request in _BASES else {}
    rows = []
    for name, field in request.model_fields.items():
        if name in shared:
            continue
        takes = _FORMS.get(str(hints[name])) or _form(_without_null(properties[name]))
        default = "required" if name in required else _dumped(field.get_default(call_default_factory=True))
        rows.append((code(name), takes, default, _origin(request, name), told.get(name, "")))
    rows.sort(key=lambda row: (row[2] != "required", ("OpenAI", "vLLM", "Ostro").index(row[3])))
    head = ("field", "takes", "default", "known from", "")
    if {row[3] for row in rows} == {"Ostro"}:
        return table((*head[:3], ""), [(*row[:3], row[4]) for row in rows])
    return table(head, rows)


def _dumped(value: object) -> str:
    return _default(value.model_dump(exclude_none=True, by_alias=True) if isinstance(value, WireModel) else value)


def compared(request: type[RequestModel]) -> str:
    theirs, extras = openai_fields(request), VLLM[request]
    served = set(request.model_fields)
    refused = {name: codes(map(_json, harmless)) for name, harmless in request.unserved.items()}
    unknown = theirs - served - request.ignored - set(refused)
    summary = (
        f"Of the {len(theirs)} request fields of OpenAI's Python package, {len(theirs & served)} are served, "
        f"{len(theirs & request.ignored)} accepted without an effect, {len(theirs & set(refused))} refused by name, "
        f"and {len(unknown) or 'none'} unknown."
    )
    rows = []
    if theirs & request.ignored:
        rows.append(("OpenAI's", "accepted, no effect", codes(sorted(theirs & request.ignored))))
    if refused:
        listed = ", ".join(f"{code(name)}{f' (but for {each})' if each else ''}" for name, each in refused.items())
        rows.append(("OpenAI's", "refused by name", listed))
    if unknown:
        rows.append(("OpenAI's", "unknown: 400", codes(sorted(unknown))))
    rows.append(("vLLM's extras", "refused", codes(sorted(extras - served - request.ignored))))
    return f"{summary}\n\n{table(('fields', '', ''), rows)}"


def refused_fields() -> str:
    rows = []
    for request, path in (
        (ChatCompletionRequest, "/v1/chat/completions"),
        (chat.Message, "a message of it"),
        (CompletionRequest, "/v1/completions"),
    ):
        for name, harmless in sorted(request.unserved.items()):
            rows.append((code(name), path if " " in path else code(path), codes(map(_json, harmless)) or "nothing"))
    return table(("field", "of", "let pass"), rows)


def answers(kinds: Iterable[type[WireModel]]) -> str:
    """A foldable table for each. Of OpenAI's types it has what is ours or has a note, and no row of the first twice."""
    made: list[str] = []
    first: list[tuple[str, str, str]] = []
    for kind in kinds:
        schema = kind.model_json_schema(mode="serialization")
        rows = list(_flat(kind, schema, schema, ""))
        own = [row for row in rows if row not in first and not (row[2] == "" and _is_openais(kind, row[0]))]
        note = ""
        if theirs := _OPENAI_ANSWERS.get(kind):
            note = f"OpenAI's {code(theirs.__name__)}, in which these fields are ours or hold something particular:\n\n"
        body = note + table(("field", "holds", ""), own)
        if own:
            made.append(f"<details markdown>\n<summary>{kind.__name__}</summary>\n\n{body}\n</details>\n")
        first = first or rows
    return "\n".join(made)


def _is_openais(kind: type[WireModel], path: str) -> bool:
    theirs = _OPENAI_ANSWERS.get(kind)
    return theirs is not None and set(re.findall(r"\w+", path)) <= _names(theirs)


@cache
def _names(kind: type[BaseModel]) -> frozenset[str]:
    """Every field of a model and of the models within it."""
    schema = kind.model_json_schema()
    found = [schema, *schema.get("$defs", {}).values()]
    return frozenset(name for each in found for name in each.get("properties", ()))


def _flat(answer: type, schema: Schema, whole: Schema, prefix: str) -> Iterator[tuple[str, str, str]]:
    """Fields of objects within objects, by their paths."""
    told = notes(answer)
    for name, field in schema.get("properties", {}).items():
        form = _without_null(field)
        path = f"{prefix}{name}"
        inner = form.get("items", form)
        reference = inner.get("$ref", "").rpartition("/")[2]
        if not reference:
            yield code(path), _form(field), told.get(name, "")
        else:
            path += "[]" if form.get("type") == "array" else ""
            if told.get(name):
                yield code(path), _form(field), told[name]
            kind = next(each for each in _wire_models() if each.__name__ == reference)
            yield from _flat(kind, whole["$defs"][reference], whole, f"{path}.")


def _wire_models() -> Iterator[type]:
    waiting: list[type] = [WireModel]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith("ostro.schemas."):
            yield kind


def _origin(request: type[RequestModel], name: str) -> str:
    if request is GenerationRequest:
        request = ChatCompletionRequest
    if request not in OPENAI:
        return "Ostro"
    return "OpenAI" if name in openai_fields(request) else "vLLM" if name in VLLM[request] else "Ostro"


def _without_null(schema: Schema) -> Schema:
    """Every field that is not required may be null, which is its default."""
    forms = [form for form in schema.get("anyOf", ()) if form.get("type") != "null"]
    if not forms:
        return schema
    return _without_null(forms[0]) if len(forms) == 1 else {"anyOf": forms}


def _form(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(map(_form, schema["anyOf"])))
    if "const" in schema:
        return code(schema["const"])
    if "enum" in schema:
        return codes(schema["enum"])
    kind = schema.get("type", "object")
    if kind == "array":
        return f"list of {_plural(_without_null(schema.get('items', {})))}{_limits(schema, 'minItems', 'maxItems')}"
    if kind == "string":
        return "text" + _limits(schema, "minLength", "maxLength", " characters")
    plain = {"boolean": "true, false", "null": "null"}
    return plain.get(kind) or f"{kind}{_limits(schema, 'minimum', 'maximum')}"


def _limits(schema: Schema, low: str, high: str, unit: str = "") -> str:
    least, most = schema.get(low), schema.get(high)
    if most is None:
        return f", at least {least}" if least and unit == "" else ""
    return f", at most {most:,}{unit}" if not least or least < 0 else f", {least:,} to {most:,}{unit}"


def _plural(schema: Schema) -> str:
    kinds = {"string": "texts", "boolean": "true, false", "array": "lists"}
    kind = str(schema.get("type", "object"))
    return kinds.get(kind, f"{kind}s")


def _default(value: object) -> str:
    return "none" if value is None or value in ([], {}, "") else code(_json(value))


def _json(value: object) -> str:
    return json.dumps(value)
