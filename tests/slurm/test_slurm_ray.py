"""Ray inside a Slurm job, as it runs on HPC: its daemons are Slurm's tasks, and its workers are the ranks.

`make test-engines` runs it, in the environment that has Ray.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import jobs

from slurm.cluster import INSTALL, missing_programs, start_cluster
from slurm.test_slurm import Place

pytest.importorskip("ray", reason="needs Ray: make test-engines")
_MISSING = missing_programs()
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(_MISSING), reason=f"{', '.join(_MISSING)} not installed: {INSTALL}"),
]

# Task 0 of the step is Ray's head, task 1 its other node; each has the CPUs of two workers.
NODE = """\
if [ "$SLURM_PROCID" = 0 ]; then
    exec {ray} start --head --node-ip-address=127.0.0.1 --port={port} --num-cpus=2 --include-dashboard=false --block
fi
until (echo > /dev/tcp/127.0.0.1/{port}) 2> /dev/null; do sleep 0.5; done
exec {ray} start --address=127.0.0.1:{port} --num-cpus=2 --block
"""
JOB = """\
srun --overlap --ntasks=2 --ntasks-per-node=1 bash node.sh > nodes.txt 2>&1 &
until [ "$({python} -c '{count}' 2> /dev/null)" = 2 ]; do sleep 1; done
status=0
{training} || status=$?
kill $! && wait || true
exit $status
"""
COUNT = 'import ray; ray.init(logging_level="error"); print(len(ray.nodes()))'


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with start_cluster(nodes=2) as running:
        yield Place(running, tmp_path)


def train_in_ray(place: Place, *arguments: str) -> None:
    """Run `ray_training.py` in a Ray of two nodes, which are the tasks of a step."""
    port = jobs.free_port()
    (place.directory / "node.sh").write_text(NODE.format(ray=Path(sys.executable).with_name("ray"), port=port))
    training = shlex.join([sys.executable, str(jobs.PROGRAMS / "ray_training.py"), *arguments])
    variables = {
        "RAY_ADDRESS": f"127.0.0.1:{port}",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
        "PYTHONPATH": jobs.search_path(jobs.PROGRAMS),
    }
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    script = exports + JOB.format(python=sys.executable, count=COUNT, training=training)
    job = place.cluster.wait(place.submit(script, "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"), timeout_s=400)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), place.output + (place.directory / "nodes.txt").read_text()


def test_the_ranks_are_rays_and_not_the_tasks_of_slurm(place: Place) -> None:
    train_in_ray(place, "train", "4", "new")
    reports = [json.loads(path.read_text())["calls"][0]["info"] for path in place.directory.glob("reports/*.json")]
    assert sorted(info["rank"] for info in reports) == [0, 1, 2, 3]
    assert {(info["world_size"], info["launcher"]) for info in reports} == {(4, "ray")}
    assert sorted(run.id[-7:] for run in place.runs()) == [f"-rank-{rank}" for rank in range(4)]
    assert {(len(run.rows), run.exit_code) for run in place.runs()} == {(5, 0)}
