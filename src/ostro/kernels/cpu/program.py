"""A model's step, ready to run: a packed file's operations with their own buffers, pages and threads.

program = Program(packed, num_pages=…, max_tokens=…, max_asked=…, cells=Cells.FLOAT16, threads=2)
program.run(tokens, pieces, asked, draws)     one native call, which releases the GIL
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, addressof, byref, c_double, c_float, c_uint8, c_void_p, cast, create_string_buffer
from dataclasses import asdict, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ostro.errors import ModelError, Unsupported
from ostro.kernels.cpu.library import (
    PAGE,
    CBatch,
    CBuffer,
    CCapture,
    CDraw,
    Cells,
    CPiece,
    CRecurrence,
    CRotation,
    CRowwiseRun,
    CShape,
    CStep,
    CTerm,
    Op,
    library,
)
from ostro.kernels.cpu.packed_file import Floats, PackedFile
from ostro.kernels.cpu.program_spec import (
    BufferSpec,
    ProgramSpec,
    RecurrenceSpec,
    RotationSpec,
    StepSpec,
    bad_program,
)
from ostro.system.topology import threads_here

# Room for a refusal, which is a single line.
_MOST_REASON = 512
# A step's fields that name something, to which the native step points.
_POINTERS = frozenset({"norm", "bias", "matrix", "weights", "recurrence"})


Allocate = Callable[[tuple[int, int]], Floats]
"""Makes an array of this shape, of zeros."""


class Piece(NamedTuple):
    """One sequence's tokens: its first row, the position of its first token, the number of tokens, its pages; the slot
    of its recurrent state, and after how many tokens that is copied to which others. The last `drafts` tokens do not
    advance the state: what they would do to it is kept in a lane, in which `applied` of the last step's drafts turned
    out to be right.
    """

    row: int
    start: int
    length: int
    pages: npt.NDArray[np.int32]
    state: int = 0
    captures: Sequence[tuple[int, int]] = ()
    drafts: int = 0
    applied: int = 0
    lane: int = 0


class Term(NamedTuple):
    """One adapter's contribution to a matmul with x: x aᵀ b."""

    a: Floats
    """[rank, columns read]"""
    b: Floats
    """[rank, columns written], its scale included."""


class Adapted(NamedTuple):
    """A program with steps in which adapters add to matmuls."""

    spec: ProgramSpec
    terms: Mapping[int, Sequence[Term | None]]
    """Each adapter's term, by step number."""


class RowwiseRun(NamedTuple):
    """A run that is ready to be started, here or as a CUDA host function: without Python. One at a time per program."""

    program: "Program"
    """Must stay alive."""
    native: CRowwiseRun
    function: int
    """The address of a function that runs it, given its `argument`."""

    @property
    def argument(self) -> int:
        return addressof(self.native)

    def __call__(self) -> None:
        library().ostro_run_rowwise(self.argument)


class Program:
    def __init__(
        self,
        packed: PackedFile,
        *,
        isa: str,
        num_pages: int,
        max_tokens: int,
        max_asked: int,
        num_states: int = 0,
        num_lanes: int = 0,
        most_drafts: int = 0,
        cells: Cells = Cells.FLOAT32,
        threads: int = 1,
        adapted: Adapted | None = None,
        allocate: Mapping[int, Allocate] | None = None,
    ) -> None:
        """Raises BadCheckpoint for a program whose steps do not fit its buffers, pages and weights.

        `adapted` replaces the packed file's own program. `allocate` makes some of the buffers, by their numbers.
        """
        self.spec = spec = ProgramSpec.from_json(packed.program) if adapted is None else adapted.spec
        _check(spec)
        self.max_asked = max_asked
        # The plan points into these, so they must stay alive.
        self._packed = packed
        self._matrices = packed.pointed()
        # No sequence is longer than all pages together, whatever the model's context length. Without pages, a step has
        # room for the longest text, so that the caller has to limit the context.
        positions = min(spec.max_seq_len, num_pages * PAGE or max_tokens)
        self._tables = [
            _rotation_tables(self._vector(each.frequencies), each.factor, positions) for each in spec.rotations
        ]
        self._lib = library()
        shape = CShape(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            num_layers=spec.num_layers,
            num_pages=num_pages,
            cells=cells,
            max_rows=max_tokens,
            threads=threads,
            num_states=num_states,
            state_floats=spec.state_floats,
            num_lanes=num_lanes,
            most_drafts=most_drafts,
            draft_floats=spec.draft_floats,
        )
        rows = [(max_asked if each.asked else max_tokens * each.per_token, each.cols) for each in spec.buffers]
        buffers = (CBuffer * len(rows))(*(CBuffer(*each) for each in rows))
        self._allocated = {number: make(rows[number]) for number, make in (allocate or {}).items()}
        for number, array in self._allocated.items():
            assert array.shape == rows[number]
            assert array.flags.c_contiguous
            buffers[number].memory = array.ctypes.data
        rotations = (CRotation * len(self._tables))(
            *(CRotation(cos.ctypes.data, sin.ctypes.data, 2 * cos.shape[1], len(cos)) for cos, sin in self._tables)
        )
        self._recurrences: list[CRecurrence] = []
        steps = (CStep * len(spec.steps))(*map(self._step, spec.steps))
        self._terms = {at: _native_terms(terms) for at, terms in adapted.terms.items()} if adapted else {}
        self._adapted = adapted
        for at, terms in self._terms.items():
            steps[at].terms, steps[at].num_terms = addressof(terms), len(terms)
        why = create_string_buffer(_MOST_REASON)
        self._plan: int | None = self._lib.ostro_plan(
            isa.encode(),
            byref(shape),
            buffers,
            len(buffers),
            rotations,
            len(rotations),
            steps,
            len(steps),
            why,
            len(why),
        )
        if self._plan is None and why.value:
            raise bad_program(why.value.decode())
        if self._plan is None:
            raise ModelError(
                "There is no memory for a step's work, or no thread. Lower kv_memory, max_batch_tokens or threads."
            )
        self._rows = rows
        self._lib.ostro_set_polling(self._plan, threads_here(threads).has_cpus)

    def __del__(self) -> None:
        if getattr(self, "_plan", None) is not None:
            self._lib.ostro_free(self._plan)
            self._plan = None

    def run(
        self,
        tokens: npt.NDArray[np.int32],
        pieces: Sequence[Piece],
        asked: npt.NDArray[np.int32],
        draws: "Array[CDraw] | None" = None,
        *,
        adapters: npt.NDArray[np.int32] | None = None,
        types: npt.NDArray[np.int32] | None = None,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        """Runs the steps from `first` up to `last`. `draws` then holds the drawn tokens.

        `adapters` has each row's adapter number; -1 is none. `types` has each row's token type; None is for zeros.
        """
        # Only needed while it runs.
        captures = [(CCapture * len(p.captures))(*(CCapture(*own) for own in p.captures)) for p in pieces]
        native = (CPiece * len(pieces))(*map(_native_piece, pieces, captures))
        batch = CBatch(
            num_rows=len(tokens),
            num_pieces=len(pieces),
            num_asked=len(asked),
            num_draws=0 if draws is None else len(draws),
            tokens=tokens.ctypes.data,
            pieces=addressof(native),
            asked=asked.ctypes.data,
            draws=None if draws is None else addressof(draws),
            adapters=None if adapters is None else adapters.ctypes.data,
            types=None if types is None else types.ctypes.data,
        )
        end = len(self.spec.steps) if last is None else last
        refusal = self._lib.ostro_run(self._plan, byref(batch), first, end)
        if refusal is not None:
            # Our own bug, not the file's or the caller's: without the check, it would be an out-of-bounds write.
            raise AssertionError(refusal.decode())

    def rowwise_run(self, first: int, last: int, rows: int) -> "RowwiseRun":
        """A run of steps that read nothing of a batch but its number of rows, such as those of experts."""
        run = CRowwiseRun()
        refusal = self._lib.ostro_prepare_rowwise(self._plan, first, last, rows, byref(run))
        if refusal is not None:
            raise AssertionError(refusal.decode())
        return RowwiseRun(self, run, cast(self._lib.ostro_run_rowwise, c_void_p).value or 0)

    def buffer(self, number: int) -> Floats:
        """A view of a buffer, [rows, columns], as the last run left it."""
        rows, cols = self._rows[number]
        address = self._lib.ostro_buffer(self._plan, number)
        return np.ctypeslib.as_array((c_float * (rows * cols)).from_address(address)).reshape(rows, cols)

    def copy_page(self, source: int, target: int) -> None:
        if not self._lib.ostro_copy_page(self._plan, source, target):
            raise AssertionError(f"There are no pages {source} and {target}.")

    def copy_state(self, source: int, target: int) -> None:
        if not self._lib.ostro_copy_state(self._plan, source, target):
            raise AssertionError(f"There are no states {source} and {target}.")

    def state(self, slot: int) -> npt.NDArray[np.uint8]:
        """A view of a slot's memory: the recurrent states of all layers."""
        if not hasattr(self._lib, "ostro_state"):
            raise Unsupported("The native core was built before its states could be read. Install Ostro again.")
        address = self._lib.ostro_state(self._plan, slot)
        assert address is not None, f"There is no state {slot}."
        return np.ctypeslib.as_array((c_uint8 * self.spec.state_bytes).from_address(address))

    @property
    def page_bytes(self) -> int:
        if not hasattr(self._lib, "ostro_page"):
            raise Unsupported("The native core was built before its pages could be read. Install Ostro again.")
        return int(self._lib.ostro_page_bytes(self._plan))

    def page(self, number: int) -> npt.NDArray[np.uint8]:
        """A view of the keys and values of a page's tokens, in all layers."""
        address = self._lib.ostro_page(self._plan, number)
        assert address is not None, f"There is no page {number}."
        return np.ctypeslib.as_array((c_uint8 * self.page_bytes).from_address(address))

    def profile(self) -> dict[str, float]:
        """Seconds per operation since the last call."""
        seconds = (c_double * len(Op))()
        self._lib.ostro_profile(self._plan, seconds)
        return {op.name.lower(): seconds[op] for op in Op}

    def _step(self, spec: StepSpec) -> CStep:
        values = {name: getattr(spec, name) for name in StepSpec.__slots__ if name not in _POINTERS}
        step = CStep(**values)
        if spec.norm is not None:
            norm = self._vector(spec.norm)
            step.norm, step.norm_size = norm.ctypes.data, len(norm)
        if spec.bias is not None:
            bias = self._vector(spec.bias)
            step.bias, step.bias_size = bias.ctypes.data, len(bias)
        if spec.weights is not None:
            weights = self._vector(spec.weights)
            step.weights, step.weights_size = weights.ctypes.data, len(weights)
        if spec.recurrence is not None:
            own = CRecurrence(**asdict(spec.recurrence))
            self._recurrences.append(own)
            step.recurrence = addressof(own)
        if spec.matrix is not None:
            if not 0 <= spec.matrix < len(self._matrices):
                raise bad_program(f"a step reads matrix {spec.matrix}, and there are {len(self._matrices)}")
            matrix = self._matrices[spec.matrix]
            if spec.op is Op.EMBED and matrix.rows < self.spec.vocab_size:
                raise bad_program(f"the embedding has {matrix.rows} rows for {self.spec.vocab_size} tokens")
            step.matrix = addressof(matrix)
        return step

    def _vector(self, number: int) -> Floats:
        if not 0 <= number < self._packed.num_vectors:
            raise bad_program(f"a step reads vector {number}, and there are {self._packed.num_vectors}")
        return self._packed.vector(number)


def _native_piece(piece: Piece, captures: "Array[CCapture]") -> CPiece:
    return CPiece(
        row=piece.row,
        start=piece.start,
        length=piece.length,
        num_pages=len(piece.pages),
        pages=piece.pages.ctypes.data,
        state=piece.state,
        num_captures=len(captures),
        captures=addressof(captures),
        drafts=piece.drafts,
        applied=piece.applied,
        lane=piece.lane,
    )


def _native_terms(terms: Sequence[Term | None]) -> "Array[CTerm]":
    return (CTerm * len(terms))(
        *(CTerm() if each is None else CTerm(len(each.a), 0, each.a.ctypes.data, each.b.ctypes.data) for each in terms)
    )


def _check(spec: ProgramSpec) -> None:
    """Checks what the native core cannot see, and that no number is truncated to 32 bits. The core checks the rest."""
    parts: list[ProgramSpec | BufferSpec | RotationSpec | StepSpec | RecurrenceSpec]
    parts = [spec, *spec.buffers, *spec.rotations, *spec.steps]
    parts += [step.recurrence for step in spec.steps if step.recurrence is not None]
    for part in parts:
        for each in fields(part):
            value = getattr(part, each.name)
            if isinstance(value, int) and not -(2**31) <= value < 2**31:
                raise bad_program(f"{each.name} is {value}")
    for name, number, width in (
        ("states", spec.states, spec.hidden_size),
        ("hidden", spec.hidden, spec.hidden_size),
        ("logits", spec.logits, spec.vocab_size if spec.labels is None else spec.labels),
    ):
        if number is not None and not (0 <= number < len(spec.buffers) and 0 < width <= spec.buffers[number].cols):
            raise bad_program(f"there is no buffer {number} for {width} columns of {name}")
    if not 0 <= spec.head_step <= spec.logits_step <= len(spec.steps):
        raise bad_program(f"the head is steps {spec.head_step} and {spec.logits_step} of {len(spec.steps)}")


def _rotation_tables(frequencies: Floats, factor: float, positions: int) -> tuple[Floats, Floats]:
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies
    scale = np.float32(factor)
    return np.cos(angles) * scale, np.sin(angles) * scale


__all__ = ["PAGE", "Adapted", "Allocate", "Piece", "Program", "ProgramSpec", "RowwiseRun", "Term"]
