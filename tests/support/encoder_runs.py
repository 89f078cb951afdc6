"""Encoders of tiny random weights, run by the engine."""

from collections.abc import Mapping, Sequence

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from ostro.engine.core import EngineCore
from ostro.engine.request import Request, Task
from ostro.engine.runner import ModelRunner
from ostro.engine.scheduler import Limits
from ostro.models.encoder import Encoder
from ostro.models.registry import describe
from ostro.sampling_params import SamplingParams
from ostro.torch_models.build import build_encoder
from ostro.torch_models.encoder import EncoderModel
from ostro.torch_models.loading import fill, places_of
from ostro.weights.encoder_files import encoder_renamer

LENGTHS = (7, 1, 30, 7, 19)


def our_model(
    values: Mapping[str, object], model: transformers.PreTrainedModel, device: torch.device | None = None
) -> EncoderModel:
    described = describe({**values, "architectures": [type(model).__name__]})
    assert isinstance(described, Encoder)
    ours, rename = build_encoder(described, dtype=torch.float32, device=device), encoder_renamer(described)
    stored = revert_weight_conversion(model, model.state_dict())
    fill(places_of(ours), ((name, tensor) for stored_name, tensor in stored.items() if (name := rename(stored_name))))
    return ours


def texts() -> list[list[int]]:
    """Token ids of texts of different lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 64, (length,), generator=generator).tolist() for length in LENGTHS]


def run(runner: ModelRunner, prompts: Sequence[Sequence[int]], *, budget: int = 1000, second: int = 0) -> torch.Tensor:
    """One vector per prompt, in order."""
    core = EngineCore(runner, Limits(max_batch_tokens=budget, max_batch_seqs=8))
    for id, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=0)
        core.add(Request(id=id, prompt_ids=tuple(prompt), params=params, seed=0, task=Task.EMBED, second_at=second))
    found: dict[int, list[float]] = {}
    while core.has_work:
        for gain in core.step():
            assert gain.finish_reason is not None, "a text takes one step"
            found[gain.request_id] = gain.pooled or []
        core.check_integrity()
    return torch.tensor([found[id] for id in range(len(prompts))])
