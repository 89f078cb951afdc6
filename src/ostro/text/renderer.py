"""Renders chat templates in a separate process, because a template is untrusted code. Knows no Jinja.

messages ──> Renderer ──socket──> render_process: Jinja, with limits on CPU time and memory ──> text

Each model has its own renderer, so a template that hangs or grows delays only that model's users. A process that hits
its limit is replaced for the next conversation.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Unpack

import msgspec

from ostro.errors import BadRequest, Unavailable, Unsupported
from ostro.processes.worker import Worker, WorkerClosed, WorkerEnded, WorkerNotStarted
from ostro.text.chat import ChatTemplate, Message, RenderOptions
from ostro.text.control_text import MAX_NESTING, ControlTexts
from ostro.text.render_messages import Conversation, Refused, Rendered, Reply, Setup

MAX_SOURCE_CHARACTERS = 1 << 20
# Bytes of a reply besides its text: more than any refusal takes.
_MARGIN = 1 << 16
_UTF8_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """What one rendering may use."""

    seconds: float = 2.0
    """CPU time, not wall time: a busy machine must not fail a harmless template."""
    bytes: int = 512 << 20
    """Address space, including the interpreter and the conversation."""
    characters: int = 64 << 20
    """Length of the text, unless the caller sets `max_characters`."""


class Renderer:
    """Use either its blocking methods, from any thread, or its async one, within one event loop."""

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
        self._is_too_long = len(template.whole_source) > MAX_SOURCE_CHARACTERS
        setup = Setup(
            template.source,
            template.tool_source,
            dict(template.variables),
            sorted(() if controls is None else controls.texts),
            sorted(() if guarded is None else guarded.texts),
            self.limits.bytes,
        )
        self._worker = Worker(
            "ostro.text.render_process",
            msgspec.msgpack.encode(setup),
            seconds=self.limits.seconds,
            memory=self.limits.bytes,
        )

    @property
    def pid(self) -> int | None:
        """The process's id, while there is one."""
        return self._worker.pid

    def start(self) -> None:
        """Starts the process ahead of the first conversation, which retries if that fails; returns at once."""
        self._worker.start()

    def close(self) -> None:
        """Ends the process; garbage collection of the renderer does so too. Conversations in progress and later ones
        fail with Unavailable.
        """
        self._worker.close()

    def render(
        self,
        messages: Sequence[Message],
        *,
        mark: str | None = None,
        max_characters: int | None = None,
        **options: Unpack[RenderOptions],
    ) -> str:
        """The conversation's text; with a mark, as `render_guarded` makes it. Raises BadRequest if the template refuses
        it or fails on it, or if it exceeds the limits, of which `max_characters` overrides the text's length. Raises
        Unavailable if the process cannot be started or is killed.
        """
        most = self.limits.characters if max_characters is None else max_characters
        message = _encoded(messages, options, mark, most)
        with self._failures():
            reply = self._worker.ask(message, _longest_reply(most))
        return _text(reply, most)

    async def render_async(
        self,
        messages: Sequence[Message],
        *,
        mark: str | None = None,
        max_characters: int | None = None,
        **options: Unpack[RenderOptions],
    ) -> str:
        """Like `render`, without blocking the event loop. If cancelled, its reply is still read and dropped: others
        share the process, which lives on.
        """
        most = self.limits.characters if max_characters is None else max_characters
        message = _encoded(messages, options, mark, most)
        with self._failures():
            reply = await self._worker.ask_async(message, _longest_reply(most))
        return _text(reply, most)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Translates the errors of an exchange with the process."""
        if self._is_too_long:
            raise BadRequest(
                f"The chat template is longer than {MAX_SOURCE_CHARACTERS} characters. Set chat_template to another.",
                param="messages",
            )
        try:
            yield
        except WorkerEnded as error:
            if error.ran_out_of_time:
                raise BadRequest(
                    f"The chat template failed: it ran longer than {self.limits.seconds:g} seconds.", param="messages"
                ) from error
            # Killed by the system or an operator: whatever the template itself does leads to a reply.
            raise Unavailable(f"The process that renders the chat template {error}. Try again.") from error
        except WorkerNotStarted as error:
            raise Unavailable(f"The chat template cannot be rendered: {error}. Try again later.") from error
        except WorkerClosed as error:
            raise Unavailable(
                "The model was stopped before its chat template was rendered. Try again in a moment."
            ) from error


def _longest_reply(max_characters: int) -> int:
    return _UTF8_BYTES * max_characters + _MARGIN


def _text(reply: bytes, most: int) -> str:
    outcome = msgspec.msgpack.decode(reply, type=Reply)
    if isinstance(outcome, Rendered):
        return outcome.text
    if isinstance(outcome, Refused):
        raise (Unsupported if outcome.unsupported else BadRequest)(outcome.message, param=outcome.param)
    raise BadRequest(
        f"The chat template failed: it made a text of {outcome.num_characters} characters, but at most {most} are "
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
