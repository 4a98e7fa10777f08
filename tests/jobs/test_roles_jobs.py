"""Jobs that write to one run: its owner, and its roles. Each row of each arrives once, whatever is killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from support.backends import BACKENDS, WandbBackend
from support.kills import kill_with_children, moments
from support.loopback import Fault
from support.roles import Roles
from support.vendors import skip_where_lost
from support.wandb_server import WandbServer

ROLES = ["rollout-0", "rollout-1"]
_random = random.Random(7)


@pytest.fixture
def job(tmp_path):
    with BACKENDS["wandb"](tmp_path / "server") as running:
        yield Roles(running, tmp_path / "jobs", WANDB__FILE_STREAM_TRANSMIT_INTERVAL="1")


def test_a_job_of_jobs_has_one_run(job):
    """One role starts first, one is killed and started again, and an evaluation comes after the owner's end."""
    early = job.start("rollout-1", rows=100, arguments={"config": {"temperature": 1}})
    owner = job.start(roles=ROLES, ranks=2, rows=100, step=True, ends="stop", arguments={"config": {"lr": 3}})
    killed = job.start("rollout-0", rows=150, pause_s=0.002, ends="never", arguments={"config": {"temperature": 2}})
    job.wait("logs-no-more-rollout-0", killed)
    job.kill("rollout-0", killed)
    outputs = [job.run("rollout-0", rows=50, first=150, arguments={"config": {"temperature": 2}}), job.finish(early)]
    job.go("stop")
    outputs.append(job.finish(owner))
    assert [done.returncode for done in outputs] == [0, 0, 0], [done.output for done in outputs]
    assert job.stored.status == "finished"
    late = job.run("eval", rows=20, how="exit 3")
    assert late.returncode == 3, late.output
    for name, count in {"owner": 100, "rollout-0": 200, "rollout-1": 100, "eval": 20}.items():
        assert len(job.logged(name)) == count
        assert job.arrived(name) == job.logged(name), name
    run = job.stored
    assert run.status == "finished"  # as the owner has ended
    assert run.config["rollout-0"] == {"temperature": 2}
    assert run.config["rollout-1"] == {"temperature": 1}
    assert run.config["lr"] == 3


def test_a_role_is_one_writer_with_its_own_steps_config_and_reports(job):
    owner = job.start(roles=ROLES, rows=20, step=True, ends="stop", arguments={"config": {"lr": 3}, "name": "mine"})
    job.wait("open-owner", owner)
    role = job.run("rollout-0", rows=20, how="raise", arguments={"config": {"t": 2}, "name": "other", "tags": ["x"]})
    assert role.returncode == 1, role.output
    (run,) = job.server.runs
    assert run.state == "running"
    job.go("stop")
    assert job.finish(owner).returncode == 0
    (run,) = job.server.runs
    assert (run.state, run.exit_codes, run.name, run.tags) == ("finished", [0], "mine", [])
    assert (run.rows_after_completion, run.mixed_writers) == (0, False)
    assert run.config == {"lr": 3, "rollout-0": {"t": 2}, "tracking_init": {"roles": ROLES}}
    of_role = [row for row in run.rows if "rollout-0/rank0" in row]
    assert [row["rollout-0/step"] for row in of_role] == list(range(20))
    of_owner = [row for row in run.rows if "rank0" in row]
    assert [row["global_step"] for row in of_owner] == list(range(20))
    states = [row for row in run.rows if "roles/rollout-0/state" in row]
    assert [row["roles/rollout-0/state"] for row in states] == ["running", "failed"]
    assert states[0]["roles/rollout-0/config"] == '{"t": 2}'
    assert (states[1]["roles/rollout-0/exit_code"], states[1]["roles/rollout-0/failure/type"]) == (1, "RuntimeError")
    assert not any(key.startswith("failure/") for key in run.summary)
    assert [name for name in run.files if "failure" in name] == ["roles/rollout-0/failure.txt"]
    assert {event.rsplit("/l:", 1)[-1] for row in run.events for event in row if "/l:" in event} <= {
        "rollout-0",
        "owner",
    }


@pytest.mark.wide
def test_axes_of_all_roles_hold_whoever_writes_last(tmp_path):
    """The recording server keeps the definitions and the config of the last writer only."""
    with WandbServer(replaces=True) as server:
        job = Roles(WandbBackend(server), tmp_path)
        owner = job.start(roles=ROLES, rows=1, arguments={"config": {"lr": 3}})
        assert job.finish(owner).returncode == 0
        other = job.start("other", rows=1, ends="stop", arguments={"config": {"of": "other"}})
        job.wait("open-other", other)
        for role in (*ROLES, "eval"):
            assert job.run(role, rows=1, arguments={"config": {"of": role}}).returncode == 0
        job.go("stop")
        assert job.finish(other).returncode == 0
        (run,) = server.runs
        roles = (*ROLES, "eval", "other")
        assert (run.config["lr"], run.config["other"]) == (3, {"of": "other"})
        configs = {role: [row[name] for row in run.rows if (name := f"roles/{role}/config") in row] for role in roles}
        assert configs == {role: [f'{{"of": "{role}"}}'] for role in roles}
        assert (run.state, run.exit_codes[-1]) == ("finished", 0)
        skip_where_lost("wandb", "axes")
        defined = run.raw_config["_wandb"]["value"]["m"]
        assert {f"{role}/*" for role in (*ROLES, "other")} <= {one.get("2") for one in defined}


@pytest.mark.wide
def test_offline_roles_are_sent_into_a_live_run(job):
    owner = job.start(roles=ROLES, rows=200, pause_s=0.01, ends="stop")
    job.wait("open-owner", owner)
    offline = job.run("rollout-0", rows=50, env={"WANDB_MODE": "offline"}, arguments={"config": {"t": 1}})
    assert offline.returncode == 0, offline.output
    (directory,) = (job.directory / "wandb").glob("offline-run-*")
    for _ in range(2):  # the second time there is nothing to send
        sent = job.send(directory)
        assert sent.returncode == 0, sent.output
    job.go("stop")
    assert job.finish(owner).returncode == 0
    for name in ("owner", "rollout-0"):
        assert job.arrived(name) == job.logged(name)
    assert job.stored.status == "finished"
    assert job.server.runs[0].mixed_writers is False


@pytest.mark.full
def test_offline_jobs_are_sent_together(job):
    for role, more in ((None, {"roles": ROLES, "how": "exit 3"}), ("rollout-0", {}), ("rollout-1", {})):
        job.run(role, rows=30, env={"WANDB_MODE": "offline"}, **more)
    directories = sorted((job.directory / "wandb").glob("offline-run-*"), key=lambda path: "rollout" not in path.name)
    assert len(directories) == 3
    for paths in (directories[:1], directories):  # the first time, a role's makes the run
        sent = job.send(*paths)
        assert sent.returncode == 0, sent.output
    for name in ("owner", *ROLES[:2]):
        assert job.arrived(name) == job.logged(name)
    (run,) = job.server.runs
    assert (run.mixed_writers, run.rows_overwritten, run.state, run.exit_codes) == (False, 0, "failed", [3])


@pytest.mark.wide
def test_the_nodes_of_a_job_that_was_offline_are_sent_together(job):
    """The run is described and ended by the primary, which opens it last here."""
    nodes = []
    for node, how in ((1, "return"), (0, "exit 3")):
        env = {**variables_of(node), "WANDB_MODE": "offline"}
        more = {"rows": 10, "how": how, "arguments": {"run_mode": "shared", "config": {"lr": 3}}, "key": f"rank{node}"}
        nodes.append(job.start(name=f"node-{node}", roles=ROLES, env=env, ends="stop", **more))
        job.wait(f"open-node-{node}", nodes[-1])
    job.go("stop")
    assert [job.finish(one).returncode for one in nodes] == [0, 3]
    directories = sorted((job.directory / "wandb").glob("offline-run-*"), key=lambda path: "rank" not in path.name)
    alone = job.send(directories[0])
    assert alone.returncode == 1
    assert "Send the directory of the job's primary rank first" in alone.output
    sent = job.send(*directories)
    assert sent.returncode == 0, sent.output
    for name in ("node-0", "node-1"):
        assert job.arrived(name) == job.logged(name)
    assert (job.stored.status, job.stored.config["lr"], job.stored.ends) == ("failed", 3, 1)


@pytest.mark.full
def test_a_job_that_must_not_write_to_a_run_changes_nothing(job):
    """A role without its run, a role and an owner in a run with one writer, and a plain job in a run with roles."""
    missing = job.run("rollout-0", arguments={"init_timeout_s": 2})
    assert missing.returncode == 1
    for text in ("TrackerUnavailableError", "rollout-0", "grpo-42", "project rl"):
        assert text in missing.output
    assert "log to local files" not in missing.output  # that is for an outage
    assert job.backend.runs("rl") == []
    assert job.run(rows=3).returncode == 0
    before = job.stored
    for role, more in (("rollout-0", {}), (None, {"roles": ROLES})):
        refused = job.run(role, **more)
        assert refused.returncode == 1
        assert "ConfigError" in refused.output
        assert "one writer" in refused.output
    assert job.stored == before


@pytest.mark.full
def test_a_role_does_not_replace_a_value_of_the_owners_config(job):
    assert job.run(roles=ROLES, rows=1, arguments={"config": {"lr": 3}}).returncode == 0
    refused = job.run("lr", arguments={"config": {"t": 1}})
    assert refused.returncode == 1
    assert "cannot be joined by role='lr': its config has this key" in refused.output
    assert job.stored.config["lr"] == 3


@pytest.mark.full
def test_a_plain_job_is_refused_by_a_run_with_roles(job):
    assert job.run(roles=ROLES, rows=3).returncode == 0
    before = job.stored
    refused = job.run()
    assert refused.returncode == 1
    assert "has roles (rollout-0, rollout-1)" in refused.output
    assert job.stored == before


@pytest.mark.wide
def test_a_role_and_its_owner_that_are_killed_while_they_open_or_end_lose_no_row(job):
    """At moments that are all over their lives; and then once more, to the end."""
    moment = random.Random(11)
    settings = {"owner": {"roles": ROLES}, "rollout-0": {"role": "rollout-0"}}
    assert job.run(roles=ROLES, rows=1).returncode == 0
    for attempt in range(1, 7):
        for old in job.directory.glob("*-*"):
            if not old.name.startswith("logged-"):
                old.unlink()
        started = {name: job.start(**one, rows=60, first=100 * attempt) for name, one in settings.items()}
        for name, process in started.items():
            part, longest_s = moment.choice([("pid", 2.5), ("open", 0.1), ("logs-no-more", 0.5)])
            job.wait(f"{part}-{name}", process)
            time.sleep(moment.random() * longest_s)
            process.kill()
            process.wait()
    for one in settings.values():
        done = job.run(**one, rows=10, first=1000)
        assert done.returncode == 0, done.output
    for name in settings:
        assert job.arrived(name) == job.logged(name), name
    assert job.stored.status == "finished"


def test_sigterm_ends_a_role_and_not_the_run(job):
    owner = job.start(roles=ROLES, rows=5, ends="stop")
    role = job.start("rollout-0", rows=50, ends="never")
    job.wait("logs-no-more-rollout-0", role)
    os.kill(int((job.directory / "pid-rollout-0").read_text()), signal.SIGTERM)
    done = job.finish(role)
    assert done.returncode != 0, done.output
    (run,) = job.server.runs
    assert (run.state, run.exit_codes) == ("running", [])
    job.go("stop")
    assert job.finish(owner).returncode == 0
    (run,) = job.server.runs
    states = [row for row in run.rows if "roles/rollout-0/exit_code" in row]
    assert [(one["roles/rollout-0/state"], one["roles/rollout-0/exit_code"]) for one in states] == [("killed", 143)]
    assert (run.state, run.exit_codes) == ("finished", [0])
    assert job.arrived("rollout-0") == job.logged("rollout-0")


def test_what_a_role_does_with_the_run_object_is_its_own(job):
    more = {"calls": ["run.summary.update({'best': 1})"], "arguments": {"config": {"lr": 3}}}
    owner = job.start(roles=ROLES, rows=5, step=True, ends="stop", **more)
    job.wait("open-owner", owner)
    calls = [
        "run.define_metric('*', step_metric='batch')",
        "run.define_metric('reward', summary='max')",
        "run.define_metric('rollout-0/loss', run.define_metric('epoch'))",
        "run.summary.update({'best': 2})",
        "run.summary.__setitem__('worst', 3)",
        "run.config.update(__import__('argparse').Namespace(t=1))",
        "run.log({'rank0': 1000 + int(run.step)})",  # which W&B does not know for one writer of several
        "run.log({'rank0': run.summary.get('best')})",
        "requires(run.summary['worst'], run.summary.worst, dict(run.summary)['worst'], 3)",
        "requires('worst' in run.summary.keys(), run.summary.get('none', True), True)",
        "requires(run.config['t'], run.config.t, run.config.get('t'), dict(run.config)['t'], 1)",
        "requires(run.config['lr'], run.config['rollout-0']['t'] + 2, 3)",
        "run.config.update({'t': 2, 'lr': 4})",
        "requires(run.config['t'], run.config['lr'] - 2, 2)",
        "run.config.__setitem__('t', 1)",
        "requires(run.config['t'], 't' in run.config, run.config.get('given'), 1)",
        "run.log({'rank0': 3, 'step': 50})",
        "os.fork() or (run.log({'rank0': 4}), os._exit(0))",
        "os.wait()",
    ]
    role = job.run("rollout-0", rows=0, calls=calls, arguments={"config": {"given": 1}})
    assert role.returncode == 0, role.output
    assert "has died" not in role.output
    job.go("stop")
    assert job.finish(owner).returncode == 0
    (run,) = job.server.runs
    assert job.arrived("rollout-0") == Counter([1000, 2, 3, 4])
    assert run.summary["best"] == 1
    assert (run.summary["rollout-0/best"], run.summary["rollout-0/worst"]) == (2, 3)
    assert run.config["rollout-0"] == {"t": 1, "lr": 4, "given": 1}
    assert run.config["lr"] == 3
    assert [row["rollout-0/step"] for row in run.rows if row.get("rollout-0/rank0") == 3] == [50]


@pytest.mark.full
def test_one_process_has_one_role_of_a_run_of_wandb(job):
    assert job.run(roles=ROLES, rows=1).returncode == 0
    other = "tracking_init(project='rl', id='grpo-42', role='rollout-1')(print)"
    in_thread = f"__import__('concurrent.futures').futures.ThreadPoolExecutor().submit({other}).result()"
    refused = job.run("rollout-0", calls=[in_thread])
    assert refused.returncode == 1
    assert "ConfigError: W&B: run grpo-42 cannot be opened here: this process has it open" in refused.output
    assert job.stored.status == "finished"


@pytest.mark.wide
def test_the_first_node_of_an_owner_is_not_taken_for_a_job_with_one_writer(job):
    """The primary may open the run after another node of its job."""
    nodes = []
    for node in (1, 0):
        settings = {"rows": 10, "arguments": {"run_mode": "shared", "config": {"lr": 3}}, "key": f"rank{node}"}
        nodes.append(job.start(name=f"node-{node}", roles=ROLES, env=variables_of(node), ends="stop", **settings))
        job.wait(f"open-node-{node}", nodes[-1])
    job.go("stop")
    assert [job.finish(one).returncode for one in nodes] == [0, 0]
    own = job.stored.config["tracking_init"]
    assert job.stored.config == {"lr": 3, "tracking_init": own}
    assert own.items() >= {"roles": ROLES, "world_size": 2, "restart_count": 0}.items()
    refused = job.run(name="node-1", env=variables_of(1), arguments={"run_mode": "shared"})
    assert refused.returncode == 1
    assert "has roles (rollout-0, rollout-1)" in refused.output


def variables_of(node):
    """The variables of a node with one rank, without a store that the nodes share."""
    of_rank = {"RANK": node, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": node}
    return {name: str(value) for name, value in of_rank.items()}


@pytest.mark.wide
def test_a_role_leaves_the_run_as_the_owner_has_it(tmp_path):
    """The owner is stopped, and a role ends; then the owner is back, and has logged little, when another role ends."""
    with BACKENDS["wandb"](tmp_path / "server") as running:
        job = Roles(running, tmp_path / "jobs")
        owner = job.start(roles=ROLES, rows=5, ends="never")
        job.wait("logs-no-more-owner", owner)
        os.kill(int((job.directory / "pid-owner").read_text()), signal.SIGTERM)
        assert job.finish(owner).returncode == 143
        assert job.run("eval", rows=1).returncode == 0
        assert job.stored.status == "killed"
        role = job.start("rollout-0", rows=1, ends="stop-role")
        job.wait("open-rollout-0", role)
        owner = job.start(roles=ROLES, first=5, rows=5, ends="stop")
        running._server.wait_for(lambda: len(job.arrived("owner")) == 10)
        job.go("stop-role")
        assert job.finish(role).returncode == 0
        assert job.stored.status == "running"
        job.go("stop")
        assert job.finish(owner).returncode == 0
        assert job.stored.status == "finished"


@pytest.mark.full
def test_a_role_leaves_the_run_with_the_status_that_the_owners_function_has_told(job):
    """`run.finish(exit_code=3)` ends nothing, and is the run's status if the function then returns."""
    owner = job.run(roles=ROLES, rows=3, calls=["run.finish(exit_code=3)"])
    role = job.run("rollout-0", rows=3)
    assert (owner.returncode, role.returncode) == (0, 0), (owner.output, role.output)
    (run,) = job.server.runs
    assert (run.state, run.exit_codes) == ("failed", [3, 3])


@pytest.mark.wide
def test_an_owner_whose_ranks_all_log_and_a_role_of_several_ranks(job):
    owner = job.start(roles=ROLES, ranks=2, rows=50, ends="stop", arguments={"run_mode": "shared"})
    role = job.run("rollout-0", ranks=2, rows=50)
    assert role.returncode == 0, role.output
    job.go("stop")
    assert job.finish(owner).returncode == 0
    (run,) = job.server.runs
    assert sum("rank0" in row for row in run.rows) == 100
    assert job.arrived("rollout-0") == job.logged("rollout-0")
    assert (run.state, run.mixed_writers, len(run.clients)) == ("finished", False, 3)
    numbers = [row["roles/owner/row"] for row in run.rows if "roles/owner/row" in row]
    assert len(numbers) == len(set(numbers))


# A slow service, and one that refuses


def test_a_refusal_is_told_to_a_role_at_once(job):
    assert job.run(roles=ROLES, rows=1).returncode == 0
    with job.server.failing(Fault.status(401)) as fault:
        refused = job.run("rollout-0", arguments={"init_timeout_s": 600})
    assert refused.returncode == 1
    assert "TrackerUnavailableError" in refused.output
    assert "refuses the API key" in refused.output
    assert "has not opened it" not in refused.output
    assert 0 < fault.hits < 10  # the client itself asks again a few times


@pytest.mark.wide
def test_a_role_that_waits_for_its_run_asks_at_most_ten_times(job):
    missing = job.run("rollout-0", arguments={"init_timeout_s": 15})
    assert missing.returncode == 1
    assert 3 < job.server.operations.count("Run") <= 10


# A service whose answers are old


@pytest.mark.wide
def test_a_role_that_begins_when_its_owner_has_just_ended_leaves_the_run_ended(job):
    """What W&B answers to the role is from before the owner's end, until 4 s after the role's own end."""
    owner = job.start(roles=ROLES, rows=3, ends="stop", how="exit 3")
    job.wait("open-owner", owner)
    (run,) = job.server.wait_for(lambda: [run for run in job.server.runs if "roles/owner/state" in run.summary])
    run.shown_until = time.monotonic()
    job.go("stop")
    assert job.finish(owner).returncode == 3
    role = job.start("rollout-0", rows=3)
    job.server.wait_for(lambda: any("roles/rollout-0/exit_code" in row for row in run.rows))
    time.sleep(4)  # W&B's answers are 2 to 4 s old
    run.shown_until = None
    done = job.finish(role)
    assert done.returncode == 0, done.output
    assert "may be shown as running" not in done.output
    assert (run.state, run.exit_codes) == ("failed", [3, 3])


# Many rows that a kill has left


def killed_with_rows_left(job, rows=3000):
    """The owner, and a role that has logged many rows and was killed with its wandb-core; W&B has some of them."""
    owner = job.start(roles=ROLES, rows=3, ends="stop")
    job.wait("open-owner", owner)
    role = job.start("rollout-0", rows=rows, ends="never", pause_s=0.001)
    job.server.wait_for(lambda: sum(job.arrived("rollout-0").values()) > rows // 4, 120)
    with job.server.failing(Fault.mute("filestream")):
        job.wait("logs-no-more-rollout-0", role)
        kill_with_children(int((job.directory / "pid-rollout-0").read_text()))
        role.wait()
    for name in ("open-rollout-0", "logs-no-more-rollout-0"):
        (job.directory / name).unlink()
    assert job.arrived("rollout-0") != job.logged("rollout-0")
    return owner


@pytest.mark.wide
def test_rows_that_a_kill_has_left_are_kept_if_wandb_does_not_say_which_it_has(job):
    """The function begins all the same, and the command that is named sends them, or a later attempt does."""
    owner = killed_with_rows_left(job)
    job.server.refused_operations |= {"SampledHistoryPage", "RunParquetHistory"}
    failed = job.run("rollout-0", rows=10, first=10_000, arguments={"init_timeout_s": 20})
    assert failed.returncode == 0, failed.output
    (command,) = (line for line in failed.output.splitlines() if "rows that earlier attempts had logged" in line)
    assert job.arrived("rollout-0") != job.logged("rollout-0")
    job.server.refused_operations.clear()
    _, _, directory = command.partition("flyteplugins-tracking send ")
    sent = job.send(Path(directory))
    assert sent.returncode == 0, sent.output
    assert job.arrived("rollout-0") == job.logged("rollout-0")
    assert job.run("rollout-0", rows=10, first=20_000).returncode == 0
    job.go("stop")
    assert job.finish(owner).returncode == 0
    for name in ("owner", "rollout-0"):
        assert job.arrived(name) == job.logged(name)
    assert job.stored.status == "finished"


def require_each_row_once(job, *names):
    for name in names:
        assert job.logged(name), name
        assert job.arrived(name) == job.logged(name), name
    assert job.server.runs[0].mixed_writers is False


@pytest.mark.wide
def test_a_role_that_is_killed_again_and_again_loses_no_row(job):
    """The owner logs meanwhile, and is not disturbed."""
    owner = job.start(roles=ROLES, rows=400, pause_s=0.01, ends="stop")
    for attempt in range(moments(2)):
        process = job.start("rollout-0", first=10_000 * attempt, rows=10_000, pause_s=0.003)
        job.wait("open-rollout-0", process)
        time.sleep(_random.random() * 2)
        job.kill("rollout-0", process)
        (job.directory / "open-rollout-0").unlink()
    done = job.run("rollout-0", first=1_000_000, rows=50)
    assert done.returncode == 0, done.output
    job.go("stop")
    assert job.finish(owner).returncode == 0
    require_each_row_once(job, "owner", "rollout-0")
    (run,) = job.server.runs
    assert run.state == "finished"


@pytest.mark.wide
def test_a_role_logs_through_an_outage(job):
    owner = job.start(roles=ROLES, rows=100, pause_s=0.01, ends="stop")
    role = job.start("rollout-0", rows=100, pause_s=0.05, ends="stop")
    job.wait("open-rollout-0", role)
    with job.server.failing(Fault.status(503)) as fault:
        job.server.wait_for(lambda: fault.hits > 2)
    job.go("stop")
    assert [job.finish(one).returncode for one in (role, owner)] == [0, 0]
    require_each_row_once(job, "owner", "rollout-0")


@pytest.mark.wide
def test_two_processes_with_one_role_lose_no_row(job):
    """By mistake. One is killed, and two are started then: one of them sends its rows."""
    owner = job.start(roles=ROLES, rows=10, ends="stop")
    pair = [job.start("rollout-0", first=first, rows=150, pause_s=0.01, ends="stop") for first in (0, 1000)]
    for process in pair:
        job.wait("open-rollout-0", process)
    job.wait("logs-no-more-rollout-0", owner)
    job.kill("rollout-0", owner, waits=False)  # one of the two: that which has written its id last
    later = [job.start("rollout-0", first=first, rows=10) for first in (2000, 3000)]
    assert [job.finish(one).returncode for one in later] == [0, 0]
    job.go("stop")
    for process in (*pair, owner):
        job.finish(process)
    require_each_row_once(job, "owner", "rollout-0")
