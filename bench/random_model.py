"""Checkpoints of a named shape with random weights, for measurements that load a model as a user would."""

import json
from collections.abc import Mapping
from pathlib import Path


def write_weights(
    config: Mapping[str, object], directory: Path, *, dtype: str = "bfloat16", spread: float = 0.02
) -> None:
    """config.json and model.safetensors: matrices around 0, vectors around 1, with a standard deviation of `spread`."""
    import torch
    from safetensors.torch import save_file

    from ostro.torch_models.build import build_model
    from ostro.torch_models.loading import places_of

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    exact = getattr(torch, dtype)
    model = build_model(config, dtype=exact, device=torch.device("meta"))
    torch.manual_seed(0)
    tensors = {
        name: torch.empty(place.shape, dtype=exact, device=device).normal_(float(len(place.shape) == 1), spread).cpu()
        for name, place in places_of(model).items()
        if name != "lm_head.weight" or not config.get("tie_word_embeddings")
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
