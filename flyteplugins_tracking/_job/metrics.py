"""Metrics of several ranks: keys that say whose a value is, and one row of what all ranks have."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from flyteplugins_tracking._job.topology import get_distributed_info
from flyteplugins_tracking._util.checks import check_choice
from flyteplugins_tracking.errors import ConfigError

Stat = Literal["mean", "min", "max", "sum", "std"]
Number = int | float

# How many ranks the primary's error names.
_NAMED_RANKS = 4


def prefix_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under keys that say whose they are: `rank_{rank}/{key}`.

    The rank is that of `get_distributed_info()`; outside a distributed job it is 0, so that a script's charts have the
    same names on one process. It is what `rank_prefix=True` does to the keys of a shared run: use one of the two.

    Raises:
        ConfigError: `metrics` is no mapping with text as its keys.
        TopologyError: A launcher's values are malformed or contradict each other.
    """
    _check_keys(metrics)
    info = get_distributed_info()
    return {f"rank_{info.rank if info else 0}/{key}": value for key, value in metrics.items()}


def gather_metrics(
    metrics: Mapping[str, Any], stats: Sequence[Stat] = ("mean", "min", "max")
) -> dict[str, Number] | None:
    """What all ranks measured, as one row for `run.log` on the primary.

    This is a collective: every rank of the default process group has to call it, in the same order with its other
    collectives. It costs one `torch.distributed.gather_object`. Ranks are the process group's own; the primary is its
    rank 0.

    Args:
        metrics: This rank's values: numbers, truth values (1 or 0), and tensors and arrays with one element, on any
            device. Ranks may have different keys; a statistic is over the ranks that have the key.
        stats: Some of "mean", "min", "max", "sum" and "std" (of the population). The primary's count. NaN on one rank
            makes each statistic of that key NaN, as in NumPy.

    Returns:
        On the primary `{key}/{stat}` for each statistic and `rank_{rank}/{key}` for each rank that has the key; None
        on the other ranks. Without an initialised process group: the metrics themselves, as plain numbers.

    Raises:
        ConfigError: An argument of this rank cannot work; on the primary also: one of another rank, which is named.
            The other ranks are not kept waiting. Or two metrics come to the same key.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        _check_stats(stats)
        return _numbers(metrics)
    mine: dict[str, Number] | str
    failure = None
    try:
        chosen, mine = _check_stats(stats), _numbers(metrics)
    except Exception as error:  # raised below: the others wait for this rank
        failure, mine = error, str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    every = _gather(dist, mine)
    if every is None:
        if failure is not None:
            raise failure
        return None
    _refuse_failures(every, failure)
    return _merge(every, chosen)


def _check_keys(metrics: object) -> None:
    if not isinstance(metrics, Mapping) or not all(isinstance(key, str) for key in metrics):
        raise ConfigError(f"metrics take a mapping of text to values, not {metrics!r:.100}")


def _check_stats(stats: object) -> tuple[Stat, ...]:
    if isinstance(stats, str) or not isinstance(stats, Iterable):
        raise ConfigError(f"stats={stats!r:.100} is no sequence of names: pass stats=('mean',)")
    chosen = tuple(stats)
    for stat in chosen:
        check_choice("an entry of stats", stat, _STATS)
    return chosen


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Number]:
    """The metrics as Python's own numbers, which can be sent and logged without what they came from."""
    _check_keys(metrics)
    values = dict(metrics.items())
    values.update(_fetch(values))
    return {str.__str__(key): _number(key, value) for key, value in values.items()}


def _fetch(values: Mapping[str, Any]) -> dict[str, Number]:
    """The tensors among `values`, in one copy from each device for each type: each copy waits for the device."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    alike: dict[Any, dict[str, Any]] = defaultdict(dict)
    for key, value in values.items():
        if type(value) is torch.Tensor and value.numel() == 1:
            alike[value.device, value.dtype][key] = value.detach()
    fetched: dict[str, Number] = {}
    for tensors in alike.values():
        with contextlib.suppress(RuntimeError):  # a sparse one, say: each is read by itself, where its key is known
            together = torch.stack([tensor.reshape(()) for tensor in tensors.values()])
            fetched.update(zip(tensors, together.tolist(), strict=True))
    return fetched


def _number(key: str, value: Any) -> Number:
    plain = value
    if callable(getattr(value, "item", None)):  # of NumPy, torch and JAX; raises where there is more than one element
        with contextlib.suppress(ValueError, RuntimeError, TypeError):
            plain = value.item()
    if not isinstance(plain, (int, float)):
        raise ConfigError(
            f"metrics[{key!r}] is {value!r:.100}, of type {type(value).__name__}: pass a number, or a tensor or an "
            "array with one element"
        )
    if isinstance(plain, int) and abs(plain) > sys.float_info.max:  # no mean of it could be told
        raise ConfigError(f"metrics[{key!r}] has {plain.bit_length()} bits: pass a number that a float can hold")
    return float(plain) if isinstance(plain, float) else int(plain)


def _gather(dist: Any, mine: dict[str, Number] | str) -> list[Any] | None:
    """What each rank sends, by rank, on the primary; None elsewhere."""
    every = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    # NCCL takes the current device, which another thread, or the user's code, may not have set to this rank's.
    device = getattr(dist.group.WORLD, "bound_device_id", None)
    on_device = device is not None and device.type == "cuda"
    with sys.modules["torch"].cuda.device(device) if on_device else contextlib.nullcontext():
        dist.gather_object(mine, every, dst=0)
    return every


def _refuse_failures(every: Sequence[Any], failure: Exception | None) -> None:
    failures = [f"rank {rank}: {sent}" for rank, sent in enumerate(every) if isinstance(sent, str)]
    if failures:
        more = f"; and {len(failures) - _NAMED_RANKS} more ranks" if len(failures) > _NAMED_RANKS else ""
        raise ConfigError(f"gather_metrics: {'; '.join(failures[:_NAMED_RANKS])}{more}") from failure


def _merge(every: Sequence[Mapping[str, Number]], stats: Iterable[Stat]) -> dict[str, Number]:
    merged: dict[str, Number] = {}
    for key in dict.fromkeys(key for metrics in every for key in metrics):
        of_ranks = {rank: metrics[key] for rank, metrics in enumerate(every) if key in metrics}
        row = {f"{key}/{stat}": _statistic(stat, list(of_ranks.values())) for stat in stats}
        row |= {f"rank_{rank}/{key}": value for rank, value in of_ranks.items()}
        for twice in merged.keys() & row.keys():
            raise ConfigError(f"gather_metrics: {twice!r} would be the key of two values: rename the metric {key!r}")
        merged |= row
    return merged


def _statistic(stat: Stat, values: list[Number]) -> Number:
    """NaN if one is: Python's own `min` and `max` go by the order."""
    if any(value != value for value in values):
        return math.nan
    same_type = values if all(isinstance(value, int) for value in values) else [float(value) for value in values]
    return _STATS[stat](same_type)


def _mean(values: Sequence[Number]) -> Number:
    return sum(values) / len(values)


def _std(values: Sequence[Number]) -> Number:
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) * (value - mean) for value in values]))  # `**` raises beyond the range


_STATS: dict[str, Callable[[Sequence[Number]], Number]] = {
    "mean": _mean,
    "min": min,
    "max": max,
    "sum": sum,
    "std": _std,
}
