"""A function that is called when a module is loaded, and one that takes another's place in all modules."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from importlib.machinery import SourceFileLoader

import pytest

from flyteplugins_tracking._util.modules import replace_function, when_loaded


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that can be imported: it counts how often it is run."""
    (tmp_path / "loaded_late.py").write_text(
        "import sys\nsys.loaded_late = getattr(sys, 'loaded_late', 0) + 1\nx = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    finders = sys.meta_path[:]
    yield "loaded_late"
    sys.modules.pop("loaded_late", None)
    vars(sys).pop("loaded_late", None)
    assert sys.meta_path == finders


def test_a_function_is_called_when_a_module_is_loaded_after_it_has_run(module):
    called: list[object] = []
    take_back = [
        when_loaded(module, lambda number=number: called.append((number, sys.modules[module].x))) for number in range(2)
    ]
    importlib.import_module("colorsys")
    for _ in range(2):
        assert importlib.util.find_spec(module).origin.endswith("loaded_late.py")  # a probe is no import
    assert called == []
    late = importlib.import_module(module)
    assert (sorted(called), sys.loaded_late) == ([(0, 1), (1, 1)], 1)
    assert type(late.__loader__) is type(late.__spec__.loader) is SourceFileLoader
    importlib.reload(late)
    assert (sorted(called), sys.loaded_late) == ([(0, 1), (0, 1), (1, 1), (1, 1)], 2)
    when_loaded(module, lambda: called.append("now"))()
    assert called[4:] == ["now"]
    for forget in take_back * 2:
        forget()
    importlib.reload(late)
    assert len(called) == 5


def original() -> str:
    return "original"


bound_before = original


def test_a_function_is_replaced_under_all_names_that_modules_have_for_it(monkeypatch):
    before = original
    here = sys.modules[__name__]
    for name in ("original", "bound_before"):
        monkeypatch.setattr(here, name, before)  # put back afterwards

    def replacement() -> str:
        return "replacement"

    replacement.__module__, replacement.__qualname__ = before.__module__, before.__qualname__
    replace_function(before, replacement)
    assert (original(), bound_before(), before()) == ("replacement", "replacement", "original")
    assert pickle.loads(pickle.dumps(replacement)) is replacement
