"""The command line as a user meets it: what it prints, what it exits with, what it leaves alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import small_flags

import recipe
import records
import tiny
from options import parser

ROOT = Path(__file__).parent.parent


def run_python(*words: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=300, **kwargs)


def test_selftest_passes_offline_in_seconds_without_the_heavy_packages() -> None:
    start = time.monotonic()
    done = run_python("recipe.py", "--selftest")
    assert done.returncode == 0, done.stdout
    assert re.search(r"(\d+) of \1 checks hold$", done.stdout.strip())
    assert "imported" not in done.stdout  # it lists torch, transformers or trl if they came in
    assert time.monotonic() - start < 6  # 3 s on an idle machine


def test_selftest_fails_when_a_rule_is_broken() -> None:
    broken = (
        "import recipe, selftest; selftest.raft_advantages = lambda k, d: [0.0] * len(k); "
        "raise SystemExit(selftest.main())"
    )
    done = run_python("-c", broken)
    assert done.returncode == 1 and "FAIL  raft" in done.stdout


def test_help_is_short_grouped_and_imports_nothing_heavy() -> None:
    spy = (
        "import sys, recipe\ntry: recipe.main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'trl'} & set(sys.modules)))"
    )
    done = run_python("-c", spy)
    assert done.stdout.strip().endswith("[]")
    assert len(done.stdout.splitlines()) < 140
    for group in ("what to run:", "model:", "data:", "chat:", "training:", "evaluation:", "machine:"):
        assert group in done.stdout


def test_every_number_of_the_config_is_a_flag_with_a_sentence() -> None:
    import dataclasses

    words = parser().parse_args(["--steps", "3", "--temperature", "0.5", "--no-checkpointing"])
    assert (words.steps, words.temperature, words.checkpointing) == (3, 0.5, False)
    for field in dataclasses.fields(recipe.Config):
        assert len(field.metadata["help"]) > 10
        assert any(recipe.flag(field.name) in action.option_strings for action in parser()._actions)


@pytest.fixture()
def flags(stand_in: tiny.TinyPaths, tmp_path: Path) -> list[str]:
    return [*small_flags(stand_in, steps=2, heldout_problems=6), "--out", str(tmp_path / "out")]


def trouble(flags: list[str], capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """The one line of a start that must exit with 2 and write nothing."""
    out = Path(flags[flags.index("--out") + 1])
    assert recipe.main([*flags, *more]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err and len(captured.err.strip().splitlines()) == 1
    assert not (out / "results.json").exists() and not list(out.glob("runs/*"))
    return captured.err


def data_folder(tmp_path: Path, train: str, test: str) -> str:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text(train)
    (folder / "test.jsonl").write_text(test)
    return str(folder)


GOOD = (
    json.dumps({"question": "Ann has 3 eggs. Ben has 4 eggs. How many eggs have they?", "answer": "3 + 4\n#### 7"})
    + "\n"
)


def test_a_data_folder_without_its_files_is_named(flags: list[str], capsys: Any, tmp_path: Path) -> None:
    assert f"{tmp_path / 'train.jsonl'} is missing" in trouble(flags, capsys, "--data", str(tmp_path))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{not json\n", "row 2: not a JSON object"),
        ('{"question": "How many?"}\n', "row 2: the field 'answer' is missing"),
        ('{"question": 3, "answer": "#### 3"}\n', "row 2: the field 'question' is missing or not a text"),
        (GOOD.replace("#### 7", "7"), "row 2: no readable gold answer"),
    ],
)
def test_a_malformed_row_is_named(row: str, says: str, flags: list[str], capsys: Any, tmp_path: Path) -> None:
    message = trouble(flags, capsys, "--data", data_folder(tmp_path, GOOD + row, GOOD))
    assert "train.jsonl" in message and says in message


def test_too_few_problems_says_how_many_and_what_to_lower(flags: list[str], capsys: Any, tmp_path: Path) -> None:
    message = trouble(flags, capsys, "--data", data_folder(tmp_path, GOOD * 5, GOOD))
    assert "5 train problems are left after the split, 32 are wanted: lower --train-problems to 5" in message


def test_a_folder_that_is_no_model_is_named(flags: list[str], capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert f"--model {tmp_path / 'empty'} could not be loaded" in trouble(
        flags, capsys, "--model", str(tmp_path / "empty")
    )


def test_a_tokenizer_without_a_chat_template_is_refused(
    flags: list[str], capsys: Any, tmp_path: Path, loaded: Any
) -> None:
    model, tokenizer, _ = loaded
    tokenizer.chat_template = None
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    assert "has no chat template" in trouble(flags, capsys, "--model", str(tmp_path / "plain"))


def test_an_unknown_arm_is_refused_with_the_known_ones(flags: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        recipe.main([*flags, "--arm", "ppo"])
    assert stop.value.code == 2 and "'grpo', 'ada', 'raft', 'mixed'" in capsys.readouterr().err.replace('"', "'")


@pytest.mark.parametrize(
    ("name", "value"), [("--group", "3"), ("--steps", "0"), ("--temperature", "-1"), ("--problems", "99")]
)
def test_numbers_that_do_not_fit_are_refused_by_name(name: str, value: str, flags: list[str], capsys: Any) -> None:
    assert name in trouble(flags, capsys, name, value)


def test_an_output_folder_that_cannot_be_written_is_named(flags: list[str], capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags[flags.index("--out") + 1] = str(tmp_path / "file" / "out")
    assert f"--out {tmp_path / 'file' / 'out'} cannot be written" in trouble(flags, capsys)


def test_without_a_gpu_it_says_what_to_do(flags: list[str], capsys: Any) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert "no GPU here: use --tiny" in trouble(flags, capsys, "--device", "auto")


def test_two_starts_on_one_folder_the_second_says_who_holds_it(flags: list[str], capsys: Any) -> None:
    out = Path(flags[flags.index("--out") + 1])
    with records.only_one(out):
        assert "is in use by process" in trouble(flags, capsys)


def test_one_small_arm_from_start_to_table_then_reused_without_torch(
    flags: list[str], capsys: Any, tmp_path: Path
) -> None:
    """The whole way, and again with --reuse: the same results.json, in a process in which torch cannot be imported."""
    words = [*flags, "--arm", "raft", "--seeds", "17"]
    assert recipe.main(words) == 0
    out = Path(flags[flags.index("--out") + 1])
    shown = capsys.readouterr().out
    assert recipe.main([*words, "--reuse", "--plan"]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert planned == ["untrained            reused", "raft seed 17         reused",
                       "nothing is left to run: without --plan the table is made of what is reused"]  # fmt: skip
    assert recipe.main([*flags, "--arm", "grpo", "--seeds", "17", "--reuse", "--plan"]) == 0
    planned = capsys.readouterr().out.splitlines()  # the table would hold raft's run too
    assert planned[0] == "untrained            reused" and planned[1].startswith("grpo seed 17         runs")
    assert planned[2] == "raft seed 17         reused"
    assert "raft seed 17: trained pair" in shown and "(n 6 problems)" in shown
    first = json.loads((out / "results.json").read_text())
    assert not (out / "checkpoints" / "raft-s17").exists() and not list(out.glob("**/*.tmp"))
    spy = "import sys; sys.modules['torch'] = None; import recipe; sys.exit(recipe.main(sys.argv[1:]))"
    done = run_python("-c", spy, *words, "--reuse")
    assert done.returncode == 0, done.stderr
    assert "reused: raft seed 17, untrained" in done.stdout
    again = json.loads((out / "results.json").read_text())
    for results in (first, again):
        for volatile in ("command", "date", "reused"):
            results["header"].pop(volatile, None)
        results["checks"] = [c for c in results["checks"] if "reused" not in c["check"]]
    assert again == first


def test_the_plan_says_how_long_by_the_benchmark(flags: list[str], capsys: Any) -> None:
    words = [*flags, "--arm", "ada", "--arm", "raft", "--seeds", "17", "--plan", "--price", "3"]
    assert recipe.main(words) == 0
    unknown = capsys.readouterr().out.splitlines()
    assert unknown[:3] == ["untrained            runs", "ada seed 17          runs", "raft seed 17         runs"]
    out = Path(flags[flags.index("--out") + 1])
    assert unknown[3] == f"no estimate: python recipe.py --bench writes {out / 'benchmark.json'}, from which it is made"
    assert not out.exists()
    out.mkdir()
    minutes = {"untrained": 1.5, "grpo": 5, "ada": 8.5, "raft": 5}
    (out / "benchmark.json").write_text(json.dumps({"minutes": minutes}))
    assert recipe.main(words) == 0
    assert capsys.readouterr().out.splitlines() == [
        "untrained            runs, about 1.5 min", "ada seed 17          runs, about 8.5 min",
        "raft seed 17         runs, about 5.0 min", "in all about 15 min"]  # fmt: skip
    assert recipe.main([*words, "--device", "auto"]) == 0  # what a CPU costs is not known
    assert capsys.readouterr().out.endswith("in all about 15 min, $0.75 at $3 an hour\n")


def test_a_changed_setting_makes_a_record_stale_and_says_which(flags: list[str], capsys: Any) -> None:
    words = [*flags, "--arm", "raft", "--seeds", "17"]
    assert recipe.main(words) == 0
    capsys.readouterr()
    assert recipe.main([*words, "--reuse", "--steps", "1"]) == 0
    shown = capsys.readouterr().out
    out = Path(flags[flags.index("--out") + 1])
    old = out / "runs" / "old"
    assert f"raft seed 17: its training differs; when it is made, the old record goes to {old}" in shown
    assert (out / "runs" / "old" / "raft-s17.1.json.xz").is_file()
    assert records.read_record(out / "runs" / "raft-s17.json.xz")["config"]["steps"] == 1


@pytest.mark.parametrize("how", [["--reuse", "--steps", "1"], []])
def test_a_start_that_cannot_run_leaves_the_records_where_they_are(
    how: list[str], flags: list[str], capsys: Any
) -> None:
    words = [*flags, "--arm", "raft", "--seeds", "17"]
    assert recipe.main(words) == 0
    out = Path(flags[flags.index("--out") + 1])
    before = {path.name: path.read_bytes() for path in (out / "runs").iterdir()}
    assert sorted(before) == ["raft-s17.json.xz", "untrained.json.xz"]
    for trouble in (["--device", "cuda"], ["--data", "no/such-data"]):
        assert recipe.main([*words, *how, *trouble]) != 0
        assert {path.name: path.read_bytes() for path in (out / "runs").iterdir()} == before
    if how:
        assert recipe.main([*words, *how, "--hours", "0"]) == 1  # nothing is started
        assert {path.name: path.read_bytes() for path in (out / "runs").iterdir()} == before
    capsys.readouterr()


def test_a_record_cut_short_is_named_and_made_again(flags: list[str], capsys: Any) -> None:
    words = [*flags, "--arm", "raft", "--seeds", "17"]
    assert recipe.main(words) == 0
    record = Path(flags[flags.index("--out") + 1]) / "runs" / "raft-s17.json.xz"
    whole = record.read_bytes()
    record.write_bytes(whole[: len(whole) // 2])
    capsys.readouterr()
    assert recipe.main([*words, "--reuse"]) == 0
    shown = capsys.readouterr().out
    assert f"left aside: {record}: not a whole record" in shown and "raft seed 17: trained pair" in shown


def test_no_run_is_started_that_would_not_be_done_in_time(flags: list[str], capsys: Any) -> None:
    assert recipe.main([*flags, "--arm", "raft", "--seeds", "17", "--hours", "0.00002"]) == 0
    out = Path(flags[flags.index("--out") + 1])
    assert "raft seed 17: not started, it would take about" in capsys.readouterr().out
    assert [path.name for path in (out / "runs").iterdir()] == ["untrained.json.xz"]
    assert json.loads((out / "results.json").read_text())["header"]["partial"] == ["raft seed 17 is missing"]


def test_without_a_gpu_the_table_is_made_of_the_runs_that_are_there(
    flags: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*flags, "--arm", "raft"]
    assert recipe.main([*words, "--seeds", "17"]) == 0
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    capsys.readouterr()
    assert recipe.main([*words, "--seeds", "17", "18", "--reuse", "--device", "auto"]) == 1
    shown = capsys.readouterr()
    assert "no GPU here" in shown.err and "the table is made of the runs that are there" in shown.err
    assert "Partial: raft seed 18 is missing." in shown.out
    header = json.loads((Path(flags[flags.index("--out") + 1]) / "results.json").read_text())["header"]
    assert header["partial"] == ["raft seed 18 is missing"] and header["failed"] == []


def test_one_process_that_believes_to_be_of_several_is_refused(
    flags: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE is 2, but" in trouble(flags, capsys)


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    pipe = subprocess.Popen(
        f"{sys.executable} -u recipe.py --selftest | head -1", shell=True, cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    out, err = pipe.communicate(timeout=60)
    assert len(out.splitlines()) == 1 and "Traceback" not in err and "Broken" not in err
