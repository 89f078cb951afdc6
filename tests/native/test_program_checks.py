"""A program with a wrong number is refused with the step's name, and never runs: nothing is read or written beyond."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from every_family import TINY, config_of, some
from family_case import EXPERT_SIZES
from native_models import needs_library, packed, savable_model
from tiny_models import GEMMA2, LLAMA

from ostro.errors import BadCheckpoint
from ostro.kernels.cpu.library import After, CDraw, Op, instruction_sets
from ostro.kernels.cpu.packed_file import PackedFile
from ostro.kernels.cpu.program import Piece, Program

pytestmark = needs_library

_CONFIG = {**LLAMA, "hidden_size": 64, "architectures": ["Qwen3ForCausalLM"]}
# Layer norms, learned positions, and an MLP without gates.
_GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 64,
    "n_embd": 64,
    "n_layer": 1,
    "n_head": 4,
    "n_positions": 128,
}
# A mixture of experts beside an MLP that all tokens share.
_MIXTURE = {
    **LLAMA,
    **EXPERT_SIZES,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "architectures": ["Qwen2MoeForCausalLM"],
}
# The same with biases, and with sinks in its attention.
_SINKS = {**TINY["gpt_oss"], "hidden_size": 64, "num_hidden_layers": 1}
_SIZES = {**LLAMA, "hidden_size": 64, "head_dim": 16}
# Those with states, of each kind.
_STATES = {
    "delta": config_of("qwen3_5", _SIZES, num_hidden_layers=2),
    "ssm": config_of("granitemoehybrid", _SIZES, num_hidden_layers=2),
    "convolution": config_of("lfm2", _SIZES, num_hidden_layers=2),
    # Experts without gates, chosen by sigmoids.
    "ungated": config_of("nemotron_h", _SIZES),
}
_WRONG = (-(2**31), -1, 1, 3, 17, 64, 65, 1000, 2**31 - 1, 2**40)
_NUM_PAGES, _NUM_STATES, _MAX_TOKENS = 8, 3, 16


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> PackedFile:
    return packed(_CONFIG, savable_model(_CONFIG), tmp_path_factory.mktemp("packed") / "model.ostro")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> PackedFile:
    return packed(_GPT2, savable_model(_GPT2), tmp_path_factory.mktemp("packed") / "gpt2.ostro")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> PackedFile:
    return packed(_MIXTURE, savable_model(_MIXTURE), tmp_path_factory.mktemp("packed") / "mixture.ostro")


@pytest.fixture(scope="module")
def sinks(tmp_path_factory: pytest.TempPathFactory) -> PackedFile:
    return packed(_SINKS, savable_model(_SINKS), tmp_path_factory.mktemp("packed") / "sinks.ostro")


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, PackedFile]:
    directory = tmp_path_factory.mktemp("packed")
    return {name: packed(config, savable_model(config), directory / name) for name, config in _STATES.items()}


@pytest.fixture
def delta(stateful: Mapping[str, PackedFile]) -> PackedFile:
    return stateful["delta"]


@pytest.fixture
def ssm(stateful: Mapping[str, PackedFile]) -> PackedFile:
    return stateful["ssm"]


@pytest.fixture
def ungated(stateful: Mapping[str, PackedFile]) -> PackedFile:
    return stateful["ungated"]


@pytest.fixture
def convolution(stateful: Mapping[str, PackedFile]) -> PackedFile:
    return stateful["convolution"]


@pytest.fixture(autouse=True)
def restored(
    weights: PackedFile,
    gpt2: PackedFile,
    mixture: PackedFile,
    sinks: PackedFile,
    stateful: Mapping[str, PackedFile],
) -> Iterator[None]:
    files = (weights, gpt2, mixture, sinks, *stateful.values())
    programs = [(each.program, deepcopy(each.program)) for each in files]
    yield
    for program, right in programs:
        program.clear()
        program.update(right)


def made(weights: PackedFile) -> Program:
    return Program(
        weights,
        isa=instruction_sets()[0],
        num_pages=_NUM_PAGES,
        num_states=_NUM_STATES if weights.program["state_floats"] else 0,
        num_lanes=2,
        most_drafts=2,
        max_tokens=_MAX_TOKENS,
        max_asked=4,
        threads=2,
    )


def run(program: Program, **changes: Any) -> None:
    given: dict[str, Any] = {
        "tokens": [1, 2, 3],
        "row": 0,
        "start": 0,
        "length": 3,
        "pages": [0],
        "asked": [2],
        "state": 0,
        "captures": (),
        "drafts": 0,
        "applied": 0,
        "lane": 0,
        **changes,
    }
    pages = np.array(given["pages"], np.int32)
    program.run(
        np.array(given["tokens"], np.int32),
        [Piece(pages=pages, **{name: given[name] for name in Piece._fields if name != "pages"})],
        np.array(given["asked"], np.int32),
        given.get("draws"),
    )


def places(program: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    parts = [program, *program["buffers"], *program["rotations"], *program["steps"]]
    if any(step["op"] == Op.ROUTE for step in program["steps"]):
        # Those of experts and sinks, and the buffers between them: the other models have the rest.
        own = [step for step in program["steps"] if step["op"] >= Op.ROUTE or step["op"] == Op.ATTEND]
        parts = [*program["buffers"][-3:], *own]
    elif program["state_floats"]:
        own = [step for step in program["steps"] if step["op"] >= Op.MULTIPLY]
        parts = [program, *program["buffers"], *own, *(step["recurrence"] for step in own if step["recurrence"])]
    for part in parts:
        for name, value in part.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield part, name


MODELS = ("weights", "gpt2", "mixture", "sinks", "delta", "ssm", "convolution", "ungated")


@pytest.mark.parametrize("model", some(MODELS, "weights", "sinks", "delta"))
def test_every_number_of_a_program_may_be_wrong_and_nothing_dies(model: str, request: pytest.FixtureRequest) -> None:
    """Each is set to each wrong value: the program is refused, or what it computes stays within its memory."""
    weights: PackedFile = request.getfixturevalue(model)
    refused = ran = 0
    for part, name in list(places(weights.program)):
        right = part[name]
        for wrong in _WRONG:
            part[name] = wrong
            try:
                program = made(weights)
            except BadCheckpoint:
                refused += 1
            else:
                run(program, tokens=[1], length=1, asked=[0])
                ran += 1
            part[name] = right
    assert refused > 300
    assert ran > 100
    run(made(weights))


@pytest.mark.parametrize(
    ("model", "op", "field", "value", "why"),
    [
        ("delta", Op.MULTIPLY, "width", 1000, "its norm has|no multiple of|do not exist"),
        ("delta", Op.MULTIPLY, "after", After.GELU, "after is 3, which multiplies nothing"),
        ("convolution", Op.MULTIPLY, "out_at", 0, "it reads the columns that it writes"),
        ("delta", Op.CONVOLVE, "weights", None, "it has 0 weights of "),
        ("delta", Op.CONVOLVE, "after", After.ADD, "after is 1, which no filter ends with"),
        ("delta", Op.CONVOLVE, "out", 2, "it reads the buffer that it writes"),
        ("delta", Op.CONVOLVE, "recurrence", None, "it has no recurrence"),
        ("convolution", Op.CONVOLVE, "out", 2, "it reads the buffer that it writes|do not exist"),
        ("delta", Op.DELTA, "beside_at", 2**20, "do not exist"),
        ("delta", Op.DELTA, "eps", -1.0, "its eps is negative"),
        ("ungated", Op.ROUTE, "after", After.SILU, "after is 2, which chooses no experts"),
        ("ungated", Op.ROUTE, "eps", -1.0, "its eps is negative"),
        ("ungated", Op.EXPAND, "after", After.STORE, "after is 0, which is no activation"),
        ("ungated", Op.EXPAND, "after", After.CLAMPED_SILU, "after is 6, which is no activation"),
        ("ssm", Op.SSM, "weights", None, "it has 0 weights of "),
        ("ssm", Op.SSM, "in_at", 1000, "do not exist"),
    ],
)
def test_a_mixers_step_is_refused(
    model: str, op: Op, field: str, value: object, why: str, stateful: Mapping[str, PackedFile]
) -> None:
    step = next(each for each in stateful[model].program["steps"] if each["op"] == op)
    step[field] = value
    with pytest.raises(BadCheckpoint, match=rf"cannot run: step \d+ \({op.name.lower()}\): .*({why})"):
        made(stateful[model])


@pytest.mark.parametrize(
    ("op", "field", "value", "why"),
    [
        (Op.CONVOLVE, "taps", 0, "the number of taps is 0, not from 1 to 8"),
        (Op.CONVOLVE, "taps", 9, "the number of taps is 9"),
        (Op.CONVOLVE, "state_at", -1, "the place of its state is -1"),
        (Op.CONVOLVE, "state_at", 10**6, "on is beyond a slot's "),
        (Op.CONVOLVE, "draft_at", -1, "the place of its drafts is -1"),
        (Op.DELTA, "draft_at", 10**6, "what it keeps of a draft, .* is beyond "),
        (Op.DELTA, "heads", 0, "the number of heads is 0"),
        (Op.DELTA, "groups", 4, "6 heads cannot share 4 groups evenly"),
        (Op.DELTA, "rows", 5000, "number of rows is 5000"),
        (Op.DELTA, "cols", 4000, "is beyond a slot's "),
    ],
)
def test_a_recurrence_is_refused(op: Op, field: str, value: int, why: str, stateful: Mapping[str, PackedFile]) -> None:
    weights = stateful["delta"]
    step = next(each for each in weights.program["steps"] if each["op"] == op)
    step["recurrence"][field] = value
    with pytest.raises(BadCheckpoint, match=why):
        made(weights)


def test_a_draft_is_as_large_as_its_parts(stateful: Mapping[str, PackedFile]) -> None:
    stateful["delta"].program["draft_floats"] += 1
    with pytest.raises(BadCheckpoint, match=r"a draft has \d+ numbers, of which \d+ are used"):
        made(stateful["delta"])


def test_a_slot_is_as_large_as_its_parts(stateful: Mapping[str, PackedFile]) -> None:
    """A file of a few bytes could ask for any memory."""
    stateful["delta"].program["state_floats"] += 1
    with pytest.raises(BadCheckpoint, match=r"a slot has \d+ numbers, of which \d+ are used"):
        made(stateful["delta"])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state": -1}, "a sequence's state is -1, not from 0 to 2"),
        ({"state": 3}, "a sequence's state is 3"),
        ({"captures": ((0, 1),)}, "a capture's place is 0, not from 1 to 3"),
        ({"captures": ((4, 1),)}, "a capture's place is 4, not from 1 to 3"),
        ({"captures": ((2, 1), (1, 2))}, "a capture's place is 1, not from 2 to 3"),
        ({"captures": ((1, 1),) * 4}, "the number of captures is 4, not from 0 to 3"),
        ({"captures": ((1, 3),)}, "a capture's slot is 3, not from 0 to 2"),
        ({"drafts": -1}, "the number of drafts is -1, not from 0 to 2"),
        ({"drafts": 3}, "the number of drafts is 3, not from 0 to 2"),
        ({"drafts": 2, "captures": ((2, 1),)}, "the number of drafts is 2, not from 0 to 1"),
        ({"applied": 1}, "the number of applied drafts is 1, not from 0 to 0"),
        ({"start": 9, "applied": 3}, "the number of applied drafts is 3, not from 0 to 2"),
        ({"lane": 2}, "a lane is 2, not from 0 to 1"),
        ({"lane": -1}, "a lane is -1"),
    ],
)
def test_slots_that_do_not_exist_are_refused(
    changes: dict[str, Any], why: str, stateful: Mapping[str, PackedFile]
) -> None:
    program = made(stateful["delta"])
    run(program, captures=((1, 1), (3, 2)))
    run(program, drafts=2, lane=1)
    run(program, start=3, applied=2, lane=1)
    with pytest.raises(AssertionError, match=why):
        run(program, **changes)
    for wrong in (-1, 3):
        with pytest.raises(AssertionError, match="There are no states"):
            program.copy_state(0, wrong)


@pytest.mark.parametrize(
    ("op", "field", "value", "why"),
    [
        (0, "cols", 63, "its matrix has 64 columns, and the step 63"),
        (0, "matrix", 99, "reads matrix 99"),
        (0, "matrix", None, "it has no matrix"),
        (1, "in_at", 1, "columns 1 to 65 of buffer 0 do not exist: it has 64"),
        (1, "out_at", -8, "columns -8 to "),
        (1, "norm", -1, "reads vector -1"),
        (1, "after", 5, "after is 5, not from 0 to 1"),
        (1, "after", 7, "after is 7, not from 0 to 1"),
        (1, "after", 8, "after is 8, not from 0 to 1"),
        (1, "after", 9, r"Invalid enum value 9 - at `\$\.steps\[\d+\]\.after`"),
        (1, "out", 7, "out is 7, not from 0 to 6"),
        (1, "eps", 0.0, "its eps is not a number above zero"),
        (2, "cols", 128, "for 128 columns"),
        (3, "layer", 2, "layer is 2, not from 0 to 1"),
        (3, "rotation", 1, "rotation is 1, not from -1 to 0"),
        (3, "window", -1, "window is -1"),
        (4, "cols", 65, "columns 0 to 65 of buffer 0 do not exist"),
        (6, "cols", 65, "columns 0 to 65"),
    ],
)
def test_a_step_is_refused_by_its_number_its_operation_and_what_is_wrong(
    weights: PackedFile, op: int, field: str, value: int | None, why: str
) -> None:
    step = next(each for each in weights.program["steps"] if each["op"] == op)
    step[field] = value
    with pytest.raises(BadCheckpoint, match=rf"cannot run: .*{why}"):
        made(weights)


@pytest.mark.parametrize(
    ("op", "field", "value", "why"),
    [
        (Op.NORM, "bias", 99, "reads vector 99"),
        (Op.NORM, "after", 1, "after is 1, not from 0 to 0"),
        (Op.NORM, "norm", None, "it has no weights"),
        (Op.SCALE, "cols", 65, "it has 65 columns, no multiple of"),
        (Op.SCALE, "cols", 128, "columns 0 to 128 of buffer 1 do not exist"),
        (Op.SCALE, "after", 2, "after is 2, not from 0 to 1"),
        (Op.SCALE, "input", 7, "in is 7, not from 0 to 6"),
        (Op.APPLY, "after", 1, "after is 1, which is no activation"),
        (Op.APPLY, "cols", -16, "do not exist"),
        (Op.APPLY, "cols", 1024, "columns 0 to 1024 of buffer 4 do not exist"),
        (Op.POSITION, "cols", 32, "its matrix has 64 columns, and the step 32"),
        (Op.POSITION, "matrix", None, "it has no matrix"),
        (Op.POSITION, "out", -1, "out is -1"),
    ],
)
def test_a_step_of_a_model_with_layer_norms_is_refused_likewise(
    gpt2: PackedFile, op: int, field: str, value: int | None, why: str
) -> None:
    step = next(each for each in gpt2.program["steps"] if each["op"] == op)
    step[field] = value
    with pytest.raises(BadCheckpoint, match=rf"cannot run: .*{why}"):
        made(gpt2)


@pytest.mark.parametrize(
    ("op", "field", "value", "why"),
    [
        (Op.ROUTE, "experts", 0, "the number of experts is 0"),
        (Op.ROUTE, "experts", 65, "columns 0 to 65 of buffer 7 do not exist: it has 64"),
        (Op.ROUTE, "chosen", 5, "the number of chosen experts is 5, not from 1 to 4"),
        (Op.ROUTE, "chosen", 1, "it has 2 of 4 experts, and 1 of 4 were chosen"),
        (Op.EXPAND, "experts", 3, "it has 2 of 3 experts, and 2 of 4 were chosen"),
        (Op.EXPAND, "after", 1, "after is 1, which adds to slots"),
        (Op.EXPAND, "out", 0, "buffer 0 has 16 rows for 2 experts of 16 tokens"),
        (Op.EXPERT, "input", 1, "buffer 1 has 16 rows for 2 experts of 16 tokens"),
        (Op.EXPERT, "matrix", None, "it has no matrix"),
        (Op.EXPERT, "out_at", 8, "columns 8 to 72 of buffer 9 do not exist"),
        (Op.COMBINE, "chosen", 1, "it has 1 of 4 experts, and 2 of 4 were chosen"),
        (Op.COMBINE, "input", 0, "buffer 0 has 16 rows for 2 experts of 16 tokens"),
        (Op.COMBINE, "after", 2, "after is 2, not from 0 to 1"),
        (Op.GATE, "cols", 65, "it has 65 columns, no multiple of"),
        (Op.GATE, "in_at", 64, "columns 64 to 65 of buffer 7 do not exist"),
    ],
)
def test_a_step_of_a_mixture_of_experts_is_refused_likewise(
    mixture: PackedFile, op: int, field: str, value: int | None, why: str
) -> None:
    step = next(each for each in mixture.program["steps"] if each["op"] == op)
    step[field] = value
    with pytest.raises(BadCheckpoint, match=rf"cannot run: .*{why}"):
        made(mixture)


def test_experts_before_any_were_chosen_are_refused(mixture: PackedFile) -> None:
    steps = mixture.program["steps"]
    at = next(number for number, each in enumerate(steps) if each["op"] == Op.ROUTE)
    del steps[at]
    mixture.program["head_step"] -= 1
    mixture.program["logits_step"] -= 1
    with pytest.raises(BadCheckpoint, match="no tokens were routed before it"):
        made(mixture)


def test_a_run_that_begins_after_the_routing_stays_within_its_memory(mixture: PackedFile) -> None:
    """It has nothing to go by but what an earlier run chose, or nothing at all."""
    steps = mixture.program["steps"]
    at = next(number for number, each in enumerate(steps) if each["op"] == Op.ROUTE)
    program = made(mixture)
    for _ in range(2):
        program.run(
            np.array([1, 2, 3], np.int32),
            [Piece(0, 0, 3, np.zeros(1, np.int32))],
            np.array([2], np.int32),
            first=at + 1,
        )
        run(program, tokens=[1], length=1, asked=[0])


def test_a_layer_norm_without_enough_biases_is_refused(gpt2: PackedFile) -> None:
    step = next(each for each in gpt2.program["steps"] if each["op"] == Op.NORM)
    short = min(range(gpt2.num_vectors), key=lambda number: len(gpt2.vector(number)))
    step["cols"] = step["cols"] * 2
    gpt2.program["buffers"][step["input"]]["cols"] = gpt2.program["buffers"][step["out"]]["cols"] = step["cols"]
    step["norm"] = max(range(gpt2.num_vectors), key=lambda number: len(gpt2.vector(number)))
    step["bias"] = short
    with pytest.raises(BadCheckpoint, match="its bias has 64 numbers for 128 columns"):
        made(gpt2)


def test_a_position_beyond_the_learned_ones_is_refused(gpt2: PackedFile) -> None:
    gpt2.program["max_seq_len"] = 4096
    program = Program(gpt2, isa=instruction_sets()[0], num_pages=16, max_tokens=16, max_asked=4, threads=2)
    run(program, start=125, pages=range(8))
    with pytest.raises(AssertionError, match="a sequence's first position is 126, not from 0 to 125"):
        run(program, start=126, pages=range(9))


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("kv_heads", 3, "4 heads cannot share 3 kv_heads evenly"),
        ("kv_heads", 8, "kv_heads is 8, not from 1 to 4"),
        ("kv_heads", 0, r"Expected `int` >= 1 - at `\$\.kv_heads`"),
        ("head_dim", 24, "head_dim is 24, no multiple of 16"),
        ("head_dim", 512, "head_dim is 512, not from 16 to 256"),
        ("vocab_size", 65, "no buffer 6 for 65 columns of logits|the embedding has 64 rows for 65 tokens"),
        ("hidden", 9, "no buffer 9"),
        ("head_step", 99, "the head is steps 99"),
        ("max_seq_len", 0, r"Expected `int` >= 1 - at `\$\.max_seq_len`"),
    ],
)
def test_an_impossible_shape_is_refused(weights: PackedFile, field: str, value: int, why: str) -> None:
    weights.program[field] = value
    with pytest.raises(BadCheckpoint, match=why):
        made(weights)


def test_more_than_a_head_does_not_rotate(weights: PackedFile) -> None:
    """The rotary width of a config was believed, and keys were written beyond their heads."""
    longer = max(range(weights.num_vectors), key=lambda number: len(weights.vector(number)))
    weights.program["rotations"][0]["frequencies"] = longer
    with pytest.raises(BadCheckpoint, match="rotated is 192, not from 2 to 16"):
        made(weights)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tokens": [1, 2, 64]}, "a token is 64, not from 0 to 63"),
        ({"tokens": [1, 2, -1]}, "a token is -1"),
        ({"tokens": [1] * 17, "length": 17}, "the number of rows is 17, not from 1 to 16"),
        ({"row": 1}, "rows begin at 1, not at 0"),
        ({"length": 2}, "sequences have 2 of 3 rows"),
        ({"length": 4}, "a sequence's length is 4"),
        ({"start": 14}, "has 1 pages and needs 2"),
        ({"start": 126, "pages": range(8)}, "a sequence's first position is 126"),
        ({"start": -1}, "first position is -1"),
        ({"pages": [8]}, "a page is 8, not from 0 to 7"),
        ({"asked": [3]}, "a row asked for is 3"),
        ({"asked": [0, 0, 0, 0, 0]}, "the number of rows asked for is 5, not from 0 to 4"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(weights: PackedFile, changes: dict[str, Any], why: str) -> None:
    program = made(weights)
    with pytest.raises(AssertionError, match=why):
        run(program, **changes)
    run(program)


def test_a_mask_narrower_than_the_vocabulary_is_refused(weights: PackedFile) -> None:
    program = made(weights)
    words = np.full(2, 0xFFFFFFFF, np.uint32)
    draws = (CDraw * 1)()
    draws[0].allowed, draws[0].num_words = words.ctypes.data, 1
    with pytest.raises(AssertionError, match="the number of words of a mask is 1, not from 2"):
        run(program, draws=draws)
    draws[0].num_words = 2
    run(program, draws=draws)


def test_page_out_of_range_is_not_copied(weights: PackedFile) -> None:
    program = made(weights)
    with pytest.raises(AssertionError, match="no pages 0 and 8"):
        program.copy_page(0, 8)


def test_gated_softcapped_programs_pass_the_same_checks(tmp_path: Path) -> None:
    config = {**GEMMA2, "hidden_size": 64, "head_dim": 16}
    run(made(packed(config, savable_model(config), tmp_path / "gemma.ostro")))
