"""Calendars of series: on which clock a grid runs, and which slot of a season each row belongs to.

Stamps are kept in UTC, without a zone. Rows shorter than a day lie on the UTC clock, which has no gaps; rows of whole
days and longer lie on the clock of their zone, where a day may have 23 or 25 hours. Seasons follow the zone's wall
clock in both cases: people get up at seven, before and after the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pipelines.windows import parse_frequency
from titans_core.forecaster import Season

_STEP_US = {"ms": 1_000, "s": 1_000_000, "m": 60_000_000, "h": 3_600_000_000}
_DAY_US = 86_400_000_000


def on_wall_clock(frequency: str) -> bool:
    """Whether a grid of this frequency runs on the clock of the zone (whole days and longer) and not in UTC."""
    return parse_frequency(frequency)[1] in ("d", "b", "w", "mo", "q", "y")


def to_zone(ds: pl.Series, frequency: str, zone: str | None) -> pl.Series:
    """Stamps of a grid as the user's: with the zone, where one is known; whole numbers and zoneless stamps as they are."""
    if zone is None or ds.dtype.is_integer():
        return ds
    if on_wall_clock(frequency):
        # Midnight may not exist, or twice, where the clock changes at midnight.
        return ds.dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null")
    return ds.dt.replace_time_zone("UTC").dt.convert_time_zone(zone)


def wall_clock(ds: NDArray[Any], frequency: str, zone: str | None) -> NDArray[Any]:
    """Stamps of a grid as the zone's wall clock shows them, without a zone. (n,) -> (n,)."""
    if zone is None or ds.dtype.kind != "M" or on_wall_clock(frequency):
        return ds
    shown = pl.Series(ds.astype("datetime64[us]")).dt.replace_time_zone("UTC").dt.convert_time_zone(zone)
    return shown.dt.replace_time_zone(None, ambiguous="earliest").to_numpy()


def phases(
    ds: NDArray[Any], seasons: Sequence[Season], frequency: str, zone: str | None = None
) -> NDArray[np.int16]:
    """The slot of each row in each season, by the wall clock of `zone`. (n,) stamps of the grid -> (n, G).

    A season of 24 rows at `1h` is the hour of the day, one of 168 the hour of the week (from Monday), one of 7 at `1d`
    the day of the week, one of 12 at `1mo` the month.
    """
    count, unit = parse_frequency(frequency)
    if unit == "i":
        row = ds.astype(np.int64) // count
    else:
        local = wall_clock(np.asarray(ds, dtype="datetime64[us]"), frequency, zone)
        if unit in _STEP_US:
            row = (local.astype(np.int64) + 3 * _DAY_US) // (count * _STEP_US[unit])  # 1970-01-01 was a Thursday
        elif unit == "b":
            row = np.busday_count(np.datetime64("1969-12-29"), local.astype("datetime64[D]")) // count
        elif unit in ("d", "w"):
            row = (local.astype("datetime64[D]").astype(np.int64) + 3) // (count * (7 if unit == "w" else 1))
        else:
            row = local.astype("datetime64[M]").astype(np.int64) // (count * {"mo": 1, "q": 3, "y": 12}[unit])
    out = np.empty((len(ds), len(seasons)), dtype=np.int16)
    for g, season in enumerate(seasons):
        out[:, g] = row % season.rows // season.stride
    return out
