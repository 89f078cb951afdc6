"""The plan of a recipe's model on one of its devices, computed from its config."""

from collections.abc import Mapping
from typing import NamedTuple

from ostro.backends.planning import plan
from ostro.recipes.devices import NamedDevice
from ostro.recipes.recipe import Expectation, Value, engine_config
from ostro.weights import Checkpoint


class Planned(NamedTuple):
    expectation: Expectation
    fits: bool


def planned(checkpoint: Checkpoint, device: NamedDevice, settings: Mapping[str, Value]) -> Planned:
    """What `ostro plan` says of a recipe's model with these settings on a device."""
    config = engine_config(settings, device=device.kind, serving=True, threads=device.threads)
    found = plan(checkpoint, config, memory=device.memory)
    expectation = Expectation(
        runs_on=found.runs_on,
        weights=found.weights_bytes,
        page=found.page_bytes,
        pages=found.num_pages,
        page_tokens=found.page_size,
        total=found.total_bytes,
        longest=found.max_seq_len,
        # Each sequence that runs has a slot for its state, if its model keeps one.
        at_a_time=min(found.max_batch_seqs, found.num_states) if found.state_bytes else found.max_batch_seqs,
    )
    return Planned(expectation, found.fits)
