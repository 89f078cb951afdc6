"""The dialect of Text Generation Inference: POST /generate_stream."""

from collections.abc import Mapping, Sequence

from ostro.errors import BadRequest, ServerError
from ostro.measure.compare.answers import Prompt, Recorder, Token
from ostro.measure.compare.http_client import Event, Server
from ostro.measure.compare.http_side import count_at, refuse_chats, text_at
from ostro.sampling_params import SamplingParams


class TGI:
    def __init__(self, server: Server, model: str | None) -> None:
        if model is not None:
            raise BadRequest("TGI serves one model and takes no name: leave --model-a or --model-b out.", param="model")
        self.server = server
        self.model = ""

    def check(self, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        refuse_chats(prompts, "TGI's /generate", "TGI speaks OpenAI's dialect too, so give the side as http://….")
        if params.seed is not None and params.seed < 1:
            raise BadRequest(f"TGI takes seeds from 1 on, got {params.seed}.", param="seed")
        if params.max_tokens == 0:
            raise BadRequest("TGI generates at least one token: raise --max-tokens.", param="max_tokens")

    def find_model(self) -> None:
        try:
            info = self.server.get("/info")
        except ServerError as error:
            if error.status is None:
                raise
            info = {}
        self.model = text_at(info, "model_id") if isinstance(info, Mapping) else ""

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
        if params.seed is not None:
            parameters["seed"] = params.seed
        if params.stop:
            parameters["stop"] = list(params.stop)
        return "/generate_stream", {"inputs": prompt, "parameters": parameters}

    def take(self, event: Event, recorder: Recorder, params: SamplingParams) -> None:
        if isinstance(token := event.get("token"), Mapping):
            logprob = token.get("logprob")
            text = text_at(token, "text")
            known = Token(text, count_at(token, "id"), float(logprob) if isinstance(logprob, int | float) else None)
            recorder.add("" if token.get("special") else text, [known])
        if isinstance(whole := event.get("generated_text"), str):
            recorder.text = whole
            recorder.finish_reason = "stop"
        if isinstance(details := event.get("details"), Mapping):
            reason = text_at(details, "finish_reason")
            recorder.counted = count_at(details, "generated_tokens")
            recorder.finish_reason = "length" if reason == "length" else "stop"
            if reason == "stop_sequence":
                recorder.text = _without_stop(recorder.text, params.stop)


def _without_stop(text: str, stops: Sequence[str]) -> str:
    """TGI includes the stop text in its answer; the other dialects do not."""
    return next((text.removesuffix(stop) for stop in stops if text.endswith(stop)), text)
