"""Messages between the API process and the engine process: token ids and numbers, no text and no tensors.

Every message is a msgspec struct in a tagged union, so that neither side ever builds an object that it did not expect.
On the socket a message is its length in four bytes, then its MessagePack encoding.
"""

import struct

import msgspec

from ostro.config import EngineConfig
from ostro.engine.counters import Counters
from ostro.engine.request import Request
from ostro.engine.scheduler import Progress
from ostro.processes.log_relay import Logged

# Larger than any real message: a corrupt length must not make the reader wait for gigabytes.
MAX_MESSAGE_BYTES = 1 << 30
LENGTH = struct.Struct("<I")


class Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Boot(Message, frozen=True):
    """The first message to a new engine."""

    config: EngineConfig
    path: str | None = None
    """Where the model's files are, if already known."""
    name: str | None = None
    """The model's name, if the path is known."""


class Submit(Message, frozen=True):
    request: Request


class Abort(Message, frozen=True):
    request_id: int
    choice: int | None = None


class FindPrefix(Message, frozen=True):
    """Asks how much of a prompt without a cache salt is cached or in lower tiers. The answer is PrefixFound."""

    id: int
    prompt_ids: tuple[int, ...]
    adapter: str | None = None
    look: bool = False
    """Whether to look first for what other engines have shared."""


class OfferAll(Message, frozen=True):
    """Asks to share all prefixes with other engines while serving goes on. The answer is AllOffered."""


class StartProfile(Message, frozen=True):
    """Asks to profile the next steps into a file; the answer is Profiled."""

    path: str
    max_steps: int


class EndProfile(Message, frozen=True):
    """Asks to end the profile now, if there is one."""


class Stop(Message, frozen=True):
    """Graceful shutdown: the engine finishes its current step and exits."""


class ModelInfo(msgspec.Struct, frozen=True):
    """What the API process must know about a loaded model."""

    name: str
    max_len: int
    """Longest sequence that can run, prompt and output together."""
    vocab_size: int
    generates: bool
    """Whether it generates text; if not, it only embeds."""
    page_size: int
    num_pages: int
    load_seconds: float
    warm_up_seconds: float
    resident_bytes: int
    """Host memory that the engine process and those of other ranks take, without pages that have yet to be filled."""
    pages_bytes: int = 0
    """Host memory that pages will take once they are filled."""
    device_bytes: int = 0
    """Memory of each device, pages included; 0 on a CPU."""
    keeps_kv: bool = True
    """Whether the model has a KV cache; if not, a continuation may be scored in one pass."""
    num_puzzles: int = 0
    """Puzzles that a solve request may name; 0 if the model takes no such requests."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters that a request may name."""
    constrains: bool = False
    """Whether a request may have a constraint."""
    device: str = "cpu"
    """The kind of device that computes: "cpu", "cuda", "tpu" or "mps"."""
    devices: int = 1
    """Number of devices that the model is divided over."""
    backend: str = ""
    """The implementation, and the formats of weights, keys and values, for display."""
    precision: str = ""
    num_programs: int = 0
    """Programs compiled while the model was loading."""


class Located(Message, frozen=True):
    """The model's files are on this machine; their weights are read next. The API process finds the tokenizer there."""

    name: str
    path: str


class Loading(Message, frozen=True):
    """The model is being loaded. Sent twice a second by a separate thread."""

    work_seconds: float
    """CPU time that loading has taken so far. As long as it grows, there is progress, however slow the disk."""


class Ready(Message, frozen=True):
    """The model is loaded and has generated its first tokens."""

    info: ModelInfo


class Following(Message, frozen=True):
    """The engine has loaded its part of the model, and repeats the steps of another host's engine until that ends."""


class LoadFailed(Message, frozen=True):
    """The model cannot be loaded; the engine exits."""

    error: str
    """The name of the error's class."""
    message: str


class Heartbeat(Message, frozen=True):
    """The engine is alive. Sent twice a second by a separate thread, also while a step runs."""

    counters: Counters = msgspec.field(default_factory=Counters)
    strides: int = 0
    """Parts of long steps done so far: `ModelRunner.strides`."""
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_host: int = 0
    """Pages with a copy in host memory, and pages on disk."""
    pages_disk: int = 0
    pages_shared: int = 0
    """Pages that other engines find as well."""
    states_total: int = 0
    """Slots for recurrent states, those that are free, and those that hold snapshots for prefix hits."""
    states_free: int = 0
    snapshots: int = 0
    writing: bool = False
    """Whether no step is taken because a profile is being written."""


class Stepped(Message, frozen=True, omit_defaults=True):
    """One step's results, for all its sequences at once."""

    progress: list[Progress]
    begun: list[int] = []
    """Requests that start in this step, and when it began, by the monotonic clock that processes share. Sent before the
    step's progress, in a separate message.
    """
    begun_at: float | None = None
    preempted: list[int] = []
    """Requests preempted for this step, once per choice."""


class Refused(Message, frozen=True):
    """The engine does not accept a request."""

    request_id: int
    message: str
    param: str | None = None


class PrefixFound(Message, frozen=True):
    id: int
    num_tokens: int


class Offered(Message, frozen=True):
    """The prompt of a request that has ended is shared, as far as it could be."""

    request_id: int
    num_tokens: int
    """How many of its tokens other engines find."""


class AllOffered(Message, frozen=True):
    """There is no more to share."""


class Profiled(Message, frozen=True):
    """A profile has ended."""

    path: str
    steps: int = 0
    """How many steps it covers."""
    error: str | None = None
    """Why there is no such file."""


ToEngine = Boot | Submit | Abort | FindPrefix | OfferAll | StartProfile | EndProfile | Stop
FromEngine = (
    Logged
    | Located
    | Loading
    | Ready
    | Following
    | LoadFailed
    | Heartbeat
    | Stepped
    | Refused
    | PrefixFound
    | Offered
    | AllOffered
    | Profiled
)

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def frame(message: ToEngine | FromEngine) -> bytes:
    """The encoded message with its length in front."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_to_engine(body: bytes) -> ToEngine:
    return _to_engine.decode(body)


def decode_from_engine(body: bytes) -> FromEngine:
    return _from_engine.decode(body)


def body_length(header: bytes) -> int:
    (length,) = LENGTH.unpack(header)
    if length > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes was announced")
    return int(length)
