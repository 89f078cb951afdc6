"""A Levanter checkpoint of eight shards on a mesh of eight devices: what the host needs for it, and its tokens."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import loading_memory
import numpy as np
import pytest
import torch
from jax_models import jax_runner_of
from levanter_directory import Arrays, levanter_arrays, write_checkpoint, write_yaml

from ostro.backends.torch.runner import TorchRunner
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.runner import ModelRunner
from ostro.engine.scheduler import Limits
from ostro.models.architecture import Architecture
from ostro.models.registry import describe
from ostro.sampling_params import SamplingParams
from ostro.torch_models.build import build_model
from ostro.torch_models.loading import load_weights
from ostro.weights import Checkpoint, open_checkpoint

SHARDS = 8
MOST = 1.3
"""How many times the largest array, all of its shards together, the host may need."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="measures by /proc")


def settings(hidden: int, inner: int, layers: int, vocab: int) -> dict[str, object]:
    return {
        "type": "llama",
        "hidden_dim": hidden,
        "intermediate_dim": inner,
        "num_layers": layers,
        "num_heads": 16,
        "num_kv_heads": 4,
        "vocab_size": vocab,
        "max_seq_len": 128,
    }


SMALL = settings(hidden=256, inner=512, layers=16, vocab=1000)
LARGE = settings(hidden=512, inner=2048, layers=16, vocab=8000)


def write_trained(directory: Path, model: Mapping[str, object]) -> tuple[Checkpoint, Arrays]:
    """As eight devices wrote it, each with its part of the width of all layers."""
    path, yaml = directory / "step-1", write_yaml(directory / "llama.yaml", model)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model["hidden_dim"],
        "intermediate_size": model["intermediate_dim"],
        "num_hidden_layers": model["num_layers"],
        "num_attention_heads": model["num_heads"],
        "num_key_value_heads": model["num_kv_heads"],
        "vocab_size": model["vocab_size"],
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    described = describe(config)
    assert isinstance(described, Architecture)
    random = torch.Generator().manual_seed(0)
    weights = {
        tensor.name: 0.05 * torch.randn(tensor.shape, generator=random) + len(tensor.shape) % 2
        for tensor in described.tensors()
    }
    arrays = levanter_arrays(weights, config)
    write_checkpoint(path, arrays, layers_per_chunk=described.shape.num_layers, shards=SHARDS)
    return open_checkpoint(path, model_config=str(yaml)), arrays


def measured(directory: Path) -> dict[str, int]:
    """The report of `loading_memory`."""
    # malloc keeps small blocks for later use; the kernel takes back what was mapped.
    environ = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, loading_memory.__file__, str(directory / "step-1"), str(directory / "llama.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, int] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("model", [SMALL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=["small", "large"])
def test_the_host_needs_little_more_than_one_array_and_reads_each_byte_once(
    tmp_path: Path, model: Mapping[str, object]
) -> None:
    _, arrays = write_trained(tmp_path, model)
    largest = max(array.nbytes for array in arrays.values())
    total = sum(array.nbytes for array in arrays.values())
    assert total > 4 * largest
    report = measured(tmp_path)
    assert report["weights"] >= total
    assert report["peak"] < MOST * largest
    assert report["read"] < 1.1 * total


def generated(runner: ModelRunner, vocab: int) -> dict[int, list[int]]:
    random = np.random.default_rng(3)
    core = EngineCore(runner, Limits(max_batch_tokens=64, max_batch_seqs=8))
    for id, temperature in enumerate((0.0, 1.0, 0.7)):
        prompt = tuple(random.integers(0, vocab, 12 + 9 * id).tolist())
        core.add(
            Request(id=id, prompt_ids=prompt, params=SamplingParams(max_tokens=8, temperature=temperature), seed=id)
        )
    tokens: dict[int, list[int]] = {}
    while core.has_work:
        for step in core.step():
            tokens.setdefault(step.request_id, []).extend(step.token_ids)
    return tokens


@pytest.mark.slow
def test_model_loaded_in_pieces_gives_torchs_tokens(tmp_path: Path) -> None:
    checkpoint, _ = write_trained(tmp_path, LARGE)
    model = build_model(checkpoint.config, dtype=torch.float32)
    load_weights(model, checkpoint.tensors())
    expected = generated(TorchRunner(model, page_size=4, num_pages=128), 8000)
    assert generated(jax_runner_of(checkpoint, tp=SHARDS), 8000) == expected
