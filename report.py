"""What the run records say: results.json, the table in the terminal, the tables of the README.

    python report.py            rewrite the tables of README.md from results.json (--check: exit 1 if they differ)

The training seed is the unit. Every score is made again from the stored chats with the reader as it is now, never
taken from a stored verdict. Nothing here needs torch or a GPU, and the same records give the same bytes.
Sections: published numbers, reading records, statistics, summary, checks, results.json, terminal, README.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from facts import numbers_in
from grading import Grade
from records import write_whole
from recipe import (
    ARMS,
    BASELINE,
    PAPER,
    QUESTION,
    SPEAKERS,
    Chat,
    GradedChat,
    Problem,
    StepMetrics,
    Talk,
    Turn,
    grade_chat,
    private_numbers,
    talk_measures,
)

FORMAT = 1
MAX_BYTES = 60_000
# (points of a curve, characters of a message): the first that fits MAX_BYTES is used
SIZES = ((80, 800), (40, 800), (27, 600), (20, 400), (10, 200))
CHATS_SHOWN = 2
PARTNERS = ("trained_pair", "untrained_partner")
PHASES = ("load", "play", "grade", "update", "evaluate", "other", "total")
CURVES = ("reward", "flat", "sends_own", "uses_partners")
LEVEL = 0.05
# The one comparison of spreads that was planned, by the published run's "next steps"; the others are described.
PLANNED = "ada"
# Power of the test in `spread_test` where one arm's seeds vary 4 times as much as the other's, by matched seeds
# (10,000 simulated pairs of arms with normal seeds; the test file repeats it).
POWER = {3: 0.0, 5: 0.18, 7: 0.52}
POWER_AT = 4.0

Json = dict[str, Any]


class ResultsError(ValueError):
    """A results.json or README that cannot be used; the message says what is wrong and where."""


# ---------------------------------------------------------------------------------------------- published numbers


def _published(arm: str, mean: float, per_seed: list, partner: list, sends: float, uses: float, minutes: int | None, note: str | None = None) -> Json:
    return {"arm": arm, "mean": mean, "per_seed": per_seed, "partner_per_seed": partner, "sends_own": sends,
            "uses_partners": uses, "minutes": minutes, "note": note}  # fmt: skip


PUBLISHED: Json = {
    "source": "a published run of this experiment; talk measures are its first seed's, deltas pair its first seeds",
    "model": "Qwen/Qwen2.5-1.5B-Instruct",
    "hardware": "H100",
    "versions": "whileai 0.125, TRL 0.19.1, PEFT 0.16.0, transformers 4.54.0, torch 2.7.1",
    "rows": [
        _published("untrained", 0.11, [], [], 0.67, 0.30, None, "run_std 0.005 from 3 re-runs"),
        _published("grpo", 0.30, [0.40, 0.15, 0.35], [0.14, 0.10, 0.16], 0.96, 0.79, 105),
        _published("ada", 0.38, [0.40, 0.39, 0.36], [0.21, 0.19, 0.13], 0.95, 0.71, 209),
        _published("raft", 0.25, [0.31, 0.10, 0.35], [0.20, 0.09, 0.15], 0.90, 0.50, 96),
        _published("mixed", 0.31, [0.21, 0.46, 0.25], [0.15, 0.22, 0.14], 0.78, 0.49, 99),
    ],
    "deltas": {
        "ada": {"trained_pair": [0.001, -0.042, 0.043], "untrained_partner": [0.064, 0.029, 0.100], "word": "flat"},
        "raft": {"trained_pair": [-0.096, -0.141, -0.053], "untrained_partner": [0.053, 0.017, 0.093], "word": "flat"},
        "mixed": {"trained_pair": [-0.198, -0.240, -0.154], "untrained_partner": [0.004, -0.025, 0.035], "word": "flat"},
    },
    "notes": ["flat groups: 45 in 100 early, 33 late", "0 of 1,024 train rows dropped by decontamination"],
    "total_minutes": 1211,
    "dollars": 80.74,
}


# ---------------------------------------------------------------------------------------------- reading records


@dataclass(frozen=True)
class Run:
    """A record with its chats graded again. `changed` of its `graded` verdicts are not those that were stored."""

    arm: str
    seed: int | None
    name: str
    sittings: dict[str, list[tuple[GradedChat, ...]]]
    last_batch: tuple[GradedChat, ...]
    steps: tuple[StepMetrics, ...]
    seconds: dict[str, float]
    about: Json
    config: Json
    data: Json
    graded: int
    changed: int


def check_finite(value: Any, where: str) -> None:
    """Raises ResultsError naming the place of the first nan or infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ResultsError(f"{where}: {value} is not a number that can be used")
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        check_finite(item, f"{where}.{key}" if isinstance(key, str) else f"{where}[{key}]")


def read_run(record: Json, arm: str, seed: int | None) -> Run:
    """A record as typed, freshly graded chats. Raises ResultsError naming record and field."""
    name = arm if seed is None else f"{arm} seed {seed}"
    file = f"runs/{arm}.json.gz" if seed is None else f"runs/{arm}-s{seed}.json.gz"
    check_finite(record, file)
    field = "arm"
    try:
        if (record["arm"], record["seed"]) != (arm, seed):
            raise ValueError(f"holds {record['arm']!r}, seed {record['seed']!r}")
        field = "problems"
        problems = {key: Problem(key, p["question"], (tuple(p["facts"][0]), tuple(p["facts"][1])), p["gold"])
                    for key, p in record["problems"].items()}  # fmt: skip
        stored: list[bool] = []
        sittings: dict[str, list[tuple[GradedChat, ...]]] = {}
        for number, sitting in enumerate(record["evaluations"]):
            field = f"evaluations[{number}]"
            sittings.setdefault(sitting["name"], []).append(_chats(sitting["chats"], problems, stored))
        field = "evaluations"
        for needed in PARTNERS if seed is not None else ("untrained",):
            if not sittings.get(needed) or not all(sittings[needed]):
                raise ValueError(f"{needed} has no chats")
        field = "last_batch"
        last = _chats(record["last_batch"], problems, stored)
        field = "steps"
        steps = tuple(StepMetrics(**step) for step in record["steps"])
        field = "seconds, about, config or data"
        seconds = {key: float(value) for key, value in record["seconds"].items()}
        parts = {key: dict(record[key]) for key in ("about", "config", "data")}
        seconds["total"], parts["about"]["versions"], parts["about"]["device"], parts["about"]["model"], parts["data"]["fingerprint"]
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        missing = "missing " if isinstance(error, KeyError) else ""
        raise ResultsError(f"{file} ({name}), {field}: {missing}{error}") from None
    shown = [*itertools.chain.from_iterable(itertools.chain.from_iterable(sittings.values())), *last]
    verdicts = [g.correct for chat in shown for g in chat.grades]
    changed = sum(new != old for new, old in zip(verdicts, stored, strict=True))
    return Run(arm, seed, name, sittings, last, steps, seconds, **parts, graded=len(verdicts), changed=changed)


def _chats(rows: Sequence[Json], problems: Mapping[str, Problem], stored: list[bool]) -> tuple[GradedChat, ...]:
    """Chats read and graded again; their stored verdicts are appended to `stored`."""
    chats = []
    for row in rows:
        turns = tuple(Turn(**turn) for turn in row["turns"])
        if "".join(turn.speaker for turn in turns) != SPEAKERS or not all(isinstance(turn.text, str) for turn in turns):
            raise ValueError(f"problem {row['problem']}: not four messages in turn")
        stored += [Grade(**old).correct for old in row["grades"]]
        chats.append(grade_chat(Chat(problems[row["problem"]], turns)))
    return tuple(chats)


def problem_text(problem: Problem) -> str:
    return " ".join([*problem.facts[0], *problem.facts[1], problem.question])


def by_problem(chats: Iterable[GradedChat]) -> dict[str, list[GradedChat]]:
    groups: dict[str, list[GradedChat]] = {}
    for chat in chats:
        groups.setdefault(chat.chat.problem.id, []).append(chat)
    return dict(sorted(groups.items()))


def answer_rows(chats: Iterable[GradedChat]) -> list[Json]:
    """One row an answer, two a chat, with reward 0 or 1: what whileai's measures read."""
    import whileai as wai

    groups = by_problem(chats)
    return list(wai.rows(
        [problem_text(group[0].chat.problem) for group in groups.values()],
        [[turn.text for chat in group for turn in chat.chat.turns[2:]] for group in groups.values()],
        [[float(g.correct) for chat in group for g in chat.grades] for group in groups.values()],
        task_ids=list(groups),
    ))  # fmt: skip


@dataclass(frozen=True)
class Series:
    """One line of the table: an arm's chats with one partner, a set for each training seed (or re-run)."""

    arm: str
    partner: str
    seeds: tuple[int, ...]
    chats: tuple[tuple[GradedChat, ...], ...]

    @property
    def key(self) -> str:
        return f"{self.arm}_untrained_partner" if self.partner == "untrained_partner" else self.arm

    @cached_property
    def rows(self) -> list[list[Json]]:
        return [answer_rows(chats) for chats in self.chats]

    @cached_property
    def scores_SP(self) -> list[list[float]]:
        """Share of right answers by seed and problem, problems in the order of their ids."""
        return [[sum(c.reward for c in group) / len(group) for group in by_problem(chats).values()] for chats in self.chats]

    @property
    def scores(self) -> list[float]:
        return [mean(row) for row in self.scores_SP]

    @cached_property
    def talk(self) -> list[Talk]:
        return [talk_measures(chats) for chats in self.chats]


# ---------------------------------------------------------------------------------------------- statistics


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def variance(values: Sequence[float]) -> float:
    """The sample variance, over n - 1."""
    center = mean(values)
    return math.fsum((v - center) ** 2 for v in values) / (len(values) - 1)


def t_quantile(df: int) -> float:
    """Two-sided 95% quantile of Student's t."""
    import whileai as wai

    return wai.noise_band(1.0, df=df) / math.sqrt(2)


def mean_interval(scores_SP: Sequence[Sequence[float]], one_model: bool = False, bounds: tuple[float, float] = (0.0, 1.0)) -> Json:
    """A mean over seeds (rows) and problems (columns) with its 95% interval, both of them being samples.

    With y_sp = mu + a_s + b_p + e_sp (training seed, problem, sampling) the half width is
        sqrt((t(S-1) s_A / sqrt(S))^2 + (t(P-1) s_B / sqrt(P))^2)
    where s_A is the spread of the seeds' means (a_s and noise) and s_B^2 the variance of the problems' means less the
    noise in it, MSE/S, at least 0. Each part has its own t quantile and they add in quadrature (Howe 1974, JASA
    69:789); a bootstrap over 3 seeds is far too narrow, and Satterthwaite's df fell to 91% at 3 seeds. Simulated
    coverage with normal or uniform seed effects of 0 to 0.1 and 20 or 300 problems: 94 to 98% at 3 seeds, 93 to 98%
    at 5. Skewed seeds give 89%; where seeds either work or collapse, 3 seeds cannot know it (75%).

    `one_model`: rows are re-runs of one model, so only problems are a sample. With one seed there is no interval."""
    S, P = len(scores_SP), len(scores_SP[0])
    seeds, problems = [mean(row) for row in scores_SP], [mean(column) for column in zip(*scores_SP, strict=True)]
    value = mean(seeds)
    half, over, why = None, "problems" if one_model else "seeds and problems", None
    if P < 2 or (S < 2 and not one_model):
        why = "one problem: no interval" if P < 2 else "one training seed: how far seeds differ is not known"
    elif one_model:
        half = t_quantile(P - 1) * math.sqrt(variance(problems) / P)
    else:
        errors = (y - seeds[s] - problems[p] + value for s, row in enumerate(scores_SP) for p, y in enumerate(row))
        noise = math.fsum(e * e for e in errors) / ((S - 1) * (P - 1))
        from_seeds = t_quantile(S - 1) ** 2 * variance(seeds) / S
        half = math.sqrt(from_seeds + t_quantile(P - 1) ** 2 * max(variance(problems) - noise / S, 0.0) / P)
    if half is not None and half < 1e-12:
        half, why = None, "no spread at all: every problem scored the same"
    low, high = (None, None) if half is None else (max(value - half, bounds[0]), min(value + half, bounds[1]))
    return {"value": value, "low": low, "high": high, "half": half, "over": None if half is None else over,
            "n_seeds": S, "n_problems": P, "df": S - 1 if half is not None and not one_model else None, "why": why}  # fmt: skip


def spread_test(first: Sequence[float], second: Sequence[float]) -> tuple[float, int]:
    """(p, seeds an arm used) of an exact test of equal spread between two arms' seeds.

    Distances of the scores to their arm's median (Brown and Forsythe 1974, JASA 69:364), squared; p is the share of
    all ways to deal them to two arms that part the arms' sums at least as far. No distribution is assumed: an F test
    calls 35 in 100 pairs of equal arms unequal if seeds either work or collapse. An even number of seeds counts as
    one fewer (the median then is a seed, which keeps the test below its level), more than seven as seven."""
    n = min(7, min(len(first), len(second)) - 1 | 1)
    squares = []
    for scores in (first[:n], second[:n]):
        median = sorted(scores)[n // 2]
        squares += [(score - median) ** 2 for score in scores]
    total = math.fsum(squares)
    gaps = [abs(2 * math.fsum(deal) - total) for deal in itertools.combinations(squares, n)]
    return sum(gap >= gaps[0] - 1e-12 for gap in gaps) / len(gaps), n


def smallest_p(n: int) -> float:
    """The least p that `spread_test` can give: in each arm the median's own distance is always 0."""
    return min(1.0, 2 * (n + 1) / math.comb(2 * n, n))


def reliability(series: Sequence[Series]) -> Json:
    """How far an arm's seeds lie apart, and whether less far than the baseline's."""
    arms, pairs, trained = {}, [], {s.arm: s for s in series if s.partner == "trained_pair"}
    for arm, s in trained.items():
        ranked = sorted(zip(s.scores, s.seeds, strict=True))
        arms[arm] = {"seeds": len(ranked), "mean": mean(s.scores), "std": math.sqrt(variance(s.scores)) if len(ranked) > 1 else None,
                     "worst": {"seed": ranked[0][1], "score": ranked[0][0]}, "best": {"seed": ranked[-1][1], "score": ranked[-1][0]}}  # fmt: skip
    for arm, s in trained.items():
        base = trained.get(BASELINE)
        if base is None or arm == BASELINE or min(len(s.seeds), len(base.seeds)) < 2:
            continue
        p, n = spread_test(s.scores, base.scores)
        ratio = arms[arm]["std"] / arms[BASELINE]["std"] if arms[BASELINE]["std"] else None
        claim = arm == PLANNED and p <= LEVEL
        words = f"{arm}'s seeds spread {num(arms[arm]['std'])}, {BASELINE}'s {num(arms[BASELINE]['std'])}: "
        words += f"resolved (p {p:.3f})" if claim else "described, not tested" if arm != PLANNED else "not resolved"
        if arm == PLANNED and not claim:
            words += f" (p {p:.2f}; at {n} seeds it cannot fall below {smallest_p(n):.2f})"
        pairs.append({"arm": arm, "against": BASELINE, "planned": arm == PLANNED, "n": n, "std_ratio": ratio, "p": p,
                      "smallest_p": smallest_p(n), "power": POWER.get(n), "power_at": POWER_AT, "claim": claim, "words": words})  # fmt: skip
    planned = [pair for pair in pairs if pair["planned"]]
    if planned and planned[0]["power"] is not None:
        power = f"With {planned[0]['n']} seeds an arm it finds a {POWER_AT:g}-fold difference in spread {100 * planned[0]['power']:.0f} times in 100; with 7 seeds {100 * POWER[7]:.0f}."
    else:
        power = ""
    words = " ".join(filter(None, [*(f"{pair['words']}." for pair in planned), power])) or f"No comparison: {PLANNED} and {BASELINE} need two seeds each."
    test = (f"exact permutation of squared distances to the arm's median, two-sided, level {LEVEL}, matched for nothing; planned for {PLANNED} "
            f"against {BASELINE} alone, no claim is made for other pairs")  # fmt: skip
    return {"test": test, "level": LEVEL, "arms": arms, "pairs": pairs, "words": words}


# ---------------------------------------------------------------------------------------------- summary


def summarize(
    base: Json | None, runs: Mapping[tuple[str, int], Json], header: Json, wanted_arms: Sequence[str],
    wanted_seeds: Sequence[int], price: float,
) -> Json:  # fmt: skip
    """results.json from records (read and checksum-verified). Whatever is missing is left out and named in
    header.partial. Raises ResultsError for a record that cannot be used, naming it and the field."""
    order = list(dict.fromkeys([*wanted_arms, *ARMS]))
    names = sorted(runs, key=lambda name: (order.index(name[0]) if name[0] in order else len(order), *name))
    pair = None if base is None else read_run(base, "untrained", None)
    trained = [read_run(runs[arm, seed], arm, seed) for arm, seed in names]
    every = [*([pair] if pair else []), *trained]
    if not every:
        raise ResultsError("no records: nothing to summarize")
    _same_problems(every)
    series = _series(pair, trained)
    noise = _noise(series)
    deltas = _deltas(series, noise)
    results = {
        "format": FORMAT,
        "header": _header(every, header, wanted_arms, wanted_seeds),
        "arms": {s.key: _arm(s, [r for r in trained if r.arm == s.arm], pair, series) for s in series},
        "noise": noise,
        "deltas": deltas,
        "reliability": reliability(series),
        "cost": _cost(every, price),
    }
    results["checks"] = _checks(every, results, wanted_arms, wanted_seeds)
    results["published"] = PUBLISHED
    for points, characters in SIZES:
        sized = dict(results)
        sized["arms"] = {key: {**arm, "curves": [thin(curve, points) for curve in arm["curves"]]} for key, arm in results["arms"].items()}
        sized["chats"] = _example_chats(series, characters)
        sized = tidy(sized)
        if len(to_json(sized)) <= MAX_BYTES:
            break
    return sized


def _same_problems(every: Sequence[Run]) -> None:
    first = every[0]
    sizes = {run.name: {key: len(group) for key, group in by_problem(chats).items()}
             for run in every for sittings in run.sittings.values() for chats in sittings}  # fmt: skip
    for run in every:
        if run.data["fingerprint"] != first.data["fingerprint"] or sizes[run.name] != sizes[first.name]:
            raise ResultsError(f"{run.name} was evaluated on other problems than {first.name}: they cannot share a table")


def _series(pair: Run | None, trained: Sequence[Run]) -> list[Series]:
    found = []
    if pair:
        sittings = pair.sittings["untrained"]
        found.append(Series("untrained", "untrained", tuple(range(len(sittings))), tuple(sittings)))
    for arm in dict.fromkeys(run.arm for run in trained):
        runs = [run for run in trained if run.arm == arm]
        for partner in PARTNERS:
            found.append(Series(arm, partner, tuple(run.seed for run in runs), tuple(run.sittings[partner][0] for run in runs)))
    return found


def _header(every: Sequence[Run], header: Json, wanted_arms: Sequence[str], wanted_seeds: Sequence[int]) -> Json:
    have, about, config = {(run.arm, run.seed) for run in every}, every[0].about, dict(every[0].config)
    for name in ("model", "data"):  # a folder's place on some machine is nobody's business
        config[name] = Path(config[name]).name if Path(config[name]).is_absolute() else config[name]
    partial = [f"{arm} seed {seed} is missing" for arm in wanted_arms for seed in wanted_seeds if (arm, seed) not in have]
    if ("untrained", None) not in have:
        partial.insert(0, "untrained is missing: no noise floor, no lengths before training")
    elif (done := len(every[0].sittings["untrained"])) < config["base_evals"]:
        partial.append(f"untrained was evaluated {done} of {config['base_evals']} times")
    partial += [f"{run.name} has {len(run.steps)} of {run.config['steps']} steps" for run in every if run.seed is not None and len(run.steps) != run.config["steps"]]
    model = {**about["model"], "id": config["model"] if Path(about["model"]["id"]).is_absolute() else about["model"]["id"]}
    return {
        "recipe": "talk-credit", "title": "Credit assignment for two copies that talk", "paper": PAPER,
        "paper_url": "https://arxiv.org/abs/2510.04996", "question": QUESTION, **header, "partial": partial, "model": model,
        "data": {"id": config["data"], **every[0].data}, "device": about["device"], "versions": about["versions"],
        "config": config, "arms": list(wanted_arms), "seeds": list(wanted_seeds),
    }  # fmt: skip


def _arm(s: Series, runs: Sequence[Run], pair: Run | None, series: Sequence[Series]) -> Json:
    import whileai as wai

    first, fourth = [], []
    for rows in s.rows:
        found = wai.pass_at(rows, k=4)
        first.append(_with_interval(found.pass_at_1, found.ci95))
        fourth.append(_with_interval(found.pass_at_k, found.pass_at_k_ci95))
    before = next((other.talk for other in series if other.partner == "untrained"), None)
    own = s.partner == "trained_pair"
    return {
        "arm": s.arm, "partner": s.partner, "formula": ARMS[s.arm].formula if s.arm in ARMS else None,
        "unit": "re-run" if s.partner == "untrained" else "training seed", "seeds": list(s.seeds), "score": s.scores,
        "mean": mean_interval(s.scores_SP, one_model=s.partner == "untrained"), "pass_at_1": first, "pass_at_4": fourth,
        "talk": {name: [getattr(talk, name) for talk in s.talk] for name in Talk.__dataclass_fields__},
        "before": before and {name: mean(getattr(talk, name) for talk in before) for name in ("message_tokens", "answer_tokens")},
        "kinds": dict(sorted(Counter(g.kind for chats in s.chats for chat in chats for g in chat.grades).items())),
        "minutes": [r.seconds["total"] / 60 for r in runs] if own else [pair.seconds["total"] / 60] if s.partner == "untrained" and pair else None,
        "training": _training(runs) if own else None,
        "curves": [_curve(run) for run in runs] if own else [],
    }  # fmt: skip


def _with_interval(value: float | None, interval: Sequence[float] | None) -> Json:
    low, high = interval or (None, None)
    return {"value": value, "low": low, "high": high}


def _training(runs: Sequence[Run]) -> Json:
    """Flat groups in the first and the last quarter of the steps; chats drawn by the rule, kept, and thrown away."""
    found: Json = {name: [] for name in ("flat_early", "flat_late", "drawn", "kept", "thrown_away", "unchanged_steps")}
    for run in runs:
        quarter = max(1, len(run.steps) // 4)
        found["flat_early"].append(mean(m.flat for m in run.steps[:quarter]) if run.steps else None)
        found["flat_late"].append(mean(m.flat for m in run.steps[-quarter:]) if run.steps else None)
        for name in ("drawn", "kept", "thrown_away"):
            found[name].append(sum(getattr(m, name) for m in run.steps))
        found["unchanged_steps"].append(sum(m.unchanged for m in run.steps))
    return found


def _curve(run: Run) -> Json:
    return {"seed": run.seed, "step": [float(m.step + 1) for m in run.steps], **{name: [getattr(m, name) for m in run.steps] for name in CURVES}}


def thin(curve: Json, points: int) -> Json:
    """A curve of at most `points` points, each the mean of as many neighbouring steps."""
    count = len(curve["step"])
    width = max(1, math.ceil(count / points))
    thinned: Json = {"seed": curve["seed"]}
    for name in ("step", *CURVES):
        bins = [[v for v in curve[name][i : i + width] if v is not None] for i in range(0, count, width)]
        thinned[name] = [round(mean(values), 3) if values else None for values in bins]
    return thinned


def _noise(series: Sequence[Series]) -> Json | None:
    """How far an evaluation of one and the same model moves: the untrained pair's re-runs."""
    import whileai as wai

    reruns = next((s.rows for s in series if s.partner == "untrained"), [])
    if len(reruns) < 2:
        return None
    found = wai.eval_variance(*reruns)
    return {"run_std": found["run_std"], "n_runs": found["n_runs"], "means": list(found["means"].values()),
            "noise_band": found["noise_band"], "stability": found["stability"]}  # fmt: skip


def _deltas(series: Sequence[Series], noise: Json | None) -> Json:
    by_key = {(s.arm, s.partner): s for s in series}
    found: Json = {}
    for (arm, partner), after in by_key.items():
        before = by_key.get((BASELINE, partner))
        if partner == "untrained" or arm == BASELINE or before is None:
            continue
        compared, matched = compare(before, after, noise), matched_difference(before, after)
        flag, delta = None, compared["delta"]
        if delta is not None and matched["n_seeds"] > 1 and delta * matched["value"] < 0:
            flag = (f"{arm}, {partner.replace('_', ' ')}: seed {compared['seed_after']} alone says {delta:+.3f}, the mean over "
                    f"{matched['n_seeds']} seeds {matched['value']:+.3f}: the headline points against the mean")  # fmt: skip
        found.setdefault(arm, {})[partner] = {"compare": compared, "matched": matched, "flag": flag}
    return found


WORDS = {"moved": "moved", "moved_the_wrong_way": "moved the wrong way", "no_change_detected": "flat", "within_eval_noise": "flat"}


def compare(before: Series, after: Series, noise: Json | None) -> Json:
    """whileai's comparison of two arms: the first common seed's rows, and every seed's rows for the spread over seeds.
    `verdict` and `headline` are its own words; `word` is moved, moved the wrong way, flat or unresolved."""
    import whileai as wai

    shared = sorted(set(before.seeds) & set(after.seeds))
    one, other = (s.seeds.index(shared[0]) if shared else 0 for s in (before, after))
    report = wai.compare(
        before.rows[one], after.rows[other], target="pass_at_1", run_std=noise and noise["run_std"],
        run_std_runs=noise and noise["n_runs"], train_runs={"before": before.rows, "after": after.rows}, proxy=None,
    )  # fmt: skip
    word = "not comparable" if report["not_comparable"] else WORDS.get(report["target_verdict"], "unresolved")
    low, high = report["target_ci95"] or (None, None)
    train_low, train_high = report["train_ci95"] or (None, None)
    headline = str(report).splitlines()
    return {
        "verdict": report["target_verdict"], "word": word, "headline": headline[0], "seed_before": before.seeds[one],
        "seed_after": after.seeds[other], "delta": report["target_delta"], "low": low, "high": high,
        "train_delta": report["train_delta"], "train_low": train_low, "train_high": train_high, "train_seeds": report["train_runs"],
        "noise_band": report["noise_band"], "run_std": report["run_std"], "run_std_runs": report["run_std_runs"],
        "repeats": report["repeats"]["note"], "over_optimized": report["over_optimized"],
        "not_comparable": report["not_comparable"], "warnings": report["warnings"],
    }  # fmt: skip


def matched_difference(before: Series, after: Series) -> Json:
    """Our own difference: seed minus the same seed, problem minus the same problem, over all common seeds."""
    shared = sorted(set(before.seeds) & set(after.seeds))
    if not shared:
        return {"value": None, "low": None, "high": None, "half": None, "over": None, "n_seeds": 0, "n_problems": 0, "df": None,
                "why": "no training seed in common", "seeds": [], "per_seed": []}  # fmt: skip
    differences_SP = [[a - b for a, b in zip(after.scores_SP[after.seeds.index(seed)], before.scores_SP[before.seeds.index(seed)], strict=True)]
                      for seed in shared]  # fmt: skip
    return {**mean_interval(differences_SP, bounds=(-1.0, 1.0)), "seeds": shared, "per_seed": [mean(row) for row in differences_SP]}


def _cost(every: Sequence[Run], price: float) -> Json:
    minutes, chats, tokens = {}, {}, {}
    for run in every:
        spent = {"load": run.seconds.get("load", 0.0), "evaluate": run.seconds.get("evaluate", 0.0), "total": run.seconds["total"]}
        spent |= {phase: math.fsum(getattr(m, f"{phase}_seconds") for m in run.steps) for phase in ("play", "grade", "update")}
        spent["other"] = max(0.0, 2 * spent["total"] - math.fsum(spent.values()))
        evaluated = [chat for sittings in run.sittings.values() for sitting in sittings for chat in sitting]
        for table, row in (
            (minutes, {phase: spent[phase] / 60 for phase in PHASES}),
            (chats, {"training": sum(m.drawn + m.thrown_away for m in run.steps), "evaluation": len(evaluated)}),
            (tokens, {"training": sum(m.sampled_tokens for m in run.steps), "evaluation": sum(t.tokens for c in evaluated for t in c.chat.turns)}),
        ):
            old = table.setdefault(run.arm, dict.fromkeys(row, 0))
            table[run.arm] = {key: old[key] + value for key, value in row.items()}
    on_cpu = any(run.about["device"].lower().startswith("cpu") for run in every)
    total = math.fsum(row["total"] for row in minutes.values())
    return {
        "unit": "CPU minutes" if on_cpu else "GPU minutes", "device": every[0].about["device"], "price_per_hour": price,
        "minutes": minutes, "chats": chats, "tokens": tokens,
        "total": {"minutes": total, "chats": sum(sum(row.values()) for row in chats.values()),
                  "tokens": sum(sum(row.values()) for row in tokens.values()), "dollars": None if on_cpu else round(total / 60 * price, 2)},
    }  # fmt: skip


def _example_chats(series: Sequence[Series], characters: int) -> Json:
    shown = [s for s in series if s.partner != "untrained_partner"]
    names = sorted({chat.chat.problem.id for chat in shown[0].chats[0]})
    chosen = random.Random(0).sample(names, min(CHATS_SHOWN, len(names)))
    rule = f"{len(chosen)} held-out problems drawn with random.Random(0) from their sorted ids, the same for every arm; each arm's first chat on them with its first seed"
    return {"rule": rule, "arms": {s.arm: [_chat(by_problem(s.chats[0])[name][0], s.seeds[0], characters) for name in chosen] for s in shown}}


def _chat(graded: GradedChat, seed: int, characters: int) -> Json:
    problem, private, turns = graded.chat.problem, private_numbers(graded.chat.problem), []
    for i, turn in enumerate(graded.chat.turns):
        said, half, clipped = numbers_in(turn.text), characters // 2, len(turn.text) > characters
        turns.append({
            "speaker": turn.speaker, "text": f"{turn.text[:half]} [...] {turn.text[-half:]}" if clipped else turn.text,
            "tokens": turn.tokens, "truncated": turn.truncated, "clipped": clipped,
            "sent": sorted(private[i % 2] & said) if i < 2 else [], "used": sorted(private[1 - i % 2] & said) if i >= 2 else [],
        })  # fmt: skip
    return {"seed": seed, "problem": problem.id, "question": problem.question, "facts": [list(f) for f in problem.facts], "gold": problem.gold,
            "private": [sorted(numbers) for numbers in private], "turns": turns, "answers": [asdict(g) for g in graded.grades],
            "reward": graded.reward}  # fmt: skip


# ---------------------------------------------------------------------------------------------- checks


def _checks(every: Sequence[Run], results: Json, wanted_arms: Sequence[str], wanted_seeds: Sequence[int]) -> list[Json]:
    """Every check of the experiment as {check, source, result, ok}; ok None: reported, nothing to pass."""
    found: list[Json] = []

    def add(check: str, source: str, result: str, ok: bool | None) -> None:
        found.append({"check": check, "source": source, "result": result, "ok": ok})

    noise, data, header = results["noise"], every[0].data, results["header"]
    text = f"run_std {noise['run_std']:.4f} from {noise['n_runs']} evaluations of the untrained pair" if noise else "fewer than two evaluations of the untrained pair"
    add("eval noise", "wai.eval_variance", text, bool(noise) and noise["n_runs"] >= 3)
    dropped = data.get("decontaminate_dropped")
    used = data.get("train_used")
    text = "not recorded" if dropped is None else f"{dropped} of {dropped + used} training problems dropped for overlap with the held-out ones"
    add("clean holdout", "wai.decontaminate", text, dropped is not None)
    graded, changed = sum(run.graded for run in every), sum(run.changed for run in every)
    add("reward is a program", "grading.grade", "the boxed answer is read and compared with the gold answer; the same reader grades training and evaluation", True)
    names = ", ".join(run.name for run in every if run.changed)
    add("graded again", "grading.grade on the stored chats", f"{changed} of {graded} verdicts changed" + (f" ({names})" if names else ""), changed == 0)
    compared = [both[partner]["compare"] for both in results["deltas"].values() for partner in both]
    over = sum(c["over_optimized"] for c in compared)
    add("proxy vs target", "wai.compare, proxy=None", f"the training reward is the target; over_optimized in {over} of {len(compared)} comparisons", not over)
    add("reused from the cache", "run records", ", ".join(header.get("reused") or []) or "nothing", None)
    for key, arm in results["arms"].items():
        if arm["partner"] == "trained_pair":
            add(f"length, {key}", "stored chats", _length_words(arm, results["arms"].get("untrained")), None)
    for arm in dict.fromkeys(run.arm for run in every if run.seed is not None):
        add(f"hack scan, {arm}", "wai.hack_scan on the last training batch of every seed", *hack_words([r for r in every if r.arm == arm]))
    have = {arm: [run.seed for run in every if run.arm == arm] for arm in dict.fromkeys([*wanted_arms, *(r.arm for r in every if r.seed is not None)])}
    text = "; ".join(f"{arm} {', '.join(map(str, seeds)) or 'none'}" for arm, seeds in have.items())
    add("training seeds", "run records", text, all(set(wanted_seeds) <= set(have[arm]) for arm in wanted_arms) and len(set(wanted_seeds)) > 1)
    add("pinned versions", "run records", ", ".join(f"{k} {v}" for k, v in header["versions"].items()), not _mixed(every, "versions"))
    model, commit = header["model"], header.get("commit")
    text = f"{model['id']}, revision {model.get('revision')}, {model.get('loaded_as')}; {header['device']}; commit {(commit or 'unknown')[:12]}"
    text += {True: "", False: ", with changes that are not committed", None: ", not known whether clean"}[header.get("clean")]
    add("model, device, commit", "run records, git", text, bool(commit) and header.get("clean") is True)
    mixed = [sentence for part in ("device", "commit", "clean", "model") if (sentence := _mixed(every, part))]
    add("one machine, one commit", "run records", "; ".join(mixed) or "all records agree", not mixed)
    add("chats drawn", "run records", _budget_words(results), None)
    return found


def _length_words(arm: Json, untrained: Json | None) -> str:
    def side(of: Json | None) -> dict[str, float | None]:
        return {name: average(of["talk"][name]) if of else None for name in ("message_tokens", "answer_tokens", "truncated", "no_box")}

    before, after = side(untrained), side(arm)
    return (f"message {num(before['message_tokens'], 0)} to {num(after['message_tokens'], 0)} tokens, answer {num(before['answer_tokens'], 0)} to "
            f"{num(after['answer_tokens'], 0)}; truncated {num(before['truncated'])} to {num(after['truncated'])}, no box {num(before['no_box'])} to {num(after['no_box'])}")  # fmt: skip


def hack_words(runs: Sequence[Run]) -> tuple[str, bool | None]:
    """whileai's scan of each seed's last batch: does the reward pay for talk and a boxed answer, or for a shortcut?
    ok is None where a scan could not tell."""
    import whileai as wai

    parts, regimes = [], set()
    for run in runs:
        groups = by_problem(run.last_batch)
        marks = [[{**{name: value for name in ("sends_own", "uses_partners") if (value := getattr(talk, name)) == value}, "boxed": 1 - talk.no_box}
                  for talk in (talk_measures([chat]) for chat in group)] for group in groups.values()]  # fmt: skip
        # the scan groups by prompt, so the prompt must tell problems apart: the question alone may not
        rows = wai.rows(
            [problem_text(group[0].chat.problem) for group in groups.values()],
            [["\n".join(turn.text for turn in chat.chat.turns if turn.trained) for chat in group] for group in groups.values()],
            [[chat.reward for chat in group] for group in groups.values()], task_ids=list(groups), markers=marks,
        )  # fmt: skip
        scan = wai.hack_scan(rows, endorsed=("marker:sends_own", "marker:uses_partners", "marker:boxed"))
        regimes.add(scan["regime"])
        floor = "" if scan["tau"] is None else f" (strongest {scan['top_feature'] or 'none'} {scan['rho_max']:.2f}, floor {scan['tau']:.2f})"
        parts.append(f"{run.seed}: {scan['regime']}{floor}")
    return "; ".join(parts), False if "reward_hack" in regimes else None if regimes & {"unknown", "degenerate"} else True


def _mixed(every: Sequence[Run], part: str) -> str:
    """"" if all records agree in a part of where they come from, else who has what."""
    holders: dict[str, list[str]] = {}
    for run in every:
        holders.setdefault(json.dumps(run.about.get(part), sort_keys=True), []).append(run.name)
    return "" if len(holders) == 1 else f"{part}: " + ", ".join(f"{value} ({', '.join(names)})" for value, names in holders.items())


def _budget_words(results: Json) -> str:
    drawn = {key: average(arm["training"]["drawn"]) for key, arm in results["arms"].items() if arm["training"]}
    base = drawn.get(BASELINE)
    parts = [f"{arm} {count:.0f}" + (f" ({count / base:.2f} x {BASELINE})" if base and arm != BASELINE else "") for arm, count in drawn.items()]
    return f"chats a seed: {', '.join(parts)}" if parts else "no training"


# ---------------------------------------------------------------------------------------------- results.json


def tidy(value: Any) -> Any:
    """Floats with 4 decimals; nan (there was nothing to count) becomes None."""
    if isinstance(value, float):
        return round(value, 4) + 0.0 if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: tidy(item) for key, item in value.items()}
    return [tidy(item) for item in value] if isinstance(value, list | tuple) else value


def to_json(results: Json) -> bytes:
    """The bytes of results.json: one line for each part of a part, so that a difference can be read."""

    def lines(value: Any, depth: int) -> str:
        if not (depth and isinstance(value, dict) and value):
            return json.dumps(value, separators=(",", ":"), allow_nan=False)
        return "{\n" + ",\n".join(f"{json.dumps(key)}:{lines(item, depth - 1)}" for key, item in value.items()) + "\n}"

    return lines(results, 2).encode() + b"\n"


PARTS = {"header": dict, "arms": dict, "deltas": dict, "reliability": dict, "cost": dict, "checks": list, "chats": dict, "published": dict}
ARM_LISTS = ("score", "pass_at_1", "pass_at_4")


def load_results(path: Path) -> Json:
    """results.json, checked. Raises ResultsError saying what is wrong and where."""
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"{path} cannot be read ({error.strerror}): python recipe.py writes it") from None
    except ValueError as error:
        raise ResultsError(f"{path} is not whole JSON ({error}): write it again with python recipe.py --reuse") from None
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        found = results.get("format") if isinstance(results, dict) else type(results).__name__
        raise ResultsError(f"{path}: format {found!r}, this version reads {FORMAT}: write it again with python recipe.py --reuse")
    check_finite(results, str(path))
    for part, kind in PARTS.items():
        if not isinstance(results.get(part), kind):
            raise ResultsError(f"{path}: the part {part!r} is missing or no {kind.__name__}")
    header = results["header"]
    for name in ("arms", "seeds", "partial", "failed", "model", "data", "config", "versions"):
        if name not in header:
            raise ResultsError(f"{path}: header.{name} is missing")
    for arm in ["untrained", *(name for arm in header["arms"] for name in (arm, f"{arm}_untrained_partner"))]:
        plain = arm.removesuffix("_untrained_partner")
        if arm in results["arms"]:
            _check_arm(results["arms"][arm], f"{path}: arms.{arm}")
        elif not any(sentence.startswith(f"{plain} ") for sentence in header["partial"]):
            raise ResultsError(f"{path}: arms.{arm} is missing, and header.partial does not say so")
    return results


def _check_arm(row: Json, where: str) -> None:
    try:
        seeds = row["seeds"]
        for name in ARM_LISTS:
            if len(row[name]) != len(seeds):
                raise ResultsError(f"{where}.{name}: {len(row[name])} values for {len(seeds)} seeds")
        for name in Talk.__dataclass_fields__:
            if len(row["talk"][name]) != len(seeds):
                raise ResultsError(f"{where}.talk.{name}: {len(row['talk'][name])} values for {len(seeds)} seeds")
        for i, score in enumerate([row["mean"]["value"], *row["score"]]):
            if not isinstance(score, int | float) or not 0 <= score <= 1:
                raise ResultsError(f"{where}.{f'score[{i - 1}]' if i else 'mean.value'}: {score!r} is no score")
        if abs(mean(row["score"]) - row["mean"]["value"]) > 2e-4:
            raise ResultsError(f"{where}: mean.value {row['mean']['value']} is not the mean of score")
    except (KeyError, TypeError) as error:
        raise ResultsError(f"{where}: {error} is missing or of another kind") from None


def score_text(chats: Sequence[Json]) -> str:
    """A score with its 95% interval over problems and its n, from the chats of a record as they were graded."""
    groups: dict[str, list[float]] = {}
    for chat in chats:
        groups.setdefault(chat["problem"], []).extend(float(g["correct"]) for g in chat["grades"])
    found = mean_interval([[mean(group) for group in groups.values()]], one_model=True)
    return f"{num(found['value'], 3)} ± {num(found['half'], 3)} (n {len(groups)} problems)"


# ---------------------------------------------------------------------------------------------- terminal

WIDTH = 100
DASH = "–"


def num(value: float | None, digits: int = 2, sign: bool = False) -> str:
    if value is None or not math.isfinite(value):
        return DASH
    return f"{round(value, digits) + 0.0:{'+' if sign else ''},.{digits}f}"


def average(values: Sequence[float | None] | None) -> float | None:
    known = [v for v in values or [] if v is not None]
    return mean(known) if known else None


def plus_minus(interval: Json | None) -> str:
    return DASH if not interval else f"{num(interval['value'], 3)}±{num(interval['half'], 3)}"


def bracket(found: Json, low: str = "low", high: str = "high", value: str = "value") -> str:
    span = "" if found[low] is None else f" [{num(found[low], 3, True)}, {num(found[high], 3, True)}]"
    return num(found[value], 3, True) + span


def _table_cells(results: Json) -> list[list[str]]:
    """method, mean, per seed, untrained partner, sends own, uses partner's, minutes, verdict; one row an arm."""
    rows = []
    for arm in dict.fromkeys(["untrained", *results["header"]["arms"], *(row["arm"] for row in results["arms"].values())]):
        row, other = results["arms"].get(arm), results["arms"].get(f"{arm}_untrained_partner")
        delta = results["deltas"].get(arm, {}).get("trained_pair")
        verdict = "baseline" if arm == BASELINE and row else DASH if not delta else delta["compare"]["word"] + "*" * bool(delta["flag"])
        seeds = " ".join(num(score) for score in row["score"]) if row else DASH
        if row and len(row["score"]) > 5:
            seeds = f"{num(min(row['score']))} to {num(max(row['score']))} ({len(row['score'])})"
        talk = row["talk"] if row else {}
        rows.append([arm, plus_minus(row and row["mean"]), seeds, plus_minus(other and other["mean"]), num(average(talk.get("sends_own"))),
                     num(average(talk.get("uses_partners"))), num(average(row["minutes"]), 1) if row else DASH, verdict])  # fmt: skip
    return rows


def render_table(results: Json) -> str:
    """The table in the terminal, at most 100 columns, and what it says in words."""
    unit = results["cost"]["unit"].split()[0]
    heads = ["method", "team solves", "a seed", "untr. partner", "sends", "uses", f"{unit} min", f"against {BASELINE}"]
    rows = _table_cells(results)
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()[:WIDTH] for row in [heads, *rows]]
    lines.insert(1, "-" * min(WIDTH, max(map(len, lines))))
    for sentence in in_words(results):
        lines += textwrap.wrap(sentence, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def in_words(results: Json) -> list[str]:
    """What the table says and what it does not: n and noise, differences resolved, flags, reliability, gaps."""
    noise, first = results["noise"], next(iter(results["arms"].values()))
    floor = f"one model evaluated again moves by {num(noise['run_std'], 3)} (std of {noise['n_runs']} re-runs)" if noise else "the noise of an evaluation was not measured"
    seeds = max((len(row["seeds"]) for row in results["arms"].values() if row["partner"] == "trained_pair"), default=0)
    sentences = [f"± is half a 95% interval over training seeds and problems (untrained: problems). n: {first['mean']['n_problems']} problems, "
                 f"{seeds} seed{'s' * (seeds != 1)}; {floor}."]  # fmt: skip
    for partner in PARTNERS:
        matched = {arm: both[partner]["matched"] for arm, both in results["deltas"].items() if partner in both}
        known = [f"{arm} {bracket(m)}" + ("" if m["low"] is None else ", resolved" if m["low"] * m["high"] > 0 else ", not resolved") for arm, m in matched.items() if m["value"] is not None]
        if known:
            sentences.append(f"Over matched seeds against {BASELINE}, {partner.replace('_', ' ')}: {'; '.join(known)}.")
    sentences += [f"* {delta['flag']}." for both in results["deltas"].values() for delta in both.values() if delta["flag"]]
    sentences.append(results["reliability"]["words"])
    gaps = [*results["header"]["partial"], *results["header"]["failed"]]
    return [*sentences, *([f"Partial: {'; '.join(gaps)}."] if gaps else [])]


# ---------------------------------------------------------------------------------------------- README


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [list(heads), ["---"] * len(heads), *cells])


def readme_tables(results: Json) -> dict[str, str]:
    """The README's tables by the name of their markers."""
    makers: dict[str, Callable[[Json], str]] = {
        "result": _result_table, "deltas": _delta_table, "checks": _check_table, "cost": _cost_table, "published": _published_table,
    }  # fmt: skip
    return {name: make(results) for name, make in makers.items()}


def _result_table(results: Json) -> str:
    heads = ["method", "team solves it, mean ± 95%", "a seed", "with an untrained partner", "sends own facts", "uses partner's",
             f"{results['cost']['unit']} a seed", f"against {BASELINE}"]  # fmt: skip
    head = results["header"]
    where = f"{head['model']['id']} on {head['device']}, seeds {', '.join(map(str, head['seeds']))}, commit {(head.get('commit') or 'unknown')[:12]}."
    return f"{markdown(heads, _table_cells(results))}\n\n{where} " + " ".join(sentence.replace("* ", "\\* ", 1) for sentence in in_words(results))


def _delta_table(results: Json) -> str:
    rows = []
    for arm, both in results["deltas"].items():
        for partner, delta in both.items():
            c, m = delta["compare"], delta["matched"]
            rows.append([arm, partner.replace("_", " "), f"seed {c['seed_after']}: {bracket(c, value='delta')}", bracket(c, "train_low", "train_high", "train_delta"),
                         f"{c['word']} (`{c['verdict']}`)", bracket(m), delta["flag"] or ""])  # fmt: skip
    heads = ["method", "partner", "`wai.compare`, one seed", "`wai.compare`, over seeds", "its verdict", "ours, matched seeds and problems", "mind"]
    return markdown(heads, rows) if rows else f"No deltas: {BASELINE} or the other arms are missing."


def _check_table(results: Json) -> str:
    marks = {True: "yes", False: "**no**", None: "reported"}
    return markdown(["check", "source", "result", "passed"], [[c["check"], c["source"], c["result"], marks[c["ok"]]] for c in results["checks"]])


def _cost_table(results: Json) -> str:
    cost = results["cost"]
    rows = [[arm, *(num(row[phase], 1) for phase in PHASES), num(cost["chats"][arm]["training"], 0), num(cost["chats"][arm]["evaluation"], 0),
             num(sum(cost["tokens"][arm].values()) / 1e6, 2)] for arm, row in cost["minutes"].items()]  # fmt: skip
    total = cost["total"]
    dollars = "no card was used" if total["dollars"] is None else f"${num(total['dollars'])} at ${num(cost['price_per_hour'])} an hour"
    words = f"{cost['unit']} over all seeds, on {cost['device']}. Together {num(total['minutes'], 1)} minutes, {num(total['chats'], 0)} chats, {num(total['tokens'], 0)} tokens; {dollars}."
    return markdown(["method", *PHASES, "training chats", "evaluation chats", "million tokens"], rows) + f"\n\n{words}"


def _published_table(results: Json) -> str:
    published, head, rows = results["published"], results["header"], []
    for row in published["rows"]:
        ours = results["arms"].get(row["arm"])
        other = results["arms"].get(f"{row['arm']}_untrained_partner")
        per_seed = " / ".join(map(num, row["per_seed"])) or row["note"] or DASH
        rows.append([row["arm"], num(row["mean"]), per_seed, " / ".join(map(num, row["partner_per_seed"])) or DASH, num(row["sends_own"]), num(row["uses_partners"]),
                     num(row["minutes"], 0), plus_minus(ours and ours["mean"]), " / ".join(map(num, ours["score"])) if ours else DASH,
                     plus_minus(other and other["mean"])])  # fmt: skip
    heads = ["method", "published: team solves it", "a seed", "untrained partner", "sends own", "uses partner's", "minutes", "ours: team solves it", "a seed", "untrained partner"]
    words = (f"Published: {published['model']} on {published['hardware']} ({published['versions']}), {num(published['total_minutes'], 0)} GPU minutes, "
             f"${num(published['dollars'])}; {'; '.join(published['notes'])}. Ours: {head['model']['id']} on {head['device']}.")  # fmt: skip
    return f"{markdown(heads, rows)}\n\n{words}"


MARKER = re.compile(r"<!-- (/?)results:(\w+) -->")


def update_readme(text: str, results: Json) -> str:
    """The text with what stands between `<!-- results:NAME -->` and `<!-- /results:NAME -->` made anew."""
    tables, out, end, opened = readme_tables(results), [], 0, None
    for mark in MARKER.finditer(text):
        closing, name = mark[1] == "/", mark[2]
        if name not in tables or closing != (opened is not None) or (closing and name != opened):
            raise ResultsError(f"the marker {mark[0]} in line {text.count(chr(10), 0, mark.start()) + 1} does not fit: {', '.join(tables)}, each opened and closed")
        out.append(f"\n{tables[name]}\n{mark[0]}" if closing else text[end : mark.end()])
        end, opened = mark.end(), None if closing else name
    if opened:
        raise ResultsError(f"<!-- results:{opened} --> is never closed")
    return "".join([*out, text[end:]])


def main(argv: Sequence[str] | None = None) -> int:
    words = argparse.ArgumentParser(prog="report.py", description="Write the tables of the README from results.json.")
    words.add_argument("--readme", type=Path, default=Path("README.md"))
    words.add_argument("--results", type=Path, default=Path("results.json"))
    words.add_argument("--check", action="store_true", help="change nothing; exit 1 if the tables are not those of the results")
    given = words.parse_args(argv)
    try:
        old = given.readme.read_text(encoding="utf-8")
        new = update_readme(old, load_results(given.results))
    except (ResultsError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    if given.check:
        print(f"{given.readme} {'is as' if old == new else 'differs from'} {given.results}")
        return int(old != new)
    write_whole(given.readme, new.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
