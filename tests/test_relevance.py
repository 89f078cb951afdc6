"""Embedding and ranking with `LLM`: prompts, truncation, dimensions; cross-encoders against transformers, cosines."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from encoder_directory import CASES, add_modules, reference, tokenizer, write_encoder
from model_directory import write_model

from ostro import LLM
from ostro.errors import BadRequest, ContextLengthExceeded, Unsupported, UnsupportedModel

QUERY = "what is the capital of france"
DOCUMENTS = ["paris is the capital of france", "the quick brown fox", "a lazy dog does not mind", "france"]
PAIRS = [(QUERY, document) for document in DOCUMENTS]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, transformers.PreTrainedModel]:
    model = reference(CASES["bert"], labels=1)
    return LLM(write_encoder(tmp_path_factory.mktemp("reranker"), model)), model


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    prompts = {"query": "query: ", "document": "", "odd": "the fox "}
    directory = write_encoder(
        tmp_path_factory.mktemp("embedder"), reference(CASES["bert"]), {"matryoshka_dimensions": [8, 16]}
    )
    return LLM(add_modules(directory, prompts=prompts, max_seq_length=12))


def expected_logits(model: transformers.PreTrainedModel, pairs: Sequence[tuple[str, str]], most: int) -> list[float]:
    core = tokenizer()
    core.enable_truncation(most)
    found = []
    for pair in pairs:
        encoding = core.encode(*pair)
        with torch.inference_mode():
            logits = model(torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids])).logits
        found.append(logits.item())
    return found


def test_a_cross_encoder_ranks_as_transformers_does(reranker: tuple[LLM, transformers.PreTrainedModel]) -> None:
    llm, model = reranker
    logits = torch.tensor(expected_logits(model, PAIRS, 40))
    assert logits.std() > 0.1, "the test would not see a difference"
    assert llm.relevance(PAIRS) == pytest.approx(logits.sigmoid().tolist(), abs=1e-5)
    found = llm.rerank(QUERY, DOCUMENTS)
    assert [each.index for each in found] == logits.argsort(descending=True).tolist()
    assert llm.rerank(QUERY, DOCUMENTS, top_n=2) == found[:2]


@pytest.mark.parametrize("most", [7, 10, 11, 16, 40])
def test_pairs_are_shortened_as_transformers_does(
    reranker: tuple[LLM, transformers.PreTrainedModel], most: int
) -> None:
    llm, model = reranker
    pairs = [("fox", "the lazy dog " * 9), (QUERY * 4, "paris"), ("the dog " * 20, "the fox " * 20), ("a fox", "paris")]
    expected = torch.tensor(expected_logits(model, pairs, most)).sigmoid().tolist()
    assert llm.relevance(pairs, truncate_prompt_tokens=-1 if most == 40 else most) == pytest.approx(expected, abs=1e-5)


def test_a_pair_that_is_too_long_is_refused_and_not_cut(reranker: tuple[LLM, transformers.PreTrainedModel]) -> None:
    with pytest.raises(ContextLengthExceeded):
        reranker[0].relevance([(QUERY, "the dog " * 30)])


def test_a_cross_encoder_neither_embeds_nor_writes(reranker: tuple[LLM, transformers.PreTrainedModel]) -> None:
    with pytest.raises(Unsupported, match="ranks texts"):
        reranker[0].embed("the fox")
    with pytest.raises(Unsupported, match="without a language-model head"):
        reranker[0].generate("the fox")


def test_the_activation_that_a_cross_encoder_names_is_applied(tmp_path: Path) -> None:
    model = reference(CASES["roberta"], labels=1)
    settings = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    llm = LLM(write_encoder(tmp_path / "identity", model, settings))
    core = tokenizer()
    with torch.inference_mode():
        expected = [model(torch.tensor([core.encode(*pair).ids])).logits.item() for pair in PAIRS]
    assert llm.relevance(PAIRS) == pytest.approx(expected, abs=1e-5)
    odd = {"sbert_ce_default_activation_function": "os.system"}
    with pytest.raises(UnsupportedModel, match=r"os\.system"):
        LLM(write_encoder(tmp_path / "odd", model, odd))


def test_a_classifier_of_several_labels_does_not_rank(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="3 classes"):
        LLM(write_encoder(tmp_path, reference(CASES["bert"], labels=3))).relevance(PAIRS)


def test_an_embedding_model_ranks_by_cosine_with_its_prompts(embedder: LLM) -> None:
    [query] = torch.tensor(embedder.embed(QUERY, prompt_name="query"))
    documents = torch.tensor(embedder.embed(DOCUMENTS, prompt_name="document"))
    expected = torch.cosine_similarity(query, documents)
    assert embedder.relevance(PAIRS) == pytest.approx(expected.tolist(), abs=1e-6)
    assert [each.index for each in embedder.rerank(QUERY, DOCUMENTS)] == expected.argsort(descending=True).tolist()


def test_prompts_stand_before_the_text(embedder: LLM) -> None:
    [named] = embedder.embed("paris", prompt_name="odd")
    assert named == pytest.approx(embedder.embed("the fox paris")[0], abs=1e-6)
    with pytest.raises(BadRequest, match="document, odd, query"):
        embedder.embed("paris", prompt_name="another")
    with pytest.raises(BadRequest, match="Token ids get no prompt"):
        embedder.embed([5, 6], prompt_name="odd")


def test_the_default_prompt_is_used_unless_another_is_named(tmp_path: Path) -> None:
    directory = write_encoder(tmp_path, reference(CASES["bert"]))
    llm = LLM(add_modules(directory, prompts={"odd": "the fox ", "none": ""}, default_prompt="odd"))
    [default, odd, none] = (llm.embed("paris", prompt_name=name)[0] for name in (None, "odd", "none"))
    assert default == odd != none


def test_long_texts_of_encoders_lose_their_ends(embedder: LLM) -> None:
    long, kept = "the fox " * 20, "the fox " * 5
    with pytest.raises(ContextLengthExceeded):
        embedder.embed(long)
    assert embedder.embed(long, truncate_prompt_tokens=-1) == embedder.embed(kept)
    assert embedder.embed(long, truncate_prompt_tokens=6) == embedder.embed("the fox the fox")
    ids = embedder.tokenizer.encode(kept)
    assert embedder.embed([ids], truncate_prompt_tokens=3) == embedder.embed([ids[:3]])


def test_dimensions_are_those_that_the_model_was_trained_for(embedder: LLM) -> None:
    [whole], [short] = embedder.embed("the fox"), embedder.embed("the fox", dimensions=8)
    first = torch.nn.functional.normalize(torch.tensor(whole[:8]), dim=0)
    assert short == pytest.approx(first.tolist(), abs=1e-6)
    assert embedder.embed("the fox", dimensions=32) == [whole]
    for dimensions in (9, 33):
        with pytest.raises(Unsupported, match="vectors of 8, 16 dimensions"):
            embedder.embed("the fox", dimensions=dimensions)


def test_any_number_of_dimensions_if_the_model_says_so_and_none_if_not(tmp_path: Path) -> None:
    model = reference(CASES["bert"])
    llm = LLM(write_encoder(tmp_path / "any", model, {"is_matryoshka": True}))
    assert llm.embed("paris", dimensions=5)[0] == llm.embed("paris")[0][:5]
    with pytest.raises(Unsupported, match="from 1 to 32"):
        llm.embed("paris", dimensions=33)
    plain = LLM(write_encoder(tmp_path / "plain", model))
    with pytest.raises(Unsupported, match="32 dimensions and no shorter ones"):
        plain.embed("paris", dimensions=5)


def test_a_model_that_generates_does_not_rank(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="neither rank nor embed"):
        LLM(write_model(tmp_path)).relevance(PAIRS)
