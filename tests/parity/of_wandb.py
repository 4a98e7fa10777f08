"""The programs with W&B. Each gets the run of `wandb.init`, or of `@tracking_init`."""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import wandb
from support import config_values

from parity.table import TABLES, Program, refusal

TABLE = TABLES["wandb"]
log, more, use, configured, ranks = (TABLE.program(kind) for kind in ("log", "more rows", "use", "config", "ranks"))


# `log` and `step=`


@log
def rows_in_a_loop(run: Any) -> int:
    for step in range(20):
        run.log({"loss": 1 / (1 + step)})
    return run.step


@log
def a_global_log(run: Any) -> None:
    wandb.log({"loss": 1})
    wandb.run.log({"loss": 2})


@log
def positional_arguments(run: Any) -> None:
    run.log({"x": 1}, 5)
    run.log({"x": 2}, 6, False)
    run.log({"x": 3}, None, True)
    run.log(data={"x": 4}, step=9, commit=True)


@log
def two_calls_for_a_row(run: Any) -> None:
    run.log({"a": 1}, commit=False)
    run.log({"b": 2})
    run.log({"c": 3}, commit=False)
    run.log({"c": 4}, commit=True)


@log
def a_last_row_without_commit(run: Any) -> None:
    run.log({"a": 1})
    run.log({"b": 2}, commit=False)


@log
def a_step_in_several_calls(run: Any) -> None:
    for step in (0, 5):
        run.log({"a": step}, step=step)
        run.log({"b": step}, step=step)
        run.log({"a": -step}, step=step)


@TABLE.program("log", differs="late_rows")
def a_step_committed_twice(run: Any) -> None:
    run.log({"a": 1}, step=1, commit=True)
    run.log({"a": 2}, step=1, commit=True)
    run.log({"a": 3}, step=2, commit=False)
    run.log({"b": 3}, step=2)


@TABLE.program("log", differs="late_rows")
def lower_steps(run: Any) -> None:
    for step in (5, 3, 6, 6, 0):
        run.log({"x": step}, step=step)


@more
def a_negative_step_first(run: Any) -> None:
    for step in (-1, 0, 1):
        run.log({"x": step}, step=step)


@TABLE.program("log", differs="late_rows")
def a_step_below_the_own_count(run: Any) -> None:
    for _ in range(5):
        run.log({"x": 1})
    run.log({"y": 1}, step=2)
    run.log({"y": 2}, step=9)


@more
def steps_of_other_types(run: Any) -> list[str]:
    import torch

    steps = (np.int64(1), np.float32(2.0), 3.0, True, torch.tensor(5), None, "6", "seven", -1, 8.5, [9])
    return [refusal(lambda i=i, step=step: run.log({"x": i}, step=step)) for i, step in enumerate(steps)]


@log
def nested_mappings(run: Any) -> None:
    run.log({"train": {"loss": 1.0, "by": {"layer": [1, 2], "head": 3}}, "empty": {}})
    run.log({"train": {"loss": 2.0}, "train/loss": 3.0, "train.loss": 4.0})


@more
def no_mapping(run: Any) -> list[str]:
    others = (None, [("x", 1)], "x", 1, {1: 2}, {None: 3}, {("a", "b"): 4}, {"ok": 5})
    return [refusal(lambda other=other: run.log(other)) for other in others]


@more
def nothing_to_log(run: Any) -> int:
    run.log({})
    run.log({"x": 1})
    run.log({}, step=5)
    run.log({})
    return run.step


@log
def not_finite(run: Any) -> None:
    for value in (float("nan"), float("inf"), -float("inf"), np.float32("nan"), 0.0):
        run.log({"x": value, "nested": {"x": value}, "listed": [value], "none": None})


@more
def numpy_values(run: Any) -> None:
    run.log(
        {name: getattr(np, name)(1) for name in ("float16", "float32", "float64", "int8", "int64", "uint8", "bool_")}
    )
    run.log({"zero_dimensions": np.array(2.5), "one_item": np.array([2.5]), "text": np.str_("text")})
    run.log({"short": np.arange(3), "long": np.arange(100.0), "matrix": np.ones((2, 3)), "empty": np.array([])})


@more
def torch_values(run: Any) -> None:
    import torch

    loss = torch.tensor(1.5, requires_grad=True) * 2
    run.log({"loss": loss, "half": torch.tensor(1.5, dtype=torch.bfloat16), "int": torch.tensor(3)})
    run.log({"one_item": torch.ones(1), "bool": torch.tensor(True), "item": loss.item()})
    run.log({"long": torch.arange(100.0), "parameter": torch.nn.Parameter(torch.ones(2, 2))})


@log
def lists_and_texts(run: Any) -> None:
    run.log({"list": [1, 2.5, "x", None], "tuple": (1, 2), "nested": [[1], [2, [3]]], "empty": []})
    run.log({"of_mappings": [{"a": 1}, {"b": {"c": 2}}]})
    run.log({"yes": True, "text": "a", "empty": "", "unicode": "Größe 漢字 🙂", "lines": "a\nb\0c"})


@log
def keys_of_all_kinds(run: Any) -> None:
    for key in ("a/b/c", "a.b", "with space", "Größe", "漢字", "", "/", ".", "a\\.b", "k" * 300, "$x", "a:b", '"q"'):
        run.log({key: 1})


@more
def keys_that_wandb_keeps(run: Any) -> None:
    run.log({"_step": 7, "_timestamp": 1.0, "_runtime": 2.0, "_own": 3, "_wandb": 4, "x": 1})
    run.log({"x": 2})


@more
def values_of_other_types(run: Any) -> list[str]:
    class Colour(enum.Enum):
        RED = 1

    others = [datetime.datetime(2026, 1, 2), datetime.date(2026, 1, 2), decimal.Decimal("1.5"), {1, 2}, b"x", range(3)]
    others += [Colour.RED, Path("a"), 1 + 2j, len, object, iter([1]), object()]
    return [refusal(lambda other=other: run.log({"x": other, "nested": {"y": other}})) for other in others]


@log
def a_row_that_changes_afterwards(run: Any) -> None:
    row = {"x": 1, "list": [1], "nested": {"y": 1}}
    for x in range(3):
        row["x"], row["nested"]["y"] = x, x  # type: ignore[index]
        run.log(row)
        row["list"].append(x)  # type: ignore[attr-defined]
    row["x"] = -1


@more
def a_long_value(run: Any) -> None:
    run.log({"text": "x" * 200_000, "list": list(range(5000))})


@more
def threads(run: Any) -> None:
    def work(number: int) -> None:
        for x in range(10):
            run.log({f"thread{number}": x})

    for number in range(3):  # in turn, so that the steps are the same each time
        thread = threading.Thread(target=work, args=(number,))
        thread.start()
        thread.join()


@more
def an_own_axis(run: Any) -> None:
    run.define_metric("epoch")
    run.define_metric("val/*", step_metric="epoch")
    for epoch in range(3):
        run.log({"train/loss": 1.0})
        run.log({"val/loss": 0.5, "epoch": epoch})


@more
def hidden_metrics(run: Any) -> None:
    wandb.define_metric("secret", hidden=True, overwrite=True)
    run.define_metric("*", step_metric="batch", step_sync=True)
    for batch in range(3):
        run.log({"secret": batch, "batch": batch * 10})
    run.log({"secret": 5})


@more
def a_summary_beside_rows(run: Any) -> list[Any]:
    run.summary["best"] = 0.9
    run.log({"best": 0.1, "last": 1})
    run.summary["best"] = 0.8
    run.log({"last": 2})
    return [run.summary["best"], run.summary.get("none"), "last" in run.summary.keys()]  # noqa: SIM118


# config, summary, metrics, alerts, files, media, the run's own fields


@use
def arguments_of_argparse(run: Any) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--restart-count", type=int, default=3)
    parser.add_argument("--flyte", default="none")
    parser.add_argument("--output-dir", type=Path, default=Path("out"))
    parser.add_argument("--layers", nargs="*", default=[1, 2])
    args = parser.parse_args([])
    run.config.update(vars(args))
    return {name: run.config[name] for name in ("lr", "distributed", "restart_count", "flyte", "layers")}


@use
def config_by_items_and_attributes(run: Any) -> list[Any]:
    run.config["a"] = 1
    run.config.b = {"c": 2}
    run.config.setdefaults({"a": 5, "d": 6})
    wandb.config.update({"e": 7})
    wandb.config.f = 8
    return [run.config.a, run.config["b"], run.config.get("none", 3), "d" in run.config, len(dict(run.config)) >= 5]


@use
def config_that_changes(run: Any) -> list[str]:
    run.config["lr"] = 1
    answers = [refusal(lambda: run.config.update({"lr": 2})), refusal(lambda: run.config.__setitem__("lr", 3))]
    run.config.update({"lr": 4}, allow_val_change=True)
    return [*answers, refusal(lambda: run.config.__setattr__("lr", 5)), str(run.config["lr"])]


@use
def summary_values(run: Any) -> list[Any]:
    run.log({"x": 1})
    run.summary["nested"] = {"a": {"b": 1}}
    run.summary.update({"nested": {"c": 2}, "numpy": np.float32(1.5), "list": [1, 2]})
    run.summary.other = 3
    wandb.summary["global"] = 4
    run.summary["gone"] = 5
    del run.summary["gone"]
    return [run.summary["nested"]["c"], run.summary["other"], run.summary.get("gone")]


@use
def alerts(run: Any) -> None:
    run.alert("title", "text")
    run.alert(title="low", text="accuracy", level=wandb.AlertLevel.WARN, wait_duration=300)
    wandb.alert("global", "text", level="ERROR")


@use
def a_watched_model(run: Any) -> None:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    run.watch(model, log="all", log_freq=1)
    for _ in range(2):
        model(torch.ones(3, 2)).sum().backward()
        run.log({"loss": 1})
    run.unwatch(model)
    wandb.watch(model, log_graph=True, log=None)
    model(torch.ones(3, 2))


@use
def artifacts(run: Any) -> None:
    folder = Path("dataset")
    (folder / "inner").mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text("a")
    (folder / "inner" / "b.txt").write_text("b")
    model = wandb.Artifact("model", "model", description="a model", metadata={"layers": 2})
    model.add_file(str(folder / "a.txt"), name="weights.bin")
    with model.new_file("note.txt") as file:
        file.write("note")
    run.log_artifact(model, aliases=["best", "epoch-1"])
    data = wandb.Artifact("data", "dataset")
    data.add_dir(str(folder))
    data.add_reference("https://127.0.0.1:9/x", checksum=False)
    wandb.log_artifact(data)


@use
def saved_files(run: Any) -> None:
    for name in ("now.txt", "end.txt", "live.txt", "sub/a.ckpt", "sub/b.ckpt"):
        Path("saved", name).parent.mkdir(parents=True, exist_ok=True)
        Path("saved", name).write_text(name)
    run.save("saved/now.txt", policy="now", base_path="saved")
    run.save("saved/end.txt", policy="end")
    wandb.save("saved/live.txt")
    run.save("saved/sub/*.ckpt", base_path="saved")
    Path("saved/live.txt").write_text("changed")
    Path(run.dir, "by-hand.txt").write_text("in the run's directory")


@use
def tables(run: Any) -> None:
    run.log({"t": wandb.Table(columns=["a", "b"], data=[[1, "x"], [2, "y"]])})
    table = wandb.Table(columns=["a"])
    table.add_data(3)
    wandb.log({"nested": {"t": table}, "x": 1})
    run.log({"plot": wandb.plot.line(table, "a", "a", title="a line")})


@use
def pictures(run: Any) -> None:
    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    run.log({"one": wandb.Image(pixels, caption="first")})
    run.log({"several": [wandb.Image(pixels), wandb.Image(pixels[::-1])], "x": 1})
    run.summary["last"] = wandb.Image(pixels)


@use
def preempting(run: Any) -> None:
    run.log({"x": 1})
    wandb.mark_preempting()


@use
def names_tags_notes(run: Any) -> list[Any]:
    run.name = "renamed"
    run.notes = "a note"
    run.tags = ("a", "b")
    run.tags += ("c",)
    return [
        run.name,
        run.notes,
        list(run.tags),
        run.id,
        run.project,
        run.group,
        run.job_type,
        run.resumed,
        run.disabled,
    ]


@use
def attributes_of_a_run(run: Any) -> list[Any]:
    run.log({"x": 1})
    is_the_global_one = wandb.run is not None and wandb.run.id == run.id
    is_the_page = run.id in run.to_html() and run.id in str(run.url)
    told = [run.entity, run.path, run.sweep_id, run.offline, run.step, run.starting_step, bool(run)]
    return [*told, is_the_global_one, is_the_page, type(run.status()).__name__]


@use
def the_console(run: Any) -> None:
    print("SAID on standard output")
    print("SAID on standard error", file=sys.stderr)
    os.write(1, b"SAID through the file descriptor\n")
    print("SAID at the end without a newline", end="")


@use
def a_global_finish_twice(run: Any) -> None:
    run.log({"x": 1})
    wandb.finish()
    wandb.finish()


@TABLE.program("use", differs="own_end")
def rows_after_the_finish(run: Any) -> str:
    run.log({"x": 1})
    run.finish()
    return refusal(lambda: run.log({"x": 2}))


# what `wandb.init` takes


def opening(name: str, /, differs: str = "", **options: Any) -> None:
    def body(run: Any) -> None:
        run.log({"x": 1})

    TABLE.add(Program("open", name, body, lambda: options, differs))


opening("no_name", name="", notes="", group="", tags=[])
opening("all_texts", name="Größe 🙂 / : .", notes="two\nlines", group="g", job_type="train", tags=["a", "b"])
opening("one_tag", differs="one_tag", tags="abc")
opening("an_entity", entity="team")
opening("a_config", config={"lr": 0.1, "nested": {"a": [1, {"b": 2}]}})
opening("a_namespace_config", config=argparse.Namespace(lr=0.1))
opening("excluded_keys", config={"lr": 0.1, "secret": 1}, config_exclude_keys=["secret"])
opening("included_keys", config={"lr": 0.1, "other": 1}, config_include_keys=["lr"])
opening("a_directory", dir="elsewhere")
opening("settings_as_a_mapping", settings={"x_disable_stats": True, "console": "off"})
opening("settings_as_an_object", settings=wandb.Settings(x_disable_meta=True))
opening("resume_allowed", resume="allow")
opening("disabled", mode="disabled")


# two ranks under torchrun: a rank without a run gets None


@ranks
def the_first_rank_logs(run: Any) -> bool:
    if run is not None:
        for step in range(3):
            run.log({"loss": step}, step=step)
        run.summary["best"] = 1
        run.config.update({"lr": 0.1})
    return run is None


@ranks
def all_ranks_call_a_guarded_log(run: Any) -> bool:
    for step in range(3):
        if wandb.run is not None:
            wandb.log({"loss": step})
    return wandb.run is None


@ranks
def a_rank_that_logs_without_a_run(run: Any) -> str:
    return refusal(lambda: wandb.log({"x": 1}))


# values of the config, one by one: `tests/jobs/test_config_values.py` has those of `config=`

VALUES = [case for case in config_values.VALUES if case.is_there and case.bare_ends]


@configured
def values_by_update(run: Any) -> dict[str, str]:
    return {case.name: refusal(lambda case=case: run.config.update({case.key: case.make()})) for case in VALUES}


@configured
def whole_configs(run: Any) -> list[str]:
    """What `config.update` takes as a whole."""
    import omegaconf

    file = Path("config.yaml")
    file.write_text("from_file:\n  value: 1\n")
    cases = {case.name: case for case in VALUES}
    names = ("Namespace", "dataclass", "mappingproxy", "UserDict", "list", "text", "None", "pydantic", "namedtuple")
    others = [*(cases[name].make() for name in names), omegaconf.OmegaConf.create({"hydra": 1}), str(file)]
    return [refusal(lambda other=other: run.config.update(other)) for other in others]


def config_of(name: str, make: Callable[[], Any], differs: str = "") -> None:
    TABLE.add(Program("config", name, lambda run: sorted(dict(run.config)), lambda: {"config": make()}, differs))


def case_of(name: str) -> Callable[[], Any]:
    return next(case.make for case in VALUES if case.name == name)


config_of("a_namespace_as_config", lambda: argparse.Namespace(lr=0.1, layers=[1, 2]))
config_of("a_dataclass_as_config", case_of("dataclass"))
config_of("omegaconf_as_config", case_of("OmegaConf"), differs="config")
config_of("pydantic_as_config", case_of("pydantic"), differs="config")
config_of("no_config", lambda: None)
