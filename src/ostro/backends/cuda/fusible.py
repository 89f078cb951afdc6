"""Which models the fused kernels and the attention kernels run, told from their description. Imports no torch."""

from ostro.config import ResolvedConfig
from ostro.errors import BadRequest
from ostro.kernels.gpu.mixture_limits import ALIGNED, MOST_CHOSEN, MOST_EXPERTS
from ostro.kernels.plain_attention_memory import most_block_bytes
from ostro.models.architecture import Architecture, Experts, Heads, Layer
from ostro.models.torch_only import torch_only


def why_unfused(described: Architecture) -> str | None:
    """The reason why a model runs its own `forward`; None if fused kernels run it."""
    return torch_only(described) or next(filter(None, map(_why_unfused, described.layers)), None)


def why_plain_attention(described: Architecture) -> str | None:
    """The reason why torch's plain attention runs a model on a GPU, without graphs; None if kernels do."""
    if described.shape.layer_heads:
        return "its layers differ in their heads"
    served = described.shape.max_seq_len
    chunks = {layer.attention.spec.chunk for layer in described.layers} - {None}
    if any(chunk is not None and chunk < served for chunk in chunks):
        return f"its layers attend within chunks, and max_seq_len, {served}, is longer than a chunk"
    return None


def plain_attention_bytes(described: Architecture, itemsize: int, max_batch_tokens: int) -> int:
    """The most GPU memory that plain attention takes in a step: a block's scores, and one sequence's keys and values.
    0 if kernels run the model.
    """
    if why_plain_attention(described) is None:
        return 0
    shape = described.shape
    heads = shape.layer_heads or [Heads(shape.num_kv_heads, shape.head_dim)] * shape.num_layers
    sources = [layer.attention.kv_layer for layer in described.layers]
    gathered = 0
    for index, (layer, source) in enumerate(zip(described.layers, sources, strict=True)):
        spec, own = layer.attention.spec, heads[index if source is None else source]
        reach = min(filter(None, (spec.window, spec.chunk)), default=shape.max_seq_len)
        keys = min(shape.max_seq_len, reach + max_batch_tokens)
        gathered = max(gathered, 2 * own.kv * own.dim * itemsize * keys)
    return most_block_bytes(shape.num_heads, shape.max_seq_len) + gathered


def check_plain_attention(config: ResolvedConfig, reason: str) -> None:
    """Raises BadRequest for a setting that needs the attention kernels, which do not run a model for this reason."""
    needs = {
        "kv_dtype": config.kv_dtype == "fp8",
        "deterministic": config.deterministic,
        "kernel_choices": config.kernel_choices not in ("auto", "off"),
        **dict.fromkeys(config.tier_settings, True),
    }
    for name in (name for name, is_asked in needs.items() if is_asked):
        raise BadRequest(
            f"{name} needs attention kernels, which do not run this model: {reason}. Leave it out.", param=name
        )


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
