"""The private names of the vendors' clients, which a new version may change: each is there, and its absence is told."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from support.vendors import CLIENTS, ROOT, TRACKERS, requirement_of

from flyteplugins_tracking import TrackerNotInstalledError
from flyteplugins_tracking.trackers import vendor_parts
from flyteplugins_tracking.trackers.mlflow import vendor as mlflow
from flyteplugins_tracking.trackers.pluto import vendor as pluto
from flyteplugins_tracking.trackers.trackio import vendor as trackio
from flyteplugins_tracking.trackers.wandb import vendor as wandb

VENDORS = {"mlflow": mlflow, "pluto": pluto, "trackio": trackio, "wandb": wandb}
RUN = SimpleNamespace(config={}, project="p")
# Names without which no run is opened, by tracker.
REQUIRED = [
    ("mlflow", "mlflow.tracking._tracking_service.utils", "_get_store"),
    ("mlflow", "mlflow.utils.rest_utils", "http_request"),
    ("pluto", "pluto.op", "login"),
    ("pluto", "pluto.op", "Op._init_sync_manager"),
    ("trackio", "trackio.sqlite_storage", "SQLiteStorage.bulk_log"),
    ("trackio", "trackio.sqlite_storage", "SQLiteStorage.init_db"),
    ("trackio", "trackio.remote_client", "RemoteClient"),
    ("trackio", "trackio.context_vars", "current_run"),
]
# Names without which a feature is lost: what uses them, and what the warning says.
OPTIONAL = [
    ("mlflow", "mlflow.tracking.context.registry", "resolve_tags", lambda: mlflow.tags_of_start_run({}), "source"),
    ("mlflow", "mlflow.tracking._tracking_service.utils", "_tracking_uri", mlflow.uri_set_by_program, "set_tracking_u"),
    ("mlflow", "mlflow.tracking.fluent", "_active_experiment_id", mlflow.active_experiment_id, "set_experiment"),
    ("mlflow", "mlflow.tracking.fluent", "_active_run_stack", mlflow.active_runs, "active_run()"),
    (
        *("mlflow", "mlflow.tracking.fluent", "_last_active_run_id"),
        *(lambda: mlflow.set_last_active_run("r"), "last_active_run()"),
    ),
    ("mlflow", "mlflow.utils.autologging_utils", "_AUTOLOGGING_GLOBALLY_DISABLED", lambda: off_and_on(), "autologging"),
    (
        *("mlflow", "mlflow.system_metrics.system_metrics_monitor", "SystemMetricsMonitor"),
        *(lambda: stopped(mlflow.start_monitor("r", "n", is_resumed=False)), "metrics of the system"),
    ),
    ("pluto", "pluto.util", "get_char", lambda: pluto.clean("é"), "unusual characters"),
    ("pluto", "pluto.sync.process", "_SyncUploader", lambda: upload(), "media"),
    ("pluto", "pluto.sync.store", "FileRecord", lambda: upload(), "media"),
    ("trackio", "trackio.context_vars", "current_project", lambda: trackio.make_current(RUN)(), "trackio.save()"),
]


def of_names(rows):
    return [f"{tracker}-{name}" for tracker, _, name, *_ in rows]


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.name == vendor_parts.__name__]


def off_and_on():
    undo = mlflow.without_autologging()
    if undo is not None:
        undo()


def stopped(monitor):
    if monitor is not None:
        monitor.finish()


def upload():
    known = dict.fromkeys(("_auth", "_op_id", "_op_name", "project", "tag"), "x")
    return pluto.upload(SimpleNamespace(**known, url_file="http://127.0.0.1:9"), "gone", {})


@pytest.fixture
def clients(monkeypatch):
    """The clients can be imported. Pluto's is installed beside the others."""
    monkeypatch.syspath_prepend(Path(sys.prefix) / "pluto")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for vendor in VENDORS.values():
        monkeypatch.setattr(vendor.PARTS._warn_once, "_logged", set())


def remove(monkeypatch, module, name):
    *owners, last = name.split(".")
    owner = import_module(module)
    monkeypatch.delattr(getattr(owner, owners[0]) if owners else owner, last)


@pytest.mark.parametrize(("tracker", "module", "name"), REQUIRED, ids=of_names(REQUIRED))
def test_a_client_without_a_required_name_is_refused_with_one_sentence(clients, monkeypatch, tracker, module, name):
    pytest.importorskip(tracker)
    VENDORS[tracker].require()
    remove(monkeypatch, module, name)
    with pytest.raises(TrackerNotInstalledError) as raised:
        VENDORS[tracker].require()
    assert f"'{name.rpartition('.')[2]}'" in str(raised.value)
    assert str(raised.value).endswith(f'pip install "{VENDORS[tracker].PARTS.tested}"')


@pytest.mark.parametrize(("tracker", "module", "name", "use", "loss"), OPTIONAL, ids=of_names(OPTIONAL))
def test_a_client_without_an_optional_name_loses_a_feature_with_one_warning(
    clients, monkeypatch, caplog, tracker, module, name, use, loss
):
    pytest.importorskip(tracker)
    import_module(module)
    use()
    assert warnings(caplog) == []
    remove(monkeypatch, module, name)
    use()
    use()
    (warning,) = warnings(caplog)
    assert loss in warning
    assert name in warning


def test_a_resumed_mlflow_run_whose_metrics_cannot_be_read_begins_at_0_with_one_warning(clients, caplog):
    from mlflow.entities import Metric, RunData

    assert mlflow.last_step(SimpleNamespace(data=RunData(metrics=[Metric("loss", 1.0, 0, 7)]))) == 7
    assert warnings(caplog) == []
    assert mlflow.last_step(SimpleNamespace(data=SimpleNamespace())) == -1
    (warning,) = warnings(caplog)
    assert "steps of a resumed run begin at 0" in warning


def test_a_run_object_without_a_required_name_is_refused():
    with pytest.raises(TrackerNotInstalledError, match=r"Pluto: .* has no attribute '_iface'\)\. Install a version"):
        pluto.check_run(SimpleNamespace(_sync_manager=None))
    with pytest.raises(TrackerNotInstalledError, match=r"Pluto: .* has no attribute '_op_id'"):
        pluto.check_run(SimpleNamespace(_sync_manager=None, _iface=None, settings=SimpleNamespace(_auth="")))
    with pytest.raises(TrackerNotInstalledError, match=r"Trackio: .* has no attribute '_config_logged'"):
        trackio.take_over(SimpleNamespace(_queued_logs=[]))


@pytest.mark.parametrize("tracker", TRACKERS)
def test_the_extra_has_a_minimum_and_no_maximum_and_allows_the_version_that_was_tested(tracker):
    tested = VENDORS[tracker].PARTS.tested
    assert f"{tested}\n" in (ROOT / "constraints.txt").read_text()
    assert requirement_of(tracker) == vendor_parts.MINIMUMS[tracker]
    (minimum,) = Requirement(requirement_of(tracker)).specifier
    assert (minimum.operator, Requirement(tested).name) == (">=", CLIENTS[tracker])
    assert tested.partition("==")[2] in Requirement(requirement_of(tracker)).specifier
