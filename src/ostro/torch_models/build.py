"""Builds torch models without weights from their descriptions."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ostro.errors import ModelError
from ostro.models.architecture import HrmText
from ostro.models.cut import divisible
from ostro.models.description import Causal
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
    """The model with a KV cache that `config` describes; see `describe` and `build_described`."""
    described = describe(config, max_seq_len=max_seq_len)
    assert isinstance(described, Causal), "encoders and HRMs have builders of their own"
    return build_described(described, dtype=dtype, device=device, shard=shard)


def build_described(
    described: Causal, *, dtype: torch.dtype, device: torch.device | None = None, shard: Shard | None = None
) -> Model:
    """A model whose parameters are allocated on the device, but not filled. With a `shard`, one rank's part of it."""
    if shard is not None:
        described = divisible(described)
    with _allocating(dtype, device):
        model = HrmTextModel(described) if isinstance(described, HrmText) else Decoder(described, shard)
    # On the meta device there are no weights, but the rope frequencies are real.
    return model.eval() if device is not None and device.type == "meta" else model.eval().to(device)


def build_encoder(described: Encoder, *, dtype: torch.dtype, device: torch.device | None = None) -> EncoderModel:
    """Like `build_described`, for an encoder."""
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
