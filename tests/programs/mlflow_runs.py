"""Runs of MLflow that `test_mlflow_jobs.py` looks at. Arguments: a function below, and its own arguments.

Each process writes what it saw as JSON to `seen-{rank}`.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

DIRECTORY = Path(os.environ["TRAIN_DIR"])
SEEN: dict[str, object] = {}


def fluent(project: str) -> None:
    """MLflow's own functions, in one process without ranks."""
    import mlflow

    from flyteplugins_tracking import get_run, tracking_init

    tracking = {"tracker": "mlflow", "project": project, "id": "fluent"}

    @tracking_init(
        **tracking, config={"lr": 0.1, "deep": {"a": 1}}, name="named", tags={"plain": "", "team": "m=l"}, notes="why"
    )
    def train() -> None:
        run = get_run()
        SEEN["is_active"] = mlflow.active_run() is run and isinstance(run, mlflow.ActiveRun)
        SEEN["run_id"], SEEN["url"], SEEN["resumed"] = run.run_id, run.url, run.resumed
        with run:
            run.log({"loss": 1.0})
        mlflow.end_run()
        mlflow.MlflowClient().set_terminated(run.run_id, "FINISHED")  # as Lightning's logger does
        SEEN["status_inside"] = mlflow.MlflowClient().get_run(run.run_id).info.status
        mlflow.log_metric("fluent", 1.0)
        with mlflow.start_run(nested=True):
            mlflow.log_metric("child", 1.0)
        SEEN["is_active_after"] = mlflow.active_run() is run
        run.log({"truth": True, "none": None, "nan": float("nan"), "inf": float("inf"), "text": "x", "odd#key": 1.0})
        run.log({"loss": 3.0}, step=7)
        run.log({"loss": 4.0})
        run.log_params({"late": 1})
        run.log_param("lr", 5)
        run.set_tag("later", "tag")
        mlflow.log_dict({"a": 1}, "a.json")
        in_other_threads()
        in_a_child()
        as_a_called_task()

    train()
    SEEN["active_outside"], SEEN["last_active"] = mlflow.active_run(), mlflow.last_active_run().info.run_id

    @tracking_init(**tracking, config={"lr": 0.2})
    def again() -> None:
        SEEN["resumed_again"] = get_run().resumed
        get_run().log({"loss": 5.0})
        sys.exit(3)

    with suppress(SystemExit):
        again()
    chosen(project)


def in_other_threads() -> None:
    from flyteplugins_tracking import get_run

    thread = threading.Thread(target=lambda: get_run().log({"thread": 1.0}))
    thread.start()
    thread.join()


def in_a_child() -> None:
    import mlflow

    from flyteplugins_tracking import get_run

    run = get_run()
    run.log({"before_fork": 1.0})
    child = os.fork()
    if child == 0:
        run.log({"forked": 1.0})
        run.log_params({"forked": 1})
        os._exit(int(get_run() is not None or mlflow.active_run() is not None))
    SEEN["child"] = os.waitpid(child, 0)[1]


def as_a_called_task() -> None:
    """Open the caller's run as a called Flyte 2 task does in its own pod, from what is passed on to it."""
    import mlflow

    from flyteplugins_tracking import get_run
    from flyteplugins_tracking._rank.plan import plan
    from flyteplugins_tracking.trackers.base import NoSigterm, RunRequest
    from flyteplugins_tracking.trackers.config import TrackingConfig
    from flyteplugins_tracking.trackers.registry import find_tracker

    tracker = find_tracker("mlflow")
    passed_on = json.loads(json.dumps(tracker.export_run(get_run())))
    request = RunRequest(
        plan=plan(None, "auto", "global", None, passed_on["id"]),
        planned_run_id=passed_on["id"],
        config=TrackingConfig.from_arguments({"tracker": "mlflow", "experiment_name": "another"}).for_parent(passed_on),
        info=None,
        has_other_writers=True,
        run_metadata={},
        read_secret=lambda: None,
        may_prompt=False,
        sigterm=NoSigterm(),
        deadline=time.monotonic() + 20,
    )
    handle = tracker.open(request)
    handle.run.log({"called": 1.0})
    handle.finish(1)
    SEEN["status_after_call"] = mlflow.MlflowClient().get_run(get_run().run_id).info.status


def chosen(project: str) -> None:
    """The very run that MLFLOW_RUN_ID names."""
    import mlflow

    from flyteplugins_tracking import get_run, tracking_init

    client = mlflow.MlflowClient()
    made = client.create_run(client.get_experiment_by_name(project).experiment_id).info.run_id
    os.environ["MLFLOW_RUN_ID"] = made

    @tracking_init(tracker="mlflow", project=project)
    def train() -> None:
        with mlflow.start_run(nested=True) as nested:
            SEEN["is_nested"] = nested.info.run_id != made
        get_run().log({"chosen": 1.0})
        SEEN["is_chosen"] = (get_run().id, get_run().run_id) == (made, made)

    train()
    SEEN["variable"] = os.environ.pop("MLFLOW_RUN_ID") == made
    SEEN["chosen"] = made


def ranks(project: str) -> None:
    """Autologging, and "new" with a rank that fails."""
    import mlflow
    import mlflow.sklearn
    from sklearn.linear_model import LinearRegression

    from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

    rank = get_distributed_info()["rank"]

    @tracking_init(tracker="mlflow", project=project, id="auto")
    def auto() -> None:
        mlflow.sklearn.autolog(log_models=False, log_datasets=False)
        LinearRegression().fit([[0.0], [1.0]], [0.0, 1.0])
        SEEN["run"] = get_run() is not None

    auto()

    @tracking_init(tracker="mlflow", project=project, run_mode="new", id="new", log_system_metrics=True)
    def new(fails: bool) -> None:
        get_run().log({"rank": rank})
        if rank == 0:
            wait_until(has_system_metrics)
            (DIRECTORY / "sampled").touch()
        wait_until((DIRECTORY / "sampled").exists)
        if fails:
            raise ValueError("made to fail")

    def has_system_metrics() -> bool:
        return any(key.startswith("system/") for key in client.get_run(get_run().run_id).data.metrics)

    client = mlflow.MlflowClient()
    with suppress(ValueError):
        new(fails=rank == 1)
    note()
    wait_until(lambda: len(list(DIRECTORY.glob("seen-?"))) == 2)
    new(fails=False)


def starts(project: str) -> None:
    """Scripts that start their run themselves, as MLflow's examples do."""
    global start_run  # as a script imports it at its top
    import mlflow
    from mlflow import start_run

    from flyteplugins_tracking import get_distributed_info, get_run, tracking_init

    rank = get_distributed_info()["rank"]

    def script(**arguments: object) -> None:
        run = get_run()
        if run is None:
            return
        with mlflow.start_run(run_name="inner", tags={"t": rank}, description="by the script", **arguments) as started:
            SEEN["is_own"] = started is run and mlflow.active_run() is run
            mlflow.log_metric(f"x{rank}", 1.0)
            with mlflow.start_run(nested=True, run_name="child") as child:
                mlflow.log_metric("of_child", 1.0)
            SEEN["is_child"] = child is not run
        mlflow.end_run()
        SEEN["is_joined_again"] = start_run() is run
        mlflow.log_metric(f"x{rank}", 2.0, step=1)

    tracking_init(tracker="mlflow", project=project, id="auto")(script)(experiment_id="0", log_system_metrics=True)
    tracking_init(tracker="mlflow", project=project, id="kept", name="outer", notes="outer", tags=["a"])(script)()
    tracking_init(tracker="mlflow", project=project, id="shared", run_mode="shared")(script)()

    def fails() -> None:
        with mlflow.start_run():
            raise ValueError("made to fail")

    with suppress(ValueError):
        tracking_init(tracker="mlflow", project=project, id="failed", run_mode="new")(fails)()
    with mlflow.start_run(run_name=f"outside-{rank}", experiment_id="0"):
        SEEN["outside"] = mlflow.active_run().info.run_name


def outage(project: str) -> None:
    """The test stops the server in the middle of each of two runs: until 200 rows are logged, and until the end."""
    from flyteplugins_tracking import get_run, tracking_init

    @tracking_init(tracker="mlflow", project=project, id="outage", kill_after_s=65)
    def train() -> None:
        slowest = 0.0
        for number in range(600):
            if number == 200:
                (DIRECTORY / "started").touch()
                wait_until((DIRECTORY / "is-stopped").exists)
            if number == 400:
                (DIRECTORY / "logged-in-outage").touch()
            at = time.perf_counter()
            get_run().log({"loss": float(number)})
            slowest = max(slowest, time.perf_counter() - at)
            time.sleep(0.01)
        SEEN["slowest_s"] = slowest

    @tracking_init(tracker="mlflow", project=project, id="mute", kill_after_s=6)
    def ends_mute() -> None:
        get_run().log({"loss": 0.0})
        time.sleep(1)
        (DIRECTORY / "mute").touch()
        wait_until((DIRECTORY / "is-mute").exists)
        for number in range(1, 50):
            get_run().log({"loss": float(number)})
        get_run().log_params({"late": 1})
        SEEN["ends_at"] = time.perf_counter()

    train()
    ends_mute()
    SEEN["end_s"] = time.perf_counter() - float(str(SEEN["ends_at"]))


def unavailable(*uris: str) -> None:
    """Note the error of opening a run at each address, and how long it takes."""
    import mlflow  # noqa: F401 at no run's cost

    from flyteplugins_tracking import TrackingError, tracking_init

    for uri in uris:
        started = time.perf_counter()
        try:
            secret = {"secret": lambda: "user:the-password"}
            tracking = {"project": "p", "tracking_uri": uri, "init_timeout_s": 3, "if_unavailable": "raise", **secret}
            tracking_init(tracker="mlflow", **tracking)(lambda: None)()
        except TrackingError as error:
            SEEN[uri] = [type(error).__name__, str(error), time.perf_counter() - started]
    SEEN["variables"] = [name for name in os.environ if name.startswith("MLFLOW_TRACKING_")]


def note() -> None:
    path = DIRECTORY / f"seen-{os.environ.get('RANK', 0)}"
    path.with_suffix(".new").write_text(json.dumps(SEEN, default=str))
    path.with_suffix(".new").rename(path)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the test or the other rank did not do what this process waits for")
        time.sleep(0.02)


if __name__ == "__main__":
    logging.basicConfig()
    globals()[sys.argv[1]](*sys.argv[2:])
    note()
