"""From a checkpoint to a runner that is ready: picks the device, loads the weights, sizes the cache."""

import torch

from ostro.config import EngineConfig
from ostro.errors import BadRequest
from ostro.models.base import Model
from ostro.models.registry import build_model, load_weights
from ostro.runner.base import ModelRunner
from ostro.runner.devices import pick_device, pick_dtype
from ostro.runner.memory import num_pages
from ostro.runner.torch_runner import TorchRunner
from ostro.weights import Checkpoint, Pooling


def load_runner(checkpoint: Checkpoint, config: EngineConfig) -> ModelRunner:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    model = build_model(
        checkpoint.config, max_seq_len=config.max_seq_len, dtype=pick_dtype(config.dtype, device), device=device
    )
    load_weights(model, checkpoint.tensors())
    return make_runner(model, config, pooling=checkpoint.pooling)


def make_runner(model: Model, config: EngineConfig, *, pooling: Pooling | None = None) -> ModelRunner:
    """A runner for a model that is loaded, on the model's device."""
    device = next(model.parameters()).device
    config = config.suited_to(device.type)
    assert config.page_size is not None
    assert config.max_batch_tokens is not None
    assert config.max_batch_seqs is not None
    if device.type == "cuda":
        # Needs triton, which machines without a GPU need not have.
        from ostro.runner.gpu.quantize import quantize_fp8
        from ostro.runner.gpu.runner import GpuRunner

        if config.quantize == "fp8":
            quantize_fp8(model)
        return GpuRunner.sized(model, config, pooling=pooling)
    for name, asked in (("quantize", config.quantize != "none"), ("kv_dtype", config.kv_dtype != "auto")):
        if asked:
            raise BadRequest(f"{name} {getattr(config, name)} needs a GPU; leave it out on a CPU.", param=name)
    pages = num_pages(
        model.shape,
        page_size=config.page_size,
        itemsize=torch.float32.itemsize,
        kv_memory=config.kv_memory,
        max_batch_seqs=config.max_batch_seqs,
    )
    return TorchRunner(
        model,
        page_size=config.page_size,
        num_pages=pages,
        max_batch_tokens=config.max_batch_tokens,
        max_batch_seqs=config.max_batch_seqs,
        pooling=pooling,
    )
