"""The interface between a model and its runner. Knows no family."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from ostro.models.architecture import AttentionSpec, ModelShape, State, state_bytes


class Module(nn.Module):
    """A part of a model. Bypasses torch's hooks, which would cost 5 % of a small model's step."""

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)


class AttentionContext(Protocol):
    """One step's view of the KV cache, passed to the model explicitly."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """Stores k and v, and attends each query to its own sequence so far.

        q is [tokens, heads, head_dim], k and v are [tokens, kv_heads, head_dim], usually not contiguous; returns
        [tokens, heads * head_dim]. `sinks` are scores without a value, one per head: see `architecture.Sinks`.
        """
        ...

    def attend_stored(self, layer: int, q: Tensor, spec: AttentionSpec) -> Tensor:
        """The same for keys and values that `attend` has stored in this step."""
        ...


class PlainStates(Protocol):
    """One step's view of its sequences' recurrent states. Rows are those of the step's tokens."""

    def convolve(self, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiplies each of a sequence's latest inputs, [rows, channels], by its tap, and adds them up in float32.

        `weight` is [taps, channels], and the last tap is the newest input's. Keeps the inputs that the next step needs.
        """
        ...

    def recur(self, layer: int, size: tuple[int, int, int], advance: Callable[..., Tensor], *read: Tensor) -> Tensor:
        """Advances each sequence's matrices, of this size, by its rows, one after the other; see
        `kernels.recurrent_state.Advance`.
        """
        ...


class RecurrentMixer(Protocol):
    """A mixer with a state, as a module."""

    @property
    def plain(self) -> Callable[..., Tensor]:
        """Takes the step's states and what the mixer's projections have computed for each row. Returns what its last
        projection reads.
        """
        ...


class States(Protocol):
    """One step's recurrent states, by whatever means they are advanced."""

    def mix(self, mixer: RecurrentMixer, *rows: Tensor) -> Tensor:
        """`RecurrentMixer.plain`, which is the plain twin where kernels compute it."""
        ...


class StatefulContext(AttentionContext, Protocol):
    """The same for a model some of whose layers keep a recurrent state."""

    @property
    def states(self) -> States: ...


class Model(Module, ABC):
    """A decoder. `forward` takes all tokens of a step, flattened, and returns their final hidden states."""

    shape: ModelShape
    backbone_name: str
    """The prefix of all tensor names but the head's; checkpoints of the bare backbone omit it."""

    @abstractmethod
    def forward(self, ids: Tensor, positions: Tensor, ctx: AttentionContext) -> Tensor:
        """[tokens] ids and positions -> [tokens, hidden_size], after the final norm."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] -> [rows, vocab_size], in float32."""

    @abstractmethod
    def raw_logits(self, hidden: Tensor) -> Tensor:
        """The same in the model's dtype, for samplers that convert to float32 themselves."""

    @property
    def states(self) -> Sequence[State | None]:
        """What each layer keeps of a sequence beside keys and values; empty if none keeps anything."""
        return ()

    @property
    def state_bytes(self) -> int:
        """The size of all that."""
        return state_bytes(self.states, next(self.parameters()).itemsize)

    @property
    def captures(self) -> bool:
        """Whether a CUDA graph can hold `forward`: it never waits for the device."""
        return True

    @property
    @abstractmethod
    def has_head(self) -> bool:
        """Whether `logits` works."""
