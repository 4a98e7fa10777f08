"""A file that two directories have."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Make the file `target` a link to `source`, or a copy if the file system has no links. An existing one stays.

    Raises:
        OSError: The file cannot be made; a FileNotFoundError if there is no `source`.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        return
    except FileNotFoundError:
        raise
    except OSError:  # another file system
        shutil.copyfile(source, target)
