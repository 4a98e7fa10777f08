"""Warnings that are logged once: a training loop would repeat them at each step."""

from __future__ import annotations

import logging
from collections.abc import Hashable


class WarnOnce:
    """Logs the first warning of each key, and drops the later ones.

    The object is called with the key, and with the arguments of `logging.Logger.warning`. Threads may share it; two
    that warn at the same time may both be logged.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged: set[Hashable] = set()

    def __call__(self, key: Hashable, text: str, *args: object, exc_info: bool = False) -> None:
        """Log `text % args`, unless a warning with this key was logged before.

        Args:
            key: Identifies the subject of the warning.
            text: The message, with `%s` for each of `args`.
            *args: The message's values.
            exc_info: Whether to add the current exception's traceback.
        """
        if key not in self._logged:
            self._logged.add(key)
            self._logger.warning(text, *args, exc_info=exc_info, stacklevel=2)
