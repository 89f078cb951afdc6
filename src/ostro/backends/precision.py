"""Describes a model's number formats in words, and refuses those that torch has no kernels for. Imports no torch."""

from collections.abc import Iterable

from ostro.errors import Unsupported
from ostro.models.description import Causal, plain_decoder


def in_words(weights: Iterable[str], cells: str | None) -> str:
    """For example: Q4_1 and Q8_0 weights, float16 keys and values. `cells` is None for a model without a KV cache."""
    kept = f"{' and '.join(weights)} weights"
    return kept if cells is None else f"{kept}, {cells} keys and values"


def with_cpu_experts(precision: str, layers: int, experts: str) -> str:
    """The same with the experts that the CPU computes, whose formats are given."""
    return f"{precision}; experts of {layers} layers on the CPU in {experts}"


def check_torch_format(described: Causal, quantize: str) -> None:
    """Raises Unsupported if torch cannot quantize the model's modules."""
    if quantize != "none" and described.has_experts:
        raise Unsupported(
            f"quantize {quantize} of a mixture of experts needs the native core, and this one runs on torch. Leave it "
            "out.",
            param="quantize",
        )
    if quantize == "fp8" and described.states:
        raise Unsupported(
            "quantize fp8 does not work with models whose layers keep a recurrent state: their matrices have no 8-bit "
            "form on a GPU yet. Leave it out, or serve the model on a CPU with quantize int8.",
            param="quantize",
        )
    if quantize == "fp8" and isinstance(reason := plain_decoder(described), str):
        raise without_fused_kernels(reason)


def without_fused_kernels(reason: str) -> Unsupported:
    """The error for quantize fp8 where fused kernels do not run the model."""
    return Unsupported(
        f"quantize fp8 needs the fused kernels, which do not run this model: {reason}. Leave it out.",
        param="quantize",
    )
