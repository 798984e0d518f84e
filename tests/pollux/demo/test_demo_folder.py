"""The demo deletes only what a demo made."""

from pathlib import Path

import pytest

from pollux.demo.folder import fresh_folder
from pollux.errors import ConfigError


def test_a_new_folder_is_made_and_a_former_demo_replaced(tmp_path: Path) -> None:
    folder = fresh_folder(tmp_path / "a" / "demo")
    (folder / "old").touch()
    assert fresh_folder(folder) == folder
    assert not (folder / "old").exists()


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    assert fresh_folder(tmp_path) == tmp_path


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="--state"):
        fresh_folder(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_file_and_a_link_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(fresh_folder(tmp_path / "demo"))
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="is no folder"):
            fresh_folder(tmp_path / name)
