"""Random weights for models of transformers, of a size at which every one of them matters."""

import math

import torch
import transformers


def telling(model: transformers.PreTrainedModel, *, seed: int = 0) -> transformers.PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                # The rate at which a state decays, from slow to fast.
                parameter.copy_(torch.log(0.2 + 4 * torch.rand(parameter.shape, generator=generator)))
            elif parameter.dim() == 1:
                parameter += 0.3 * noise
            else:
                parameter.copy_(1.5 * noise / math.sqrt(parameter.shape[-1]))
        # Numbers that are stored, but not trained.
        trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name, tensor in model.state_dict().items():
            if name not in trained and tensor.is_floating_point():
                tensor *= 1.0 + 0.3 * torch.rand(tensor.shape, generator=generator)
                if not tensor.any():
                    tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    return model.eval()
