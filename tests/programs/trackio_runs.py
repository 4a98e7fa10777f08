"""One process with Trackio runs of all sorts, for `test_trackio_jobs.py`. Prints what it saw as one line of JSON."""

import contextlib
import json
import logging
import os
import sys
import threading
import warnings

from flyteplugins_tracking import get_run, tracking_init

logging.basicConfig()
seen = {}
tracked = {"tracker": "trackio", "project": "p"}


@tracking_init(
    **tracked, id="all", name="shown", group="g", tags=["t"], notes="no", config={"lr": 0.1, "nan": float("nan")}
)
def all_of_it():
    import numpy
    import trackio

    run = get_run("trackio")
    seen["own"] = isinstance(run, trackio.Run), run.id, run.name, run.resumed, get_run() is run
    run.log({"a": 1})
    trackio.log({"a": 2})
    trackio.log({"a": 3}, step=10)
    run.log(
        {"image": trackio.Image(numpy.zeros((4, 4, 3), "uint8")), "table": trackio.Table(columns=["c"], data=[[1]])}
    )
    for _ in range(2):
        run.log({"bool": True, "none": None, "nan": float("nan"), "zero_d": numpy.float32(0.5)})
    inits = {"from_framework": 1, "lr": 9, "status": "x", "_mine": 1}
    seen["joined"] = trackio.init("another", "other", config=inits) is run
    trackio.finish()
    run.finish()
    trackio.alert("look", "here")
    run.log_system({"memory": 1})
    inner()
    trackio.log({"a": 4})
    thread = threading.Thread(target=lambda: get_run().log({"thread": 1}))
    thread.start()
    thread.join()
    forked(run)
    seen["files"] = os.path.exists(os.path.join(os.environ["TRACKIO_DIR"], "p.db"))


def forked(run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pid = os.fork()
    if pid == 0:
        run.log({"child": 1})
        os._exit(0 if get_run() is None else 1)
    seen["forked"] = os.waitpid(pid, 0)[1]


@tracking_init(**tracked, id="inner", run_mode="new")
def inner():
    import trackio

    trackio.log({"inner": 1})
    seen["inner"] = get_run().id


@tracking_init(**tracked, id="all")
def again():
    seen["again"] = get_run().resumed, get_run().name
    get_run().log({"a": 5})


def ending(name, error):
    @tracking_init(**tracked, id=name)
    def end():
        get_run().log({"a": 1})
        raise error

    with contextlib.suppress(BaseException):
        end()


all_of_it()
again()
ending("three", SystemExit(3))
ending("interrupted", KeyboardInterrupt())

import trackio  # noqa: E402
from trackio.context_vars import current_run  # noqa: E402

seen["left"] = current_run.get() is None, trackio.config == {}
others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
for thread in others:
    # Trackio's first row and its system metrics may each start a sender at the same time. It joins one of them.
    thread.join(30)
seen["threads"] = [thread.name for thread in others if thread.is_alive()]
print(json.dumps(seen), file=sys.stderr)
