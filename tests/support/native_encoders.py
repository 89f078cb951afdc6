"""Tiny encoders of the native core: transformers' weights, packed as a checkpoint's would be, and runners on them."""

from pathlib import Path

import transformers
from encoder_runs import our_model
from family_case import Config
from native_models import ModelCheckpoint

from ostro.backends.native.encoder import NativeEncoderRunner
from ostro.backends.native.packing import pack
from ostro.backends.native.support import native_architecture
from ostro.kernels.cpu.library import instruction_sets, panel_of
from ostro.kernels.cpu.packed_file import PackedFile, PackedWriter
from ostro.models.encoder import Encoder
from ostro.models.registry import describe
from ostro.weights import Pooling


def described(values: Config, model: transformers.PreTrainedModel) -> Encoder:
    found = describe({**values, "architectures": [type(model).__name__]})
    assert isinstance(found, Encoder)
    return found


def packed_encoder(
    values: Config, model: transformers.PreTrainedModel, path: Path, *, isa: str | None = None, bits: int = 0
) -> PackedFile:
    """Packed for an instruction set: without one, for the best that there is."""
    panel = panel_of(isa or instruction_sets()[0])
    checkpoint = ModelCheckpoint(our_model(values, model), values)  # type: ignore[arg-type]
    with path.open("w+b") as file:
        writer = PackedWriter(file, panel)
        encoder = native_architecture(described(values, model), panel)
        writer.finish(pack(encoder, checkpoint.arrays(), writer, bits=bits).to_json())
        return PackedFile(file, path)


def native_encoder(
    values: Config,
    model: transformers.PreTrainedModel,
    path: Path,
    pooling: Pooling | None = None,
    *,
    isa: str | None = None,
    bits: int = 0,
    budget: int = 1024,
    threads: int = 2,
) -> NativeEncoderRunner:
    weights = packed_encoder(values, model, path / "encoder.ostro", isa=isa, bits=bits)
    return NativeEncoderRunner(
        weights,
        described(values, model),
        pooling,
        isa=isa or instruction_sets()[0],
        max_batch_tokens=budget,
        max_batch_seqs=8,
        threads=threads,
    )
