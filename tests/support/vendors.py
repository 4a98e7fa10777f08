"""Run the tests that show what each client is needed for, with many versions of it: those of trackers, and of Flyte.

`python -m support.vendors [EXTRA [VERSION...]]`. Each version has a virtual environment of its own in `.vendors`. It
has only what differs from the environment that runs this, whose packages it finds after its own. The outcomes are
written to docs/versions.csv.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "versions.csv"
_ROLES = "tests/jobs/test_roles_jobs.py"
# The distribution whose versions are tested, by extra.
TRACKERS = {"wandb": "wandb", "pluto": "pluto-ml", "mlflow": "mlflow", "trackio": "trackio"}
CLIENTS = {**TRACKERS, "flytekit": "flytekit", "flyte": "flyte"}
# The tests of a client.
_OF_TRACKERS = (
    "tests/unit/test_vendor_parts.py",
    "tests/jobs/test_conformance.py",
    f"{_ROLES}::test_a_job_of_jobs_has_one_run",
)
_OF_WANDB = (
    f"{_ROLES}::test_axes_of_all_roles_hold_whoever_writes_last",
    f"{_ROLES}::test_offline_jobs_are_sent_together",
    f"{_ROLES}::test_a_role_that_is_killed_again_and_again_loses_no_row",
    *(
        f"tests/jobs/test_left_runs.py::test_{name}"
        for name in (
            "rows_that_are_sent_again_have_the_axis_that_the_client_adds",
            "an_artifact_of_which_there_is_no_copy_is_sent_from_its_own_files",
            "the_first_call_that_meets_a_dead_wandb_core_loses_no_file",
        )
    ),
    "tests/faults/test_offline_kills.py::test_rows_of_offline_attempts_that_were_killed_arrive_once[the process]",
    "tests/faults/test_reliability.py::test_rows_for_which_a_server_answers_503_to_the_end_are_sent_by_the_command_that_is_printed",
    *(
        f"tests/faults/test_reliability.py::test_the_run_tells_the_truth_and_loses_nothing[{fault}]"
        for fault in (
            "SIGKILL of the writer, a new job",
            "SIGKILL of the writer and wandb-core, a new job",
            "shared: SIGKILL of the writer, restart",
            "server down for 20 s",
        )
    ),
)
TESTS = {
    **dict.fromkeys(TRACKERS, _OF_TRACKERS),
    "wandb": (*_OF_TRACKERS, *_OF_WANDB),
    "flytekit": ("tests/jobs/test_flytekit.py",),
    "flyte": ("tests/jobs/test_flyte2.py",),
}
# What the oldest versions cannot do, and the first version that can. Those of Flyte cannot without this library too.
LATER = {
    "wandb": {
        "W&B's Stop button interrupts the rank that has the run, and no other": "0.26",
        "in a run with roles, W&B may keep the axes of the last writer only": "0.31",
    },
    "mlflow": {
        "metrics of the system do not say which node they are of": "2.11",
        "in a forked process, mlflow.active_run() is the run of its parent": "2.18",
    },
    "flyte": {
        "sys.exit in a task: the pod does not end": "2.7",
        "download_logs: the files are no output of the task": "2.1",
        "retries in local mode": "2.0.7",
    },
}
# How many of the newest minor versions are tested.
MINORS = 4
# Versions that are tested too, since frameworks ask for them, or since it is the first one with an ability.
_ASKED = {"wandb": ("0.22.1", "0.22.3", "0.23.1", "0.26.1", "0.27.2")}
# A distribution that must be there in the same version: the index may get it later.
_WITH = {"mlflow": "mlflow-skinny", "flytekit": "flytekitplugins-kfpytorch", "flyte": "flyteplugins-pytorch"}
# What clients need in an older version than they say, since they import names that are gone: MLflow before 3.10 those
# of SQLAlchemy, before 2.15 pkg_resources of setuptools, and Trackio 0.30 those of the Hugging Face Hub's client.
_OLDER = {"mlflow": ("sqlalchemy<2.1", "setuptools<81"), "trackio": ("huggingface-hub<1.16",)}


class Outcome(NamedTuple):
    """A row of the table of versions."""

    client: str
    version: str
    works: str
    lost: str


def requirement_of(tracker: str) -> str:
    """Return the client's versions that the tracker's extra allows."""
    text = (ROOT / "pyproject.toml").read_text()  # tomllib is not in Python 3.10
    extra = re.search(rf"^{tracker} = \[(.*)\]$", text, re.MULTILINE)
    assert extra is not None
    return next(name for name in re.findall(r'"([^"]+)"', extra[1]) if Requirement(name).name == CLIENTS[tracker])


def skip_where_lost(tracker: str, text: str) -> None:
    """Skip the test if the installed client cannot do what it tests: `text` is a part of the loss in words."""
    (loss,) = (loss for loss in LATER[tracker] if text in loss)
    if Version(metadata.version(CLIENTS[tracker])) < Version(LATER[tracker][loss]):
        pytest.skip(f"lost with this version: {loss}")


def versions_of(tracker: str) -> list[str]:
    """Return the versions to test, the oldest first.

    They are the oldest that the extra allows, the last one before each that brought a feature, the last ones of the
    newest minors, those that frameworks ask for, and a newer pre-release.
    """
    allowed = sorted(Requirement(requirement_of(tracker)).specifier.filter(_published(tracker)), key=Version)
    last = [list(patches)[-1] for _, patches in groupby(allowed, _minor)]
    before = [[name for name in allowed if Version(name) < Version(first)] for first in LATER.get(tracker, {}).values()]
    newer = [name for name in _published(tracker, "--pre") if Version(name) > Version(last[-1])]
    asked = set(_ASKED.get(tracker, ())) & set(allowed)
    chosen = {
        allowed[0],
        *asked,
        *last[-MINORS:],
        *(names[-1] for names in before if names),
        *sorted(newer, key=Version)[-1:],
    }
    return sorted(chosen, key=Version)


def _published(tracker: str, *options: str) -> set[str]:
    """Return the versions that the package index has. pip leaves out those that were withdrawn."""
    return set.intersection(*(_of_index(name, options) for name in (CLIENTS[tracker], _WITH.get(tracker)) if name))


def _of_index(distribution: str, options: Sequence[str]) -> set[str]:
    command = [sys.executable, "-m", "pip", "index", "versions", distribution, *options]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = re.findall(r"^Available versions: (.*)$", answer, re.MULTILINE)
    return set(line.split(", "))


def _minor(version: str) -> tuple[int, ...]:
    """The version without its patch. Before 0.1, each version is a minor one."""
    release = Version(version).release
    return release[:2] if any(release[:2]) else release


def environment_of(tracker: str, version: str) -> Path:
    """Return the directory of a virtual environment with this version of the client."""
    directory = ROOT / ".vendors" / f"{CLIENTS[tracker]}-{version}"
    if not (directory / "installed").exists():
        venv.create(directory, clear=True, with_pip=False)
        config = {"base": str(directory), "platbase": str(directory)}
        packages = Path(sysconfig.get_path("purelib", vars=config))
        shared = sysconfig.get_path("purelib")
        (packages / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
        _install(tracker, version, directory)
        command = directory / "bin" / "flyteplugins-tracking"
        command.write_text(
            f"#!{directory / 'bin' / 'python'}\nfrom flyteplugins_tracking.__main__ import main\nexit(main())\n"
        )
        command.chmod(0o755)
        (directory / "installed").touch()
    return directory


def _install(tracker: str, version: str, directory: Path) -> None:
    name = f"{CLIENTS[tracker]}=={version}"
    names = [name, f"{_WITH[tracker]}=={version}"] if tracker not in TRACKERS else [name]
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    if tracker == "pluto":  # beside the others, as in the Makefile
        subprocess.run([*pip, "--no-deps", "--target", str(directory / "pluto"), name], check=True)
    else:
        subprocess.run([*pip, "--ignore-installed", "--no-deps", *names], check=True)
        subprocess.run([*pip, *names, *_OLDER.get(tracker, ())], check=True)  # what it needs in other versions


def run_tests(tracker: str, version: str) -> Outcome:
    """Run the tests with this version."""
    directory = environment_of(tracker, version)
    report = directory / "report.xml"
    report.unlink(missing_ok=True)
    pytest = [str(directory / "bin" / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    others = " or ".join(name for name in (*TRACKERS, "jsonl") if name != tracker)
    subprocess.run([*pytest, f"--junitxml={report}", *TESTS[tracker], "-k", f"not ({others})"], cwd=ROOT)
    failed = sorted(_failures(report))
    lost = [ability for ability, first in LATER.get(tracker, {}).items() if Version(version) < Version(first)]
    works = f"not: {', '.join(failed)}" if failed else "everything else" if lost else "everything"
    return Outcome(CLIENTS[tracker], version, works, "; ".join(lost) or "nothing")


def _failures(report: Path) -> Iterator[str]:
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    if not cases:
        yield "the tests do not start"
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            yield str(case.get("name")).partition("[")[0].removeprefix("test_").replace("_", " ")


def write(outcome: Outcome, tested: Sequence[str]) -> None:
    """Put an outcome into the table, in place of what is there of its version and of versions that are not `tested`."""
    with TABLE.open(newline="") as file:
        head, *lines = csv.reader(file)
    rows = [Outcome(*line) for line in lines]
    kept = {(row.client, row.version): row for row in rows if row.client != outcome.client or row.version in tested}
    kept[outcome.client, outcome.version] = outcome
    order = list(CLIENTS.values())
    ordered = sorted(kept.values(), key=lambda row: (order.index(row.client), Version(row.version)))
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([head, *ordered])


def main(tracker: str = "", *versions: str) -> int:
    failed: list[str] = []
    for name in [tracker] if tracker else CLIENTS:
        tested = versions_of(name)
        for version in versions or tested:
            print(f"== {CLIENTS[name]} {version}", flush=True)
            outcome = run_tests(name, version)
            write(outcome, [*tested, *versions])
            if outcome.works.startswith("not"):
                failed.append(f"{outcome.client} {version} {outcome.works}")
    print("failed:", "; ".join(failed) or "none")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
