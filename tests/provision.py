"""Makes sure that everything the clone needs is on this machine: Debian packages, and a Python environment in .venv.

    python3 tests/provision.py             both
    python3 tests/provision.py packages    only the Debian packages

Debian's own clusters and services are neither created nor started; the clone runs servers of its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "outbox-stamp"
DEBIAN_POSTGRES = {"12": 15, "13": 17}  # which PostgreSQL a Debian release brings

# Runs as root, and to its end: a half-done installation is worse than a late one. While packages are installed, a
# policy-rc.d forbids starting services and postgresql-common is told to create no cluster; what was there before is put
# back. Services that came with the new packages are not left to start at the next boot.
INSTALL = r"""
set -eu
policy=/usr/sbin/policy-rc.d
clusters=/etc/postgresql-common/createcluster.conf
kept=$(mktemp -d)

put_back() {
    rm -f "$policy"
    [ ! -e "$kept/policy" ] || mv "$kept/policy" "$policy"
    [ ! -e "$kept/clusters" ] || mv "$kept/clusters" "$clusters"
    rm -rf "$kept"
}
trap put_back EXIT
trap '' INT TERM HUP

export DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 LC_ALL=C.UTF-8
[ ! -e "$policy" ] || cp -a "$policy" "$kept/policy"
rm -f "$policy"
printf '#!/bin/sh\n# In place only while tests/provision.py installs packages.\nexit 101\n' > "$policy"
chmod 755 "$policy"

apt-get update || echo 'apt-get update failed; trying with the package lists at hand'
apt-get install -y --no-install-recommends --no-upgrade postgresql-common
cp -a "$clusters" "$kept/clusters"
echo 'create_main_cluster = false' >> "$clusters"
was_there=" $(dpkg-query -W -f '${Package} ') "
apt-get install -y --no-install-recommends "$@"

for package in rabbitmq-server pgbouncer prometheus erlang-base; do
    case "$was_there" in *" $package "*) continue ;; esac
    [ ! -e "/etc/init.d/$package" ] || update-rc.d "$package" disable
    for unit in $(dpkg-query -L "$package" | sed -n 's#.*/systemd/system/##p'); do
        rm -f "/etc/systemd/system/"*".wants/$unit"
    done
done
"""


class ProvisionError(Exception):
    """Something is missing that cannot be installed from here; the text says what to do."""


def say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)


def run_logged(what: str, command: Sequence[str | Path]) -> None:
    """One line for a person, and everything the command printed if it fails. An interruption waits for its end."""
    say(f"{what} ... ", end="")
    begun = time.monotonic()
    interrupted = False
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
        while child.returncode is None:
            try:
                child.wait()
            except KeyboardInterrupt:
                interrupted = True
                say("(will stop when this is done) ", end="")
        if child.returncode:
            say("failed")
            log.seek(0)
            output = log.read().decode(errors="replace")
            raise ProvisionError(f"{output}\n{what} failed ({child.returncode}); the lines above say why.")
    say(f"done ({time.monotonic() - begun:.0f} s)")
    if interrupted:
        raise KeyboardInterrupt


# --- packages


def missing_for(version: int) -> list[str]:
    share, lib = Path(f"/usr/share/postgresql/{version}/extension"), Path(f"/usr/lib/postgresql/{version}")
    needed = {
        f"postgresql-{version}": lib / "bin" / "postgres",
        f"postgresql-{version}-pgtap": share / "pgtap.control",
        f"postgresql-{version}-plpgsql-check": share / "plpgsql_check.control",
        f"postgresql-client-{version}": lib / "lib/pgxs/src/test/isolation/isolationtester",
    }
    return [package for package, path in needed.items() if not path.exists()]


def debian_postgres() -> int:
    try:
        release = re.search(r'^VERSION_ID="?(\d+)', Path("/etc/os-release").read_text(), re.MULTILINE)
    except OSError:
        release = None
    return DEBIAN_POSTGRES.get(release[1] if release else "", 15)


def missing_packages() -> list[str]:
    """Looks for the files themselves: they may have come another way than by these packages."""
    installed = [int(path.name) for path in Path("/usr/lib/postgresql").glob("*") if path.name.isdigit()]
    missing = [] if any(not missing_for(version) for version in installed) else missing_for(debian_postgres())
    if not Path("/usr/lib/rabbitmq/bin/rabbitmq-server").exists():
        missing.append("rabbitmq-server")
    programs = {
        "pg_prove": "libtap-parser-sourcehandler-pgtap-perl",
        "pgbouncer": "pgbouncer",
        "prometheus": "prometheus",  # evaluates the alert rules of docs/
        "systemd-analyze": "systemd",  # reads the unit of docs/
        "openssl": "openssl",
        "curl": "curl",
    }
    for program, package in programs.items():
        if shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin") is None:
            missing.append(package)
    if importlib.util.find_spec("ensurepip") is None:
        missing.append("python3-venv")
    return missing


def become_root() -> list[str] | None:
    """The words before a command that make it run as root; none when that needs a person."""
    if os.getuid() == 0:
        return []
    if (
        shutil.which("sudo")
        and subprocess.run(["sudo", "-n", "true"], check=False, capture_output=True).returncode == 0
    ):
        return ["sudo", "-n"]
    return None


def ensure_packages() -> None:
    missing = missing_packages()
    if not missing:
        return
    names = " ".join(missing)
    if shutil.which("apt-get") is None:
        raise ProvisionError(f"This machine has no apt-get. Install what Debian calls: {names}")
    root = become_root()
    if root is None:
        command = f"python3 {shlex.quote(str(Path(__file__).resolve()))} packages"
        command = f"sudo {command}" if shutil.which("sudo") else f"su -c {shlex.quote(command)}"
        raise ProvisionError(
            f"These Debian packages are missing: {names}\nInstalling them needs root. Type:\n\n  {command}\n"
        )
    run_logged(f"Installing Debian packages: {names}", [*root, "sh", "-c", INSTALL, "install", *missing])
    if left := missing_packages():
        raise ProvisionError(f"apt-get succeeded, yet something of these packages is still missing: {' '.join(left)}")


# --- the Python environment


def wanted_stamp() -> str:
    """Changes when the environment must be made anew, also when the clone moved: scripts in .venv name their place."""
    parts = [sys.version, str(ROOT)]
    parts += [(ROOT / "python" / name).read_text() for name in ("requirements.lock", "pyproject.toml")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def ensure_venv() -> None:
    if STAMP.exists() and STAMP.read_text() == wanted_stamp():
        return
    # Only the link: what it leads to is emptied otherwise, and may be another clone's.
    if VENV.is_symlink():
        VENV.unlink()
    pip = [f"{VENV}/bin/python", "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    run_logged("Making a Python environment in .venv", [sys.executable, "-m", "venv", "--clear", VENV])
    run_logged("Installing Python packages", [*pip, "--require-hashes", "-r", ROOT / "python" / "requirements.lock"])
    run_logged("Installing the outbox command", [*pip, "--no-deps", "--no-build-isolation", "-e", ROOT / "python"])
    STAMP.write_text(wanted_stamp())


def ensure() -> None:
    """Quick and silent when nothing is to do."""
    with Path(__file__).open() as lock:  # two makes in one clone take turns
        fcntl.flock(lock, fcntl.LOCK_EX)
        ensure_packages()
        ensure_venv()


def main(arguments: list[str]) -> int:
    try:
        if arguments == ["packages"]:
            ensure_packages()
        elif not arguments:
            ensure()
        else:
            say((__doc__ or "").strip())
            return 2
    except ProvisionError as error:
        say(f"provision: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
