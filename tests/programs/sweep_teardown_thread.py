"""Logs while another thread tears W&B's client down. Writes what it saw to the file `seen`."""

import json
import threading
import time

import wandb

from flyteplugins_tracking import get_run, tracking_init


@tracking_init(id="outer")
def train() -> None:
    run = get_run()
    run.log({"x": 0})
    session = run._wl
    thread = threading.Thread(target=wandb.teardown)
    thread.start()
    while not session._connection._client._writer.is_closing():
        time.sleep(0.001)
    run.log({"x": 1})
    told = {"is_torn_down": not thread.is_alive() or session._asyncer._joined}
    with open("seen", "w") as file:
        file.write(json.dumps(told) + "\n")
    thread.join()


train()
