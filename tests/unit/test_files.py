"""Where files lie, and whether they are this user's: with another user who makes the names first."""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.users import as_nobody, needs_root

from flyteplugins_tracking._util import files
from flyteplugins_tracking._util.files import open_own, private_directory, read_own, replace_whole

PATIENCE_S = 60
NAME = f"flyteplugins_tracking-{os.geteuid()}"


def planted_directory(path: Path) -> None:
    path.mkdir(mode=0o777)
    path.chmod(0o777)


def planted_link(path: Path) -> None:
    path.symlink_to("/root/checkpoints")


def planted_fifo(path: Path) -> None:
    os.mkfifo(path)


def planted_file(path: Path) -> None:
    path.touch()


PLANTED = [planted_directory, planted_link, planted_fifo, planted_file]


@needs_root
@pytest.mark.parametrize("plant", PLANTED)
def test_a_name_that_another_user_has_made_first_is_left_alone_with_one_warning(shared_tmp, plant, caplog):
    as_nobody(lambda: plant(shared_tmp / NAME))
    before = os.lstat(shared_tmp / NAME)
    for _ in range(3):
        assert private_directory("locks") == shared_tmp / f"{NAME}-1" / "locks"
    assert os.lstat(shared_tmp / NAME) == before
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.message == f"{shared_tmp / NAME} is not a directory of this user alone: another one is used"


@needs_root
def test_all_processes_find_one_directory_although_another_user_has_made_the_first_names(shared_tmp):
    as_nobody(
        lambda: [plant(shared_tmp / f"{NAME}-{i}" if i else shared_tmp / NAME) for i, plant in enumerate(PLANTED)]
    )
    assert {private_directory("sockets") for _ in range(2)} == {shared_tmp / f"{NAME}-4" / "sockets"}


@needs_root
def test_a_name_that_another_user_frees_again_leads_nobody_to_another_directory(shared_tmp):
    as_nobody(lambda: planted_directory(shared_tmp / NAME))
    assert private_directory("locks") == shared_tmp / f"{NAME}-1" / "locks"
    (shared_tmp / NAME).rmdir()
    assert private_directory("locks") == shared_tmp / f"{NAME}-1" / "locks"


@needs_root
def test_another_user_who_has_made_all_names_does_not_stop_us(shared_tmp, monkeypatch, tmp_path):
    monkeypatch.setattr(files, "_NAMES", 2)
    as_nobody(lambda: [planted_directory(shared_tmp / name) for name in (NAME, f"{NAME}-1")])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(files, "_candidates", _without_tmp(files._candidates, shared_tmp))
    assert files.is_private(private_directory("sockets"))  # a directory of this process
    (tmp_path / ".cache").mkdir()
    assert private_directory("sockets") == tmp_path / ".cache" / "flyteplugins_tracking" / "sockets"


def _without_tmp(candidates, shared_tmp):
    """Leave out /tmp itself, which another user could have filled too."""
    return lambda *given: [path for path in candidates(*given) if path.parent != Path("/tmp")]


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


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o755])
def test_an_own_directory_that_others_can_enter_is_not_used(shared_tmp, mode):
    (shared_tmp / NAME).mkdir()
    (shared_tmp / NAME).chmod(mode)
    assert private_directory() == shared_tmp / f"{NAME}-1"


def test_each_level_is_checked(shared_tmp, tmp_path):
    (private_directory() / "sockets").symlink_to(tmp_path)
    assert private_directory("sockets") == shared_tmp / f"{NAME}-1" / "sockets"


def test_threads_get_the_same_directory(shared_tmp):
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: private_directory("a", "b"), range(64)))
    assert found == {shared_tmp / NAME / "a" / "b"}


@pytest.mark.parametrize("plant", [planted_fifo, planted_link, planted_directory])
def test_what_is_no_file_is_not_read_and_not_waited_for(tmp_path, plant):
    plant(tmp_path / "a")
    with pytest.raises(OSError):  # noqa: PT011 of several kinds
        read_own(tmp_path / "a", 10)


def test_a_link_to_an_endless_file_is_not_read(tmp_path):
    (tmp_path / "a").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="symbolic links"):
        read_own(tmp_path / "a", 10)


def test_a_file_that_is_too_long_is_not_read(tmp_path):
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
def test_a_second_name_in_another_users_directory_is_not_opened(shared_tmp, tmp_path):
    (tmp_path / "key").write_text("private")
    as_nobody(lambda: (shared_tmp / "theirs").mkdir())
    os.link(tmp_path / "key", shared_tmp / "theirs" / "a")
    with pytest.raises(PermissionError, match="not a regular file of this user alone"):
        open_own(shared_tmp / "theirs" / "a")


@needs_root
def test_a_file_of_another_user_is_not_read(shared_tmp):
    as_nobody(lambda: (shared_tmp / "a").touch())
    with pytest.raises(PermissionError, match="not a regular file of this user alone"):
        read_own(shared_tmp / "a", 10)


def test_a_link_in_the_place_of_an_unfinished_file_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(files.threading, "get_ident", lambda: 7)
    (tmp_path / "key").write_text("private")
    (tmp_path / f"a.{os.getpid()}-7").symlink_to(tmp_path / "key")
    replace_whole(tmp_path / "a", "text")
    assert ((tmp_path / "a").read_text(), (tmp_path / "key").read_text()) == ("text", "private")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
