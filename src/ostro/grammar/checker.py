"""Checks structured outputs in a separate process, because compiling one can take any time and memory. Keeps outcomes.

StructuredOutput ──> GrammarChecker ──socket──> check_process: llguidance, with limits ──> Constraint

What has passed is compiled again by the engine, for its own vocabulary: it takes about as long there.
"""

import asyncio
import hashlib
import signal
import threading
from dataclasses import dataclass

import msgspec

from ostro.engine.constraint import Constraint
from ostro.errors import BadRequest, Unavailable, Unsupported
from ostro.grammar.check_messages import Accepted, Check, Refused, Reply, Setup
from ostro.grammar.lru import Lru
from ostro.grammar.vocabulary import TokenizerLike, require_llguidance
from ostro.processes.worker import Worker, WorkerEnded, WorkerError
from ostro.structured import StructuredOutput

# Of a grammar in its reply: a schema has at most 256 KiB, which JSON within JSON may double.
_LONGEST_REPLY = 1 << 24
_MAX_OUTCOMES = 256
_MAX_BYTES = 1 << 24
# By these a process is ended from outside; whatever else ends it, the grammar did.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimits:
    """What compiling one grammar may use."""

    seconds: float = 0.75
    """Of CPU time. Of real schemas, 99 % take less than 40 ms."""
    bytes: int = 512 << 20
    """Of address space, interpreter and library included."""


class GrammarChecker:
    """For one model. Use either its blocking methods, from any thread, or its asynchronous ones, within one event loop.

    The process is started when it is first needed.
    """

    def __init__(self, tokenizer: TokenizerLike, *, limits: CheckLimits | None = None) -> None:
        self.limits = limits or CheckLimits()
        special_ids = {tokenizer.token_bytes(token).decode(errors="replace"): token for token in tokenizer.special_ids}
        setup = Setup(tokenizer.vocab_size, special_ids, sorted(tokenizer.eos_ids))
        self._worker = Worker(
            "ostro.grammar.check_process",
            msgspec.msgpack.encode(setup),
            seconds=self.limits.seconds,
            memory=self.limits.bytes,
        )
        self._outcomes: Lru[bytes, Reply] = Lru(_MAX_OUTCOMES, _MAX_BYTES)
        # One check at a time: whoever asks for the same thing meanwhile finds its outcome.
        self._lock = threading.Lock()
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return self._worker.pid

    def close(self) -> None:
        """Ends the process, as does a checker that is forgotten."""
        self._worker.close()

    def check(self, structured: StructuredOutput) -> Constraint:
        """What enforces it. Raises BadRequest that names the field, and the keyword's place in a schema."""
        return self._check(Check(structured=structured), structured.kind)

    async def check_async(self, structured: StructuredOutput) -> Constraint:
        """What `check` gives, without holding up the event loop."""
        return await self._check_async(Check(structured=structured), structured.kind)

    def check_constraint(self, constraint: Constraint, param: str) -> None:
        """Raises BadRequest if the grammar, made from something of the user's that `param` names, cannot be compiled
        within the limits.
        """
        self._check(Check(constraint=constraint), param)

    async def check_constraint_async(self, constraint: Constraint, param: str) -> None:
        """What `check_constraint` does, without holding up the event loop."""
        await self._check_async(Check(constraint=constraint), param)

    def _check(self, asked: Check, param: str) -> Constraint:
        message, key = _encoded(asked)
        outcome = self._outcomes.get(key)
        if outcome is None:
            with self._lock:
                outcome = self._outcomes.get(key) or self._ask(message, key, param)
        return _constraint(outcome, param)

    async def _check_async(self, asked: Check, param: str) -> Constraint:
        message, key = _encoded(asked)
        outcome = self._outcomes.get(key)
        if outcome is None:
            async with self._turn:
                outcome = self._outcomes.get(key) or await self._ask_async(message, key, param)
        return _constraint(outcome, param)

    def _ask(self, message: bytes, key: bytes, param: str) -> Reply:
        require_llguidance()
        try:
            reply = self._worker.ask(message, _LONGEST_REPLY)
        except WorkerError as error:
            return self._kept(key, self._refusal(error, param), len(message))
        return self._kept(key, msgspec.msgpack.decode(reply, type=Reply), len(message))

    async def _ask_async(self, message: bytes, key: bytes, param: str) -> Reply:
        require_llguidance()
        try:
            reply = await self._worker.ask_async(message, _LONGEST_REPLY)
        except WorkerError as error:
            return self._kept(key, self._refusal(error, param), len(message))
        return self._kept(key, msgspec.msgpack.decode(reply, type=Reply), len(message))

    def _kept(self, key: bytes, outcome: Reply, weight: int) -> Reply:
        self._outcomes.put(key, outcome, 2 * weight)
        return outcome

    def _refusal(self, error: WorkerError, param: str) -> Refused:
        """Raises Unavailable if it is not the grammar's fault."""
        if not isinstance(error, WorkerEnded) or error.status in _FROM_OUTSIDE:
            raise Unavailable(
                f"The structured output could not be checked: {error or 'the model was stopped'}. Try again."
            ) from error
        if error.ran_out_of_time:
            spent = f"more than {self.limits.seconds:g} s"
        elif error.status == -signal.SIGABRT:
            spent = f"more than {self.limits.bytes >> 20} MiB of memory"
        else:
            spent = f"more than the compiler has (it ended with status {error.status})"
        return Refused(f"{param} takes {spent} to compile. Make it smaller or simpler.", param)


def _encoded(asked: Check) -> tuple[bytes, bytes]:
    """The message, and what its outcome is kept under."""
    message = msgspec.msgpack.encode(asked)
    return message, hashlib.sha256(message).digest()


def _constraint(outcome: Reply, param: str) -> Constraint:
    if isinstance(outcome, Accepted):
        return outcome.constraint
    raise (Unsupported if outcome.unsupported else BadRequest)(outcome.message, param=outcome.param or param)
