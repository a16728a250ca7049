"""Finds the guards of the functions in sql/functions and makes mutants: the same function with one guard disarmed.

Most are made by rule. A condition (after where, on, if, when, exit when ...) is split at its `and` and `or`, and each
part in turn is replaced by what makes it count for nothing: true beside `and`, false beside `or`, both where it stands
alone. Refusals do nothing, bounds of `between` move by one step, locks, orders and limits are left out.
What no rule can make, and what is right as it is, stands in mutants.toml.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")
# Of the code in a mutant's name.
LONGEST = 90
# Digits of a bound to which no integer can be added.
BIG = 19


@dataclass(frozen=True)
class Function:
    """A function as it stands in its file; code is the same text, with comments and string constants blanked out."""

    name: str
    station: str
    text: str
    code: str

    def line(self, at: int) -> int:
        return self.text.count("\n", 0, at)


@dataclass(frozen=True)
class Mutant:
    function: Function
    start: int
    end: int
    instead: str
    # What of the guard is gone, in words; by rule the words are the code.
    guard: str
    equivalent: str = ""
    killers: tuple[str, ...] = ()
    specs: tuple[str, ...] = ()
    number: int = 1
    # Changes in several places; lines between them are not changed.
    several: bool = False

    @property
    def was(self) -> str:
        return " ".join(self.function.text[self.start : self.end].split())

    @property
    def name(self) -> str:
        again = f" #{self.number}" if self.number > 1 else ""
        return f"{self.function.name}: {self.guard}{again}"

    @property
    def sql(self) -> str:
        return self.function.text[: self.start] + self.instead + self.function.text[self.end :]

    @property
    def lines(self) -> range:
        """The lines that it changes; none if that is hard to say."""
        if self.several:
            return range(0)
        return range(self.function.line(self.start), self.function.line(max(self.end - 1, self.start)) + 1)


def blank(match: re.Match[str]) -> str:
    """As long as before, with the quotes of a constant kept: it remains one word."""
    found = match.group()
    return " " * len(found) if found.startswith("--") else "'" + "x" * (len(found) - 2) + "'"


def functions() -> list[Function]:
    found = []
    for path in sorted((ROOT / "sql/functions").glob("*.sql")):
        for match in re.finditer(
            r"^create or replace function outbox\.(\w+)\(.*?^\$function\$;$",
            path.read_text(),
            re.MULTILINE | re.DOTALL,
        ):
            text = match.group()
            code = re.sub(r"--[^\n]*|'(?:[^']|'')*'", blank, text)
            found.append(Function(match.group(1), path.stem, text, code))
    return found


# --- rules

INTRODUCERS = re.compile(
    r"\b(?:where|(?<!distinct )on(?! conflict| constraint)|elsif|(?<!end )if|exit when|continue when|when"
    r"|(?:then|else)(?!\n)|return(?! query|s ))\b|:="
)
# What ends a condition at its own depth of parentheses.
TERMINATORS = re.compile(
    r"\b(?:then|group by|order by|limit|for update|returning|window|union|loop|as|into|else|when|where|on"
    r"|(?:left |cross )?join|end)\b|[;,)]"
)
JOINTS = re.compile(r"\b(?:between|and|or)\b")
CASES = re.compile(r"\b(?:case|end)\b")
# Which words take the place of a condition that stands alone; none after what is no condition by itself.
ALONE = {
    "where": ("true",),
    "on": ("true",),
    "if": ("true", "false"),
    "elsif": ("true", "false"),
    "when": ("true", "false"),
    "exit when": ("true", "false"),
    "continue when": ("true", "false"),
}
# No conditions, though they stand after `when`.
EXCEPTIONS = ("others", "data_exception", "lock_not_available", "check_violation")
Change = tuple[int, int, str, str]


def close(code: str, at: int) -> int:
    """Where the parenthesis closes that opens at `at`."""
    depth = 0
    for place in range(at, len(code)):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(code[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"unbalanced: {code[at : at + 60]}")


def top_level(code: str, start: int, end: int) -> Iterator[int]:
    """Places outside of parentheses and of case ... end; the end that closes no case is the last one."""
    place, cases = start, 0
    while place < end:
        if code[place] in "([":
            place = close(code, place) + 1
        elif word := CASES.match(code, place):
            cases += 1 if word.group() == "case" else -1
            if cases < 0:
                yield place
                return
            place = word.end()
        else:
            if not cases:
                yield place
            place += 1


def condition_end(code: str, start: int) -> int:
    place = start
    for place in top_level(code, start, len(code)):
        if TERMINATORS.match(code, place):
            return place
    return place


def trim(code: str, start: int, end: int) -> tuple[int, int]:
    text = code[start:end]
    return start + len(text) - len(text.lstrip()), end - len(text) + len(text.rstrip())


def operands(code: str, start: int, end: int) -> Iterator[tuple[int, int, str]]:
    """The parts of a condition, each with the word that makes it count for nothing; none if it stands alone."""
    cuts: list[re.Match[str]] = []
    ranges = 0
    for place in top_level(code, start, end):
        word = JOINTS.match(code, place, end)
        if not word:
            continue
        if word.group() == "between":
            ranges += 1
        elif word.group() == "and" and ranges:
            ranges -= 1
        else:
            cuts.append(word)
    kinds = ["", *(cut.group() for cut in cuts), ""]
    starts = [start, *(cut.end() for cut in cuts)]
    ends = [*(cut.start() for cut in cuts), end]
    for number, (first, last) in enumerate(zip(starts, ends, strict=True)):
        beside = kinds[number : number + 2]
        yield *trim(code, first, last), "true" if "and" in beside else "false" if "or" in beside else ""


def conditions(code: str, start: int, end: int, alone: tuple[str, ...]) -> Iterator[tuple[int, int, str]]:
    for first, last, neutral in operands(code, start, end):
        text = code[first:last]
        if text in ("", "true", "false", *EXCEPTIONS) or re.fullmatch(r"'x*'", text):
            continue
        for instead in (neutral,) if neutral else alone:
            yield first, last, instead
        if inner := re.match(r"(?:not )?\((?!\s*select\b)", text):
            opened = first + inner.end() - 1
            yield from conditions(code, opened + 1, close(code, opened), ())


def by_condition(function: Function) -> Iterator[Change]:
    code = function.code
    for word in INTRODUCERS.finditer(code, code.index("as $function$")):
        end = condition_end(code, word.end())
        # Where a condition only leads to a refusal, the refusal is the guard.
        refuses = re.match(r"then\s+perform outbox\._refuse", code[end:])
        for first, last, instead in conditions(code, word.end(), end, () if refuses else ALONE.get(word.group(), ())):
            yield first, last, instead, function.text[first:last]


def arguments(code: str, opened: int) -> list[tuple[int, int]]:
    closed = close(code, opened)
    commas = [place for place in top_level(code, opened + 1, closed) if code[place] == ","]
    starts, ends = [opened + 1, *(place + 1 for place in commas)], [*commas, closed]
    return [trim(code, start, end) for start, end in zip(starts, ends, strict=True)]


def by_call(function: Function) -> Iterator[Change]:
    """Refusals and other calls do nothing; least and greatest are one of their arguments, min is max."""
    code, text = function.code, function.text
    for match in re.finditer(r"perform ((?:\w+\.)?\w+)(?=\()", code):
        words = text[match.start() : close(code, match.end()) + 1]
        nothing = "now" if words.endswith("()") else "num_nulls"
        yield *match.span(1), nothing, words
    for match in re.finditer(r"\b(?:least|greatest)(?=\()", code):
        end = close(code, match.end()) + 1
        for first, last in arguments(code, match.end()):
            yield match.start(), end, text[first:last], text[match.start() : end]
    for match in re.finditer(r"\bmin(?=\()", code):
        yield *match.span(), "max", text[match.start() : close(code, match.end()) + 1]


def by_clause(function: Function) -> Iterator[Change]:
    """Bounds move by one, locks and limits are left out, orders are turned round."""
    code, text = function.code, function.text
    for match in re.finditer(r"\bbetween ((?:interval )?\S+) and ((?:interval )?[^ ,;()]+)(?=[ ,;)\n])", code):
        # With what is compared: the line up to here.
        words = text[text.rindex("\n", 0, match.start()) + 1 : match.end()].strip()
        for number, sign in ((1, "-"), (2, "+")):
            start, end = match.span(number)
            step = "interval '1 us'" if code.startswith("interval", start) else "1" if end - start < BIG else "1.0"
            yield start, end, f"{text[start:end]} {sign} {step}", words
    for match in re.finditer(r"\bfor update(?: of \w+)?( skip locked)?", code):
        yield *match.span(), "", match.group()
        if match.group(1):
            yield *match.span(1), "", match.group(1)
    for match in re.finditer(r"^ *(limit [^\n;]+)", code, re.MULTILINE):
        yield *match.span(1), "", text[slice(*match.span(1))]
    for match in re.finditer(r"\border by ", code):
        end = next(
            place
            for place in top_level(code, match.end(), len(code) + 1)
            if re.match(r"[\n;)]| rows\b| limit\b", code[place:])
        )
        for key in re.finditer(r"[^,]+", code[match.end() : end]):
            start, last = trim(code, match.end() + key.start(), match.end() + key.end())
            was = text[start:last]
            turned = was.removesuffix(" desc") if was.endswith(" desc") else f"{was} desc"
            yield start, last, turned, text[match.start() : end]


def shortened(code: str) -> str:
    words = " ".join(re.sub(r"--[^\n]*", "", code).split())
    return words if len(words) <= LONGEST else words[:LONGEST] + "..."


def by_rule() -> list[Mutant]:
    found: list[Mutant] = []
    for function in functions():
        changes = {change[:3]: change for rule in (by_condition, by_call, by_clause) for change in rule(function)}
        seen: Counter[str] = Counter()
        for start, end, instead, was in sorted(changes.values()):
            words = f"{shortened(was)} -> {shortened(instead) or 'nothing'}"
            seen[words] += 1
            found.append(Mutant(function, start, end, instead, words, number=seen[words]))
    return found


# --- what mutants.toml adds


@dataclass
class Listed:
    """The list: mutants that no rule makes, those that no test can tell from the original, and which test kills which.

    Its keys are names of mutants, where ... stands for anything.
    """

    mutants: list[dict[str, Any]]
    equivalent: dict[str, str]
    killers: dict[str, list[str]]
    specs: dict[str, list[str]]


def listed() -> Listed:
    found = tomllib.loads(LIST.read_text())
    return Listed(found["mutant"], found["equivalent"], found["killers"], found["specs"])


@functools.cache
def pattern(key: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, key.split("..."))))


def fits(key: str, name: str) -> bool:
    return pattern(key).fullmatch(name) is not None


def common(one: str, other: str) -> int:
    """How many characters are the same at the beginning."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def by_hand(entry: dict[str, Any], known: list[Function]) -> Mutant:
    function = next((one for one in known if one.name == entry["function"]), None)
    if function is None:
        raise ValueError(f"mutants.toml: there is no function {entry['function']}")
    pairs = [(entry["find"], entry["replace"])]
    if isinstance(entry["find"], list):
        pairs = list(zip(entry["find"], entry["replace"], strict=True))
    changed = function.text
    for find, instead in pairs:
        if (times := function.text.count(find)) != 1:
            raise ValueError(f"mutants.toml: {entry['function']}: found {times} times instead of once: {find}")
        changed = changed.replace(find, instead)
    # Only what differs is changed: the rest of the text is there to be found.
    old = function.text
    start = common(old, changed)
    after = common(old[start:][::-1], changed[start:][::-1])
    end = len(old) - after
    return Mutant(function, start, end, changed[start : len(changed) - after], entry["guard"], several=len(pairs) > 1)


@functools.cache
def mutants() -> list[Mutant]:
    """All of them, by rule and by hand, in the order of the functions."""
    extra = listed()
    known = functions()
    made = [*by_rule(), *(by_hand(entry, known) for entry in extra.mutants)]
    finished = []
    for mutant in sorted(made, key=lambda one: [one.function.station, known.index(one.function), one.start]):
        reasons = [reason for key, reason in extra.equivalent.items() if fits(key, mutant.name)]
        killers = [killer for key, named in extra.killers.items() if fits(key, mutant.name) for killer in named]
        finished.append(
            replace(
                mutant,
                equivalent="; ".join(reasons),
                killers=tuple(killers),
                specs=tuple(extra.specs.get(mutant.function.name, [])),
            )
        )
    return finished
