"""The sample the demonstration runs on: made here, so that nothing has to be fetched and its truth is known.

Hourly load of a few sites. Each has a level that wanders, a daily profile that slowly changes its shape (what a carried
memory can follow and a fixed line cannot), a weekly rhythm, and weather that lasts for hours. No row depends on a later one.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import numpy as np
import polars as pl


def hourly_load(series: int = 4, days: int = 150, seed: int = 0) -> pl.DataFrame:
    """Long frame (unique_id, ds, y) of `series` sites and 24 * days rows each, sorted by site and time."""
    rng = np.random.default_rng(seed)
    hours = np.arange(24 * days)
    start = datetime(2024, 1, 1)
    frames = []
    for site in range(series):
        level = 50 + 10 * site + np.cumsum(rng.normal(0, 0.05, hours.size))
        day = np.cumsum(rng.normal(0, 0.012, (hours.size, 3)), axis=0) + rng.normal(0, 1, 3)
        phase = 2 * np.pi * (hours % 24) / 24
        daily = (6 + day[:, 0]) * np.sin(phase - 2) + (2 + day[:, 1]) * np.sin(2 * phase) + day[:, 2] * np.cos(3 * phase)
        weekly = np.where((hours // 24) % 7 >= 5, -5.0, 0.0)
        shocks, weather = rng.normal(0, 0.8, hours.size), np.zeros(hours.size)
        for t in range(1, hours.size):
            weather[t] = 0.9 * weather[t - 1] + shocks[t]
        y = level + daily + weekly + weather + rng.normal(0, 0.4, hours.size)
        frames.append(
            pl.DataFrame(
                {
                    "unique_id": f"site-{site}",
                    "ds": [start + timedelta(hours=int(h)) for h in hours],
                    "y": np.round(y, 3),
                }
            )
        )
    return pl.concat(frames)
