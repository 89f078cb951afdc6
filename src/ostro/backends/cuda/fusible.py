"""Which models the fused kernels run, judging by their descriptions. Imports no torch."""

from ostro.kernels.gpu.mixture_limits import ALIGNED, MOST_CHOSEN, MOST_EXPERTS
from ostro.models.architecture import Experts, Layer
from ostro.models.description import Description, plain_decoder


def why_unfused(described: Description) -> str | None:
    """The reason why a model runs its own `forward`; None if fused kernels run it."""
    found = plain_decoder(described, hybrid=True)
    return found if isinstance(found, str) else next(filter(None, map(_why_unfused, found.layers)), None)


def _why_unfused(layer: Layer) -> str | None:
    if layer.mixer is None or layer.mlp is None:
        return "its layers have a mixer or an MLP, not both"
    if layer.mlp.activation == "relu2":
        return "its MLPs square their ReLUs"
    mixture = layer.mlp
    if not isinstance(mixture, Experts):
        return None
    if mixture.sigmoid is not None:
        return "its router weighs experts by sigmoids"
    if not mixture.gated:
        return "its experts have no gates"
    if layer.parallel:
        return "its experts run beside attention"
    if any(matrices.columns % ALIGNED for matrices in (mixture.up, mixture.down)):
        return f"its experts' widths are not multiples of {ALIGNED}"
    if mixture.count > MOST_EXPERTS or mixture.chosen > MOST_CHOSEN:
        return f"it has more than {MOST_EXPERTS} experts in a layer, or {MOST_CHOSEN} for a token"
    return None
