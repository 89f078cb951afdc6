"""Both clients by the same words, so that a test holds for the two of them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from ostro import AsyncClient, Client


@dataclass(frozen=True)
class Read:
    """A stream that was read to its end."""

    chunks: list[Any]
    answer: Any


@dataclass(frozen=True)
class Asker:
    kind: str
    """`sync` or `async`."""
    url: str
    settings: dict[str, Any]

    def call(self, name: str, *args: object, **options: object) -> Any:
        if self.kind == "sync":
            with Client(self.url, **self.settings) as client:
                return getattr(client, name)(*args, **options)

        async def run() -> Any:
            async with AsyncClient(self.url, **self.settings) as client:
                return await getattr(client, name)(*args, **options)

        return asyncio.run(run())

    def read(self, name: str, *args: object, text: bool = False, **options: object) -> Read:
        """A stream's chunks, or its pieces of text."""
        if self.kind == "sync":
            with Client(self.url, **self.settings) as client:
                stream = getattr(client, name)(*args, **options)
                return Read(list(stream.text if text else stream), stream.answer)

        async def run() -> Read:
            async with AsyncClient(self.url, **self.settings) as client:
                stream = getattr(client, name)(*args, **options)
                chunks: AsyncIterator[Any] = stream.text if text else aiter(stream)
                return Read([chunk async for chunk in chunks], stream.answer)

        return asyncio.run(run())

    def first(self, name: str, *args: object, **options: object) -> Any:
        """The first chunk of a stream that is left then, without being closed by name."""
        if self.kind == "sync":
            with Client(self.url, **self.settings) as client:
                chunks: Iterator[Any] = getattr(client, name)(*args, **options)
                for chunk in chunks:
                    return chunk

        async def run() -> Any:
            async with AsyncClient(self.url, **self.settings) as client:
                async for chunk in getattr(client, name)(*args, **options):
                    return chunk
            return None

        return asyncio.run(run())
