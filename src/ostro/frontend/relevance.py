"""How relevant documents are to queries: by a cross-encoder or a language model that reads both, or by the cosine of
their embeddings.

Pairs become requests, and the requests' completions scores. Knows the frontend; knows no engine.
"""

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

from ostro.engine.request import Request
from ostro.errors import Unsupported
from ostro.frontend.outputs import Completion, embedding, score
from ostro.frontend.requests import Frontend
from ostro.text.pairs import LatestText
from ostro.weights.pooling import unit

Pair = tuple[str, str]
"""A query and a document."""


class RelevanceInput(NamedTuple):
    """What one request reads: a pair, or a text to embed."""

    text: str
    second: str | None = None
    prompt_name: str | None = None
    is_document: bool = False
    """Whether the text is the second of a pair."""
    answer: int | None = None
    """For a language model that judges: the token whose log-probability after both texts is asked for."""

    @property
    def texts(self) -> tuple[str | None, str | None]:
        """The query and the document, each None if the request does not read it."""
        return (None, self.text) if self.is_document else (self.text, self.second)

    @property
    def num_characters(self) -> int:
        return len(self.text) + len(self.second or "")


def relevance_inputs(frontend: Frontend, pairs: Sequence[Pair]) -> list[RelevanceInput]:
    """One per pair; for an embedding model one per text, for a judge one per pair and answer. Raises Unsupported for
    other models.
    """
    if (judge := frontend.judge) is not None:
        # The second request of a pair finds the prompt in the prefix cache.
        return [RelevanceInput(*pair, answer=answer) for pair in pairs for answer in (judge.yes, judge.no)]
    if frontend.ranking is not None:
        return [RelevanceInput(query, document) for query, document in pairs]
    if frontend.pooling is None:
        raise Unsupported(
            f"{frontend.name} can neither rank nor embed texts. Load a cross-encoder, an embedding model, or a "
            "reranker with the modules.json of sentence-transformers.",
            param="model",
        )
    prompts = frontend.pooling.prompts
    queries, documents = _sides(pairs)
    found = [RelevanceInput(query, prompt_name=prompts.query) for query in queries]
    return found + [RelevanceInput(document, prompt_name=prompts.document, is_document=True) for document in documents]


def relevance_request(
    frontend: Frontend,
    reading: RelevanceInput,
    *,
    max_len: int,
    latest: LatestText,
    adapter: str | None = None,
    truncate_prompt_tokens: int | None = None,
) -> Request:
    """`latest` is shared by all requests made from these pairs."""
    if reading.second is not None and reading.answer is not None:
        return frontend.judging_request(
            reading.text,
            reading.second,
            reading.answer,
            max_len=max_len,
            adapter=adapter,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
    if reading.second is not None:
        return frontend.pair_request(
            reading.text,
            reading.second,
            max_len=max_len,
            truncate_prompt_tokens=truncate_prompt_tokens,
            latest=latest,
        )
    return frontend.embedding_request(
        reading.text,
        max_len=max_len,
        adapter=adapter,
        prompt_name=reading.prompt_name,
        truncate_prompt_tokens=truncate_prompt_tokens,
    )


def relevance_scores(frontend: Frontend, pairs: Sequence[Pair], completions: Sequence[Completion]) -> list[float]:
    """A score per pair, from the completions of its `relevance_inputs`. Raises SequenceFailed if the engine gave up."""
    if (judge := frontend.judge) is not None:
        logprobs = [score(completion).logprob for completion in completions]
        logits = [yes - no for yes, no in zip(logprobs[::2], logprobs[1::2], strict=True)]
        return [_sigmoid(logit) if judge.sigmoid else logit for logit in logits]
    vectors = [embedding(completion) for completion in completions]
    if frontend.ranking is not None:
        return [_sigmoid(logit) if frontend.ranking.sigmoid else logit for [logit] in vectors]
    queries, documents = _sides(pairs)
    units = [unit(vector) for vector in vectors]
    of_query = dict(zip(queries, units, strict=False))
    of_document = dict(zip(documents, units[len(queries) :], strict=True))
    return [sum(map(operator.mul, of_query[query], of_document[document])) for query, document in pairs]


def tokens_read(frontend: Frontend, completions: Sequence[Completion]) -> int:
    """Tokens in the pairs and the prompts around them. A judge's two requests for a pair count once."""
    if frontend.judge is None:
        return sum(len(completion.prompt_ids) for completion in completions)
    return sum(len(completion.prompt_ids) - 1 for completion in completions[::2])


def _sides(pairs: Sequence[Pair]) -> tuple[list[str], list[str]]:
    """The queries and the documents, each once: one query often goes with many documents."""
    return list(dict.fromkeys(query for query, _ in pairs)), list(dict.fromkeys(document for _, document in pairs))


def _sigmoid(logit: float) -> float:
    # The other form would overflow for a large negative number.
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
