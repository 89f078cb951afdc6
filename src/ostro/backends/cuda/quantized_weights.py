"""Which projections of a quantised checkpoint keep their bits on a GPU. Knows headers; knows no torch and no device.

On the GPU, a projection is one matrix that holds all its parts (queries, keys and values, say), so the parts must have
a form in common. Everything else is widened to the number format that the model computes in: embedding and head, whose
kernels have no other, experts, and what is on no grid or on one that the kernels do not take.
"""

from collections.abc import Mapping, Sequence

from ostro.config import EngineConfig
from ostro.kernels.gpu.packed_layout import fits
from ostro.models.architecture import Projection
from ostro.models.description import Causal, plain_decoder
from ostro.weights.forms import Form
from ostro.weights.stored import Stored

# cuBLAS needs matrices of 8-bit floats whose sizes are multiples of this.
_FLOAT_MULTIPLE = 16


def why_widened(config: EngineConfig, described: Causal) -> str | None:
    """The reason why no projection keeps its bits, for a model on one or several GPUs; None if some may."""
    if isinstance(found := plain_decoder(described), str):
        return found
    if found.has_experts:
        return "it is a mixture of experts"
    if config.deterministic:
        return "deterministic needs it"
    if config.tensor_parallel != 1:
        return "it is divided over several GPUs"
    if config.quantize != "none":
        return f"quantize is {config.quantize}"
    return "dtype is float32" if config.dtype == "float32" else None


def kept_weights(stored: Stored, described: Causal, config: EngineConfig) -> Mapping[str, Form]:
    """The tensors that a GPU keeps as small as they are stored, by name, with and without the backbone's prefix."""
    if why_widened(config, described) is not None:
        return {}
    found = quantized_forms(described, {tensor.name: tensor.form for tensor in stored.tensors})
    return found | {name.removeprefix(f"{described.backbone}."): form for name, form in found.items()}


def joined_form(projection: Projection, forms: Sequence[Form | None]) -> Form | None:
    """The form of a projection whose parts have these forms; None if it is widened."""
    known = [form for form in forms if form is not None]
    if len(known) < len(forms) or len({form.kind for form in known}) > 1 or projection.transposed:
        return None
    if known[0].kind == "float":
        whole = projection.rows % _FLOAT_MULTIPLE == 0 and projection.columns % _FLOAT_MULTIPLE == 0
        return known[0] if whole else None
    bits, group = max(form.bits for form in known), min(form.group for form in known)
    if any(form.group % group for form in known) or not fits(bits, projection.columns, group):
        return None
    return Form("int", bits, group)


def quantized_forms(described: Causal, forms: Mapping[str, Form | None]) -> dict[str, Form]:
    """The form that each tensor of the projections has in memory, by its name with the backbone's prefix; those that
    are widened are left out. `forms` are those of the checkpoint's tensors, with or without the prefix.
    """
    found: dict[str, Form] = {}
    prefix = f"{described.backbone}."
    for layer in described.layers:
        for projection in layer.projections:
            names = [f"{part.name}.weight" for part in projection.parts]
            own = [forms.get(name) or forms.get(name.removeprefix(prefix)) for name in names]
            if (form := joined_form(projection, own)) is not None:
                found |= dict.fromkeys(names, form)
    return found


def largest_packed(described: Causal, kept: Mapping[str, Form]) -> int:
    """The number of weights in the largest projection that is packed, which is widened as a whole for prompts."""
    projections = (projection for layer in described.layers for projection in layer.projections)
    sizes = [
        projection.rows * projection.columns
        for projection in projections
        if (form := kept.get(f"{projection.parts[0].name}.weight")) is not None and form.kind == "int"
    ]
    return max(sizes, default=0)
