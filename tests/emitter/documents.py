"""The examples of the documentation: code blocks whose first line names a file."""

from __future__ import annotations

import re
from pathlib import Path

import databases

DOCS = databases.ROOT / "docs"
FENCE = re.compile(r"^```(?:python|sql)\n(?:#|--) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(page: str) -> dict[str, str]:
    found = FENCE.findall((DOCS / page).read_text())
    assert found, page
    return dict(found)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
