"""How relevant documents are to queries: by a cross-encoder that reads both, or by the cosine of their embeddings.

Pairs become requests, and the requests' completions scores. Knows the frontend; knows no engine.
"""

import math
import operator
from collections.abc import Sequence

from ostro.engine.request import Request
from ostro.errors import Unsupported
from ostro.frontend import Frontend
from ostro.outputs import Completion, embedding
from ostro.weights.pooling import unit

Pair = tuple[str, str]
"""A query and a document."""


def relevance_requests(
    frontend: Frontend,
    pairs: Sequence[Pair],
    *,
    max_len: int,
    adapter: str | None = None,
    truncate_prompt_tokens: int | None = None,
) -> list[Request]:
    """A request per pair, or for an embedding model one per text. Raises Unsupported for a model of neither kind."""
    if frontend.ranking is not None:
        return [
            frontend.pair_request(*pair, max_len=max_len, truncate_prompt_tokens=truncate_prompt_tokens)
            for pair in pairs
        ]
    if frontend.pooling is None:
        raise Unsupported(
            f"{frontend.name} can neither rank nor embed texts. Load a cross-encoder or an embedding model.",
            param="model",
        )
    prompts = frontend.pooling.prompts
    queries, documents = _sides(pairs)
    return [
        frontend.embedding_request(
            text,
            max_len=max_len,
            adapter=adapter,
            prompt_name=name,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        for texts, name in ((queries, prompts.query), (documents, prompts.document))
        for text in texts
    ]


def relevance_scores(frontend: Frontend, pairs: Sequence[Pair], completions: Sequence[Completion]) -> list[float]:
    """A score per pair, from the completions of `relevance_requests`. Raises SequenceFailed if the engine gave up."""
    vectors = [embedding(completion) for completion in completions]
    if frontend.ranking is not None:
        return [_sigmoid(logit) if frontend.ranking.sigmoid else logit for [logit] in vectors]
    queries, documents = _sides(pairs)
    units = [unit(vector) for vector in vectors]
    of_query = dict(zip(queries, units, strict=False))
    of_document = dict(zip(documents, units[len(queries) :], strict=True))
    return [sum(map(operator.mul, of_query[query], of_document[document])) for query, document in pairs]


def _sides(pairs: Sequence[Pair]) -> tuple[list[str], list[str]]:
    """The queries and the documents, each once: one query often goes with many documents."""
    return list(dict.fromkeys(query for query, _ in pairs)), list(dict.fromkeys(document for _, document in pairs))


def _sigmoid(logit: float) -> float:
    # The other form would overflow for a large negative number.
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
