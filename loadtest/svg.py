"""Plots as inline SVG: axes, lines, points, marks. Colours and fonts are the page's CSS; nothing is scripted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 640, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 40
_NUM_TICKS = 5

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Values `low` to `high` along `pixels` from `start`; `logarithmic` needs low > 0."""

    label: str
    low: float
    high: float
    logarithmic: bool = False

    def part(self, value: float) -> float:
        """Where `value` is, 0 to 1; what is outside is at the edge."""
        if self.logarithmic:
            value, low, high = (math.log10(max(number, self.low)) for number in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.0

    def ticks(self) -> list[float]:
        if self.logarithmic:
            return _log_ticks(self.low, self.high)
        step = _round_step((self.high - self.low) / _NUM_TICKS)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _round_step(step: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next((factor * power for factor in (1, 2, 5) if factor * power >= step * 0.999), 10 * power)


def _log_ticks(low: float, high: float) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(exponents) <= 3 else (1,)
    return [tick for exponent in exponents for factor in factors if low <= (tick := factor * 10.0**exponent) <= high]


@dataclass(slots=True, kw_only=True)
class Plot:
    """Drawn in the order of the calls."""

    title: str
    x: Axis
    y: Axis
    _parts: list[str] = field(default_factory=list)

    def line(self, points: Points, style: str, name: str = "") -> None:
        path = "M" + "L".join(f"{self._x(x):.1f} {self._y(y):.1f}" for x, y in points)
        self._parts.append(f'<path class="line {style}" d="{path}">{_title(name)}</path>')

    def dots(self, points: Points, style: str) -> None:
        """One path for all: a zero-length stroke with round caps is a dot."""
        path = "".join(f"M{self._x(x):.1f} {self._y(y):.1f}h0" for x, y in points)
        self._parts.append(f'<path class="dots {style}" d="{path}"/>')

    def marks(self, values: Sequence[float], style: str, height: float = 1.0) -> None:
        """Vertical strokes from the x axis up, `height` of the plot."""
        bottom = HEIGHT - _BOTTOM
        top = bottom - height * (bottom - _TOP)
        path = "".join(f"M{self._x(value):.1f} {bottom}V{top:.1f}" for value in values)
        self._parts.append(f'<path class="marks {style}" d="{path}"/>')

    def render(self) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}">'
            + self._grid()
            + "".join(self._parts)
            + "</svg>"
        )

    def _grid(self) -> str:
        bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
        parts = []
        for tick in self.x.ticks():
            at = self._x(tick)
            parts.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{bottom}"/>')
            parts.append(f'<text x="{at:.1f}" y="{bottom + 15}" text-anchor="middle">{_number(tick)}</text>')
        for tick in self.y.ticks():
            at = self._y(tick)
            parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{right}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
        middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2
        parts.append(f'<text x="{middle_x}" y="{HEIGHT - 6}" text-anchor="middle">{escape(self.x.label)}</text>')
        parts.append(
            f'<text x="12" y="{middle_y}" text-anchor="middle" transform="rotate(-90 12 {middle_y})">'
            f"{escape(self.y.label)}</text>"
        )
        return "".join(parts)

    def _x(self, value: float) -> float:
        return _LEFT + self.x.part(value) * (WIDTH - _LEFT - _RIGHT)

    def _y(self, value: float) -> float:
        bottom = HEIGHT - _BOTTOM
        return bottom - self.y.part(value) * (bottom - _TOP)


def _title(name: str) -> str:
    return f"<title>{escape(name)}</title>" if name else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
