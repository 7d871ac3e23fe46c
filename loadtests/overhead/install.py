"""Peers are installed on first use, each in a folder of its own under the user's cache, never into this project."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

Say = Callable[[str], None]

_LIMIT = 900.0  # s for one installation
_STAMP = ".made"
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"  # where servers live that are not on everybody's path


class NotInstalled(Exception):
    """A peer cannot be had here; the message is the word with which it is skipped."""


def cache_folder(env: Mapping[str, str]) -> Path:
    """Where peers are kept: XDG_CACHE_HOME, or ~/.cache."""
    return Path(env.get("XDG_CACHE_HOME") or Path(env.get("HOME", "/")) / ".cache") / "tiergate-bench"


class Installer:
    """Makes what is missing under `folder`; `say` is told what is going on."""

    def __init__(self, folder: Path, say: Say) -> None:
        self._folder = folder
        self._say = say

    async def python(self, requirement: str, program: str) -> Path:
        """`program` of a Python package, in a virtual environment of its own."""
        place = self._folder / program
        if not _made(place, requirement):
            self._say(f"installing {requirement} (first use)")
            _cleared(place)
            await _run(sys.executable, "-m", "venv", str(place))
            pip = (str(place / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", "--no-input")
            await _run(*pip, "--quiet", requirement)
            _stamped(place, requirement)
        return place / "bin" / program

    async def node(self, requirement: str, name: str) -> Path:
        """The folder that holds `node_modules` with an npm package."""
        npm = shutil.which("npm")
        if npm is None or shutil.which("node") is None:
            raise NotInstalled("node and npm are not here")
        place = self._folder / name
        if not _made(place, requirement):
            self._say(f"installing {requirement} (first use)")
            _cleared(place)
            await _run(npm, "install", "--prefix", str(place), "--no-audit", "--no-fund", requirement)
            _stamped(place, requirement)
        return place

    async def nginx(self) -> Path:
        """The nginx of the system, from Debian if it is missing and may be installed."""
        found = _system("nginx")
        if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
            self._say("installing nginx-light (first use)")
            quiet = ("-y", "-qq", "--no-install-recommends")
            await _run("apt-get", "update", "-qq")
            await _run("apt-get", "install", *quiet, "nginx-light", DEBIAN_FRONTEND="noninteractive")
            found = _system("nginx")
        if found is None:
            raise NotInstalled("nginx is not here (apt-get install nginx-light)")
        return found


def _system(program: str) -> Path | None:
    found = shutil.which(program, path=f"{os.environ.get('PATH', '')}:{_SBIN}")
    return Path(found) if found else None


def _made(place: Path, requirement: str) -> bool:
    stamp = place / _STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == requirement


def _cleared(place: Path) -> None:
    """What an installation left that was broken off, or was of another version, is in the way."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)


def _stamped(place: Path, requirement: str) -> None:
    (place / _STAMP).write_text(requirement, encoding="utf-8")


async def _run(*argv: str, **env: str) -> None:
    """Run to the end. Raises NotInstalled with the program's last line."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | env,
    )
    try:
        told, _ = await asyncio.wait_for(process.communicate(), _LIMIT)
    except TimeoutError:
        raise NotInstalled(f"{Path(argv[0]).name} took longer than {_LIMIT:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = told.decode(errors="replace").strip().splitlines()[-1:]
        raise NotInstalled(f"{Path(argv[0]).name} failed: {' '.join(last)}")
