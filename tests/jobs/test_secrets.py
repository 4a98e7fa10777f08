"""No key in a message, log, pickle, task template, config, local file or command line: a canary is looked for."""

from __future__ import annotations

import json
import secrets
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support import flyte1_pods, jobs
from support.loopback import Fault
from support.wandb_server import WandbServer

CANARY = "canary" + secrets.token_hex(17)
TRAIN = """
    import logging, os, pickle, sys, traceback
    from flyteplugins_tracking import TrackerUnavailableError, get_run, tracking_init
    logging.basicConfig(level=logging.DEBUG)

    @tracking_init(project="tests", config={"lr": 1}, init_timeout_s=8, finish_timeout_s=3{secret})
    def train():
        get_run().log({"x": 1})
        open("ready", "w").close()
        while not os.path.exists("go"):
            pass
        print(pickle.dumps(train), repr(get_run()), vars(get_run().settings).keys())

    try:
        train()
    except TrackerUnavailableError:
        traceback.print_exc()
"""
SECRETS = {
    "variable": "",
    "callable": ", secret=lambda: os.environ['MY_KEY'] + '\\n'",
}


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


@pytest.mark.parametrize("given", SECRETS)
@pytest.mark.parametrize("trouble", ["none", "refused key", "mute server", "server gone at the end"])
def test_a_key_is_nowhere_but_in_the_requests(tmp_path, given, trouble):
    with WandbServer(key="other" if trouble == "refused key" else CANARY) as server:
        server.fault = Fault.mute() if trouble == "mute server" else None
        variable = "WANDB_API_KEY" if given == "variable" else "MY_KEY"
        env = {"WANDB_BASE_URL": server.url, "WANDB_MODE": "online", "WANDB_SILENT": "false", variable: CANARY}
        script = textwrap.dedent(TRAIN.replace("{secret}", SECRETS[given]))
        (tmp_path / "train.py").write_text(script)
        process = jobs.start([sys.executable, "train.py"], tmp_path, env)
        while process.poll() is None and not (tmp_path / "ready").exists():
            time.sleep(0.05)
        assert CANARY not in command_lines()
        server.fault = Fault.refuse() if trouble == "server gone at the end" else server.fault
        (tmp_path / "go").touch()
        done = jobs.finish(process, tmp_path, 60)
        opened = trouble in ("none", "server gone at the end")
        assert ((tmp_path / "ready").exists(), "TrackerUnavailableError" in done.output) == (opened, not opened)
        assert CANARY not in done.output
        assert files_with(CANARY, tmp_path) == []
        for run in server.runs:
            assert CANARY not in json.dumps([run.raw_config, run.rows, run.log, run.summary])
            assert not [name for name, content in run.files.items() if CANARY.encode() in content]


def test_a_key_is_in_no_serialized_task(tmp_path, monkeypatch):
    pytest.importorskip("flytekit", reason='flytekit is not installed: pip install "flyteplugins-tracking[flytekit]"')
    script = """
        import cloudpickle, flyte_tasks, flyte_workers
        for task in (flyte_workers.spawn_below, flyte_tasks.with_secret, flyte_workers.failing):
            print(flyte_tasks.serialized(task), cloudpickle.dumps(task), repr(task.task_function))
    """
    env = {"PYTHONPATH": str(jobs.PROGRAMS), "WANDB_API_KEY": CANARY, "_FSEC_WANDB_API_KEY": CANARY}
    done = jobs.python(tmp_path, "-c", textwrap.dedent(script), env=env)
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
