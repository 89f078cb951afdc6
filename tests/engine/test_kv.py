import pytest
from engine_driver import make_request

from ostro.engine.kv import Admission, KVCache, KVUsage
from ostro.engine.sequence import Sequence

SIZE = 4


class Memory:
    """A KV cache of pages of four tokens, and the sequences that live in it."""

    def __init__(self, num_pages: int = 16, *, prefix_caching: bool = True) -> None:
        self.kv = KVCache(num_pages=num_pages, page_size=SIZE, prefix_caching=prefix_caching)
        self.live: list[Sequence] = []
        self._next_id = 0

    def sequence(self, prompt: range | list[int], *, max_len: int = 32, salt: str = "", request: int = 0) -> Sequence:
        self._next_id += 1
        return Sequence(self._next_id, make_request(request, list(prompt), cache_salt=salt), max_len=max_len)

    def admit(self, seq: Sequence, *, hit_limit: int | None = None, spare: int = 0) -> Admission:
        limit = seq.num_tokens - 1 if hit_limit is None else hit_limit
        admission = self.kv.admit(seq, hit_limit=limit, spare=spare)
        if admission is Admission.GRANTED:
            self.live.append(seq)
        self.check()
        return admission

    def compute(self, seq: Sequence, end: int | None = None) -> None:
        seq.num_computed = seq.num_tokens if end is None else end
        self.kv.commit(seq)
        self.check()

    def fork(self, parent: Sequence, *, max_len: int = 32) -> tuple[bool, Sequence]:
        child = self.sequence(parent.token_ids, max_len=max_len)
        forked = self.kv.fork(parent, child)
        if forked:
            self.live.append(child)
        self.check()
        return forked, child

    def release(self, seq: Sequence) -> None:
        self.live.remove(seq)
        self.kv.release(seq)
        self.check()

    def ran(self, prompt: range | list[int], *, salt: str = "", request: int = 0) -> Sequence:
        """A sequence that was computed and is gone: its full pages are cached."""
        seq = self.sequence(prompt, salt=salt, request=request)
        assert self.admit(seq) is Admission.GRANTED
        self.compute(seq)
        self.release(seq)
        return seq

    def check(self) -> None:
        self.kv.check_integrity(self.live)


@pytest.fixture
def memory() -> Memory:
    return Memory()


def test_admitted_sequence_gets_a_contiguous_run_for_all_its_tokens(memory: Memory) -> None:
    seq = memory.sequence(range(9))
    memory.admit(seq)
    assert seq.pages == [0, 1, 2]
    assert memory.kv.usage == KVUsage(total=16, free=13, cached=0, in_use=3)


def test_sequences_that_grow_in_turn_each_stay_contiguous() -> None:
    memory = Memory(32)
    seqs = [memory.sequence([first] * 5, max_len=32) for first in range(3)]
    for seq in seqs:
        memory.admit(seq)
    for num_tokens in range(6, 33):
        for seq in seqs:
            assert memory.kv.extend(seq, num_tokens)
    assert [seq.pages for seq in seqs] == [list(range(start, start + 8)) for start in (0, 8, 16)]


def test_runs_that_are_cut_short_go_on_where_there_is_room() -> None:
    """They went on in any free page, side by side, and so were cut short again with every page."""
    memory = Memory(32)
    blockers = [computed(memory, 3, max_len=4) for _ in range(32)]
    seqs = []
    for gap in ((0, 1), (3, 4)):
        for page in gap:
            memory.release(blockers[page])
        seqs.append(computed(memory, 5, max_len=48, salt=str(gap)))
        assert seqs[-1].pages == list(gap)
    for page in range(6, 32):
        memory.release(blockers[page])
    for num_tokens in range(6, 49):
        for seq in seqs:
            assert memory.kv.extend(seq, num_tokens)
    for seq in seqs:
        later = seq.pages[2:]
        assert later == list(range(later[0], later[0] + 10))


def test_full_pages_of_a_sequence_that_is_gone_are_found_by_the_next(memory: Memory) -> None:
    memory.ran(range(10))
    seq = memory.sequence(range(12))
    memory.admit(seq)
    assert seq.num_computed == 8
    assert len(seq.pages) == 3


def test_full_page_is_shared_while_its_sequence_still_runs(memory: Memory) -> None:
    first, second = memory.sequence(range(10)), memory.sequence(range(10))
    memory.admit(first)
    memory.compute(first)
    memory.admit(second)
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    memory.release(first)
    memory.release(second)


def test_hit_keeps_within_its_limit(memory: Memory) -> None:
    memory.ran(range(8))
    for hit_limit, num_computed in ((8, 8), (7, 4), (3, 0)):
        seq = memory.sequence(range(8))
        memory.admit(seq, hit_limit=hit_limit)
        assert seq.num_computed == num_computed
        memory.release(seq)


def test_prefixes_are_not_shared_between_salts(memory: Memory) -> None:
    memory.ran(range(8), salt="mine")
    seq = memory.sequence(range(8), salt="yours")
    memory.admit(seq)
    assert seq.num_computed == 0


def test_without_prefix_caching_only_the_choices_of_one_request_share() -> None:
    memory = Memory(prefix_caching=False)
    memory.ran(range(8), request=1)
    same, other = memory.sequence(range(9), request=1), memory.sequence(range(9), request=2)
    memory.admit(same)
    memory.admit(other)
    assert (same.num_computed, other.num_computed) == (8, 0)


def test_sequence_that_does_not_fit_is_not_admitted_and_changes_nothing(memory: Memory) -> None:
    memory.ran(range(8))
    before = memory.kv.usage
    seq = memory.sequence(range(16 * SIZE + 1), max_len=100)
    assert memory.admit(seq) is Admission.NO_ROOM
    assert (seq.pages, seq.num_computed, memory.kv.usage) == ([], 0, before)


def test_sequence_that_just_fits_is_admitted(memory: Memory) -> None:
    memory.ran(range(8))
    assert memory.admit(memory.sequence(range(100, 100 + 16 * SIZE))) is Admission.GRANTED


def test_pages_to_spare_are_left(memory: Memory) -> None:
    assert memory.admit(memory.sequence(range(8)), spare=15) is Admission.NO_ROOM
    assert memory.admit(memory.sequence(range(8)), spare=14) is Admission.GRANTED


def test_cached_pages_that_a_hit_locks_are_not_counted_as_room() -> None:
    """The two pages of the hit were evictable before; they cannot be both shared and evicted."""
    memory = Memory(4)
    memory.ran(range(8))
    assert memory.admit(memory.sequence(range(17))) is Admission.NO_ROOM
    assert memory.admit(memory.sequence(range(16))) is Admission.GRANTED


def test_cached_pages_are_evicted_when_free_ones_run_out() -> None:
    memory = Memory(4)
    memory.ran(range(8))
    memory.admit(memory.sequence(range(50, 63)))
    assert memory.kv.usage == KVUsage(total=4, free=0, cached=0, in_use=4)
    assert memory.kv.num_evicted == 2


def test_extend_without_free_pages_changes_nothing() -> None:
    memory = Memory(2)
    seq = memory.sequence(range(8))
    memory.admit(seq)
    assert not memory.kv.extend(seq, 9)
    assert len(seq.pages) == 2
    assert memory.kv.extend(seq, 8)


def test_page_that_two_computed_at_the_same_time_is_kept_once(memory: Memory) -> None:
    first, second = memory.sequence(range(6)), memory.sequence(range(6))
    memory.admit(first)
    memory.admit(second)
    memory.compute(first)
    memory.compute(second)
    assert first.pages[0] == second.pages[0]
    assert memory.kv.usage.in_use == 3


def test_clear_cache_forgets_what_nobody_uses(memory: Memory) -> None:
    memory.ran(range(8))
    running = memory.sequence(range(20, 28))
    memory.admit(running)
    memory.compute(running)
    memory.kv.clear_cache()
    memory.check()
    assert memory.kv.usage == KVUsage(total=16, free=14, cached=0, in_use=2)
    again = memory.sequence(range(9))
    memory.admit(again)
    assert again.num_computed == 0


def computed(memory: Memory, num_tokens: int, *, max_len: int = 32, salt: str = "") -> Sequence:
    seq = memory.sequence(range(num_tokens), max_len=max_len, salt=salt)
    memory.admit(seq)
    memory.compute(seq)
    return seq


def test_fork_shares_full_pages_and_copies_the_partly_filled_one(memory: Memory) -> None:
    parent = computed(memory, 10)
    forked, child = memory.fork(parent)
    assert forked
    assert child.pages[:2] == parent.pages[:2]
    assert child.num_computed == 10
    assert memory.kv.take_copies() == ((parent.pages[2], child.pages[2]),)


def test_copies_are_taken_once(memory: Memory) -> None:
    memory.fork(computed(memory, 10))
    memory.kv.take_copies()
    assert memory.kv.take_copies() == ()


def test_fork_at_a_page_boundary_copies_nothing_and_needs_no_page() -> None:
    memory = Memory(2)
    forked, child = memory.fork(computed(memory, 8))
    assert forked
    assert memory.kv.take_copies() == ()
    assert len(child.pages) == 2


def test_fork_without_a_page_for_the_copy_changes_nothing() -> None:
    memory = Memory(2)
    forked, child = memory.fork(computed(memory, 7))
    assert not forked
    assert (child.pages, child.num_computed) == ([], 0)
    assert memory.kv.take_copies() == ()


def test_forks_are_placed_with_room_to_grow() -> None:
    memory = Memory(32)
    parent = computed(memory, 7, max_len=32)
    children = [memory.fork(parent, max_len=32)[1] for _ in range(2)]
    for num_tokens in range(8, 33):
        for seq in (parent, *children):
            assert memory.kv.extend(seq, num_tokens)
    for seq in (parent, *children):
        own = seq.pages[1:]
        assert own == list(range(own[0], own[0] + 7))


def test_fork_that_is_released_before_its_copy_ran_takes_the_copy_along(memory: Memory) -> None:
    parent = computed(memory, 10)
    (_, first), (_, second) = memory.fork(parent), memory.fork(parent)
    memory.release(first)
    assert memory.kv.take_copies() == ((parent.pages[2], second.pages[2]),)


def test_copy_from_a_released_parent_comes_before_the_copy_onto_its_page() -> None:
    """A parent that ends with its first token gives its page back at once; a later fork may be given that page."""
    memory = Memory(3)
    parent, other = computed(memory, 3), computed(memory, 2)
    assert (parent.pages, other.pages) == ([0], [1])
    memory.fork(parent)
    memory.release(parent)
    memory.fork(other)
    assert memory.kv.take_copies() == ((0, 2), (1, 0))


def test_next_page_is_named_by_what_it_follows_and_holds(memory: Memory) -> None:
    seq = memory.sequence(range(9), salt="mine")
    memory.admit(seq)
    assert memory.kv.next_page(seq, 3) is None
    assert memory.kv.next_page(seq, 9) == ("mine", -1, (0, 1, 2, 3))
    memory.compute(seq, 5)
    assert memory.kv.next_page(seq, 7) is None
    assert memory.kv.next_page(seq, 8) == ("mine", seq.pages[0], (4, 5, 6, 7))


def test_sequence_waits_for_a_page_that_another_is_filling(memory: Memory) -> None:
    first, second = memory.sequence(range(9)), memory.sequence(range(6))
    memory.admit(first)
    filling = {memory.kv.next_page(first, 9)}
    before = memory.kv.usage
    assert memory.kv.admit(second, hit_limit=5, filling=filling) is Admission.SOON_CACHED
    assert (second.pages, memory.kv.usage) == ([], before)
    memory.compute(first)
    assert memory.kv.admit(second, hit_limit=5, filling=filling) is Admission.GRANTED
    assert second.num_computed == 4


@pytest.mark.parametrize(
    ("prompt", "hit_limit", "salt"),
    [(range(6), 3, ""), (range(6), 5, "mine"), ([0, 1, 2, 9, 4, 5], 5, ""), (range(3), 2, "")],
    ids=["its hit ends before", "another salt", "other tokens", "less than a page"],
)
def test_sequence_does_not_wait_for_a_page_that_it_cannot_share(
    memory: Memory, prompt: range | list[int], hit_limit: int, salt: str
) -> None:
    first = memory.sequence(range(9))
    memory.admit(first)
    seq = memory.sequence(prompt, salt=salt)
    filling = {memory.kv.next_page(first, 9), None}
    assert memory.kv.admit(seq, hit_limit=hit_limit, filling=filling) is Admission.GRANTED


def test_integrity_check_sees_a_page_with_two_owners(memory: Memory) -> None:
    first, second = computed(memory, 3), memory.sequence(range(50, 53))
    memory.admit(second)
    second.pages = first.pages
    with pytest.raises(AssertionError, match="belongs to"):
        memory.check()


def test_integrity_check_sees_a_lost_page(memory: Memory) -> None:
    seq = computed(memory, 3)
    seq.pages = []
    with pytest.raises(AssertionError, match="pages were lost"):
        memory.check()


def test_integrity_check_sees_a_sequence_that_kept_its_pages(memory: Memory) -> None:
    seq = computed(memory, 8)
    memory.live.remove(seq)
    with pytest.raises(AssertionError, match="locks"):
        memory.check()
