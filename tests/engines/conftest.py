"""Engines that start functions, each in its own real job. `make test-engines` installs them."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "engines" in item.path.parts:
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.full)
