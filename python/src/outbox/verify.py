"""Whether an installation is what was shipped: the lines of fingerprint.sql, compared with those of a fresh install.

What may differ is what the package itself does after installing: rights given by grant_*(), the archive's days. Their
lines are shipped as patterns: "when granted emit: ... @ROLE@", "each day: ... archive_@DAY@".
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

WHEN_GRANTED = re.compile(r"when granted (\w+): (.*)")
EACH_DAY = re.compile(r"each day: (.*)")
GRANTED = re.compile(r"privilege on column outbox\.access\.(\w+): REFERENCES to (.+), granted by owner")
DAY = re.compile(r"relation outbox\.archive_(\d{8}): .* partition of outbox\.archive FOR VALUES .*")
BOUNDS = re.compile(r"FOR VALUES FROM \('[^']*'\) TO \('[^']*'\)")
ONLY_EXTENSION = "dump mark "


class Difference(NamedTuple):
    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        if not self.expected:
            return f"not shipped: {self.what}{self.found}"
        if not self.found:
            return f"missing: {self.what}{self.expected}"
        return f"changed: {self.what}\n    shipped{self.expected}\n    found{self.found}"


def differences(found: Iterable[str], shipped: Iterable[str], *, extension: bool) -> list[Difference]:
    there = {masked(line) for line in found}
    wanted = due(there, list(shipped), extension=extension)
    more, less = _by_object(there - wanted), _by_object(wanted - there)
    pairs = []
    for what in sorted(more.keys() | less.keys()):
        here, not_here = more.get(what, []), less.get(what, [])
        # Rights and comments come several to an object: only a line for a line is a change.
        if len(here) == len(not_here) == 1:
            pairs.append(Difference(what, not_here[0], here[0]))
        else:
            pairs += [Difference(what, line, "") for line in not_here] + [Difference(what, "", line) for line in here]
    return pairs


def masked(line: str) -> str:
    return BOUNDS.sub("FOR VALUES of a day", line)


def due(there: set[str], shipped: list[str], *, extension: bool) -> set[str]:
    """The lines that this installation should have, given which parts it granted to whom and which days it keeps."""
    granted = {(match[1], match[2]) for line in there if (match := GRANTED.fullmatch(line)) and match[2] != "public"}
    days = {match[1] for line in there if (match := DAY.fullmatch(line))}
    wanted = set()
    for line in shipped:
        if pattern := WHEN_GRANTED.fullmatch(line):
            wanted |= {pattern[2].replace("@ROLE@", role) for part, role in granted if part == pattern[1]}
        elif pattern := EACH_DAY.fullmatch(line):
            wanted |= {pattern[1].replace("@DAY@", day) for day in days}
        elif extension or not line.startswith(ONLY_EXTENSION):
            wanted.add(line)
    return wanted


def _by_object(lines: Iterable[str]) -> dict[str, list[str]]:
    objects: dict[str, list[str]] = {}
    for line in sorted(lines):
        what, colon, rest = line.partition(": ")
        objects.setdefault(what, []).append(colon + rest)
    return objects
