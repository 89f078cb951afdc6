"""Builds a torch model without weights from a config, by way of its description."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ostro.errors import ModelError
from ostro.models.architecture import Architecture
from ostro.models.cut import divisible
from ostro.models.encoder import Encoder
from ostro.models.registry import describe
from ostro.torch_models.base import Model
from ostro.torch_models.decoder import Decoder
from ostro.torch_models.encoder import EncoderModel
from ostro.torch_models.hrm_text import HrmTextModel
from ostro.torch_models.shard import Shard


def build_model(
    config: Mapping[str, object],
    *,
    max_seq_len: int | None = None,
    dtype: torch.dtype,
    device: torch.device | None = None,
    shard: Shard | None = None,
) -> Model:
    """The model described by `config`, with parameters allocated on the device but not filled; see `describe`.

    With a `shard`, one rank's part of it.
    """
    described = describe(config, max_seq_len=max_seq_len)
    if shard is not None:
        described = divisible(described)
    assert not isinstance(described, Encoder), "encoders are built by build_encoder"
    with _allocating(dtype, device):
        model = Decoder(described, shard) if isinstance(described, Architecture) else HrmTextModel(described)
    # On the meta device there are no weights, but the rope frequencies are real.
    return model.eval() if device is not None and device.type == "meta" else model.eval().to(device)


def build_encoder(described: Encoder, *, dtype: torch.dtype, device: torch.device | None = None) -> EncoderModel:
    """Like `build_model`, for an encoder."""
    with _allocating(dtype, device):
        model = EncoderModel(described)
    return model.eval().to(device)


@contextmanager
def _allocating(dtype: torch.dtype, device: torch.device | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device or torch.device("cpu"):
            yield
    except (RuntimeError, MemoryError) as error:
        # Sizes that are individually valid may together exceed the memory.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"There is no memory for a model as large as config.json says ({reason}). Check the sizes in it."
        ) from error
    finally:
        torch.set_default_dtype(before)
