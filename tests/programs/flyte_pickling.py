"""Pickles a tracked function of `__main__` in a process that has imported flytekit: by name, and by value."""

import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle
import flytekit  # noqa: F401 it changes how functions are wrapped

from flyteplugins_tracking import tracking_init


@tracking_init
def train(x: int) -> int:
    return x + 1


def call_elsewhere(function: Any) -> None:
    """Call the function in a process that cannot import this module."""
    code = "import sys, pickle; print(pickle.load(sys.stdin.buffer)(1))"
    done = subprocess.run([sys.executable, "-c", code], input=cloudpickle.dumps(function), cwd="/", check=False)
    assert done.returncode == 0


def main() -> None:
    import flyte_pickling

    assert type(train).__name__ == "TaskFunction"
    assert pickle.loads(pickle.dumps(train)) is train
    assert pickle.loads(ForkingPickler.dumps(train)) is train
    call_elsewhere(train)
    cloudpickle.register_pickle_by_value(flyte_pickling)
    call_elsewhere(flyte_pickling.train)


if __name__ == "__main__":
    main()
