"""Where a time stamp lies in the seasons of its series: the keys that a forecaster's memory is written and read with.

Slots are counted from a fixed Monday midnight UTC in steps of the frequency, so that a stamp has the same slot in a file, in a live
stream and after a restart. With a zone they are counted on its wall clock: people get up at seven, before and after the change.

Stamps are kept without a zone. Rows shorter than a day lie on the UTC clock, which has no gaps; rows of whole days and longer lie on
the clock of their zone, where a day may have 23 or 25 hours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pipelines.windows import parse_frequency
from titans_core.forecaster import Season

_MONDAY = np.datetime64("1969-12-29", "us").astype(np.int64)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_MONTHS = {"mo": 1, "q": 3, "y": 12}
_MINUTE, _HOUR, _DAY, _WEEK = 60.0, 3600.0, 86400.0, 604800.0
# One slot for at most this many parts of a season: finer profiles would see each slot too seldom.
FINEST = 168


def natural_cycles(frequency: str) -> tuple[int, ...]:
    """Rows of the cycles that a frequency suggests, shortest first: an hour, a day, a week or a year, where a whole number of rows fits."""
    count, unit = parse_frequency(frequency)
    if unit in _MONTHS:
        months = count * _MONTHS[unit]
        return (12 // months,) if months < 12 and 12 % months == 0 else ()
    if unit == "i":
        return ()
    if unit == "b":
        return (5,) if count == 1 else ()
    step = count * _SECONDS[unit]
    if unit == "w":
        return (52,) if count == 1 else ()
    spans = [_DAY, _WEEK] if step >= _MINUTE else [_HOUR, _DAY]
    counts = [span / step for span in spans]
    return tuple(int(r) for r in counts if r > 1 and float(r).is_integer())


def default_seasons(frequency: str, rows: int) -> tuple[Season, ...]:
    """A running level at two rates, and a profile for every natural cycle of which `rows` rows hold at least three.

    Rates are a cycle's: the shortest cycle is kept at a quick and a slow rate, longer ones at one.
    """
    cycles = [c for c in natural_cycles(frequency) if 3 * c <= rows]
    shortest = cycles[0] if cycles else 24
    # 0.003 and 0.0005 an hour were measured on hourly data: memories of 14 and 83 days, whatever the step.
    per_row = 24 / shortest
    seasons = [Season(rows=1, slots=1, rates=(min(0.5, 0.003 * per_row), min(0.1, 0.0005 * per_row)))]
    for i, cycle in enumerate(cycles):
        slots = max(s for s in range(1, min(cycle, FINEST) + 1) if cycle % s == 0)
        per_slot = cycle // slots
        seasons.append(Season(rows=cycle, slots=slots, rates=(0.2, 0.05) if i == 0 else (0.2 / per_slot,)))
    return tuple(seasons)


def steps(ds: NDArray[Any], frequency: str) -> NDArray[np.int64]:
    """(n,) stamps (`datetime64`, int64 microseconds UTC, or whole numbers for the unit i) -> grid steps since the fixed Monday."""
    count, unit = parse_frequency(frequency)
    if unit == "i":
        return np.asarray(ds).astype(np.int64) // count
    stamps = np.asarray(ds)
    stamps = stamps.astype("datetime64[us]") if stamps.dtype.kind == "M" else stamps.astype(np.int64).view("datetime64[us]")
    if unit == "b":
        return np.busday_count(np.datetime64("1969-12-29"), stamps.astype("datetime64[D]")) // count
    if unit in _MONTHS:
        return stamps.astype("datetime64[M]").astype(np.int64) // (count * _MONTHS[unit])
    return (stamps.astype(np.int64) - _MONDAY) // int(count * _SECONDS[unit] * 1e6)


def phases(
    frequency: str, seasons: tuple[Season, ...], zone: str | None = None
) -> Callable[[NDArray[Any]], NDArray[np.float32]]:
    """A function from stamps (n,) to the slot of each in every season (n, G), as float32 (whole numbers); by the wall clock of `zone`."""

    def phase(ds: NDArray[Any]) -> NDArray[np.float32]:
        stamps = np.asarray(ds)
        if stamps.dtype.kind != "M" and zone is not None and not frequency.endswith("i"):
            stamps = stamps.astype(np.int64).view("datetime64[us]")  # a stream's times
        at = steps(wall_clock(stamps, frequency, zone), frequency)
        return np.stack([at // s.stride % s.slots for s in seasons], axis=-1).astype(np.float32)

    return phase


def on_wall_clock(frequency: str) -> bool:
    """Whether a grid of this frequency runs on the clock of the zone (whole days and longer) and not in UTC."""
    return parse_frequency(frequency)[1] in ("d", "b", "w", "mo", "q", "y")


def to_zone(ds: pl.Series, frequency: str, zone: str | None) -> pl.Series:
    """Stamps of a grid as the user's: with the zone, where one is known; whole numbers and zoneless stamps as they are."""
    if zone is None or ds.dtype.is_integer():
        return ds
    if on_wall_clock(frequency):
        # Midnight comes twice, or not at all, where a clock changes at midnight.
        return ds.dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null")
    return ds.dt.replace_time_zone("UTC").dt.convert_time_zone(zone)


def wall_clock(ds: NDArray[Any], frequency: str, zone: str | None) -> NDArray[Any]:
    """Stamps of a grid as the zone's wall clock shows them, without a zone. (n,) -> (n,)."""
    if zone in (None, "UTC") or ds.dtype.kind != "M" or on_wall_clock(frequency):
        return ds
    shown = pl.Series(ds.astype("datetime64[us]")).dt.replace_time_zone("UTC").dt.convert_time_zone(zone)
    return shown.dt.replace_time_zone(None, ambiguous="earliest").to_numpy()
