"""Where the ranks of a job are: from the stacks that `faulthandler` writes, grouped by equal places."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flyteplugins_tracking._util.own_code import is_own

# faulthandler's format: https://docs.python.org/3/library/faulthandler.html. The innermost frame comes first.
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_LIBRARIES = tuple({str(Path(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True)
class Frame:
    """A frame of a stack."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether it is neither the standard library's nor a package's."""
        return not self.file.startswith((*_LIBRARIES, "<")) and not is_own(self.file)


def frames_of(dump: str, thread_id: int) -> list[Frame]:
    """Return the frames of a thread in a dump of all threads, the innermost first; none if it is not there."""
    parts = _THREAD.split(dump)[1:]
    stacks = dict(zip(parts[::2], parts[1::2], strict=True))
    stack = next((text for ident, text in stacks.items() if int(ident, 16) == thread_id), "")
    return [Frame(file, int(line), function) for file, line, function in _FRAME.findall(stack)]


def place(frames: Sequence[Frame]) -> str:
    """Return where a thread is, as in "train.py:88 all_reduce": the user's line, and the innermost function."""
    if not frames:
        return "an unknown place"
    users = next((frame for frame in frames if frame.is_users), frames[0])
    return f"{Path(users.file).name}:{users.line} {frames[0].function}"


def verdict(places: Mapping[int, str]) -> str:
    """Return the places of all ranks in one line, the ranks of equal places together.

    Args:
        places: Where each rank is, in words: "at train.py:88 all_reduce", "does not answer".
    """
    ranks_by_place: dict[str, list[int]] = {}
    for rank, words in sorted(places.items()):
        ranks_by_place.setdefault(words, []).append(rank)
    by_size = sorted(ranks_by_place.items(), key=lambda item: -len(item[1]))
    return "; ".join(f"{_ranks(ranks)} {words}" for words, ranks in by_size)


def _ranks(ranks: Sequence[int]) -> str:
    """Return the ranks in words, runs of them as a range: "ranks 0-2, 5"."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1].append(rank)
        else:
            ranges.append([rank])
    texts = [f"{group[0]}-{group[-1]}" if len(group) > 2 else ", ".join(map(str, group)) for group in ranges]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(texts)}"
