"""Renders chat templates in a separate process, because a template is untrusted code. Knows no Jinja.

messages ──> Renderer ──socket──> render_process: Jinja, with limits on CPU time and memory ──> text

Each model has its own renderer, so a template that hangs or grows delays only that model's users. A process that hits
its limit is replaced when the next conversation comes.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Unpack

import msgspec

from ostro.errors import BadRequest, OstroError, Unavailable, Unsupported
from ostro.processes.environment import template_environment
from ostro.processes.spawn import spawn
from ostro.text.chat import ChatTemplate, Message, RenderOptions
from ostro.text.control_text import MAX_NESTING, ControlTexts
from ostro.text.render_messages import LENGTH, Conversation, Refused, Rendered, Reply, Setup

MAX_SOURCE_CHARACTERS = 1 << 20
_CHUNK = 1 << 18
# Of a reply, beside its text: more than any refusal has.
_MARGIN = 1 << 16
_UTF8_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """What one rendering may use."""

    seconds: float = 2.0
    """Of CPU time, so that a busy machine ends no innocent template."""
    bytes: int = 512 << 20
    """Of address space, interpreter and conversation included."""
    characters: int = 64 << 20
    """Of the text, unless the caller takes only a shorter one."""


class Renderer:
    """Use either its blocking methods, from any thread, or its asynchronous one, within one event loop."""

    def __init__(
        self,
        template: ChatTemplate,
        controls: ControlTexts | None = None,
        guarded: ControlTexts | None = None,
        *,
        limits: RenderLimits | None = None,
    ) -> None:
        """`controls` and `guarded` are as in `marked_chat.render_guarded`. Raises UnicodeEncodeError for a template
        that cannot be sent to a process: its source or a variable holds half a surrogate pair.
        """
        self.limits = limits or RenderLimits()
        self._num_source_characters = len(template.source)
        self._setup = msgspec.msgpack.encode(
            Setup(
                template.source,
                dict(template.variables),
                sorted(() if controls is None else controls.texts),
                sorted(() if guarded is None else guarded.texts),
                self.limits.seconds,
                self.limits.bytes,
            )
        )
        self._process: _Process | None = None
        self._closed = False
        # So that no process is started while another thread closes the renderer.
        self._starting = threading.Lock()
        self._lock = threading.Lock()
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.popen.pid

    def start(self) -> None:
        """Starts the process ahead of the first conversation, which tries again if that fails; returns at once."""
        with suppress(Unavailable):
            self._running()

    def close(self) -> None:
        """Ends the process, as does a renderer that is forgotten. Every conversation that is under way or comes later
        ends with Unavailable.
        """
        with self._starting:
            self._closed = True
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        if not (self._lock.locked() or self._turn.locked()):
            # Otherwise the conversation under way does so, once it has stopped to read.
            process.end()

    def render(
        self,
        messages: Sequence[Message],
        *,
        mark: str | None = None,
        max_characters: int | None = None,
        **options: Unpack[RenderOptions],
    ) -> str:
        """The conversation's text, as `render_guarded` makes it if there is a mark. Raises BadRequest for one that
        the template refuses or fails on, or that exceeds the limits; `max_characters` of the text replace theirs.
        Raises Unavailable if the process cannot be started or is killed.
        """
        most = self.limits.characters if max_characters is None else max_characters
        message = _encoded(messages, options, mark, most)
        with self._lock, self._conversation() as process:
            process.socket.setblocking(True)
            process.socket.sendall(process.with_setup(message))
            reply = process.read(_longest_reply(most))
        return _text(reply, most)

    async def render_async(
        self,
        messages: Sequence[Message],
        *,
        mark: str | None = None,
        max_characters: int | None = None,
        **options: Unpack[RenderOptions],
    ) -> str:
        """What `render` gives, without holding up the event loop. If it is cancelled, its reply is read all the same
        and dropped: the process, which others share, lives on.
        """
        most = self.limits.characters if max_characters is None else max_characters
        message = _encoded(messages, options, mark, most)
        await self._turn.acquire()
        exchange = asyncio.create_task(self._exchange(message, _longest_reply(most)))
        exchange.add_done_callback(self._end_turn)
        # Unlike an await, this leaves the exchange alone when it is cancelled.
        await asyncio.wait((exchange,))
        return _text(exchange.result(), most)

    async def _exchange(self, message: bytes, longest: int) -> bytes:
        with self._conversation() as process:
            process.socket.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(process.socket, process.with_setup(message))
            return await process.read_async(longest)

    def _end_turn(self, exchange: asyncio.Task[bytes]) -> None:
        self._turn.release()
        if not exchange.cancelled():
            # Looked at, lest asyncio log it as lost where nobody waits for it any more.
            exchange.exception()

    @contextmanager
    def _conversation(self) -> "Iterator[_Process]":
        """The process, for one message and its reply. If they are not exchanged in full, nobody uses it again."""
        process = self._running()
        try:
            yield process
        except BaseException as error:
            self._process = None
            status = process.end()
            if isinstance(error, (OSError, EOFError)):
                raise self._failure(status) from error
            raise

    def _running(self) -> "_Process":
        with self._starting:
            if self._closed:
                raise _stopped()
            if self._process is not None and self._process.popen.poll() is not None:
                # It was killed between two conversations, which is no fault of the next.
                self._process.end()
                self._process = None
            if self._process is None:
                self._process = self._new_process()
            return self._process

    def _new_process(self) -> "_Process":
        if self._num_source_characters > MAX_SOURCE_CHARACTERS:
            raise BadRequest(
                f"The chat template is longer than {MAX_SOURCE_CHARACTERS} characters. Set chat_template to another.",
                param="messages",
            )
        return _Process(self._setup)

    def _failure(self, status: int) -> OstroError:
        """Why the process ended in the middle of a conversation."""
        if self._closed:
            return _stopped()
        if status == -signal.SIGPROF:
            return BadRequest(
                f"The chat template failed: it ran longer than {self.limits.seconds:g} seconds.", param="messages"
            )
        # Killed by the system or an operator: whatever a template does by itself is a reply.
        return Unavailable(f"The process that renders the chat template ended with status {status}. Try again.")


class _Process:
    def __init__(self, setup: bytes) -> None:
        self._setup = setup
        environment = {**template_environment(), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            self.popen, self.socket = spawn("ostro.text.render_process", environment=environment, options=["-P"])
        except OSError as error:
            raise Unavailable(
                f"The chat template cannot be rendered: no process could be started ({error.strerror}). "
                "Try again later."
            ) from error
        self._finalizer = weakref.finalize(self, _end, self.popen, self.socket)

    def kill(self) -> None:
        """Ends it and wakes whoever waits for its reply. Leaves the socket open: an event loop that waits for one that
        is closed never hears of it.
        """
        _kill(self.popen, self.socket)

    def end(self) -> int:
        """Its exit status: the signal's number, negative, if it died before it was told to."""
        self._finalizer()
        return self.popen.returncode

    def with_setup(self, message: bytes) -> bytes:
        """What to send for this message: before the first one goes the setup."""
        setup, self._setup = self._setup, b""
        return (_frame(setup) if setup else b"") + _frame(message)

    def read(self, longest: int) -> bytes:
        """Its next message; raises EOFError if it ends before that is complete, or announces a longer one."""
        parts, missing = [], LENGTH.size
        header = self.socket.recv(missing, socket.MSG_WAITALL)
        missing = _length(header, longest)
        while missing:
            parts.append(self.socket.recv(min(missing, _CHUNK)))
            missing -= _received(parts[-1])
        return b"".join(parts)

    async def read_async(self, longest: int) -> bytes:
        loop = asyncio.get_running_loop()
        header = b""
        while len(header) < LENGTH.size:
            part = await loop.sock_recv(self.socket, LENGTH.size - len(header))
            _received(part)
            header += part
        parts, missing = [], _length(header, longest)
        while missing:
            parts.append(await loop.sock_recv(self.socket, min(missing, _CHUNK)))
            missing -= _received(parts[-1])
        return b"".join(parts)


def _length(header: bytes, longest: int) -> int:
    if len(header) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(header)
    if length > longest:
        # Whatever this is, our process did not send it.
        raise EOFError
    return int(length)


def _received(part: bytes) -> int:
    if not part:
        raise EOFError
    return len(part)


def _end(popen: subprocess.Popen[bytes], connection: socket.socket) -> None:
    _kill(popen, connection)
    connection.close()


def _kill(popen: subprocess.Popen[bytes], connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    popen.kill()
    popen.wait()


def _stopped() -> Unavailable:
    return Unavailable("The model was stopped before its chat template was rendered. Try again in a moment.")


def _frame(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def _longest_reply(max_characters: int) -> int:
    return _UTF8_BYTES * max_characters + _MARGIN


def _text(reply: bytes, most: int) -> str:
    outcome = msgspec.msgpack.decode(reply, type=Reply)
    if isinstance(outcome, Rendered):
        return outcome.text
    if isinstance(outcome, Refused):
        raise (Unsupported if outcome.unsupported else BadRequest)(outcome.message, param=outcome.param)
    raise BadRequest(
        f"The chat template failed: it made a text of {outcome.num_characters} characters, and at most {most} are "
        "tokenised. Send fewer or shorter messages.",
        param="messages",
    )


def _encoded(messages: Sequence[Message], options: RenderOptions, mark: str | None, most: int) -> bytes:
    tools = options.get("tools")
    conversation = Conversation(
        [dict(message) for message in messages],
        None if tools is None else [dict(tool) for tool in tools],
        dict(options.get("template_kwargs") or {}),
        options.get("add_generation_prompt", True),
        options.get("continue_final_message", False),
        mark,
        most,
    )
    try:
        return msgspec.msgpack.encode(conversation)
    except RecursionError as error:
        raise BadRequest(
            f"messages and tools must not be nested more than {MAX_NESTING} deep.", param="messages"
        ) from error
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRequest(f"messages and tools must hold JSON values only ({error}).", param="messages") from error
