"""Run the contract and the conformance tests of each tracker with the oldest and the newest version of its client.

`python -m support.vendors [TRACKER...]`. Each version has a virtual environment of its own in `.vendors`. It has only
what differs from the environment that runs this, whose packages it finds after its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
# The distribution whose versions are tested, by tracker.
CLIENTS = {"wandb": "wandb", "pluto": "pluto-ml", "mlflow": "mlflow", "trackio": "trackio"}
# What is installed with it: the tests' server is of the same version as the client.
_WITH = {"mlflow": ("mlflow-skinny", "mlflow-tracing")}
# What its server needs in an older version, though it does not say so: MLflow 3.1 imports a name that 2.1 has removed.
_OLDER = {"mlflow": ("sqlalchemy<2.1",)}


def requirement_of(tracker: str) -> str:
    """Return the client's versions that the tracker's extra allows."""
    text = (ROOT / "pyproject.toml").read_text()  # tomllib is not in Python 3.10
    extra = re.search(rf"^{tracker} = \[(.*)\]$", text, re.MULTILINE)
    assert extra is not None
    return next(name for name in re.findall(r'"([^"]+)"', extra[1]) if Requirement(name).name == CLIENTS[tracker])


def versions_of(tracker: str) -> list[str]:
    """Return the oldest and the newest version that the extra allows; one version if there is no other."""
    command = [sys.executable, "-m", "pip", "index", "versions", CLIENTS[tracker]]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (line,) = re.findall(r"^Available versions: (.*)$", answer, re.MULTILINE)
    allowed = sorted(Requirement(requirement_of(tracker)).specifier.filter(line.split(", ")), key=Version)
    return list(dict.fromkeys([allowed[0], allowed[-1]]))


def environment_of(tracker: str, version: str) -> Path:
    """Return the directory of a virtual environment with this version of the client."""
    directory = ROOT / ".vendors" / f"{CLIENTS[tracker]}-{version}"
    if not (directory / "installed").exists():
        venv.create(directory, clear=True, with_pip=False)
        config = {"base": str(directory), "platbase": str(directory)}
        packages = Path(sysconfig.get_path("purelib", vars=config))
        shared = sysconfig.get_path("purelib")
        (packages / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
        _install(tracker, version, directory, packages)
        (directory / "installed").touch()
    return directory


def _install(tracker: str, version: str, directory: Path, packages: Path) -> None:
    names = [f"{name}=={version}" for name in (CLIENTS[tracker], *_WITH.get(tracker, ()))]
    needs = [*names, *_OLDER.get(tracker, ())]
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    if tracker == "pluto":  # beside the others, as in the Makefile
        subprocess.run([*pip, "--no-deps", "--target", str(directory / "pluto"), *names], check=True)
    else:
        subprocess.run([*pip, "--ignore-installed", "--no-deps", *names], check=True)
        subprocess.run([*pip, *needs], check=True)  # what they need in other versions
    assert packages.is_dir()


def run_tests(tracker: str, version: str) -> bool:
    """Whether the tests pass with this version."""
    python = environment_of(tracker, version) / "bin" / "python"
    tests = ["tests/jobs/test_vendors.py", "tests/jobs/test_conformance.py"]
    done = subprocess.run([str(python), "-m", "pytest", "-q", *tests, "-k", tracker], cwd=ROOT)
    return done.returncode == 0


def main(trackers: list[str]) -> int:
    failed = []
    for tracker in trackers or CLIENTS:
        for version in versions_of(tracker):
            print(f"== {CLIENTS[tracker]} {version}", flush=True)
            if not run_tests(tracker, version):
                failed.append(f"{CLIENTS[tracker]} {version}")
    print("failed:", ", ".join(failed) or "none")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
