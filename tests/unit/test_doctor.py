"""The doctor: what it prints about launchers, runs, trackers and problems, without keys; one document for a job."""

from __future__ import annotations

import base64
import functools
import json
import logging
import os
import secrets
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.jobs import PACKAGE, TIME_SCALE
from support.loopback import Fault
from support.wandb_server import WandbServer
from test_topology import FLUX, OPENMPI, PALS, SLURM, TORCHRUN

from flyteplugins_tracking import TrackerNotInstalledError
from flyteplugins_tracking import __main__ as commands
from flyteplugins_tracking._commands import doctor
from flyteplugins_tracking._rank import launchers
from flyteplugins_tracking._runs.opening import require
from flyteplugins_tracking._util.warn_once import WarnOnce
from flyteplugins_tracking.trackers import registry
from flyteplugins_tracking.trackers.base import Tracker
from flyteplugins_tracking.trackers.diagnostics import Diagnosis, Diagnostic
from flyteplugins_tracking.trackers.registry import find_tracker

KEY = "a1b2" * 10

CANARY = "canary" + secrets.token_hex(17)

CLOSED = "127.0.0.1:9"  # nobody listens there


@pytest.fixture
def env(bare_environment, tmp_path, monkeypatch):
    """Set variables in an environment that is otherwise bare."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)

    def set_all(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


@pytest.fixture
def pluto(tmp_path, monkeypatch):
    """Have Pluto's client count as installed: it is in a virtual environment of its own."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "pluto.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")


@functools.cache
def version_on(distribution: str, *_path: str) -> str:
    return version(distribution)


@pytest.fixture
def ask(env, capsys, monkeypatch):
    """Call the doctor with variables. Returns status, stdout and stderr."""
    # The doctor reads 40 packages' versions: here once for each search path.
    monkeypatch.setattr("importlib.metadata.version", lambda name: version_on(name, *sys.path))

    def call(*arguments: str, **variables: str) -> tuple[int, str, str]:
        env(**variables)
        status = doctor.main(arguments)
        return (status, *capsys.readouterr())

    return call


def diagnostics(out: str, level: str = "") -> str:
    return "\n".join(f["text"] + " -> " + f["fix"] for f in json.loads(out)["diagnostics"] if level in ("", f["level"]))


LAUNCHERS: dict[str, dict[str, str]] = {
    "torchelastic": {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"},
    "slurm": {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    "openmpi": {**OPENMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    "env": {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"},
    "lightning": {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "NODE_RANK": "0"},
    "horovod": {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "0", "HOROVOD_LOCAL_SIZE": "2"},
    "mpich": {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
    "pals": {**PALS, "PMI_RANK": "0", "PMI_LOCAL_RANK": "0"},
    "kubeflow": {"RANK": "0", "WORLD_SIZE": "2", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    "env_rank": {"RANK": "0", "WORLD_SIZE": "2"},
    "konduktor": {"KONDUKTOR_JOB_NAME": "j", "RANK": "0", "NUM_NODES": "2"},
    "flux": {**FLUX, "FLUX_TASK_RANK": "0", "FLUX_TASK_LOCAL_ID": "0"},
    "skypilot": {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_TASK_ID": "t"},
}


def test_every_launcher_that_sets_variables_is_tested_here():
    assert set(LAUNCHERS) | {"process_group", "jax", "ray"} == set(launchers.LAUNCHERS)


def test_the_launcher_is_reported_with_the_variables_that_were_read(ask, subtests):
    unused = {"OMPI_COMM_WORLD_NODE_RANK"}  # which is not the node
    for launcher, variables in LAUNCHERS.items():
        with subtests.test(launcher), pytest.MonkeyPatch.context() as patched:
            for name, value in {**variables, "UNRELATED": "1"}.items():
                patched.setenv(name, value)
            document = json.loads(ask("--json", "--offline")[1])
            assert document["detected"]["job"]["launcher"] == launcher
            assert document["detected"]["variables"] == {k: v for k, v in variables.items() if k not in unused}
            assert len(document["plans"]) == 6


def test_variables_that_contradict_each_other_are_an_error(ask):
    status, out, err = ask("--offline", RANK="8", WORLD_SIZE="8", LOCAL_RANK="0")
    assert (status, err) == (1, "")
    assert "error: RANK=8 and WORLD_SIZE=8 contradict each other: 8 is not below 8\n    -> unset RANK WORLD_SIZE" in out
    assert "run_mode" not in out


def test_without_a_launcher_the_doctor_shows_how_to_start_a_job(ask):
    status, out, err = ask("--offline", WANDB_API_KEY=KEY)
    assert (status, err) == (0, "")
    assert "none: one process" in out
    assert "torchrun --nproc-per-node=2 train.py" in out
    assert out.endswith("no errors\n")


def plans_of(out: str) -> list[tuple[Any, ...]]:
    assert [tuple(row)[:2] for row in json.loads(out)["plans"]] == [("run_mode", "rank_scope")] * 6
    return [tuple(row.values())[2:6] for row in json.loads(out)["plans"]]


def world(ranks: int, ranks_of_worker: int, workers: int) -> dict[str, str]:
    """The variables of rank 0 of a job."""
    sizes = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks_of_worker, "GROUP_WORLD_SIZE": workers}
    return {**LAUNCHERS["env"], **{name: str(size) for name, size in sizes.items()}}


def test_the_plan_of_each_mode_and_scope_is_for_this_world(ask):
    workers, group = "{base}-worker-{0..1}", "{base}"
    assert plans_of(ask("--json", "--offline", **world(8, 4, 2))[1]) == [
        (1, group, None, "rank 0"),
        (2, workers, group, "local rank 0"),
        (1, group, None, "all ranks"),
        (2, workers, group, "all local ranks"),
        (8, "{base}-rank-{0..7}", group, "each rank"),
        (8, f"{workers}-rank-{{0..3}}", workers, "each rank"),
    ]


def test_the_plan_is_for_the_id_that_is_asked_for_and_for_workers_of_any_size(ask):
    variables = {**world(11, 3, 3), "WANDB_RUN_ID": "b-7"}  # the other two workers share 8 ranks
    _, out, _ = ask("--json", "--offline", **variables)
    assert plans_of(out)[1] == (3, "b-7-worker-{0..2}", "b-7", "local rank 0")
    assert plans_of(out)[4][:2] == (11, "b-7-rank-{0..10}")
    assert json.loads(out)["base_id"] == {"base_id": "b-7", "source": "WANDB_RUN_ID"}
    assert "WANDB_RUN_ID=b-7: every job" in diagnostics(out, "warning")


def test_the_scope_worker_is_refused_if_the_workers_are_unknown(ask):
    _, out, _ = ask("--offline", WANDB_API_KEY=KEY, **LAUNCHERS["openmpi"])
    assert out.count("refused: see the diagnostics") == 3
    assert (
        "warning: rank_scope='worker', but openmpi does not set the worker (node) and the local rank of rank 0" in out
    )


# The variables, the level of the diagnostic, and its text.
WRONG: dict[str, tuple[dict[str, str], str, str]] = {
    "a mode": ({"WANDB_MODE": "disabled"}, "warning", "WANDB_MODE=disabled: nothing is logged -> unset WANDB_MODE"),
    "turned off": (
        {"FLYTE_TRACKING_MODE": "disabled"},
        "warning",
        "FLYTE_TRACKING_MODE=disabled: no rank has a run -> unset FLYTE_TRACKING_MODE",
    ),
    "an unknown mode": ({"FLYTE_TRACKING_MODE": "no"}, "error", "FLYTE_TRACKING_MODE='no' is not one of"),
    "offline": (
        {"WANDB_MODE": "offline"},
        "warning",
        "nothing is sent -> unset WANDB_MODE, or wandb online; afterwards",
    ),
    "no key": ({"WANDB_PROJECT": "p"}, "error", "there is no API key: WANDB_API_KEY is not set"),
    "a line end": ({"WANDB_API_KEY": KEY + "\n"}, "error", "spaces or a line end around it"),
    "files": ({"WANDB_DIR": "/dev/null"}, "warning", "/dev/null is not a directory -> export WANDB_DIR="),
    "an address": ({"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://h\n"}, "error", "around it, which W&B refuses"),
    "sbatch": ({"SLURM_JOB_ID": "7"}, "warning", "counts as the only one -> srun python train.py"),
    "no agreement": (LAUNCHERS["env"], "warning", "no run id that all nodes agree on: env offers none"),
    "Pluto's servers": (
        {"PLUTO_URL_API": "http://x"},
        "error",
        "PLUTO_URL_APP, PLUTO_URL_INGEST, PLUTO_URL_PY not set",
    ),
    "MLflow's files": (
        {"MLFLOW_TRACKING_URI": "./mlruns"},
        "warning",
        "MLflow does not develop runs in files any further",
    ),
    "MLflow's database": ({"MLFLOW_TRACKING_URI": "sqlite:////dev/null/a.db"}, "error", "/dev/null is not a directory"),
    "MLflow's address": ({"MLFLOW_TRACKING_URI": "localhost:5000"}, "warning", "that begin with localhost: -> export"),
    "Trackio's token": ({"TRACKIO_SERVER_URL": "http://x"}, "error", "wants a write token"),
    "Trackio's files": ({"TRACKIO_DIR": "/dev/null/x"}, "error", "Trackio keeps runs in /dev/null/x"),
}


@pytest.mark.usefixtures("pluto")
def test_a_problem_is_reported_with_the_value_and_a_fix(ask, subtests):
    for case, (variables, level, message) in WRONG.items():
        with subtests.test(case), pytest.MonkeyPatch.context() as patched:
            for name, value in variables.items():
                patched.setenv(name, value)
            status, out, err = ask("--json", "--offline")
            assert message in diagnostics(out, level)
            assert (status, err) == (int(bool(diagnostics(out, "error"))), "")


def test_a_tracker_that_is_set_up_and_not_installed_is_reported(ask):
    status, out, _ = ask("--json", "--offline", WANDB_API_KEY=KEY, PLUTO_API_KEY=KEY)
    assert (status, diagnostics(out, "error")) == (0, "")
    fix = 'pip install "flyteplugins-tracking[pluto]"'
    assert f"Pluto is not installed, but it is set up here -> {fix}" in diagnostics(out, "warning")
    status, out, _ = ask("--json", "--offline", "--tracker=pluto")
    assert (status, diagnostics(out, "error")) == (1, f"Pluto is not installed -> {fix}")


def test_a_server_of_another_kind_is_not_accepted(ask, monkeypatch):
    monkeypatch.setattr(doctor, "_ANSWER_S", 5 * TIME_SCALE)
    with WandbServer() as server:
        variables = {**server.environment, "TRACKIO_SERVER_URL": server.url, "TRACKIO_WRITE_TOKEN": "t"}
        status, out, _ = ask("--json", **variables)
        reached = {state["name"]: state["reachable"] for state in json.loads(out)["trackers"]}
        assert (status, reached["wandb"], reached["trackio"]) == (1, True, False)
        assert "and not as a Trackio server does" in diagnostics(out, "error")
        assert ask("--tracker", "wandb")[0] == 0  # and its key is not sent

        server.fault = Fault.status(503)
        _, out, _ = ask("--json", "--tracker", "wandb")
        assert f"the server at {server.url} cannot be used: it answers HTTP 503" in diagnostics(out, "error")
        server.fault = Fault.status(404)
        assert "it answers HTTP 404, and not as a W&B server does" in ask("--tracker", "wandb")[1].replace(
            "\n     ", ""
        )
        monkeypatch.setattr(doctor, "_ANSWER_S", 0.2)
        server.fault = Fault.mute()
        _, out, _ = ask("--json")
        assert diagnostics(out, "error").count("it does not answer") == 2
        server.fault = Fault.refuse()
        assert "Connection refused" in diagnostics(ask("--json")[1], "error")
    assert server.runs == []


def store_keys(home: Path, key: str) -> None:
    """Write a key into each file from which a tracker reads keys."""
    host = CLOSED
    (home / ".netrc").write_text(f"machine {host}\n  login user\n  password {key}\n")
    (home / ".netrc").chmod(0o600)
    stored = base64.encodebytes(key.encode()).decode()
    for path, content in {
        ".mlflow/credentials": f"[mlflow]\nmlflow_tracking_username = u\nmlflow_tracking_password = {key}\n",
        ".local/share/python_keyring/keyring_pass.cfg": f"[pluto]\npluto = {stored.replace(chr(10), chr(10) + ' ')}\n",
        ".config/wandb/settings": f"[default]\nbase_url = http://u:{key}@{host}\n",
    }.items():
        (home / path).parent.mkdir(parents=True)
        (home / path).write_text(content)


BY_VARIABLES = {
    "WANDB_API_KEY": CANARY,
    "PLUTO_API_KEY": CANARY,
    "MLFLOW_TRACKING_TOKEN": CANARY,
    "TRACKIO_WRITE_TOKEN": CANARY,
}


@pytest.mark.usefixtures("pluto")
@pytest.mark.parametrize("place", ["files", "variables", "addresses"])
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_key_is_never_printed(ask, tmp_path, monkeypatch, place, form):
    monkeypatch.setattr(doctor, "masked", lambda printed, **_: printed)  # the second safeguard must not be needed
    variables = BY_VARIABLES if place == "variables" else {}
    if place == "files":
        store_keys(tmp_path, CANARY)
    if place == "addresses":
        names = ("WANDB_BASE_URL", "PLUTO_URL_API", "MLFLOW_TRACKING_URI")
        variables = dict.fromkeys(names, f"http://u:{CANARY}@{CLOSED}")
        variables |= {"TRACKIO_SERVER_URL": f"http://{CLOSED}/?write_token={CANARY}"}
        variables |= {"http_proxy": f"http://u:{CANARY}@{CLOSED}"}
    _, out, err = ask(*form, **variables)
    for part in (CANARY, CANARY[:8], CANARY[-4:], base64.b64encode(CANARY.encode()).decode()[:8]):
        assert part not in out + err
    shown = {
        "files": [".netrc", "keyring_pass.cfg", ".mlflow/credentials"],
        "variables": [*BY_VARIABLES][:3],
        "addresses": ["TRACKIO_SERVER_URL"],
    }
    assert [name for name in shown[place] if name not in " ".join(out.split())] == []


def test_what_looks_like_a_key_or_a_password_is_redacted_and_the_documents_keys_are_not(ask):
    torchrun = LAUNCHERS["torchelastic"]
    job_id = f"x {CANARY} postgresql://u:p@ss@host:5432/db?sslmode=x y"
    _, out, _ = ask("--offline", MY_TOKEN=CANARY, **{**torchrun, "TORCHELASTIC_RUN_ID": job_id})
    assert "job_id x *** postgresql://***@host:5432/db?sslmode=x y" in out
    # A key with a line end is masked where it is printed without it.
    _, out, _ = ask("--offline", MY_TOKEN=f"{CANARY}\n", **{**torchrun, "TORCHELASTIC_RUN_ID": CANARY})
    assert "job_id ***" in out
    _, out, _ = ask("--json", "--offline", WANDB_API_KEY="diagnostics", MY_TOKEN='"quoted"', MY_KEY="worker_index")
    assert {"diagnostics", "trackers"} <= json.loads(out).keys()


def test_pipes_and_malformed_files_count_as_missing(ask, tmp_path):
    for name in (".netrc", ".mlflow/credentials", ".local/share/python_keyring/keyring_pass.cfg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(tmp_path / name)
    settings = tmp_path / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = http://a\nbase_url = http://b\n")  # the client refuses it all
    status, out, _ = ask("--json", "--offline", WANDB_API_KEY="")
    assert [state["credentials"] for state in json.loads(out)["trackers"]] == [None] * 4
    assert status == 1
    assert "there is no API key" in diagnostics(out, "error")
    assert diagnostics(out, "warning") == ""


@pytest.mark.usefixtures("pluto")
def test_the_source_of_a_key_is_shown(ask, tmp_path):
    store_keys(tmp_path, KEY)
    _, out, _ = ask("--json", "--offline", TRACKIO_SERVER_URL="http://x?write_token=12345")
    assert {state["name"]: state["credentials"] for state in json.loads(out)["trackers"]} == {
        "wandb": f"{tmp_path}/.netrc",
        "pluto": f"{tmp_path}/.local/share/python_keyring/keyring_pass.cfg",
        "mlflow": f"{tmp_path}/.mlflow/credentials",
        "trackio": "TRACKIO_SERVER_URL",
    }


def test_the_json_document_has_the_keys_that_are_documented(ask):
    status, out, _ = ask("--json", "--offline", WANDB_API_KEY=KEY, **LAUNCHERS["env"])
    document = json.loads(out)
    documented = (PACKAGE.parent / "docs" / "reference" / "commands.md").read_text()
    assert all(f"`{key}`" in documented for key in document)
    assert (document["schema"], document["ok"], status) == (1, True, 0)
    assert document["detected"]["job"]["world_size"] == 4
    assert document["plans"][0].keys() == {"run_mode", "rank_scope", "runs", "ids", "groups", "writers", "error"}
    assert document["diagnostics"][0].keys() == {"level", "text", "fix"}
    assert {"python", "flyteplugins-tracking"} <= document["versions"].keys()


class Mine(Tracker):
    name = "mine"
    title = "Mine"

    def open(self, request: Any) -> Any:
        raise AssertionError("the doctor opens no run")

    def diagnose(self) -> Diagnosis:
        wrong = (Diagnostic("error", "Mine is closed", "open it"),)
        return Diagnosis("there", "a drawer", True, lambda timeout_s: 1 / 0, wrong)


def test_a_registered_tracker_is_diagnosed_and_a_broken_one_stops_nothing(ask, monkeypatch):
    def broken() -> None:
        raise ImportError("no module named left")

    class Prints(Mine):
        name = "prints"

        def diagnose(self) -> Diagnosis:
            print("hello")
            sys.exit("enough")

    loads = {"mine": lambda: Mine, "broken": broken, "prints": lambda: Prints}
    registered = {name: SimpleNamespace(load=load) for name, load in loads.items()}
    monkeypatch.setattr(registry, "_registered", lambda: registered)
    status, out, _ = ask("--json", WANDB_API_KEY=KEY, WANDB_MODE="offline")
    assert status == 1
    assert "Mine is closed -> open it" in diagnostics(out, "error")
    assert "the server at there cannot be used: division by zero" in diagnostics(out, "error")
    assert "tracker 'broken' cannot be examined" in diagnostics(out, "warning")
    assert "tracker 'prints' cannot be examined: enough" in diagnostics(out, "warning")
    status, out, err = ask("--json", "--tracker=prints")
    assert (status, err) == (1, "hello\n")
    assert "tracker 'prints' cannot be examined: enough" in diagnostics(out, "error")


def test_the_doctor_and_the_first_run_refuse_a_client_that_is_too_old(ask, monkeypatch, tmp_path):
    for installed in ("0.30.0", "0.29.1"):
        info = tmp_path / installed / "trackio.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: trackio\nVersion: {installed}\n")
        monkeypatch.syspath_prepend(info.parent)
        if installed == "0.30.0":
            require(find_tracker("trackio"))
    with pytest.raises(
        TrackerNotInstalledError, match=r': trackio 0\.29\.1 is too old\. Install .*: pip install "trackio>='
    ):
        require(find_tracker("trackio"))
    shown = diagnostics(ask("--json", "--offline", "--tracker=trackio")[1], "error")
    assert 'trackio 0.29.1 is too old -> pip install "trackio>=' in shown


@pytest.mark.parametrize(
    ("installed", "faults"),
    [
        ("0.26.0", [("forked processes may hang", "0.28.1"), ("with protobuf 6 before 6.32.1", "0.26.1")]),
        ("0.28.1", []),
    ],
)
def test_the_doctor_and_the_first_run_warn_of_known_faults(ask, monkeypatch, tmp_path, caplog, installed, faults):
    info = tmp_path / "site" / f"wandb-{installed}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: wandb\nVersion: {installed}\n")
    monkeypatch.syspath_prepend(info.parent)
    monkeypatch.setattr("flyteplugins_tracking._runs.opening._warn_once", WarnOnce(logging.getLogger("first run")))
    shown = diagnostics(ask("--json", "--offline", WANDB_API_KEY=KEY)[1], "warning")
    for _ in range(2):
        require(find_tracker("wandb"))
    warnings = [record.getMessage() for record in caplog.records if record.name == "first run"]
    assert len(warnings) == shown.count("known fault") == len(faults)
    for warning, (text, fixed) in zip(warnings, faults, strict=True):
        assert text in shown
        assert f"wandb {installed} has a known fault" in warning
        assert text in warning
        assert f'pip install "wandb>={fixed}"' in warning


def test_a_rank_prints_its_problems_with_its_number_before_each_line(ask, monkeypatch):
    monkeypatch.setattr(doctor, "_PRINTING_S", 0)
    other = {**LAUNCHERS["mpich"], "PMI_RANK": "1", "MPI_LOCALRANKID": "1"}
    assert ask("--offline", WANDB_API_KEY=KEY, **other) == (0, "", "")
    status, out, err = ask("--offline", WANDB_API_KEY=f"{KEY} ", **other)
    assert (status, err) == (1, "")
    assert out.startswith("rank 1: error: W&B: WANDB_API_KEY has spaces")
    assert out.splitlines()[1].startswith("rank 1:   -> export WANDB_API_KEY=")
    status, out, _ = ask("--json", "--offline", WANDB_API_KEY=f"{KEY} ", **other)
    (line,) = out.splitlines()  # one document a rank
    document = json.loads(line)
    assert (status, document["ok"], document["detected"]["job"]["rank"], document["plans"]) == (1, False, 1, [])


@pytest.mark.parametrize(
    ("arguments", "status", "shown"),
    [
        (["--help"], 0, ["torchrun --nproc-per-node=2 -m flyteplugins_tracking run --project llm train.py"]),
        (["--version"], 0, ["flyteplugins-tracking 0."]),
        (
            ["doctor", "--help"],
            0,
            ["usage: flyteplugins-tracking doctor", "example: srun python -m flyteplugins_tracki"],
        ),
        (
            ["run", "--help"],
            0,
            ["example: torchrun", "The runs' project; None for the tracker's default.", "SCRIPT [ARGUMENT...]"],
        ),
        (["send", "--help"], 0, ["usage: flyteplugins-tracking send", "example: flyteplugins-tracking send wandb"]),
        (["doctor", "--tracker", "nope"], 2, ["usage: flyteplugins-tracking"]),
        (["doctor", "more"], 2, ["usage: flyteplugins-tracking"]),
        (["doctor", "--local_rank=1", "--offline"], 0, ["none: one process"]),  # what DeepSpeed adds to a module
        (["doctor", "--local-rank=1", "--offline"], 0, ["none: one process"]),
        (["sned", "wandb"], 2, ["there is no command 'sned'", "\n  doctor ", "\n  run ", "\n  send "]),
    ],
    ids=str,
)
def test_the_command_line_says_what_there_is(env, capsys, monkeypatch, arguments, status, shown):
    env(WANDB_API_KEY=KEY)
    monkeypatch.setattr(sys, "argv", ["flyteplugins-tracking", *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        ended = commands.main()
    except SystemExit as error:
        ended = error.code
    assert (ended or 0) == status
    told = "".join(capsys.readouterr())
    assert [text for text in shown if text not in told] == []
    script = f'[project.scripts]\nflyteplugins-tracking = "{commands.__name__}:{commands.main.__name__}"\n'
    assert script in (PACKAGE.parent / "pyproject.toml").read_text()
