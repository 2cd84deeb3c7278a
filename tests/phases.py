"""recipe.py as a process that writes down which phase it is in, and is killed in one of them.

    python tests/phases.py LOG [--kill PHASE:ENTRY:SECONDS] FLAGS OF RECIPE.PY ...

LOG gets a line "in PHASE MONOTONIC_SECONDS" or "out ..." as a phase is entered and left; phases inside phases do not
count. With --kill the process gets SIGKILL so many seconds after it entered a phase for the ENTRY-th time (from 0).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import recipe
import records
import runs
import tiny

PHASES = ("checkpoint", "record", "build", "update", "results", "evaluation", "play")


class Watch:
    """Wraps functions so that each call of them is a phase."""

    def __init__(self, log: Path, kill: str | None):
        self.log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.kill = kill
        self.depth, self.entries = 0, Counter[str]()

    def write(self, what: str, phase: str) -> None:
        os.write(self.log, f"{what} {phase} {time.monotonic()}\n".encode())

    def phase(self, where: Any, name: str, phase: str, when: Callable[..., bool] = lambda *_: True) -> None:
        usual = getattr(where, name)

        @functools.wraps(usual)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.depth or not when(*args):
                return usual(*args, **kwargs)
            self.depth += 1
            if self.kill and self.kill.startswith(f"{phase}:{self.entries[phase]}:"):
                kill_after(float(self.kill.rsplit(":", 1)[1]))
            self.write("in", phase)
            try:
                return usual(*args, **kwargs)
            finally:
                self.depth, self.entries[phase] = 0, self.entries[phase] + 1
                self.write("out", phase)

        setattr(where, name, watched)


def kill_after(seconds: float) -> None:
    """SIGKILL to this process from a child of its own: whatever runs here, the interpreter's lock too, is no matter."""
    parent, (ready, tell) = os.getpid(), os.pipe()
    if os.fork() == 0:
        os.write(tell, b".")
        end = time.monotonic() + seconds
        while time.monotonic() < end:  # some phases last a few milliseconds: too short to be waited for asleep
            time.sleep(max(0.0, end - time.monotonic() - 0.02))
        if os.getppid() == parent:
            os.kill(parent, signal.SIGKILL)
        os._exit(0)
    os.read(ready, 1)


def main() -> int:
    words = sys.argv[2:]
    kill = words[1] if words[0] == "--kill" else None
    watch = Watch(Path(sys.argv[1]), kill)
    watch.phase(tiny, "build", "build")
    watch.phase(recipe, "play_chats", "play")
    watch.phase(recipe.ChatTraining, "_backward", "update")
    watch.phase(recipe.ChatTraining, "_save_checkpoint", "checkpoint")
    watch.phase(runs, "evaluate", "evaluation")
    watch.phase(records, "write_record", "record")
    watch.phase(records, "write_whole", "results", lambda path, _: path.name == "results.json")
    small = dataclasses.replace(tiny.Settings(), steps=30)
    tiny.build_tiny = functools.partial(tiny.build_tiny, settings=small)
    for arm in recipe.ARMS.values():  # an advantage for every chat, so that each step of a babbling model is an update
        object.__setattr__(arm, "advantages", credited)
    return recipe.main(words[2:] if kill else words)


def credited(rewards_K: list[float], rewards_D: list[float]) -> list[float]:
    return [1.0 for _ in rewards_K]


if __name__ == "__main__":
    sys.exit(main())
