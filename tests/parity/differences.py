"""The differences from the vendors' bare clients that are wanted, each with its reason. The docs have this list.

A program of the table names those that it meets. It imports nothing, so that `docs/include.py` can read it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One difference.

    Attributes:
        where: The aspect in which two runs differ, as `seen.py` names it; a regular expression.
        what: What the program does.
        bare: What the bare client makes of it.
        ours: What this library makes of it.
        why: The reason.
    """

    where: str
    what: str
    bare: str
    ours: str
    why: str


# Those of any run: no program names them.
EVERYWHERE = {
    "own_values": Difference(
        "config/tracking_init",
        "a launcher's job, a Flyte task, a run with roles or with `run_file=`; Trackio: any run",
        "only what the program has set",
        "the config has `tracking_init`",
        "the topology, and which attempt it is; with Trackio also the run's status",
    ),
    "failure": Difference(
        r"(summary|config|tags)/failure/\w+|files/failure\.txt",
        "a program that fails",
        "the exit code alone",
        "also `failure/*` in the summary, and the file `failure.txt`",
        "the run names the rank that failed, and why",
    ),
}
DIFFERENCES = {
    "config": Difference(
        ".*",
        "`config=` with objects that have fields (Namespace, OmegaConf, pydantic), arrays of one number, or values "
        "without a text",
        "their `repr`, or an error",
        "mappings, numbers, and a text without a place in memory",
        "they can be compared between runs, and the same with all trackers",
    ),
    "own_end": Difference(
        "rows|summary/.*|answers.*|console|state|exit_codes",
        "`run.finish()` or `wandb.finish()` before the function's end",
        "the run is over: a later row is an error, a later failure a success",
        "rows go on, and the function's end is the run's",
        "frameworks call it in the middle, and a crash after it must not be shown as a success",
    ),
    "at_exit": Difference(
        "rows|console|summary/.*",
        "rows and console lines of `atexit` functions and of `sys.excepthook`",
        "in the run",
        "not in the run",
        "the run ends with the function, before the interpreter does",
    ),
    "system_exit": Difference(
        "state|exit_codes",
        "`raise SystemExit(3)`; `sys.exit(3)` that is caught, in a thread, or in a `with run:`",
        "the status of the last call of `sys.exit`, whatever the process ends with",
        "the status of the process",
        "W&B replaces `sys.exit`, and sees nothing else",
    ),
    "exit_code": Difference(
        "state|exit_codes",
        "`sys.exit` with True, False, a negative number, or one above 255",
        'that number, or the run stays "running"',
        "what the operating system makes of it: 0 to 255",
        "the run has the exit code that a scheduler sees",
    ),
    "ctrl_c": Difference(
        "exit_codes",
        "Ctrl-C",
        "exit code 255",
        "exit code 130",
        "a shell's number for SIGINT",
    ),
    "sigterm": Difference(
        "rows|summary/.*|state|exit_codes|process",
        "SIGTERM: a preemption, a time limit, `kill`",
        'the run stays "running", and lacks its last rows',
        'all rows, "preempted", exit code 143 of the run and of the process',
        "a scheduler and a reader must see that the job was stopped",
    ),
    "other_rank": Difference(
        "rows|summary/.*|state|exit_codes",
        "an exception on a rank without the run, after which the launcher ends the others",
        'the run stays "running", and lacks its last rows',
        'all rows, "failed", and that rank\'s exit code',
        "the job has failed, and the run says why",
    ),
    "excepthook": Difference(
        "state|exit_codes|console",
        "an exception, with a `sys.excepthook` of the program's own",
        '"finished", exit code 0',
        '"failed", exit code 1',
        "W&B sees an exception in its own hook alone",
    ),
    "unseen_end": Difference(
        "state",
        "MLflow: an exception or `sys.exit(3)` after `mlflow.start_run()` without `with`; Pluto: `sys.exit(3)`",
        "a success",
        "FAILED",
        "these clients do not see why the interpreter ends",
    ),
    "values": Difference(
        "rows|names.*|answers.*",
        "Trackio, Pluto: a row with True, None, or a tensor of torch",
        "True, None, and no value for the tensor",
        "1, no value for None, and the tensor's number",
        "charts show numbers, and the rule is the same for MLflow",
    ),
    "one_tag": Difference(
        "tags",
        '`tags="abc"`',
        "three tags: a, b, c",
        "one tag",
        "that is what is meant",
    ),
    "late_rows": Difference(
        "rows|summary/.*|axes/.*|charts",
        "a row at a `step=` that the run has passed, as an evaluation logs it",
        "no such row",
        "kept in the current or the next row, with its step in `global_step`",
        "the results of an evaluation that ends late are wanted too",
    ),
}


def table() -> str:
    """The list as the docs have it, without the reasons."""
    head = "| The program | Bare client | Under the decorator |\n|---|---|---|"
    rows = [f"| {one.what} | {one.bare} | {one.ours} |" for one in (EVERYWHERE | DIFFERENCES).values()]
    return "\n".join([head, *rows])
