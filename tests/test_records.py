"""Files appear whole or not at all, and a damaged one is found and named."""

from __future__ import annotations

import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import records

CONTENT = {"arm": "grpo", "seed": 17, "scores": [0.25, 1.0], "text": "naïve — “quoted” \x07"}


def test_a_record_comes_back_as_it_was_and_its_bytes_hang_on_its_content(tmp_path: Path) -> None:
    one, two = tmp_path / "runs" / "a.json.xz", tmp_path / "b.json.xz"
    records.write_record(one, CONTENT)
    time.sleep(1.1)  # a time stamp in the file would differ by now
    records.write_record(two, dict(reversed(CONTENT.items())))
    assert one.read_bytes() == two.read_bytes()
    assert records.read_record(one) == {**CONTENT, "format": records.FORMAT}
    assert os.listdir(tmp_path / "runs") == ["a.json.xz"]


def test_every_cut_and_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.json.xz"
    records.write_record(path, CONTENT)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(records.RecordError, match=r"a\.json\.xz"):
            records.read_record(path)
    found = 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        try:
            assert records.read_record(path) == {**CONTENT, "format": records.FORMAT}  # a bit that does not count
        except records.RecordError:
            found += 1
    assert found > 0.9 * len(whole)


def test_an_edit_and_another_format_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.json.xz"
    records.write_record(path, CONTENT)
    body = json.loads(lzma.decompress(path.read_bytes()))
    path.write_bytes(lzma.compress(json.dumps({**body, "scores": [1.0, 1.0]}).encode()))
    with pytest.raises(records.RecordError, match="does not match its checksum"):
        records.read_record(path)
    path.write_bytes(lzma.compress(json.dumps({**body, "format": 99}).encode()))
    with pytest.raises(records.RecordError, match="format 99"):
        records.read_record(path)


def test_nan_never_reaches_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        records.write_record(tmp_path / "a.json.xz", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_a_writer_killed_at_any_moment_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "a.json.xz"
    records.write_record(path, {"n": -1})
    code = (
        "import records, sys, pathlib\n"
        "for n in range(10**9): records.write_record(pathlib.Path(sys.argv[1]), {'n': n, 'filler': 'x' * 200000})"
    )
    for trial in range(6):
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=Path(__file__).parent.parent)
        time.sleep(0.4 + 0.037 * trial)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert records.read_record(path)["n"] >= -1


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json.xz"
    records.write_record(path, CONTENT)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        records.write_record(path, {"n": 1})
    monkeypatch.undo()
    assert records.read_record(path)["arm"] == "grpo" and os.listdir(tmp_path) == ["a.json.xz"]


def test_setting_aside_never_overwrites(tmp_path: Path) -> None:
    for n in (1, 2):
        records.write_record(tmp_path / "a.json.xz", {"n": n})
        assert records.set_aside(tmp_path / "a.json.xz") == tmp_path / "old" / f"a.{n}.json.xz"
    assert [records.read_record(tmp_path / "old" / f"a.{n}.json.xz")["n"] for n in (1, 2)] == [1, 2]


def test_a_folder_is_held_by_one_process_and_freed_by_a_kill(tmp_path: Path) -> None:
    code = (
        "import records, sys, pathlib, time\n"
        "with records.only_one(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE
    )
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(records.RecordError, match=f"in use by process {holder.pid}"), records.only_one(tmp_path):
        pass
    holder.kill()
    holder.wait()
    with records.only_one(tmp_path):
        pass


def test_code_digest_sees_what_code_does_and_not_how_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "code.py"

    def digest(text: str, names: set[str] | None = None) -> str:
        path.write_text(text)
        return records.code_digest(path, names)

    plain = digest("def f(x):\n    return x + 1\n")
    assert digest('"""File."""\n\n# why\ndef f(x):\n    """What."""\n    # how\n    return x + 1\n') == plain
    assert digest("def f(x):\n    return x + 2\n") != plain
    both = "def f(x):\n    return x + 1\n\n\ndef g(x):\n    return {}\n"
    assert digest(both.format(1), {"f"}) == plain == digest(both.format(2), {"f"})
    assert digest(both.format(1)) != digest(both.format(2))
    with pytest.raises(ValueError, match="does not define"):
        digest(both.format(1), {"h"})


def test_versions_name_python_and_every_package() -> None:
    found = records.versions()
    assert set(found) == {"python", *records.PACKAGES} and "missing" not in found.values()


def test_what_a_killed_writer_left_is_cleared_away(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for stray in (tmp_path / "runs" / ".a.json.xz.123.tmp", tmp_path / ".probe.123"):
        stray.touch()
    with records.only_one(tmp_path):
        assert sorted(p.name for p in tmp_path.rglob("*")) == [".lock", "runs"]
