"""The private parts of the installed wandb: each function of `vendor` with the real client, and without the part."""

from __future__ import annotations

import ast
import inspect
import json
import logging
import os
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.offline_wandb import open_run
from support.users import NOBODY, needs_root
from wandb_files import read_runs

from flyteplugins_tracking import ConfigError, TrackerNotInstalledError, tracking_init
from flyteplugins_tracking.trackers import vendor_parts
from flyteplugins_tracking.trackers.wandb import attempts, datastore, roles, vendor
from flyteplugins_tracking.trackers.wandb import open as opening

ROOM = Path(inspect.getfile(vendor)).parent


@pytest.fixture
def run(tmp_path, monkeypatch):
    opened = open_run("contract", tmp_path, monkeypatch)
    yield opened
    opened.finish()
    assert vendor.restart_service()


@pytest.fixture
def no_warning(caplog, monkeypatch):
    monkeypatch.setattr(vendor.PARTS._warn_once, "_logged", set())
    yield
    assert [record for record in caplog.get_records("call") if record.name == vendor_parts.__name__] == []


def test_a_run_has_every_part(run, no_warning):
    import wandb

    assert (vendor.open_runs(), vendor.is_finished(run), vendor.global_run()) == ([run], False, run)
    vendor.set_resumed(run, False)
    assert not run.resumed
    vendor.set_config(run, {"lr": 1})
    assert run.config["lr"] == 1
    run.log({"x": 1})
    vendor.flush(run, 5)
    assert run.summary["x"] == 1
    log = wandb.log
    vendor.set_global_run(None)
    assert vendor.global_run() is None
    with pytest.raises(wandb.Error, match="must call"):
        wandb.log({})
    vendor.set_global_run(run)
    assert (vendor.global_run(), wandb.log, wandb.summary) == (run, log, run.summary)


def test_rows_and_records_have_every_part(run, no_warning):
    kept = []

    def publish(hand_on, record, **more):
        hand_on(record, **more)
        if record.request.HasField("partial_history"):
            kept.append(record.request.partial_history)

    asked = []
    vendor.on_records(run, publish, lambda deliver, record: (asked.append(record), deliver(record))[1])
    run.log({'a"b': 0.5, "nested": {"a": 1}}, step=3)
    run.log({"x": 1}, commit=False)
    items = vendor.parse_row(kept[0].SerializeToString()).item
    row = {item.key: json.loads(vendor.json_of(item)) for item in items}
    assert (row['a"b'], row["nested"], kept[0].step.num, kept[0].HasField("action")) == (0.5, {"a": 1}, 3, False)
    assert row["_timestamp"] > 1e9
    assert (kept[1].HasField("step"), kept[1].action.flush) == (False, False)
    assert (run.starting_step, run.step, len(asked)) == (0, 3, 1)
    vendor.flush(run, 5)
    directory, deadline = Path(run.dir).parent, time.monotonic() + 30
    while time.monotonic() < deadline and datastore.description(directory) is None:
        time.sleep(0.1)
    assert datastore.description(directory).run_id


@pytest.mark.parametrize("value", [1, 1.5, "text", True, None, {"a": [1]}])
def test_a_value_is_read_in_each_form_that_wandb_writes(value):
    from wandb.proto.wandb_internal_pb2 import HistoryItem
    from wandb.sdk.interface.history_value import set_history_value

    for forms in ({"json_form": True, "typed_form": False}, {"json_form": False, "typed_form": True}):
        item = HistoryItem()
        set_history_value(item, value, **forms)
        assert json.loads(vendor.json_of(item)) == value


def test_wandb_core_has_every_part(run, no_warning):
    address = os.environ["WANDB_SERVICE"]
    assert not vendor.restart_service()  # a run is open in it
    assert not vendor.was_torn_down(run, 0)
    vendor.drop_unusable_service()
    assert os.environ["WANDB_SERVICE"] == address
    with vendor.without_viewer(), vendor.outside_sweep():
        assert vendor.session().settings.x_disable_viewer
    assert not vendor.session().settings.x_disable_viewer


def test_a_torn_down_client_is_recognized(tmp_path, monkeypatch, no_warning):
    import wandb

    opened = open_run("ended", tmp_path, monkeypatch)
    wandb.teardown()
    for call in (lambda: opened.log({"x": 1}), lambda: dict(opened.summary)):
        with pytest.raises(Exception) as raised:  # noqa: PT011 which one, `service_gone` says
            call()
        assert isinstance(raised.value, vendor.service_gone(opened, raised.value))
    assert ValueError in vendor.service_gone(opened, ValueError())
    assert vendor.was_torn_down(opened, 5)
    vendor.set_finished(opened)
    vendor.set_global_run(None)


def test_a_run_whose_wandb_core_has_died_is_not_returned_by_the_next_init(tmp_path, monkeypatch, no_warning):
    dead = open_run("dead", tmp_path, monkeypatch)
    vendor.session()._connection._proc._process.kill()
    vendor.set_finished(dead)
    vendor.drop_unusable_service()
    assert vendor.restart_service()
    following = open_run("following", tmp_path, monkeypatch)
    assert (following.id, vendor.open_runs()) == ("following", [following])
    following.finish()
    assert vendor.restart_service()


def test_a_role_says_if_w_and_b_does_not_tell_whether_its_run_has_ended(monkeypatch, caplog):
    monkeypatch.setitem(vendor.keys, "http://127.0.0.1:9", "k" * 40)
    roles.end_again(attempts.Place("http://127.0.0.1:9", "e", "p", "r"), "eval")
    assert "run r may be shown as running if its owner has ended it" in caplog.text
    assert vendor.restart_service()


@pytest.mark.parametrize("error", [ValueError(), KeyError()])
def test_an_error_of_an_open_run_is_no_death_of_wandb_core(run, error):
    assert vendor.service_gone(run, error) == (ConnectionError,)


def test_wandb_core_has_written_the_files_of_ended_runs_when_it_is_restarted(tmp_path, monkeypatch):
    import wandb

    monkeypatch.chdir(tmp_path)
    quick = wandb.Settings(x_transaction_log_flush_interval=0.1, silent=True)
    for number in range(2):
        opened = wandb.init(mode="offline", project="p", id=f"run-{number}", dir=tmp_path, settings=quick)
        opened.log({"x": number})
        opened.finish(exit_code=1)
        assert vendor.restart_service()
    stored = sorted((run.id, [row["x"] for row in run.rows], run.exit_code) for run in read_runs(tmp_path))
    assert stored == [(f"run-{number}", [number], 1) for number in range(2)]


@needs_root
@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
@pytest.mark.parametrize("planted", ["file", "fifo", "link", "link of ours"])
def test_settings_of_another_user_do_not_choose_the_server(tmp_path, monkeypatch, folder, planted):
    """W&B's client would send the key to it."""
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    path, target = tmp_path / folder / "settings", tmp_path / "target"
    path.parent.mkdir()
    target.write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    if planted == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(target.read_bytes()) if planted == "file" else path.symlink_to(target)
    os.lchown(target if planted == "link of ours" else path, NOBODY, NOBODY)
    vendor._check_settings_files.cache_clear()
    with pytest.raises(ConfigError, match="belongs to another user"):
        vendor.session()
    os.lchown(target, 0, 0)
    os.lchown(path, 0, 0)
    vendor._check_settings_files()


def test_the_session_has_every_part(no_warning, monkeypatch, tmp_path):
    import wandb

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    settings = wandb.Settings(init_timeout=3, run_notes="n")
    effective = vendor.effective_settings(settings)
    assert (effective.init_timeout, effective.run_notes) == (3, "n")
    asked: list[int] = []
    vendor.on_stop_request(settings, effective, lambda: asked.append(1))
    settings.stop_fn()
    assert asked == [1]
    assert getattr(settings, "stop_on_fatal_error", True)
    vendor.set_default(settings, settings, "x_file_stream_transmit_interval", 2.0)
    assert settings.x_file_stream_transmit_interval == 2.0
    names = ("x_label", "x_sync_dir_suffix", "run_group", "run_job_type", "run_name", "run_notes")
    vendor.set_required(settings, **dict.fromkeys(names, ""), x_primary=True, x_update_finish_state=True, run_tags=())
    monkeypatch.delenv("WANDB_ERROR_REPORTING", raising=False)
    vendor.disable_error_reports()
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    assert vendor.has_credentials("http://127.0.0.1:9") is False


REFUSED = '{"msg":"filestream: fatal error: filestream: failed to upload: 401 Unauthorized"}'


@pytest.mark.parametrize(
    ("log", "is_wanted", "asked", "told"),
    [
        ("{}", False, 1, ""),
        (REFUSED, False, 0, "run r: the server has refused its rows with error 401. What it logs is kept in"),
        (REFUSED, True, 1, ""),
        (None, False, 0, "run r: wandb-core's log cannot be read."),
    ],
)
def test_the_stop_button_stops_the_function_and_a_refusal_of_rows_does_not(
    tmp_path, monkeypatch, caplog, log, is_wanted, asked, told
):
    calls: list[object] = []
    monkeypatch.setattr(opening, "_LOG_S", 0)
    monkeypatch.setattr(opening.outbox, "label_of", lambda _: None)
    stop = opening._stopping(SimpleNamespace(ask_to_stop=calls.append), is_wanted_without_rows=is_wanted)
    run = SimpleNamespace(id="r", dir=tmp_path / "files", settings=SimpleNamespace(stop_fn=stop))
    other = SimpleNamespace(id="o", dir=tmp_path / "files", settings=SimpleNamespace(stop_fn=None))
    if log is not None:
        (tmp_path / "logs").mkdir()
        (tmp_path / "logs" / "debug-internal.log").write_text(log)
    monkeypatch.setattr(vendor, "open_runs", lambda: [other])
    stop()  # the run has ended meanwhile
    assert (calls, caplog.messages) == ([], [])
    monkeypatch.setattr(vendor, "open_runs", lambda: [other, run])
    stop()
    assert len(calls) == asked
    assert len(caplog.messages) == 1 - asked
    assert told in caplog.text


def test_wandb_has_every_setting_that_keeps_rows(no_warning, bare_environment, tmp_path):
    import wandb

    waits = {f"x_{name}_retry_wait_max_seconds": 8 for name in ("file_stream", "graphql", "file_transfer")}
    tries = {"x_graphql_retry_max": 10_000, "x_file_transfer_retry_max": 10_000}
    expected, found = {**waits, **tries, "x_transaction_log_flush_interval": 0.1}, {}

    def init(settings, **_):
        found.update({name: getattr(settings, name) for name in expected})
        raise LookupError

    bare_environment.chdir(tmp_path)
    bare_environment.setattr(wandb, "init", init)
    with pytest.raises(LookupError):
        tracking_init(project="p", mode="offline")(print)()
    assert found == expected


# Calls with a wandb that has no private part: what they return, or that they raise the one clear error.
RUN = SimpleNamespace()
WITHOUT = {
    "on_records": (lambda: vendor.on_records(RUN, print, print), None),
    "open_runs": (lambda: vendor.open_runs(), []),
    "restart_service": (lambda: vendor.restart_service(), False),
    "drop_unusable_service": (lambda: vendor.drop_unusable_service(), None),
    "ask_again_at_exit": (lambda: vendor.ask_again_at_exit(), None),
    "set_resumed": (lambda: vendor.set_resumed(RUN, True), None),
    "replace_sync_command": (lambda: vendor.replace_sync_command(RUN, str), None),
    "set_config": (lambda: vendor.set_config(RUN, {}), None),
    "outside_sweep": (lambda: vendor.outside_sweep().__enter__(), TrackerNotInstalledError),
    "effective_settings": (lambda: vendor.effective_settings(RUN), TrackerNotInstalledError),
    "set_required": (
        lambda: vendor.set_required(import_module("wandb").Settings(), x_gone=1),
        TrackerNotInstalledError,
    ),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_wandb_without_a_part_loses_a_feature_or_raises_with_the_tested_versions(name, monkeypatch, caplog):
    from wandb.sdk import wandb_setup

    monkeypatch.setattr(wandb_setup, "singleton", lambda: SimpleNamespace())
    monkeypatch.setattr(vendor.PARTS._warn_once, "_logged", set())
    call, expected = WITHOUT[name]
    if expected is TrackerNotInstalledError:
        with pytest.raises(TrackerNotInstalledError, match=r"wandb \S+ does not support .*: pip install \"wandb=="):
            call()
        return
    with caplog.at_level(logging.WARNING):
        assert [call(), call()] == [expected] * 2
    (record,) = caplog.records
    assert "lacks what is needed here" in record.getMessage()


def test_a_setting_that_this_wandb_does_not_know_is_not_set(caplog):
    assert not vendor.has_setting("x_gone")
    settings = vendor.new_settings(init_timeout=3, x_gone=1)
    vendor.set_default(settings, settings, "x_gone", 1)
    assert settings.init_timeout == 3
    assert not hasattr(settings, "x_gone")
    assert caplog.records == []


def private_names(path: Path) -> set[str]:
    """The private attributes that a module uses of other objects than its own, and the private modules it imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and node.attr != "_replace"
            and node.attr[-2:] != "__"
        ):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()"):
                found.add(f"{owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wandb."):
            found.add(str(node.module))
    return found


@pytest.mark.parametrize("path", sorted(ROOM.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOM)))
def test_only_vendor_py_uses_private_names(path):
    if path.name != "vendor.py":
        assert private_names(path) == set()
