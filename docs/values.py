"""For the reference: the package's own `dataclass` is to Griffe what it is to type checkers, that of `dataclasses`."""

from __future__ import annotations

from typing import Any

import griffe


class Values(griffe.Extension):
    """Has the constructors of values shown with their arguments."""

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        """See `griffe.Extension`."""
        for decorator in cls.decorators:
            made_by = decorator.value
            if decorator.callable_path.endswith(".values.dataclass") and isinstance(made_by, griffe.ExprCall):
                made_by.function = griffe.ExprName("dataclass", parent="dataclasses")
