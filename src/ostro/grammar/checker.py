"""Checks structured outputs in separate processes, because compiling one can take any time and memory. Caches outcomes.

StructuredOutput ──> GrammarChecker ──sockets──> check_process: llguidance, with limits ──> Constraint

Nearly all compile within milliseconds. A check that takes longer is aborted and restarted in a process for slow ones
alone, so however many slow grammars one client sends, others wait only briefly.

A grammar that passed is compiled again by the engine, for its own vocabulary, which takes about as long.
"""

import asyncio
import hashlib
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from ostro.engine.constraint import Constraint
from ostro.errors import BadRequest, OstroError, Unavailable, Unsupported
from ostro.grammar.check_messages import Accepted, Check, Checked, Refused, Reply, Setup
from ostro.grammar.lru import Lru
from ostro.grammar.translate import rule_of, schema_of
from ostro.grammar.vocabulary import TokenizerLike, require_llguidance
from ostro.processes.worker import Worker, WorkerEnded, WorkerError
from ostro.structured import StructuredOutput

# A reply contains a grammar: a schema has at most 256 KiB, which nesting JSON within JSON may double.
_LONGEST_REPLY = 1 << 24
# Some agents send a hundred tools each, and one grammar per tool choice.
_MAX_OUTCOMES = 8192
_MAX_BYTES = 1 << 25
# Bytes per outcome, on top of its texts.
_OVERHEAD = 1024
_NUM_QUICK = 2
_ANY_OBJECT = StructuredOutput(json_object=True)
# These signals come from outside; if anything else ends a process, the grammar caused it.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimits:
    """Limits on compiling one grammar."""

    seconds: float = 0.75
    """CPU time. 99 % of real schemas take less than 40 ms."""
    quick_seconds: float = 0.05
    """CPU time after which a check is aborted and restarted in the process for slow ones."""
    together_seconds: float = 1.5
    """CPU time for all grammars of one `check_all_async` call."""
    bytes: int = 512 << 20
    """Address space, including interpreter and library."""


class GrammarChecker:
    """Checks for one model. Use either the blocking methods, from any thread, or the async ones, within one event loop.

    Processes are started when they are first needed, or by `start_async`.
    """

    def __init__(self, tokenizer: TokenizerLike, *, limits: CheckLimits | None = None) -> None:
        self.limits = limits or CheckLimits()
        special_ids = {tokenizer.token_bytes(token).decode(errors="replace"): token for token in tokenizer.special_ids}
        setup = msgspec.msgpack.encode(Setup(tokenizer.vocab_size, special_ids, sorted(tokenizer.eos_ids)))
        quick = min(self.limits.quick_seconds, self.limits.seconds)
        self._quick = _Workers(setup, _NUM_QUICK, seconds=quick, memory=self.limits.bytes)
        self._slow = _Workers(setup, 1, seconds=self.limits.seconds, memory=self.limits.bytes)
        self._outcomes: Lru[bytes, Reply] = Lru(_MAX_OUTCOMES, _MAX_BYTES)
        self._lock = threading.Lock()
        # Concurrent checks of the same grammar wait for one outcome.
        self._asked: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return self._quick.pids + self._slow.pids

    def close(self) -> None:
        """Ends the processes. Garbage collection of the checker ends them too."""
        self._quick.close()
        self._slow.close()

    async def start_async(self) -> None:
        """Starts a process before the first check and has it load the compiler, which takes far longer than a check."""
        with suppress(OstroError):
            await self.check_async(_ANY_OBJECT)

    def check(self, structured: StructuredOutput) -> Constraint:
        """The constraint that enforces it. Raises BadRequest that names the field and a keyword's place in a schema."""
        return self._check(Check(structured=structured), structured.kind)

    async def check_async(self, structured: StructuredOutput) -> Constraint:
        """`check` without blocking the event loop."""
        return await self._check_async(Check(structured=structured), structured.kind)

    async def check_rule_async(self, structured: StructuredOutput) -> str | None:
        """The body of a rule that enforces it within a larger grammar; None if it needs a grammar of its own.
        Raises BadRequest as `check` does.
        """
        return rule_of(structured, await self.check_async(structured))

    async def check_all_async(self, structures: Sequence[StructuredOutput]) -> list[Constraint | BadRequest]:
        """What `check_async` returns or raises for each. Once their common time budget is spent, the remaining ones are
        refused unchecked, except those whose outcomes are cached.
        """
        budget, outcomes = _Budget(self.limits), list[Constraint | BadRequest]()
        # One at a time, so that other requests' checks run in between.
        for structured in structures:
            try:
                outcomes.append(await self._check_async(Check(structured=structured), structured.kind, budget))
            except BadRequest as refusal:
                outcomes.append(refusal)
        return outcomes

    async def check_schemas_async(self, schemas: Sequence[StructuredOutput]) -> list[dict[str, Any] | BadRequest]:
        """`check_all_async` for JSON schemas, returning schemas: normalised, with the library's options and, if not
        strict, without keywords that cannot be enforced.
        """
        outcomes = await self.check_all_async(schemas)
        return [outcome if isinstance(outcome, BadRequest) else schema_of(outcome) for outcome in outcomes]

    def check_constraint(self, constraint: Constraint, param: str) -> None:
        """Raises BadRequest if the grammar cannot be compiled within the limits. `param` names the user's input that it
        was built from.
        """
        self._check(Check(constraint=constraint), param)

    async def check_constraint_async(self, constraint: Constraint, param: str) -> None:
        """`check_constraint` without blocking the event loop."""
        await self._check_async(Check(constraint=constraint), param)

    def _check(self, asked: Check, param: str) -> Constraint:
        message, key = _encoded(asked, param)
        outcome = self._outcomes.get(key)
        if outcome is None:
            with self._lock:
                outcome = self._outcomes.get(key) or self._ask(message, key, param)
        return _constraint(outcome, param)

    async def _check_async(self, asked: Check, param: str, budget: "_Budget | None" = None) -> Constraint:
        message, key = _encoded(asked, param)
        outcome = self._outcomes.get(key)
        if outcome is None:
            if budget is not None:
                budget.check(param)
            async with self._asked.setdefault(key, asyncio.Lock()):
                outcome = self._outcomes.get(key) or await self._ask_async(message, key, param, budget)
        return _constraint(outcome, param)

    def _ask(self, message: bytes, key: bytes, param: str) -> Reply:
        require_llguidance()
        try:
            try:
                reply = self._quick.ask(message)
            except WorkerEnded as error:
                if not error.ran_out_of_time:
                    raise
                reply = self._slow.ask(message)
        except WorkerError as error:
            return self._kept(key, self._refusal(error, param), len(message))
        return self._kept(key, _checked(reply).reply, len(message))

    async def _ask_async(self, message: bytes, key: bytes, param: str, budget: "_Budget | None") -> Reply:
        require_llguidance()
        try:
            try:
                reply = await self._quick.ask_async(message)
            except WorkerEnded as error:
                if not error.ran_out_of_time:
                    raise
                reply = await self._slow.ask_async(message)
        except WorkerError as error:
            checked = Checked(self._refusal(error, param), self.limits.seconds)
        else:
            checked = _checked(reply)
        if budget is not None:
            budget.left -= checked.seconds
        return self._kept(key, checked.reply, len(message))

    def _kept(self, key: bytes, outcome: Reply, weight: int) -> Reply:
        self._outcomes.put(key, outcome, _OVERHEAD + 2 * weight)
        return outcome

    def _refusal(self, error: WorkerError, param: str) -> Refused:
        """The refusal of a grammar that exceeded the limits. Raises Unavailable if it is not the grammar's fault."""
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


class _Budget:
    """A CPU time budget shared by several checks."""

    def __init__(self, limits: CheckLimits) -> None:
        self._seconds = limits.together_seconds
        self.left = limits.together_seconds

    def check(self, param: str) -> None:
        """Raises BadRequest if the budget is spent."""
        if self.left <= 0:
            raise BadRequest(
                f"{param} was not checked: the request's schemas take more than {self._seconds:g} s to compile "
                "together. Send fewer, or simpler ones.",
                param=param,
            )


class _Workers:
    """Processes with the same limits and one queue of messages."""

    def __init__(self, setup: bytes, count: int, *, seconds: float, memory: int) -> None:
        module = "ostro.grammar.check_process"
        self._all = [Worker(module, setup, seconds=seconds, memory=memory) for _ in range(count)]
        self._free = list(self._all)
        self._places = asyncio.Semaphore(count)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._all if worker.pid is not None]

    def close(self) -> None:
        for worker in self._all:
            worker.close()

    def ask(self, message: bytes) -> bytes:
        """The reply. Raises WorkerError if there is none."""
        return self._all[0].ask(message, _LONGEST_REPLY)

    async def ask_async(self, message: bytes) -> bytes:
        async with self._places:
            worker = self._free.pop()
            try:
                reply = await worker.ask_async(message, _LONGEST_REPLY)
            except asyncio.CancelledError:
                # It is still busy with the cancelled check, so use the others first.
                self._free.insert(0, worker)
                raise
            except WorkerEnded as error:
                if not error.ran_out_of_time:
                    # Its successor starts now rather than with the next message.
                    worker.start()
                self._free.append(worker)
                raise
            except BaseException:
                self._free.append(worker)
                raise
            self._free.append(worker)
            return reply


def _encoded(asked: Check, param: str) -> tuple[bytes, bytes]:
    """The message, and the key of its outcome, which includes `param` because refusals name it."""
    message = msgspec.msgpack.encode(asked)
    return message, hashlib.sha256(message + param.encode()).digest()


def _checked(reply: bytes) -> Checked:
    return msgspec.msgpack.decode(reply, type=Checked)


def _constraint(outcome: Reply, param: str) -> Constraint:
    if isinstance(outcome, Accepted):
        return outcome.constraint
    raise (Unsupported if outcome.unsupported else BadRequest)(outcome.message, param=outcome.param or param)
