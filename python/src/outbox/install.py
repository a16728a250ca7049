"""The database package as SQL for a migration tool: no psql commands, no transaction control."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

from outbox.errors import ConfigurationError

# The migration goes on in the same transaction, with the settings it had.
_KEEP = """\
select set_config('outbox.kept_path', current_setting('search_path'), true),
    set_config('outbox.kept_messages', current_setting('client_min_messages'), true);
"""
_RESTORE = """
select set_config('search_path', current_setting('outbox.kept_path'), true),
    set_config('client_min_messages', current_setting('outbox.kept_messages'), true);
"""


def install_sql(version: str | None = None, *, upgrade_from: str | None = None) -> str:
    """SQL that installs the package, or upgrades it; one call of a driver without parameters runs it.

    A migration names its version, so that it means the same when a newer package is installed.
    """
    found = texts()
    target = version or found["version"]
    steps = [target] if upgrade_from is None else _steps(found, upgrade_from, target)
    if any(step not in found for step in steps) or not steps:
        known = ", ".join(sorted(name for name in found if name[0].isdigit()))
        raise ConfigurationError(f"this pg-outbox has no SQL that leads there; it has {known}")
    scripts = []
    for step in steps:
        source, _, reached = step.rpartition("--")
        head = found["plain_upgrade_head" if source else "plain_head"]
        head = re.sub(r"^(\\|begin ).*\n", "", head, flags=re.MULTILINE)
        scripts.append(head.replace("@FROM@", source).replace("@VERSION@", reached) + found[step])
    return "\n".join([_KEEP, *scripts, _RESTORE])


def uninstall_sql() -> str:
    """SQL that removes the package, either way; the setting outbox.uninstall_force tells it whether to refuse."""
    return re.sub(r"^(\s*\\.*|begin .*|commit;|.*\\gset.*)\n", "", texts()["uninstall"], flags=re.MULTILINE)


def upgrade_steps(source: str) -> dict[str, str]:
    """The upgrades that lead from one version to this one, in order, each with what it locks."""
    found = texts()
    return {
        step: ", ".join(re.findall(r"^-- locks: (.*)$", found[step], re.MULTILINE))
        for step in _steps(found, source, found["version"])
    }


def _steps(found: dict[str, str], source: str, target: str) -> list[str]:
    """The upgrades from one version to another, in order; none if they do not lead there."""
    steps = []
    while source != target:
        step = next((name for name in found if name.startswith(f"{source}--")), None)
        if step is None:
            return []
        steps.append(step)
        source = step.rpartition("--")[2]
    return steps


@cache
def texts() -> dict[str, str]:
    """From the wheel; or, installed in place, from the clone that a wheel is built from."""
    packaged = Path(__file__).with_name("sql")
    if packaged.is_dir():
        return {path.stem: path.read_text() for path in packaged.glob("*.sql")}
    return from_clone(Path(__file__).resolve().parents[3])


def from_clone(root: Path) -> dict[str, str]:
    """The version, the bodies by their names (X and A--X) and what else of sql/packaging a wheel carries."""
    spec = importlib.util.spec_from_file_location("outbox_build", root / "sql" / "packaging" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    tree = build.Tree(root)
    names = ("plain_head", "plain_upgrade_head", "uninstall", "fingerprint")
    carried = {name: tree.read(f"packaging/{name}.sql") for name in names}
    return {
        "version": tree.version,
        **tree.bodies(),
        **carried,
        "expected": tree.read("packaging/fingerprint.expected"),
    }
