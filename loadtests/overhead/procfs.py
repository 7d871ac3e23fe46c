"""What the kernel knows of a program and all its processes: processor time and memory, read from /proc."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes; `rss` counts shared pages in full for each process, `pss` by the number of those that share them."""

    rss: int
    pss: int


def parent_and_session(stat: str) -> tuple[int, int]:
    """Parent and session of a process from its `stat` line, whose second field may itself hold blanks and brackets."""
    _state, parent, _group, session = stat.rpartition(")")[2].split()[:4]
    return int(parent), int(session)


def running_ns(schedstat: str) -> int:
    """Time on a processor, ns, from a thread's `schedstat` line."""
    return int(schedstat.split(maxsplit=1)[0])


def parsed_memory(rollup: str) -> Memory:
    """From the text of `smaps_rollup`; KeyError if it lacks a figure."""
    lines = (line.split() for line in rollup.splitlines() if line.endswith(" kB"))
    figures = {words[0]: int(words[1]) * 1024 for words in lines}
    return Memory(figures["Rss:"], figures["Pss:"])


def family(root: int, proc: Path = PROC) -> frozenset[int]:
    """Pids of the session that `root` leads, and of all descendants of those."""
    known: dict[int, tuple[int, int]] = {}
    for folder in proc.iterdir():
        if folder.name.isdigit() and (text := _text(folder / "stat")):
            known[int(folder.name)] = parent_and_session(text)
    found = {pid for pid, (_, session) in known.items() if root in (session, pid)}
    while more := {pid for pid, (parent, _) in known.items() if parent in found} - found:
        found |= more
    return frozenset(found)


def processor_time(pids: Iterable[int], proc: Path = PROC) -> dict[int, int]:
    """Time on a processor so far, ns, of each thread of `pids`."""
    return {
        int(task.name): running_ns(text)
        for pid in pids
        for task in _entries(proc / str(pid) / "task")
        if (text := _text(task / "schedstat"))
    }


def spent(before: Mapping[int, int], after: Mapping[int, int]) -> int:
    """Processor time between two looks, ns; what a thread used that ended in between is not known any more."""
    return sum(now - before.get(thread, 0) for thread, now in after.items())


def memory(pids: Iterable[int], proc: Path = PROC) -> Memory:
    """Memory of all `pids` together."""
    each = [parsed_memory(text) for pid in pids if (text := _text(proc / str(pid) / "smaps_rollup"))]
    return Memory(sum(one.rss for one in each), sum(one.pss for one in each))


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except (FileNotFoundError, ProcessLookupError):
        return


def _text(file: Path) -> str:
    """Its content, "" if its process is gone."""
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
