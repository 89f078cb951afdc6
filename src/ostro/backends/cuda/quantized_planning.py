"""What becomes of a quantised checkpoint's numbers on the runner that was planned."""

from collections import Counter
from collections.abc import Mapping

from ostro.backends.cuda.quantized_weights import format_name, quantized_forms, why_widened
from ostro.config import ResolvedConfig
from ostro.models.architecture import Architecture
from ostro.models.description import Description
from ostro.weights.forms import Form
from ostro.weights.stored import Stored


def kept_on_gpu(stored: Stored, config: ResolvedConfig, described: Description) -> Mapping[str, Form]:
    """The tensors that an NVIDIA GPU keeps as small as they are stored: by name, with and without the backbone's
    prefix.
    """
    if not isinstance(described, Architecture) or why_widened(config, described) is not None:
        return {}
    found = quantized_forms(described, {tensor.name: tensor.form for tensor in stored.tensors})
    return found | {name.removeprefix(f"{described.backbone}."): form for name, form in found.items()}


def stored_as(stored: Stored, *, natively: bool, kept: Mapping[str, Form]) -> str | None:
    """The checkpoint's format and how it is kept in memory, in words; None if it is not a quantised Hub checkpoint.
    `kept` is what a GPU does not widen.
    """
    if stored.quantization is None:
        return None
    packings: Counter[str] = Counter()
    for tensor in stored.tensors:
        if tensor.repacked is None:
            continue
        if natively:
            packings[f"{tensor.repacked} ({tensor.format})"] += tensor.values
        else:
            packings[_on_torch(kept.get(tensor.name))] += tensor.values
    return "; ".join((stored.quantization, *(how for how, _ in packings.most_common())))


def _on_torch(form: Form | None) -> str:
    if form is None:
        return "widened"
    groups = "" if form.kind == "float" else f" in groups of {form.group}"
    return f"kept as {format_name(form)}{groups}"
