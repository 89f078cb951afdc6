"""Which runners the settings for lower tiers are refused for."""

from pathlib import Path

import pytest
from model_directory import write_model

from ostro.backends.fake import FakeRunner
from ostro.backends.tiers.opening import open_tiers
from ostro.config import EngineConfig
from ostro.errors import Unsupported
from ostro.weights import open_checkpoint


class PagesOnly(FakeRunner):
    """A runner whose tiers hold no states."""

    page_bytes = 4096
    computes_with: tuple[str, ...] = ()
    stores_states = False

    def check_tiers(self, config: EngineConfig) -> None:
        raise AssertionError("it is refused before")

    page_store = trial_stores = check_tiers


def test_tiers_without_room_for_states_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "model"))
    refused = "kv_disk does not work with models whose layers keep recurrent states on fake: its tiers hold pages only"
    with pytest.raises(Unsupported, match=refused):
        open_tiers(checkpoint, EngineConfig(kv_disk=str(tmp_path)), PagesOnly(num_states=2))


def test_a_runner_without_tiers_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "model"))
    with pytest.raises(Unsupported, match="kv_disk does not work on fake"):
        open_tiers(checkpoint, EngineConfig(kv_disk=str(tmp_path)), FakeRunner())
