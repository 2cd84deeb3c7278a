"""`python recipe.py --bench` on the small stand-in: a real process, every row, and what is left of one that is
killed."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import small_flags

import runs
import tiny

ROOT = Path(__file__).parent.parent


def start(stand_in: tiny.TinyPaths, out: Path) -> subprocess.Popen[str]:
    flags = small_flags(stand_in, message_tokens=16, last_message_tokens=16, heldout_problems=12, steps=80)
    words = [sys.executable, str(ROOT / "recipe.py"), "--bench", *flags, "--out", str(out)]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def test_every_row_is_measured_and_the_estimates_follow_from_them(stand_in: tiny.TinyPaths, tmp_path: Path) -> None:
    check = {"command": "python tests/gpu_decode.py", "passed": 1}
    (tmp_path / "benchmark.json").write_text(json.dumps({"minutes": {}, "checks": [check]}))
    process = start(stand_in, tmp_path)
    said = process.communicate(timeout=600)[0]
    assert process.returncode == 0, said
    report: dict[str, Any] = json.loads((tmp_path / "benchmark.json").read_text())
    rows = {row["work"]: row for row in report["rows"]}
    expected = [
        "start to first step, model on disk", "the first grpo step, the model's own lengths",
        "evaluation of 24 chats, the model's own lengths", "copying memory", "a decode step, 8 chats",
        "a decode step, 32 chats", "a decode step, 24 chats", "a decode step, 8 chats, the published way",
        "update of 16 rows x 448 tokens", "update of 16 rows x 448 tokens, as PEFT and transformers compute it",
        "evaluation of 24 chats, at the caps", "one grpo step of 2 problems at the caps",
        "one ada step of 2 problems at the caps", "one mixed step of 2 problems at the caps",
        "an ada step over a grpo step", "a grpo or raft seed, estimated at the caps",
        "an ada seed, estimated at the caps", "a mixed seed, estimated at the caps",
        "the table, 3 seeds, estimated at the caps",
    ]  # fmt: skip
    assert list(rows) == expected and all(math.isfinite(row["value"]) for row in report["rows"])
    assert all(work in said for work in expected)
    # at the caps every message of every chat is as long as it may be: 2 x 16 + 2 x 16 tokens a chat
    assert rows["evaluation of 24 chats, at the caps"]["tokens"] == 24 * 64
    assert rows["one grpo step of 2 problems at the caps"]["sampled_tokens"] == 8 * 64
    assert rows["one ada step of 2 problems at the caps"]["sampled_tokens"] == 3 * 8 * 64  # all three rounds
    evaluation = rows["evaluation of 24 chats, at the caps"]["value"]
    seconds = rows["start to first step, model on disk"]["value"] + 2 * evaluation
    for arm in ("grpo", "ada", "mixed"):
        whole = seconds + 80 * rows[f"one {arm} step of 2 problems at the caps"]["value"]
        assert report["minutes"][arm] == pytest.approx(whole / 60, abs=0.02)
        assert runs.estimated_minutes(tmp_path)[arm] == report["minutes"][arm]
    assert report["minutes"]["raft"] == report["minutes"]["grpo"]
    assert report["checks"] == [check]  # of the report that was there
    assert report["about"]["device"].startswith("cpu") and "dollars" not in rows["a mixed seed, estimated at the caps"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["benchmark.json"]


def test_a_killed_benchmark_keeps_its_rows_and_the_report_before_it(stand_in: tiny.TinyPaths, tmp_path: Path) -> None:
    (tmp_path / "benchmark.json").write_text("the old one")
    process = start(stand_in, tmp_path)
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if re.match("evaluation of 24 chats, the model's own", line):
            process.send_signal(signal.SIGKILL)
            break
    process.wait(timeout=60)
    process.stdout.close()
    rows = json.loads((tmp_path / "benchmark.partial.json").read_text())["rows"]
    assert [row["work"] for row in rows][:3] == [
        "start to first step, model on disk", "the first grpo step, the model's own lengths",
        "evaluation of 24 chats, the model's own lengths"], seen  # fmt: skip
    assert (tmp_path / "benchmark.json").read_text() == "the old one"
