"""Which runners the settings for lower tiers are refused for."""

from pathlib import Path

import pytest
from model_directory import write_model

from ostro.backends.fake import FakeRunner
from ostro.backends.tiers.opening import open_tiers
from ostro.config import EngineConfig
from ostro.errors import Unsupported
from ostro.weights import open_checkpoint


def test_states_have_no_tiers_and_the_setting_is_refused_by_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "model"))
    with pytest.raises(Unsupported, match="kv_disk does not work with models whose layers keep recurrent states"):
        open_tiers(checkpoint, EngineConfig(kv_disk=str(tmp_path)), FakeRunner(num_states=2))
