"""The page on a backtest: one HTML file that holds everything it shows, for a browser in light or dark, a mail or a shelf.

No script, no font and no address is loaded; every name from the data is escaped by the template. `page` is a pure function of a
finished `Backtest`, its table of forecasts and what the caller knows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import polars as pl
from markupsafe import Markup
from numpy.typing import NDArray

from pipelines.forecasting import charts
from pipelines.forecasting.backtest import MODEL, Backtest, Scores
from pipelines.forecasting.charts import number, percent
from pipelines.forecasting.validation import Report as Findings

COVERAGE_WITHIN = 0.03
"""An interval holds what it promises where its coverage is as near as this."""
EXAMPLES = 3
"""Series shown from either end of the list."""
SHOWN_ORIGINS = 3
HALF, WIDE = 560, 1160
"""Widths of drawings, in the units that text is measured in: half a row of the page, and a whole one."""
DOTS = 600
"""Series in the scatter; of more, every so many by rank are drawn."""
OFF_THE_CHART = 2.2
"""A baseline so many times as far out as the furthest of the others is told, not drawn: it would flatten all the rest."""


@dataclass(frozen=True)
class Chart:
    """drawing with what it says above it and what it leaves out below it. shape: "" (half a row), "wide" or "square"."""

    heading: str
    says: str
    drawing: Markup
    note: str = ""
    shape: str = ""


@dataclass(frozen=True)
class Example:
    unique_id: str
    tag: str
    says: str
    drawing: Markup


def page(
    contest: Backtest,
    forecasts: str | Path,
    *,
    title: str,
    data: str,
    findings: Findings | None,
    facts: Sequence[tuple[str, str]],
) -> str:
    """HTML. forecasts: the Parquet file of the rows of `contest`, from which the series shown are read back. facts: name and value."""
    scores = contest.scores
    board = scores.leaderboard()
    rival = _rival(board)
    shown = _charts(contest, rival)
    return _template().render(
        title=title,
        data=data,
        lead=verdict(scores, board, rival),
        kicker=_kicker(contest),
        tiles=_tiles(scores, board, rival),
        board=_board(scores, board),
        intervals=[f"coverage{100 * share:g}" for _, _, share in scores.intervals],
        charts=shown,
        examples=_examples(contest, forecasts, rival),
        findings=findings,
        facts=facts,
        number=number,
        percent=percent,
        model=MODEL,
    )


def verdict(scores: Scores, board: Sequence[dict[str, Any]], rival: str | None) -> str:
    """One or two sentences: how the model stands against the best baseline, and whether its widest interval keeps its promise."""
    mine = next(row for row in board if row["model"] == MODEL)
    key, name = ("mase", "MASE") if np.isfinite(mine["mase"]) else ("mae", "mean absolute error")
    if not np.isfinite(mine[key]):
        return "Nothing was observed after the origins, so that nothing can be said of the forecasts."
    out = f"{MODEL} has a {name} of {number(mine[key])}"
    if rival is not None:
        other = next(row for row in board if row["model"] == rival)
        change = mine[key] / other[key] - 1 if other[key] else 0.0
        where = "below" if change < 0 else "above"
        out += (
            f", the same as {rival}, the best baseline"
            if abs(change) < 5e-4
            else f", {abs(100 * change):.1f} % {where} {rival}, the best baseline ({number(other[key])})"
        )
    out += "."
    coverage = scores.calibration()
    if scores.intervals and coverage:
        share = scores.intervals[-1][2]
        held = coverage[f"coverage{100 * share:g}"]
        out += f" Its {100 * share:g} % interval held {100 * held:.1f} % of what came: {_judged(held, share)}."
    return out


def _judged(held: float, share: float) -> str:
    if abs(held - share) <= COVERAGE_WITHIN:
        return "it keeps its promise"
    return "it is too narrow" if held < share else "it is wider than it need be"


def _rival(board: Sequence[dict[str, Any]]) -> str | None:
    """The best baseline: the first of the leaderboard that is not the model, and forecast as many series."""
    return next((str(row["model"]) for row in _of_all(board) if row["model"] != MODEL), None)


def _of_all(board: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in board if "series" not in row]


def _kicker(contest: Backtest) -> str:
    n, series = len(contest.origins), len(contest.table)
    first, last = (_stamp(contest.grid[i - 1]) for i in (contest.origins[0], contest.origins[-1]))
    return (
        f"{series:,} series at {contest.table.frequency} · {n:,} rolling origin{'s' * (n > 1)}, {first} to {last} · "
        f"{contest.model.horizon} steps ahead"
    )


def _tiles(scores: Scores, board: Sequence[dict[str, Any]], rival: str | None) -> list[tuple[str, str, str]]:
    mine = next(row for row in board if row["model"] == MODEL)
    place = [row["model"] for row in _of_all(board)].index(MODEL) + 1
    said = f"place {place} of {len(_of_all(board))}"
    tiles = [(number(mine["mase"] if scores.in_scale else mine["mae"]), "MASE" if scores.in_scale else "MAE", said)]
    if "wql" in mine:
        tiles.append((number(mine["wql"]), "CRPS", "weighted quantile loss, over the mean |y|"))
    for _, _, share in scores.intervals:
        held = mine.get(f"coverage{100 * share:g}")
        if held is not None:
            tiles.append((f"{100 * held:.1f} %", f"of {100 * share:g} % covered", _judged(held, share)))
    if rival is not None and scores.series.height > 1:
        won, of = _won(scores, rival)
        if of:
            tiles.append((percent(won / of), f"of series better than {rival}", f"{won:,} of {of:,}"))
    return tiles


def _won(scores: Scores, rival: str) -> tuple[int, int]:
    both = scores.series.select(mine=f"{MODEL}.mae", other=f"{rival}.mae").drop_nulls()
    return both.filter(pl.col("mine") < pl.col("other")).height, both.height


def _board(scores: Scores, board: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    key = "mase" if scores.in_scale else "mae"
    most = max((row[key] for row in board if np.isfinite(row[key])), default=1.0) or 1.0
    return [
        {**row, "style": _style(scores, row["model"]), "bar": round(100 * min(row[key] / most, 1), 1) if np.isfinite(row[key]) else 0}
        for row in board
    ]


def _style(scores: Scores, name: str) -> str:
    place = scores.models.index(name)
    return "model" if place == 0 else f"b{(place - 1) % 5}"


def _charts(contest: Backtest, rival: str | None) -> list[Chart]:
    scores = contest.scores
    horizon = contest.model.horizon
    steps = np.arange(1, horizon + 1, dtype=np.float64)
    unit = "MASE" if scores.in_scale else "mean absolute error"
    found: list[Chart | None] = []
    if horizon > 1 and scores.count.any():
        found.append(_errors(scores, scores.error_by_step(), steps, "Error by step", unit, "steps ahead", None, rival))
    if scores.intervals and horizon > 1 and scores.banded.any():
        found.append(_coverage(scores, steps))
    if len(contest.origins) > 1 and scores.count.any():
        at = contest.origins.astype(np.float64)
        ticks = stamp_ticks(contest.grid, int(at[0]), int(at[-1]), most=10)
        found.append(_errors(scores, scores.error_by_origin(), at, "Error over time", unit, "", ticks, rival, contest))
    if scores.levels and scores.banded.any():
        found.append(_reliability(scores))
    if rival is not None and scores.series.height >= 8:
        found.append(_series(scores, rival))
    return [chart for chart in found if chart is not None]


def _errors(
    scores: Scores,
    error: NDArray[np.float64],
    x: NDArray[np.float64],
    heading: str,
    unit: str,
    x_name: str,
    ticks: list[tuple[float, str]] | None,
    rival: str | None,
    contest: Backtest | None = None,
) -> Chart:
    whole = [(name, row) for name, row in zip(scores.models, error, strict=True) if name not in scores.sampled]
    centre = {name: float(np.nanmedian(row)) for name, row in whole if np.isfinite(row).any()}
    order = sorted(centre, key=lambda name: centre[name])
    drawn = list(order)
    while len(drawn) > 2 and drawn[-1] != MODEL and centre[drawn[-1]] > OFF_THE_CHART * max(centre[drawn[-2]], 1e-300):
        drawn.pop()
    away = [f"{name} ({number(centre[name])})" for name in order if name not in drawn]
    # The model last, so that it lies on top.
    lines = [charts.Line(name, error[scores.models.index(name)], _style(scores, name)) for name in sorted(drawn, key=lambda n: n == MODEL)]
    mine = error[0]
    says = f"{unit}: {number(float(mine[0]))} at the first step, {number(float(mine[-1]))} at the last"
    if contest is not None:
        says = f"{unit} at each origin: {number(float(np.nanmin(mine)))} at best, {number(float(np.nanmax(mine)))} at worst"
    if rival is not None:
        other = error[scores.models.index(rival)]
        better = int((mine < other).sum())
        says += f"; below {rival} at {better} of {int((np.isfinite(mine) & np.isfinite(other)).sum())}."
    else:
        says += "."

    def tell(i: int) -> str:
        head = f"origin {_stamp(contest.grid[contest.origins[i] - 1])}" if contest is not None else f"step {int(x[i])}"
        return "\n".join([head, *(f"{name}  {number(float(error[scores.models.index(name)][i]))}" for name in order)])

    drawing = charts.lines(
        x, lines, title=f"{heading}: {says}", x_name=x_name, x_ticks=ticks, columns=tell if len(x) <= 400 else None,
        width=WIDE if contest is not None else HALF, height=250,
    )  # fmt: skip
    notes = [f"Above the drawing, and left out of it: {', '.join(away)}."] if away else []
    notes += [f"Left out, because it forecast a sample of the series: {name}." for name in sorted(scores.sampled)]
    note = " ".join(notes)
    return Chart(heading, says, drawing, note, "wide" if contest is not None else "")


def _coverage(scores: Scores, steps: NDArray[np.float64]) -> Chart:
    found = scores.coverage_by_step()
    styles = ["model", "b4", "b2", "b1"]
    lines = [charts.Line("", held, styles[p % len(styles)]) for p, held in enumerate(found)]
    shares = [share for _, _, share in scores.intervals]
    bands = [
        charts.Band(np.full(len(steps), share - COVERAGE_WITHIN), np.full(len(steps), min(share + COVERAGE_WITHIN, 1.0)), "promise")
        for share in shares
    ]
    misses = [int((np.abs(held - share) > COVERAGE_WITHIN).sum()) for share, held in zip(shares, found, strict=True)]
    off = [f"the {100 * share:g} % interval at {count}" for share, count in zip(shares, misses, strict=True) if count]
    points = f"{100 * COVERAGE_WITHIN:g} points"
    says = (
        f"Within {points} of what is promised at all {len(steps)} steps."
        if not off
        else f"Further than {points} from what is promised, of {len(steps)} steps: {', '.join(off)}."
    )

    def tell(i: int) -> str:
        return "\n".join([f"step {int(steps[i])}", *(f"{100 * share:g} %  {100 * held[i]:.1f} %" for share, held in zip(shares, found, strict=True))])

    low, high = charts.span([found, np.array([min(shares) - 0.05, 1.0])])
    drawing = charts.lines(
        steps, lines, bands=bands, marks=[(share, f"{100 * share:g} %") for share in shares], title=f"Coverage by step: {says}",
        x_name="steps ahead", y_text=percent, y_range=(max(low, 0.0), min(high, 1.0)), columns=tell if len(steps) <= 400 else None,
    )  # fmt: skip
    return Chart("Coverage by step", says, drawing, f"The shaded strips are {points} to either side of the promise.")


def _reliability(scores: Scores) -> Chart:
    levels, came = np.array(scores.levels), scores.reliability()
    worst = int(np.argmax(np.abs(came - levels)))
    says = f"Furthest off: what came lay at or below q{levels[worst]:g} {100 * came[worst]:.1f} % of the time."
    told = [f"q{level:g}: {100 * share:.1f} % of what came lay at or below it" for level, share in zip(levels, came, strict=True)]
    drawing = charts.diagonal(
        charts.Points(levels, came, told), title=f"Reliability of the quantiles: {says}", x_name="quantile", y_name="share at or below it",
        low=0.0, high=1.0, joined=True,
    )  # fmt: skip
    return Chart(
        "Quantiles", says, drawing, "On the dashed line a quantile says the truth; below it the quantile lies too low, above it too high.", "square"
    )


def _series(scores: Scores, rival: str) -> Chart | None:
    key = "mase" if scores.in_scale else "mae"
    both = scores.series.select("unique_id", mine=f"{MODEL}.{key}", other=f"{rival}.{key}").drop_nulls().sort("mine")
    if not both.height:
        return None
    shown = both[np.unique(np.linspace(0, both.height - 1, min(DOTS, both.height)).round().astype(int))]
    x, y = shown["other"].to_numpy(), shown["mine"].to_numpy()
    # A few wild series would press all others into a corner; they stand at the border.
    high = float(np.quantile(np.concatenate([x, y]), 0.99)) * 1.1
    outside = int(((x > high) | (y > high)).sum())
    won, of = _won(scores, rival)
    says = f"{won:,} of {of:,} series lie below the line: there {MODEL} is better than {rival}."
    told = [f"{name}\n{MODEL} {number(b)}\n{rival} {number(a)}" for name, a, b in zip(shown["unique_id"], x, y, strict=True)]
    drawing = charts.diagonal(charts.Points(x, y, told), title=f"Each series: {says}", x_name=rival, y_name=MODEL, low=0.0, high=high or 1.0)
    notes = []
    if shown.height < both.height:
        notes.append(f"{shown.height} of {both.height:,} series, evenly by rank")
    if outside:
        notes.append(f"{outside} further out, drawn at the border")
    return Chart("Each series", says, drawing, ("; ".join(notes) + ".").capitalize() if notes else "", "square")


def _examples(contest: Backtest, forecasts: str | Path, rival: str | None) -> list[Example]:
    """The worst and the best series by the model's error; all of them where there are few."""
    scores = contest.scores
    key = "mase" if scores.in_scale else "mae"
    ranked = scores.series.drop_nulls(f"{MODEL}.{key}").sort(f"{MODEL}.{key}", "unique_id", descending=[True, False])
    if ranked.height > 2 * EXAMPLES:
        chosen = [(row, "worst") for row in ranked.head(EXAMPLES).iter_rows(named=True)]
        chosen += [(row, "best") for row in reversed(list(ranked.tail(EXAMPLES).iter_rows(named=True)))]
    else:
        tags = {0: "worst", ranked.height - 1: "best"} if ranked.height > 1 else {}
        chosen = [(row, tags.get(i, "")) for i, row in enumerate(ranked.iter_rows(named=True))]
    names = [row["unique_id"] for row, _ in chosen]
    rows = pl.scan_parquet(forecasts).filter(pl.col("unique_id").is_in(names)).collect(engine="in-memory")
    place = {name: i for i, name in enumerate(contest.table.ids)}
    out = []
    for row, tag in chosen:
        name = row["unique_id"]
        says = f"{key.upper()} {number(row[f'{MODEL}.{key}'])}"
        if rival is not None and row[f"{rival}.{key}"] is not None:
            says += f", {rival} {number(row[f'{rival}.{key}'])}"
        out.append(Example(name, tag, says, _fan(contest, place[name], rows.filter(unique_id=name), rival)))
    return out


def _fan(contest: Backtest, i: int, rows: pl.DataFrame, rival: str | None) -> Markup:
    """What was known, the last forecasts that do not overlap, and what came."""
    horizon, origins = contest.model.horizon, contest.origins
    chosen: list[int] = []
    for origin in origins[::-1]:
        if not chosen or chosen[-1] - origin >= horizon:
            chosen.append(int(origin))
        if len(chosen) == SHOWN_ORIGINS:
            break
    first = max(0, chosen[-1] - max(2 * horizon, min(contest.model.look_back, 3 * horizon)))
    at = np.arange(first, chosen[0] + horizon)
    x = at.astype(np.float64)
    drawn = {name: np.full(len(at), np.nan) for name in ("mean", *(f"q{q:g}" for q in contest.levels), *([rival] if rival else []))}
    for origin in chosen:
        part = rows.filter(pl.col("origin") == contest.grid[origin - 1]).sort("step")
        place = slice(origin - first, origin - first + horizon)
        for name, values in drawn.items():
            values[place] = part[name].to_numpy()
    real = np.where(contest.observed[i, first : chosen[0] + horizon], contest.y[i, first : chosen[0] + horizon], np.nan)
    bands = [
        charts.Band(drawn[f"q{contest.levels[low]:g}"], drawn[f"q{contest.levels[high]:g}"], f"fan{min(p, 1)}")
        for p, (low, high, _) in enumerate(reversed(contest.scores.intervals[-2:]))
    ]
    lines = [charts.Line("", drawn[rival], "b0 thin")] if rival else []
    lines += [charts.Line("", drawn["mean"], "model"), charts.Line("", real, "real")]
    name = contest.table.ids[i]
    return charts.lines(
        x, lines, bands=bands, rules=[origin - 0.5 for origin in chosen], title=f"Series {name}: forecasts and what came",
        x_ticks=stamp_ticks(contest.grid, first, chosen[0] + horizon - 1), height=210,
    )  # fmt: skip


def stamp_ticks(grid: NDArray[Any], first: int, last: int, most: int = 6) -> list[tuple[float, str]]:
    """Round stamps between two rows of a grid: where they lie (rows, broken ones between two rows), and their names."""
    if grid.dtype.kind == "i":
        step = float(grid[1] - grid[0]) if len(grid) > 1 else 1.0
        low, high = float(grid[first]), float(grid[min(last, len(grid) - 1)])
        return [(first + (tick - low) / step, number(tick)) for tick in charts.nice(low, high, most) if float(tick).is_integer()]
    shown = grid[first : last + 1].astype("datetime64[s]")
    low, high = shown[0], shown[-1]
    for step, unit, form in _CALENDAR:
        since = 1970 if unit == "Y" else 0  # numpy counts from 1970, and round years do not
        begin, end = (int(edge.astype(f"datetime64[{unit}]").astype(np.int64)) + since for edge in (low, high))
        if (end - begin) // step > 2 * most and (step, unit) != _CALENDAR[-1][:2]:
            continue
        at = (np.arange(begin // step * step, end + 1, step) - since).astype(f"datetime64[{unit}]").astype("datetime64[s]")
        at = at[(at >= low) & (at <= high)]
        if len(at) <= most or (step, unit) == _CALENDAR[-1][:2]:
            rows = np.interp(at.astype(np.float64), shown.astype(np.float64), np.arange(first, first + len(shown)))
            return [(float(row), _written(stamp, form)) for row, stamp in zip(rows, at, strict=True)]
    raise AssertionError


_CALENDAR = (
    (1, "s", "%H:%M:%S"), (10, "s", "%H:%M:%S"), (1, "m", "%H:%M"), (10, "m", "%H:%M"), (1, "h", "%H:%M"), (3, "h", "%d %b %H:%M"),
    (12, "h", "%d %b %H:%M"), (1, "D", "%d %b"), (2, "D", "%d %b"), (7, "D", "%d %b"), (14, "D", "%d %b"), (1, "M", "%b %Y"),
    (3, "M", "%b %Y"), (6, "M", "%b %Y"), (1, "Y", "%Y"), (2, "Y", "%Y"), (5, "Y", "%Y"), (10, "Y", "%Y"), (50, "Y", "%Y"),
)  # fmt: skip


def _written(stamp: np.datetime64, form: str) -> str:
    moment: Any = stamp.item()
    text = str(moment.strftime(form))
    return text if form.startswith("%H") else text.lstrip("0")


def _stamp(value: Any) -> str:
    """A stamp without the parts that say nothing."""
    if not isinstance(value, np.datetime64):
        return str(value)
    text = str(value.astype("datetime64[s]")).replace("T", " ")
    return text.removesuffix(":00").removesuffix(" 00:00")


def _template() -> jinja2.Template:
    """Autoescape is on for whatever the file is called: a series may be named <script>."""
    here = jinja2.FileSystemLoader(Path(__file__).parent)
    settings = jinja2.Environment(loader=here, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return settings.get_template("report.html")
