"""Whole kinds of faults, each brought about for real: full disks, damaged files, clocks, signals, bad numbers, short
memory, and texts that mean harm. What is finished stays, what failed is named, and going on ends the same."""

from __future__ import annotations

import contextlib
import json
import lzma
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import small_flags, timeless

import post
import recipe
import records
import runs
import tiny

ROOT = Path(__file__).parent.parent
STEPS = 3


def credited(rewards_K: Any, rewards_D: Any) -> list[float]:
    """An advantage for every chat, so that each step of a babbling model is an update."""
    return [1.0 for _ in rewards_K]


@pytest.fixture(scope="module", autouse=True)
def every_step_learns() -> Iterator[None]:
    usual = {name: recipe.ARMS[name].advantages for name in ("grpo", "raft")}
    for name in usual:
        object.__setattr__(recipe.ARMS[name], "advantages", credited)
    yield
    for name, rule in usual.items():
        object.__setattr__(recipe.ARMS[name], "advantages", rule)


@pytest.fixture(scope="module")
def flags(stand_in: tiny.TinyPaths) -> list[str]:
    return [*small_flags(stand_in, steps=STEPS, heldout_problems=6), "--seeds", "17", "--save-every", "1"]


BOTH = ("--arm", "raft", "--arm", "grpo")  # raft first: where it fails, grpo is what must go on


@pytest.fixture(scope="module")
def start(flags: list[str]) -> Callable[..., int]:
    return lambda out, *more: recipe.main([*flags, "--out", str(out), *more])


@pytest.fixture(scope="module")
def done(start: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a start that nothing disturbed: untrained, raft and grpo."""
    out = tmp_path_factory.mktemp("done")
    assert start(out, *BOTH) == 0
    return out


@pytest.fixture(scope="module")
def stopped(start: Callable[..., int], done: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which raft is trained and not evaluated: its checkpoints of steps 2 and 3 are there."""
    out = tmp_path_factory.mktemp("stopped")
    shutil.copytree(done / "runs", out / "runs", ignore=shutil.ignore_patterns("raft*", "grpo*"))

    def stop(*_: Any) -> None:
        raise RuntimeError("stopped before the evaluation")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "evaluate", stop)
        assert start(out, "--arm", "raft", "--reuse") == 1
    assert sorted(p.name for p in (out / "checkpoints" / "raft-s17").glob("c*")) == ["checkpoint-2", "checkpoint-3"]
    return out


def same(out: Path, done: Path, *names: str) -> bool:
    """Whether the records are those of the undisturbed start, and nothing half written lies about."""
    assert not list(out.rglob("*.tmp"))
    return all(timeless(out / "runs" / f"{name}.json.xz") == timeless(done / "runs" / f"{name}.json.xz")
               for name in names or ("untrained", "raft-s17", "grpo-s17"))  # fmt: skip


# ------------------------------------------------------------------------------------------- full disks


@pytest.fixture()
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own, where mounting is allowed; else a folder (see `full`)."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True)
    yield place
    if mounted.returncode == 0:
        subprocess.run(["umount", str(place)], check=True)


@contextlib.contextmanager
def full(disk: Path, room: int = 0) -> Iterator[None]:
    """A disk with `room` bytes left: writes beyond get the kernel's ENOSPC, or EFBIG where nothing can be mounted."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    filler = disk / "filler"
    if os.path.ismount(disk):
        space = os.statvfs(disk)
        filler.write_bytes(bytes(space.f_bavail * space.f_bsize - room))
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        filler.unlink(missing_ok=True)


NO_ROOM = re.compile(r"could not be written: (No space left on device|File too large)")


def test_a_disk_too_small_for_checkpoints_costs_no_run(
    start: Callable[..., int], done: Path, disk: Path, capsys: Any
) -> None:
    with full(disk, room=90_000):
        assert start(disk / "out", *BOTH) == 0
    said = capsys.readouterr().err
    assert len(re.findall(r"checkpoint-\d could not be written \(.*\): the run goes on without it", said)) == 2 * STEPS
    assert "Traceback" not in said and same(disk / "out", done)
    assert not list((disk / "out" / "checkpoints").glob("*"))


def test_a_full_disk_at_a_record_fails_that_run_alone_and_going_on_makes_it(
    start: Callable[..., int], done: Path, disk: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = records.write_record

    def without_room(path: Path, content: dict[str, Any]) -> None:
        with full(disk) if path.name == "raft-s17.json.xz" else contextlib.nullcontext():
            usual(path, content)

    monkeypatch.setattr(records, "write_record", without_room)
    out = disk / "out"
    assert start(out, *BOTH) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("failed: raft seed 17: ") and NO_ROOM.search(line)]
    assert lines[-1].startswith("go on with: ") and lines[-1].endswith("--reuse")
    assert same(out, done, "untrained", "grpo-s17") and not (out / "runs" / "raft-s17.json.xz").exists()
    assert NO_ROOM.search((out / "results.json").read_text())
    monkeypatch.undo()
    assert start(out, *BOTH, "--reuse") == 0
    assert f"raft seed 17: going on after step {STEPS}" in capsys.readouterr().out and same(out, done)


def test_a_full_disk_at_the_results_keeps_the_old_and_shows_the_table(
    start: Callable[..., int], done: Path, disk: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = disk / "out"
    shutil.copytree(done, out)
    old = (out / "results.json").read_bytes()
    with full(disk):
        assert start(out, *BOTH, "--reuse") == 1
    shown = capsys.readouterr()
    assert NO_ROOM.search(shown.out) and NO_ROOM.search(shown.err) and "Traceback" not in shown.err
    assert re.search(r"^raft +\d\.\d+", shown.out, re.MULTILINE) and "go on with: " in shown.err
    assert (out / "results.json").read_bytes() == old and not list(out.rglob("*.tmp"))
    assert start(out, *BOTH, "--reuse") == 0


def test_a_full_disk_under_the_log_and_the_output_takes_no_run_down(
    start: Callable[..., int], done: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/dev/full is a disk that is full: of failures.log while raft fails, and of standard output all along."""
    (tmp_path / "failures.log").symlink_to("/dev/full")
    usual = runs.train_run

    def failing(lab: runs.Lab, arm: str, seed: int) -> dict[str, Any]:
        if arm == "raft":
            raise RuntimeError("of its own")
        return usual(lab, arm, seed)

    monkeypatch.setattr(runs, "train_run", failing)
    with open("/dev/full", "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        assert start(tmp_path, *BOTH) == 1
        monkeypatch.undo()
    said = capsys.readouterr().err
    assert "failed: raft seed 17: RuntimeError: of its own\n" in said  # and no word of a log that has more
    assert said.count("standard output cannot be written (No space left on device)") == 1 and "Traceback" not in said
    assert same(tmp_path, done, "untrained", "grpo-s17") and (tmp_path / "results.json").exists()


def test_a_full_disk_at_the_stand_in_or_the_card_leaves_what_was_there(
    disk: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(disk / "cache"))
    post.write_card({"card.html": b"old", "charts/a.svg": b"old"}, disk / "card")
    with full(disk, room=8192):
        assert recipe.main(["--tiny", "--out", str(disk / "out")]) == 2
        with pytest.raises(OSError):
            post.write_card({"card.html": bytes(50_000)}, disk / "card")
    said = capsys.readouterr().err
    assert re.fullmatch(r"recipe\.py: \[Errno \d+\] (No space left on device|File too large)[^\n]*\n", said)
    assert [path.relative_to(disk).as_posix() for path in sorted(disk.rglob("*")) if path.is_file()] == [
        "card/card.html", "card/charts/a.svg"]  # fmt: skip
    assert (disk / "card" / "card.html").read_bytes() == b"old"
    assert not list((disk / "cache" / "talk-credit").iterdir())


def test_a_folder_that_cannot_be_written_is_named(start: Callable[..., int], disk: Path, capsys: Any) -> None:
    if os.path.ismount(disk):
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    else:
        disk.chmod(0o500)
    assert start(disk / "out", *BOTH) == 2
    assert re.search(r"--out .* cannot be written \((Read-only|Permission)", capsys.readouterr().err)


# ------------------------------------------------------------------------------------------- records


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def edit(path: Path) -> None:
    body = json.loads(lzma.decompress(path.read_bytes()))
    body["evaluations"][0]["chats"][0]["grades"][0]["correct"] ^= True
    path.write_bytes(lzma.compress(json.dumps(body).encode()))


def rewrite(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Another content under a checksum that holds."""

    def damage(path: Path) -> None:
        body = {name: value for name, value in records.read_record(path).items() if name != "format"}
        change(body)
        records.write_record(path, body)

    return damage


def folder_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (cut, "not a whole record"),
    "flipped": (flip, "not a whole record"),
    "edited": (edit, "does not match its checksum"),
    "no object": (lambda path: path.write_bytes(lzma.compress(b"[1]")), "not a whole record (ValueError: a list"),
    "nan": (lambda path: path.write_bytes(lzma.compress(b'{"a": NaN}')), "not a whole record (ValueError"),
    "deep": (lambda path: path.write_bytes(lzma.compress(b"[" * 100_000)), "not a whole record (RecursionError"),
    "empty": (lambda path: path.write_bytes(b""), "not a whole record"),
    "a folder": (folder_in_its_place, "not a whole record (IsADirectoryError"),
    "no key": (rewrite(lambda body: body.pop("key")), "its field 'key' is missing"),
    "another's": (rewrite(lambda body: body.update(seed=18)), "holds grpo, seed 18: not what its name says"),
    "no chats": (rewrite(lambda body: body.pop("evaluations")), "evaluations"),
}


def damaged(done: Path, out: Path, kind: str) -> str:
    """A finished folder whose record of grpo is damaged, in `out`; returns what is to be said of it."""
    shutil.copytree(done, out)
    damage, says = DAMAGE[kind]
    damage(out / "runs" / "grpo-s17.json.xz")
    return says


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_record_is_named_and_the_rest_goes_on(
    kind: str, start: Callable[..., int], done: Path, tmp_path: Path, capsys: Any
) -> None:
    """Of a run that is not asked for: it is left out, listed, and the exit code says so."""
    out = tmp_path / "out"
    says = damaged(done, out, kind)
    assert start(out, "--arm", "raft", "--reuse") == 1
    shown = capsys.readouterr()
    listed = [line for line in shown.err.splitlines() if line.startswith("failed: ")]
    assert len(listed) == 1 and "runs/grpo-s17.json.xz" in listed[0] and says in listed[0]
    assert "go on with: " in shown.err and "Traceback" not in shown.err
    results = json.loads((out / "results.json").read_text())
    assert set(results["arms"]) >= {"untrained", "raft"} and "grpo" not in results["arms"]
    assert results["header"]["failed"] and "reused: raft seed 17, untrained" in shown.out.replace("grpo seed 17, ", "")


@pytest.mark.parametrize("kind", ["edited", "no chats"])
def test_a_damaged_record_that_is_asked_for_is_kept_aside_and_made_again(
    kind: str, start: Callable[..., int], done: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "out"
    says = damaged(done, out, kind)
    before = (out / "runs" / "grpo-s17.json.xz").read_bytes()
    # the second kind is found only when the table is made: that start fails, the next one makes it
    codes = [start(out, *BOTH, "--reuse") for _ in range(1 if kind == "edited" else 2)]
    assert codes[-1] == 0 and all(codes[:-1]) and says in capsys.readouterr().out + says * (kind != "edited")
    assert (out / "runs" / "old" / "grpo-s17.1.json.xz").read_bytes() == before and same(out, done)


def test_a_benchmark_that_is_not_one_is_no_estimate(tmp_path: Path) -> None:
    for content in ("", "[]", "{}", '{"minutes": [1]}', '{"minutes": {"grpo": "x"}}', '{"minutes": {"grpo": null}}'):
        (tmp_path / "benchmark.json").write_text(content)
        assert runs.estimated_minutes(tmp_path) == {}
    (tmp_path / "benchmark.json").write_text('{"minutes": {"grpo": 2}}')
    assert runs.estimated_minutes(tmp_path) == {"grpo": 2.0}


# ------------------------------------------------------------------------------------------- checkpoints

FILES = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


def test_every_damage_to_a_checkpoint_is_found_and_named(stopped: Path, tmp_path: Path) -> None:
    folder = tmp_path / "raft-s17"
    shutil.copytree(stopped / "checkpoints" / "raft-s17", folder)
    latest = folder / "checkpoint-3"
    identity = records.read_record(latest / "so_far.json.xz")["identity"]
    assert runs.newest_checkpoint(folder, identity)[0] == latest
    assert {path.name for path in latest.iterdir()} >= {*FILES, "so_far.json.xz"}
    for path in sorted(latest.iterdir()):
        content = path.read_bytes()
        for damage in (cut, flip, Path.unlink):
            damage(path)
            said: list[str] = []
            assert runs.newest_checkpoint(folder, identity, said.append)[0].name == "checkpoint-2"
            assert len(said) == 1 and path.name in said[0] and "checkpoint-3" in said[0]
            path.write_bytes(content)
    (latest / "pytorch_model.bin").write_bytes(b"what nobody wrote")
    assert runs.newest_checkpoint(folder, identity)[0].name == "checkpoint-2"
    (folder / "checkpoint-of-mine").mkdir()
    shutil.rmtree(latest)
    assert runs.newest_checkpoint(folder, identity)[0].name == "checkpoint-2"
    assert runs.newest_checkpoint(folder, "another run", said.append) is None and "is of other settings" in said[-1]


@pytest.mark.parametrize(
    ("latest", "before", "goes_on"),
    [("optimizer.pt", None, 2), ("so_far.json.xz", None, 2), ("trainer_state.json", "rng_state.pth", 0)],
)
def test_a_damaged_checkpoint_costs_steps_and_changes_nothing(
    latest: str, before: str | None, goes_on: int, start: Callable[..., int], stopped: Path, done: Path,
    tmp_path: Path, capsys: Any,
) -> None:  # fmt: skip
    """The run goes on from the checkpoint before, or from the start, and ends with the same record."""
    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    (flip if before else cut)(out / "checkpoints" / "raft-s17" / "checkpoint-3" / latest)
    if before:
        flip(out / "checkpoints" / "raft-s17" / "checkpoint-2" / before)
    assert start(out, "--arm", "raft", "--reuse") == 0
    shown = capsys.readouterr().out
    assert re.search(rf"not used: .*checkpoint-3.*{re.escape(latest)}", shown)
    assert ("going on after step 2" in shown) is bool(goes_on) and same(out, done, "untrained", "raft-s17")
    assert not list((out / "checkpoints").glob("*"))


class Bomb:
    """A pickle that makes a file where it is loaded."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_a_pickle_in_a_checkpoint_is_not_run(
    name: str, start: Callable[..., int], stopped: Path, tmp_path: Path, capsys: Any
) -> None:
    """With a checksum that holds, so that nothing but the way of reading guards."""
    import torch

    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    shutil.rmtree(out / "checkpoints" / "raft-s17" / "checkpoint-3")  # nothing is left to do after it
    latest = out / "checkpoints" / "raft-s17" / "checkpoint-2"
    torch.save(Bomb(tmp_path / "trial"), latest / name)
    torch.load(latest / name, weights_only=False)
    assert (tmp_path / "trial").exists()  # it does go off
    torch.save(Bomb(tmp_path / "marker"), latest / name)
    so_far = {key: value for key, value in records.read_record(latest / "so_far.json.xz").items() if key != "format"}
    records.write_record(latest / "so_far.json.xz", {**so_far, "files": records.file_digests(latest)})
    assert start(out, "--arm", "raft", "--reuse") == 1
    said = capsys.readouterr().err
    assert "raft seed 17: " in said and "holds more than weights and is not read: delete the folder" in said
    assert not (tmp_path / "marker").exists() and "Traceback" not in said


# ------------------------------------------------------------------------------------------- clocks and signals


def test_a_clock_that_jumps_back_changes_nothing(
    start: Callable[..., int], done: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """time.time goes back an hour a call, and each checkpoint looks older than the one before; then the run is
    stopped before its evaluation and goes on, under the same clock."""
    now, jumps, saved = time.time(), iter(range(10**6)), iter(range(10**6))
    usual = recipe.ChatTraining._save_checkpoint

    def save(self: Any, model: Any, trial: Any) -> None:
        usual(self, model, trial)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        os.utime(folder, (now + 10**6 - 3600 * next(saved),) * 2)

    monkeypatch.setattr(recipe.ChatTraining, "_save_checkpoint", save)
    monkeypatch.setattr(time, "time", lambda: now - 3600 * next(jumps))
    with monkeypatch.context() as patch:
        patch.setattr(runs, "evaluate", lambda *_: 1 / 0)
        assert start(tmp_path, "--arm", "raft") == 1
    folder = tmp_path / "checkpoints" / "raft-s17"
    assert sorted(path.name for path in folder.glob("c*")) == ["checkpoint-2", "checkpoint-3"]
    shutil.rmtree(folder / "checkpoint-3")
    assert start(tmp_path, "--arm", "raft", "--reuse") == 0
    assert "raft seed 17: going on after step 2" in capsys.readouterr().out
    assert same(tmp_path, done, "untrained", "raft-s17")


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_signal_while_a_record_is_written_leaves_it_whole_or_not_there(
    moment: str, start: Callable[..., int], stopped: Path, done: Path, tmp_path: Path, capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """SIGTERM when its bytes are in the temporary file, or when it has just got its name."""
    out = tmp_path / "out"
    shutil.copytree(stopped, out)
    record = out / "runs" / "raft-s17.json.xz"
    usual = {"fsync": os.fsync, "replace": os.replace}

    def replace(source: Any, target: Any) -> None:
        usual["replace"](source, target)
        if target == record:
            os.kill(os.getpid(), signal.SIGTERM)

    def fsync(number: int) -> None:
        if record.name in os.readlink(f"/proc/self/fd/{number}"):
            os.kill(os.getpid(), signal.SIGTERM)
        usual["fsync"](number)

    monkeypatch.setattr(os, moment, {"fsync": fsync, "replace": replace}[moment])
    assert start(out, "--arm", "raft", "--reuse") == 143
    assert "go on with the same command and --reuse" in capsys.readouterr().err
    monkeypatch.undo()
    assert record.exists() is (moment == "replace") and not list(out.rglob("*.tmp"))
    assert start(out, "--arm", "raft", "--reuse") == 0
    assert same(out, done, "untrained", "raft-s17") and not list((out / "checkpoints").glob("*"))


def test_signals_at_random_moments_of_large_writes(tmp_path: Path) -> None:
    """A file of 20 MB, written again and again by a process that SIGTERM meets somewhere in it."""
    code = (
        "import pathlib, sys, records, runs\n"
        "try:\n"
        "    with runs.Signals():\n"
        "        for n in range(10**6):\n"
        "            records.write_whole(pathlib.Path(sys.argv[1]), (b'%09d\\n' % n) * 2_000_000)\n"
        "            if n == 0: print('ready', flush=True)\n"
        "except runs.Interrupted as stop: sys.exit(stop.exit_code)"
    )
    path = tmp_path / "large"
    for trial in range(6):
        writer = subprocess.Popen([sys.executable, "-c", code, str(path)], cwd=ROOT, stdout=subprocess.PIPE)
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(0.037 * trial)
        writer.terminate()
        assert writer.wait(timeout=30) == 143
        content = path.read_bytes()
        assert content == content[:10] * 2_000_000
        assert [p.name for p in tmp_path.iterdir()] == ["large"]


def test_a_second_ctrl_c_stops_at_once(
    start: Callable[..., int], done: Path, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice in the middle of step 2: the step is not finished, and the run goes on from the checkpoint of step 1."""
    usual = recipe.ChatTraining._backward

    def twice(self: Any, batch: Any) -> float:
        if self.state.global_step == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("went on")
        return usual(self, batch)

    monkeypatch.setattr(recipe.ChatTraining, "_backward", twice)
    assert start(tmp_path, "--arm", "raft") == 130
    said = capfd.readouterr().err
    assert "once more to stop at once" in said and "interrupted by SIGINT: what is finished is safe" in said
    monkeypatch.undo()
    assert start(tmp_path, "--arm", "raft", "--reuse") == 0
    assert "going on after step 1" in capfd.readouterr().out and same(tmp_path, done, "untrained", "raft-s17")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("where", ["load_data", "write_results"])
def test_a_signal_before_or_after_the_runs_is_a_line(
    number: int, code: int, where: str, start: Callable[..., int], done: Path, tmp_path: Path, capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shutil.copytree(done / "runs", tmp_path / "runs")
    before = signal.getsignal(number)
    monkeypatch.setattr(runs, where, lambda *_: os.kill(os.getpid(), number))
    assert start(tmp_path, "--reuse") == code
    assert f"interrupted by {signal.Signals(number).name}: what is finished is safe" in capsys.readouterr().err
    assert signal.getsignal(number) == before


# ------------------------------------------------------------------------------------------- bad numbers, memory


def test_a_gradient_that_is_no_number_keeps_the_weights_before_it(
    start: Callable[..., int], done: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In raft's third step. grpo is made all the same, and raft goes on from its second step to the same record."""
    usual = recipe.ChatTraining._micro_loss

    def poisoned(self: Any, rows: Any, count: int) -> float:
        loss = usual(self, rows, count)
        if self.arm_name == "raft" and self.state.global_step == 2:
            [p for p in self.model.parameters() if p.grad is not None][-1].grad[0, 0] = float("nan")
        return loss

    monkeypatch.setattr(recipe.ChatTraining, "_micro_loss", poisoned)
    assert start(tmp_path, *BOTH) == 1
    said = capsys.readouterr().err
    assert re.search(r"failed: raft, seed 17, step 2: loss .* gradient norm nan \(1 of \d+ gradients not finite", said)
    assert same(tmp_path, done, "untrained", "grpo-s17") and not (tmp_path / "failures.log").exists()
    monkeypatch.undo()
    assert start(tmp_path, *BOTH, "--reuse") == 0
    assert "raft seed 17: going on after step 2" in capsys.readouterr().out and same(tmp_path, done)


def test_a_grader_that_raises_names_the_problem_and_fails_one_run(
    start: Callable[..., int], done: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, calls = recipe.grade, iter(range(10**6))
    first = 3 * 6 * 2 * 2 + 5  # the untrained pair's answers come before raft's

    def raising(text: str, gold: str) -> Any:
        if next(calls) == first:
            raise ArithmeticError("a bad day\x1b[2J\n2025-01-01 00:00:00 untrained: fine")
        return usual(text, gold)

    monkeypatch.setattr(recipe, "grade", raising)
    assert start(tmp_path, *BOTH) == 1
    said = capsys.readouterr().err
    line = r"^failed: raft seed 17: ValueError: a chat on problem train-\d+ could not be graded \(ArithmeticError"
    assert re.search(line, said, re.MULTILINE)
    assert "\x1b" not in said and same(tmp_path, done, "untrained", "grpo-s17")
    log = (tmp_path / "failures.log").read_text()
    entries = [line for line in log.splitlines() if line and not line.startswith("    ")]
    assert len(entries) == 1 and "raft seed 17" in entries[0] and "\x1b" not in log and "ArithmeticError" in log


def test_a_model_that_is_gone_half_way_costs_no_run_made_before(
    start: Callable[..., int], done: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong for every run alike stops the start with exit code 2; not so once a run is made."""
    usual = runs.train_run

    def gone(lab: runs.Lab, arm: str, seed: int) -> dict[str, Any]:
        if arm == "grpo":
            raise recipe.UserError("--model is gone")
        return usual(lab, arm, seed)

    monkeypatch.setattr(runs, "train_run", gone)
    assert start(tmp_path, *BOTH) == 1
    assert "failed: grpo seed 17: --model is gone\ngo on with: " in capsys.readouterr().err
    assert same(tmp_path, done, "untrained", "raft-s17") and (tmp_path / "results.json").exists()


def out_of_memory(*_: Any, **__: Any) -> Any:
    import torch

    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore words")


def test_out_of_memory_twice_in_an_update_halves_the_budget_and_changes_nothing(
    start: Callable[..., int], done: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With budgets that still hold the whole batch, so the result is the same bit for bit."""
    usual, calls = recipe.ChatTraining._micro_loss, iter(range(10**6))

    def short(self: Any, rows: Any, count: int) -> float:
        loss = usual(self, rows, count)  # the gradient of the part that did fit must not count twice
        return out_of_memory() if next(calls) < 2 else loss

    monkeypatch.setattr(recipe.ChatTraining, "_micro_loss", short)
    assert start(tmp_path, "--arm", "raft") == 0
    said = re.findall(r"out of memory: going on with --token-budget (\d+)", capsys.readouterr().err)
    assert said == ["3840", "1920"] and same(tmp_path, done, "untrained", "raft-s17")


def test_smaller_micro_batches_give_the_same_gradient(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for two rows at a time: the weights after two steps are those of whole batches, within rounding."""
    import torch
    from conftest import adapter_weights

    whole = make_trainer("raft")
    whole.train()
    usual = recipe.ChatTraining._micro_loss

    def short(self: Any, rows: Any, count: int) -> float:
        return usual(self, rows, count) if len(rows) <= 2 else out_of_memory()

    monkeypatch.setattr(recipe.ChatTraining, "_micro_loss", short)
    import runs as fresh

    parts = make_trainer("raft", model=fresh.load_model(whole.config, "cpu", False)[0])
    parts.train()
    assert parts.token_budget < whole.token_budget / 8
    before, after = adapter_weights(whole.model), adapter_weights(parts.model)
    for name, weights in before.items():
        torch.testing.assert_close(after[name], weights, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("update", "out of memory on a single row of \\d+ tokens: use --checkpointing, a smaller --model, or lower"),
        ("play", "out of memory while playing: .*lower --problems, --message-tokens or --last-message-tokens"),
        ("evaluation", "out of memory in an evaluation: .*lower --eval-chats or --heldout-problems"),
        ("load", "out of memory: see that nothing else is on the card, or use a smaller --model"),
    ],
)
def test_out_of_memory_fails_one_run_and_says_what_to_lower(
    where: str, says: str, start: Callable[..., int], done: Path, tmp_path: Path, capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    shutil.copytree(done / "runs", tmp_path / "runs", ignore=shutil.ignore_patterns("raft*"))
    if where == "update":
        monkeypatch.setattr(recipe.ChatTraining, "_micro_loss", out_of_memory)
    elif where == "load":
        monkeypatch.setattr(runs, "load_model", out_of_memory)
    else:
        usual, kind = recipe.uniforms, {"play": 0, "evaluation": 2}[where]  # what a chat's seed says of its use

        def uniforms(plans: Any, turn: int, count: int) -> Any:
            return out_of_memory() if plans[0].seed[1] == kind and turn == 1 else usual(plans, turn, count)

        monkeypatch.setattr(recipe, "uniforms", uniforms)
    assert start(tmp_path, *BOTH, "--reuse") == 1
    said = capsys.readouterr().err
    assert re.search(rf"^failed: raft seed 17: {says}", said, re.MULTILINE), said
    assert "Traceback" not in said and same(tmp_path, done, "untrained", "grpo-s17")
    assert json.loads((tmp_path / "results.json").read_text())["header"]["failed"]
