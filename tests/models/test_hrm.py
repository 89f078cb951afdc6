"""HRM against a reference written out plainly from its facts; rows of a batch against themselves alone, bit for bit."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import pytest
import torch
from hrm_brain import random_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ostro.errors import BadCheckpoint, BadRequest, UnsupportedModel
from ostro.torch_models import hrm_layers
from ostro.torch_models.hrm import Carry, HrmConfig, HrmModel, build_hrm, load_hrm
from ostro.torch_models.loading import fill, places_of
from ostro.torch_models.ragged import Ragged

CONFIG: Mapping[str, object] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 48,
    "H_cycles": 2,
    "L_cycles": 3,
    "H_layers": 1,
    "L_layers": 2,
    "pos_encodings": "rope",
    "seq_len": 64,
    "halt_max_steps": 4,
    "dialect": "upstream",
    "settings_files": "all_config.yaml",
}
MOE = {"num_experts": 5, "num_experts_per_tok": 2}
LEARNED = {"pos_encodings": "learned"}
AIOS = {"dialect": "aios"}


def weights_of(config: HrmConfig, *, gain: float = 0.5) -> dict[str, Tensor]:
    """With a gain below 1 a state's rounding errors die out instead of growing, so that 1e-5 can be asked for."""
    return random_weights(
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        h_layers=config.h_layers,
        l_layers=config.l_layers,
        inner=config.inner_size,
        experts=config.num_experts,
        position_rows=config.position_rows,
        puzzle_size=config.puzzle_size,
        scaled=config.embedding_scale != 1.0,
        gain=gain,
    )


def make(**changes: object) -> tuple[HrmModel, dict[str, Tensor]]:
    config = HrmConfig.read({**CONFIG, **changes})
    weights = weights_of(config)
    return load_hrm(config, weights.items(), torch.float32), weights


def some_prompts(*lengths: int, vocab: int = 50, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator).tolist() for length in lengths]


def flat(prompts: list[list[int]]) -> Tensor:
    return torch.tensor([token for prompt in prompts for token in prompt])


def layout_of(model: HrmModel, prompts: list[list[int]]) -> Ragged:
    return Ragged([model.config.puzzle_len + len(prompt) for prompt in prompts], torch.device("cpu"))


@dataclass(eq=False)
class Outcome:
    """One sequence's share of a run."""

    z_h: Tensor
    z_l: Tensor
    logits: Tensor
    halting: Tensor

    def __eq__(self, other: object) -> bool:
        """To the last bit."""
        assert isinstance(other, Outcome)
        return all(torch.equal(getattr(self, name), getattr(other, name)) for name in self.__annotations__)


def run(model: HrmModel, prompts: list[list[int]], steps: int = 1) -> list[Outcome]:
    layout = layout_of(model, prompts)
    carry = model.start(layout)
    embedded = model.embed(flat(prompts), layout)
    for _ in range(steps):
        carry = model.advance(carry, embedded, layout)
    return outcomes(model, carry, layout)


def outcomes(model: HrmModel, carry: Carry, layout: Ragged) -> list[Outcome]:
    prefix = model.config.puzzle_len
    logits = model.head(carry.z_h)
    return [
        Outcome(carry.z_h[rows], carry.z_l[rows], logits[rows][prefix:], halting)
        for sequence, halting in enumerate(model.halting(carry, layout))
        for rows in [list(layout.rows(sequence))]
    ]


# --- the reference: one sequence, float64, a formula a line ---------------------------------------------------------


@dataclass
class Reference:
    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        self.w = {name: tensor.double() for name, tensor in self.weights.items()}
        self.aios = self.config["dialect"] == "aios"
        self.hidden, self.heads = self.config["hidden_size"], self.config["num_heads"]

    def run(self, ids: list[int], steps: int = 1, *, puzzle: int = 0) -> list[tuple[Tensor, Tensor]]:
        """After each outer step: logits of every token, [length, vocab], and the two q-values."""
        embedded = self.embed(ids, puzzle)
        z_h = torch.stack([self.w["inner.H_init"]] * len(embedded))
        z_l = torch.stack([self.w["inner.L_init"]] * len(embedded))
        results = []
        for _ in range(steps):
            for _ in range(self.config["H_cycles"]):
                if self.aios:
                    z_l = torch.stack([self.w["inner.L_init"]] * len(embedded))
                for _ in range(self.config["L_cycles"]):
                    z_l = self.level("L", z_l, z_h + embedded)
                z_h = self.level("H", z_h, z_l)
            logits = z_h[len(embedded) - len(ids) :] @ self.w["inner.lm_head.weight"].T
            q = self.w["inner.q_head.weight"] @ z_h[0] + self.w["inner.q_head.bias"]
            results.append((logits.clamp(-20, 20) if self.aios else logits, q))
        return results

    def embed(self, ids: list[int], puzzle: int) -> Tensor:
        rows = [self.w["inner.embed_tokens.embedding_weight"][token] for token in ids]
        puzzles = self.w.get("inner.puzzle_emb.weights")
        if puzzles is not None:
            numbers = puzzles[puzzle].tolist()
            while len(numbers) % self.hidden:
                numbers.append(0.0)
            rows = [*torch.tensor(numbers, dtype=torch.float64).view(-1, self.hidden), *rows]
        x = torch.stack(rows)
        if self.config["pos_encodings"] == "learned":
            x = (x + self.w["inner.embed_pos.embedding_weight"][: len(x)]) / math.sqrt(2)
        if not self.aios or self.hidden >= 512:
            x = x * math.sqrt(self.hidden)
        return x.clamp(-10, 10) if self.aios else x

    def level(self, name: Literal["H", "L"], state: Tensor, injection: Tensor) -> Tensor:
        x = state + injection
        for layer in range(self.config[f"{name}_layers"]):
            prefix = f"inner.{name}_level.layers.{layer}"
            x = self.norm(x + self.attention(prefix, x))
            x = self.norm(x + self.mlp(prefix, x))
        return x

    def norm(self, x: Tensor) -> Tensor:
        return torch.stack([row / torch.sqrt((row * row).mean() + 1e-5) for row in x])

    def attention(self, prefix: str, x: Tensor) -> Tensor:
        width = self.hidden // self.heads
        q, k, v = (x @ self.w[f"{prefix}.self_attn.qkv_proj.weight"].T).chunk(3, 1)
        outputs = []
        for head in range(self.heads):
            columns = slice(head * width, (head + 1) * width)
            one_q, one_k = self.rotate(q[:, columns]), self.rotate(k[:, columns])
            shares = torch.softmax(one_q @ one_k.T / math.sqrt(width), -1)
            outputs.append(shares @ v[:, columns])
        return torch.cat(outputs, 1) @ self.w[f"{prefix}.self_attn.o_proj.weight"].T

    def rotate(self, x: Tensor) -> Tensor:
        if self.config["pos_encodings"] != "rope":
            return x
        half = x.shape[1] // 2
        rows = x.tolist()
        for position, row in enumerate(rows):
            for i in range(half):
                angle = position * self.config.get("rope_theta", 10000.0) ** (-i / half)
                a, b = row[i], row[i + half]
                row[i] = a * math.cos(angle) - b * math.sin(angle)
                row[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return torch.tensor(rows, dtype=torch.float64)

    def mlp(self, prefix: str, x: Tensor) -> Tensor:
        if not self.config.get("num_experts"):
            gate, up = (x @ self.w[f"{prefix}.mlp.gate_up_proj.weight"].T).chunk(2, 1)
            return (gate * torch.sigmoid(gate) * up) @ self.w[f"{prefix}.mlp.down_proj.weight"].T
        return torch.stack([self.experts(f"{prefix}.mlp.moe", row) for row in x])

    def experts(self, prefix: str, row: Tensor) -> Tensor:
        scores = (self.w[f"{prefix}.router.gate.weight"] @ row).tolist()
        best = sorted(range(len(scores)), key=lambda e: -scores[e])[: self.config["num_experts_per_tok"]]
        total = sum(math.exp(scores[e]) for e in best)
        y = torch.zeros_like(row)
        for e in best:
            inner = self.w[f"{prefix}.experts.{e}.w1.weight"] @ row
            inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
            y += math.exp(scores[e]) / total * (self.w[f"{prefix}.experts.{e}.w2.weight"] @ inner)
        return y


@pytest.mark.cases(3)
@pytest.mark.parametrize("dialect", ["upstream", "aios"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        MOE,
        LEARNED,
        {**MOE, **LEARNED, "num_experts_per_tok": 3},
        {"puzzle_emb_ndim": 40, "num_puzzle_identifiers": 3},
        {**LEARNED, "puzzle_emb_ndim": 32, "num_puzzle_identifiers": 3},
        {"rope_theta": 500.0, "H_cycles": 1, "L_cycles": 1, "H_layers": 3},
    ],
    ids=["dense", "experts", "learned", "learned-experts", "puzzle", "learned-puzzle", "one-cycle"],
)
def test_logits_and_halting_equal_the_reference_after_each_outer_step(dialect: str, changes: dict[str, object]) -> None:
    config = {**CONFIG, **changes, "dialect": dialect}
    model, weights = make(**changes, dialect=dialect)
    reference = Reference(config, weights)
    prompts = some_prompts(4, 4, 3)
    expected = [reference.run(prompt, 2) for prompt in prompts]
    for step in range(2):
        for found, results in zip(run(model, prompts, step + 1), expected, strict=True):
            logits, q = results[step]
            assert found.logits.dtype == found.halting.dtype == torch.float32
            torch.testing.assert_close(found.logits.double(), logits, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(found.halting.double(), q, atol=1e-5, rtol=1e-5)


def test_each_sequence_sees_its_own_puzzle() -> None:
    changes = {"puzzle_emb_ndim": 40, "num_puzzle_identifiers": 3}
    model, weights = make(**changes)
    reference = Reference({**CONFIG, **changes}, weights)
    prompts, puzzles = some_prompts(6, 3, 6), [2, 0, 1]
    layout = layout_of(model, prompts)
    embedded = model.embed(flat(prompts), layout, puzzles)
    found = outcomes(model, model.advance(model.start(layout), embedded, layout), layout)
    for own, prompt, puzzle in zip(found, prompts, puzzles, strict=True):
        [(expected, q)] = reference.run(prompt, puzzle=puzzle)
        torch.testing.assert_close(own.logits.double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(own.halting.double(), q, atol=1e-5, rtol=1e-5)


def test_a_wide_brain_scales_its_embeddings_as_upstream_does() -> None:
    wide = {"hidden_size": 512, "intermediate_size": 8, "L_layers": 1, "H_cycles": 1, "L_cycles": 1}
    config = {**CONFIG, **wide, **AIOS}
    model, weights = make(**wide, **AIOS)
    [prompt] = some_prompts(4)
    [(expected, _)] = Reference(config, weights).run(prompt)
    torch.testing.assert_close(run(model, [prompt])[0].logits.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_aios_dialect_holds_embeddings_and_logits_to_their_limits() -> None:
    config = HrmConfig.read({**CONFIG, **AIOS})
    weights = weights_of(config)
    weights["inner.embed_tokens.embedding_weight"] *= 20
    weights["inner.lm_head.weight"] *= 20
    prompts = some_prompts(6, 6)
    aios = load_hrm(config, weights.items(), torch.float32)
    assert aios.embed(flat(prompts), layout_of(aios, prompts)).abs().max() == 10
    assert run(aios, prompts)[0].logits.abs().max() == 20
    upstream = load_hrm(HrmConfig.read(CONFIG), weights.items(), torch.float32)
    assert upstream.embed(flat(prompts), layout_of(upstream, prompts)).abs().max() > 10
    assert run(upstream, prompts)[0].logits.abs().max() > 20


def test_every_position_sees_every_other() -> None:
    model, _ = make()
    [prompt] = some_prompts(6)
    changed = [*prompt[:-1], (prompt[-1] + 1) % 50]
    assert not torch.allclose(run(model, [prompt])[0].logits[0], run(model, [changed])[0].logits[0])


def test_an_outer_step_leaves_what_it_was_given() -> None:
    model, _ = make(**MOE)
    prompts = some_prompts(5, 3)
    layout = layout_of(model, prompts)
    embedded, carry = model.embed(flat(prompts), layout), model.start(layout)
    carry = model.advance(carry, embedded, layout)
    before = [tensor.clone() for tensor in (embedded, carry.z_h, carry.z_l)]
    model.advance(carry, embedded, layout)
    assert all(torch.equal(a, b) for a, b in zip(before, (embedded, carry.z_h, carry.z_l), strict=True))


# --- rows -----------------------------------------------------------------------------------------------------------

KINDS: Mapping[str, Mapping[str, object]] = {
    "dense": {},
    "experts": {**MOE, **AIOS},
    "odd": {"hidden_size": 40, "num_heads": 5, "intermediate_size": 24, "vocab_size": 77, **LEARNED, **AIOS},
    "wide": {"hidden_size": 256, "intermediate_size": 768, "H_cycles": 1, "L_cycles": 1},
    "puzzle": {"puzzle_emb_ndim": 40, "num_puzzle_identifiers": 3},
}


@cache
def model_of(kind: str, *, packed: bool = True) -> HrmModel:
    config = HrmConfig.read({**CONFIG, **KINDS[kind]})
    model = build_hrm(config, torch.float32)
    # Wide weights: a difference in the last bit grows, and does not hide.
    fill(places_of(model), weights_of(config, gain=2.0).items())
    if packed:
        model.pack()
    return model


@pytest.mark.full
@settings(max_examples=20)
@given(st.sampled_from(sorted(KINDS)), st.integers(2, 12), st.integers(1, 40), st.integers(0, 2**31))
def test_a_batch_of_one_length_gives_each_what_it_gets_alone_to_the_last_bit(
    kind: str, batch: int, length: int, seed: int
) -> None:
    model = model_of(kind)
    prompts = some_prompts(*[length] * batch, vocab=model.config.vocab_size, seed=seed)
    one, steps = seed % batch, 1 + seed % 2
    assert run(model, prompts, steps)[one] == run(model, [prompts[one]], steps)[0]


@pytest.mark.full
@settings(max_examples=20)
@given(st.sampled_from(sorted(KINDS)), st.lists(st.integers(1, 40), min_size=2, max_size=8), st.integers(0, 2**31))
def test_a_batch_of_any_lengths_gives_each_what_it_gets_alone_to_the_last_bit(
    kind: str, lengths: list[int], seed: int
) -> None:
    model = model_of(kind)
    prompts = some_prompts(*lengths, vocab=model.config.vocab_size, seed=seed)
    one = seed % len(lengths)
    assert run(model, prompts)[one] == run(model, [prompts[one]])[0]


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_sequences_are_exact_too_where_weights_cannot_be_packed(kind: str) -> None:
    model = model_of(kind, packed=False)
    assert not model.mixes_rows
    prompts = some_prompts(1, 1, 2, 2, 9, 3, 9, vocab=model.config.vocab_size)
    assert run(model, prompts, 2) == [run(model, [prompt], 2)[0] for prompt in prompts]


def test_sequences_that_leave_the_outer_loop_do_not_change_those_that_go_on() -> None:
    model = model_of("experts")
    prompts = some_prompts(11, 11, 4, 4, 7, 11)
    layout = layout_of(model, prompts)
    embedded = model.embed(flat(prompts), layout)
    carry = model.advance(model.start(layout), embedded, layout)
    staying = [0, 3, 5]
    left, rows = layout.take(staying)
    found = outcomes(model, model.advance(carry.take(rows), embedded[rows], left), left)
    whole = run(model, prompts, 2)
    assert found == [whole[sequence] for sequence in staying]


def test_packing_gives_the_plain_layout_up_and_lets_rows_run_together() -> None:
    model = model_of("dense")
    if model.inner.lm_head.packed is None:
        pytest.skip("this torch cannot pack weights")
    assert model.inner.lm_head.weight.numel() == 0
    assert model.mixes_rows


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.cases(2)
@pytest.mark.parametrize(("kind", "count"), [*(("wide", count) for count in (1, 2, 3, 5, 8)), ("experts", 7)])
def test_a_batch_gives_each_what_it_gets_alone_at_any_number_of_threads(
    threads: Callable[[int], None], kind: str, count: int
) -> None:
    """`F.silu` rounded what was left of each thread's share differently, so batches differed from 3 threads on."""
    threads(count)
    model = model_of(kind)
    assert model.mixes_rows
    # More rows than `count` threads share, in a number that none of them divides.
    lengths = [64, 61, 1, 64, 37, 64, 8, 64] * (1 if kind == "wide" else 2)
    prompts = some_prompts(*lengths, vocab=model.config.vocab_size, seed=count)
    found = run(model, prompts)
    assert all(found[one] == run(model, [prompts[one]])[0] for one in range(len(prompts)))


@pytest.mark.cases(2)
@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_the_trial_at_loading_finds_elements_that_depend_on_how_threads_share_the_work(
    threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    threads(count)
    monkeypatch.setattr(hrm_layers, "silu", silu_of_vectors_and_scalars)
    # Rows are whole vectors, so that only a cut within a row leaves a rest; 97 is prime, so that 8 threads cut so.
    config = HrmConfig.read({**CONFIG, "intermediate_size": 8 * 97})
    assert not load_hrm(config, weights_of(config).items(), torch.float32).mixes_rows
    monkeypatch.undo()
    assert load_hrm(config, weights_of(config).items(), torch.float32).mixes_rows


def silu_of_vectors_and_scalars(x: Tensor) -> Tensor:
    """Rounds the last elements of each thread's share differently, as code in vectors of 8 with a scalar rest does."""
    y = x / (1 + torch.exp(-x))
    pieces = min(torch.get_num_threads(), -(-y.numel() // 32768))
    for share in torch.split(y.view(-1), -(-y.numel() // pieces)):
        share[len(share) // 8 * 8 :] *= 1 + 2**-20
    return y


# --- config ---------------------------------------------------------------------------------------------------------


def test_a_config_is_read() -> None:
    config = HrmConfig.read({**CONFIG, **MOE, "puzzle_emb_ndim": 33, "num_puzzle_identifiers": 9})
    assert (config.num_heads, config.head_dim, config.h_cycles, config.l_cycles) == (4, 8, 2, 3)
    assert (config.num_experts, config.experts_per_token, config.inner_size) == (5, 2, 48)
    assert (config.puzzle_len, config.num_puzzles, config.seq_len, config.position_rows) == (2, 9, 64, 0)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 10000.0)


def test_the_dialects_differ_in_scale_and_steps() -> None:
    upstream, aios = HrmConfig.read(CONFIG), HrmConfig.read({**CONFIG, **AIOS})
    assert (upstream.embedding_scale, aios.embedding_scale) == (32**0.5, 1.0)
    assert (upstream.decoding_steps, aios.decoding_steps) == (4, 1)
    assert HrmConfig.read({**CONFIG, **AIOS, "hidden_size": 512}).embedding_scale == 512**0.5


def test_the_dialect_that_is_given_wins() -> None:
    assert HrmConfig.read(CONFIG, dialect="aios").dialect == "aios"


def test_what_the_aios_dialect_says_itself_need_not_be_told() -> None:
    config = HrmConfig.read({**CONFIG, **AIOS, "num_experts": 8, "halt_max_steps": None})
    assert (config.halt_max_steps, config.experts_per_token) == (1, 2)


def test_a_context_can_be_given_and_lowered() -> None:
    assert HrmConfig.read({**CONFIG, "seq_len": None}, max_seq_len=30).seq_len == 30
    learned = HrmConfig.read({**CONFIG, **LEARNED}, max_seq_len=30)
    assert (learned.seq_len, learned.position_rows) == (30, 64)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dialect": None}, UnsupportedModel, "--hrm-dialect upstream or --hrm-dialect aios"),
        ({"dialect": "other"}, UnsupportedModel, "dialect 'other' is not known"),
        ({"pos_encodings": "alibi"}, UnsupportedModel, "pos_encodings 'alibi'"),
        ({"num_heads": 5}, BadCheckpoint, "does not divide into 5 heads"),
        ({"num_heads": 32}, BadCheckpoint, "of an even width"),
        ({"num_heads": None}, BadCheckpoint, "'num_heads' is not in all_config.yaml, .* or give --num-heads"),
        ({"H_cycles": 0}, BadCheckpoint, "^all_config.yaml: 'H_cycles' must be an integer"),
        ({"H_cycles": None, "L_cycles": None}, BadCheckpoint, "'H_cycles' and 'L_cycles' .* --h-cycles and --l-cycles"),
        (
            {"H_cycles": None, "settings_files": None},
            BadCheckpoint,
            "^There is no brain.json, .* or --h-cycles",
        ),
        ({"halt_max_steps": None}, BadCheckpoint, "^all_config.yaml has no 'halt_max_steps', .*; add it there"),
        ({"num_experts": 4}, BadCheckpoint, "num_experts_per_tok"),
        ({**MOE, "num_experts_per_tok": 6}, BadCheckpoint, "only 5 experts"),
        ({"seq_len": None}, BadCheckpoint, "--max-seq-len"),
        ({"puzzle_emb_ndim": 8}, BadCheckpoint, "num_puzzle_identifiers"),
    ],
)
def test_a_config_that_lacks_or_contradicts_something_is_refused(
    changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        HrmConfig.read({**CONFIG, **changes})


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(BadRequest, match="knows only 64 positions"):
        HrmConfig.read(CONFIG, max_seq_len=65)


# --- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, MOE, {**LEARNED, "puzzle_emb_ndim": 8, "num_puzzle_identifiers": 3}])
def test_a_checkpoint_holds_the_published_names(changes: dict[str, object]) -> None:
    config = HrmConfig.read({**CONFIG, **changes})
    shapes = {name: place.shape for name, place in places_of(build_hrm(config, torch.float32)).items()}
    assert shapes == {name: tensor.shape for name, tensor in weights_of(config).items()}


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("inner.H_init", None, r"lacks 1 tensors \(inner\.H_init\)"),
        ("inner.norm.weight", torch.ones(32), r"'inner\.norm\.weight' that its architecture has no place for"),
        ("inner.q_head.bias", torch.ones(3), r"'inner\.q_head\.bias' has shape \(3,\), but its config asks for \(2,\)"),
        ("inner.L_init", torch.ones(32, dtype=torch.int8), r"'inner\.L_init' holds int8"),
    ],
)
def test_a_tensor_that_does_not_belong_is_named(name: str, tensor: Tensor | None, message: str) -> None:
    config = HrmConfig.read(CONFIG)
    weights = weights_of(config)
    if tensor is None:
        del weights[name]
    else:
        weights[name] = tensor
    with pytest.raises(BadCheckpoint, match=message):
        load_hrm(config, weights.items(), torch.float32)
