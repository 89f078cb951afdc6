"""What ranks send each other besides tensors: the first plans each step, and all carry it out.

The first rank sends messages through the ring (`backends.ranks.ring`); the others reply with frames on their sockets:
four bytes of length, then MessagePack, as between all of Ostro's processes.
"""

import socket
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import msgspec

from ostro.backends.cuda.step_plan import GpuStep, decoded, encoded
from ostro.backends.torch.step_plan import Forward, Logits
from ostro.config import EngineConfig
from ostro.processes.log_relay import Logged

LENGTH = struct.Struct("<I")

Group = Literal["gloo", "nccl"]


class Message(msgspec.Struct, frozen=True, tag=True):
    pass


class Join(Message, frozen=True):
    """The first message: how to reach the others. Answered by Here."""

    ranks: int
    backend: Group
    store: str
    """A file through which the ranks find each other."""
    devices: Sequence[int] = ()
    """Each rank's GPU; empty on CPUs."""


class Load(Message, frozen=True):
    """Loads this rank's part of a model, in place of any before. The answer is Loaded or Failed."""

    path: str
    config: EngineConfig


class Begin(Message, frozen=True):
    """Makes this many pages, and slots of recurrent states: the model can run."""

    num_pages: int
    num_states: int = 0


class Here(Message, frozen=True):
    """The rank has started, and waits for the others."""


class Loaded(Message, frozen=True):
    """How many pages and slots of recurrent states there is memory for."""

    num_pages: int
    num_states: int = 0


class Failed(Message, frozen=True):
    """The rank cannot go on, and ends."""

    error: str
    """The name of an OstroError's class."""
    message: str
    param: str | None = None


class Read(Message, frozen=True):
    """How much of the ring was read."""

    position: int


ToRank = Join | Load | Begin | Forward | Logits | GpuStep
FromRank = Here | Loaded | Failed | Read | Logged

_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank, dec_hook=decoded)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
encode = msgspec.msgpack.Encoder(enc_hook=encoded).encode
decode_to_rank = _to_rank.decode


class Peers(Protocol):
    """The other ranks, for the runner that is the first."""

    ranks: int
    """Number of ranks, including the first."""
    can_capture: bool
    """Whether collectives may be part of CUDA graphs."""

    @property
    def failure(self) -> str | None:
        """Why they can no longer compute; None while they can."""

    def send(self, message: ToRank) -> None:
        """Sends to all of them. Raises Unavailable if one is gone."""

    def in_step(self) -> AbstractContextManager[None]:
        """Wraps whatever all ranks do together. An error inside leaves them out of step, so all of them end."""


def frame(message: FromRank) -> bytes:
    body = encode(message)
    return LENGTH.pack(len(body)) + body


def receive(sock: socket.socket) -> FromRank | None:
    """The next message of a rank; None once it is gone."""
    try:
        header = sock.recv(LENGTH.size, socket.MSG_WAITALL)
        if len(header) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack(header)
        body = sock.recv(size, socket.MSG_WAITALL)
        return _from_rank.decode(body) if len(body) == size else None
    except OSError:
        return None
