"""Charts as inline SVG: no script, no font, no address, every name escaped. Colours are classes, which the page gives in light and dark.

A chart is `Markup`, safe to stand in an autoescaped template; whatever text goes in is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

LABEL = 11.5
"""Height that a line of text takes, in the units of the drawing."""
CHARACTER = 7.3
"""Width of a character, wide enough to leave room for a name in any font."""


@dataclass(frozen=True)
class Line:
    """y (n,) over the x of the chart, with NaN where the line is broken. style: class of the stroke. label: at its end; empty: none."""

    label: str
    y: Numbers
    style: str


@dataclass(frozen=True)
class Band:
    low: Numbers
    high: Numbers
    style: str


@dataclass(frozen=True)
class Frame:
    """The drawing area of a chart, and where numbers lie in it."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float = 560
    height: float = 260
    left: float = 44
    right: float = 16
    top: float = 12
    bottom: float = 30

    def across(self, value: float) -> float:
        low, high = self.x
        return round(self.left + (value - low) / ((high - low) or 1) * (self.width - self.left - self.right), 2)

    def up(self, value: float) -> float:
        low, high = self.y
        return round(self.height - self.bottom - (value - low) / ((high - low) or 1) * (self.height - self.top - self.bottom), 2)


def lines(
    x: Numbers,
    drawn: Sequence[Line],
    *,
    bands: Sequence[Band] = (),
    marks: Sequence[tuple[float, str]] = (),
    rules: Sequence[float] = (),
    title: str,
    x_name: str = "",
    x_ticks: Sequence[tuple[float, str]] | None = None,
    y_text: Callable[[float], str] | None = None,
    y_range: tuple[float, float] | None = None,
    columns: Callable[[int], str] | None = None,
    height: float = 260,
    width: float = 560,
) -> Markup:
    """Lines over x (n,), with bands below them, dashed horizontal `marks` (value, label), and vertical `rules`.

    columns(i): what a reader who points at x[i] is told. title: for readers who do not see the drawing.
    """
    every = [line.y for line in drawn] + [edge for band in bands for edge in (band.low, band.high)]
    low, high = y_range or span(every + [np.array([value for value, _ in marks])])
    names = [line.label for line in drawn if line.label] + [label for _, label in marks]
    right = 16 + CHARACTER * max((len(name) for name in names), default=0)
    text = y_text or number
    ticks = nice(low, high, 5)
    left = 14 + CHARACTER * max(len(text(tick)) for tick in ticks)
    frame = Frame((float(x[0]), float(x[-1])), (low, high), width, height, left, right, bottom=42 if x_name else 28)
    parts = [_axes(frame, ticks, x_ticks if x_ticks is not None else _counted(x), text, x_name)]
    for band in bands:
        parts.extend(_area(frame, x, band))
    for value in rules:
        at = frame.across(value)
        parts.append(Markup('<line class="rule" x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>').format(at, frame.top, frame.height - frame.bottom))
    ends: list[tuple[float, str, str]] = []
    for value, label in marks:
        at = frame.up(value)
        parts.append(Markup('<line class="mark" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(frame.left, width - right, at, at))
        ends.append((at, label, "mark"))
    for line in drawn:
        parts.append(Markup('<path class="line {}" d="{}"/>').format(line.style, _path(frame, x, line.y)))
        good = np.flatnonzero(np.isfinite(line.y))
        if line.label and len(good):
            ends.append((frame.up(float(line.y[good[-1]])), line.label, line.style))
    for at, label, style in _apart(ends, frame.top + 6, height - frame.bottom):
        parts.append(Markup('<text class="end {}" x="{}" y="{}">{}</text>').format(style, width - right + 7, round(at + 4, 1), label))
    if columns is not None:
        parts.extend(_told(frame, x, columns))
    return _svg(parts, width, height, title)


@dataclass(frozen=True)
class Points:
    """Scattered points: x, y (n,) each with what a reader who points at it is told."""

    x: Numbers
    y: Numbers
    told: Sequence[str] = field(repr=False)


def diagonal(points: Points, *, title: str, x_name: str, y_name: str, low: float, high: float, joined: bool = False) -> Markup:
    """Points against the line where both sides are equal; a square drawing on which both axes are the same."""
    side = 360.0
    frame = Frame((low, high), (low, high), side + 26, side, left=52, right=16, top=12, bottom=42)
    ticks = nice(low, high, 5)
    parts = [_axes(frame, ticks, [(tick, number(tick)) for tick in ticks], number, x_name)]
    line = Markup('<line class="mark" x1="{}" y1="{}" x2="{}" y2="{}"/>')
    parts.append(line.format(frame.across(low), frame.up(low), frame.across(high), frame.up(high)))
    if joined:
        places = " L".join(f"{frame.across(a)} {frame.up(b)}" for a, b in zip(points.x, points.y, strict=True))
        parts.append(Markup('<path class="line model" d="M{}"/>').format(places))
    for a, b, told in zip(points.x, points.y, points.told, strict=True):
        dot = Markup('<circle class="dot" cx="{}" cy="{}" r="{}"><title>{}</title></circle>')
        parts.append(dot.format(frame.across(float(np.clip(a, low, high))), frame.up(float(np.clip(b, low, high))), 4 if joined else 2.6, told))
    parts.append(Markup('<text class="name" x="{}" y="{}">{}</text>').format(frame.left + 8, frame.top + 12, y_name))
    return _svg(parts, side + 26, side, title)


def span(every: Sequence[Numbers], *, pad: float = 0.06) -> tuple[float, float]:
    """The range of all finite numbers with a little room."""
    flat = np.concatenate([np.asarray(values, dtype=np.float64).reshape(-1) for values in every]) if every else np.empty(0)
    flat = flat[np.isfinite(flat)]
    if not len(flat):
        return 0.0, 1.0
    low, high = float(flat.min()), float(flat.max())
    room = pad * (high - low) or max(abs(high) * 0.1, 0.5)
    return low - room, high + room


def nice(low: float, high: float, most: int) -> list[float]:
    """At most about `most` round numbers between low and high."""
    step = 10.0 ** math.floor(math.log10(max(high - low, 1e-300) / max(most, 1)))
    step = next(step * m for m in (1, 2, 2.5, 5, 10) if (high - low) / (step * m) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)] or [low]


def number(value: float) -> str:
    """A number for people: four digits, thousands apart."""
    if not math.isfinite(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.3g}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %" if math.isfinite(value) else "–"


def _axes(frame: Frame, y_ticks: Sequence[float], x_ticks: Sequence[tuple[float, str]], text: Callable[[float], str], x_name: str) -> Markup:
    parts = []
    for tick in y_ticks:
        at = frame.up(tick)
        parts.append(Markup('<line class="grid" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(frame.left, frame.width - frame.right, at, at))
        parts.append(Markup('<text class="tick" text-anchor="end" x="{}" y="{}">{}</text>').format(frame.left - 7, at + 4, text(tick)))
    base = frame.height - frame.bottom
    parts.append(Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(frame.left, frame.width - frame.right, base, base))
    for value, label in x_ticks:
        at = frame.across(value)
        parts.append(Markup('<text class="tick" text-anchor="middle" x="{}" y="{}">{}</text>').format(at, base + 16, label))
    if x_name:
        middle = (frame.left + frame.width - frame.right) / 2
        parts.append(Markup('<text class="name" text-anchor="middle" x="{}" y="{}">{}</text>').format(middle, frame.height - 6, x_name))
    return Markup("").join(parts)


def _counted(x: Numbers) -> list[tuple[float, str]]:
    return [(tick, number(tick)) for tick in nice(float(x[0]), float(x[-1]), 7) if float(tick).is_integer()]


def _path(frame: Frame, x: Numbers, y: Numbers) -> str:
    out, pen = [], "M"
    for a, b in zip(x, y, strict=True):
        if math.isfinite(b):
            out.append(f"{pen}{frame.across(float(a))} {frame.up(float(b))}")
            pen = "L"
        else:
            pen = "M"
    return "".join(out)


def _area(frame: Frame, x: Numbers, band: Band) -> list[Markup]:
    """A shape for each unbroken run of the band."""
    good = np.isfinite(band.low) & np.isfinite(band.high)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], good, [False]]).astype(np.int8)))
    parts = []
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        there = [f"{frame.across(float(x[i]))} {frame.up(float(band.high[i]))}" for i in range(first, last)]
        back = [f"{frame.across(float(x[i]))} {frame.up(float(band.low[i]))}" for i in reversed(range(first, last))]
        parts.append(Markup('<path class="band {}" d="M{}Z"/>').format(band.style, "L".join(there + back)))
    return parts


def _told(frame: Frame, x: Numbers, columns: Callable[[int], str]) -> list[Markup]:
    """An invisible column over each x, which shows itself and its text to whoever points at it."""
    middles = (x[1:] + x[:-1]) / 2
    edges = np.concatenate([[x[0]], middles, [x[-1]]])
    parts = []
    for i in range(len(x)):
        left, right = frame.across(float(edges[i])), frame.across(float(edges[i + 1]))
        box = Markup('<rect class="told" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>')
        parts.append(box.format(left, frame.top, round(max(right - left, 1), 2), frame.height - frame.top - frame.bottom, columns(i)))
    return parts


def _apart(ends: list[tuple[float, str, str]], top: float, bottom: float) -> list[tuple[float, str, str]]:
    """Labels moved up and down until none covers another."""
    ordered = sorted(ends, key=lambda end: end[0])
    places = [min(max(at, top), bottom) for at, _, _ in ordered]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + LABEL)
    over = places[-1] - bottom if places else 0.0
    if over > 0:
        places[-1] = bottom
        for i in reversed(range(len(places) - 1)):
            places[i] = min(places[i], places[i + 1] - LABEL)
    return [(place, label, style) for place, (_, label, style) in zip(places, ordered, strict=True)]


def _svg(parts: Sequence[Markup], width: float, height: float, title: str) -> Markup:
    head = Markup('<svg viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">').format(width, height, title)
    return head + Markup("").join(parts) + Markup("</svg>")
