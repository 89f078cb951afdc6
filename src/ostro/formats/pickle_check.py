"""Checks a pickle of tensors before an unpickler reads it: what it would allocate and compute. Runs none of it.

A pickle is a program for a small stack machine. Few bytes of it can ask for much: a memo entry with the number
2,147,483,647 makes Python's unpickler allocate as many, and forty tuples that each hold the one before twice take 2^40
steps to hash, as keys of dictionaries are. So the program is followed on a stack that holds, instead of each value, its
size when written out, and nothing else:

    (t, t)      size 1 + 2 × the size of t        refused beyond MAX_VALUES
    memo[n]     the size of what it holds         n is at most the number of entries so far
    texts       end within the file
    in all      MAX_WORK instructions and values

Only the instructions that torch.save writes are known; torch's own reader of weights takes no others.
"""

import struct
from collections.abc import Callable, Mapping
from pickle import UnpicklingError

MAX_VALUES = 1 << 13
"""Values in one tuple, those in tuples within it included. A hash visits all of them, and nests as deeply."""
MAX_WORK = 1 << 24
"""A hundred thousand tensors take about half of it."""


def check_pickle(data: bytes, begin: int = 0) -> int:
    """Where the pickle that begins there ends. Raises UnpicklingError for one that no torch.save wrote."""
    scan = _Scan(data, begin)
    while not scan.has_ended:
        scan.step()
    return scan.at


class _Scan:
    """One pass over the instructions. An empty stack or a missing mark is an error of Python's, as in any reader."""

    def __init__(self, data: bytes, begin: int) -> None:
        self._data = data
        self.at = begin
        self.has_ended = False
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo: dict[int, int] = {}
        self._work = 0

    def step(self) -> None:
        self._spend(1)
        code = self.take(1)
        operation = _OPERATIONS.get(code)
        if operation is None:
            raise UnpicklingError(f"the instruction {code!r} at byte {self.at - 1} is none that torch.save writes")
        operation(self)

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise UnpicklingError(f"it takes more than {MAX_WORK} steps to read")

    def take(self, count: int) -> bytes:
        begin = self.at
        if count > len(self._data) - begin:
            raise UnpicklingError("it is cut short")
        self.at = begin + count
        return self._data[begin : self.at]

    def number(self, layout: str) -> int:
        found: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return found

    def line(self) -> None:
        end = self._data.find(b"\n", self.at)
        if end < 0:
            raise UnpicklingError("it is cut short")
        self.at = end + 1

    # stack

    def push(self, size: int = 1) -> None:
        if size > MAX_VALUES:
            raise UnpicklingError(f"it holds a tuple of more than {MAX_VALUES} values")
        self._spend(size)
        self._stack.append(size)

    def pop(self, count: int) -> int:
        """The size of all that was popped."""
        if count > len(self._stack) - (self._marks[-1] if self._marks else 0):
            raise UnpicklingError("it takes more values than it made")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return sum(taken)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def pop_marked(self) -> int:
        if not self._marks:
            raise UnpicklingError("it takes more values than it made")
        begin = self._marks.pop()
        taken = self._stack[begin:]
        del self._stack[begin:]
        return sum(taken)

    # memo

    def put(self, entry: int) -> None:
        if entry > len(self._memo):
            raise UnpicklingError(f"it fills entry {entry} of its memo after {len(self._memo)} of them")
        self._memo[entry] = self.pop(1)
        self.push(self._memo[entry])

    def get(self, entry: int) -> None:
        if entry not in self._memo:
            raise UnpicklingError(f"it reads entry {entry} of its memo before it is filled")
        self.push(self._memo[entry])

    def end(self) -> None:
        self.pop(1)
        self.has_ended = True


_Operation = Callable[[_Scan], None]


def _push_after(count: int) -> _Operation:
    def operation(scan: _Scan) -> None:
        scan.take(count)
        scan.push()

    return operation


def _push_text(layout: str) -> _Operation:
    def operation(scan: _Scan) -> None:
        scan.take(scan.number(layout))
        scan.push()

    return operation


def _push_tuple(count: int) -> _Operation:
    return lambda scan: scan.push(1 + scan.pop(count))


def _put(layout: str) -> _Operation:
    return lambda scan: scan.put(scan.number(layout))


def _get(layout: str) -> _Operation:
    return lambda scan: scan.get(scan.number(layout))


def _drop(count: int) -> _Operation:
    """Moves values into the list, dictionary or object below them, none of which can be hashed by its content."""

    def operation(scan: _Scan) -> None:
        scan.pop(count)

    return operation


def _drop_marked(scan: _Scan) -> None:
    scan.pop_marked()


def _skip_protocol(scan: _Scan) -> None:
    scan.take(1)


def _push_global(scan: _Scan) -> None:
    scan.line()
    scan.line()
    scan.push()


def _replace_id(scan: _Scan) -> None:
    scan.pop(1)
    scan.push()


def _push_result(scan: _Scan) -> None:
    """A call may return its arguments."""
    scan.push(scan.pop(2))


_OPERATIONS: Mapping[bytes, _Operation] = {
    b"\x80": _skip_protocol,
    **dict.fromkeys((b"N", b"\x88", b"\x89", b")", b"]", b"}"), _push_after(0)),
    b"K": _push_after(1),
    b"M": _push_after(2),
    b"J": _push_after(4),
    b"G": _push_after(8),
    b"X": _push_text("<I"),
    b"U": _push_text("<B"),
    b"\x8a": _push_text("<B"),
    b"\x85": _push_tuple(1),
    b"\x86": _push_tuple(2),
    b"\x87": _push_tuple(3),
    b"(": _Scan.mark,
    b"t": lambda scan: scan.push(1 + scan.pop_marked()),
    b"q": _put("<B"),
    b"r": _put("<I"),
    b"h": _get("<B"),
    b"j": _get("<I"),
    b"a": _drop(1),
    b"b": _drop(1),
    b"s": _drop(2),
    b"e": _drop_marked,
    b"u": _drop_marked,
    b"c": _push_global,
    b"Q": _replace_id,
    **dict.fromkeys((b"R", b"\x81"), _push_result),
    b".": _Scan.end,
}
