"""Adapters in the engine: a request is given what its own adapter gives, whatever runs beside it, however it is cut."""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_context import dense_logits
from examples import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from model_directory import make_embedding_model, write_model
from peft_directory import random_adapter, write_adapter
from scripted_grammar import ScriptedGrammars, scripted
from tiny_models import LLAMA, VOCAB, random_model

from ostro import LLM, EngineConfig, SamplingParams
from ostro.backends.cuda.runner import GpuRunner
from ostro.backends.torch.runner import TorchRunner
from ostro.config import Quantization
from ostro.engine.admission import AdmissionRules
from ostro.engine.core import EngineCore
from ostro.engine.request import Request
from ostro.engine.scheduler import Limits, Progress
from ostro.engine_process.handle import EngineHandle
from ostro.errors import BadRequest, Unsupported
from ostro.torch_models.base import Model
from ostro.torch_models.build import build_model
from ostro.torch_models.loading import load_weights, places_of
from ostro.torch_models.lora import Adapters
from ostro.weights import open_checkpoint
from ostro.weights.adapter import LowRank, read_adapter

QWEN3: Mapping[str, object] = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
FAMILIES = pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
GREEDY = SamplingParams(max_tokens=10, temperature=0)
Terms = Mapping[str, Mapping[str, LowRank]]
Tokens = dict[tuple[int, int], list[int]]


def read_all(directory: Path, model: Model) -> Terms:
    """Three adapters: two of one shape, one that changes less by a larger rank."""
    return {
        "red": read_adapter(random_adapter(directory / "red", model, seed=1)),
        "green": read_adapter(random_adapter(directory / "green", model, seed=2)),
        "blue": read_adapter(random_adapter(directory / "blue", model, seed=3, rank=7, targets=("v_proj", "up_proj"))),
    }


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Terms:
    return read_all(tmp_path_factory.mktemp("llama"), random_model())


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Terms:
    return read_all(tmp_path_factory.mktemp("qwen3"), random_model(QWEN3))


@pytest.fixture
def terms(config: Mapping[str, object], llama: Terms, qwen3: Terms) -> Terms:
    return llama if config is LLAMA else qwen3


def engine(
    model: Model, terms: Terms, *, pages: int = 256, budget: int = 256, prefix_caching: bool = True
) -> EngineCore:
    adapters = Adapters(model, terms)
    adapters.attach(model)
    runner = TorchRunner(model, page_size=4, num_pages=pages, adapters=adapters)
    limits = Limits(max_batch_tokens=budget)
    return EngineCore(runner, limits, prefix_caching=prefix_caching, adapters=tuple(terms))


def merged(config: Mapping[str, object], terms: Mapping[str, LowRank] | None) -> Model:
    """A model of its own, with the adapter written into its weights."""
    model = random_model(config)
    places = places_of(model)
    for name, term in (terms or {}).items():
        places[f"{name}.weight"].memory.add_(torch.from_numpy(term.b @ term.a), alpha=term.scale)
    return model


def ask(
    id: int, prompt: Iterable[int], adapter: str | None = None, params: SamplingParams = GREEDY, salt: str = ""
) -> Request:
    return Request(id=id, prompt_ids=tuple(prompt), params=params, seed=id, adapter=adapter, cache_salt=salt)


def drain(core: EngineCore) -> Iterable[Progress]:
    while core.has_work:
        yield from core.step()
        core.check_integrity()
    usage = core.scheduler.kv.usage
    assert usage.in_use == 0
    assert usage.free + usage.cached == usage.total


def run(core: EngineCore, *requests: Request) -> Tokens:
    for request in requests:
        constraint = request.constraint
        core.add(request, None if constraint is None else ScriptedGrammars(VOCAB).prepare(constraint))
    tokens: Tokens = {}
    for step in drain(core):
        assert step.error is None
        tokens.setdefault((step.request_id, step.choice), []).extend(step.token_ids)
    return tokens


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def mixed(salt: str = "") -> list[Request]:
    """Equal and different prompts, of all adapters and of none, in no order."""
    [shared, *others] = prompts(13, 3, 8, 21, 1, 34)
    names = [None, "green", "red", "blue", "green", None, "red", "red"]
    asked = [ask(id, shared, name, salt=salt) for id, name in enumerate(names[:4])]
    return asked + [ask(id, prompt, names[id % 8], salt=salt) for id, prompt in enumerate(others, 4)]


@pytest.mark.full
@FAMILIES
def test_a_mixed_batch_gives_what_each_merged_model_gives_alone(config: Mapping[str, object], terms: Terms) -> None:
    asked = mixed()
    together = run(engine(random_model(config), terms), *asked)
    for request in asked:
        own = merged(config, terms[request.adapter] if request.adapter else None)
        assert run(engine(own, {}), replace(request, adapter=None)) == {(request.id, 0): together[request.id, 0]}
    assert len({tuple(together[id, 0]) for id in range(4)}) == 4


@FAMILIES
def test_alone_equals_batched(config: Mapping[str, object], terms: Terms) -> None:
    model = random_model(config)
    together = run(engine(model, terms), *mixed())
    for request in mixed():
        assert run(engine(model, terms), request) == {(request.id, 0): together[request.id, 0]}


@pytest.mark.cases(2)
@FAMILIES
@pytest.mark.parametrize("budget", [1, 3, 8])
def test_whole_equals_chunked(config: Mapping[str, object], terms: Terms, budget: int) -> None:
    model = random_model(config)
    assert run(engine(model, terms, budget=budget), *mixed()) == run(engine(model, terms), *mixed())


@FAMILIES
def test_unpreempted_equals_preempted(config: Mapping[str, object], terms: Terms) -> None:
    model = random_model(config)
    tight = engine(model, terms, pages=16)
    assert run(tight, *mixed()) == run(engine(model, terms), *mixed())
    assert tight.scheduler.counters.preemptions > 0


@FAMILIES
def test_cold_equals_prefix_hit(config: Mapping[str, object], terms: Terms) -> None:
    model = random_model(config)
    core = engine(model, terms)
    run(core, *(replace(request, id=100 + request.id) for request in mixed()))
    before = core.scheduler.counters.cache_hits
    warm = run(core, *mixed())
    assert core.scheduler.counters.cache_hits - before >= 4 * 12
    assert warm == run(engine(model, terms, prefix_caching=False), *mixed())


def test_a_prefix_is_shared_within_an_adapter_and_never_between_two(llama: Terms) -> None:
    core = engine(random_model(), llama)
    [prompt] = prompts(17)
    names = (None, "red", "green", "blue")
    for id, name in enumerate(names):
        run(core, ask(id, prompt, name))
        assert core.scheduler.counters.cache_hits == 0
    for id, name in enumerate(names, 10):
        run(core, ask(id, prompt, name))
        assert core.scheduler.counters.cache_hits == 16 * (id - 9)


def test_prompts_that_arrive_together_are_shared_only_where_their_adapters_are(llama: Terms) -> None:
    core = engine(random_model(), llama)
    [prompt] = prompts(17)
    run(core, *(ask(id, prompt, ("red", "green", None)[id % 3]) for id in range(6)))
    assert core.scheduler.counters.cache_hits == 3 * 16


def test_salts_are_separate_within_an_adapter_and_from_no_salt(llama: Terms) -> None:
    core = engine(random_model(), llama)
    [prompt] = prompts(17)
    run(core, ask(0, prompt, "red"))
    for id, (adapter, salt) in enumerate([("red", "mine"), (None, "red"), (None, "red\0"), (None, "('red', '')")], 1):
        run(core, ask(id, prompt, adapter, salt=salt))
    assert core.scheduler.counters.cache_hits == 0
    run(core, ask(9, prompt, "red", salt="mine"))
    assert core.scheduler.counters.cache_hits == 16


@pytest.mark.parametrize("length", [8, 11])
def test_the_choices_of_a_request_are_those_of_the_merged_model(length: int, llama: Terms) -> None:
    [prompt] = prompts(length)
    params = SamplingParams(n=4, max_tokens=8, temperature=1.0, seed=3)
    core = engine(random_model(), llama)
    forked = run(core, ask(0, prompt, "green", params), ask(1, prompt, "blue", params))
    assert core.scheduler.counters.computed_tokens == 2 * (length + 4 * 7)
    for id, name in enumerate(("green", "blue")):
        alone = run(engine(merged(LLAMA, llama[name]), {}), ask(id, prompt, None, params))
        assert alone == {key: tokens for key, tokens in forked.items() if key[0] == id}


@pytest.mark.parametrize("budget", [5, 256])
def test_prompts_are_scored_by_their_adapters(budget: int, llama: Terms) -> None:
    [prompt] = prompts(23)
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    core = engine(random_model(), llama, budget=budget)
    names = (None, "red", "blue")
    for id, name in enumerate(names):
        core.add(replace(ask(id, prompt, name, params), prompt_logprobs_from=1))
    scored: dict[int, list[float]] = {}
    for step in drain(core):
        scored.setdefault(step.request_id, []).extend(each.logprob for each in step.prompt_logprobs)
    for id, name in enumerate(names):
        dense = dense_logits(merged(LLAMA, llama[name] if name else None), prompt).log_softmax(-1)
        expected = [dense[at - 1, prompt[at]].item() for at in range(1, len(prompt))]
        assert scored[id] == pytest.approx(expected, abs=1e-4)


def test_an_adapter_that_overflows_fails_alone(tmp_path: Path, llama: Terms) -> None:
    huge = {
        f"model.layers.0.mlp.down_proj.lora_{half}.weight": torch.full(shape, 1e30)
        for half, shape in (("A", (4, 48)), ("B", (32, 4)))
    }
    terms = {**llama, "huge": read_adapter(write_adapter(tmp_path / "huge", huge))}
    model = random_model()
    clean = run(engine(model, terms), *mixed())
    core = engine(model, terms)
    for request in [*mixed(), ask(50, [1, 2, 3], "huge")]:
        core.add(request)
    steps = list(drain(core))
    assert {step.request_id for step in steps if step.error} == {50}
    for id, choice in clean:
        tokens = [token for step in steps if (step.request_id, step.choice) == (id, choice) for token in step.token_ids]
        assert tokens == clean[id, choice]


@pytest.mark.full
@pytest.mark.examples
def test_random_schedules_give_every_request_what_it_gets_alone(llama: Terms) -> None:
    """Random arrivals, lengths, page pressure, chunks and forks, on a real model."""
    model = random_model()
    adapters = Adapters(model, llama)
    adapters.attach(model)
    stem = prompts(40)[0]
    known: dict[tuple[tuple[int, ...], str | None, int], list[list[int]]] = {}
    seen = {"preemptions": 0, "cache_hits": 0}

    def core(pages: int, budget: int) -> EngineCore:
        runner = TorchRunner(model, page_size=4, num_pages=pages, adapters=adapters)
        return EngineCore(runner, Limits(max_batch_tokens=budget), adapters=tuple(llama))

    request = st.tuples(
        st.integers(0, 12), st.integers(1, 24), st.sampled_from([None, *llama]), st.sampled_from([1, 1, 2])
    )

    @settings(max_examples=examples(12), suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(request, min_size=3, max_size=6), st.sampled_from([9, 14, 100]), st.sampled_from([3, 16, 256]))
    # Both begin in four pages, and then each needs a fifth.
    @example([(0, 14, name, 1) for name in (None, "red")], 9, 256)
    @example([(at, 20, "red", 2) for at in (0, 5)], 100, 16)
    def each_case_holds(cases: list[tuple[int, int, str | None, int]], pages: int, budget: int) -> None:
        asked = [
            replace(ask(id, stem[:length], name, SamplingParams(max_tokens=6, temperature=1.0, n=n)), seed=7)
            for id, (_, length, name, n) in enumerate(cases)
        ]
        busy, tokens, step = core(pages, budget), dict[tuple[int, int], list[int]](), 0
        while busy.has_work or step <= max(at for at, *_ in cases):
            for request, (at, *_) in zip(asked, cases, strict=True):
                if at == step:
                    busy.add(request)
            for gain in busy.step():
                tokens.setdefault((gain.request_id, gain.choice), []).extend(gain.token_ids)
            busy.check_integrity()
            step += 1
        for request in asked:
            key = (request.prompt_ids, request.adapter, request.params.n)
            if key not in known:
                known[key] = list(run(core(100, 256), request).values())
            assert [tokens[request.id, choice] for choice in range(request.params.n)] == known[key]
        seen["preemptions"] += busy.scheduler.counters.preemptions
        seen["cache_hits"] += busy.scheduler.counters.cache_hits

    each_case_holds()
    assert all(seen.values()), seen


def test_an_unknown_adapter_is_refused_at_admission(llama: Terms) -> None:
    core = engine(random_model(), llama)
    with pytest.raises(BadRequest, match=r"no adapter 'pink' here; loaded: red, green, blue") as refusal:
        core.add(ask(0, [1, 2], "pink"))
    assert refusal.value.param == "adapter"
    assert not core.has_work
    with pytest.raises(BadRequest, match="loaded: none"):
        AdmissionRules(max_len=8, vocab_size=10).check(ask(0, [1], "red"))


@pytest.mark.parametrize("name", ["", "a b", "../up", "a/b/c", "-x", "a\0", "a\n"])
def test_names_that_could_be_mistaken_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="An adapter's name is"):
        EngineConfig(adapters=((name, "./somewhere"),))


def test_two_adapters_of_one_name_are_refused() -> None:
    with pytest.raises(BadRequest, match="the same name"):
        EngineConfig(adapters=(("a", "./x"), ("a", "./y")))


# ---- on a GPU, or in Triton's interpreter


@pytest.mark.full
def test_the_gpus_runner_gives_the_same_tokens(device: torch.device, qwen3: Terms) -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    asked = [
        ask(id, prompt, name, params) for id, (prompt, name) in enumerate(zip(prompts(5, 2, 7, 4, 1), MIX, strict=True))
    ]
    # One row with an adapter and one without have a structure besides.
    asked[:2] = [replace(request, constraint=scripted(PAIRS)) for request in asked[:2]]
    expected = run(engine(random_model(QWEN3), qwen3), *asked)
    assert all(token in PAIRS[at % 2] for id in (0, 1) for at, token in enumerate(expected[id, 0]))
    model = random_model(QWEN3).to(device)
    adapters = Adapters(model, qwen3)
    adapters.attach(model)
    runner = GpuRunner(model, page_size=16, num_pages=64, max_batch_tokens=12, max_batch_seqs=8, adapters=adapters)
    assert run(EngineCore(runner, adapters=tuple(qwen3)), *asked) == expected


MIX = ("red", None, "green", "red", "blue")
PAIRS = {0: dict.fromkeys(range(10, 20), 1), 1: dict.fromkeys(range(20, 30), 0)}


def test_deterministic_products_on_a_gpu_are_refused_with_adapters(device: torch.device, qwen3: Terms) -> None:
    model = random_model(QWEN3).to(device)
    with pytest.raises(Unsupported, match="matmuls of adapters depend on the batch"):
        GpuRunner(
            model,
            page_size=16,
            num_pages=8,
            max_batch_tokens=8,
            max_batch_seqs=2,
            deterministic=True,
            adapters=Adapters(model, qwen3),
        )


# ---- from a program, and over the process boundary


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter_paths(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    checkpoint = open_checkpoint(directory)
    model = build_model(checkpoint.config, dtype=torch.float32)
    load_weights(model, checkpoint.tensors())
    root = tmp_path_factory.mktemp("adapters")
    return {name: random_adapter(root / name, model, seed=seed) for seed, name in enumerate(("org/red", "green"))}


TEXT = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.mark.full
def test_a_program_names_one_adapter_for_all_or_one_for_each(directory: Path, adapter_paths: dict[str, Path]) -> None:
    llm = LLM(directory, EngineConfig(page_size=4), adapters=adapter_paths)
    assert llm.config.adapter_names == ("org/red", "green")
    names = [None, "org/red", "green"]
    texts = [completion.text for completion in llm.generate(["the quick fox"] * 3, TEXT, adapter=names)]
    assert len(set(texts)) == 3
    assert (
        texts[0]
        == llm.generate("the quick fox", TEXT)[0].text
        == LLM(directory).generate("the quick fox", TEXT)[0].text
    )
    for name, text in zip(names, texts, strict=True):
        assert llm.generate("the quick fox", TEXT, adapter=name)[0].text == text
        assert "".join(delta.text for delta in llm.stream("the quick fox", TEXT, adapter=name)) == text
    messages = [{"role": "user", "content": "the fox"}]
    assert llm.chat(messages, TEXT).text != llm.chat(messages, TEXT, adapter="green").text
    scores = llm.score(["the quick"] * 3, [" fox"] * 3, adapter=names)
    assert len({score.logprob for score in scores}) == 3
    assert llm.score(["the quick"], [" fox"], adapter="green") == scores[2:]


def test_adapters_that_a_program_names_wrongly_are_refused(directory: Path, adapter_paths: dict[str, Path]) -> None:
    llm = LLM(directory, adapters=adapter_paths)
    with pytest.raises(BadRequest, match="no adapter 'red' here; loaded: org/red, green"):
        llm.generate("the", TEXT, adapter="red")
    with pytest.raises(BadRequest, match="2 prompts need as many adapters, or one name, got 1"):
        llm.generate(["the", "fox"], TEXT, adapter=["green"])
    assert not llm.core.has_work


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_adapters_stand_beside_weights_of_fewer_bits(
    quantize: Quantization, directory: Path, adapter_paths: dict[str, Path]
) -> None:
    config = EngineConfig(page_size=4, quantize=quantize)
    llm = LLM(directory, config, adapters=adapter_paths)
    plain, red, green = llm.generate(["the quick fox"] * 3, TEXT, adapter=[None, "org/red", "green"])
    assert plain.text == LLM(directory, config).generate("the quick fox", TEXT)[0].text
    assert len({plain.text, red.text, green.text}) == 3


def test_texts_are_embedded_by_their_adapters(tmp_path: Path, adapter_paths: dict[str, Path]) -> None:
    llm = LLM(make_embedding_model(write_model(tmp_path / "embedder")), adapters=adapter_paths)
    plain, red = llm.embed(["the fox", "the fox"], adapter=[None, "org/red"])
    assert llm.embed("the fox") == [plain]
    assert llm.embed("the fox", adapter="org/red") == [red]
    assert plain != red


@pytest.mark.full
def test_an_engine_process_serves_its_adapters_and_refuses_others(
    directory: Path, adapter_paths: dict[str, Path]
) -> None:
    llm = LLM(directory, adapters=adapter_paths)
    prompt = llm.tokenizer.encode("the quick fox")
    expected = [
        completion.choices[0].token_ids for completion in llm.generate([prompt] * 2, TEXT, adapter=[None, "green"])
    ]

    async def tokens(handle: EngineHandle, request: Request) -> list[int]:
        return [token async for steps in handle.submit(request) for step in steps for token in step.token_ids]

    async def scenario() -> None:
        adapters = tuple((name, str(path)) for name, path in adapter_paths.items())
        handle = EngineHandle(EngineConfig(model=str(directory), adapters=adapters, threads=1))
        handle.start()
        try:
            await handle.settled()
            assert handle.info is not None
            assert handle.info.adapters == ("org/red", "green")
            asked = [ask(id, prompt, name, TEXT) for id, name in enumerate([None, "green"], 1)]
            assert await asyncio.gather(*(tokens(handle, request) for request in asked)) == expected
            with pytest.raises(BadRequest, match="no adapter 'pink'"):
                await tokens(handle, ask(9, prompt, "pink", TEXT))
        finally:
            await handle.stop()

    asyncio.run(scenario())
