"""The report: its statistics against closed forms and by simulation, its results against the records."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_runs
import numpy as np
import pytest
import whileai as wai

import post
import recipe
import report
import tables
import words
from records import read_record

ROOT = Path(__file__).parent.parent
ARMS, SEEDS = ("grpo", "ada"), (17, 18, 19)
SMALL = {"problems": 10, "steps": 4, "arms": ARMS}


def summarize(base: Any, runs: Any, arms: Any = ARMS, seeds: Any = SEEDS, **header: Any) -> dict[str, Any]:
    return report.summarize(base, runs, {**fake_runs.HEADER, **header}, arms, seeds, 4.0)


@pytest.fixture(scope="module")
def records() -> tuple[Any, Any]:
    return fake_runs.make(**SMALL)


@pytest.fixture(scope="module")
def results(records: tuple[Any, Any]) -> dict[str, Any]:
    return summarize(*records)


@pytest.fixture()
def edited(records: tuple[Any, Any]) -> tuple[Any, Any]:
    """Records that a test may spoil."""
    return copy.deepcopy(records)


# ------------------------------------------------------------------------------------------------ statistics


def test_interval_is_its_closed_form() -> None:
    y = np.random.default_rng(0).integers(0, 5, (3, 12)) / 4
    seeds, problems = y.mean(1), y.mean(0)
    noise = ((y - seeds[:, None] - problems + y.mean()) ** 2).sum() / (2 * 11)
    from_seeds = 4.303**2 * seeds.var(ddof=1) / 3  # t quantiles from a printed table: 2 and 11 degrees of freedom
    half = math.sqrt(from_seeds + 2.201**2 * max(problems.var(ddof=1) - noise / 3, 0) / 12)
    found = report.mean_interval(y.tolist(), least=-9)
    assert found["value"] == pytest.approx(y.mean())
    assert found["half"] == pytest.approx(half, rel=1e-3)
    assert (found["over"], found["n_seeds"], found["n_problems"]) == ("seeds and problems", 3, 12)
    one = report.mean_interval(y.tolist(), one_model=True)
    assert one["half"] == pytest.approx(2.201 * problems.std(ddof=1) / math.sqrt(12), rel=1e-3)
    assert one["over"] == "problems"


def test_no_interval_without_a_spread_to_measure() -> None:
    cases = {"one training seed": [[0.5, 0.25]], "one problem": [[0.5], [0.25]], "no spread": [[0.0, 0.0], [0.0, 0.0]]}
    for word, scores in cases.items():
        found = report.mean_interval(scores)
        assert found["low"] is None and found["half"] is None and found["over"] is None and word in found["why"]


def test_interval_stays_within_the_scale() -> None:
    found = report.mean_interval([[0.0, 0.25], [0.0, 0.0], [0.5, 0.0]])
    assert found["low"] == 0.0 and found["high"] == pytest.approx(found["value"] + found["half"])


@pytest.mark.parametrize(("seeds", "problems"), [(3, 20), (3, 300), (5, 20), (5, 300)])
@pytest.mark.parametrize("between", [0.0, 0.02, 0.1])
def test_interval_covers_the_mean(seeds: int, problems: int, between: float) -> None:
    """Seed effects normal, problems hard or easy, four answers each: 95% intervals cover 92 to 98 in 100."""
    rng, covered, tries = np.random.default_rng(7), 0, 400
    for _ in range(tries):
        chance = 0.4 + rng.normal(0, between, (seeds, 1)) + rng.choice((-0.25, 0.25), (1, problems))
        y = rng.binomial(4, np.clip(chance, 0, 1)) / 4
        found = report.mean_interval(y.tolist())
        covered += found["low"] <= 0.4 <= found["high"]
    assert 0.92 <= covered / tries <= 0.985  # 0.98 and the error of 400 tries


@pytest.mark.parametrize(("seeds", "failing", "least", "most"), [
    (3, 0.2, 0.75, 0.90), (3, 0.5, 0.68, 0.82), (5, 0.2, 0.70, 0.83), (5, 0.4, 0.88, 0.97),
])  # fmt: skip
def test_interval_is_too_narrow_where_seeds_learn_or_fail(
    seeds: int, failing: float, least: float, most: float
) -> None:
    """Scores of about 0.27, or 0.07 where a seed fails: the README says how often such intervals hold the mean."""
    rng, covered, tries = np.random.default_rng(7), 0, 400
    for _ in range(tries):
        score = np.where(rng.random((seeds, 1)) < failing, 0.07, 0.27) + rng.normal(0, 0.02, (seeds, 1))
        y = score + rng.normal(0, 0.15, (1, 300)) + rng.normal(0, 0.2, (seeds, 300))
        found = report.mean_interval(y.tolist(), least=-1.0)
        covered += found["low"] <= failing * 0.07 + (1 - failing) * 0.27 <= found["high"]
    assert least <= covered / tries <= most


def shapes(rng: np.random.Generator) -> dict[str, Callable[[int], np.ndarray]]:
    """Ways seeds may differ, each with a spread of about 0.1."""
    return {
        "normal": lambda n: rng.normal(0, 0.1, n),
        "work or collapse": lambda n: rng.choice((-0.1, 0.1), n),
        "rarely collapse": lambda n: np.where(rng.random(n) < 0.2, -0.2, 0.05),
        "skewed": lambda n: rng.exponential(0.1, n),
    }


@pytest.mark.parametrize("shape", list(shapes(np.random.default_rng())))
@pytest.mark.parametrize(("seeds", "tries"), [(3, 300), (4, 300), (5, 1500), (7, 150)])
def test_spread_test_keeps_its_level(shape: str, seeds: int, tries: int) -> None:
    rng = np.random.default_rng(11)
    draw = shapes(rng)[shape]
    alarms = 0
    for _ in range(tries):
        first, second = (draw(seeds) + rng.normal(0, 0.005, seeds) for _ in "ab")  # the noise of an evaluation
        alarms += report.spread_test(first.tolist(), second.tolist())[0] <= report.LEVEL
    assert alarms / tries <= report.LEVEL + 2 * math.sqrt(0.05 * 0.95 / tries) * (seeds > 5)
    assert seeds > 4 or alarms == 0  # with 3 or 4 seeds it cannot speak


@pytest.mark.parametrize(("seeds", "tries"), [(3, 50), (5, 1500), (7, 200)])
def test_stated_power(seeds: int, tries: int) -> None:
    rng = np.random.default_rng(3)
    pairs = [(rng.normal(0, 0.1, seeds), rng.normal(0, 0.1 * report.POWER_AT, seeds)) for _ in range(tries)]
    found = sum(report.spread_test(a.tolist(), b.tolist())[0] <= report.LEVEL for a, b in pairs) / tries
    power = report.POWER[seeds]
    assert found == pytest.approx(power, abs=3 * math.sqrt(power * (1 - power) / tries) + 1e-9)


def test_spread_test_by_hand() -> None:
    # distances 0, 1, 2 and 0, 10, 30: of the 20 deals {0,0,1}, {0,0,2}, {0,1,2} twice are no larger than 3
    assert report.spread_test([5, 6, 3], [0, 10, -30]) == (4 / 20, 3)
    assert report.smallest_p(3) == 4 / 20
    assert report.spread_test([0, 10, -30], [5, 6, 3])[0] > 0.5  # one-sided
    tight, wide = [0.30, 0.31, 0.32, 0.29, 0.28], [0.1, 0.2, 0.35, 0.5, 0.6]
    assert report.spread_test(tight, wide)[0] == pytest.approx(report.smallest_p(5))
    assert report.smallest_p(5) < report.LEVEL
    assert report.spread_test([*tight, 0.3], [*wide, 0.4])[1] == 5  # an even number counts as one fewer


def test_reliability_claims_only_what_was_planned() -> None:
    def series(arm: str, scores: list[float]) -> report.Series:
        s = report.Series(arm, "trained_pair", tuple(range(len(scores))), ())
        s.__dict__["scores_SP"] = [[score] for score in scores]
        return s

    wide, tight = [0.1, 0.2, 0.35, 0.5, 0.6], [0.30, 0.31, 0.32, 0.29, 0.28]
    found = report.reliability([series("grpo", wide), series("ada", tight), series("raft", tight)])
    claims = {pair["arm"]: pair["claim"] for pair in found["pairs"]}
    assert claims == {"ada": True, "raft": False}
    assert found["arms"]["grpo"]["worst"] == {"seed": 0, "score": 0.1}
    assert "the difference is resolved (one-sided p 0.02" in found["words"]
    assert found["arms"]["grpo"]["std"] == pytest.approx(np.std(wide, ddof=1))
    few = report.reliability([series("grpo", wide[:3]), series("ada", [0.3, 0.3001, 0.3002])])
    assert not few["pairs"][0]["claim"] and few["pairs"][0]["power"] == 0 and "not resolved" in few["words"]
    assert "need three seeds" in report.reliability([series("ada", tight)])["words"]


# ------------------------------------------------------------------------------------------------ results


def chats_of(record: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return next(e["chats"] for e in record["evaluations"] if e["name"] == name)


def right(chats: list[dict[str, Any]]) -> list[bool]:
    return [g["correct"] for chat in chats for g in chat["grades"]]


def test_scores_are_shares_of_right_answers(records: tuple[Any, Any], results: dict[str, Any]) -> None:
    ada = [records[1]["ada", seed] for seed in SEEDS]
    for key, name in (("ada", "trained_pair"), ("ada_untrained_partner", "untrained_partner")):
        shares = [np.mean(right(chats_of(record, name))) for record in ada]
        row = results["arms"][key]
        assert row["score"] == pytest.approx(shares, abs=1e-4) and row["seeds"] == list(SEEDS)
        assert [p["value"] for p in row["pass_at_1"]] == row["score"]
        assert row["mean"]["value"] == pytest.approx(np.mean(shares), abs=1e-4)
    solved = []
    for record in ada:
        groups = itertools.groupby(chats_of(record, "trained_pair"), key=lambda chat: chat["problem"])
        solved.append(np.mean([any(right(list(chats))) for _, chats in groups]))
    assert [p["value"] for p in results["arms"]["ada"]["pass_at_4"]] == pytest.approx(solved, abs=1e-4)
    untrained = results["arms"]["untrained"]
    assert untrained["unit"] == "re-run" and untrained["mean"]["over"] == "problems"


def test_training_is_read_from_the_steps(records: tuple[Any, Any], results: dict[str, Any]) -> None:
    steps, row = records[1]["ada", 18]["steps"], results["arms"]["ada"]
    assert row["training"]["flat_early"][1] == pytest.approx(steps[0]["flat"])
    assert row["training"]["flat_late"][1] == pytest.approx(steps[-1]["flat"])
    assert row["training"]["drawn"][1] == sum(s["drawn"] for s in steps) > row["training"]["kept"][1]
    assert row["curves"][1]["reward"] == pytest.approx([s["reward"] for s in steps], abs=1e-3)
    assert row["curves"][1]["step"] == [1, 2, 3, 4]


def test_thinned_curve_averages_neighbours_and_skips_gaps() -> None:
    curve = {"seed": 1, "step": [1.0, 2, 3, 4, 5], **{name: [0.0, 1.0, None, 0.5, None] for name in report.CURVES}}
    thinned = {name: [0.5, 0.5, None] for name in report.CURVES}
    assert report.thin(curve, 3) == {"seed": 1, "step": [1.5, 3.5, 5], **thinned}


def test_compare_is_called_as_the_experiment_says(records: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [report.read_run(record, *name) for name, record in records[1].items()]
    pair = report.read_run(records[0], "untrained", None)
    series = {s.key: s for s in report._series(pair, runs)}
    noise = report._noise(list(series.values()))
    direct = wai.compare
    calls: list[Any] = []
    monkeypatch.setattr(wai, "compare", lambda *args, **named: calls.append((args, named)) or direct(*args, **named))
    found = report.compare(series["grpo"], series["ada"], noise)
    (before, after), named = calls[0]
    floor = wai.eval_variance(*series["untrained"].rows)["run_std"]
    assert set(named) == {"target", "run_std", "run_std_runs", "train_runs", "proxy"}
    assert (named["target"], named["run_std"], named["run_std_runs"], named["proxy"]) == ("pass_at_1", floor, 3, None)
    assert before == series["grpo"].rows[0] and after == series["ada"].rows[0]
    assert named["train_runs"] == {"before": series["grpo"].rows, "after": series["ada"].rows}
    assert sum(r["reward"] for r in after) / len(after) == pytest.approx(series["ada"].scores[0])
    said = direct(before, after, **named)
    assert found["verdict"] == said["target_verdict"]
    assert (found["delta"], found["train_delta"]) == (said["target_delta"], said["train_delta"])
    assert found["seed_after"] == 17 and found["headline"] == str(said).splitlines()[0]


def test_matched_difference_pairs_seeds_and_problems(records: tuple[Any, Any]) -> None:
    names = (("grpo", 17), ("grpo", 19), ("ada", 19), ("ada", 18), ("ada", 17))
    runs = [report.read_run(records[1][name], *name) for name in names]
    before, after = (s for s in report._series(None, runs) if s.partner == "trained_pair")
    found = report.matched_difference(before, after)
    scores = {(r.arm, r.seed): np.mean([c.reward for c in r.sittings["trained_pair"][0]]) for r in runs}
    assert found["seeds"] == [17, 19]
    assert found["per_seed"] == pytest.approx([scores["ada", s] - scores["grpo", s] for s in (17, 19)])
    other = report.Series("ada", "trained_pair", (5,), after.chats[:1])
    assert report.matched_difference(before, other)["value"] is None


@pytest.mark.parametrize(("grpo", "ada", "against"), [
    ((0.5, 0.1, 0.1), (0.3, 0.6, 0.6), True),
    ((0.1, 0.5, 0.5), (0.3, 0.1, 0.1), True),
    ((0.1, 0.1, 0.1), (0.5, 0.6, 0.6), False),
    ((0.5, 0.6, 0.6), (0.1, 0.1, 0.1), False),
])  # fmt: skip
def test_headline_against_the_mean_is_flagged(grpo: Any, ada: Any, against: bool) -> None:
    def series(arm: str, rates: Any) -> report.Series:
        draw = random.Random(arm)
        problems = [fake_runs.problem("test", n) for n in range(20) for _ in "ab"]
        chats = (tuple(fake_runs.chat(p, rate, 0.5, draw, (True, True)) for p in problems) for rate in rates)
        return report.Series(arm, "trained_pair", SEEDS, tuple(chats))

    flag = report._deltas([series("grpo", grpo), series("ada", ada)], None)["ada"]["trained_pair"]["flag"]
    assert bool(flag) == against
    assert not against or ("seed 17" in flag and "against the mean" in flag)


def test_seeds_that_only_the_baseline_has_are_told_of_where_they_turn_the_difference() -> None:
    """Four seeds of GRPO, two of them failed, against two of Ada: +0.10 over all, -0.10 over those that both have."""

    def series(arm: str, seeds: Any, rates: Any) -> report.Series:
        problems = [fake_runs.problem("test", n) for n in range(10)]
        rights = [random.Random(0).sample(range(10), round(10 * rate)) for rate in rates]
        chats = [tuple(fake_runs.chat(p, float(n in right), 0.5, random.Random(n), (True, True))
                       for n, p in enumerate(problems)) for right in rights]  # fmt: skip
        return report.Series(arm, "trained_pair", seeds, tuple(chats))

    grpo, ada = series("grpo", (17, 18, 19, 20), (0.5, 0.5, 0.1, 0.1)), series("ada", (17, 18), (0.4, 0.4))
    assert grpo.scores == pytest.approx([0.5, 0.5, 0.1, 0.1]) and ada.scores == pytest.approx([0.4, 0.4])
    flag = report._deltas([grpo, ada], None)["ada"]["trained_pair"]["flag"]
    assert flag == "ada, trained pair: all 4 seeds of grpo and 2 of ada +0.100, the 2 that both have -0.100"


def test_a_gain_is_paired_by_problem(records: tuple[Any, Any], results: dict[str, Any]) -> None:
    """By an independent way: numpy, and Student's t from a table, on the differences from the mean of the re-runs."""
    t = {9: 2.2622, 19: 2.0930}

    def scores(chats: Any) -> dict[str, float]:
        by: dict[str, list[float]] = {}
        for chat in chats:
            by.setdefault(chat["problem"], []).append(np.mean([g["correct"] for g in chat["grades"]]))
        return {problem: float(np.mean(values)) for problem, values in by.items()}

    reruns = [scores(sitting["chats"]) for sitting in records[0]["evaluations"]]
    for key, partner in (("ada", "trained_pair"), ("ada_untrained_partner", "untrained_partner")):
        for seed, gain in zip(SEEDS, results["arms"][key]["gain"], strict=True):
            after = scores(chats_of(records[1]["ada", seed], partner))
            differences = np.array([after[p] - np.mean([run[p] for run in reruns]) for p in after])
            half = t[len(differences) - 1] * differences.std(ddof=1) / len(differences) ** 0.5
            found = [gain["value"], gain["low"], gain["high"]]
            middle = differences.mean()
            assert found == pytest.approx([middle, middle - half, middle + half], abs=2e-3)
    assert results["arms"]["untrained"]["gain"] is None


def test_chats_are_graded_again(edited: tuple[Any, Any], results: dict[str, Any]) -> None:
    base, runs = edited
    grades = chats_of(runs["ada", 18], "trained_pair")[0]["grades"]
    grades[0]["correct"] = not grades[0]["correct"]
    runs["ada", 18]["last_batch"][0]["grades"][1]["correct"] ^= True
    again = summarize(base, runs)
    assert again["arms"] == results["arms"] and again["deltas"] == results["deltas"]
    old, new = (next(c for c in r["checks"] if c["check"] == "graded again") for r in (results, again))
    assert old["ok"] and old["result"].startswith("0 of")
    assert not new["ok"] and new["result"].startswith("2 of") and "ada seed 18" in new["result"]


def test_another_text_is_another_score(edited: tuple[Any, Any], results: dict[str, Any]) -> None:
    base, runs = edited
    for chat in chats_of(runs["ada", 18], "trained_pair"):
        for turn in chat["turns"][2:]:
            turn["text"] = "no box"
    row = summarize(base, runs)["arms"]["ada"]
    assert row["score"][1] == 0 and row["score"][0] == results["arms"]["ada"]["score"][0]
    assert row["talk"]["no_box"][1] == 1 and row["kinds"]["no_box"] >= 40


SCRIPT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'transformers', 'trl', 'peft', 'datasets'):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
sys.path[:0] = [ROOT, TESTS]
import hashlib, fake_runs, report
base, runs = fake_runs.make(**SMALL)
runs = dict(reversed(runs.items()))
header = {**fake_runs.HEADER, "date": "2031-01-01", "command": "another"}
results = report.summarize(base, runs, header, ARMS, SEEDS, 4.0)
results["header"] |= {name: fake_runs.HEADER[name] for name in ("date", "command")}
print(hashlib.sha256(report.to_json(results)).hexdigest())
"""


def test_same_bytes_in_another_process_without_torch(results: dict[str, Any]) -> None:
    names = {"ROOT": str(ROOT), "TESTS": str(ROOT / "tests"), "SMALL": SMALL, "ARMS": ARMS, "SEEDS": SEEDS}
    script = "\n".join(f"{name} = {value!r}" for name, value in names.items()) + SCRIPT
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.strip() == hashlib.sha256(report.to_json(results)).hexdigest(), done.stderr


def test_partial_results_say_what_is_missing(records: tuple[Any, Any], tmp_path: Path) -> None:
    base, runs = records
    some = {name: runs[name] for name in (("grpo", 17), ("ada", 17), ("ada", 18))}
    results = summarize(None, some, arms=("grpo", "ada", "raft"))
    partial = results["header"]["partial"]
    lacking = ("grpo seed 18", "grpo seed 19", "ada seed 19", "raft seed 17", "raft seed 18", "raft seed 19")
    assert {f"{name} is missing" for name in lacking} == set(partial[1:])
    assert partial[0].startswith("untrained is missing")
    assert "raft" not in results["arms"] and results["noise"] is None and results["arms"]["ada"]["before"] is None
    assert results["arms"]["grpo"]["mean"]["low"] is None and results["arms"]["ada"]["mean"]["low"] is not None
    assert results["deltas"]["ada"]["trained_pair"]["compare"]["word"] == "unresolved"
    table = tables.render_table(results)
    assert any(line.split() == ["raft", *["–"] * 7] for line in table.splitlines())
    assert "Partial: untrained is missing" in table
    assert {c["check"]: c["ok"] for c in results["checks"]}["eval noise"] is False
    path = tmp_path / "results.json"
    path.write_bytes(report.to_json(results))
    assert report.load_results(path) == results
    alone = summarize(base, {})
    assert list(alone["arms"]) == ["untrained"] and alone["deltas"] == {}
    assert tables.readme_tables(alone)["deltas"].startswith("No deltas")
    with pytest.raises(report.ResultsError, match="no records"):
        summarize(None, {})


def spoil_nan(runs: Any) -> None:
    runs["ada", 18]["steps"][2]["loss"] = float("nan")


def spoil_field(runs: Any) -> None:
    del runs["ada", 18]["steps"][2]["flat"]


def spoil_chat(runs: Any) -> None:
    chats_of(runs["ada", 18], "untrained_partner")[3]["turns"].pop()


def spoil_text(runs: Any) -> None:
    chats_of(runs["ada", 18], "untrained_partner")[3]["turns"][1]["text"] = None


def spoil_problem(runs: Any) -> None:
    del runs["ada", 18]["problems"]["test-3"]


def spoil_gold(runs: Any) -> None:
    runs["ada", 18]["problems"]["test-3"]["gold"] = "many"


def spoil_sitting(runs: Any) -> None:
    runs["ada", 18]["evaluations"].pop()


def spoil_name(runs: Any) -> None:
    runs["ada", 18]["seed"] = 19


def spoil_set(runs: Any) -> None:
    chats_of(runs["ada", 18], "trained_pair").pop()


@pytest.mark.parametrize(("spoil", "where"), [
    (spoil_nan, r"steps\[2\].loss"), (spoil_field, "steps"), (spoil_chat, r"evaluations\[1\]"),
    (spoil_text, r"evaluations\[1\]"), (spoil_problem, "test-3"), (spoil_gold, "many"),
    (spoil_sitting, "untrained_partner"), (spoil_name, "seed 19"), (spoil_set, "other problems"),
])  # fmt: skip
def test_a_bad_record_is_named(edited: tuple[Any, Any], spoil: Callable[[Any], None], where: str) -> None:
    spoil(edited[1])
    with pytest.raises(report.ResultsError, match=where) as error:
        summarize(*edited)
    assert "ada" in str(error.value) and "18" in str(error.value)


def test_results_stay_small(edited: tuple[Any, Any]) -> None:
    """Five arms, three seeds, 80 steps and messages as long as they get."""
    base, runs = edited
    draw = random.Random(0)
    for record in runs.values():
        record["config"]["steps"] = 80
        first = record["steps"][0]
        record["steps"] = [{**first, "step": i, **{name: draw.random() for name in report.CURVES}} for i in range(80)]
    for record in (base, *runs.values()):
        for chat in chats_of(record, record["evaluations"][0]["name"]):
            for turn in chat["turns"]:
                turn["text"] = "Ünique – " * 200 + turn["text"]
    for arm in ("raft", "mixed"):
        runs |= {(arm, seed): {**runs["grpo", seed], "arm": arm} for seed in SEEDS}
    results = summarize(base, runs, arms=recipe.TABLE_ARMS)
    assert len(report.to_json(results)) < 60_000
    assert all(10 <= len(curve["step"]) <= 80 for row in results["arms"].values() for curve in row["curves"])
    turns = [turn for chats in results["chats"]["arms"].values() for chat in chats for turn in chat["turns"]]
    assert len(turns) == 5 * 2 * 4 and all(turn["clipped"] and " [...] " in turn["text"] for turn in turns)


def test_every_arm_and_seed_is_scanned(edited: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, runs = edited
    for record in runs.values():  # the same question everywhere: only the facts tell problems apart
        for problem in record["problems"].values():
            problem["question"] = "How many are left?"
    scans: list[Any] = []
    direct = wai.hack_scan
    monkeypatch.setattr(wai, "hack_scan", lambda rows, **named: scans.append(list(rows)) or direct(rows, **named))
    checks = {c["check"]: c for c in summarize(None, runs)["checks"]}
    assert len(scans) == len(ARMS) * len(SEEDS)
    batch = runs["grpo", 17]["last_batch"]
    assert len(scans[0]) == len(batch)
    assert len({row["prompt"] for row in scans[0]}) == len({chat["problem"] for chat in batch}) == 8
    assert sum(row["reward"] for row in scans[0]) == sum(right(batch)) / 2
    assert all(str(seed) in checks[f"hack scan, {arm}"]["result"] for arm in ARMS for seed in SEEDS)


def test_a_reward_for_a_shortcut_is_found() -> None:
    """Chats that say "please" are the right ones, whatever they tell: the scan must not pass."""
    draw, chats = random.Random(1), []
    for n in range(12):
        for k in range(8):
            c = fake_runs.chat(fake_runs.problem("train", n), float(k % 2), 0.9, draw, (True, True))
            polite = recipe.Turn("A", c.chat.turns[0].text + " please" * (k % 2), 9, False, True)
            chats.append(recipe.grade_chat(recipe.Chat(c.chat.problem, (polite, *c.chat.turns[1:]))))
    run = report.Run("ada", 17, "ada seed 17", {}, tuple(chats), (), {}, {}, {}, {}, {}, 0, 0)
    words, ok = report.hack_words([run])
    assert ok is False and "reward_hack" in words
    flat = dataclasses.replace(run, last_batch=tuple(c for c in chats if c.reward == 0))
    assert report.hack_words([flat])[1] is None


def test_checks_are_complete(edited: tuple[Any, Any], results: dict[str, Any]) -> None:
    names = [c["check"] for c in results["checks"]]
    per_arm = [f"{kind}, {arm}" for kind in ("length", "hack scan") for arm in ARMS]
    once = ["eval noise", "clean holdout", "reward is a program", "graded again", "proxy vs target",
            "reused from the cache", "training seeds", "pinned versions", "chats drawn", "model, device, commit",
            "one machine, one commit", "one experiment"]  # fmt: skip
    assert sorted(names) == sorted([*once, *per_arm])
    one = next(c for c in results["checks"] if c["check"] == "one experiment")
    count = len(ARMS) * len(SEEDS) + 1
    assert one["ok"] is True and one["result"] == f"the same in every record ({count}): data and model"
    base, runs = edited
    other = {**base["about"]["versions"], "trl": "2.0"}
    runs["ada", 19]["about"] = {**base["about"], "device": "NVIDIA A100", "versions": other}
    runs["grpo", 17]["about"] = {**base["about"], "commit": "fedcba"}
    runs["ada", 18]["key"] = {**runs["ada", 18]["key"], "model": "another"}
    checks = {c["check"]: c for c in summarize(base, runs, clean=False, reused=["ada seed 17"])["checks"]}
    mixed = checks["one machine, one commit"]
    assert mixed["ok"] is False
    assert all(word in mixed["result"] for word in ("NVIDIA A100", "ada seed 19", "fedcba", "grpo seed 17"))
    one = checks["one experiment"]
    assert one["ok"] is False and one["result"] == "not the same in all records: model"
    assert checks["pinned versions"]["ok"] is False and checks["model, device, commit"]["ok"] is False
    assert checks["reused from the cache"]["result"] == "ada seed 17"
    assert "x grpo" in checks["chats drawn"]["result"]


@pytest.mark.parametrize(
    ("clean", "of_a_run", "ok", "says"),
    [
        (True, True, True, "commit 0123456789ab"),
        (True, None, None, "of some runs it is not known whether their checkout was clean"),
        (True, "no", None, "of some runs it is not known whether their checkout was clean"),
        (True, False, False, "some runs were made with changes that are not committed"),
        (False, True, False, ", with changes that are not committed"),
        (None, True, False, ", not known whether clean"),
    ],
)
def test_a_table_is_traced_only_if_its_runs_are_too(
    edited: tuple[Any, Any], clean: bool | None, of_a_run: Any, ok: bool | None, says: str
) -> None:
    base, runs = edited
    runs["ada", 18]["about"] = {**base["about"], "clean": of_a_run}
    one, header = report.read_run(runs["ada", 18], "ada", 18), fake_runs.HEADER
    results = {"header": {**header, "clean": clean, "model": base["about"]["model"], "versions": {}, "device": "d"}}
    found = {check[0]: check for check in report._origin_checks([one], results)}
    _, _, words, passed = found["model, device, commit"]
    assert passed is ok and words.endswith(says)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda record: record["about"].update(processes="2"),
        lambda record: record["about"].update(processes=None),
        lambda record: record["about"].update(device=5),
        lambda record: record.update(key={}),
        lambda record: record.update(key=[5]),
    ],
)
def test_a_record_of_odd_origin_is_named(edited: tuple[Any, Any], spoil: Callable[[Any], None]) -> None:
    base, runs = edited
    runs["ada", 18] = copy.deepcopy(runs["ada", 18])  # the records of one start share what they say of it
    spoil(runs["ada", 18])
    with pytest.raises(report.ResultsError, match=r"runs/ada-s18.json.xz \(ada seed 18\), .*key"):
        summarize(base, runs)


def test_how_far_a_score_would_move_if_its_chats_were_sampled_again() -> None:
    """By hand: rewards 1 and 0 (variance 1/2) and twice 1/2 (0) on two problems of two chats: sqrt(1/2 / 2) / 2. A
    second seed without any spread has 0, so the mean is half of it."""

    def chats(*rewards: float) -> Any:
        problems = ("p", "p", "q", "q")[: len(rewards)]
        return tuple(SimpleNamespace(reward=r, chat=SimpleNamespace(problem=SimpleNamespace(id=name)))
                     for r, name in zip(rewards, problems, strict=True))  # fmt: skip

    both = report.Series("grpo", "trained_pair", (17, 18), (chats(1, 0, 0.5, 0.5), chats(1, 1, 0, 0)))
    assert report.resampling_std(both) == pytest.approx(0.25 / 2)
    assert report.resampling_std(report.Series("grpo", "trained_pair", (17,), (chats(1),))) is None


def test_runs_that_share_a_card_share_its_minutes() -> None:
    """By hand, on card X: grpo 0 to 10 min, ada 5 to 15 min, so 5 minutes each alone and 2.5 each of the shared 5. On
    card Y raft for 10 min, with two processes. The pair and mixed began in one start: 1 min, then 4 min."""

    def run(arm: str, date: str, minutes: float, **more: Any) -> Any:
        return SimpleNamespace(arm=arm, name=arm, about={"date": date, **more}, seconds={"total": 60 * minutes},
                               processes=more.get("processes", 1))  # fmt: skip

    day = "2026-01-01T{}Z".format
    shared = [run("grpo", day("10:00:00"), 10, card="X"), run("ada", day("10:05:00"), 10, card="X")]
    assert report.card_minutes(shared) == pytest.approx({"grpo": 7.5, "ada": 7.5})
    alone = [*shared, run("raft", day("10:00:00"), 10, card="Y", processes=2)]
    assert report.card_minutes(alone) == pytest.approx({"grpo": 7.5, "ada": 7.5, "raft": 20})
    one_start = [run("untrained", day("09:00:00"), 1), run("mixed", day("09:00:00"), 4)]
    assert report.card_minutes(one_start) == pytest.approx({"untrained": 1, "mixed": 4})
    same_second = [run("grpo", day("09:00:00"), 10, card="X"), run("ada", day("09:00:00"), 10, card="X")]
    assert report.card_minutes(same_second) == pytest.approx({"grpo": 5, "ada": 5})
    resumed = run("grpo", day("10:00:00"), 10, card="X")  # 6 minutes before it was killed, 4 from 10:00 on
    resumed.seconds["earlier"] = 360.0
    after = run("ada", day("10:04:00"), 10, card="X")
    assert report.card_minutes([resumed, after]) == pytest.approx({"grpo": 10, "ada": 10})
    undated = [run("grpo", "yesterday", 3), run("ada", "yesterday", 3)]
    assert report.card_minutes(undated) == pytest.approx({"grpo": 3, "ada": 3})
    total = {"minutes": 20.0, "card_minutes": 15.0}
    said = words.shared_words({"cost": {"total": total}})
    assert "1.3 at a time on average: 20 minutes of runs took 15 minutes of the card." in said
    assert words.shared_words({"cost": {"total": {**total, "card_minutes": 19.1}}}) == ""
    assert words.shared_words({"cost": {"total": {**total, "card_minutes": None}}}) == ""


def test_a_shared_card_is_in_the_dollars_and_in_the_tables(edited: tuple[Any, Any]) -> None:
    """By hand: the pair 200 s, then ada and grpo seeds 17 to 19 of 380 s each, all six begun at 10:00 on one card, so
    380 s of the card for 2,280 s of runs, and each arm has half of it."""
    base, runs = edited
    spent = {"load": 20.0, "train": 240.0, "evaluate": 120.0, "total": 380.0}
    for record in runs.values():
        record["seconds"] = dict(spent)
        record["about"] = {**record["about"], "card": "X", "date": "2026-01-01T10:00:00Z"}
    base["about"] = {**base["about"], "card": "X", "date": "2026-01-01T09:00:00Z"}
    found = summarize(base, runs)
    assert found["cost"]["card_minutes"] == pytest.approx(
        {"untrained": 200 / 60, "grpo": 190 / 60, "ada": 190 / 60}, abs=1e-3
    )
    total = found["cost"]["total"]
    assert total["minutes"] == pytest.approx(2480 / 60, abs=1e-3)
    assert total["card_minutes"] == pytest.approx(580 / 60, abs=1e-3)
    assert total["dollars"] == pytest.approx(580 / 3600 * 4, abs=0.01)
    readme = tables.readme_tables(found)
    grpo = next(line for line in readme["result"].splitlines() if line.startswith("| grpo |"))
    assert "| 6.3 (1.1) |" in grpo and "GPU minutes a seed (its part of the card)" in readme["result"]
    assert "4.3 at a time on average: 41 minutes of runs took 10 minutes of the card." in readme["cost"]
    row = next(line for line in readme["cost"].splitlines() if line.startswith("| ada |")).split("|")
    assert [cell.strip() for cell in row[8:10]] == ["19.0", "3.2"]  # all three seeds: of runs, and on the card
    shown = post.render_html(found, post.make_charts(found))
    assert "<td>19.0</td><td>3.2</td>" in shown and "41 minutes of runs took 10 minutes of the card" in shown
    assert "<dt>GPU minutes</dt><dd>10 ($0.64)</dd>" in shown
    assert post.run_plan(found, "ada")["finish"]["cost_usd"] == pytest.approx(190 / 3600 * 4, abs=0.01)


def test_what_the_readme_says_of_single_runs_is_in_their_records() -> None:
    """Its prose names runs that are in runs/ for good: counted here from the rewards of every chat drawn."""

    def drawn(arm: str, seed: int) -> list[dict[str, Any]]:
        return read_record(ROOT / "runs" / f"{arm}-s{seed}.json.xz")["drawn"]

    right = {seed: sum(d["rewards"].count(1.0) for d in drawn("raft", seed) if d["step"] < 10) for seed in SEEDS}
    with_right = {seed: {d["step"] for d in drawn("raft", seed) if 1.0 in d["rewards"]} for seed in SEEDS}
    none = {seed: 80 - len(steps) for seed, steps in with_right.items()}
    prose = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"in its first ten steps, seed 17 played {right[17]}, seed 18 {right[18]} and seed 19 {right[19]}" in prose
    assert f"no update, in {none[17]} of 80 steps, the others in {none[18]} and {none[19]}" in prose
    late = {seed: [d["rewards"] for d in drawn("mixed", seed) if d["step"] >= 40] for seed in SEEDS}
    paid = [
        " and ".join(f"{np.mean([rewards[half] for rewards in late[seed]]):.2f}" for half in (slice(0, 2), slice(2, 4)))
        for seed in SEEDS
    ]  # of the four chats of a problem the last two are with the untrained partner
    assert f"paid {paid[0]} in seed 17, {paid[1]} in seed 18, {paid[2]} in seed 19" in prose
    total = {arm: sum(len(d["rewards"]) for seed in SEEDS for d in drawn(arm, seed)) for arm in ("ada", "grpo")}
    assert f"the {total['ada'] / total['grpo']:.1f} times as many that it draws" in prose

    def early(arm: str) -> tuple[dict[int, float], dict[int, float], dict[int, int]]:
        """By seed: numbers sent in the first step and in steps 11 to 40, and how many of these had a group to spare."""
        steps = {seed: read_record(ROOT / "runs" / f"{arm}-s{seed}.json.xz")["steps"] for seed in (*SEEDS, 20, 21)}
        sent = {seed: float(np.mean([step["sends_own"] for step in of[10:40]])) for seed, of in steps.items()}
        bare = {seed: sum(step["flat"] >= 7 / 8 for step in of[10:40]) for seed, of in steps.items()}
        return {seed: of[0]["sends_own"] for seed, of in steps.items()}, sent, bare

    first, sent, bare = early("grpo")
    others = sorted(sent[seed] for seed in SEEDS)
    assert f"sent {first[20]:.2f} and {first[21]:.2f} of their own numbers in the first step" in prose
    assert f"sent {sent[20]:.2f} and {sent[21]:.2f} in steps 11 to 40" in prose
    assert f"the other GRPO seeds {others[0]:.2f} to {others[-1]:.2f}" in prose
    others = sorted(bare[seed] for seed in SEEDS)
    assert f"in {bare[20]} and {bare[21]} of these 30 steps at most one group of eight" in prose
    assert f"in the other seeds in {others[0]} to {others[-1]}, in Ada's, after its replays, in none" in prose
    assert not any(early("ada")[2].values())
    row = report.load_results(ROOT / "results.json")["arms"]
    ends = {name: [f"{value:.2f}" for value in row["grpo"]["talk"][name]] for name in ("sends_own", "uses_partners")}
    start = {name: f"{np.mean(row['untrained']['talk'][name]):.2f}" for name in ends}
    assert row["grpo"]["seeds"] == [*SEEDS, 20, 21]
    assert f"({ends['sends_own'][3]} and {ends['sends_own'][4]} on the held-out problems, the untrained pair " in prose
    assert f"the untrained pair {start['sends_own']}), using" in prose
    uses = f"({ends['uses_partners'][3]} and {ends['uses_partners'][4]}, the untrained pair {start['uses_partners']})"
    assert uses in prose
    idle = row["grpo"]["training"]["unchanged_steps"]
    assert f"{idle[3]} and {idle[4]} of all 80 steps had nothing to learn from, in the other seeds {idle[0]}, " in prose
    assert f"in the other seeds {idle[0]}, {idle[1]} and {idle[2]}." in prose
    failed, other = row["grpo"]["score"][3:], row["untrained"]["mean"]["value"]
    least, most = min(row["ada"]["score"]), max(row["ada"]["score"])
    assert f"({failed[0]:.2f} and {failed[1]:.2f} against {other:.2f}), none of Ada's does ({least:.2f} to" in prose
    assert f"to {most:.2f})" in prose


def test_cost_adds_up(records: tuple[Any, Any], results: dict[str, Any]) -> None:
    cost = results["cost"]
    total = sum(record["seconds"]["total"] for record in (records[0], *records[1].values())) / 60
    assert cost["total"]["minutes"] == pytest.approx(total, abs=1e-3)
    assert cost["total"]["dollars"] == pytest.approx(total / 60 * 4, abs=0.01)
    for row in cost["minutes"].values():
        assert sum(row[phase] for phase in report.PHASES[:-1]) == pytest.approx(row["total"], abs=1e-3)
    steps = [s for seed in SEEDS for s in records[1]["ada", seed]["steps"]]
    played = sum(s["drawn"] + s["thrown_away"] for s in steps)
    assert cost["chats"]["ada"] == {"training": played, "evaluation": 3 * 2 * 20}
    assert cost["tokens"]["ada"]["training"] == sum(s["sampled_tokens"] for s in steps)
    one = fake_runs.make(problems=4, steps=1, seeds=(17,), arms=("grpo",), device="cpu, 8 threads")
    on_cpu = summarize(*one, arms=("grpo",), seeds=(17,))
    assert on_cpu["cost"]["unit"] == "CPU minutes" and on_cpu["cost"]["total"]["dollars"] is None


def test_folders_are_named_without_their_place(edited: tuple[Any, Any]) -> None:
    base, _ = edited
    base["config"] |= {"model": "/somewhere/else/tiny-model", "data": "/somewhere/else/words"}
    base["about"]["model"]["id"] = "/somewhere/else/tiny-model"
    results = summarize(base, {})
    assert "/somewhere" not in report.to_json(results).decode()
    assert results["header"]["model"]["id"] == "tiny-model" and results["header"]["data"]["id"] == "words"


def test_what_could_not_be_counted_is_null(edited: tuple[Any, Any]) -> None:
    """Problems whose every number stands in the question: nobody has a number of their own to send."""
    base, _ = edited
    for problem in base["problems"].values():
        problem["question"] = " ".join([*problem["facts"][0], *problem["facts"][1], problem["question"]])
    results = summarize(base, {})
    assert results["arms"]["untrained"]["talk"]["sends_own"] == [None] * 3
    assert b"NaN" not in report.to_json(results)
    assert tables.render_table(results).splitlines()[2].split()[-4:-2] == ["–", "–"]


@pytest.mark.parametrize(("text", "shown"), [
    ("The cat sat on the mat and then it slept all day long.", "The cat [...] long."),
    ("x" * 30, "xxxxxxxxxx [...] xxxxxxxxxx"),
    ("Line one\n\nis here, and the last\nline two", "Line [...] line two"),
    ("a" * 40 + " end", "aaaaaaaaaa [...] end"),
])  # fmt: skip
def test_a_long_message_is_cut_between_words(text: str, shown: str) -> None:
    assert report.shortened(text, 20) == shown


def test_example_chats_are_the_same_problems_for_every_arm(results: dict[str, Any]) -> None:
    shown = results["chats"]["arms"]
    assert list(shown) == ["untrained", *ARMS]
    assert len({tuple(chat["problem"] for chat in chats) for chats in shown.values()}) == 1
    for chat in itertools.chain.from_iterable(shown.values()):
        assert chat["reward"] == sum(a["correct"] for a in chat["answers"]) / 2
        for i, turn in enumerate(chat["turns"]):
            theirs, mine = chat["private"][1 - i % 2], chat["private"][i % 2]
            assert turn["sent"] == ([n for n in mine if n in turn["text"]] if i < 2 else [])
            assert turn["used"] == ([n for n in theirs if n in turn["text"]] if i > 1 else [])


# ------------------------------------------------------------------------------------------------ reading it back


def spoiled(results: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> bytes:
    changed = copy.deepcopy(results)
    change(changed)
    return json.dumps(changed).encode()


BAD: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda r: r.update(format=9), "format 9"),
    (lambda r: r.pop("cost"), "'cost' is missing"),
    (lambda r: r["arms"].pop("ada"), "arms.ada is missing"),
    (lambda r: r["arms"].pop("grpo_untrained_partner"), "arms.grpo_untrained_partner is missing"),
    (lambda r: r["arms"].pop("untrained"), "arms.untrained is missing"),
    (lambda r: r["arms"]["ada"]["score"].__setitem__(1, float("nan")), r"arms.ada.score\[1\]: nan"),
    (lambda r: r["arms"]["ada"]["mean"].update(value=None), "arms.ada: None is no score"),
    (lambda r: r["arms"]["ada"]["mean"].update(value=0.99), "not the mean of score"),
    (lambda r: r["arms"]["ada"]["score"].pop(), "2 values for 3 seeds"),
    (lambda r: r["arms"]["ada"]["talk"].pop("asks"), "arms.ada: KeyError 'asks'"),
    (lambda r: r["header"].pop("partial"), "header.partial"),
]


@pytest.mark.parametrize(("change", "words"), BAD)
def test_bad_results_are_refused(results: dict[str, Any], tmp_path: Path, change: Any, words: str, capsys: Any) -> None:
    path, readme = tmp_path / "results.json", tmp_path / "README.md"
    path.write_bytes(spoiled(results, change))
    readme.write_text("<!-- results:cost -->\n<!-- /results:cost -->")
    with pytest.raises(report.ResultsError, match=words) as error:
        report.load_results(path)
    assert str(path) in str(error.value)
    assert tables.main(["--results", str(path), "--readme", str(readme)]) == 2
    assert "tables.py: " in capsys.readouterr().err


def test_results_cut_short_or_absent_are_refused(results: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    with pytest.raises(report.ResultsError, match="cannot be read"):
        report.load_results(path)
    path.write_bytes(report.to_json(results)[:-100])
    with pytest.raises(report.ResultsError, match="not whole JSON"):
        report.load_results(path)
    path.write_bytes(report.to_json(results))
    assert report.load_results(path) == results


def test_readme_is_rewritten_between_its_markers(results: dict[str, Any], tmp_path: Path) -> None:
    readme, path = tmp_path / "README.md", tmp_path / "results.json"
    path.write_bytes(report.to_json(results))
    where = ["--readme", str(readme), "--results", str(path)]
    names = ("answer", "result", "deltas", "checks", "cost", "published", "climb", "learned")
    parts = [f"\n<!-- results:{name} -->\nold\n<!-- /results:{name} -->\nkept {name}\n" for name in names]
    readme.write_text("# Title\n" + "".join(parts))
    assert tables.main([*where, "--check"]) == 1 and "old" in readme.read_text()
    assert tables.main(where) == 0 and tables.main([*where, "--check"]) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n") and "\nold\n" not in text and all(f"kept {name}\n" in text for name in names)
    for name, table in tables.readme_tables(results).items():
        assert table in text
        lines = [line.replace("\\|", "") for line in table.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) == (name not in ("answer", "learned"))
    readme.write_text(text.replace("0.", "1.", 1))
    assert tables.main([*where, "--check"]) == 1
    for wrong in ("<!-- results:cost -->", "<!-- results:other -->\n<!-- /results:other -->", "<!-- /results:cost -->",
                  "<!-- results:cost -->\n<!-- results:checks -->"):  # fmt: skip
        with pytest.raises(report.ResultsError):
            tables.update_readme(wrong, results)


def test_the_readme_here_shows_the_results_here() -> None:
    words = ["--readme", "README.md", "--results", "results.json", "--benchmark", "benchmark.json"]
    here = [word if word.startswith("--") else str(ROOT / word) for word in words]
    assert tables.main([*here, "--check"]) == 0, "run: python tables.py"


def test_the_table_of_speed_shows_the_benchmark(results: dict[str, Any], tmp_path: Path) -> None:
    about = {"device": "CARD", "commit": "0123456789abcdef", "date": "2026-01-02T03:04:05Z",
             "model": {"id": "M", "loaded_as": "bfloat16"},
             "versions": {"torch": "2.11.0", "transformers": "5.17.0", "trl": "1.16.0"}}  # fmt: skip
    rows = [{"work": "a decode step", "value": 1.9349, "unit": "ms", "tokens_per_s": 16557}]
    (tmp_path / "results.json").write_bytes(report.to_json(results))
    checks = [{"command": "python tests/gpu_decode.py", "device": "CARD", "torch": "2.11.0", "date": "2026-01-03",
               "passed": 12, "failed": ["draws"], "found": {"fast - generate": "+0.005"}}]  # fmt: skip
    (tmp_path / "benchmark.json").write_text(json.dumps({"about": about, "rows": rows, "checks": checks}))
    (tmp_path / "README.md").write_text("<!-- results:speed -->\n<!-- /results:speed -->\n")
    where = [w for n in ("readme", "results", "benchmark")
             for w in (f"--{n}", str(tmp_path / {"readme": "README.md"}.get(n, f"{n}.json")))]  # fmt: skip
    assert tables.main(where) == 0
    text = (tmp_path / "README.md").read_text()
    assert "| a decode step | 1.93 ms | tokens per s 16,557 |" in text and "CARD, M, bfloat16, torch 2.11.0" in text
    assert "2026-01-02, commit 0123456789ab." in text
    last = "CARD, torch 2.11.0, 2026-01-03: 12 passed, 1 failed. fast - generate: +0.005"
    assert f"- `python tests/gpu_decode.py`, {last}" in text


@pytest.mark.parametrize("seeds", [1, 3, 5, 7])
def test_table_fits_the_terminal(results: dict[str, Any], seeds: int) -> None:
    """The longest names, verdicts and numbers there can be."""
    wide = copy.deepcopy(results)
    for arm in ("ada_mixed", "grpo12"):
        for ending in ("", report.OTHER):
            wide["arms"][arm + ending] = {**wide["arms"][f"ada{ending}"], "arm": arm}
    for row in wide["arms"].values():
        row["score"] = [0.333] * seeds
        row["minutes"] = [12345.6] * seeds if row["minutes"] else None
    for arm in ("ada_mixed", "grpo12"):
        wide["deltas"][arm] = copy.deepcopy(wide["deltas"]["ada"])
        wide["deltas"][arm]["trained_pair"]["compare"]["word"] = "moved the wrong way"
        wide["deltas"][arm]["trained_pair"]["flag"] = "x " * 100
    lines = tables.render_table(wide).splitlines()
    assert max(map(len, lines)) <= 100 and sum("moved the wrong way*" in line for line in lines) == 2


def test_table_shows_the_numbers(results: dict[str, Any]) -> None:
    lines = {line.split()[0]: line for line in tables.render_table(results).splitlines()[2:5]}
    row, other = results["arms"]["ada"], results["arms"]["ada_untrained_partner"]
    verdict = results["deltas"]["ada"]["trained_pair"]["compare"]["word"]
    for text in (f"{row['mean']['value']:.3f}±{row['mean']['half']:.3f}", " ".join(f"{s:.2f}" for s in row["score"]),
                 f"{other['mean']['value']:.3f}±", f"{np.mean(row['talk']['sends_own']):.2f}", verdict):  # fmt: skip
        assert text in lines["ada"], text
    assert lines["grpo"].endswith("baseline")


def test_a_mean_of_one_seed_stands_without_an_interval() -> None:
    one = summarize(*fake_runs.make(problems=4, steps=1, seeds=(17,), arms=("grpo",)), arms=("grpo",), seeds=(17,))
    cells = next(line for line in tables.render_table(one).splitlines() if line.startswith("grpo")).split()
    assert cells[1] == f"{one['arms']['grpo']['score'][0]:.3f}"
    assert f"| grpo | {cells[1]} | " in tables.readme_tables(one)["result"]


def test_score_of_a_finished_run_in_words(records: tuple[Any, Any], results: dict[str, Any]) -> None:
    words = report.score_text(chats_of(records[1]["ada", 17], "trained_pair"))
    assert words.startswith(f"{results['arms']['ada']['score'][0]:.3f} ± 0.") and words.endswith("(n 10 problems)")


def test_climb_and_learned_say_what_the_numbers_say() -> None:
    """Made by hand: untrained 0.10, grpo 0.30, raft 0.25; only grpo with an untrained partner."""

    def row(partner: str, value: float, sends: float, echoes: float = 0.125, copies: float = 0.0) -> dict[str, Any]:
        mean = {"value": value, "low": value - 0.05, "high": value + 0.05, "over": "seeds and problems"}
        return {
            "partner": partner,
            "mean": mean,
            "pass_at_1": [{"value": value, "low": value - 0.05, "high": value + 0.05}],
            "gain": None if partner == "untrained" else [{"value": value - 0.1, "low": value - 0.15, "high": value}],
            "seeds": [17],
            "score": [value],
            "talk": {"sends_own": [sends], "uses_partners": [0.5], "echoes": [echoes], "copies_answer": [copies]},
            "training": {"flat_early": [0.75], "flat_late": [0.5]},
        }

    arms = {
        "untrained": row("untrained", 0.1, 0.5),
        "grpo": row("trained_pair", 0.3, 0.9),
        "grpo_untrained_partner": row("untrained_partner", 0.15, 0.9),
        "raft": row("trained_pair", 0.25, 0.8),
    }
    matched = {"value": -0.05, "low": -0.09, "high": -0.01, "per_seed": [-0.05]}
    pair = {"matched": matched, "compare": {"word": "flat"}}
    results = {"arms": arms, "deltas": {"raft": {"trained_pair": pair}}, "reliability": {"words": "R."}}
    assert words.climb(results) == [
        ["0", words.CHANGES["untrained"], "0.100 [0.050, 0.150]", "–"],
        ["1", words.CHANGES["grpo"], "0.300 [0.250, 0.350]", "baseline"],
        ["2", words.CHANGES["raft"], "0.250 [0.200, 0.300]", "−0.050 [−0.090, −0.010]"],
    ]
    first, stuck, second, third = words.learned(results)
    assert stuck == (
        "Runs not shown to be better than the untrained pair (difference by problem, 95% interval): GRPO 0 of 1 and "
        "RAFT 0 of 1."
    )
    assert "from 0.10 to 0.25–0.30 (" in first and "sends 0.50 of" in first and "0.80 to 0.90 after" in first
    assert "single seeds 0.25 to 0.30" in first and "above the untrained pair's: GRPO and RAFT. A copy" in first
    assert second == (
        "With an untrained partner the trained copies score 0.15 (both answers counted): +0.05 against the untrained "
        "pair, where with each other it is +0.15 to +0.20."
    )
    assert "RAFT −0.05 [−0.09, −0.01] can be told apart from GRPO" in third and third.endswith("R.")
    assert words.learned(results)[:-1] == words.runs_show(results)

    arms |= {"mixed": row("trained_pair", 0.05, 0.5, echoes=0.5), "ada": row("trained_pair", 0.32, 0.9, copies=0.75)}
    arms["raft"]["mean"] |= {"low": None, "high": None}
    unsure = {"value": -0.25, "low": -0.6, "high": 0.1, "per_seed": [-0.3, -0.2]}
    results["deltas"]["mixed"] = {"trained_pair": {"matched": unsure, "compare": {"word": "moved the wrong way"}}}
    first, stuck, _, echo, copies, flat, side = words.runs_show(results)
    assert stuck.endswith("GRPO 0 of 1, RAFT 0 of 1, Mixed partners 1 of 1 (seed 17) and Reinforce-Ada 0 of 1.")
    assert "above the untrained pair's: GRPO and Reinforce-Ada; not so: Mixed partners." in first  # raft has none
    assert echo == (
        "Copies that repeat each other nearly word for word: mixed seed 17 (0.50 of the messages, score 0.05). "
        "Elsewhere: 0.12, score 0.25 to 0.32. Untrained: 0.12."
    )
    assert copies.startswith("B boxes what A has boxed and names no other number: ada seed 17 (0.75 of the chats, ")
    assert "GRPO's groups 0.75 are flat" in flat and flat.endswith("of Ada's, after its replays, 0.75 and 0.50.")
    assert side == (
        "Mixed partners is below GRPO with each of its 2 seeds, and `wai.compare` says moved the wrong way; our "
        "interval includes zero."
    )
    arms["grpo"]["mean"]["low"] = arms["ada"]["mean"]["low"] = 0.1
    assert "pair's: none; not so: GRPO, Mixed partners and Reinforce-Ada." in words.runs_show(results)[0]
    for seeds, where in (([0.3, 0.2], "above"), ([-0.1, 0.0], None), ([0.1, -0.2], None)):
        unsure["per_seed"] = seeds
        assert [f"is {where} GRPO" in text for text in words.runs_show(results)[6:]] == ([True] if where else [])
    assert words.runs_show({**results, "arms": {"untrained": arms["untrained"]}}) == []


def test_what_is_missing_is_gathered_by_seeds() -> None:
    header = {"partial": ["untrained is missing: no noise floor", "grpo seed 18 is missing", "ada seed 18 is missing",
                          "ada seed 19 is missing", "grpo seed 19 is missing", "raft seed 19 is missing"],
              "failed": ["mixed seed 17: stopped"]}  # fmt: skip
    assert words.gaps({"header": header}) == [
        "untrained is missing: no noise floor", "grpo and ada seeds 18 and 19 are missing", "raft seed 19 is missing",
        "mixed seed 17: stopped",
    ]  # fmt: skip


def test_the_seeds_named_are_those_that_there_are() -> None:
    base, found = fake_runs.make(problems=6, steps=2, arms=["grpo"])
    found = {name: record for name, record in found.items() if name[1] == 18}
    results = report.summarize(base, found, fake_runs.HEADER, ["grpo"], [17, 18, 19], 4.0)
    answer = tables.readme_tables(results)["answer"]
    assert "; seed 18.) Partial results: grpo seeds 17 and 19 are missing." in answer
