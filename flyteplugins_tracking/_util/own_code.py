"""Which source files are this package's, for those who show a user's frames."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = str(Path(__file__).parent.parent)


def is_own(file: str) -> bool:
    """Whether a source file is this package's."""
    return file.startswith(_PACKAGE)
