"""Models whose experts are on the CPU, beside layers that fused kernels run."""

from collections.abc import Mapping
from pathlib import Path

import torch
from native_models import ModelCheckpoint, savable_model

from ostro.backends.cuda.cpu_experts import CpuMixtures
from ostro.backends.native.packing import pack
from ostro.kernels.cpu.library import instruction_sets, panel_of
from ostro.kernels.cpu.packed_file import PackedFile, PackedWriter
from ostro.kernels.cpu.program import Allocate, Program
from ostro.models.architecture import Architecture
from ostro.models.expert_layers import ExpertLayers, with_cpu_experts
from ostro.models.registry import describe
from ostro.torch_models.build import build_described
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.loading import load_weights


def packed_experts(
    experts: ExpertLayers, config: Mapping[str, object], path: Path, *, bits: int = 0, isa: str | None = None
) -> PackedFile:
    arrays = ModelCheckpoint(savable_model(config), config).arrays()
    with path.open("w+b") as file:
        writer = PackedWriter(file, panel_of(isa or instruction_sets()[0]))
        wanted = (each for each in arrays if each[0] in experts.names)
        writer.finish(pack(experts, wanted, writer, bits=bits).to_json())
        return PackedFile(file, path)


def divided_model(
    config: Mapping[str, object],
    layers: int,
    path: Path,
    *,
    bits: int = 0,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    most_rows: int = 64,
    threads: int = 2,
) -> Decoder:
    """The model that `savable_model` makes, with the experts of its first layers on the CPU."""
    described = describe(config)
    assert isinstance(described, Architecture)
    there, experts = with_cpu_experts(described, layers)
    device = device or torch.device("cpu")
    model = build_described(there, dtype=dtype, device=device)
    assert isinstance(model, Decoder)
    tensors = ModelCheckpoint(savable_model(config), config).tensors()
    load_weights(model, ((name, tensor) for name, tensor in tensors if name not in experts.names))
    weights = packed_experts(experts, config, path, bits=bits)

    def make(allocate: Mapping[int, Allocate]) -> Program:
        isa = instruction_sets()[0]
        return Program(
            weights, isa=isa, num_pages=0, max_tokens=most_rows, max_asked=1, threads=threads, allocate=allocate
        )

    CpuMixtures(make, device).attach(model)
    return model
