"""Whether this checkout can be released: `make release-check`. It builds in a temporary directory, uploads nothing."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "flyteplugins_tracking"
# What a stranger needs to build and test the package from its sdist.
IN_SDIST = (
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    f"{PACKAGE}/py.typed",
    "tests/unit/test_package.py",
)


def main() -> int:
    """Print what is wrong, and return the exit status: 1 if anything is."""
    found = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    version = found[1] if found else ""
    tags = subprocess.run(["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    problems = [*of_tags(tags.stdout.split(), version), *of_changelog((ROOT / "CHANGELOG.md").read_text(), version)]
    with tempfile.TemporaryDirectory() as directory:
        problems += of_builds(Path(directory), version)
    for problem in problems:
        print(f"release: {problem}")
    print(f"{PACKAGE} {version}: {f'{len(problems)} problems' if problems else 'can be released'}")
    return int(bool(problems))


def of_tags(tags: Collection[str], version: str) -> Iterator[str]:
    """A commit without a tag is no problem: the tag is made when this check has passed."""
    if tags and f"v{version}" not in tags:
        yield f"the commit has the tag {', '.join(sorted(tags))}, and the version in pyproject.toml is {version}"


def of_changelog(text: str, version: str) -> Iterator[str]:
    """The version needs a section that has something in it."""
    section = re.search(rf"^## \[{re.escape(version)}\].*\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)
    if section is None:
        yield f'CHANGELOG.md has no section "## [{version}]"'
    elif not section[1].strip():
        yield f'the section "## [{version}]" of CHANGELOG.md is empty'


def of_builds(directory: Path, version: str) -> Iterator[str]:
    """Build the sdist, and the wheel out of the sdist, and look into both."""
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(directory), str(ROOT)]
    built = subprocess.run(build, capture_output=True, text=True)
    sdist = directory / f"{PACKAGE}-{version}.tar.gz"
    wheel = directory / f"{PACKAGE}-{version}-py3-none-any.whl"
    if built.returncode or not (sdist.is_file() and wheel.is_file()):
        yield f"the sdist, or the wheel out of it, cannot be built:\n{built.stdout[-2000:]}{built.stderr[-2000:]}"
        return
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    yield from (f"the sdist has no {name}" for name in IN_SDIST if name not in names)
    with zipfile.ZipFile(wheel) as content:
        yield from of_wheel(content.namelist(), version)
    check = [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)]
    checked = subprocess.run(check, capture_output=True, text=True)
    if checked.returncode:
        yield f"the package index would not show the README:\n{checked.stdout}{checked.stderr}"


def of_wheel(names: Collection[str], version: str) -> Iterator[str]:
    """The wheel has the package, its metadata, and nothing else."""
    metadata = f"{PACKAGE}-{version}.dist-info"
    needed = (f"{PACKAGE}/py.typed", f"{metadata}/entry_points.txt", f"{metadata}/licenses/LICENSE")
    yield from (f"the wheel has no {name}" for name in needed if name not in names)
    for name in names:
        is_test = re.search(r"(^|/)(tests?|conftest\.py|test_\w+\.py)(/|$)", name)
        if is_test or name.partition("/")[0] not in (PACKAGE, metadata):
            yield f"the wheel has {name}"


if __name__ == "__main__":
    sys.exit(main())
