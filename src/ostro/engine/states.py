"""State slots beside pages: whose they are, which snapshots the prefix tree keeps, and where the next are captured.
Knows no schedule and no tensors.

The state of a recurrent layer is of use at one position only: it cannot be cut, shared or taken back. So each running
sequence has a slot of its own, and a node of the tree may carry a snapshot, the state at the end of its page. A prefix
hit ends at a snapshot. Where snapshots are matters more than how many there are:

    prompt   [system prompt | question | answer | question | generation prefix]
                            └ where prompts part           └ end of a message        and every 2,048 tokens
    output   [… 256 tokens … | … 256 tokens … | … ]
                                              └ one that follows the output

A sequence's step captures them on its way, if there is a slot for them: chunks are not cut for their sake.

Where there are lower tiers, a preempted sequence parks: it keeps its slot until others need that more than snapshots,
and then a copy in host memory, if there is room for one.

Every slot is free, a running or parked sequence's, a snapshot, arriving from a lower tier, or due: a step that was
scheduled captures a state there, and the node at its position is not in the tree yet.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from ostro.engine.radix import NOWHERE, Node, RadixCache, Salt
from ostro.engine.request import Request, Task
from ostro.engine.sequence import Sequence

# Ends of messages that are worth a snapshot each, counted from the last.
_MOST_ANCHORS = 4
# Hits beyond this many make a snapshot no more valuable, so that one that was popular once is forgotten in time.
_MOST_HITS = 7


@dataclass(frozen=True, slots=True)
class Spacing:
    """How far snapshots are apart where nothing else calls for one, in tokens."""

    prompt: int = 2048
    output: int = 256


class LowerStates(Protocol):
    """The tier below the slots: what it is notified of."""

    def demote_state(self, node: Node) -> object:
        """The node is about to lose its state: keeps a copy, if that is worth its room."""

    def demote_parked(self, parked: "Parked") -> object:
        """The same for a parked sequence: keeps a copy, if there is room."""

    def forget_parked(self, parked: "Parked") -> None:
        """The sequence does not resume: takes back the slot of the copy."""


@dataclass(slots=True)
class _Snapshot:
    node: Node
    gap: int
    """Tokens that a hit computes again without it."""
    worth: int
    """The least is given up first: recency, as the age of the cache when it was last used, plus its use by then."""


@dataclass(slots=True)
class _Held:
    """What a running sequence has beside its slot."""

    seq: Sequence
    salt: Salt
    num_lost: int = 0
    """Tokens whose pages were found in the tree, but behind the last snapshot."""
    planned: list[int] = field(default_factory=list)
    """Positions to capture, in order."""
    rolled: float = math.inf
    """Where the output's latest snapshot was captured, or where the output begins; infinite if none is wanted."""
    rolling: Node | None = None
    """Where that snapshot is."""
    due: list[tuple[int, int]] = field(default_factory=list)
    """(position, slot) pairs, in order."""


@dataclass(slots=True, eq=False)
class Parked:
    """A preempted sequence's state, at whatever position it was."""

    held: _Held
    state: int
    """Its slot on the device; NOWHERE once it has gone down."""
    state_slot: int = NOWHERE
    """The slot of its copy in the tier below; NOWHERE if it has none."""
    is_state_arriving: bool = False
    hits: int = 0

    @property
    def is_lost(self) -> bool:
        return self.state == NOWHERE and self.state_slot == NOWHERE


class States:
    def __init__(self, num_states: int, *, page_size: int, every: int = 1, spacing: Spacing | None = None) -> None:
        """`every` is what positions that can be captured are multiples of."""
        self.num_states = num_states
        self._page_size = page_size
        # Snapshots are at the ends of pages.
        self._grid = math.lcm(page_size, every)
        self._spacing = spacing or Spacing()
        self._free = list(range(num_states))[::-1]
        self._snapshots: dict[int, _Snapshot] = {}
        self._held: dict[int, _Held] = {}
        # Those of them that have anything due.
        self._capturing: dict[int, _Held] = {}
        self._copies: list[tuple[int, int]] = []
        self._arriving: set[int] = set()
        # By sequence, the one that was preempted first first.
        self._parked: dict[int, Parked] = {}
        # The worth of the snapshot that was given up last (GreedyDual): what is used from now on is worth that more.
        self._age = 0

    def attach(self, tree: RadixCache, below: LowerStates | None = None) -> None:
        self._tree, self._below = tree, below

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def has_room(self) -> bool:
        """Whether a sequence can have a slot: any snapshot can be given up for it, and the one that it needs moved; and
        so can the state of a parked sequence.
        """
        return bool(self._free or self._snapshots or any(each.state != NOWHERE for each in self._parked.values()))

    def is_coming(self, seq: Sequence, start: int, limit: int, salt: Salt) -> bool:
        """Whether a scheduled step captures a state that the sequence could continue from, after more tokens than
        `start` and at most `limit`.
        """
        return any(
            start < position <= limit and seq.token_ids[:position] == held.seq.token_ids[:position]
            for held in self._capturing.values()
            if held.salt == salt
            for position, _ in held.due
        )

    def begin(self, seq: Sequence, start: Node, matched: int, *, keeps: bool) -> None:
        """Gives the sequence a slot with the state at a node, or an empty one at a root. `matched` is how many of its
        tokens have pages in the tree. With `keeps`, snapshots are taken of it.
        """
        position = start.depth * self._page_size
        slot = self._take(sparing=start.state)
        if slot is None:
            # The only snapshot left is the one that it needs.
            self._note_hit(start)
            slot = self._give_up(start)
        elif position:
            self._note_hit(start)
            self._copies.append((start.state, slot))
        seq.state = slot
        held = _Held(seq, start.salt, num_lost=matched - position)
        if keeps and seq.request.task is not Task.EMBED:
            held.planned = self._plan(seq, position, matched)
            held.rolled = max(seq.num_prompt, position)
        self._held[seq.id] = held

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Gives the child a slot and the parent's state."""
        slot, origin = self._take(), self._held[parent.id]
        assert slot is not None, "the caller asks whether there is room"
        self._copies.append((parent.state, slot))
        child.state = slot
        rolled = child.num_prompt if origin.rolled < math.inf else math.inf
        self._held[child.id] = _Held(child, origin.salt, rolled=rolled)

    def end(self, seq: Sequence) -> None:
        """Takes back the sequence's slot, and those of captures that have found no node."""
        held = self._held.pop(seq.id)
        self._capturing.pop(seq.id, None)
        if self._copies:
            self._copies = [copy for copy in self._copies if copy[1] != seq.state]
        self._free += [seq.state, *(slot for _, slot in held.due)]
        seq.state = NOWHERE

    def can_park(self, seq: Sequence) -> bool:
        """Whether the sequence's slot has the state at its position, or will have after the steps so far."""
        is_copied = any(target == seq.state for _, target in self._copies)
        return not (is_copied or self._held[seq.id].due or seq.num_unapplied)

    def park(self, seq: Sequence) -> None:
        """Keeps the state of a preempted sequence, as long as there is room."""
        self._parked[seq.id] = Parked(self._held.pop(seq.id), seq.state)
        seq.state = NOWHERE

    def parked(self, seq: Sequence) -> Parked | None:
        return self._parked.get(seq.id)

    @property
    def all_parked(self) -> Collection[Parked]:
        return self._parked.values()

    def resume(self, seq: Sequence) -> None:
        """Gives a parked sequence its slot again, which must be on the device."""
        parked = self._parked.pop(seq.id)
        self._held[seq.id], seq.state = parked.held, parked.state
        self._forget_copy(parked)

    def unpark(self, seq: Sequence) -> None:
        """The sequence does not resume: gives up its state."""
        parked = self._parked.pop(seq.id)
        if parked.state != NOWHERE:
            self._free.append(parked.state)
        self._forget_copy(parked)

    def arrive_parked(self, parked: Parked, slot: int, *, is_good: bool) -> None:
        """A parked sequence's state was fetched into a reserved slot; or was not, if not `is_good`."""
        self._arriving.remove(slot)
        is_parked = self._parked.get(parked.held.seq.id) is parked
        if is_good and is_parked:
            parked.state = slot
        else:
            self._free.append(slot)
        if not is_parked:
            self._forget_copy(parked)

    def _forget_copy(self, parked: Parked) -> None:
        # While it is being read, the slot stays its own.
        if self._below is not None and not parked.is_state_arriving:
            self._below.forget_parked(parked)

    def num_lost(self, seq: Sequence) -> int:
        return self._held[seq.id].num_lost

    def capture(self, seq: Sequence, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """`Chunk.captures` of a chunk that computes these tokens. What finds no slot is left out."""
        held = self._held[seq.id]
        last = end - end % self._grid
        if not (held.planned and held.planned[0] <= end) and last - held.rolled < self._spacing.output:
            return ()
        due: list[tuple[int, int]] = []
        while held.planned and held.planned[0] <= end:
            position = held.planned.pop(0)
            if (slot := self._take()) is not None:
                due.append((position, slot))
        if last > start and last - held.rolled >= self._spacing.output:
            held.rolled = last
            if not (due and due[-1][0] == last) and (slot := self._give_up_rolling(held)) is not None:
                due.append((last, slot))
        held.due += due
        if due:
            self._capturing[seq.id] = held
        return tuple((position - start, slot) for position, slot in due)

    def note_page(self, seq: Sequence, node: Node) -> None:
        """The sequence's next full page is in the tree: gives the node the state that was captured there, if any."""
        held = self._held[seq.id]
        if not held.due or held.due[0][0] != node.depth * self._page_size:
            return
        position, slot = held.due.pop(0)
        if not held.due:
            del self._capturing[seq.id]
        if node.state != NOWHERE:
            # Another sequence has computed the same tokens meanwhile.
            self._free.append(slot)
            return
        self._keep(node, slot)
        if position == held.rolled:
            held.rolling = node

    def reserve(self, *, sparing: int, gives_up: bool) -> int | None:
        """A slot for a state from a lower tier, until `arrive`: a free one, or if it `gives_up` any, that of the
        snapshot worth least, other than the one to spare. None if there is neither.
        """
        # The next step still reads these, and the state may arrive sooner.
        read = {source for source, _ in self._copies}
        slot = next((each for each in self._free if each not in read), None)
        if slot is not None:
            self._free.remove(slot)
        elif gives_up:
            slot = self._take_snapshot(read | {sparing})
        if slot is not None:
            self._arriving.add(slot)
        return slot

    def arrive(self, node: Node, slot: int, *, is_good: bool) -> None:
        """A state was fetched into a reserved slot; or was not, if not `is_good`."""
        self._arriving.remove(slot)
        if is_good and node.state == NOWHERE:
            self._keep(node, slot)
        else:
            self._free.append(slot)

    def lose(self, node: Node) -> None:
        """The tree is about to lose the node's page, without which its state is worth nothing."""
        self._free.append(self._detach(node))

    def forget_all(self) -> None:
        """Forgets every snapshot."""
        for snapshot in list(self._snapshots.values()):
            self.lose(snapshot.node)

    def abandon(self) -> None:
        """After a failed step: forgets the pending copies and every snapshot."""
        self._copies = []
        self.forget_all()

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """State copies asked for since the last call; they must run before the next step computes anything."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def check_integrity(self, live: list[Sequence]) -> None:
        """Asserts that every slot is free, a snapshot, a live sequence's, arriving or due, and only one of these."""
        assert set(self._held) == {seq.id for seq in live}, "a sequence left without releasing its state"
        running = [seq.state for seq in live]
        due = [slot for held in self._held.values() for _, slot in held.due]
        parked = [each.state for each in self._parked.values() if each.state != NOWHERE]
        slots = [*self._free, *self._snapshots, *running, *due, *parked, *self._arriving]
        assert sorted(slots) == list(range(self.num_states)), "state slots were lost or are owned twice"
        assert {id for id, held in self._held.items() if held.due} == set(self._capturing)
        nodes = {node.state: node for node in self._tree.nodes() if node.state != NOWHERE}
        assert nodes == {slot: each.node for slot, each in self._snapshots.items()}, "a snapshot is not in the tree"
        assert all(node.is_resident and not node.is_arriving for node in nodes.values()), "a snapshot without its page"
        assert {target for _, target in self._copies} <= set(running), "a state is copied to nobody's slot"

    def _plan(self, seq: Sequence, start: int, matched: int) -> list[int]:
        """Positions behind `start` that are worth a snapshot: where the prompt parts from others, the ends of messages,
        and so many tokens apart. Without ends of messages, the last page and the one before, for the last often holds
        what a template adds to the last message only.
        """
        length, first = seq.num_prompt, start + self._grid
        ends = [at for at in _ends_of_messages(seq.request, first) if at >= first] or [length, length - self._grid]
        # Others compute at least the last token themselves.
        shared = (length - 1,) if seq.request.shares_prompt else ()
        wanted = (matched, *ends, *shared, *range(self._spacing.prompt, length + 1, self._spacing.prompt))
        return sorted({at - at % self._grid for at in wanted if first <= at <= length})

    def _give_up_rolling(self, held: _Held) -> int | None:
        """A slot for the output's next snapshot: that of its last one, unless others have come to use it."""
        node, held.rolling = held.rolling, None
        if node is not None and node.state != NOWHERE and not node.hits:
            return self._detach(node)
        return self._take()

    def _take(self, *, sparing: int = NOWHERE) -> int | None:
        """A free slot, or that of the snapshot worth least, other than the one to spare; None if there is neither."""
        return self._free.pop() if self._free else self._take_snapshot({sparing})

    def _take_snapshot(self, sparing: set[int]) -> int | None:
        spared = (each for slot, each in self._snapshots.items() if slot not in sparing)
        victim = min(spared, key=lambda each: each.worth, default=None)
        if victim is None:
            return self._take_parked(sparing)
        self._age = victim.worth
        return self._give_up(victim.node)

    def _take_parked(self, sparing: set[int]) -> int | None:
        """The slot of the sequence that was preempted last."""
        on_device = (each for each in self._parked.values() if each.state != NOWHERE and each.state not in sparing)
        parked = next(reversed(list(on_device)), None)
        if parked is None:
            return None
        if self._below is not None and parked.state_slot == NOWHERE:
            self._below.demote_parked(parked)
        slot, parked.state = parked.state, NOWHERE
        return slot

    def _keep(self, node: Node, slot: int) -> None:
        """Makes a state the node's snapshot."""
        gap = (node.depth - deepest(node).depth) * self._page_size
        node.state = slot
        self._snapshots[slot] = _Snapshot(node, gap, self._age + gap * (1 + min(node.hits, _MOST_HITS)))

    def _give_up(self, node: Node) -> int:
        """Takes the node's slot for another state."""
        if self._below is not None:
            self._below.demote_state(node)
        return self._detach(node)

    def _detach(self, node: Node) -> int:
        slot, node.state = node.state, NOWHERE
        del self._snapshots[slot]
        self._tree.note_stateless(node)
        return slot

    def _note_hit(self, node: Node) -> None:
        snapshot, node.hits = self._snapshots[node.state], node.hits + 1
        snapshot.worth = self._age + snapshot.gap * (1 + min(node.hits, _MOST_HITS))


def _ends_of_messages(request: Request, first: int) -> tuple[int, ...]:
    """The last ends of messages in the prompt, at `first` or later: where the caller says, or else behind the tokens
    that end an answer, which end the messages before it too.
    """
    if request.anchors:
        return request.anchors[-_MOST_ANCHORS:]
    last = (
        at + 1 for at in range(len(request.prompt_ids) - 1, first - 2, -1) if request.prompt_ids[at] in request.eos_ids
    )
    return tuple(islice(last, _MOST_ANCHORS))


def deepest(node: Node) -> Node:
    """The last node on the path that carries a state; the root if none does."""
    while node.state == NOWHERE and node.parent is not None:
        node = node.parent
    return node
