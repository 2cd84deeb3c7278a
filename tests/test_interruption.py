"""Real processes, really killed: what is finished stays, what is not goes on, and the end is the same."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import small_flags, timeless
from phases import PHASES

import tiny

ROOT = Path(__file__).parent.parent
STEPS = 6


@pytest.fixture(scope="module")
def flags(stand_in: tiny.TinyPaths) -> list[str]:
    words = small_flags(stand_in, steps=STEPS, heldout_problems=20)
    return [*words, "--arm", "ada", "--seeds", "17", "--save-every", "1"]


def start(flags: list[str], out: Path, *more: str) -> subprocess.Popen[str]:
    words = [sys.executable, "recipe.py", *flags, "--out", str(out), *more]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def whole(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The records of a start that nothing interrupted."""
    out = tmp_path_factory.mktemp("whole")
    done = start(flags, out)
    assert done.wait() == 0, done.stdout.read()
    return {path.name: timeless(path) for path in (out / "runs").glob("*.xz")}


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if condition() or process.poll() is not None:
            return
        time.sleep(0.05)
    raise AssertionError("nothing happened in a minute")


def finish(flags: list[str], out: Path, whole: dict[str, dict[str, Any]]) -> str:
    """Go on with --reuse: exit code 0, the records of an uninterrupted start, and no stray file."""
    done = start(flags, out, "--reuse")
    shown, _ = done.communicate()
    assert done.returncode == 0, shown
    assert {path.name: timeless(path) for path in (out / "runs").glob("*.xz")} == whole
    assert sorted(p.name for p in out.iterdir()) == [".lock", "checkpoints", "results.json", "runs"]
    assert not list(out.glob("checkpoints/*")) and not list(out.rglob("*.tmp"))
    return shown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
    number: int, code: int, flags: list[str], whole: Any, tmp_path: Path
) -> None:
    process = start(flags, tmp_path, "--save-every", "0")  # whatever is saved is saved by the signal
    wait_for((tmp_path / "checkpoints" / "ada-s17").exists, process)
    wait_for((tmp_path / "runs" / "untrained.json.xz").exists, process)
    time.sleep(1.0)
    process.send_signal(number)
    shown, _ = process.communicate()
    if process.returncode != 0:  # else it was faster than the signal
        assert process.returncode == code, shown
        assert "go on with the same command and --reuse" in shown and "Traceback" not in shown
    again = finish(flags, tmp_path, whole)
    if list(tmp_path.glob("checkpoints/ada-s17/*")):
        assert "ada seed 17: going on after step" in again


KILLS = int(os.environ.get("TALK_CREDIT_KILLS", "4"))


def watched(out: Path, cache: Path, *more: str, kill: str | None = None) -> tuple[int, str, list[list[str]]]:
    """A small --tiny start as tests/phases.py runs it: its exit code, what it said, and its log."""
    log = out.with_suffix(".log")
    log.unlink(missing_ok=True)
    words = [sys.executable, str(ROOT / "tests" / "phases.py"), str(log), *(["--kill", kill] if kill else []),
             "--tiny", "--arm", "ada", "--arm", "raft", "--seeds", "17", "--steps", "3", "--problems", "2",
             "--train-problems", "32", "--heldout-problems", "12", "--warmup-steps", "1", "--save-every", "1",
             "--out", str(out), *more]  # fmt: skip
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr, [line.split() for line in log.read_text().splitlines()]


def spans(log: list[list[str]]) -> dict[str, list[float]]:
    """How long each entry of each phase took."""
    found: dict[str, list[float]] = {}
    for (_, phase, entered), (_, _, left) in zip(log[::2], log[1::2], strict=True):
        found.setdefault(phase, []).append(float(left) - float(entered))
    return found


@pytest.mark.parametrize("kills", [KILLS])
def test_killed_at_random_moments_of_every_phase_it_ends_with_the_same_records(kills: int, tmp_path: Path) -> None:
    """SIGKILL while the stand-in is built, a chat is played, weights are updated, a checkpoint, a record or the
    results are written, or an evaluation runs; then the same command with --reuse. TALK_CREDIT_KILLS=28 for more."""
    cache, built = tmp_path / "cache", tmp_path / "built"
    code, said, log = watched(tmp_path / "whole", cache)
    assert code == 0, said
    cache.rename(built)
    undisturbed, chance, hit = spans(log), random.Random(0), []
    assert set(undisturbed) == set(PHASES)
    whole = {path.name: timeless(path) for path in (tmp_path / "whole" / "runs").glob("*")}
    for trial in range(kills):
        out, phase = tmp_path / str(trial), PHASES[trial % len(PHASES)]
        shutil.rmtree(cache, ignore_errors=True)
        if phase != "build":
            shutil.copytree(built, cache)
        entry = chance.randrange(len(undisturbed[phase]))
        after = chance.uniform(0, undisturbed[phase][entry])
        code, said, log = watched(out, cache, kill=f"{phase}:{entry}:{after}")
        assert code == -signal.SIGKILL or trial % len(PHASES) > 3, said  # the shortest may be over before the signal
        hit.append(log[-1][1] if log[-1][0] == "in" else f"after {log[-1][1]}")
        finished = {path: path.read_bytes() for path in (out / "runs").glob("*.json.xz")}
        code, said, _ = watched(out, cache, "--reuse")
        assert code == 0, said
        assert {path.name: timeless(path) for path in (out / "runs").iterdir()} == whole
        assert all(path.read_bytes() == content for path, content in finished.items())  # none was made twice
        assert sorted(path.name for path in out.iterdir()) == [".lock", "checkpoints", "results.json", "runs"]
        assert not list(out.glob("checkpoints/*"))
        assert [path.name for path in (cache / "talk-credit").iterdir()] == ["tiny"]
    print(f"{kills} kills, all equal; hit: {dict(Counter(hit))}")


def test_what_is_planned_is_said_without_touching_anything(flags: list[str], whole: Any, tmp_path: Path) -> None:
    spy = "import sys; sys.modules['torch'] = None; import recipe; sys.exit(recipe.main(sys.argv[1:]))"
    words = [sys.executable, "-c", spy, *flags, "--out", str(tmp_path), "--plan"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:2]] == ["untrained", "ada"]
    assert "runs" in done.stdout and not list(tmp_path.iterdir())
