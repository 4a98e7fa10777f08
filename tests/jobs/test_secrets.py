"""No key in a message, log, pickle, task template, config, local file or command line: a canary is looked for."""

from __future__ import annotations

import json
import secrets
import sys
import time
from pathlib import Path

import pytest
from support import flyte1_pods, jobs
from support.loopback import Fault
from support.wandb_server import WandbServer

CANARY = "canary" + secrets.token_hex(17)


def files_with(canary: str, directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and canary.encode() in path.read_bytes()]


def command_lines() -> str:
    texts = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            texts.append(path.read_text(errors="replace"))
        except OSError:
            continue
    return "".join(texts)


@pytest.mark.sampled_full(3)
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("trouble", "given"),
    [
        ("none", "variable"),
        ("none", "callable"),
        ("refused key", "variable"),
        ("mute server", "callable"),
        ("server gone at the end", "variable"),
    ],
)
def test_a_key_is_nowhere_but_in_the_requests(tmp_path, given, trouble):
    with WandbServer(key="other" if trouble == "refused key" else CANARY) as server:
        server.fault = Fault.mute() if trouble == "mute server" else None
        variable = "WANDB_API_KEY" if given == "variable" else "MY_KEY"
        env = {"WANDB_BASE_URL": server.url, "WANDB_MODE": "online", "WANDB_SILENT": "false", variable: CANARY}
        init_timeout_s = "3" if trouble == "mute server" else "60"
        process = jobs.start([sys.executable, jobs.PROGRAMS / "canary.py", given, init_timeout_s], tmp_path, env)
        while process.poll() is None and not (tmp_path / "ready").exists():
            time.sleep(0.05)
        assert CANARY not in command_lines()
        server.fault = Fault.refuse() if trouble == "server gone at the end" else server.fault
        (tmp_path / "go").touch()
        done = jobs.finish(process, tmp_path)
        opened = trouble in ("none", "server gone at the end")
        assert ((tmp_path / "ready").exists(), "TrackerUnavailableError" in done.output) == (opened, not opened)
        assert CANARY not in done.output
        assert files_with(CANARY, tmp_path) == []
        for run in server.runs:
            assert CANARY not in json.dumps([run.raw_config, run.rows, run.log, run.summary])
            assert not [name for name, content in run.files.items() if CANARY.encode() in content]


@pytest.mark.full
def test_a_key_is_in_no_serialized_task(tmp_path, monkeypatch):
    pytest.importorskip("flytekit", reason='flytekit is not installed: pip install "flyteplugins-tracking[flytekit]"')
    env = {"PYTHONPATH": str(jobs.PROGRAMS), "WANDB_API_KEY": CANARY, "_FSEC_WANDB_API_KEY": CANARY}
    done = jobs.python(tmp_path, jobs.PROGRAMS / "serialized_tasks.py", env=env)
    assert done.returncode == 0, done.output
    assert "link_type" in done.output
    assert CANARY not in done.output


def test_a_flyte_secret_reaches_the_server_and_nothing_else(tmp_path):
    with WandbServer(key=CANARY) as server:
        env = {"WANDB_BASE_URL": server.url, "WANDB_MODE": "online", "_FSEC_WANDB_API_KEY": CANARY}
        done = flyte1_pods.run("with_secret", tmp_path, name="f5ec7-n0-0", execution="f5ec7", **env)
        (run,) = server.runs
        assert run.exit_codes == [0], done.output
        assert CANARY not in done.output + json.dumps([run.raw_config, run.rows, run.log])
        assert files_with(CANARY, tmp_path) == []


def test_the_address_of_a_webhook_is_in_no_file(tmp_path):
    hook = f"https://hooks.example.com/{CANARY}"
    code = (
        "from flyteplugins_tracking import tracking_init, get_run\n"
        f"@tracking_init(tracker='trackio', project='p', webhook_url={hook!r}, if_unavailable='degrade',\n"
        "               server_url='http://127.0.0.1:9', init_timeout_s=3)\n"
        "def train(): get_run().log({'loss': 1})\n"
        "train()\n"
    )
    done = jobs.python(tmp_path, "-c", code, env={"TRACKIO_WRITE_TOKEN": "t"})  # a missing one is no outage
    assert done.returncode == 0, done.output
    assert list(tmp_path.glob("tracking-offline/**/*.journal.*")), done.output
    assert files_with(CANARY, tmp_path) == []
