"""Warnings that are logged once: a training's loop would repeat them at every step."""

from __future__ import annotations

import logging
from collections.abc import Hashable


class WarnOnce:
    """Logs the first warning of each key, and drops the later ones.

    The object is called with the key, and with what `logging.Logger.warning` takes. It is safe in several threads:
    two that warn at the same time may both be logged.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._logged: set[Hashable] = set()

    def __call__(self, key: Hashable, text: str, *args: object, exc_info: bool = False) -> None:
        """Log `text % args`, unless a warning with this key was logged before.

        Args:
            key: What the warning is about.
            text: The message, with `%s` for each of `args`.
            *args: The message's values.
            exc_info: Whether to add the current exception's traceback.
        """
        if key not in self._logged:
            self._logged.add(key)
            self._logger.warning(text, *args, exc_info=exc_info, stacklevel=2)
