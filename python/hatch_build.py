"""Puts the SQL of the database package into the wheel, built from the same sources as the scripts of `make build`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

HERE = Path(__file__).resolve().parent
# In a clone the SQL lies beside this folder, in an sdist inside it.
ROOT = HERE if (HERE / "outbox.control").exists() else HERE.parent


class SqlHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # reads the clone itself, which changes
            return
        sys.path.insert(0, str(HERE / "src"))
        from outbox.install import from_clone  # noqa: PLC0415 - found only now

        self.folder = tempfile.TemporaryDirectory()
        for name, text in from_clone(ROOT).items():
            path = Path(self.folder.name, f"{name}.sql")
            path.write_text(text)
            build_data["force_include"][str(path)] = f"outbox/sql/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        del build_data, artifact_path
        if version != "editable":
            self.folder.cleanup()
