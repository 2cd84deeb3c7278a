"""Two real processes under torchrun, on the CPU, against one: the same problems, chats and evaluations, the same
weights within rounding, and no process that waits for ever."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_runs
import pytest
import torch
from conftest import small_flags, timeless
from one_of_several import ALL_IDLE, HALF_IDLE, by_words, changes

import ranks
import recipe
import report
import runs
import tiny

ROOT = Path(__file__).parent.parent
STEPS, PROBLEMS, HELDOUT = 4, 4, 9  # held-out problems that cannot be halved


@pytest.fixture(scope="module")
def flags(stand_in: tiny.TinyPaths) -> list[str]:
    words = small_flags(stand_in, steps=STEPS, problems=PROBLEMS, heldout_problems=HELDOUT, base_evals=1)
    return [*words, "--seeds", "17"]


def start(out: Path, words: list[str], trouble: str = "") -> tuple[int, str]:
    """Two processes of one_of_several.py under torchrun: the exit code and what they printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "WEIGHTS": str(out), "OMP_NUM_THREADS": "1"}
    if trouble:
        environment["TROUBLE"] = trouble
    command = [*launcher, "tests/one_of_several.py", *words, "--out", str(out)]
    where: dict[str, Any] = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    torchrun = subprocess.Popen(command, text=True, **where)
    try:
        shown, _ = torchrun.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        torchrun.terminate()  # it takes its processes along, by force after 30 seconds
        raise AssertionError(f"the processes hung: {torchrun.communicate()[0]}") from None
    return torchrun.returncode, shown


@pytest.fixture(scope="module")
def one(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process leaves behind: this one."""
    out = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEIGHTS", str(out))
        for change in changes():
            patch.setattr(*change)
        assert recipe.main([*flags, "--arm", "ada", "--arm", "mixed", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def two(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Before the others a run fails: the gradient of one process is not finite."""
    out = tmp_path_factory.mktemp("two")
    words = [*flags, "--arm", "grpo", "--arm", "ada", "--arm", "mixed"]
    code, shown = start(out, words, trouble="nan:grpo:1")
    assert code == 1, shown
    return out, shown


def record(out: Path, name: str) -> dict[str, Any]:
    return timeless(out / "runs" / f"{name}.json.xz")


def test_the_untrained_pairs_evaluation_is_that_of_one_process(one: Path, two: tuple[Path, str]) -> None:
    mine, theirs = record(one, "untrained"), record(two[0], "untrained")
    assert mine == theirs and len(mine["evaluations"][0]["chats"]) == 2 * HELDOUT


@pytest.mark.parametrize("arm", ["ada", "mixed"])
def test_the_same_problems_and_chats_are_drawn(arm: str, one: Path, two: tuple[Path, str]) -> None:
    """In the first step exactly: the weights are still the same. Later a rounding could in principle tip a token,
    so what follows is few steps long."""
    mine, theirs = record(one, f"{arm}-s17"), record(two[0], f"{arm}-s17")
    assert [d["problem"] for d in mine["drawn"]] == [d["problem"] for d in theirs["drawn"]]
    assert mine["drawn"][:PROBLEMS] == theirs["drawn"][:PROBLEMS]
    assert [d["step"] for d in theirs["drawn"]] == [step for step in range(STEPS) for _ in range(PROBLEMS)]
    texts = [[(c["problem"], [t["text"] for t in c["turns"]]) for c in r["last_batch"]] for r in (mine, theirs)]
    assert texts[0] == texts[1] and len(texts[0]) == 4 * PROBLEMS
    first = [{k: v for k, v in r["steps"][0].items() if k not in ("loss", "grad_norm")} for r in (mine, theirs)]
    assert first[0] == pytest.approx(first[1], rel=1e-12)


@pytest.mark.parametrize("arm", ["ada", "mixed"])
def test_metrics_and_weights_are_equal_within_rounding(arm: str, one: Path, two: tuple[Path, str]) -> None:
    mine, theirs = record(one, f"{arm}-s17"), record(two[0], f"{arm}-s17")
    for step, other in zip(mine["steps"], theirs["steps"], strict=True):
        assert other == pytest.approx(step, rel=1e-4, abs=1e-6)
    scores = [
        [[g["correct"] for c in e["chats"] for g in c["grades"]] for e in r["evaluations"]] for r in (mine, theirs)
    ]
    assert scores[0] == scores[1]
    alone = torch.load(one / f"{arm}-0.pt")
    first, second = (torch.load(two[0] / f"{arm}-{rank}.pt") for rank in (0, 1))
    assert any(float(p.abs().max()) > 1e-3 for name, p in alone.items() if "lora_B" in name)  # they moved
    for name, p in alone.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], p, atol=2e-5, rtol=0)


def test_a_process_without_a_live_row_adds_nothing_and_none_with_one_leaves_the_weights(
    one: Path, two: tuple[Path, str]
) -> None:
    for out in (one, two[0]):
        steps = record(out, "mixed-s17")["steps"]
        assert [step["unchanged"] for step in steps] == [step == ALL_IDLE for step in range(STEPS)]
        assert steps[HALF_IDLE]["grad_norm"] > 1e-4 and steps[ALL_IDLE]["grad_norm"] == 0


def test_a_gradient_that_is_not_finite_fails_the_run_on_all_and_the_next_go_on(two: tuple[Path, str]) -> None:
    out, shown = two
    assert shown.count("FAILED grpo, seed 17, step 1: loss") == 1 and "gradient norm nan" in shown
    assert sorted(p.name.split(".")[0] for p in (out / "runs").glob("*.xz")) == ["ada-s17", "mixed-s17", "untrained"]
    assert f"written: {out / 'results.json'}" in shown
    about = runs.records.read_record(out / "runs" / "ada-s17.json.xz")["about"]
    assert about["processes"] == 2 and about["device"] == "cpu, 1 threads, 2 processes"


def test_interrupted_and_taken_up_it_ends_as_if_it_never_was(
    flags: list[str], two: tuple[Path, str], tmp_path: Path
) -> None:
    """One process catches SIGTERM, and both stop after that step. After the run that goes on, another breaks in one
    process: nobody waits for it, and what is finished stays."""
    words = [*flags, "--arm", "ada"]
    code, shown = start(tmp_path, [*words, "--save-every", "0"], trouble="term:ada:1")
    assert code == 1 and shown.count("go on with the same command and --reuse") == 1, shown
    assert shown.count("exitcode  : 143") >= 1  # torchrun's own table; it ends with 1 itself
    saved = list((tmp_path / "checkpoints" / "ada-s17").glob("checkpoint-*"))
    assert [p.name for p in saved] == ["checkpoint-2"]
    assert {"rng_state_0.pth", "rng_state_1.pth", "so_far.json.xz"} <= {p.name for p in saved[0].iterdir()}

    words += ["--arm", "mixed", "--reuse"]
    code, shown = start(tmp_path, words, trouble="alone:mixed:0")
    assert "ada seed 17: going on after step 2" in shown and "ada seed 17: trained pair" in shown, shown
    assert record(tmp_path, "ada-s17") == record(two[0], "ada-s17")
    for name, p in torch.load(two[0] / "ada-0.pt").items():
        assert all(torch.equal(p, torch.load(tmp_path / f"ada-{rank}.pt")[name]) for rank in (0, 1))
    assert code == 1 and "process 1 of 2: mixed seed 17: RuntimeError: this process alone is in trouble" in shown
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["ada-s17.json.xz", "untrained.json.xz"]
    assert "this process alone is in trouble" in (tmp_path / "failures.log").read_text()
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_takes_one_process_says_so_and_no_process_hangs(flags: list[str], tmp_path: Path) -> None:
    code, shown = start(tmp_path, [*flags, "--plan"])
    assert code == 1 and "recipe.py: --plan takes one process" in shown
    assert "process 1 of 2: another process of this start is gone" in shown


def test_a_launcher_that_silently_starts_one_process_is_refused() -> None:
    words = ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "2", "recipe.py"]
    done = subprocess.run([sys.executable, *words, "--plan"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "asked for several processes and started one" in done.stderr
    assert "untrained" not in done.stdout


FOUND = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "generator needs them whole"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "WORLD_SIZE": "2", **FOUND}, "generator needs them whole"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "started by MPI"),
        ({"WORLD_SIZE": "2"}, "LOCAL_RANK and MASTER_ADDR and MASTER_PORT and RANK not set"),
        ({"ACCELERATE_DYNAMO_BACKEND": "NO", "MASTER_PORT": "29500"}, "asked for several processes and started one"),
    ],
)
def test_launches_that_cannot_work_are_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ranks.LaunchError, match=words):
        ranks.check_launch(environment)


@pytest.mark.parametrize(
    "environment",
    [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "2", **FOUND}, {"ACCELERATE_DYNAMO_BACKEND": "NO"},
     {"ACCELERATE_USE_FSDP": "false", "WORLD_SIZE": "2", **FOUND}, {"MASTER_PORT": "29500"}],
)  # fmt: skip
def test_launches_that_work_are_not(environment: dict[str, str]) -> None:
    ranks.check_launch(environment)


def test_problems_that_cannot_be_dealt_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(recipe.UserError, match=r"--problems 8 .* to 3 processes: start 1, 2, 4, 8 of them"):
        runs.check_shares(recipe.Config())
    runs.check_shares(recipe.Config(problems=6))


def test_shares_are_contiguous_and_make_up_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, several in ((9, 2), (8, 4), (3, 4)):
        monkeypatch.setenv("WORLD_SIZE", str(several))
        parts = []
        for rank in range(several):
            monkeypatch.setenv("RANK", str(rank))
            parts.append(ranks.share(range(count)))
        assert [i for part in parts for i in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_parts_of_a_step_join_to_the_whole_step(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "grade_chat", by_words)
    trainer = make_trainer("ada")
    rows, group = list(trainer.train_dataset)[: 4 * 4], 4
    whole = trainer._prepare_inputs(rows)
    parts = [trainer._prepare_inputs(rows[: 3 * group]), trainer._prepare_inputs(rows[3 * group :])]
    joined = recipe.whole_step(parts)
    assert joined.kept == whole.kept and joined.drawn == whole.drawn
    assert len({len(d.rewards) for d in whole.drawn}) > 1  # so that chats weigh, not problems
    for name in ("trained_tokens", "sampled_tokens", "thrown_away"):
        assert getattr(joined, name) == getattr(whole, name)
    talk = dataclasses.asdict(whole.talk)
    assert all(math.isfinite(value) for value in talk.values())
    assert dataclasses.asdict(joined.talk) == pytest.approx(talk, rel=1e-12)
    assert joined.play_seconds == max(part.play_seconds for part in parts)


def test_one_process_takes_one_card_however_many_it_sees() -> None:
    """Trainer multiplies its batch by the cards in view, and a step would be that many steps' problems."""

    class Stock:
        def __init__(self, args: Any) -> None:
            self.model, self.seen = torch.nn.Module(), args._n_gpu

    trainer_type = type("Trainer", (recipe.ChatTraining, Stock), {})
    args = type("Args", (), {"_n_gpu": 4, "n_gpu": property(lambda self: self._n_gpu)})()
    made = trainer_type(arm="grpo", problems=[], template=None, config=recipe.Config(), seed=1, identity="",
                        make_generator=lambda _: None, on_step=lambda _: None, args=args)  # fmt: skip
    assert made.seen == 1


def test_minutes_and_dollars_count_every_process() -> None:
    base, found = fake_runs.make(problems=6, steps=2, arms=["grpo"])
    costs = []
    for several in ({}, {"processes": 4}):
        found = {name: {**row, "about": {**row["about"], **several}} for name, row in found.items()}
        results = report.summarize(base, found, fake_runs.HEADER, ["grpo"], [17, 18, 19], 4.0)
        costs.append((results["cost"]["minutes"]["grpo"]["total"], *results["arms"]["grpo"]["minutes"]))
    assert costs[1] == pytest.approx([4 * value for value in costs[0]], rel=1e-4)
