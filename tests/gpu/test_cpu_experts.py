"""A model on the GPU whose experts the CPU computes: the same tokens as with all of it in one place."""

import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from divided_experts import divided_model
from every_family import config_of
from native_directory import write
from native_models import needs_library, savable_model
from test_gpu_runner import ON_GPU, Gains, on_cpu, requests, run, tokens
from tiny_models import LLAMA
from triton_device import DEVICE, slow_in_the_interpreter

from ostro.backends.backend import Unloadable, open_model
from ostro.backends.cuda.backend import CudaBackend
from ostro.backends.cuda.cpu_layers import divided as divided_parts
from ostro.backends.cuda.load import divided_model as load_divided_model
from ostro.backends.cuda.runner import GpuRunner
from ostro.backends.torch.runner import TorchRunner
from ostro.config import EngineConfig, Quantization
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.scheduler import Limits
from ostro.errors import Unsupported
from ostro.kernels.gpu.handover import hand_over, hand_over_plain
from ostro.kernels.gpu.routing import Routed
from ostro.models.architecture import Architecture
from ostro.sampling_params import SamplingParams
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.experts import CpuExperts
from ostro.weights import open_checkpoint

pytestmark = [
    needs_library,
    # NumPy warns of what is infinite, as it may be on a GPU, such as in rows that only pad.
    pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered"),
]

SIZES = {**LLAMA, "hidden_size": 64, "head_dim": 16, "num_hidden_layers": 2}
CONFIGS: Mapping[str, Mapping[str, object]] = {
    "qwen3_moe": config_of("qwen3_moe", SIZES, num_experts=6, moe_intermediate_size=16),
    # With an MLP that all tokens share, times a gate.
    "qwen2_moe": config_of("qwen2_moe", SIZES, num_experts=6, moe_intermediate_size=16),
    # Biases, clamped activations.
    "gpt_oss": config_of("gpt_oss", SIZES, num_local_experts=6, intermediate_size=32),
}
SCORED = SamplingParams(max_tokens=8 if ON_GPU else 3, temperature=0, logprobs=0)
MOST_ROWS = 16


def asked(number: int = 6 if ON_GPU else 3) -> list[Request]:
    return requests([SCORED] * number)


def runner(
    model: Decoder,
    *,
    rows: int = 8,
    budget: int = 40,
    deterministic: bool = False,
    graphs: bool = True,
    graph_max_tokens: int | None = None,
) -> GpuRunner:
    return GpuRunner(
        model,
        page_size=16,
        num_pages=256,
        max_batch_tokens=budget,
        max_batch_seqs=rows,
        deterministic=deterministic,
        graphs=graphs,
        graph_max_tokens=graph_max_tokens,
    )


def engine(model: Decoder, **settings: int | bool) -> EngineCore:
    return EngineCore(runner(model, **settings))  # type: ignore[arg-type]


def logprobs(gains: Gains) -> dict[tuple[int, int], list[float]]:
    return {key: [each.logprob for each in gain[1]] for key, gain in gains.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width", "chosen"), [(1, 64, 2), (5, 2880, 4), (3, 1024, 3)])
def test_rows_are_handed_over_as_torch_would(rows: int, width: int, chosen: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, width, device=DEVICE, dtype=dtype)
    experts = torch.randint(0, 128, (rows, chosen), dtype=torch.int32, device=DEVICE)
    routed = Routed(experts, torch.rand(rows, chosen, device=DEVICE))
    slots = torch.arange(rows, device=DEVICE) - int(rows > 1)
    given, expected = (torch.full((rows + 2, width + 2 * chosen + 3), 7.0, device=DEVICE) for _ in range(2))
    hand_over(x, routed, slots, given)
    hand_over_plain(x, routed, slots, expected)
    assert torch.equal(given, expected)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("qwen3_moe", 2),
        pytest.param("qwen3_moe", 1, marks=slow_in_the_interpreter),
        ("qwen2_moe", 1),
        pytest.param("qwen2_moe", 2, marks=slow_in_the_interpreter),
        pytest.param("gpt_oss", 2, marks=slow_in_the_interpreter),
    ],
)
def test_tokens_are_those_of_the_whole_model(name: str, layers: int, device: torch.device, tmp_path: Path) -> None:
    """Prompts are longer than what the CPU computes at a time, and steps have several rows and one."""
    config = CONFIGS[name]
    model = divided_model(config, layers, tmp_path / "experts.ostro", device=device, most_rows=MOST_ROWS)
    expected = on_cpu(savable_model(config), asked())
    given = run(engine(model), asked())
    assert tokens(given) == tokens(expected)
    for key, found in logprobs(given).items():
        assert found == pytest.approx(logprobs(expected)[key], abs=2e-3)


@pytest.mark.full
@pytest.mark.skipif(ON_GPU, reason="the twin runs on a CPU, where kernels are interpreted")
@pytest.mark.parametrize("name", CONFIGS)
def test_the_torch_modules_of_such_a_model_are_the_twin(name: str, tmp_path: Path) -> None:
    model = divided_model(CONFIGS[name], 2, tmp_path / "experts.ostro")
    limits = Limits(max_batch_tokens=64)
    given = run(EngineCore(TorchRunner(model, page_size=4, num_pages=512), limits), asked())
    assert tokens(given) == tokens(on_cpu(savable_model(CONFIGS[name]), asked()))


@pytest.mark.full
@pytest.mark.parametrize("bits", [4] if not ON_GPU else [0, 4, 8])
def test_a_row_is_the_same_alone_and_in_a_batch(bits: int, device: torch.device, tmp_path: Path) -> None:
    """With deterministic, to the last bit: the CPU's part always is."""
    config = CONFIGS["qwen3_moe"]
    found = []
    for number, threads in (3, 1), (1, 3):
        model = divided_model(config, 2, tmp_path / f"{number}.ostro", bits=bits, device=device, threads=threads)
        core = engine(model, deterministic=True)
        together = requests([replace(SCORED, max_tokens=2)] * 3)
        batches = [together] if number == 3 else [[each] for each in together]
        gains: Gains = {}
        for batch in batches:
            gains |= run(core, batch)
        found.append((tokens(gains), logprobs(gains)))
    assert found[0] == found[1]


def test_the_device_has_no_weights_of_these_experts(device: torch.device, tmp_path: Path) -> None:
    config = CONFIGS["qwen2_moe"]
    model = divided_model(config, 1, tmp_path / "experts.ostro", device=device)
    names = [name for name, _ in model.named_parameters() if ".up.weight" in name or ".mlp.down." in name]
    assert not [name for name in names if ".layers.0." in name]
    assert [name for name in names if ".layers.1." in name]
    assert [type(layer.mlp) is CpuExperts for layer in model.layers] == [True, False]
    assert runner(model).spec.precision.endswith("; experts of 1 layers on the CPU in F32")


def test_what_the_cpu_reads_is_held_until_it_is_waited_for(device: torch.device, tmp_path: Path) -> None:
    """On a GPU another stream reads it, of which the allocator knows nothing."""
    model = divided_model(CONFIGS["qwen2_moe"], 1, tmp_path / "experts.ostro", device=device)
    mixture = model.layers[0].mlp
    assert isinstance(mixture, CpuExperts)
    assert mixture.begin is not None
    experts = torch.zeros(2, mixture.described.chosen, dtype=torch.int32, device=device)
    gates, slots = torch.rand(experts.shape, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    given = [torch.randn(2, 64, device=device), experts, gates, slots]
    held = [weakref.ref(each) for each in given]
    wait = mixture.begin(*given)
    del experts, gates, slots
    given.clear()
    assert all(each() is not None for each in held)
    wait()
    assert all(each() is None for each in held)


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("graphs", [True, False])
def test_a_shared_mlp_beside_the_cpu_takes_no_memory_from_it(
    rows: int, graphs: bool, device: torch.device, tmp_path: Path
) -> None:
    """Many steps, again and again: memory that is given away too early is written to only now and then."""
    config = config_of("qwen2_moe", {**SIZES, "num_hidden_layers": 4}, num_experts=6, moe_intermediate_size=16)
    few, many = (requests([replace(SCORED, max_tokens=length)] * rows) for length in (8, 48))
    expected, found = (
        engine(
            beside(divided_model(config, 4, tmp_path / f"{side}.ostro", device=device, most_rows=MOST_ROWS), side),
            deterministic=True,
            graphs=graphs,
            graph_max_tokens=40 if graphs else 0,
        )
        for side in (False, True)
    )
    assert tokens(run(found, few)) == tokens(on_cpu(savable_model(config), few))
    gains = run(expected, many)
    for _ in range(8):
        found.scheduler.kv.clear_cache()
        again = run(found, many)
        assert (tokens(again), logprobs(again)) == (tokens(gains), logprobs(gains))


def beside(model: Decoder, wanted: bool) -> Decoder:
    """The model, whose CPU computes while the shared MLP does, or before it."""
    for module in model.modules():
        if isinstance(module, CpuExperts):
            assert module.begin is not None
            module.begin = partial(module.begin, beside=wanted)  # type: ignore[call-arg]
    return model


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("graphs", [True, False])
def test_graphs_compute_the_same(name: str, graphs: bool, device: torch.device, tmp_path: Path) -> None:
    """Several rounds, in which graphs of several sizes are captured and replayed, with padded rows."""
    config = CONFIGS[name]
    model = divided_model(config, 2, tmp_path / "experts.ostro", device=device, most_rows=MOST_ROWS)
    core = EngineCore(
        GpuRunner(
            model,
            page_size=16,
            num_pages=256,
            max_batch_tokens=64,
            max_batch_seqs=16,
            graphs=graphs,
            graph_max_tokens=64 if graphs else 0,
        )
    )
    whole = savable_model(config)
    for number in (1, 3, 5, 3, 1, 7):
        wanted = requests([SCORED] * number)
        core.scheduler.kv.clear_cache()
        assert tokens(run(core, wanted)) == tokens(on_cpu(whole, wanted))
    if graphs:
        assert core.runner.part.graphs.made  # type: ignore[attr-defined]


@pytest.mark.full
def test_a_checkpoint_is_divided_and_its_experts_are_packed_once(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path / "cache"))
    caplog.set_level("INFO")
    config = CONFIGS["qwen2_moe"]
    directory = write(tmp_path / "model", config)
    found = [tokens(run(engine(opened_and_divided(directory, 1, device)), asked()))]
    assert "packing the weights, once" in caplog.text
    caplog.clear()
    found.append(tokens(run(engine(opened_and_divided(directory, 1, device)), asked())))
    assert "packing" not in caplog.text
    # Those of other layers, and of other bits, are files of their own.
    opened_and_divided(directory, 2, device)
    opened_and_divided(directory, 2, device, quantize="int8")
    assert "packing the weights, once" in caplog.text
    expected = tokens(on_cpu(savable_model(config), asked()))
    assert found == [expected, expected]


def test_experts_that_cannot_be_packed_are_refused_by_name(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not left to another backend, which would refuse the setting for a reason of its own."""

    def full(*args: object, **kwargs: object) -> None:
        raise Unloadable("its packed weights cannot be written (No space left on device)")

    monkeypatch.setattr("ostro.backends.cuda.load.expert_program", full)
    with pytest.raises(
        Unsupported, match=r"No space left on device\). Correct that, or leave cpu_experts out"
    ) as error:
        opened_and_divided(write(tmp_path / "model", CONFIGS["qwen2_moe"]), 1, device)
    assert error.value.param == "cpu_experts"


def opened_and_divided(directory: Path, layers: int, device: torch.device, quantize: Quantization = "none") -> Decoder:
    settings = EngineConfig(device="cuda", dtype="float32", cpu_experts=layers, quantize=quantize, threads=2)
    opened = open_model(open_checkpoint(directory), settings)
    CudaBackend().check(opened, {})
    assert isinstance(opened.description, Architecture)
    divided = divided_parts(opened, opened.description, None)
    assert divided is not None
    return load_divided_model(opened, divided, device)
