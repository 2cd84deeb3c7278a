"""Real processes, really killed: what is finished stays, what is not goes on, and the end is the same."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import timeless

import recipe
import tiny

ROOT = Path(__file__).parent.parent
STEPS = 6


@pytest.fixture(scope="module")
def flags(stand_in: tiny.TinyPaths) -> list[str]:
    small: dict[str, Any] = dict(tiny.TINY)
    small |= {"model": stand_in.model, "data": stand_in.data, "device": "cpu", "threads": 1, "steps": STEPS,
              "problems": 2, "train_problems": 32, "heldout_problems": 20, "warmup_steps": 1}  # fmt: skip
    words = [word for name, value in small.items() for word in (recipe.flag(name), str(value))]
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


def test_killed_at_random_moments_it_ends_with_the_same_records(flags: list[str], whole: Any, tmp_path: Path) -> None:
    """SIGKILL, over loading, playing, updating, saving, evaluating and writing; TALK_CREDIT_KILLS=20 for more."""
    chance = random.Random(0)
    for trial in range(int(os.environ.get("TALK_CREDIT_KILLS", "4"))):
        out = tmp_path / str(trial)
        for _ in range(2):
            process = start(flags, out, "--reuse")
            wait_for((out / "runs" / "untrained.json.xz").exists, process)
            time.sleep(chance.uniform(0, 4))
            process.kill()
            process.communicate()
        finish(flags, out, whole)


def test_a_run_that_fails_leaves_the_others_alone(flags: list[str], tmp_path: Path) -> None:
    """grpo's second step has a gradient that is not finite; raft after it is made all the same."""
    code = (
        "import sys, recipe\n"
        "usual = recipe.ChatTraining._micro_loss\n"
        "def poisoned(self, rows, count):\n"
        "    loss = usual(self, rows, count)\n"
        "    if self.arm_name == 'grpo' and self.state.global_step == 1:\n"
        "        next(p for p in self.model.parameters() if p.grad is not None).grad.fill_(float('nan'))\n"
        "    return loss\n"
        "recipe.ChatTraining._micro_loss = poisoned\n"
        "def credited(k, d): return [1.0 for _ in k]\n"  # an advantage for every row, so that there is a gradient
        "for name in ('grpo', 'raft'):\n"
        "    object.__setattr__(recipe.ARMS[name], 'advantages', credited)\n"
        "sys.exit(recipe.main(sys.argv[1:]))"
    )
    words = [*flags, "--arm", "grpo", "--arm", "raft", "--out", str(tmp_path)]
    words.remove("ada")
    words.remove("--arm")
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed: grpo, seed 17, step 1: loss" in done.stderr and "gradient norm nan" in done.stderr
    assert "--reuse" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert {path.name for path in (tmp_path / "runs").glob("*.xz")} == {"untrained.json.xz", "raft-s17.json.xz"}
    assert "grpo, seed 17, step 1" in (tmp_path / "results.json").read_text()


def test_what_is_planned_is_said_without_touching_anything(flags: list[str], whole: Any, tmp_path: Path) -> None:
    spy = "import sys; sys.modules['torch'] = None; import recipe; sys.exit(recipe.main(sys.argv[1:]))"
    words = [sys.executable, "-c", spy, *flags, "--out", str(tmp_path), "--plan"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:2]] == ["untrained", "ada"]
    assert "runs" in done.stdout and not list(tmp_path.iterdir())
