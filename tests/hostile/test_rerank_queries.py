"""A query is encoded once for all of its documents, whoever else is served meanwhile."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from encoder_directory import WIDE, reference, write_encoder
from live_service import live_service, set_faults

from ostro.config import EngineConfig
from ostro.text.pairs import PairEncoder

NUM_DOCUMENTS = 8
# Each pair is a turn of its own for the threads that tokenise.
LONG = 30_000


@pytest.mark.anyio
async def test_long_queries_of_two_requests_are_encoded_once_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests in turns, each with a query as long as a text may be and 2,048 documents, encoded both queries for
    every document: half an hour of a core for 2 MB of requests.
    """
    encoded = Counter[str]()
    encode = PairEncoder._ids

    def counted(self: PairEncoder, text: str) -> list[int]:
        encoded[text] += 1
        return encode(self, text)

    monkeypatch.setattr(PairEncoder, "_ids", counted)
    set_faults(monkeypatch)
    model = write_encoder(tmp_path / "rank", reference(WIDE["bert"], labels=1))
    queries = ["fox " * LONG, "dog " * LONG]
    async with live_service(EngineConfig(model=str(model), device="cpu")) as service:

        async def prepare(query: str) -> None:
            pairs = [(query, f"document {number}") for number in range(NUM_DOCUMENTS)]
            await service.prepare_relevance(pairs, fields=("query", "documents"), truncate_prompt_tokens=-1)

        await asyncio.gather(*map(prepare, queries))
    assert [encoded[query] for query in queries] == [1, 1]
