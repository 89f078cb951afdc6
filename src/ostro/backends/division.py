"""How many devices a model is divided over if the settings leave it open. Imports neither torch nor JAX."""

from ostro.config import EngineConfig
from ostro.devices import why_undivided
from ostro.models.cut import most_ranks
from ostro.models.hrm_config import is_hrm
from ostro.models.registry import describe
from ostro.weights import Checkpoint


def choose_ranks(checkpoint: Checkpoint, config: EngineConfig, devices: int) -> int:
    """`tensor_parallel`; for "auto", as many of the `devices` there are as the model and the other settings allow."""
    if config.tensor_parallel != "auto":
        return config.tensor_parallel
    # An HRM has no description.
    if devices < 2 or why_undivided(config) is not None or is_hrm(checkpoint.config):
        return 1
    return most_ranks(describe(checkpoint.config, max_seq_len=config.max_seq_len), devices)
