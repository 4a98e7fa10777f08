"""MLflow: a real server, real clients, real torchrun. What holds for every tracker is in `test_conformance.py`."""

from __future__ import annotations

import http.server
import threading
import time

import pytest

from flyteplugins_tracking import ConfigError, tracking_config, tracking_init
from flyteplugins_tracking._rank.plan import Page
from flyteplugins_tracking.trackers.config import TrackingConfig
from flyteplugins_tracking.trackers.mlflow.vendor import alone_with
from flyteplugins_tracking.trackers.registry import find_tracker

ADDRESS = "https://mlflow.example.com"


def test_one_at_a_time_opens_a_store_that_is_a_file(tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    order: list[str] = []

    def second() -> None:
        with alone_with(uri, None):
            order.append("second")

    beside = threading.Thread(target=second)
    with alone_with(uri, None):
        beside.start()
        with alone_with(uri, time.monotonic() + 0.3), alone_with("http://127.0.0.1:1", None):
            order.append("past the deadline")
        order.append("first")
    beside.join(timeout=60)
    assert order == ["past the deadline", "first", "second"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"experiment_name": "a", "experiment_id": "1"}, "twice"),
        ({"experiment_id": True}, "must be a string or an integer"),
        ({"log_system_metrics": "yes"}, "must be True or False"),
        ({"link_host": "mlflow"}, "must begin with https://"),
        ({"tracking_uri": "https://user:the-password@host"}, "secret="),
        ({"trackin_uri": "http://host"}, "tracking_uri"),
        ({"id": "it's"}, "must not contain"),
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


def test_flytekits_links_lead_to_the_experiment_if_its_id_is_known(bare_environment):
    tracker = find_tracker("mlflow")

    def link(pages, **arguments):
        return tracker.link(
            TrackingConfig.from_arguments({"tracker": "mlflow", "tracking_uri": ADDRESS, **arguments}), pages
        )

    run, group = (Page("run", ""),), (Page("group", ""),)
    known = {"mlflow_host": ADDRESS, "mlflow_experiment_id": "7"}
    assert link(run, experiment_id=7) == {"link_type": "tracking-mlflow", **known}
    assert link(run, experiment_id=7, id="x") == {"link_type": "tracking-mlflow-id", **known, "mlflow_id": "x"}
    assert link(group, experiment_id=7) == {"link_type": "tracking-mlflow-group", **known}
    assert link(None, experiment_id=7) == {"link_type": "tracking-mlflow-experiment", **known}
    assert link(run, project="named") == {"link_type": "tracking-mlflow-host", "mlflow_host": ADDRESS}
    assert tracker.link(TrackingConfig.from_arguments({"tracker": "mlflow"}), run) == {}


@pytest.mark.parametrize(("status", "body"), [(404, "default backend"), (200, "<html>log in</html>")])
def test_a_proxys_answer_is_an_outage_if_mlflow_has_answered_before(status, body):
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
            with pytest.raises(error, match="MLflow server"):
                Service(uri, is_known=is_known).log("run")
        proxy.shutdown()
