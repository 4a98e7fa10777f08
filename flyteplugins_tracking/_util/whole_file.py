"""Files that are written as a whole, and files that two directories have."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace the text of a file, or make the file: a reader, and a kill, finds the old text or the new one.

    Threads and processes may do so at the same time.

    Args:
        path: The file.
        text: Its new text.
        mode: Its permissions, less the process's umask.

    Raises:
        OSError: The file cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
        file.write(text)
    unfinished.replace(path)


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
