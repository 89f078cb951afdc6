"""An encoder's program with a wrong number is refused with the step's name, or stays within its memory."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
from encoder_directory import WIDE, reference
from native_encoders import packed_encoder
from native_models import needs_library

from ostro.errors import BadCheckpoint
from ostro.kernels.cpu.library import Op, instruction_sets
from ostro.kernels.cpu.packed_file import PackedFile
from ostro.kernels.cpu.program import Piece, Program

pytestmark = needs_library

_WRONG = (-(2**31), -1, 0, 1, 3, 65, 1000, 2**31 - 1)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PackedFile]:
    """Token types, learned positions and a classifier; rotations and windows that look both ways."""
    directory, found = tmp_path_factory.mktemp("packed"), {}
    for name, labels in (("bert", 1), ("modernbert", 0)):
        values = {**WIDE[name], "num_hidden_layers": 2}
        given = {**values, "num_labels": labels} if labels else values
        found[name] = packed_encoder(given, reference(values, labels=labels), directory / name)
    return found


@pytest.fixture(autouse=True)
def restored(files: dict[str, PackedFile]) -> Iterator[None]:
    programs = [(each.program, deepcopy(each.program)) for each in files.values()]
    yield
    for program, right in programs:
        program.clear()
        program.update(right)


def made(weights: PackedFile) -> Program:
    return Program(weights, isa=instruction_sets()[0], num_pages=0, max_tokens=16, max_asked=4, threads=2)


def run(program: Program) -> None:
    none = np.zeros(0, np.int32)
    pieces = [Piece(0, 0, 2, none), Piece(2, 0, 3, none)]
    program.run(np.arange(5, dtype=np.int32), pieces, np.array([0, 2], np.int32), types=np.zeros(5, np.int32))


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_every_number_of_a_program_may_be_wrong_and_nothing_dies(name: str, files: dict[str, PackedFile]) -> None:
    program = files[name].program
    # Decoders have the other operations too.
    steps = {step["op"]: step for step in program["steps"] if step["op"] in (Op.ATTEND_TEXT, Op.TYPE)}
    refused = ran = 0
    for part in (program, *program["buffers"], *program["rotations"], *steps.values()):
        for field, right in list(part.items()):
            if not isinstance(right, int | float) or isinstance(right, bool):
                continue
            for wrong in _WRONG:
                part[field] = wrong
                try:
                    run(made(files[name]))
                    ran += 1
                # The second is a batch's refusal, for example of texts that are longer than a wrong max_seq_len.
                except (BadCheckpoint, AssertionError):
                    refused += 1
            part[field] = right
    assert refused > 100
    assert ran > 50
    run(made(files[name]))


@pytest.mark.parametrize(
    ("op", "field", "value", "why"),
    [
        (Op.ATTEND_TEXT, "rotation", 2, "rotation is 2, not from -1 to 1"),
        (Op.ATTEND_TEXT, "window", -1, "window is -1"),
        (Op.ATTEND_TEXT, "scale", 0.0, "its scale is not a number above zero"),
        (Op.ATTEND_TEXT, "in_at", 1, "columns 1 to 193 of buffer 2 do not exist: it has 192"),
        (Op.ATTEND_TEXT, "out", 2, "columns 0 to 64 of buffer 2|it reads the buffer that it writes"),
        (Op.LINEAR, "after", 5, "after is 5, not from 0 to 1"),
    ],
)
def test_a_step_of_an_encoder_is_refused_by_name(
    op: Op, field: str, value: Any, why: str, files: dict[str, PackedFile]
) -> None:
    step = next(each for each in files["modernbert"].program["steps"] if each["op"] == op)
    step[field] = value
    with pytest.raises(BadCheckpoint, match=rf"cannot run: .*({why})"):
        made(files["modernbert"])


def test_attention_to_pages_is_refused_where_there_are_none(files: dict[str, PackedFile]) -> None:
    step = next(each for each in files["bert"].program["steps"] if each["op"] == Op.ATTEND_TEXT)
    step["op"] = int(Op.ATTEND)
    with pytest.raises(BadCheckpoint, match="there are no pages"):
        made(files["bert"])


def test_heads_that_share_keys_are_refused(files: dict[str, PackedFile]) -> None:
    files["bert"].program["kv_heads"] = 2
    with pytest.raises(BadCheckpoint, match="heads share kv_heads"):
        made(files["bert"])


def test_types_that_the_table_lacks_are_refused(files: dict[str, PackedFile]) -> None:
    step = next(each for each in files["bert"].program["steps"] if each["op"] == Op.TYPE)
    step["matrix"] = None
    with pytest.raises(BadCheckpoint, match=r"\(type\): it has no matrix"):
        made(files["bert"])
