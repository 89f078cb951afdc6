"""Ostro's own dialect: POST /generate_stream, the streaming version of /generate."""

from collections.abc import Mapping, Sequence

from ostro.errors import BadRequest, ServerError
from ostro.measure.compare.answers import Prompt, Recorder
from ostro.measure.compare.http_client import Event, Server
from ostro.measure.compare.http_side import count_at, refuse_chats, text_at
from ostro.sampling_params import SamplingParams


class Native:
    def __init__(self, server: Server, model: str | None) -> None:
        self.server = server
        self.model = model or ""

    def check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        cure = "give the side as http://…, for the same server speaks OpenAI's dialect too."
        refuse_chats(prompts, "/generate", cure)
        if params.logprobs is not None:
            raise BadRequest(f"/generate gives no log-probabilities (--logprobs): {cure}", param="logprobs")

    def find_model(self) -> None:
        if self.model:
            return
        try:
            listed = self.server.get("/v1/models")
        except ServerError as error:
            if error.status is None:
                raise
            listed = None
        match listed:
            case {"data": [{"id": str(model)}, *_]}:
                self.model = model

    def request(self, prompt: Prompt, params: SamplingParams) -> tuple[str, Mapping[str, object]]:
        body: dict[str, object] = {
            "prompts": [prompt],
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        if self.model:
            body["model"] = self.model
        if params.seed is not None:
            body["seed"] = params.seed
        if params.stop:
            body["stop"] = list(params.stop)
        return "/generate_stream", body

    def take(self, event: Event, recorder: Recorder, params: SamplingParams) -> None:
        recorder.add(text_at(event, "text"))
        recorder.finish_reason = text_at(event, "finish_reason") or recorder.finish_reason
        if isinstance(usage := event.get("usage"), Mapping):
            recorder.counted = count_at(usage, "completion_tokens")
