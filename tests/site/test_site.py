"""The site works from the disk, asks no other host for anything, and its search leads to prose."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What a user types, and the page that has the answer. The search gives most weight to titles.
SEARCHES = {
    ("multiple", "gpus"): "guides/slurm.html",
    ("offline",): "guides/offline.html",
    ("resume",): "guides/restarts.html",
    ("not", "logging"): "guides/failed.html",
    ("turn", "off"): "guides/test.html",
    ("overhead",): "about/how-it-works.html",
    ("migrate",): "guides/move.html",
    ("versions",): "reference/launchers.html",
    ("hydra",): "guides/move.html",
    ("loss", "chart"): "guides/ranks.html",
    ("autologging",): "reference/trackers.html",
    ("kill_after_s",): "reference/api.html",
    ("nonetype",): "guides/failed.html",
    ("run", "name"): "guides/frameworks.html",
    ("multiple", "jobs"): "guides/ranks.html",
}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("material") is None, reason="pip install -e . --group docs"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return directory


def test_nothing_is_loaded_from_another_host(site):
    """The theme's script asks api.github.com where a page has the component `source`, which `repo_url` makes."""
    loaded = r'<(?:script|img|iframe)[^>]* src="(\w+:)?//|<link[^>]* href="(\w+:)?//(?![^>]*rel="canonical")'
    loaded += r'|data-md-component="?source"?'
    pages = list(site.rglob("*.html"))
    assert len(pages) > 17
    assert [page for page in pages if re.search(loaded, page.read_text())] == []


def test_the_search_index_is_a_script_since_a_page_on_the_disk_may_read_no_other_file(site):
    index = (site / "search" / "search_index.js").read_text()
    assert json.loads(index.partition("=")[2])["docs"]
    assert 'src="assets/iframe-worker.js"' in (site / "index.html").read_text()


def test_a_title_of_the_right_page_has_the_words_that_a_user_types(site, subtests):
    index = json.loads((site / "search" / "search_index.json").read_text())
    separator = index["config"]["separator"]
    titled = [entry for entry in index["docs"] if entry.get("boost", 1) == 1]
    words_of = [re.split(separator, html.unescape(re.sub("<[^>]+>", "", entry["title"])).lower()) for entry in titled]
    for words, page in SEARCHES.items():
        with subtests.test(words):
            found = [entry for entry, of_title in zip(titled, words_of, strict=True) if set(words) <= set(of_title)]
            assert {entry["location"].partition("#")[0] for entry in found} == {page}
