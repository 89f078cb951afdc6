"""Encoders on a GPU, in fp32, against transformers on the CPU; without a GPU they run on the CPU here too."""

import pytest
import torch
from encoder_directory import CASES, reference
from encoder_runs import our_model, run, texts
from triton_device import DEVICE

from ostro.backends.torch.encoder import EncoderRunner
from ostro.weights import Pooling


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_vectors_equal_those_of_transformers(name: str) -> None:
    model = reference(CASES[name])
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in texts()])
    runner = EncoderRunner(our_model(CASES[name], model, DEVICE), Pooling("mean", normalize=False))
    assert runner.spec.device == DEVICE.type
    torch.testing.assert_close(run(runner, texts()), expected, atol=1e-3, rtol=0)
