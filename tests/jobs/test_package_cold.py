"""Importing the package in a new interpreter loads the standard library only."""

from __future__ import annotations

import json
import subprocess
import sys

from support.jobs import PACKAGE


def test_the_import_loads_the_standard_library_only():
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); before = set(sys.modules); "
        "import flyteplugins_tracking; new = sorted({name.partition('.')[0] for name in set(sys.modules) - before}); "
        "import json; print(json.dumps(new))"
    )
    # Isolated and without `site`: nothing but this package and the standard library can be imported.
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout)) - {"flyteplugins_tracking"}
    assert loaded <= sys.stdlib_module_names
    assert loaded.isdisjoint({"asyncio", "multiprocessing", "socket", "http", "pathlib", "hashlib"})


def test_a_module_with_public_names_is_there_without_an_import_of_its_own():
    asked = (
        "import flyteplugins_tracking as t; t.errors.ConfigError; t.trackers.ClientHandle; "
        "assert {*t.__all__} <= {*dir(t)}"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", asked], check=True, timeout=60)
