"""The programs with MLflow, Trackio and Pluto. Each gets the run of the vendor's opening, or of `@tracking_init`."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

from parity.table import TABLES, refusal

mlflow_run, mlflow_end = (TABLES["mlflow"].program(kind) for kind in ("run", "end"))
trackio_run, trackio_end = (TABLES["trackio"].program(kind) for kind in ("run", "end"))
pluto_run, pluto_end = (TABLES["pluto"].program(kind) for kind in ("run", "end"))


# MLflow


@mlflow_run
def metrics(run: Any) -> None:
    import mlflow

    mlflow.log_metric("loss", 0.5)
    mlflow.log_metric("loss", 0.25, step=1)
    mlflow.log_metrics({"a": 1, "b/c": 2.5, "d e": 3}, step=7)
    mlflow.log_metric("a", 2, step=3)
    mlflow.log_metrics({"nan": math.nan, "inf": math.inf, "minus": -math.inf})


@mlflow_run
def metrics_of_other_types(run: Any) -> list[str]:
    import mlflow
    import numpy as np
    import torch

    values = (np.float32(0.5), np.array(2), torch.tensor(1.5), True, None, "text", "1.5", [1])
    return [refusal(lambda i=i, value=value: mlflow.log_metric(f"m{i}", value)) for i, value in enumerate(values)]


@mlflow_run
def params(run: Any) -> list[str]:
    import mlflow

    mlflow.log_param("lr", 0.1)
    mlflow.log_params({"layers": [1, 2], "none": None, "nested": {"a": 1}, "distributed": False, "long": "x" * 1000})
    return [refusal(lambda: mlflow.log_param("lr", 0.1)), refusal(lambda: mlflow.log_param("lr", 0.2))]


@mlflow_run
def tags(run: Any) -> None:
    import mlflow

    mlflow.set_tag("stage", "test")
    mlflow.set_tags({"a": 1, "b": None, "release.version": "2"})
    mlflow.set_tag("gone", 1)
    mlflow.delete_tag("gone")
    mlflow.set_tag("mlflow.note.content", "a note")


@mlflow_run
def artifacts(run: Any) -> None:
    import mlflow

    Path("model.bin").write_bytes(b"weights")
    mlflow.log_artifact("model.bin")
    mlflow.log_artifact("model.bin", artifact_path="models")
    mlflow.log_text("hello", "notes/hello.txt")
    mlflow.log_dict({"a": 1}, "a.json")


@mlflow_run
def nested_runs(run: Any) -> None:
    import mlflow

    with mlflow.start_run(nested=True, run_name="child-of-nested-runs"):
        mlflow.log_metric("child", 1)
    mlflow.log_metric("parent", 2)


@mlflow_run
def autologging(run: Any) -> None:
    import mlflow
    import mlflow.sklearn
    from sklearn.linear_model import Ridge

    mlflow.sklearn.autolog(log_models=False, log_datasets=False)
    Ridge().fit([[0.0], [1.0], [2.0]], [0.0, 1.0, 2.0])
    mlflow.sklearn.autolog(disable=True)


@TABLES["mlflow"].program("end", differs="unseen_end")
def mlflow_raises(run: Any) -> NoReturn:
    raise ValueError("made to fail")


@TABLES["mlflow"].program("end", differs="unseen_end")
def mlflow_exits(run: Any) -> NoReturn:
    sys.exit(3)


@TABLES["mlflow"].program("end", differs="sigterm")
def mlflow_sigterm(run: Any) -> None:
    import mlflow

    mlflow.log_metric("x", 1)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(60)


@mlflow_end
def mlflow_ends_as_failed(run: Any) -> None:
    import mlflow

    mlflow.log_metric("x", 1)
    mlflow.end_run("FAILED")


@TABLES["mlflow"].program("end")
def mlflow_with_block_whose_failure_is_handled(run: Any) -> None:
    with contextlib.suppress(ValueError), run:
        raise ValueError("in the block")


# Trackio


@trackio_run
def rows(run: Any) -> None:
    import trackio

    for step in range(3):
        trackio.log({"loss": step / 2, "epoch": step})
    run.log({"nan": math.nan, "inf": math.inf, "minus": -math.inf})


@trackio_run
def rows_with_steps(run: Any) -> None:
    import trackio

    for step in (0, 10, 5, 5):
        trackio.log({"loss": step}, step=step)
    trackio.log({"loss": 1})


@TABLES["trackio"].program("run", differs="values")
def rows_of_other_types(run: Any) -> list[str]:
    import numpy as np
    import torch
    import trackio

    values = ("text", True, None, [1, 2], {"a": {"b": 1}}, np.float32(0.5), np.int64(3), torch.tensor(1.5))
    return [refusal(lambda value=value: trackio.log({"x": value})) for value in values]


@trackio_run
def keys(run: Any) -> None:
    import trackio

    trackio.log({"a/b": 1, "a.b": 2, "with space": 3, "Größe": 4})
    trackio.log({})


def a_config() -> dict[str, Any]:
    return {"config": {"lr": 0.1, "nested": {"a": [1, None]}, "distributed": True}}


@TABLES["trackio"].program("run", options=lambda: {**a_config(), "group": "g"})
def a_run_with_a_config(run: Any) -> Any:
    run.log({"x": 1})
    return run.config["lr"]


@trackio_run
def trackio_alerts(run: Any) -> None:
    import trackio

    trackio.log({"x": 1})
    trackio.alert("title", "text")
    trackio.alert(title="low", text="accuracy", level=trackio.AlertLevel.ERROR)


@TABLES["trackio"].program("end")
def trackio_raises(run: Any) -> NoReturn:
    run.log({"x": 1})
    raise ValueError("made to fail")


# Pluto


@pluto_run
def pluto_rows(run: Any) -> None:
    for step in range(3):
        run.log({"loss": step / 2, "a/b": 1, "a.b": 2, "with space": step})


@pluto_run
def pluto_rows_with_steps(run: Any) -> None:
    for step in (0, 10, 11):
        run.log({"loss": step}, step=step)
    run.log({"loss": 1})


@TABLES["pluto"].program("run", differs="values")
def pluto_rows_of_other_types(run: Any) -> list[str]:
    import numpy as np
    import torch

    values = (np.float32(0.5), np.int64(3), torch.tensor(1.5), True)
    return [refusal(lambda i=i, value=value: run.log({f"x{i}": value})) for i, value in enumerate(values)]


@TABLES["pluto"].program("run", options=a_config)
def pluto_config(run: Any) -> None:
    run.log({"x": 1})


@TABLES["pluto"].program("run", options=lambda: {"tags": ["a", "b"]})
def pluto_tags(run: Any) -> None:
    run.add_tags(["c"])
    run.remove_tags(["a"])


@TABLES["pluto"].program("end")
def pluto_raises(run: Any) -> NoReturn:
    run.log({"x": 1})
    raise ValueError("made to fail")


@TABLES["pluto"].program("end", differs="unseen_end")
def pluto_exits(run: Any) -> NoReturn:
    run.log({"x": 1})
    sys.exit(3)
