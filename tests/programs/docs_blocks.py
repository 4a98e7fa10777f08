"""Run the Python blocks of the docs' pages one after the other in this process: a Python for each takes longer.

`docs_blocks.py RESULTS FILE...` runs each file as `python FILE` does, or as `pytest FILE` does where its name begins
with `test_`, in its own directory. RESULTS becomes a JSON object: by file, what it printed, the traceback where it
failed, and the directories of the runs that W&B has written for it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any


def main(results: Path, files: list[Path]) -> None:
    results.write_text(json.dumps({str(file): run(file) for file in files}))


def run(file: Path) -> dict[str, Any]:
    output, error, runs = io.StringIO(), None, stored_runs()
    environment, path, modules, arguments = dict(os.environ), list(sys.path), set(sys.modules), sys.argv
    sys.argv = [str(file)]
    os.chdir(file.parent)
    sys.path.insert(0, str(file.parent))
    try:
        with contextlib.redirect_stdout(output):
            as_pytest(file) if file.name.startswith("test_") else runpy.run_path(str(file), run_name="__main__")
    except SystemExit as end:
        error = f"SystemExit: {end.code}" if end.code else None
    except BaseException:
        error = traceback.format_exc()
    for name in set(sys.modules) - modules:  # the next page may have a file of the same name
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == file.parent:
            del sys.modules[name]
    sys.path[:], sys.argv = path, arguments
    os.environ.clear()
    os.environ.update(environment)
    return {"output": output.getvalue(), "error": error, "runs": sorted(stored_runs() - runs)}


def stored_runs() -> set[str]:
    """W&B reads WANDB_DIR once in a process: one directory for all."""
    return {str(path) for path in Path(os.environ["WANDB_DIR"], "wandb").glob("offline-run-*")}


def as_pytest(file: Path) -> None:
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-q", "-p", "no:cacheprovider", "-p", "flyteplugins_tracking.testing.pytest_plugin"]
    options += ["-c", os.devnull, f"--confcutdir={file.parent}"]  # and not all that is beside its directory
    options += ["-p", "no:unraisableexception"]  # which collects garbage five times
    if pytest.main([*options, str(file)]):
        raise AssertionError("pytest: see the output")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
