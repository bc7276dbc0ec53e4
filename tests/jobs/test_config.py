"""The server's settings."""

from pathlib import Path

import pytest

from drumline.jobs.config import ConfigError, read
from drumline.jobs.core.state import Timeouts


def test_another_emulator_is_given_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("endpoint: ~/other/emulator")
    assert read(tmp_path).endpoint == str(Path.home() / "other" / "emulator")
    (tmp_path / "config.yaml").write_text("endpoint: http://127.0.0.1:8080")
    with pytest.raises(ConfigError, match=r"endpoint: give the emulator's folder"):
        read(tmp_path)


def test_googles_endpoint_is_an_address(tmp_path: Path) -> None:
    text = "cloud: google\nproject: lab\nendpoint: https://tpu.example"
    (tmp_path / "config.yaml").write_text(text)
    assert read(tmp_path).endpoint == "https://tpu.example"


def test_the_thresholds_that_users_set_keep_their_names() -> None:
    """The timeouts are in config.yaml under `patience`, which would reject a renamed field."""
    known = "waiting silence bad_silence first_contact settle shutdown rest retry"
    new = "visible booting deleting outputs outputs_interval settled cheaper"
    assert set(Timeouts.__dataclass_fields__) == {*known.split(), *new.split()}
