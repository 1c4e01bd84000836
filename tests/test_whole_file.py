"""Files are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distca.whole_file import write_text, writing
from support.full_disk import full_disk


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("a good plan")
    with (
        pytest.raises(ValueError, match=r"plan.json cannot be written: File too"),
        full_disk(),
    ):
        write_text(path, "x" * 100)
    assert path.read_text() == "a good plan"
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"]


def test_a_full_disk_leaves_no_folder_that_was_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "page.html"
    with pytest.raises(ValueError, match="cannot be written"), full_disk():
        write_text(path, "x" * 100)
    assert list(tmp_path.iterdir()) == []
    write_text(path, "a page")
    assert path.read_text() == "a page"


def test_any_error_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_text("older")
    with pytest.raises(KeyError), writing(path) as written:  # noqa: PT012 (the block fails)
        assert written.suffix == ".png"
        written.write_text("half")
        raise KeyError
    assert path.read_text() == "older"
    assert [each.name for each in tmp_path.iterdir()] == ["picture.png"]


def test_a_link_and_permissions_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("older")
    target.chmod(0o640)
    link.symlink_to(target)
    write_text(link, "newer")
    assert link.is_symlink()
    assert target.read_text() == "newer"
    assert target.stat().st_mode & 0o777 == 0o640


def test_new_files_have_the_usual_permissions(tmp_path: Path) -> None:
    usual, path = tmp_path / "usual", tmp_path / "new"
    usual.write_text("")
    write_text(path, "")
    assert path.stat().st_mode == usual.stat().st_mode


def test_a_device_is_written_to() -> None:
    write_text(Path(os.devnull), "text")
    assert not Path(os.devnull).is_file()
    with pytest.raises(ValueError, match=r"^/dev/full cannot be written: No space left"):
        write_text(Path("/dev/full"), "text")
