"""Copies of snapshots in host memory: whose state is in which slot, and which are worth one. Knows no schedule.

A state takes as much room as the pages of a thousand tokens or more, and most snapshots are never continued from. One
is kept if it is the last of its path, from which the conversation goes on if it does; or if it has been continued from:
once for host memory, twice for disk.
"""

from collections import OrderedDict
from typing import Protocol

from ostro.engine.radix import NOWHERE, Node

HITS_FOR_HOST = 1
HITS_FOR_DISK = 2


# A path is not searched further than this for a later state.
_MOST_BEHIND = 256


def is_worth_room(node: Node, least_hits: int) -> bool:
    """Whether the node's state has been continued from so many times, or no other is known behind it."""
    return node.hits >= least_hits or _is_last(node)


def _is_last(node: Node) -> bool:
    behind = [node]
    for _ in range(_MOST_BEHIND):
        if not behind:
            return True
        each = behind.pop()
        has_state = each.state != NOWHERE or each.state_slot != NOWHERE
        if each.states_below or (has_state and each is not node):
            return False
        behind += each.children.values()
    return False


class Kept(Protocol):
    """Whose state can be kept: a node of the tree, or a preempted sequence."""

    state: int
    state_slot: int
    is_state_arriving: bool
    hits: int


class StateSlots:
    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))[::-1]
        # Least recently stored or fetched first.
        self._nodes: OrderedDict[int, Kept] = OrderedDict()

    @property
    def num_used(self) -> int:
        return len(self._nodes)

    def take(self, node: Kept) -> tuple[Kept, int] | None:
        """Gives the node a slot, if one can be had. Returns the node that has lost it, and which it was, if any."""
        lost = None
        if not self._free:
            loser = next((each for each in self._nodes.values() if not each.is_state_arriving), None)
            if loser is None:
                return None
            lost = loser, loser.state_slot
            self.forget(loser)
        node.state_slot = self._free.pop()
        self._nodes[node.state_slot] = node
        return lost

    def note_use(self, node: Kept) -> None:
        self._nodes.move_to_end(node.state_slot)

    def forget(self, node: Kept) -> None:
        if node.state_slot != NOWHERE:
            del self._nodes[node.state_slot]
            self._free.append(node.state_slot)
            node.state_slot = NOWHERE

    def check_integrity(self, nodes: dict[int, Kept]) -> None:
        """Asserts that every slot is free or somebody's: `nodes` are those that there are, by their slots."""
        assert dict(self._nodes) == nodes, "a state's slot is nobody's"
        assert sorted([*self._free, *self._nodes]) == list(range(self.num_slots)), "state slots were lost"
