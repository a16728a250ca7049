"""Every guard of the functions has a mutant: by rule, by hand, or one listed as no different from the original.

The patterns here are looked for line by line and know nothing of the rules in mutate.py, so that neither can hide what
the other misses. Whether tests kill the mutants is what `make mutants` shows.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
from mutants import mutate

# What makes a line of a function a guard.
PATTERNS = {
    "refusal": r"\bperform outbox\._refuse",
    "token filter": r"\btoken = \w+\.token\b",
    "condition": r"^\s*(?:where|and|or|on(?! conflict| constraint)|if|elsif|when|(?:exit|continue) when)\b",
    "case": r"\bcase when\b",
    "range": r"\bbetween\b",
    "row lock": r"\bfor update\b",
    "other lock": r"\bpg_\w*advisory\w*\(",
    "order": r"\border by\b",
    "bound": r"^\s*limit\b|\b(?:least|greatest)\(",
    "proof": r":= .*(?:pg_current_xact_id|pg_sequence_last_value|pg_xact_status)|\b(?:safe_id|floor|reach) = ",
}
# Lines that look like one.
HARMLESS = {
    r"when '\w*' then false,?": "a field of emit_many() that needs no look",
    r"on (?:conflict|constraint) .*": "names a constraint",
    r"when (?:data_exception|lock_not_available|check_violation| or )+ then": "an exception, handled in the next line",
    r"where true|on true": "nothing is asked",
    r"when '\w+' +then '[^']*'": "a default",
}


def guards() -> list[tuple[mutate.Function, int, str]]:
    found = []
    for function in mutate.functions():
        body = function.code.index("as $function$")
        for number, line in enumerate(function.code.split("\n")):
            if number <= function.line(body):
                continue
            kinds = [kind for kind, pattern in PATTERNS.items() if re.search(pattern, line)]
            text = function.text.split("\n")[number].strip()
            if kinds and not any(re.fullmatch(pattern, text) for pattern in HARMLESS):
                found.append((function, number, kinds[0]))
    return found


def touched(mutant: mutate.Mutant) -> range:
    """The lines it changes; with a refusal goes the condition that leads to it."""
    if "outbox._refuse" not in mutant.was:
        return mutant.lines
    condition = re.compile(r"^ +if\b", re.MULTILINE).finditer(mutant.function.code, 0, mutant.start)
    first = max((mutant.function.line(match.start()) for match in condition), default=mutant.lines.start)
    return range(first, mutant.lines.stop)


def test_every_guard_has_a_mutant() -> None:
    changed = {(mutant.function.name, line) for mutant in mutate.mutants() for line in touched(mutant)}
    missing = [
        f"{function.station}: {function.name}: {kind}: {function.text.splitlines()[line].strip()}"
        for function, line, kind in guards()
        if (function.name, line) not in changed
    ]
    assert not missing, "no mutant changes these; add one to mutants.toml:\n" + "\n".join(missing)


def test_patterns_find_guards_of_every_kind() -> None:
    kinds = Counter(kind for _, _, kind in guards())
    assert set(kinds) == set(PATTERNS)


def test_names_are_unique() -> None:
    twice = [name for name, times in Counter(one.name for one in mutate.mutants()).items() if times > 1]
    assert not twice


@pytest.mark.parametrize("section", ["equivalent", "killers"])
def test_list_names_nothing_that_is_gone(section: str) -> None:
    names = [mutant.name for mutant in mutate.mutants()]
    keys = getattr(mutate.listed(), section)
    assert not [key for key in keys if not any(mutate.fits(key, name) for name in names)]


def test_killers_exist() -> None:
    tests = {path.stem for path in (mutate.ROOT / "pgtap").glob("*.sql")}
    tests |= {path.stem for path in (mutate.ROOT / "tests/isolation/specs").glob("*.spec")}
    found = mutate.listed()
    named = [*found.killers.values(), *found.specs.values()]
    assert not {test for one in named for test in one} - tests
    assert not set(found.specs) - {function.name for function in mutate.functions()}


def test_no_mutant_is_the_original() -> None:
    assert not [mutant.name for mutant in mutate.mutants() if mutant.sql == mutant.function.text]
