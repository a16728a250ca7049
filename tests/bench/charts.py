"""The charts, as SVG: plain shapes and text, in colours that follow the reader's light or dark scheme."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from math import log10
from typing import Any

Measured = dict[str, Any]

WIDTH, MARGIN, LABELS, RIGHT = 760, 24, 110, 80
BAR, GAP, BETWEEN = 18, 4, 20
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2937 }
  .title { font-size: 16px; font-weight: 600 } .note { fill: #6b7280; font-size: 12px }
  .panel { fill: #ffffff; stroke: #e5e7eb } .grid { stroke: #e5e7eb } .line { fill: none; stroke-width: 2.5 }
  .c0 { fill: #2563eb } .c1 { fill: #94a3b8 } .c2 { fill: #d97706 } .c3 { fill: #0d9488 }
  .l0 { stroke: #2563eb } .l2 { stroke: #d97706 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e5e7eb } .note { fill: #9ca3af } .panel { fill: #111827; stroke: #374151 } .grid { stroke: #374151 }
    .c0 { fill: #60a5fa } .c1 { fill: #64748b } .c2 { fill: #fbbf24 } .c3 { fill: #2dd4bf }
    .l0 { stroke: #60a5fa } .l2 { stroke: #fbbf24 }
  }
"""


class NotMeasuredError(Exception):
    """There are no results of a case."""


@dataclass(frozen=True)
class Bar:
    """Pieces one after another, each with the number of its series; a plain bar has one."""

    label: str
    pieces: list[tuple[int, float]]
    value: float | None = None  # where the length is not the value itself

    @property
    def length(self) -> float:
        return sum(size for _, size in self.pieces)


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    marked = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{marked}>{escape(words)}</text>'


def frame(title: str, note: str, height: float, shapes: list[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="panel" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:.0f}" rx="8"/>',
            text(MARGIN, 32, title, "title"),
            text(MARGIN, 52, note, "note"),
            *shapes,
            "</svg>\n",
        ]
    )


def legend(series: list[str], y: float) -> list[str]:
    shapes, x = [], float(MARGIN)
    for number, name in enumerate(series):
        shapes += [f'<rect class="c{number}" x="{x:.1f}" y="{y - 10}" width="12" height="12" rx="2"/>']
        shapes += [text(x + 18, y, name)]
        x += 18 + 7.2 * len(name) + 18
    return shapes


def bars(title: str, note: str, series: list[str], groups: dict[str, list[Bar]]) -> str:
    """Groups of horizontal bars with their values behind them."""
    shapes, y = legend(series, 78), 104.0
    longest = max(bar.length for group in groups.values() for bar in group)
    inside = any(bar.label for group in groups.values() for bar in group)
    left = MARGIN + LABELS + (130 if inside else 0)
    scale = (WIDTH - left - RIGHT) / longest
    for name, group in groups.items():
        middle = y + (len(group) * (BAR + GAP) - GAP) / 2
        shapes.append(text(MARGIN, middle + 5, name))
        for bar in group:
            if bar.label:
                shapes.append(text(left - 10, y + 13, bar.label, "note", "end"))
            starts = accumulate((size for _, size in bar.pieces), initial=0.0)
            for (kind, size), start in zip(bar.pieces, starts, strict=False):
                shapes.append(
                    f'<rect class="c{kind}" x="{left + start * scale:.1f}" y="{y:.1f}" '
                    f'width="{max(size * scale, 1):.1f}" height="{BAR}" rx="2"/>'
                )
            shapes.append(text(left + bar.length * scale + 8, y + 13, short(bar.value or bar.length)))
            y += BAR + GAP
        y += BETWEEN
    return frame(title, note, y, shapes)


def short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rates(rows: list[Measured], case: str) -> dict[str, float]:
    """Every contender of a case, whatever it was compared with."""
    found = {name: rate for row in rows if row["case"] == case for name, rate in row["rates"].items()}
    if not found:
        raise NotMeasuredError(case)
    return found


def drain(rows: list[Measured]) -> str:
    series = ["relay", "publish from memory (ceiling)", "aio-pika publish, gather", "faststream-outbox"]
    groups = {}
    for kind in ("classic", "quorum"):
        found = rates(rows, f"drain, {kind}") | rates(rows, f"processes, {kind}")
        values = [found[name.partition(" (")[0]] for name in series]
        groups[f"{kind} queue"] = [Bar("", [(number, value)]) for number, value in enumerate(values)]
    return bars(
        "Draining a backlog: messages per second", "256-byte bodies; persistent, mandatory, confirmed", series, groups
    )


def latency(rows: list[Measured]) -> str:
    series = ["relay", "bare LISTEN and publish", "faststream-outbox"]
    groups = {}
    for pace in ("10", "100", "1000"):
        for part in ("p50", "p99"):
            found = rates(rows, f"latency {part}, {pace}/s")
            groups[f"{int(pace):,}/s, {part}"] = [
                Bar("", [(number, log10(max(2 * found[name], 1.1)))], found[name]) for number, name in enumerate(series)
            ]
    return bars(
        "From COMMIT to the consumer: milliseconds, on a logarithmic scale",
        "by transactions per second: half of the messages took less than p50, 99 of 100 less than p99",
        series,
        groups,
    )


def emit(rows: list[Measured]) -> str:
    series = ["emit", "insert", "insert with NOTIFY trigger"]
    groups = {}
    for clients in (1, 16, 64):
        found = rates(rows, f"emit, {clients} clients")
        name = f"{clients} client" + "s" * (clients > 1)
        groups[name] = [Bar("", [(number, found[one])]) for number, one in enumerate(series)]
    return bars("Emitting: transactions per second", "one message of 256 bytes in each, synced to disk", series, groups)


def cpu(rows: list[Measured]) -> str:
    series = ["relay", "PostgreSQL", "RabbitMQ"]
    groups: dict[str, list[Bar]] = {}
    for kind in ("classic", "quorum"):
        found = [rates(rows, f"CPU of {part}, {kind}") for part in series]
        groups[f"{kind} queue"] = [
            Bar(name, [(number, values[name]) for number, values in enumerate(found)])
            for name in ("one relay", "faststream-outbox")
        ]
    return bars(
        "CPU seconds per 1,000 messages",
        "draining a backlog; each side's own process, and both servers",
        series,
        groups,
    )


def growth(rows: list[Measured]) -> str:
    """Two lines over the messages that have gone through; megabytes."""
    memory, room = (rates(rows, f"growth, {what}") for what in ("relay memory", "table size"))
    left, right, top, bottom = MARGIN + 40, WIDTH - MARGIN - 90, 80, 280
    most = max(*memory.values(), *room.values())
    highest = 4 * next(step for step in (5, 10, 20, 25, 50, 100, 200, 250, 500, 1000) if 4 * step > most)
    shapes = []
    for share in range(5):
        y = bottom - (bottom - top) * share / 4
        shapes.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        shapes.append(text(left - 8, y + 4, short(highest * share / 4), "note", "end"))
    for kind, (name, values) in ((0, ("relay", memory)), (2, ("tables", room))):
        points = [
            (left + (right - left) * n / len(values), bottom - (bottom - top) * value / highest)
            for n, value in enumerate(values.values(), 1)
        ]
        shapes.append(f'<polyline class="line l{kind}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
        shapes.append(text(points[-1][0] + 8, points[-1][1] + 4, f"{name} {short(list(values.values())[-1])}"))
    for n, count in enumerate(memory, 1):
        if n % 2 == 0:
            shapes.append(text(left + (right - left) * n / len(memory), bottom + 20, count, "note", "middle"))
    return frame(
        "Growth: megabytes by messages forwarded", "memory of one relay; room of all tables", bottom + 40, shapes
    )


CHARTS = {"drain.svg": drain, "latency.svg": latency, "emit.svg": emit, "cpu.svg": cpu, "growth.svg": growth}


def drawn(rows: list[Measured]) -> dict[str, str]:
    """Every chart whose cases were all measured."""
    found = {}
    for name, draw in CHARTS.items():
        with suppress(NotMeasuredError):
            found[name] = draw(rows)
    return found
