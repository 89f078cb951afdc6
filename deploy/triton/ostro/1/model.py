"""Ostro as a model of a Triton Inference Server, by its Python backend. See docs/deployment.md.

Triton imports this file in a process of its own and calls `initialize`, `execute` and `finalize`. Each request is
answered by a thread, and all of them share one engine, which batches what they ask for.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

from ostro import LLM, SamplingParams
from ostro.config import EngineConfig


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        """Loads the model that config.pbtxt names."""
        parameters = json.loads(args["model_config"])["parameters"]
        most = int(parameters["max_batch_seqs"]["string_value"])
        self._llm = LLM(parameters["model"]["string_value"] or None, EngineConfig(max_batch_seqs=most))
        self._threads = ThreadPoolExecutor(most, thread_name_prefix="request")

    def execute(self, requests: Sequence[Any]) -> None:
        """Returns at once: answers go through each request's response sender."""
        for request in requests:
            self._threads.submit(self._answer, request)

    def finalize(self) -> None:
        """Requests under way end first; Triton has stopped sending others."""
        self._threads.shutdown()

    def _answer(self, request: Any) -> None:
        sender = request.get_response_sender()
        try:
            streams = bool(_value(request, "stream", default=False))
            whole = ""
            for delta in self._llm.stream(_text(request, "text_input"), _sampling(request)):
                if request.is_cancelled():
                    break
                whole += delta.text
                if streams and delta.text:
                    sender.send(_response(delta.text))
            if not streams:
                sender.send(_response(whole))
        except Exception as error:  # noqa: BLE001
            # Whatever it is, a client that hears nothing would take the answer for whole.
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{error}" or type(error).__name__)))
        finally:
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _sampling(request: Any) -> SamplingParams:
    return SamplingParams(**json.loads(_text(request, "sampling_parameters", default="{}")))


def _text(request: Any, name: str, default: str | None = None) -> str:
    value = _value(request, name, default)
    return value.decode() if isinstance(value, bytes) else str(value)


def _value(request: Any, name: str, default: object = None) -> Any:
    """The one element of an input, or the default if the request does not have it."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().reshape(-1)[0]


def _response(text: str) -> Any:
    return pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([text.encode()], dtype=object))])
