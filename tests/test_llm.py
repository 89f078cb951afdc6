import gc
from pathlib import Path

import pytest
from model_directory import make_embedding_model, write_model

import ostro
from ostro import LLM, EngineConfig, SamplingParams
from ostro.errors import BadRequest, ContextLengthExceeded, ModelNotFound, Unsupported
from ostro.sources.store import ModelStore

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(directory: Path) -> LLM:
    return LLM(directory, EngineConfig(page_size=4, max_batch_tokens=32))


def assert_idle(llm: LLM) -> None:
    llm.core.check_integrity()
    assert llm.core.scheduler.kv.usage.in_use == 0
    assert not llm.core.has_work


def test_public_names_are_those_that_the_docs_name() -> None:
    docs = Path(__file__).parents[1] / "docs" / "python-api.md"
    named = {line.removeprefix("### ").strip("`") for line in docs.read_text().splitlines() if line.startswith("### ")}
    assert set(ostro.__all__) == named
    assert all(getattr(ostro, name) for name in ostro.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        ostro.Nothing  # noqa: B018


def test_files_in_the_cache_are_held_as_long_as_the_model_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process could evict them while they were loaded."""
    monkeypatch.setenv("OSTRO_CACHE", str(tmp_path))
    store = ModelStore()
    llm = LLM(write_model(store.objects / "tiny-0123456789ab@1"))
    assert [entry.in_use for entry in store.entries()] == [True]
    del llm
    gc.collect()
    assert [entry.in_use for entry in store.entries()] == [False]


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["the fox", "dog", "the lazy dog does not mind the quick brown fox"]
    together = llm.generate(prompts, [GREEDY.with_changes(max_tokens=n) for n in (9, 2, 5)])
    assert [completion.num_generated for completion in together] == [9, 2, 5]
    for prompt, completion in zip(prompts, together, strict=True):
        [choice] = completion.choices
        [alone] = llm.generate(prompt, GREEDY.with_changes(max_tokens=len(choice.token_ids)))
        assert choice.token_ids == alone.choices[0].token_ids
        assert choice.text == llm.tokenizer.decode(choice.token_ids) == alone.text
        assert choice.finish_reason == "length"
    assert_idle(llm)


def test_token_ids_are_prompts_too(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the fox")
    assert llm.generate(ids, GREEDY)[0].text == llm.generate("the fox", GREEDY)[0].text
    assert llm.generate([ids, ids[:2]], GREEDY)[0].text == llm.generate("the fox", GREEDY)[0].text


def test_streamed_text_is_the_whole_text_in_pieces(llm: LLM) -> None:
    whole = llm.generate("the quick", GREEDY)[0]
    deltas = list(llm.stream("the quick", GREEDY))
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_leaving_a_stream_frees_its_pages(llm: LLM) -> None:
    stream = llm.stream("the quick", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.core.scheduler.kv.usage.in_use > 0
    stream.close()  # type: ignore[attr-defined]
    assert_idle(llm)


def test_a_stop_string_ends_generation_and_is_not_returned(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    text = llm.generate("the fox", params)[0].text
    stop = text[10:13]
    at = text.index(stop)
    generated = llm.core.scheduler.counters.generated_tokens
    [completion] = llm.generate("the fox", params.with_changes(stop=(stop,)))
    [choice] = completion.choices
    assert (choice.text, choice.finish_reason, choice.stopped_by) == (text[:at], "stop", stop)
    # Generation really ended there, and usage counts what was generated.
    assert llm.core.scheduler.counters.generated_tokens - generated == len(choice.token_ids) < 60
    assert_idle(llm)
    kept = llm.generate("the fox", params.with_changes(stop=(stop,), include_stop_in_output=True))[0]
    assert kept.text == text[:at] + stop


def test_a_stop_string_waits_for_min_tokens(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    text = llm.generate("the fox", params)[0].text
    [late] = llm.generate("the fox", params.with_changes(stop=(text[0],), min_tokens=20))
    assert late.num_generated >= 20


def test_a_stop_token_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate("the fox", GREEDY)[0].choices[0]
    stop = whole.token_ids[4]
    first = whole.token_ids.index(stop)
    [choice] = llm.generate("the fox", GREEDY.with_changes(stop_token_ids=(stop,)))[0].choices
    assert choice.token_ids == whole.token_ids[: first + 1]
    assert choice.text == llm.tokenizer.decode(whole.token_ids[:first])
    assert choice.finish_reason == "stop"


def test_choices_share_the_prompt_and_differ_in_their_draws(llm: LLM) -> None:
    params = SamplingParams(n=4, max_tokens=12, seed=7, ignore_eos=True)
    before = llm.core.scheduler.counters.computed_tokens
    [completion] = llm.generate("the quick brown fox", params)
    computed = llm.core.scheduler.counters.computed_tokens - before
    assert computed == len(completion.prompt_ids) + 4 * 11
    assert len({choice.text for choice in completion.choices}) > 1
    [again] = llm.generate("the quick brown fox", params)
    assert [c.token_ids for c in again.choices] == [c.token_ids for c in completion.choices]


def test_unseeded_requests_differ(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    texts = {completion.text for completion in llm.generate(["the fox"] * 4, params)}
    assert len(texts) > 1


def test_the_usual_tokens_of_a_bad_word_are_never_generated(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    word = llm.generate("the fox", params)[0].text[5:7]
    banned = llm.tokenizer.bad_word_ids((word,))
    ids = llm.generate("the fox", params.with_changes(bad_words=(word,)))[0].choices[0].token_ids
    for sequence in banned:
        assert not any(tuple(ids[at : at + len(sequence)]) == sequence for at in range(len(ids)))


def test_logprobs_and_prompt_logprobs_have_one_entry_a_token(llm: LLM) -> None:
    [completion] = llm.generate("the quick brown", GREEDY.with_changes(logprobs=2, prompt_logprobs=1))
    [choice] = completion.choices
    assert choice.logprobs is not None
    assert [entry.token_id for entry in choice.logprobs] == choice.token_ids
    assert all(entry.rank == 1 and entry.top[0] == (entry.token_id, entry.logprob) for entry in choice.logprobs)
    assert completion.prompt_logprobs is not None
    [first, *rest] = completion.prompt_logprobs
    assert first is None
    assert [entry.token_id for entry in rest if entry] == list(completion.prompt_ids[1:])


def test_prompt_logprobs_do_not_change_on_a_prefix_hit(llm: LLM) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    cold = llm.generate("the quick brown fox jumps", params)[0]
    warm = llm.generate("the quick brown fox jumps", params)[0]
    assert warm.prompt_logprobs == cold.prompt_logprobs
    assert len(cold.prompt_logprobs or ()) == len(cold.prompt_ids)


def test_score_sums_the_prompt_logprobs_of_the_continuation(llm: LLM) -> None:
    [score] = llm.score(["the quick"], [" brown fox"])
    [completion] = llm.generate("the quick brown fox", SamplingParams(max_tokens=0, prompt_logprobs=0))
    context = len(llm.tokenizer.encode("the quick"))
    logprobs = [entry.logprob for entry in (completion.prompt_logprobs or ())[context:] if entry]
    assert score.logprob == pytest.approx(sum(logprobs), abs=1e-5)
    assert score.num_tokens == len(logprobs)


def test_a_greedy_continuation_scores_as_greedy(llm: LLM) -> None:
    prompt = llm.tokenizer.encode("the quick")
    [choice] = llm.generate(prompt, GREEDY)[0].choices
    other = [*choice.token_ids[:-1], (choice.token_ids[-1] + 1) % 250]
    greedy, not_greedy = llm.score([prompt, prompt], [choice.token_ids, other])
    assert greedy.is_greedy
    assert not not_greedy.is_greedy
    assert not_greedy.logprob < greedy.logprob


def test_scores_over_a_shared_prompt_compute_it_once(llm: LLM) -> None:
    prompt = [5] * 100
    before = llm.core.scheduler.counters.computed_tokens
    llm.score([prompt] * 20, [[n, n + 1] for n in range(20)])
    assert llm.core.scheduler.counters.computed_tokens - before <= 102 + 19 * (2 + 4)


def test_chat_ends_at_the_end_of_turn(llm: LLM) -> None:
    completion = llm.chat([{"role": "user", "content": "the fox"}], SamplingParams(max_tokens=200, seed=1))
    expected = "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n"
    assert llm.tokenizer.decode(completion.prompt_ids, skip_special=False) == expected
    assert completion.choices[0].finish_reason in ("stop", "length")


def test_calls_in_a_conversation_are_not_lost_by_a_template_that_knows_none(llm: LLM) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"what": "fox"}'}}
    conversation: list[dict[str, object]] = [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "quick"},
    ]
    assert llm.tokenizer.decode(llm.chat_prompt(conversation), skip_special=False) == (
        "<|im_start|>user\nthe fox<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "find", "arguments": {"what": "fox"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nquick\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_embeddings_are_pooled_and_normalised(tmp_path: Path) -> None:
    llm = LLM(make_embedding_model(write_model(tmp_path)))
    [one, same, other] = llm.embed(["the fox", "the fox", "the dog"])
    assert sum(value * value for value in one) == pytest.approx(1.0)
    assert one == pytest.approx(same, abs=1e-5)
    assert one != pytest.approx(other, abs=1e-2)


def test_embedding_with_a_generation_model_is_refused_with_the_reason(llm: LLM) -> None:
    with pytest.raises(Unsupported, match="not an embedding model"):
        llm.embed("the fox")


def test_a_prompt_over_the_context_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceeded, match="maximum context length is 256 tokens"):
        llm.generate([[1, 2], [1] * 300], GREEDY)
    assert_idle(llm)
    assert llm.core.scheduler.counters.steps == 0


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        (["a"], [], "as many continuations"),
        ([""], [" b"], "prompt is empty"),
        (["a"], [""], "at least one token"),
        (["a"], [[1, 2]], "both be texts or both be token ids"),
    ],
)
def test_bad_pairs_to_score_are_refused(llm: LLM, prompts: list[str], continuations: list[str], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        llm.score(prompts, continuations)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nothing-here"):
        LLM(tmp_path / "nothing-here")


def test_tight_memory_gives_the_same_tokens(llm: LLM, directory: Path) -> None:
    prompts = ["the quick brown fox", "jumps over", "the lazy dog and the dog", "system user"]
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    page = 2 * 2 * 2 * 8 * 4 * 4
    tight = LLM(directory, EngineConfig(page_size=4, max_batch_tokens=8, kv_memory=16 * page))
    assert tight.core.scheduler.kv.num_pages == 16
    expected = [completion.text for completion in llm.generate(prompts, params)]
    assert [completion.text for completion in tight.generate(prompts, params)] == expected
    assert tight.core.scheduler.counters.preemptions > 0
    assert_idle(tight)


def test_two_streams_may_be_read_in_turns(llm: LLM) -> None:
    alone = [llm.generate(prompt, GREEDY)[0].text for prompt in ("the fox", "the lazy dog")]
    first, second = llm.stream("the fox", GREEDY), llm.stream("the lazy dog", GREEDY)
    texts = ["", ""]
    for one, other in zip(first, second, strict=True):
        texts[0] += one.text
        texts[1] += other.text
    assert texts == alone
    assert_idle(llm)


def test_a_model_without_a_head_embeds_and_refuses_to_write(tmp_path: Path) -> None:
    directory = make_embedding_model(write_model(tmp_path))
    config = directory / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "LlamaModel"))
    llm = LLM(directory)
    with pytest.raises(Unsupported, match="without a language-model head"):
        llm.generate("the fox", GREEDY)
    assert len(llm.embed("the fox")[0]) > 0


def test_a_runner_that_fails_leaves_an_engine_that_works(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = llm.generate("the fox", GREEDY)[0].text

    def broken(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(llm.core.runner.model, "forward", broken)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="the device is gone"):
            llm.generate(["the fox", "the dog"], SamplingParams(n=2, max_tokens=4))
    assert_idle(llm)
    assert llm.generate("the fox", GREEDY)[0].text == before
