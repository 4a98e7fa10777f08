"""A store for the boards of ranks that are in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class SharedStore:
    """As torch's HashStore, for tests that need no torch, with errors that a test raises."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            value = int(self.values.get(key, 0)) + amount
            self.values[key] = str(value).encode()
            return value

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: Iterable[str]) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        with self.lock:
            if self.values.get(key, b"") == expected.encode():
                self.values[key] = value.encode()
            return self.values.get(key, b"")
