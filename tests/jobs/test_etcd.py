"""torchrun that meets at an etcd: `etcd-v2`, and `etcd`, torchelastic's older client of the same server."""

from __future__ import annotations

import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import jobs
from support.waiting import wait_until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("etcd") is None, reason="etcd is not installed: apt-get install etcd-server"),
]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return b"true" in response.read()
    except OSError:
        return False


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an etcd that serves the second version of its protocol too, which torchelastic speaks."""
    client, peer = (f"http://127.0.0.1:{jobs.free_port()}" for _ in range(2))
    directory = tmp_path_factory.mktemp("etcd")
    process = subprocess.Popen(
        [
            *("etcd", "--enable-v2", "--name=n", f"--data-dir={directory / 'data'}"),
            *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=n={peer}"),
        ],
        stdout=(directory / "log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    try:
        wait_until(lambda: answers(client))
        yield client.removeprefix("http://")
    finally:
        process.kill()
        process.wait()


def run(etcd: str, directory: Path, backend: str, processes: list[int], *options: str, **settings: object) -> jobs.Done:
    rendezvous = (f"--rdzv-backend={backend}", f"--rdzv-endpoint={etcd}", f"--rdzv-id={directory.name}")
    agents = [
        jobs.start(
            [
                *jobs.torchrun(f"--nnodes={len(processes)}", f"--nproc-per-node={count}", *rendezvous, *options),
                *jobs.train(rows=3, **settings),
            ],
            directory,
        )
        for count in processes
    ]
    done = [jobs.finish(agent, directory) for agent in agents]
    return jobs.Done(max(one.returncode for one in done), "\n".join(one.output for one in done), directory)


SUFFIXES = {"auto": [""], "new": ["-rank-0", "-rank-1"], "shared": [""]}


@pytest.mark.sampled_full(1)
@pytest.mark.parametrize(
    ("backend", "processes", "run_mode"),
    [("etcd-v2", [1, 1], "auto"), ("etcd-v2", [2], "new"), ("etcd", [2], "shared")],
)
def test_the_ranks_agree_on_an_id_and_keep_it_over_a_restart(
    etcd: str, tmp_path: Path, backend: str, processes: list[int], run_mode: str
) -> None:
    tracking = {"project": "p", "run_mode": run_mode}
    settings = {"end": {"1": "raise"}, "fail_attempts": 1, "linger_s": 20}
    done = run(etcd, tmp_path, backend, processes, "--max-restarts=1", tracking=tracking, **settings)
    assert done.returncode == 0, done.output
    ids = {report["run_id"] for report in done.reports if report["run_id"]}
    (base,) = {one.removesuffix("-rank-0").removesuffix("-rank-1") for one in ids}
    assert ids == {base + suffix for suffix in SUFFIXES[run_mode]}
    assert {report["restart_count"] for report in done.reports} == {0, 1}


@pytest.mark.wide
def test_another_start_has_another_id(etcd: str, tmp_path: Path) -> None:
    for name in ("first", "second"):
        done = run(etcd, tmp_path / name, "etcd-v2", [2], tracking={"project": "p"})
        assert done.returncode == 0, done.output
    ids = {report["run_id"] for name in ("first", "second") for report in jobs.Done(0, "", tmp_path / name).reports}
    assert len(ids - {None}) == 2
