"""The doctor in processes of its own, and in a job."""

from __future__ import annotations

import os
import subprocess
import sys

from support import jobs
from support.jobs import PACKAGE

KEY = "a1b2" * 10


def test_an_ascii_output_and_a_closed_output_are_no_errors(tmp_path):
    command = [sys.executable, "-m", "flyteplugins_tracking", "--offline", "--tracker=wandb"]
    variables = {"PYTHONPATH": str(PACKAGE.parent), "PYTHONIOENCODING": "ascii", "WANDB_API_KEY": KEY}
    variables |= {"HOME": str(tmp_path), "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path / "größe")}
    plain = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert (plain.returncode, plain.stderr) == (0, b"")
    assert b"gr\\xf6\\xdfe" in plain.stdout
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "wb") as nobody:
        done = subprocess.run(
            command, env=variables, cwd=tmp_path, stdout=nobody, stderr=subprocess.PIPE, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_without_a_tracker_the_report_shows_how_to_install_one():
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); "
        "from flyteplugins_tracking._commands.doctor import main; sys.exit(main(sys.argv[1:]))"
    )
    # Isolated and without `site`: nothing but this package and the standard library can be imported.
    bare = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run([*bare, "--offline"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert 'error: no tracker is installed\n    -> pip install "flyteplugins-tracking[wandb]"' in done.stdout
    done = subprocess.run([*bare, "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_doctor_imports_no_vendor_and_leaves_no_file(tmp_path):
    code = (
        "import os, sys; from flyteplugins_tracking._commands.doctor import main; status = main(['--offline']); "
        "vendors = {'wandb', 'pluto', 'mlflow', 'trackio', 'torch', 'flytekit', 'flyte', 'urllib.request'}; "
        "print(sorted(vendors & set(sys.modules))); sys.exit(status)"
    )
    done = jobs.python(tmp_path, "-c", code, env={"WANDB_API_KEY": KEY, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.output
    assert done.output.endswith("[]\n")
    assert list(tmp_path.iterdir()) == []


def test_rank_0_prints_the_report_of_a_job_and_another_rank_its_error(tmp_path):
    command = [*jobs.torchrun("--standalone", "--nproc-per-node=2"), jobs.PROGRAMS / "doctor_ranks.py", "--offline"]
    done = jobs.run(command, tmp_path, {"WANDB_MODE": "online", "WANDB_API_KEY": KEY})
    assert done.returncode == 1
    assert done.output.count("run_mode") == done.output.count("launcher   torchelastic") == 1, done.output
    assert "WANDB_API_KEY -" in " ".join(done.output.split())  # a long path in its table breaks lines
    assert "rank 1: error: W&B: there is no API key" in done.output
    assert done.output.count("there is no API key") == 1
    assert "new       worker      2     {base}-worker-0-rank-{0..1}" in done.output
