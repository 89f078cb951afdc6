"""torch's runners on an Apple GPU, for which `apple_gpu` stands in: the CPU's tokens without its kernels or float64."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from apple_gpu import apple_gpu
from hrm_brain import write_brain
from model_directory import write_model

from ostro import LLM, SamplingParams
from ostro.backends.planning import plan
from ostro.backends.torch.recompute import RecomputeRunner
from ostro.config import EngineConfig
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.errors import Unsupported
from ostro.structured import StructuredOutput
from ostro.torch_models.hrm import HrmConfig, load_hrm
from ostro.weights.hrm_checkpoint import open_hrm

PROMPTS = ["the quick brown fox", "the lazy dog", "the fox"]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=0, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=12, seed=1, top_p=0.9, n=2, ignore_eos=True),
    SamplingParams(max_tokens=12, seed=2, top_k=5, presence_penalty=1.0, structured=StructuredOutput(regex="[a-z ]+")),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with apple_gpu(monkeypatch):
        yield


def answers(llm: LLM) -> list[tuple[str, list[float]]]:
    return [
        (choice.text, [round(each.logprob, 3) for each in choice.logprobs or ()])
        for completion in llm.generate(PROMPTS, PARAMS)
        for choice in completion.choices
    ]


@pytest.mark.full
@pytest.mark.usefixtures("_gpu")
def test_tokens_and_logprobs_are_those_of_the_cpu(model: Path) -> None:
    cpu = LLM(model, EngineConfig(device="cpu", backend="torch", threads=1))
    gpu = LLM(model, EngineConfig(device="mps", threads=1))
    spec = gpu.core.runner.spec
    assert (spec.device, spec.backend, spec.device_bytes) == ("mps", "torch (mps)", 0)
    assert answers(gpu) == answers(cpu)
    [score], [expected] = (llm.score(["the quick"], [" brown fox"]) for llm in (gpu, cpu))
    assert score.logprob == pytest.approx(expected.logprob, abs=1e-4)


@pytest.mark.usefixtures("_gpu")
def test_sixteen_bits_halve_weights_and_pages_as_planned(model: Path) -> None:
    config = EngineConfig(device="mps", dtype="float16", threads=1, kv_memory=1 << 20)
    llm, planned = LLM(model, config), plan(model, config, memory=1 << 30)
    assert llm.core.runner.spec.precision == planned.precision == "float16 weights, float16 keys and values"
    assert (llm.core.runner.spec.backend, llm.core.runner.spec.num_pages) == (planned.backend, planned.num_pages)
    assert all(completion.text for completion in llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True)))


@pytest.mark.full
@pytest.mark.usefixtures("_gpu")
def test_hrm_generates_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    checkpoint = open_hrm(write_brain(tmp_path, dialect="aios", h_layers=1, l_layers=1))

    def tokens(device: str) -> list[int]:
        hrm = load_hrm(HrmConfig.read(checkpoint.config), checkpoint.tensors(), torch.float32, torch.device(device))
        core = EngineCore(RecomputeRunner(hrm))
        core.add(Request(id=1, prompt_ids=(5, 6, 7), params=SamplingParams(max_tokens=4, ignore_eos=True), seed=1))
        return [token for step in iter(core.step, []) for gain in step for token in gain.token_ids]

    assert tokens("mps") == tokens("cpu")


@pytest.mark.parametrize(
    "settings", [{"quantize": "int8"}, {"quantize": "fp8"}, {"kv_dtype": "int8"}, {"deterministic": True}]
)
@pytest.mark.usefixtures("_gpu")
def test_settings_that_have_no_kernel_there_are_refused(model: Path, settings: dict[str, str]) -> None:
    [name] = settings
    with pytest.raises(Unsupported, match="Mac's GPU") as refusal:
        LLM(model, EngineConfig(device="mps", **settings))  # type: ignore[arg-type]
    assert refusal.value.param == name
