"""The dialects of servers that can be compared: OpenAI's, Text Generation Inference's and Ostro's own. Each defines its
requests and how to read the answers' events.
"""

from collections.abc import Mapping, Sequence

from ostro.errors import BadRequest, ModelNotFound, ServerError
from ostro.measure.compare.answers import Prompt, Recorder, Token, token_name
from ostro.measure.compare.http_side import Event, Server
from ostro.sampling_params import SamplingParams


def _sampling(params: SamplingParams) -> dict[str, object]:
    """The fields that OpenAI's dialect and ours share."""
    body: dict[str, object] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    return body | _seed_and_stop(params)


def _seed_and_stop(params: SamplingParams) -> dict[str, object]:
    """Only if given: a server may refuse a null."""
    fields: dict[str, object] = {}
    if params.seed is not None:
        fields["seed"] = params.seed
    if params.stop:
        fields["stop"] = list(params.stop)
    return fields


def _first_model(listed: object) -> str:
    """The first model that /v1/models lists; empty if there is none."""
    match listed:
        case {"data": [{"id": str(model)}, *_]}:
            return model
    return ""


class OpenAI:
    """/v1/completions for texts, /v1/chat/completions for conversations."""

    def __init__(self, server: Server, model: str | None) -> None:
        self.server = server
        self.model = model or ""

    def check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        pass

    def find_model(self) -> None:
        if self.model:
            return
        try:
            listed = self.server.get("/v1/models")
        except ServerError as error:
            if error.status in (404, 405):
                raise ModelNotFound(
                    f"{self.server.url} lists no models: name one with --model-a or --model-b."
                ) from error
            raise
        self.model = _first_model(listed)
        if not self.model:
            raise ModelNotFound(f"{self.server.url} lists no model. Name one with --model-a or --model-b.")

    def request(self, prompt: Prompt, params: SamplingParams) -> tuple[str, Mapping[str, object]]:
        body = _sampling(params) | {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if isinstance(prompt, str):
            return "/v1/completions", body | {"prompt": prompt} | ({} if params.logprobs is None else {"logprobs": 1})
        logprobs = {} if params.logprobs is None else {"logprobs": True}
        return "/v1/chat/completions", body | {"messages": list(prompt)} | logprobs

    def take(self, event: Event, recorder: Recorder, params: SamplingParams) -> None:
        if isinstance(usage := event.get("usage"), Mapping):
            recorder.counted = _count_at(usage, "completion_tokens")
        match event.get("choices"):
            case [Mapping() as choice, *_]:
                delta = choice.get("delta")
                text = (
                    _text_at(delta, "reasoning_content", "reasoning") + _text_at(delta, "content")
                    if isinstance(delta, Mapping)
                    else _text_at(choice, "text")
                )
                recorder.add(text, _tokens(choice.get("logprobs")))
                recorder.finish_reason = _text_at(choice, "finish_reason") or recorder.finish_reason


def _tokens(logprobs: object) -> list[Token]:
    """For either endpoint; servers without log-probabilities send null or nothing."""
    match logprobs:
        case {"content": [*entries]}:
            return [
                Token(_name(entry), id=_count_at(entry, "id"), logprob=_number(entry.get("logprob")))
                for entry in entries
                if isinstance(entry, Mapping)
            ]
        case {"tokens": [*texts], "token_logprobs": [*values]}:
            return [Token(str(text), logprob=_number(value)) for text, value in zip(texts, values, strict=False)]
    return []


def _name(entry: Mapping[str, object]) -> str:
    data = entry.get("bytes")
    told = [byte for byte in data if isinstance(byte, int) and 0 <= byte < 256] if isinstance(data, list) else []
    return token_name(bytes(told)) if told else _text_at(entry, "token")


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


class TGI:
    """Text Generation Inference: POST /generate_stream."""

    def __init__(self, server: Server, model: str | None) -> None:
        if model is not None:
            raise BadRequest("TGI serves one model and takes no name: leave out --model-a or --model-b.", param="model")
        self.server = server
        self.model = ""

    def check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        _refuse_chats(prompts, "TGI's /generate", "TGI speaks OpenAI's dialect too, so give the side as http://….")
        if params.seed is not None and params.seed < 1:
            raise BadRequest(f"TGI's seeds start at 1, got {params.seed}.", param="seed")
        if params.max_tokens == 0:
            raise BadRequest("TGI generates at least one token: raise --max-tokens.", param="max_tokens")

    def find_model(self) -> None:
        try:
            info = self.server.get("/info")
        except ServerError as error:
            if error.status is None:
                raise
            info = {}
        self.model = _text_at(info, "model_id") if isinstance(info, Mapping) else ""

    def request(self, prompt: Prompt, params: SamplingParams) -> tuple[str, Mapping[str, object]]:
        parameters: dict[str, object] = {
            "max_new_tokens": params.max_tokens,
            "do_sample": not params.greedy,
            "details": True,
            "return_full_text": False,
        }
        # TGI rejects a temperature of 0 and a top_p of 1; omitting them means the same.
        if not params.greedy:
            parameters["temperature"] = params.temperature
            if params.top_p < 1:
                parameters["top_p"] = params.top_p
        return "/generate_stream", {"inputs": prompt, "parameters": parameters | _seed_and_stop(params)}

    def take(self, event: Event, recorder: Recorder, params: SamplingParams) -> None:
        if isinstance(token := event.get("token"), Mapping):
            text = _text_at(token, "text")
            known = Token(text, _count_at(token, "id"), _number(token.get("logprob")))
            recorder.add("" if token.get("special") else text, [known])
        if isinstance(whole := event.get("generated_text"), str):
            recorder.text = whole
            recorder.finish_reason = "stop"
        if isinstance(details := event.get("details"), Mapping):
            reason = _text_at(details, "finish_reason")
            recorder.counted = _count_at(details, "generated_tokens")
            recorder.finish_reason = "length" if reason == "length" else "stop"
            if reason == "stop_sequence":
                recorder.text = _without_stop(recorder.text, params.stop)


def _without_stop(text: str, stops: Sequence[str]) -> str:
    """TGI includes the stop text in its answer; the other dialects do not."""
    return next((text.removesuffix(stop) for stop in stops if text.endswith(stop)), text)


class Native:
    """Ostro's own: POST /generate_stream, the streaming version of /generate."""

    def __init__(self, server: Server, model: str | None) -> None:
        self.server = server
        self.model = model or ""

    def check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        cure = "give the side as http://…: the same server speaks OpenAI's dialect too."
        _refuse_chats(prompts, "/generate", cure)
        if params.logprobs is not None:
            raise BadRequest(f"/generate returns no log-probabilities (--logprobs): {cure}", param="logprobs")

    def find_model(self) -> None:
        if self.model:
            return
        try:
            listed = self.server.get("/v1/models")
        except ServerError as error:
            if error.status is None:
                raise
            return
        self.model = _first_model(listed)

    def request(self, prompt: Prompt, params: SamplingParams) -> tuple[str, Mapping[str, object]]:
        named = {"model": self.model} if self.model else {}
        return "/generate_stream", {"prompts": [prompt], **_sampling(params), **named}

    def take(self, event: Event, recorder: Recorder, params: SamplingParams) -> None:
        recorder.add(_text_at(event, "text"))
        recorder.finish_reason = _text_at(event, "finish_reason") or recorder.finish_reason
        if isinstance(usage := event.get("usage"), Mapping):
            recorder.counted = _count_at(usage, "completion_tokens")


def _refuse_chats(prompts: Sequence[Prompt], dialect: str, cure: str) -> None:
    """Raises BadRequest for conversations, which the dialect does not have."""
    if any(not isinstance(prompt, str) for prompt in prompts):
        raise BadRequest(f"{dialect} takes no messages (--chat): {cure}", param="messages")


def _text_at(event: Event, *names: str) -> str:
    """The first of these fields that is a string."""
    return next((value for name in names if isinstance(value := event.get(name), str)), "")


def _count_at(event: Event, *names: str) -> int | None:
    """The first of these fields that is an integer."""
    return next((value for name in names if isinstance(value := event.get(name), int)), None)
