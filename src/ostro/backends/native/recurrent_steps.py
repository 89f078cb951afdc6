"""Steps of mixers that keep a recurrent state. Imports neither torch nor numpy.

    inputs(x) ── CONVOLVE ── DELTA or SSM ── MULTIPLY by the gates, with the norm ── output
              └────────── gates ───────────────┘

The products of `inputs` lie in the buffer of queries, keys and values, and those convolved in that of an MLP's inner
states, which comes later.
"""

from ostro.backends.native.layer_steps import BUFFER_COLS, LayerSteps, Read
from ostro.backends.native.sinks import ALIGNED, Sink, padded
from ostro.backends.native.support import WrongPanel
from ostro.kernels.cpu.library import STATE_LANES, TOKEN_NUMBERS, After, Op
from ostro.kernels.cpu.program_spec import RecurrenceSpec
from ostro.models.architecture import Convolution, GatedDelta, Mamba2, ModelShape, Recurrent, ShortConvolution, State


def state_floats(state: State) -> int:
    """What a mixer keeps of a sequence, as the native core lays it out."""
    inputs, channels = state.inputs
    kept = inputs * padded(channels, ALIGNED)
    if state.matrices is None:
        return kept
    heads, rows, columns = state.matrices
    return kept + heads * rows * padded(columns, STATE_LANES)


class RecurrentSteps(LayerSteps):
    def __init__(self, shape: ModelShape, sink: Sink, *, bits: int) -> None:
        super().__init__(shape, sink, bits=bits)
        self._state_floats = 0
        """Numbers in a state so far, and of what is kept of a draft."""
        self._draft_floats = 0

    def _recurrent(self, mixer: Recurrent, read: Read) -> None:
        """Its result is where attention's would be."""
        match mixer:
            case GatedDelta():
                self._gated_delta(mixer, read)
            case Mamba2():
                self._mamba2(mixer, read)
            case ShortConvolution():
                self._short_convolution(mixer, read)

    def _gated_delta(self, mixer: GatedDelta, read: Read) -> None:
        values, heads = mixer.value_heads * mixer.value_dim, mixer.value_heads
        gates_at = padded(mixer.inputs.rows, BUFFER_COLS)
        self._queries_keys_values(mixer.inputs, read)
        # They say how fast a state decays.
        self._queries_keys_values(mixer.gates, read, at=gates_at, bits=0)
        self._widen(self._QKV, gates_at + mixer.gates.rows)
        self._convolve(mixer.conv, self._INNER, after=After.SILU)
        self._add(
            op=Op.DELTA,
            input=self._INNER,
            out=self._ATTENDED,
            beside=self._QKV,
            beside_at=gates_at,
            weights=self._sink.vector([(mixer.decay, 1), (mixer.decay_bias, 1)], 2 * heads),
            scale=mixer.key_dim**-0.5,
            eps=mixer.QK_EPS,
            recurrence=self._matrices(
                heads, mixer.key_heads, mixer.key_dim, mixer.value_dim, tiled=mixer.head_map == "tiled"
            ),
        )
        self._whole_panels(mixer.value_dim, "values")
        self._multiply_by(
            self._QKV,
            mixer.conv.channels,
            values,
            After.SILU,
            norm=self._sink.vector([(f"{mixer.norm.name}.weight", heads)], values),
            eps=mixer.norm.eps,
            cols=mixer.value_dim,
        )

    def _mamba2(self, mixer: Mamba2, read: Read) -> None:
        width, heads, norm = mixer.width, mixer.heads, mixer.norm
        self._queries_keys_values(mixer.inputs, read)
        self._widen(self._QKV, mixer.inputs.rows)
        self._convolve(mixer.conv, self._INNER, at=width, after=After.SILU)
        self._add(
            op=Op.SSM,
            input=self._INNER,
            out=self._ATTENDED,
            beside=self._QKV,
            beside_at=width + mixer.conv.channels,
            weights=self._sink.vector([(name, 1) for name in (mixer.decay, mixer.step_bias, mixer.skip)], 3 * heads),
            recurrence=self._matrices(heads, mixer.groups, mixer.state_size, mixer.head_dim),
        )
        if norm is None:
            self._multiply_by(self._QKV, 0, width, After.SILU)
            return
        self._whole_panels(width // mixer.norm_groups, "groups")
        self._multiply_by(
            self._QKV,
            0,
            width,
            After.SILU,
            norm=self._weight(norm),
            eps=norm.eps,
            cols=width // mixer.norm_groups,
            normalized=not mixer.gates_normed,
        )

    def _short_convolution(self, mixer: ShortConvolution, read: Read) -> None:
        width = mixer.conv.channels
        b, c, u = (part * width for part in range(3))
        self._queries_keys_values(mixer.inputs, read)
        self._widen(self._QKV, mixer.inputs.rows)
        self._multiply_by(self._QKV, b, width, After.STORE, out=self._QKV, out_at=u)
        self._convolve(mixer.conv, self._ATTENDED, at=u)
        self._multiply_by(self._QKV, c, width, After.STORE)

    def _convolve(self, conv: Convolution, out: int, *, at: int = 0, after: After = After.STORE) -> None:
        channels = padded(conv.channels, ALIGNED)
        self._add(
            op=Op.CONVOLVE,
            input=self._QKV,
            in_at=at,
            out=out,
            cols=channels,
            after=after,
            weights=self._sink.filters(conv),
            bias=self._vector(f"{conv.name}.bias", channels) if conv.bias else None,
            recurrence=RecurrenceSpec(
                state_at=self._kept(conv.state), draft_at=self._drafted(channels), taps=conv.taps
            ),
        )
        # What lies behind the channels is filtered as well, and not read.
        self._widen(self._QKV, at + channels)
        self._widen(out, channels)

    def _multiply_by(self, gates: int, at: int, width: int, after: After, **how: object) -> None:
        """Multiplies the mixer's results, unless `how` says what."""
        self._whole_panels(width, "results")
        self._add(op=Op.MULTIPLY, input=gates, in_at=at, width=width, after=after, **{"out": self._ATTENDED, **how})
        self._widen(self._ATTENDED, width)

    def _matrices(self, heads: int, groups: int, rows: int, cols: int, *, tiled: bool = False) -> RecurrenceSpec:
        return RecurrenceSpec(
            state_at=self._kept(State((0, 0), (heads, rows, cols))),
            draft_at=self._drafted(heads * (2 * rows + cols + TOKEN_NUMBERS)),
            heads=heads,
            groups=groups,
            tiled=tiled,
            rows=rows,
            cols=cols,
        )

    def _kept(self, state: State) -> int:
        """Where this part of a state begins."""
        at = self._state_floats
        self._state_floats += state_floats(state)
        return at

    def _drafted(self, floats: int) -> int:
        """The same of what is kept of a draft."""
        at = self._draft_floats
        self._draft_floats += floats
        return at

    def _whole_panels(self, columns: int, what: str) -> None:
        if columns % self._panel:
            raise WrongPanel(f"its mixers' {what} are {columns} wide, not a multiple of {self._panel}")
