"""Clients that mean harm, beside those of a soak: each attack takes seconds, and leaves nothing behind.

None of them can tell whether it did harm. That shows in what the others get, and in what the processes hold in silence.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from random import Random

from http_grammar import conversation

KEY = "attacker"
HOLD_SECONDS = 5.0
AT_ONCE = 6
_READ = 1 << 16


@dataclass(frozen=True)
class Target:
    host: str
    port: int
    models: tuple[str, ...]
    steady: str
    """The model whose engine stays, so that whatever it keeps for good adds up."""


class Wire:
    """A connection that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def post(self, path: str, body: Mapping[str, object], *, key: str = KEY, share: float = 1.0) -> None:
        """Sends that share of the body."""
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        await self.send(head.encode() + data[: int(share * len(data))])

    async def answer(self) -> None:
        """Reads for as long as an attack lasts, or until the server has had enough."""
        with suppress(TimeoutError):
            async with asyncio.timeout(HOLD_SECONDS):
                while await self._reader.read(_READ):
                    pass


Attack = Callable[[Wire, Target, Random], Awaitable[None]]


async def mutated_messages(wire: Wire, target: Target, dice: Random) -> None:
    for piece in conversation(dice).pieces:
        await wire.send(piece)
    await wire.answer()


async def stalled_body(wire: Wire, target: Target, dice: Random) -> None:
    await wire.post("/v1/completions", {"model": "red", "prompt": "u" * (1 << 20)}, share=dice.random())
    await asyncio.sleep(HOLD_SECONDS)


async def endless_trailers(wire: Wire, target: Target, dice: Random) -> None:
    await wire.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n")
    for number in range(2000):
        await wire.send(f"x-{number}: {'v' * 1000}\r\n".encode())
    await wire.answer()


async def unread_stream(wire: Wire, target: Target, dice: Random) -> None:
    model = dice.choice(target.models)
    await wire.post("/v1/completions", {"model": model, "prompt": "the", "max_tokens": 200, "n": 4, "stream": True})
    await asyncio.sleep(HOLD_SECONDS)


async def guessed_key(wire: Wire, target: Target, dice: Random) -> None:
    for _ in range(20):
        await wire.post("/v1/chat/completions", {"messages": []}, key=f"guess-{dice.random()}")
    await wire.answer()


async def hard_schema(wire: Wire, target: Target, dice: Random) -> None:
    model = dice.choice(target.models)
    # An engine caches 64 grammars: those of the one that stays are few, or its cache would take an hour to fill.
    values = Random(dice.randrange(2) if model == target.steady else dice.random())
    schema: dict[str, object] = {"enum": [f"{values.random()} {place}" for place in range(2000)]}
    for _ in range(values.choice((1, 8, 200))):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "hard", "schema": schema}}
    body = {"model": model, "prompt": "the", "max_tokens": 8, "response_format": form}
    await wire.post("/v1/completions", body)
    await wire.answer()


async def background_responses(wire: Wire, target: Target, dice: Random) -> None:
    text = "word " * dice.choice((10, 1000, 50_000))
    body = {"model": dice.choice(target.models), "input": text, "background": True, "max_output_tokens": 50}
    for _ in range(4):
        await wire.post("/v1/responses", body)
    await wire.answer()


async def wrong_shapes(wire: Wire, target: Target, dice: Random) -> None:
    """Numbers, names and lengths that nobody means."""
    odd: tuple[object, ...] = (
        -1,
        0,
        1e308,
        -1e308,
        2**63,
        "\x00",
        "../../etc/passwd",
        [],
        {},
        [[]] * 1000,
        None,
        True,
        "x" * 100_000,
    )
    names = ("prompt", "model", "max_tokens", "temperature", "stop", "seed", "logit_bias", "n", "user", "messages")
    body = {"model": dice.choice(target.models), "prompt": "the", "max_tokens": 4}
    for _ in range(10):
        await wire.post("/v1/completions", {**body, dice.choice(names): dice.choice(odd)})
    await wire.answer()


ATTACKS: tuple[Attack, ...] = (
    mutated_messages,
    stalled_body,
    endless_trailers,
    unread_stream,
    guessed_key,
    hard_schema,
    background_responses,
    wrong_shapes,
)


@asynccontextmanager
async def connected(target: Target) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


async def attack(target: Target, dice: Random, counts: Counter[str]) -> None:
    """One attack after the other, until cancelled."""
    while True:
        chosen = dice.choice(ATTACKS)
        # The server may end a conversation like this one at any time.
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(4 * HOLD_SECONDS), connected(target) as wire:
                await chosen(wire, target, dice)
        counts[f"attack: {chosen.__name__}"] += 1


@asynccontextmanager
async def under_attack(target: Target, dice: Random, counts: Counter[str]) -> AsyncIterator[None]:
    attackers = [asyncio.create_task(attack(target, Random(dice.random()), counts)) for _ in range(AT_ONCE)]
    try:
        yield
    finally:
        for attacker in attackers:
            attacker.cancel()
        await asyncio.gather(*attackers, return_exceptions=True)
