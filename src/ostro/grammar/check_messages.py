"""Messages between `checker` and `check_process`: first a `Setup`, then checks, each answered by a `Checked`."""

import msgspec

from ostro.engine.constraint import Constraint
from ostro.structured import StructuredOutput


class Setup(msgspec.Struct, frozen=True):
    vocab_size: int
    special_ids: dict[str, int]
    eos_ids: list[int]


class Check(msgspec.Struct, frozen=True):
    """What to check; exactly one of the fields is set."""

    structured: StructuredOutput | None = None
    constraint: Constraint | None = None


class Accepted(msgspec.Struct, frozen=True, tag=True):
    constraint: Constraint


class Refused(msgspec.Struct, frozen=True, tag=True):
    message: str
    param: str | None
    unsupported: bool = False


Reply = Accepted | Refused


class Checked(msgspec.Struct, frozen=True):
    reply: Reply
    seconds: float
    """CPU time that the check took."""
