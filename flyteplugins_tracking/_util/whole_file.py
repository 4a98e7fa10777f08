"""Files that are written as a whole: a reader, and a kill, finds the old text or the new one."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace the text of a file, or make the file. Threads and processes may do so at the same time.

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
