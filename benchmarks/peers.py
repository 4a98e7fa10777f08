"""What users would otherwise take, each in an environment of its own, with this package beside it as a wheel."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

from paired import ROOT

ENVIRONMENTS = Path(os.environ.get("BENCH_ENVIRONMENTS", ROOT / ".bench"))
# torch goes first and alone, at the pinned version: what depends on it would take the newest one.
PEERS: dict[str, list[list[str]]] = {
    "wandb": [["wandb"]],
    "flyteplugins-wandb": [["torch", "numpy"], ["flyteplugins-wandb~=2.12.0"]],
    "flytekitplugins-wandb": [
        ["torch", "numpy"],
        ["flytekitplugins-wandb~=1.16.0", "flytekit", "flytekitplugins-kfpytorch", "psutil"],
    ],
}


def python(peer: str) -> Path:
    """The interpreter of the peer's environment, which is made if it is not there yet, with this tree's wheel in it."""
    directory = ENVIRONMENTS / peer
    installed = directory / "installed.txt"
    constraints = ROOT / "constraints.txt"
    wanted = f"{PEERS[peer]}\n{constraints.read_text()}"
    if not installed.exists() or installed.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", "--clear", directory], check=True)
        for requirements in PEERS[peer]:
            _pip(directory, "install", "-c", str(constraints), *requirements)
        installed.write_text(wanted)
    _pip(directory, "install", "--no-deps", "--no-index", "--force-reinstall", str(_wheel()))
    return directory / "bin" / "python"


def _pip(directory: Path, *arguments: str) -> None:
    subprocess.run([directory / "bin" / "python", "-m", "pip", "--quiet", *arguments], check=True, stdout=sys.stderr)


@functools.cache
def _wheel() -> Path:
    """Built once in each process. An editable installation would make the start of each interpreter slower."""
    target = ENVIRONMENTS / "wheel" / str(os.getpid())
    build = ["pip", "--quiet", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(ROOT)]
    subprocess.run([sys.executable, "-m", *build], check=True, stdout=sys.stderr)
    (wheel,) = target.glob("*.whl")
    return wheel
