"""What `make release-check` refuses."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / ".ci" / "release_check.py"
SPEC = importlib.util.spec_from_file_location("release_check", PATH)
assert SPEC is not None
assert SPEC.loader is not None
release_check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(release_check)

METADATA = "flyteplugins_tracking-0.1.0.dist-info"
WHEEL = [
    "flyteplugins_tracking/__init__.py",
    "flyteplugins_tracking/py.typed",
    "flyteplugins_tracking/testing/pytest_plugin.py",
    f"{METADATA}/entry_points.txt",
    f"{METADATA}/licenses/LICENSE",
]


@pytest.mark.parametrize(
    ("tags", "is_refused"), [([], False), (["v0.1.0"], False), (["v0.1.0", "best"], False), (["v0.2.0"], True)]
)
def test_a_tag_is_the_version(tags, is_refused):
    assert bool([*release_check.of_tags(tags, "0.1.0")]) == is_refused


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# Changelog\n\n## [0.1.0] - 2026-12-01\n\n- All of it.\n\n## [0.0.9]\n", None),
        ("# Changelog\n\n## [Unreleased]\n\n- 0.1.0 comes.\n", "has no section"),
        ("# Changelog\n\n## [0.1.0]\n\n## [0.0.9]\n\n- Older.\n", "is empty"),
    ],
)
def test_the_changelog_has_a_section_of_the_version(text, problem):
    problems = [*release_check.of_changelog(text, "0.1.0")]
    assert len(problems) == bool(problem)
    assert problem is None or problem in problems[0]


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (WHEEL, None),
        ([*WHEEL, "tests/unit/test_run.py"], "tests/unit/test_run.py"),
        ([*WHEEL, "flyteplugins_tracking/tests/test_run.py"], "tests/test_run.py"),
        ([*WHEEL, "examples/move.py"], "examples/move.py"),
        (WHEEL[:1] + WHEEL[2:], "has no flyteplugins_tracking/py.typed"),
    ],
)
def test_the_wheel_has_the_package_alone(names, problem):
    problems = [*release_check.of_wheel(names, "0.1.0")]
    assert len(problems) == bool(problem)
    assert problem is None or problem in problems[0]
