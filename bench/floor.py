"""The least time that a workload can take: what a device must read, and what it must multiply, at its best rates.

All requests run at once. The first step computes all prompts, and each further one continues every request that is not
finished by one token. In a step,

    matmuls     take as long as reading all weights once, or as their arithmetic, whichever is longer;
    attention   takes as long as reading all keys and values once, or as its arithmetic, whichever is longer;

and the two take turns, because each layer's depend on one another. Of a beginning that all prompts share, each token is
computed once, and read once a step however many requests attend to it. A layer with a sliding window reads no keys
beyond it. Of a mixture of experts, a step reads as many as its tokens would hit if each chose at random. Norms,
embeddings, sampling and the host are taken to cost nothing.

Knows no engine and no kernels. Imports no torch.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from ostro.models.architecture import Architecture, Experts, Projection
from workloads import Work


@dataclass(frozen=True, slots=True)
class Rates:
    bytes_per_second: float
    flops_per_second: float
    """Rate of 16-bit matmuls."""
    fp8_flops_per_second: float


# Measured: device-to-device copies, and products of large bfloat16 matrices. Of 8-bit ones, nominally twice as many.
H200 = Rates(bytes_per_second=4.3e12, flops_per_second=780e12, fp8_flops_per_second=1560e12)

# A weight's; in 4 bits, 128 weights share four bytes.
_BYTES = {"none": 2.0, "fp8": 1.0, "int4": 0.5 + 4 / 128}


@dataclass(frozen=True, slots=True)
class Step:
    tokens: int
    """Rows of the layers' matmuls."""
    sampled: int
    """Rows of the head's matmul."""
    read: Counter[int | None]
    """By window: the keys that a layer with this window reads."""
    attended: Counter[int | None]
    """By window: pairs of a query and a key that it attends to, in such a layer."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How many numbers the layers' matrices have."""

    shared: int
    """All tokens go through these."""
    mixtures: Sequence[tuple[int, int, int]]
    """By layer with experts: how many there are, how many a token goes through, and the numbers of one."""

    @classmethod
    def of(cls, described: Architecture) -> "Weights":
        always: list[Projection] = []
        mixtures = []
        for layer in described.layers:
            always += layer.projections
            if isinstance(layer.mlp, Experts):
                always.append(layer.mlp.whole_router)
                size = sum(each.rows * each.columns for each in (layer.mlp.up, layer.mlp.down))
                mixtures.append((layer.mlp.count, layer.mlp.chosen, size))
        return cls(sum(each.rows * each.columns for each in always), mixtures)

    @property
    def active(self) -> int:
        """Numbers that one token is multiplied by."""
        return self.shared + sum(chosen * size for _, chosen, size in self.mixtures)

    def read(self, tokens: int) -> float:
        """Numbers that a step is expected to read."""
        return self.shared + sum(hit(tokens, count, chosen) * size for count, chosen, size in self.mixtures)


def hit(tokens: int, experts: int, chosen: int) -> float:
    """Experts that at least one token goes through, on average."""
    return float(experts * (1 - (1 - chosen / experts) ** tokens))


def steps(work: Sequence[Work], windows: set[int | None]) -> Iterator[Step]:
    """What the steps of a workload do, in order."""
    shared = _shared(work)
    first: Counter[int | None] = Counter()
    for window in windows:
        # A prompt's own tokens, and the shared ones once.
        spans = [(0, shared), *((shared, len(each.prompt)) for each in work)]
        first[window] = sum(_attended(start, end, window) for start, end in spans)
    own = sum(len(each.prompt) - shared for each in work)
    # Keys need not be read that have just been computed.
    yield Step(shared + own, len(work), Counter(), first)
    for number in range(1, max(each.output for each in work)):
        lengths = [len(each.prompt) + number for each in work if each.output > number]
        read, attended = Counter[int | None](), Counter[int | None]()
        for window in windows:
            begins = [0 if window is None else max(0, length - window) for length in lengths]
            own = sum(length - max(begin, shared) for length, begin in zip(lengths, begins, strict=True))
            read[window] = own + max(0, shared - min(begins))
            attended[window] = sum(lengths) - sum(begins)
        yield Step(len(lengths), len(lengths), read, attended)


def floor_seconds(
    described: Architecture,
    work: Sequence[Work],
    *,
    quantize: str = "none",
    fp8_kv: bool = False,
    rates: Rates = H200,
) -> float:
    """Seconds with layer weights in 16, 8 (fp8) or 4 (int4) bits, keys and values in 16 or 8, and the head in 16."""
    shape, weights = described.shape, Weights.of(described)
    head = shape.vocab_size * shape.hidden_size
    windows = Counter(layer.attends.spec.window for layer in described.layers if layer.attends is not None)
    # In float32, and what convolutions keep in 16 bits.
    state_bytes = sum(state.nbytes(2) for state in described.states if state is not None)
    layer_rate = rates.fp8_flops_per_second if quantize == "fp8" else rates.flops_per_second
    bytes_a_key = 2 * shape.num_kv_heads * shape.head_dim * (1 if fp8_kv else 2)
    # A score and its share of the sum: a multiplication and an addition for each number, twice.
    flops_a_pair = 4 * shape.num_heads * shape.head_dim
    seconds = 0.0
    for step in steps(work, set(windows)):
        products = 2 * weights.active * step.tokens / layer_rate + 2 * head * step.sampled / rates.flops_per_second
        weight_bytes = weights.read(step.tokens) * _BYTES[quantize] + head * 2
        seconds += max(weight_bytes / rates.bytes_per_second, products)
        read = sum(count * step.read[window] for window, count in windows.items()) * bytes_a_key
        scores = sum(count * step.attended[window] for window, count in windows.items()) * flops_a_pair
        seconds += max(read / rates.bytes_per_second, scores / rates.flops_per_second)
        # A step writes each sequence's state, and reads it if it does not begin the sequence.
        seconds += step.sampled * state_bytes * (2 if step.read else 1) / rates.bytes_per_second
    return seconds


def _shared(work: Sequence[Work]) -> int:
    """The length of the beginning that all prompts have in common. One token of each is its own: the one whose logits
    are sampled.
    """
    if len(work) == 1:
        return 0
    together = zip(*(each.prompt[:-1] for each in work), strict=False)
    return sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, together))


def _attended(start: int, end: int, window: int | None) -> int:
    """Keys that the tokens from `start` to `end` attend to, their own included."""

    def up_to(count: int) -> int:
        full = count if window is None else min(count, window)
        return full * (full + 1) // 2 + (count - full) * full

    return up_to(end) - up_to(start)
