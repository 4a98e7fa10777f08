"""Metrics of several ranks: keys that name the rank, and one row of the metrics of all ranks."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from flyteplugins_tracking._rank.topology import get_distributed_info
from flyteplugins_tracking._util.checks import check_choice
from flyteplugins_tracking._util.modules import initialised_distributed
from flyteplugins_tracking.errors import ConfigError

Stat = Literal["mean", "min", "max", "sum", "std"]
Number = int | float

# How many failed ranks the primary's error lists.
_LISTED_RANKS = 4


def prefix_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same values under keys that name this rank: `rank_{rank}/{key}`.

    The rank is that of `get_distributed_info()`; outside a distributed job it is 0, so that a script's charts have the
    same names on one process. `rank_prefix=True` does the same to the keys of a shared run: use one of the two.

    Raises:
        ConfigError: `metrics` is not a mapping with strings as keys.
        TopologyError: A launcher's values are malformed or contradict each other.
    """
    _check_keys(metrics)
    info = get_distributed_info()
    return {f"rank_{info.rank if info else 0}/{key}": value for key, value in metrics.items()}


def gather_metrics(
    metrics: Mapping[str, Any], stats: Sequence[Stat] = ("mean", "min", "max"), *, primary_rank: int = 0
) -> dict[str, Number] | None:
    """Gather the metrics of all ranks into one row for `run.log` on the primary.

    This is a collective: every rank of the default process group must call it, in the same order among its other
    collectives. It costs one `torch.distributed.gather_object`. The ranks are those of the process group.

    Args:
        metrics: This rank's values: numbers, booleans (1 or 0), and tensors and arrays with one element, on any
            device. Ranks may have different keys; a statistic is over the ranks that have the key.
        stats: Some of "mean", "min", "max", "sum" and "std" (of the population). Only the primary's argument is used.
            NaN on one rank makes each statistic of that key NaN, as in NumPy.
        primary_rank: The rank that gets the row, the same on every rank: as for `tracking_init`. -1 is the last rank.

    Returns:
        On the primary `{key}/{stat}` for each statistic and `rank_{rank}/{key}` for each rank that has the key; None
        on the other ranks. Without an initialised process group: the metrics themselves, as plain numbers.

    Raises:
        ConfigError: An argument of this rank is invalid; on the primary, another rank's is, and the message
            names that rank. The other ranks do not wait in vain. Or two metrics would have the same key.
    """
    dist = initialised_distributed()
    if isinstance(primary_rank, bool) or not isinstance(primary_rank, int):
        raise ConfigError(f"primary_rank must be an int such as 0, or -1 for the last rank, got {primary_rank!r}")
    if dist is None:
        _check_stats(stats)
        return _numbers(metrics)
    destination = _rank_of(primary_rank, dist.get_world_size())
    payload: dict[str, Number] | str
    failure = None
    try:
        stat_names, payload = _check_stats(stats), _numbers(metrics)
    except Exception as error:  # raised below: the others wait for this rank
        failure, payload = error, str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    payloads = _gather(dist, payload, destination)
    if payloads is None:
        if failure is not None:
            raise failure
        return None
    _refuse_failures(payloads, failure)
    return _merge(payloads, stat_names)


def _check_keys(metrics: object) -> None:
    if not isinstance(metrics, Mapping) or not all(isinstance(key, str) for key in metrics):
        raise ConfigError(f"metrics must be a mapping of text to values, got {metrics!r:.100}")


def _check_stats(stats: object) -> tuple[Stat, ...]:
    if isinstance(stats, str) or not isinstance(stats, Iterable):
        raise ConfigError(f"stats must be a sequence of names such as ('mean',), got {stats!r:.100}")
    names = tuple(stats)
    for stat in names:
        check_choice("an entry of stats", stat, _STATS)
    return names


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Number]:
    """Return the metrics as Python numbers, which can be sent and logged without torch or NumPy."""
    _check_keys(metrics)
    return {str.__str__(key): _number(key, value) for key, value in metrics.items()}


def _number(key: str, value: Any) -> Number:
    number = value
    if callable(getattr(value, "item", None)):  # of NumPy, torch and JAX; raises if there is more than one element
        with contextlib.suppress(ValueError, RuntimeError, TypeError):
            number = value.item()
    if not isinstance(number, (int, float)):
        raise ConfigError(
            f"metrics[{key!r}] is {value!r:.100}, of type {type(value).__name__}: pass a number, or a tensor or an "
            "array with one element"
        )
    if isinstance(number, int) and abs(number) > sys.float_info.max:  # it has no mean
        raise ConfigError(f"metrics[{key!r}] has {number.bit_length()} bits: pass a number that a float can hold")
    return float(number) if isinstance(number, float) else int(number)


def _rank_of(primary_rank: int, world_size: int) -> int:
    if not -world_size <= primary_rank < world_size:
        raise ConfigError(
            f"primary_rank={primary_rank} is not in the process group, whose ranks are 0 to {world_size - 1}, or "
            f"{-world_size} to -1 from the end"
        )
    return primary_rank % world_size


def _gather(dist: Any, payload: dict[str, Number] | str, destination: int) -> list[Any] | None:
    """Return the payload of each rank on the primary, and None on the other ranks."""
    payloads = [None] * dist.get_world_size() if dist.get_rank() == destination else None
    # NCCL uses the current device. In another thread, or after the user's code, it may not be this rank's.
    device = getattr(dist.group.WORLD, "bound_device_id", None)
    on_device = device is not None and device.type == "cuda"
    with sys.modules["torch"].cuda.device(device) if on_device else contextlib.nullcontext():
        dist.gather_object(payload, payloads, dst=destination)
    return payloads


def _refuse_failures(payloads: Sequence[Any], failure: Exception | None) -> None:
    failures = [f"rank {rank}: {text}" for rank, text in enumerate(payloads) if isinstance(text, str)]
    if failures:
        unlisted = f"; and {len(failures) - _LISTED_RANKS} more ranks" if len(failures) > _LISTED_RANKS else ""
        raise ConfigError(f"gather_metrics: {'; '.join(failures[:_LISTED_RANKS])}{unlisted}") from failure


def _merge(payloads: Sequence[Mapping[str, Number]], stats: Iterable[Stat]) -> dict[str, Number]:
    merged: dict[str, Number] = {}
    for key in dict.fromkeys(key for metrics in payloads for key in metrics):
        by_rank = {rank: metrics[key] for rank, metrics in enumerate(payloads) if key in metrics}
        row = {f"{key}/{stat}": _statistic(stat, list(by_rank.values())) for stat in stats}
        row |= {f"rank_{rank}/{key}": value for rank, value in by_rank.items()}
        for duplicate in merged.keys() & row.keys():
            raise ConfigError(
                f"gather_metrics: {duplicate!r} would be the key of two values: rename the metric {key!r}"
            )
        merged |= row
    return merged


def _statistic(stat: Stat, values: list[Number]) -> Number:
    """Return the statistic. NaN if a value is NaN: `min` and `max` would depend on the order."""
    if any(value != value for value in values):
        return math.nan
    same_type = values if all(isinstance(value, int) for value in values) else [float(value) for value in values]
    return _STATS[stat](same_type)


def _mean(values: Sequence[Number]) -> Number:
    return sum(values) / len(values)


def _std(values: Sequence[Number]) -> Number:
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) * (value - mean) for value in values]))  # `**` raises OverflowError


_STATS: dict[str, Callable[[Sequence[Number]], Number]] = {
    "mean": _mean,
    "min": min,
    "max": max,
    "sum": sum,
    "std": _std,
}
