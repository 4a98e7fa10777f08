"""MLflow: a real server, real clients, real torchrun. What holds for every tracker is in `test_conformance.py`."""

from __future__ import annotations

import contextlib
import http.server
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from flyteplugins_tracking import ConfigError, get_run, tracking_config, tracking_init
from flyteplugins_tracking._rank.plan import Page
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.mlflow.vendor import alone_with
from flyteplugins_tracking.trackers.registry import find_tracker

ADDRESS = "https://mlflow.example.com"


@pytest.fixture
def store(tmp_path) -> Path:
    """A SQLite file with the tables of runs, and no run."""
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("CREATE TABLE runs (run_uuid TEXT)")
    return tmp_path / "mlflow.db"


@pytest.mark.parametrize(
    ("worker", "scope", "waits"), [("0", "global", True), ("1", "global", False), ("1", "worker", True)]
)
def test_only_a_rank_beside_the_one_with_the_run_waits_for_it(store, bare_environment, worker, scope, waits):
    ranks = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "GROUP_RANK": worker, "GROUP_WORLD_SIZE": "2"}.items():
        bare_environment.setenv(name, value)

    uri, timeout_s = f"sqlite:///{store}", 0.2 if waits else 60

    @tracking_init(tracker="mlflow", tracking_uri=uri, id="x", rank_scope=scope, init_timeout_s=timeout_s)
    def train() -> object:
        return get_run()

    began = time.monotonic()
    assert train() is None
    assert (time.monotonic() - began > 0.8 * timeout_s) is waits
    with contextlib.closing(sqlite3.connect(store)) as database, database:
        database.execute("INSERT INTO runs VALUES ('x')")
    assert tracking_init(tracker="mlflow", tracking_uri=uri, id="x", init_timeout_s=60)(get_run)() is None
    assert time.monotonic() - began < 60


def test_one_at_a_time_opens_a_store_that_is_a_file(store):
    order: list[str] = []

    def second() -> None:
        with alone_with(f"sqlite:///{store}", None):
            order.append("second")

    beside = threading.Thread(target=second)
    with alone_with(f"sqlite:///{store}", None):
        beside.start()
        with alone_with(f"sqlite:///{store}", time.monotonic() + 0.3), alone_with("http://127.0.0.1:1", None):
            order.append("past the deadline")
        order.append("first")
    beside.join(timeout=60)
    assert order == ["past the deadline", "first", "second"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"experiment_name": "a", "experiment_id": "1"}, "twice"),
        ({"log_system_metrics": "yes"}, "must be True or False"),
        ({"tracking_uri": "https://user:the-password@host"}, "secret="),
        ({"trackin_uri": "http://host"}, "tracking_uri"),
        ({"config": "config.yaml"}, "log_artifact"),
        ({"download_logs": True}, "artifacts are on the server"),
    ],
)
def test_what_cannot_work_is_refused_at_decoration_with_the_reason(bare_environment, arguments, said):
    with pytest.raises(ConfigError, match=said) as refused:
        tracking_init(tracker="mlflow", **arguments)
    assert "the-password" not in str(refused.value)


def test_arguments_can_be_propagated_to_several_trackers(bare_environment):
    assert "experiment_id" in tracking_config(tracker="mlflow", experiment_id="7")["FLYTE_TRACKING_CONFIG"]


def page(page: Page | None, **arguments: object) -> str | None:
    return find_tracker("mlflow").page(TrackingConfig.from_arguments({"tracker": "mlflow", **arguments}), page)


def test_a_page_is_the_experiments_runs_with_a_filter_by_our_tag(bare_environment):
    place = {"tracking_uri": ADDRESS, "experiment_id": "7"}
    of_run = "?searchFilter=tags.%60flyteplugins_tracking.run_id%60%20%3D%20%27r%27"
    of_group = "?searchFilter=tags.%60flyteplugins_tracking.group%60%20%3D%20%27g%27"
    assert page(Page("run", "r"), **place) == f"{ADDRESS}/#/experiments/7/runs{of_run}"
    assert page(Page("group", "g"), **place) == f"{ADDRESS}/#/experiments/7/runs{of_group}"
    assert page(None, **place) == f"{ADDRESS}/#/experiments/7/runs"
    assert page(Page("run", "r"), tracking_uri=ADDRESS, project="named") == ADDRESS
    assert page(Page("run", "r"), link_host=ADDRESS, tracking_uri="http://inside:5000") == ADDRESS
    assert page(Page("run", "r")) is None
    bare_environment.setenv("MLFLOW_TRACKING_URI", "https://user:the-password@mlflow.example.com")
    assert page(Page("run", "r")) == ADDRESS


def test_flytekits_link_leads_to_the_experiment_if_its_id_is_known(bare_environment):
    def link(**arguments):
        return find_tracker("mlflow").link(TrackingConfig.from_arguments({"tracker": "mlflow", **arguments}), ())

    page = f"{ADDRESS}/#/experiments/7/runs"
    assert link(tracking_uri=ADDRESS, experiment_id=7) == {"link_type": "tracking-mlflow", "mlflow_page": page}
    assert link(tracking_uri=ADDRESS, project="named") == {"link_type": "tracking-mlflow", "mlflow_page": ADDRESS}
    assert link() == {}


@pytest.mark.parametrize(("status", "body"), [(404, "default backend"), (200, "<html>log in</html>")])
def test_a_proxys_answer_is_an_outage_if_mlflow_has_answered_before(status, body):
    pytest.importorskip("mlflow.tracking")  # loaded before the deadline: it takes long on a busy machine
    from flyteplugins_tracking.trackers.mlflow.vendor import RejectedError, Service, UnavailableError

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.02,), daemon=True).start()
        uri = f"http://127.0.0.1:{proxy.server_port}"
        for is_known, error in ((False, RejectedError), (True, UnavailableError)):
            service = Service(uri, time.monotonic() + 60, is_known=is_known)
            with pytest.raises(error, match="MLflow server"):
                service.ask(lambda client: client.set_tag("run", "a", "b"))
        proxy.shutdown()
