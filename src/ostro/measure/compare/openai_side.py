"""OpenAI's dialect: /v1/completions for texts, /v1/chat/completions for conversations."""

from collections.abc import Mapping, Sequence

from ostro.errors import ModelNotFound, ServerError
from ostro.measure.compare.answers import Prompt, Recorder, Token, token_name
from ostro.measure.compare.http_client import Event, Server
from ostro.measure.compare.http_side import count_at, text_at
from ostro.sampling_params import SamplingParams


class OpenAI:
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
                    f"{self.server.url} lists no models: name one by --model-a or --model-b."
                ) from error
            raise
        match listed:
            case {"data": [{"id": str(model)}, *_]}:
                self.model = model
            case _:
                raise ModelNotFound(f"{self.server.url} names no model. Name one by --model-a or -b.")

    def request(self, prompt: Prompt, params: SamplingParams) -> tuple[str, Mapping[str, object]]:
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if params.seed is not None:
            body["seed"] = params.seed
        if params.stop:
            body["stop"] = list(params.stop)
        if isinstance(prompt, str):
            return "/v1/completions", body | {"prompt": prompt} | ({} if params.logprobs is None else {"logprobs": 1})
        logprobs = {} if params.logprobs is None else {"logprobs": True}
        return "/v1/chat/completions", body | {"messages": list(prompt)} | logprobs

    def take(self, event: Event, recorder: Recorder, params: SamplingParams) -> None:
        if isinstance(usage := event.get("usage"), Mapping):
            recorder.counted = count_at(usage, "completion_tokens")
        match event.get("choices"):
            case [Mapping() as choice, *_]:
                delta = choice.get("delta")
                text = (
                    text_at(delta, "reasoning_content", "reasoning") + text_at(delta, "content")
                    if isinstance(delta, Mapping)
                    else text_at(choice, "text")
                )
                recorder.add(text, _tokens(choice.get("logprobs")))
                recorder.finish_reason = text_at(choice, "finish_reason") or recorder.finish_reason


def _tokens(logprobs: object) -> list[Token]:
    """For either endpoint; servers without log-probabilities send null or nothing."""
    match logprobs:
        case {"content": [*entries]}:
            return [
                Token(_name(entry), id=count_at(entry, "id"), logprob=_number(entry.get("logprob")))
                for entry in entries
                if isinstance(entry, Mapping)
            ]
        case {"tokens": [*texts], "token_logprobs": [*values]}:
            return [Token(str(text), logprob=_number(value)) for text, value in zip(texts, values, strict=False)]
    return []


def _name(entry: Mapping[str, object]) -> str:
    data = entry.get("bytes")
    told = [byte for byte in data if isinstance(byte, int) and 0 <= byte < 256] if isinstance(data, list) else []
    return token_name(bytes(told)) if told else text_at(entry, "token")


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
