"""Ostro as a model of a Triton Inference Server: model.py, with a stand-in for the module that Triton provides."""

import importlib.util
import json
import queue
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from checkout import ROOT
from model_directory import write_model

from ostro import LLM, SamplingParams
from ostro.config import EngineConfig

MODEL = ROOT / "deploy" / "triton" / "ostro"
FINAL = 1
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@dataclass
class Tensor:
    name: str
    array: Any

    def as_numpy(self) -> Any:
        return self.array


class TritonError(Exception):
    pass


@dataclass
class InferenceResponse:
    output_tensors: list[Tensor] = field(default_factory=list)
    error: TritonError | None = None

    @property
    def text(self) -> str:
        [tensor] = self.output_tensors
        assert tensor.name == "text_output"
        return bytes(tensor.array[0]).decode()


@dataclass
class Request:
    """A request and its response sender."""

    inputs: dict[str, Any]
    leaves_after: int | None = None
    """Responses after which the client is gone."""
    sent: list[InferenceResponse] = field(default_factory=list)
    ended: "queue.Queue[bool]" = field(default_factory=queue.Queue)

    def get_response_sender(self) -> "Request":
        return self

    def is_cancelled(self) -> bool:
        return self.leaves_after is not None and len(self.sent) >= self.leaves_after

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        assert self.ended.empty(), "nothing may follow the final response"
        if response is not None:
            self.sent.append(response)
        if flags == FINAL:
            self.ended.put(True)

    def wait(self) -> list[InferenceResponse]:
        self.ended.get(timeout=120)
        return self.sent


def request(text: str, *, stream: bool | None = None, leaves_after: int | None = None, **sampling: object) -> Request:
    inputs: dict[str, Any] = {"text_input": np.array([text.encode()], dtype=object)}
    if stream is not None:
        inputs["stream"] = np.array([stream])
    if sampling:
        inputs["sampling_parameters"] = np.array([json.dumps(sampling).encode()], dtype=object)
    return Request(inputs, leaves_after)


def triton_module() -> ModuleType:
    """The module that Triton's Python backend provides to a model."""
    module = ModuleType("triton_python_backend_utils")

    def get_input_tensor_by_name(asked: Request, name: str) -> Tensor | None:
        return Tensor(name, asked.inputs[name]) if name in asked.inputs else None

    for name, value in {
        "Tensor": Tensor,
        "TritonError": TritonError,
        "InferenceResponse": InferenceResponse,
        "get_input_tensor_by_name": get_input_tensor_by_name,
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL": FINAL,
    }.items():
        setattr(module, name, value)
    return module


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("triton") / "tiny")


@pytest.fixture
def model(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loaded as Triton does it."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton_module())
    spec = importlib.util.spec_from_file_location("triton_ostro", MODEL / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loaded = module.TritonPythonModel()
    values = {"model": str(directory), "max_batch_seqs": "8"}
    parameters = {key: {"string_value": value} for key, value in values.items()}
    loaded.initialize({"model_config": json.dumps({"parameters": parameters})})
    yield loaded
    loaded.finalize()


def test_requests_at_once_get_the_answers_that_the_engine_gives_alone(model: Any, directory: Path) -> None:
    prompts = ["the fox", "the dog", "yes", "no, the quick fox", "a"]
    asked = [request(prompt, **GREEDY) for prompt in prompts]
    assert model.execute(asked) is None
    expected = LLM(directory, EngineConfig(threads=1)).generate(
        prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    )
    assert [[response.text for response in each.wait()] for each in asked] == [[each.text] for each in expected]


def test_a_stream_comes_in_pieces_that_make_up_the_answer(model: Any) -> None:
    whole, pieces = request("the fox", **GREEDY), request("the fox", stream=True, **GREEDY)
    model.execute([whole, pieces])
    [answer] = whole.wait()
    streamed = [response.text for response in pieces.wait()]
    assert len(streamed) > 1
    assert "".join(streamed) == answer.text


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (request("a", temperature=9), "temperature must be"),
        (request("a", colour="red"), "colour"),
        (request("a " * 10_000), "maximum context length"),
    ],
)
def test_unservable_request_is_an_error_and_the_others_go_on(model: Any, asked: Request, complaint: str) -> None:
    other = request("the fox", **GREEDY)
    model.execute([asked, other])
    [refused] = asked.wait()
    assert complaint in str(refused.error)
    assert other.wait()[0].error is None


def test_a_cancelled_request_stops_generating(model: Any) -> None:
    gone = request("the fox", stream=True, leaves_after=2, max_tokens=200, ignore_eos=True)
    model.execute([gone])
    assert len(gone.wait()) == 2
    assert not model._llm.core.has_work


def test_the_configuration_declares_what_the_model_reads_and_gives() -> None:
    config = (MODEL / "config.pbtxt").read_text(encoding="utf-8")
    source = (MODEL / "1" / "model.py").read_text(encoding="utf-8")
    declared = re.findall(r'\bname: "(\w+)" data_type', config)
    assert sorted(declared) == ["sampling_parameters", "stream", "text_input", "text_output"]
    assert all(f'"{name}"' in source for name in declared)
    assert set(re.findall(r'key: "(\w+)"', config)) == set(re.findall(r'parameters\["(\w+)"\]', source))
    assert "decoupled: true" in config
