"""Language models that judge pairs of texts, like Qwen3-Reranker: scores against transformers, and files that lie."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from judge_directory import INSTRUCTION, write_judge
from live_server import live_server
from model_directory import CHATML

from ostro import LLM
from ostro.config import EngineConfig
from ostro.errors import BadCheckpoint, ContextLengthExceeded, ModelError, Unsupported, UnsupportedModel
from ostro.sampling_params import SamplingParams
from ostro.text.pairs import PairPrompt
from ostro.text.tokenizer import Tokenizer
from ostro.weights.relevance import read_judge

CPU = EngineConfig(device="cpu")

# What it makes of them.
TEMPLATE_TEXT = (
    '<|im_start|>system\nsay "yes" or "no"<|im_end|>\n<|im_start|>user\n<Instruct>: {}\n<Query>: {}\n<Document>: {}'
    "<|im_end|>\n<|im_start|>assistant\n"
)
QUERY = "what does the quick brown fox do"
DOCUMENTS = ["the fox jumps over the lazy dog", " the dog  does not mind\n", "a <Query>: in a text", ""]
PAIRS = [(QUERY, document) for document in DOCUMENTS]


def expected_logits(directory: Path, *, generation_prompt: bool = True) -> torch.Tensor:
    """The pairs' logits by transformers: yes minus no."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for query, document in PAIRS:
        texts = {"system": INSTRUCTION, "query": query, "document": document}
        text = tokenizer.apply_chat_template(
            [{"role": role, "content": content} for role, content in texts.items()],
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
        ids = tokenizer(text, add_special_tokens=False).input_ids
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1]
        found.append(logits[40] - logits[31])
    return torch.stack(found)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_judge(tmp_path_factory.mktemp("judge") / "model")


@pytest.mark.full
@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_scores_are_those_of_transformers(judge: Path, backend: str) -> None:
    llm = LLM(judge, EngineConfig(device="cpu", backend=backend))  # type: ignore[arg-type]
    logits = expected_logits(judge)
    assert logits.std() > 0.1, "the test would not see a difference"
    assert llm.relevance(PAIRS) == pytest.approx(logits.sigmoid().tolist(), abs=1e-4)
    assert [each.index for each in llm.rerank(QUERY, DOCUMENTS)] == logits.argsort(descending=True).tolist()


def test_what_the_files_say_about_template_and_activation_holds(tmp_path: Path) -> None:
    directory = write_judge(
        tmp_path / "model", settings={"processing_kwargs": {}}, activation="torch.nn.modules.linear.Identity"
    )
    expected = expected_logits(directory, generation_prompt=False)
    assert LLM(directory, CPU).relevance(PAIRS) == pytest.approx(expected.tolist(), abs=1e-3)


def test_markers_in_texts_stay_text(judge: Path) -> None:
    tokenizer = Tokenizer.load(judge)
    prompt = PairPrompt("<|im_start|>user\n", "|>", "<|im_end|>")
    counted = [tokenizer.special_id(text) for text in ("<|im_start|>", "<|im_end|>")]
    # The second would end in a marker with the text that follows it.
    for pair in (("a <|im_end|> b", "<|im_start|>"), ("<|im_end", "c")):
        ids = tokenizer.encode_prompted(prompt, *pair)
        assert [ids.count(id) for id in counted if id is not None] == [1, 1]
        assert tokenizer.decode(ids, skip_special=False) == f"{prompt.before}{pair[0]}|>{pair[1]}{prompt.after}"


def test_pairs_are_not_cut_and_nothing_is_embedded(judge: Path) -> None:
    llm = LLM(judge, CPU)
    with pytest.raises(ContextLengthExceeded):
        llm.relevance([(QUERY, "the dog " * 300)])
    with pytest.raises(Unsupported, match="leave truncate_prompt_tokens out"):
        llm.relevance(PAIRS, truncate_prompt_tokens=-1)
    with pytest.raises(Unsupported, match="not an embedding model"):
        llm.embed("the fox")


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"scoring": {"false_token_id": None}}, UnsupportedModel, "names no 'false_token_id'"),
        ({"scoring": {"true_token_id": 10**6}}, BadCheckpoint, "'true_token_id' must be a token from 0 to"),
        ({"scoring": {"true_token_id": -1}}, BadCheckpoint, "'true_token_id' must be a token"),
        ({"scoring": {"false_token_id": True}}, BadCheckpoint, "'false_token_id' must be a token"),
        ({"scoring": {"module_input_name": "scores"}}, UnsupportedModel, "'module_input_name' is 'scores'"),
        ({"settings": {"transformer_task": "fill-mask"}}, UnsupportedModel, "'transformer_task' is 'fill-mask'"),
        ({"settings": {"modality_config": {"text": {}}}}, UnsupportedModel, "has no 'message'"),
        ({"settings": {"modality_config": {"message": {"format": "structured"}}}}, UnsupportedModel, "format 'flat'"),
        ({"settings": {"processing_kwargs": 3}}, BadCheckpoint, "'processing_kwargs' must be an object"),
        ({"modules": ("Transformer", "LogitScore", "Dense")}, UnsupportedModel, "lists Transformer, LogitScore, Dense"),
        ({"activation": "os.system"}, UnsupportedModel, r"os\.system"),
    ],
    ids=str,
)
def test_files_that_lie_are_refused_by_name(
    changes: Mapping[str, Any], error: type[ModelError], why: str, tmp_path: Path
) -> None:
    directory = write_judge(tmp_path / "model", **changes)
    with pytest.raises(error, match=why):
        read_judge(directory, {"vocab_size": 290})


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("template", "why"),
    [
        (CHATML.replace("message.content", "'nothing'"), "does not show a query and a document once each"),
        (CHATML.replace("message.content", "message.content * 2"), "does not show a query and a document once each"),
        (CHATML.replace("message.content", "message.content | trim"), "changes a query or a document"),
        (CHATML.replace("in messages", "in messages | reverse"), "shows the document first"),
        ("{{ raise_exception('only users') }}" + CHATML, "refused the messages: only users"),
        ("{{ nothing.at.all }}" + CHATML, "The chat template failed"),
        (None, "It ranks by a chat template, and has none"),
    ],
    ids=["neither", "twice", "trimmed", "reversed", "refuses", "fails", "none"],
)
def test_ranking_with_a_template_that_cannot_rank_is_refused(template: str | None, why: str, tmp_path: Path) -> None:
    """The model was not loaded, although it can generate; and the error was about messages, which no one had sent."""
    llm = LLM(write_judge(tmp_path / "model", template=template), CPU)
    assert llm.generate("the fox", SamplingParams(max_tokens=1))
    with pytest.raises(Unsupported, match=rf"model cannot rank texts\. .*{why}.*\. Set chat_template") as caught:
        llm.relevance(PAIRS)
    assert caught.value.param == "model"


@pytest.mark.full
def test_over_http_scores_are_the_same_and_a_pair_counts_once(judge: Path) -> None:
    llm = LLM(judge, CPU)
    scores = llm.relevance(PAIRS)
    with live_server(judge.parent, str(judge), faults="") as server:
        body = {"query": QUERY, "documents": DOCUMENTS}
        answer = httpx.post(f"{server.url}/v1/rerank", json=body).json()
        found = {each["index"]: each["relevance_score"] for each in answer["results"]}
        assert [found[index] for index in range(len(PAIRS))] == pytest.approx(scores, abs=1e-4)
        prompts = [TEMPLATE_TEXT.format(INSTRUCTION, *pair) for pair in PAIRS]
        tokens = sum(len(llm.tokenizer.encode(prompt, add_special=False)) for prompt in prompts)
        assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        refused = httpx.post(f"{server.url}/v1/rerank", json={**body, "truncate_prompt_tokens": 9})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
