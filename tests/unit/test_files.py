"""Where files lie, and whether they are this user's: with another user who makes the names first."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from support.users import as_nobody, needs_root

from flyteplugins_tracking._util import files
from flyteplugins_tracking._util.files import open_own, private_directory, read_own, replace_whole

NAME = f"flyteplugins_tracking-{os.geteuid()}"


def planted_directory(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


PLANTED = [planted_directory, lambda path: path.symlink_to("/root/checkpoints"), os.mkfifo, Path.touch]


@needs_root
def test_names_that_another_user_has_made_first_are_left_alone_with_a_warning_each_and_also_when_freed(
    shared_tmp, caplog
):
    names = [shared_tmp / NAME, *(shared_tmp / f"{NAME}-{number}" for number in range(1, len(PLANTED)))]
    as_nobody(lambda: [plant(path) for plant, path in zip(PLANTED, names, strict=True)])
    before = [os.lstat(path) for path in names]
    for _ in range(2):
        assert private_directory("locks") == shared_tmp / f"{NAME}-4" / "locks"
    assert [os.lstat(path) for path in names] == before
    names[0].rmdir()
    assert private_directory("locks") == shared_tmp / f"{NAME}-4" / "locks"
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [f"{path} is not a directory of this user alone: another one is used" for path in names]


@needs_root
def test_a_runtime_directory_of_another_user_is_not_used(shared_tmp, monkeypatch):
    as_nobody(lambda: (shared_tmp / "theirs").mkdir(0o700))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared_tmp / "theirs"))
    assert private_directory() == shared_tmp / NAME


def test_the_users_runtime_directory_comes_first(shared_tmp, monkeypatch, tmp_path):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert private_directory("locks") == tmp_path / "flyteplugins_tracking" / "locks"
    assert private_directory("wandb_runs", on_disk=True) == shared_tmp / NAME / "wandb_runs"
    assert tmp_path not in private_directory("starts", is_of_machine=True).parents  # it goes when the user logs out
    tmp_path.chmod(0o755)
    assert private_directory("locks") == shared_tmp / NAME / "locks"


def test_an_own_directory_that_others_can_enter_or_a_link_in_it_is_not_used(shared_tmp, tmp_path):
    (shared_tmp / NAME).mkdir()
    for mode in (0o777, 0o770, 0o720, 0o755):
        (shared_tmp / NAME).chmod(mode)
        assert private_directory() == shared_tmp / f"{NAME}-1"
    (private_directory() / "sockets").symlink_to(tmp_path)
    assert private_directory("sockets") == shared_tmp / f"{NAME}-2" / "sockets"


def test_what_is_no_file_or_too_long_is_not_read_and_not_waited_for(tmp_path):
    for number, plant in enumerate([*PLANTED[:3], lambda path: path.symlink_to("/dev/zero")]):
        plant(tmp_path / str(number))
        with pytest.raises(OSError):  # noqa: PT011 of several kinds
            read_own(tmp_path / str(number), 10)
    (tmp_path / "a").write_bytes(b"x" * 11)
    with pytest.raises(OSError, match="longer than 10 bytes"):
        read_own(tmp_path / "a", 10)
    assert read_own(tmp_path / "a", 11) == b"x" * 11


def test_a_second_name_is_opened_only_where_no_other_user_can_have_made_it(tmp_path):
    (tmp_path / "key").write_text("private")
    (tmp_path / "shared").mkdir()
    os.link(tmp_path / "key", tmp_path / "a")
    assert read_own(tmp_path / "a", 10) == b"private"
    os.link(tmp_path / "key", tmp_path / "shared" / "a")
    for mode in (0o770, 0o1777):
        (tmp_path / "shared").chmod(mode)
        with pytest.raises(PermissionError, match="not a regular file of this user alone"):
            open_own(tmp_path / "shared" / "a")


@needs_root
def test_a_second_name_in_another_users_directory_or_its_file_is_not_opened(shared_tmp, tmp_path):
    (tmp_path / "key").write_text("private")
    as_nobody(lambda: ((shared_tmp / "theirs").mkdir(), (shared_tmp / "b").touch()))
    os.link(tmp_path / "key", shared_tmp / "theirs" / "a")
    for path in (shared_tmp / "theirs" / "a", shared_tmp / "b"):
        with pytest.raises(PermissionError, match="not a regular file of this user alone"):
            open_own(path)


def test_a_link_in_the_place_of_an_unfinished_file_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(files.threading, "get_ident", lambda: 7)
    (tmp_path / "key").write_text("private")
    (tmp_path / f"a.{os.getpid()}-7").symlink_to(tmp_path / "key")
    replace_whole(tmp_path / "a", "text")
    assert ((tmp_path / "a").read_text(), (tmp_path / "key").read_text()) == ("text", "private")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
