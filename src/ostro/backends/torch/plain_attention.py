"""Layers that only torch's own modules compute: which models need them on a GPU, and how much memory plain attention
and recurrent layers take in a step. Imports no torch.
"""

from collections.abc import Iterable
from math import prod

from ostro.config import EngineConfig
from ostro.engine.drafter import MOST_DRAFTS
from ostro.errors import BadRequest, Unsupported
from ostro.kernels.plain_attention_memory import most_block_bytes
from ostro.models.architecture import Architecture, Heads, Mamba2, State
from ostro.models.cut import Cut, recurrent_shares
from ostro.models.description import Causal, heads_differ

# Rows as wide as a recurrent layer's inputs that are alive at a time: convolved, normed, spread over heads, read.
_FLOAT_ROWS = 6
# The same where kernels advance states: what is projected, convolved and mixed, and what blocks of rows keep, which is
# twice as large unless the model is in bfloat16.
_KERNEL_ROWS, _WIDE_KERNEL_ROWS = 3, 5
# Copies of the rows that a Mamba's heads read, each with its own: in the rows' order, and in the order of time.
_SPREAD_ROWS = 2


def why_plain_attention(described: Causal) -> str | None:
    """The reason why torch's plain attention runs a model on a GPU, without graphs; None if kernels do."""
    if isinstance(described, Architecture) and heads_differ(described):
        return "its layers differ in their heads"
    served = described.shape.max_seq_len
    chunks = {layer.attends.spec.chunk for layer in described.layers if layer.attends is not None} - {None}
    if any(chunk is not None and chunk < served for chunk in chunks):
        return f"its layers attend within chunks, and max_seq_len, {served}, is longer than a chunk"
    return None


def recurrent_rows_bytes(described: Causal, dtype: str, max_batch_tokens: int) -> int:
    """The most memory that a recurrent layer's rows take in a step where kernels advance its states. 0 without such."""
    rows = _KERNEL_ROWS if dtype == "bfloat16" else _WIDE_KERNEL_ROWS
    mixers = (layer.recurrent for layer in described.layers if layer.recurrent is not None)
    return max((4 * rows * mixer.inputs.rows * max_batch_tokens for mixer in mixers), default=0)


def recurrent_bytes(described: Causal, max_batch_tokens: int, max_batch_seqs: int, cut: Cut | None = None) -> int:
    """The most memory that a recurrent layer takes in a step: its rows, and its matrices of all sequences, which are
    advanced apart from where they are kept; in float32. Also what all layers keep of drafts. 0 without such layers.
    With a `cut`, it is a rank's.
    """
    found = 0
    for whole in (layer.recurrent for layer in described.layers if layer.recurrent is not None):
        mixer = whole if cut is None else cut.mixer(whole)
        inputs = whole.inputs.rows
        if cut is not None:
            inputs = sum(map(len, recurrent_shares(whole, cut, 0).projections[0].rows))
        rows, matrices = _FLOAT_ROWS * inputs, mixer.state.matrices
        if isinstance(mixer, Mamba2):
            rows += _SPREAD_ROWS * 2 * mixer.heads * mixer.state_size
        found = max(found, 4 * (rows * max_batch_tokens + prod(matrices or (0,)) * max_batch_seqs))
    states = described.states
    if cut is not None and isinstance(described, Architecture):
        states = cut.states(described)
    return found + max(max_batch_seqs, MOST_DRAFTS) * draft_bytes(states)


def draft_bytes(states: Iterable[State | None]) -> int:
    """What layers with these states keep of a draft: its inputs of convolutions, and what their recurrences read."""
    floats = 0
    for state in filter(None, states):
        heads, rows, columns = state.matrices or (0, 0, 0)
        _, channels = state.inputs
        # The sides of the matrices, one of them twice, and two numbers.
        floats += channels + heads * (rows + columns + max(rows, columns) + 2)
    return 4 * floats


def plain_attention_bytes(described: Causal, itemsize: int, max_batch_tokens: int, max_batch_seqs: int) -> int:
    """The most GPU memory that plain attention takes in a step: a block's scores, and one sequence's keys and values.
    Or what a recurrent layer takes, if that is more. 0 if kernels run the model.
    """
    if why_plain_attention(described) is None:
        return 0
    shape = described.shape
    heads = shape.layer_heads or [Heads(shape.num_kv_heads, shape.head_dim)] * shape.num_layers
    gathered = 0
    for index, attention in enumerate(layer.attends for layer in described.layers):
        if attention is None:
            continue
        spec, own = attention.spec, heads[index if attention.kv_layer is None else attention.kv_layer]
        reach = min(filter(None, (spec.window, spec.chunk)), default=shape.max_seq_len)
        keys = min(shape.max_seq_len, reach + max_batch_tokens)
        gathered = max(gathered, 2 * own.kv * own.dim * itemsize * keys)
    block = most_block_bytes(shape.num_heads, shape.max_seq_len)
    return max(block + gathered, recurrent_bytes(described, max_batch_tokens, max_batch_seqs))


def check_states_whole(described: Causal, config: EngineConfig) -> None:
    """Raises Unsupported if a model with recurrent states should be divided over GPUs."""
    if described.states and config.tensor_parallel not in (1, "auto"):
        raise Unsupported(
            "With torch a model whose layers keep a recurrent state is not divided over GPUs. Leave out "
            "tensor_parallel.",
            param="tensor_parallel",
        )


def check_plain_attention(config: EngineConfig, reason: str) -> None:
    """Raises BadRequest for a setting that needs the attention kernels, which do not run a model for this reason."""
    needs = {
        "kv_dtype": config.kv_dtype == "fp8",
        "deterministic": config.deterministic,
        "cpu_experts": config.cpu_experts != "none",
        "kernel_choices": config.kernel_choices not in ("auto", "off"),
        **dict.fromkeys(config.tier_settings, True),
    }
    for name in (name for name, is_asked in needs.items() if is_asked):
        raise BadRequest(
            f"{name} needs attention kernels, which do not run this model: {reason}. Leave it out.", param=name
        )
