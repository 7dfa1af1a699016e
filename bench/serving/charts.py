"""Charts as SVG: lines, steps and dots over two axes. The page around them has the colours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10

import numpy as np

WIDTH, HEIGHT = 400, 230
LEFT, RIGHT, TOP, BOTTOM = 46.0, 388.0, 22.0, 192.0  # of the part between the axes
FAR_APART = 8.0  # times as much as another engine may one need on a linear axis
SHORTEST = 1e-5  # of the most on a logarithmic axis; what is less lies on its edge
STEPS = (1, 2, 5)  # of labels within a power of ten
ROOM = 1.06  # more than the most on a linear axis
LOG_ROOM = 1.3
MOST_LABELS = 6

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """From `least` to `most`, linear or logarithmic, with the unit in its label."""

    label: str
    least: float
    most: float
    is_log: bool

    def parts(self, values: Sequence[float]) -> np.ndarray:
        """Where values lie, 0 at the least and 1 at the most."""
        numbers: np.ndarray = np.clip(np.array(values, float), self.least, self.most)
        if self.is_log:
            return np.asarray(np.log(numbers / self.least) / np.log(self.most / self.least))
        return (numbers - self.least) / (self.most - self.least)

    def labelled(self) -> list[float]:
        """Round values between the ends, at most `MOST_LABELS`."""
        if not self.is_log or self.most < 10 * self.least:
            return _even(self.least, self.most)
        powers = range(floor(log10(self.least)), floor(log10(self.most)) + 1)
        for within in (STEPS, STEPS[:1]):
            every = [step * 10.0**power for power in powers for step in within]
            found = [value for value in every if self.least <= value <= self.most]
            if len(found) <= MOST_LABELS:
                return found
        return found[:: -(-len(found) // MOST_LABELS)]


def axis(label: str, groups: Sequence[Sequence[float]], is_log: bool | None = None) -> Axis:
    """An axis for all values of all engines, a group of values for each engine.

    Without `is_log` it begins at 0, and is logarithmic if an engine's largest value is far above
    another's.
    """
    tops = [top for group in groups if (top := max(group, default=0.0)) > 0] or [1.0]
    most = max(tops)
    if not (most > FAR_APART * min(tops) if is_log is None else is_log):
        return Axis(label, 0.0, ROOM * most, False)
    least = min(value for group in groups for value in (*group, most) if value >= SHORTEST * most)
    return Axis(label, least / LOG_ROOM, LOG_ROOM * most, True)


def _even(least: float, most: float) -> list[float]:
    raw = (most - least) / MOST_LABELS
    power = 10.0 ** floor(log10(raw))
    step = next(step * power for step in (*STEPS, 10) if step * power >= raw)
    first = -floor(-least / step)
    return [round(i * step, 12) for i in range(first, floor(most / step) + 1)]


@dataclass(frozen=True)
class Chart:
    """Marks over two axes; `alt` says what is seen."""

    title: str
    alt: str
    x: Axis
    y: Axis
    marks: Sequence[str]

    def svg(self) -> str:
        """The element; colours are of the classes of the marks."""
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.alt)}">'
            f"{''.join(self._frame())}{''.join(self.marks)}</svg>"
        )

    def _frame(self) -> Iterator[str]:
        for value, at in zip(self.x.labelled(), _across(self.x, self.x.labelled()), strict=True):
            yield f'<path class="grid" d="M{at:g} {TOP}V{BOTTOM}"/>'
            yield f'<text class="under" x="{at:g}" y="{BOTTOM + 14}">{value:,g}</text>'
        for value, at in zip(self.y.labelled(), _down(self.y, self.y.labelled()), strict=True):
            yield f'<path class="grid" d="M{LEFT} {at:g}H{RIGHT}"/>'
            yield f'<text class="beside" x="{LEFT - 5}" y="{at + 4:g}">{value:,g}</text>'
        yield f'<text x="4" y="11">{escape(self.y.label)}</text>'
        middle, lowest = (LEFT + RIGHT) / 2, HEIGHT - 6
        yield f'<text class="under" x="{middle}" y="{lowest}">{escape(self.x.label)}</text>'


def _across(x: Axis, values: Sequence[float]) -> np.ndarray:
    return np.round(2 * (LEFT + (RIGHT - LEFT) * x.parts(values))) / 2


def _down(y: Axis, values: Sequence[float]) -> np.ndarray:
    return np.round(2 * (BOTTOM - (BOTTOM - TOP) * y.parts(values))) / 2


def _places(x: Axis, y: Axis, points: Points) -> list[tuple[float, float]]:
    """Pixels, without those that are like the one before."""
    xs, ys = zip(*points, strict=True)
    every = zip(_across(x, xs).tolist(), _down(y, ys).tolist(), strict=True)
    found: list[tuple[float, float]] = []
    for place in every:
        if not found or place != found[-1]:
            found.append(place)
    return found


def steps(x: Axis, y: Axis, points: Points, kind: str) -> str:
    """A line that keeps each value until the next one; `kind` are CSS classes, as below."""
    (first_x, first_y), *others = _places(x, y, points)
    way = "".join(f"H{across:g}V{down:g}" for across, down in others)
    return f'<path class="line {kind}" d="M{first_x:g} {first_y:g}{way}"/>'


def dots(x: Axis, y: Axis, points: Points, kind: str) -> str:
    """A dot for each point, once for those in the same place."""
    places = dict.fromkeys(_places(x, y, points))
    way = "".join(f"M{across:g} {down:g}h0" for across, down in places)
    return f'<path class="dots {kind}" d="{way}"/>'


def level(y: Axis, value: float, kind: str) -> str:
    """A line from end to end."""
    [at] = _down(y, [value])
    return f'<path class="line {kind}" d="M{LEFT} {at:g}H{RIGHT}"/>'


def spot(x: Axis, y: Axis, point: tuple[float, float], kind: str, title: str) -> str:
    """A large dot with a title."""
    [(across, down)] = _places(x, y, [point])
    words = f"<title>{escape(title)}</title>"
    return f'<circle class="{kind}" cx="{across:g}" cy="{down:g}" r="4">{words}</circle>'
