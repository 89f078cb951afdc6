"""Which models the fused kernels run, told from their description. Imports no torch."""

from ostro.kernels.gpu.mixture_limits import ALIGNED, MOST_CHOSEN, MOST_EXPERTS
from ostro.models.architecture import Architecture, Experts, Layer


def why_unfused(described: Architecture) -> str | None:
    """The reason why a model runs its own `forward`; None if fused kernels run it."""
    return next(filter(None, (_why_unfused(layer) for layer in described.layers)), None)


def _why_unfused(layer: Layer) -> str | None:
    mixture = layer.mlp
    if not isinstance(mixture, Experts):
        return None
    if layer.parallel:
        return "its experts run beside attention"
    if any(matrices.columns % ALIGNED for matrices in (mixture.up, mixture.down)):
        return f"its experts' widths are not multiples of {ALIGNED}"
    if mixture.count > MOST_EXPERTS or mixture.chosen > MOST_CHOSEN:
        return f"it has more than {MOST_EXPERTS} experts in a layer, or {MOST_CHOSEN} for a token"
    return None
