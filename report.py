"""What the run records say, as results.json; tables.py shows it.

The training seed is the unit. Every score is made again from the stored chats with the reader as it is now, never
taken from a stored verdict. Nothing here needs torch or a GPU, and the same records give the same bytes.
Sections: published numbers, reading records, statistics, summary, checks, results.json.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import multiprocessing
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from facts import numbers_in
from recipe import (
    ARMS,
    BASELINE,
    PAPER,
    QUESTION,
    SPEAKERS,
    GradedChat,
    Problem,
    StepMetrics,
    chat_from_json,
    grade_chat,
    problems_from_json,
)
from records import record_name, run_label
from talk import Talk, private_numbers, talk_measures
from words import PARTNERS, Json, listed, mean_of

FORMAT = 3
MAX_BYTES = 60_000
# (points of a curve, characters of a message): the first that fits MAX_BYTES is used
SIZES = ((80, 800), (40, 800), (27, 600), (20, 400), (10, 200))
CHATS_SHOWN = 2
OTHER = "_untrained_partner"  # what the name of an arm's second line ends in
PHASES = ("load", "play", "grade", "update", "evaluate", "other", "total")
CURVES = ("reward", "flat", "sends_own", "uses_partners")
LEVEL = 0.05
# The one comparison of spreads that was planned, by the published run's "next steps"; the others are described.
PLANNED = "ada"
# Power of `spread_test` by seeds an arm, where the other arm's seeds spread 4 times as far (simulated, normal seeds).
POWER = {3: 0.0, 5: 0.32, 7: 0.71}
POWER_AT = 4

DASH = "–"


class ResultsError(ValueError):
    """A results.json or README that cannot be used; the message says what is wrong and where."""


def num(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """A number as the tables print it; a dash where there was nothing to measure."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{round(value, digits) + 0.0:{'+' if sign else ''},.{digits}f}"


# ---------------------------------------------------------------------------------------------- published numbers


_COLUMNS = ("arm", "mean", "per_seed", "partner_per_seed", "sends_own", "uses_partners", "minutes", "note")
PUBLISHED: Json = {
    "source": "a published run of this experiment; talk measures are its first seed's, deltas pair its first seeds",
    "model": "Qwen/Qwen2.5-1.5B-Instruct",
    "hardware": "H100",
    "versions": "whileai 0.125, TRL 0.19.1, PEFT 0.16.0, transformers 4.54.0, torch 2.7.1",
    "rows": [dict(zip(_COLUMNS, row, strict=True)) for row in (
        ("untrained", 0.11, [], [], 0.67, 0.30, None, "run_std 0.005 from 3 re-runs"),
        ("grpo", 0.30, [0.40, 0.15, 0.35], [0.14, 0.10, 0.16], 0.96, 0.79, 105, None),
        ("ada", 0.38, [0.40, 0.39, 0.36], [0.21, 0.19, 0.13], 0.95, 0.71, 209, None),
        ("raft", 0.25, [0.31, 0.10, 0.35], [0.20, 0.09, 0.15], 0.90, 0.50, 96, None),
        ("mixed", 0.31, [0.21, 0.46, 0.25], [0.15, 0.22, 0.14], 0.78, 0.49, 99, None),
    )],
    "deltas": {arm: {"trained_pair": pair, "untrained_partner": other, "word": "flat"} for arm, pair, other in (
        ("ada", [0.001, -0.042, 0.043], [0.064, 0.029, 0.100]),
        ("raft", [-0.096, -0.141, -0.053], [0.053, 0.017, 0.093]),
        ("mixed", [-0.198, -0.240, -0.154], [0.004, -0.025, 0.035]),
    )},
    "notes": ["flat groups: 45 in 100 early, 33 late", "0 of 1,024 train rows dropped by decontamination"],
    "total_minutes": 1211,
    "dollars": 80.74,
}  # fmt: skip


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
    key: Json
    graded: int
    changed: int

    @property
    def processes(self) -> int:
        """How many made it side by side, each with a card of its own: its minutes count so often."""
        return self.about.get("processes", 1)


def check_finite(value: Any, where: str) -> None:
    """Raises ResultsError naming the place of the first nan or infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ResultsError(f"{where}: {value} is not a number that can be used")
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        check_finite(item, f"{where}.{key}" if isinstance(key, str) else f"{where}[{key}]")


def read_run(record: Json, arm: str, seed: int | None) -> Run:
    """A record as typed, freshly graded chats. Raises ResultsError naming record and field."""
    name, file = run_label(arm, seed), f"runs/{record_name(arm, seed)}"
    check_finite(record, file)
    field = "arm"
    try:
        if (record["arm"], record["seed"]) != (arm, seed):
            raise ValueError(f"holds {record['arm']!r}, seed {record['seed']!r}")
        field = "problems"
        problems = problems_from_json(record["problems"])
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
        field = "seconds, about, config, data or key"
        seconds = {key: float(value) for key, value in record["seconds"].items()}
        parts = {key: dict(record[key]) for key in ("about", "config", "data", "key")}
        for part, needed in ((seconds, "total"), (parts["data"], "fingerprint"), (parts["config"], "steps"),
                             *((parts["about"], name) for name in ("versions", "device", "model"))):  # fmt: skip
            part[needed]  # a KeyError names what is missing
        about, field = parts["about"], "about or key"
        if not (isinstance(about["device"], str) and type(about.get("processes", 1)) is int and parts["key"]):
            raise ValueError("device is a text, processes a whole number, and key is not empty")
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
        old = chat_from_json(row, problems)
        turns = old.chat.turns
        if "".join(turn.speaker for turn in turns) != SPEAKERS or not all(isinstance(turn.text, str) for turn in turns):
            raise ValueError(f"problem {row['problem']}: not four messages in turn")
        stored += [grade.correct for grade in old.grades]
        chats.append(grade_chat(old.chat))
    return tuple(chats)


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
        [group[0].chat.problem.text for group in groups.values()],
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
        return self.arm + OTHER * (self.partner == "untrained_partner")

    @cached_property
    def rows(self) -> list[list[Json]]:
        return [answer_rows(chats) for chats in self.chats]

    @cached_property
    def scores_SP(self) -> list[list[float]]:
        """Share of right answers by seed and problem, problems in the order of their ids."""
        return [[mean(c.reward for c in group) for group in by_problem(chats).values()] for chats in self.chats]

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


def mean_interval(scores_SP: Sequence[Sequence[float]], one_model: bool = False, least: float = 0.0) -> Json:
    """A mean over seeds (rows) and problems (columns) with its 95% interval, both of them being samples.

    With y_sp = mu + a_s + b_p + e_sp (training seed, problem, sampling) the half width is
        sqrt((t(S-1) s_A / sqrt(S))^2 + (t(P-1) s_B / sqrt(P))^2)
    where s_A is the spread of the seeds' means (a_s and noise) and s_B^2 the variance of the problems' means less the
    noise in it, MSE/S, at least 0. Each part has its own t quantile and they add in quadrature (Howe 1974, JASA
    69:789); a bootstrap over 3 seeds is far too narrow, and Satterthwaite's df fell to 91% at 3 seeds. Simulated
    coverage with normal or uniform seed effects of 0 to 0.1 and 20 or 300 problems: 94 to 98% at 3 seeds, 93 to 98%
    at 5. Skewed seeds give 89%; where seeds either learn or fail it is 73 to 83% at 3 and 76 to 95% at 5.

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
    low, high = (None, None) if half is None else (max(value - half, least), min(value + half, 1.0))
    return {"value": value, "low": low, "high": high, "half": half, "over": None if half is None else over,
            "n_seeds": S, "n_problems": P, "why": why}  # fmt: skip


def spread_test(first: Sequence[float], second: Sequence[float]) -> tuple[float, int]:
    """(p, seeds an arm used) of a one-sided permutation test that the first arm's seeds spread less than the second's.

    Distances of the scores to their arm's median (Brown and Forsythe 1974, JASA 69:364); p is the share of all ways
    to deal the distances to two arms that leave the first with as small a sum. Simulated false alarms at level 5%:
    none at 3 seeds, up to 3% at 5 and 4.5% at 7, with normal, heavy-tailed, skewed and two-valued seeds alike; an F
    test has 35% where seeds either work or collapse. An even number of seeds counts as one fewer (the median must be
    a seed, or the level is exceeded), more than seven as seven."""
    n = min(7, (min(len(first), len(second)) - 1) | 1)
    distances = []
    for scores in (first[:n], second[:n]):
        median = sorted(scores)[n // 2]
        distances += [abs(score - median) for score in scores]
    sums = [math.fsum(deal) for deal in itertools.combinations(distances, n)]  # the first is the deal as it was
    return sum(total <= sums[0] + 1e-12 for total in sums) / len(sums), n


def smallest_p(n: int) -> float:
    """The least p that `spread_test` can give: the median's own distance is 0 in both arms."""
    return (n + 1) / math.comb(2 * n, n)


def reliability(series: Sequence[Series]) -> Json:
    """How far an arm's seeds lie apart, and whether less far than the baseline's."""
    arms, pairs, trained = {}, [], {s.arm: s for s in series if s.partner == "trained_pair"}
    for arm, s in trained.items():
        ranked = sorted(zip(s.scores, s.seeds, strict=True))
        std = math.sqrt(variance(s.scores)) if len(ranked) > 1 else None
        ends = {name: dict(zip(("score", "seed"), ranked[i], strict=True)) for name, i in (("worst", 0), ("best", -1))}
        arms[arm] = {"seeds": len(ranked), "mean": mean(s.scores), "std": std, **ends}
    base = trained.get(BASELINE)
    for arm, s in trained.items():
        if base is None or arm == BASELINE or min(len(s.seeds), len(base.seeds)) < 3:
            continue
        (p, n), spread, other = spread_test(s.scores, base.scores), arms[arm]["std"], arms[BASELINE]["std"]
        claim = arm == PLANNED and p <= LEVEL
        words = f"{arm}'s seeds have a standard deviation of {num(spread, 3)}, {BASELINE}'s of {num(other, 3)}: "
        least = smallest_p(n)
        tested = f"the difference is {'resolved' if claim else 'not resolved'} (one-sided p {p:.2f}; "
        tested += f"with {n} seeds it is at least {least:.2f})"
        words += tested if arm == PLANNED else "described, not tested"
        pairs.append({
            "arm": arm, "against": BASELINE, "planned": arm == PLANNED, "n": n, "p": p, "smallest_p": least,
            "std_ratio": spread / other if other else None, "power": POWER.get(n), "power_at": POWER_AT,
            "claim": claim, "words": words,
        })  # fmt: skip
    test = (f"one-sided permutation test of the distances to the arm's median, level {LEVEL}; planned for "
            f"{PLANNED} against {BASELINE} alone, of other pairs nothing is claimed")  # fmt: skip
    planned = next((pair for pair in pairs if pair["planned"]), None)
    words = f"No test of reliability: {PLANNED} and {BASELINE} need three seeds each."
    if planned:
        powers = ", ".join(f"{100 * power:.0f} with {seeds} seeds" for seeds, power in POWER.items())
        words = f"{planned['words']}. A {POWER_AT}-fold one is found so often in 100: {powers}."
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
        "arms": dict(together([partial(_keyed_arm, s, trained, pair, series) for s in series])),
        "noise": noise,
        "deltas": deltas,
        "reliability": reliability(series),
        "cost": _cost(every, price),
    }
    results["checks"] = _checks(every, results, wanted_arms, wanted_seeds)
    results["published"] = PUBLISHED
    for points, characters in SIZES:
        sized = dict(results)
        sized["arms"] = {key: {**arm, "curves": [thin(curve, points) for curve in arm["curves"]]}
                         for key, arm in results["arms"].items()}  # fmt: skip
        sized["chats"] = _example_chats(series, characters)
        sized = tidy(sized)
        if len(to_json(sized)) <= MAX_BYTES:
            break
    return sized


def unreadable(records: Mapping[tuple[str, int | None], Json]) -> dict[tuple[str, int | None], str]:
    """The records that cannot be used, each with what is wrong with it."""
    wrong = {}
    for (arm, seed), record in records.items():
        try:
            read_run(record, arm, seed)
        except ResultsError as error:
            wrong[arm, seed] = str(error)
    return wrong


def together(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of independent tasks, in order, worked on by all cores: whileai's intervals resample in plain
    Python, minutes of it. Where a process cannot be forked (outside Linux), one after the other."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    if cores == 1 or len(tasks) < 2:
        return [task() for task in tasks]
    with multiprocessing.get_context("fork").Pool(min(cores, len(tasks)), _hold, (tasks,)) as pool:
        return pool.map(_work, range(len(tasks)), chunksize=1)


_tasks: Sequence[Callable[[], Any]] = ()  # in a forked worker: what it may be asked for


def _hold(tasks: Sequence[Callable[[], Any]]) -> None:
    global _tasks
    _tasks = tasks
    # a killed parent takes its workers along: they hold its lock on the output folder (1 is PR_SET_PDEATHSIG)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # how the parent ends it


def _work(number: int) -> Any:
    return _tasks[number]()


def _keyed_arm(s: Series, trained: Sequence[Run], pair: Run | None, series: Sequence[Series]) -> tuple[str, Json]:
    return s.key, _arm(s, [r for r in trained if r.arm == s.arm], pair, series)


def _same_problems(every: Sequence[Run]) -> None:
    first = every[0]
    asked = Counter(chat.chat.problem.id for chat in next(iter(first.sittings.values()))[0])
    for run in every:
        for sitting in itertools.chain.from_iterable(run.sittings.values()):
            same = Counter(chat.chat.problem.id for chat in sitting) == asked
            if not same or run.data["fingerprint"] != first.data["fingerprint"]:
                raise ResultsError(f"{run.name} was evaluated on other problems than {first.name}: not one table")


def _series(pair: Run | None, trained: Sequence[Run]) -> list[Series]:
    found = []
    if pair:
        sittings = pair.sittings["untrained"]
        found.append(Series("untrained", "untrained", tuple(range(len(sittings))), tuple(sittings)))
    for arm in dict.fromkeys(run.arm for run in trained):
        runs = [run for run in trained if run.arm == arm]
        for partner in PARTNERS:
            chats = tuple(run.sittings[partner][0] for run in runs)
            found.append(Series(arm, partner, tuple(run.seed for run in runs), chats))
    return found


def _partial(every: Sequence[Run], wanted_arms: Sequence[str], wanted_seeds: Sequence[int]) -> list[str]:
    """A sentence on everything that was asked for and is not there; each begins with the arm."""
    have = {(run.arm, run.seed): run for run in every}
    found = [f"{arm} seed {seed} is missing" for arm in wanted_arms for seed in wanted_seeds if (arm, seed) not in have]
    pair = have.get(("untrained", None))
    if pair is None:
        found.insert(0, "untrained is missing: no noise floor, no lengths before training")
    elif len(pair.sittings["untrained"]) < pair.config["base_evals"]:
        found.append(f"untrained was evaluated {len(pair.sittings['untrained'])} of {pair.config['base_evals']} times")
    trained = [run for run in every if run.seed is not None and len(run.steps) != run.config["steps"]]
    return found + [f"{run.name} has {len(run.steps)} of {run.config['steps']} steps" for run in trained]


def _header(every: Sequence[Run], header: Json, wanted_arms: Sequence[str], wanted_seeds: Sequence[int]) -> Json:
    about, config = every[0].about, dict(every[0].config)
    for part in (config, model := dict(about["model"])):  # a folder's place on some machine is nobody's business
        folders = {key: Path(value) for key, value in part.items() if isinstance(value, str) and value.startswith("/")}
        part.update({key: folder.name for key, folder in folders.items()})
    return {
        "recipe": "talk-credit", "title": "Credit assignment for two copies that talk", "paper": PAPER,
        "paper_url": "https://arxiv.org/abs/2510.04996", "question": QUESTION, **header,
        "partial": _partial(every, wanted_arms, wanted_seeds), "model": model,
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
    base = next((other for other in series if other.partner == "untrained"), None)
    own, lengths = s.partner == "trained_pair", ("message_tokens", "answer_tokens")
    timed = [pair] if s.partner == "untrained" and pair else runs if own else []
    minutes = [r.processes * r.seconds["total"] / 60 for r in timed]
    return {
        "arm": s.arm, "partner": s.partner, "formula": ARMS[s.arm].formula if s.arm in ARMS else None,
        "unit": "re-run" if s.partner == "untrained" else "training seed", "seeds": list(s.seeds), "score": s.scores,
        "mean": mean_interval(s.scores_SP, one_model=s.partner == "untrained"), "pass_at_1": first, "pass_at_4": fourth,
        "gain": _gains(s, base),
        "talk": {name: [getattr(talk, name) for talk in s.talk] for name in Talk.__dataclass_fields__},
        "before": base and {name: mean(getattr(talk, name) for talk in base.talk) for name in lengths},
        "kinds": dict(sorted(Counter(g.kind for chats in s.chats for chat in chats for g in chat.grades).items())),
        "minutes": minutes or None,
        "training": _training(runs) if own else None,
        "curves": [_curve(run) for run in runs] if own else [],
    }  # fmt: skip


def _gains(s: Series, base: Series | None) -> list[Json] | None:
    """How much better than the untrained pair each seed does, paired by problem, with a 95% interval over problems;
    None for the untrained pair itself and where it was not evaluated."""
    if base is None or s is base:
        return None
    before = [mean(scores) for scores in zip(*base.scores_SP, strict=True)]
    found = [
        mean_interval([[b - a for a, b in zip(before, row, strict=True)]], one_model=True, least=-1.0)
        for row in s.scores_SP
    ]
    return [{name: gain[name] for name in ("value", "low", "high")} for gain in found]


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
    measures = {name: [getattr(m, name) for m in run.steps] for name in CURVES}
    return {"seed": run.seed, "step": [float(m.step + 1) for m in run.steps], **measures}


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
    trained = [std for s in series if s.partner == "trained_pair" if (std := resampling_std(s)) is not None]
    return {"run_std": found["run_std"], "n_runs": found["n_runs"], "means": list(found["means"].values()),
            "noise_band": found["noise_band"], "stability": found["stability"],
            "trained_std": mean(trained) if trained else None}  # fmt: skip


def resampling_std(s: Series) -> float | None:
    """How far a score would move if its chats were sampled again: sqrt(sum over problems of var(chats) / chats) /
    problems, from the chats that each problem has; the mean over seeds. None where a problem has one chat."""
    found = []
    for chats in s.chats:
        groups = [[c.reward for c in group] for group in by_problem(chats).values()]
        if min(map(len, groups)) < 2:
            return None
        found.append(math.sqrt(math.fsum(variance(rewards) / len(rewards) for rewards in groups)) / len(groups))
    return mean(found)


def _deltas(series: Sequence[Series], noise: Json | None) -> Json:
    by_key = {(s.arm, s.partner): s for s in series}
    pairs = [(by_key[BASELINE, s.partner], s) for s in series
             if s.partner != "untrained" and s.arm != BASELINE and (BASELINE, s.partner) in by_key]  # fmt: skip
    found: Json = {}
    every = together([partial(compare, before, after, noise) for before, after in pairs])
    for (before, after), compared in zip(pairs, every, strict=True):
        matched = matched_difference(before, after)
        both = {"compare": compared, "matched": matched, "flag": _flag(before, after, compared, matched)}
        found.setdefault(after.arm, {})[after.partner] = both
    return found


def _flag(before: Series, after: Series, compared: Json, matched: Json) -> str | None:
    """Where whileai's difference and ours have other signs, and so cannot both be the answer; None where not."""
    if matched["n_seeds"] < 2:
        return None
    shown = {key: round(compared[key] or 0.0, 4) for key in ("delta", "train_delta")}
    ours, seeds, found = round(matched["value"], 4), matched["n_seeds"], []
    if shown["delta"] * ours < 0:
        found.append(f"seed {compared['seed_after']}, whileai's headline, {shown['delta']:+.3f}, over {seeds} seeds "
                     f"{ours:+.3f}: the headline points against the mean")  # fmt: skip
    if shown["train_delta"] * ours < 0:
        found.append(f"all {len(before.seeds)} seeds of {before.arm} and {len(after.seeds)} of {after.arm} "
                     f"{shown['train_delta']:+.3f}, the {seeds} that both have {ours:+.3f}")  # fmt: skip
    return f"{after.arm}, {after.partner.replace('_', ' ')}: {'; '.join(found)}" if found else None


WORDS = {"moved": "moved", "moved_the_wrong_way": "moved the wrong way", "no_change_detected": "flat",
         "within_eval_noise": "flat"}  # fmt: skip


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
    return {
        "verdict": report["target_verdict"], "word": word, "headline": str(report).splitlines()[0],
        "seed_before": before.seeds[one], "seed_after": after.seeds[other],
        "delta": report["target_delta"], "low": low, "high": high,
        "train_delta": report["train_delta"], "train_low": train_low, "train_high": train_high,
        "train_seeds": report["train_runs"],
        "noise_band": report["noise_band"], "run_std": report["run_std"], "run_std_runs": report["run_std_runs"],
        "repeats": report["repeats"]["note"], "over_optimized": report["over_optimized"],
        "not_comparable": report["not_comparable"], "warnings": report["warnings"],
    }  # fmt: skip


def matched_difference(before: Series, after: Series) -> Json:
    """Our own difference: seed minus the same seed, problem minus the same problem, over all common seeds."""
    shared = sorted(set(before.seeds) & set(after.seeds))
    if not shared:
        empty = dict.fromkeys(("value", "low", "high", "half", "over"))
        why = "no training seed in common"
        return {**empty, "n_seeds": 0, "n_problems": 0, "why": why, "seeds": [], "per_seed": []}
    old, new = (dict(zip(s.seeds, s.scores_SP, strict=True)) for s in (before, after))
    differences_SP = [[b - a for a, b in zip(old[seed], new[seed], strict=True)] for seed in shared]
    per_seed = [mean(row) for row in differences_SP]
    return {**mean_interval(differences_SP, least=-1.0), "seeds": shared, "per_seed": per_seed}


def card_minutes(every: Sequence[Run]) -> dict[str, float]:
    """Minutes that each arm had a card for: while several runs were on at once on one card, each has its part of the
    time. They add up to the time that runs were on, which is what they cost (the starts of the processes aside).

    A run lasts from its record's date on; what it had spent in an earlier start counts whole, for of that the record
    has no date. Records that name no card are older: they are taken to be of one card, and their date is their
    start's, so that runs of one date were made one after the other."""
    begun: dict[str, float] = {}
    on_card: dict[str, list[tuple[float, float, Run]]] = {}
    shares = dict.fromkeys((run.arm for run in every), 0.0)
    for run in every:
        card, date = str(run.about.get("card")), str(run.about.get("date"))
        try:
            start = datetime.fromisoformat(date).timestamp()
        except ValueError:  # then it shared with none
            start, card = 0.0, run.name
        earlier = run.seconds.get("earlier", 0.0)
        shares[run.arm] += run.processes * earlier / 60
        start = start if "card" in run.about else begun.get(date, start)
        begun[date] = end = start + run.seconds["total"] - earlier
        on_card.setdefault(card, []).append((start, end, run))
    for spans in on_card.values():
        for a, b in itertools.pairwise(sorted({edge for *span, _ in spans for edge in span})):
            on = [run for start, end, run in spans if start <= a and b <= end]
            for run in on:
                shares[run.arm] += run.processes * (b - a) / len(on) / 60
    return shares


def _cost(every: Sequence[Run], price: float) -> Json:
    """Minutes by phase, chats and tokens generated by each arm (all its seeds), and dollars at `price` an hour."""
    tables: dict[str, dict[str, Counter[str]]] = {"minutes": {}, "chats": {}, "tokens": {}}
    for run in every:
        spent = {phase: math.fsum(getattr(m, f"{phase}_seconds") for m in run.steps) for phase in PHASES[1:4]}
        spent |= {phase: run.seconds.get(phase, 0.0) for phase in ("load", "evaluate")}
        total = run.seconds["total"]
        spent |= {"other": max(0.0, total - math.fsum(spent.values())), "total": total}
        chats = [chat for sittings in run.sittings.values() for sitting in sittings for chat in sitting]
        rows = {
            "minutes": {phase: run.processes * spent[phase] / 60 for phase in PHASES},
            "chats": {"training": sum(m.drawn + m.thrown_away for m in run.steps), "evaluation": len(chats)},
            "tokens": {"training": sum(m.sampled_tokens for m in run.steps),
                       "evaluation": sum(turn.tokens for chat in chats for turn in chat.chat.turns)},
        }  # fmt: skip
        for name, row in rows.items():
            old = tables[name].get(run.arm, dict.fromkeys(row, 0))
            tables[name][run.arm] = {key: old[key] + value for key, value in row.items()}
    on_cpu = any(run.about["device"].lower().startswith("cpu") for run in every)
    minutes = math.fsum(row["total"] for row in tables["minutes"].values())
    sums = {name: sum(sum(row.values()) for row in tables[name].values()) for name in ("chats", "tokens")}
    on_card = {} if on_cpu else card_minutes(every)
    taken = None if on_cpu else math.fsum(on_card.values())
    return {
        "unit": "CPU minutes" if on_cpu else "GPU minutes", "device": every[0].about["device"], "price_per_hour": price,
        **tables, "card_minutes": on_card,
        "total": {"minutes": minutes, "card_minutes": taken, **sums,
                  "dollars": None if taken is None else round(taken / 60 * price, 2)},
    }  # fmt: skip


def _example_chats(series: Sequence[Series], characters: int) -> Json:
    shown = [s for s in series if s.partner != "untrained_partner"]
    names = sorted({chat.chat.problem.id for chat in shown[0].chats[0]})
    chosen = random.Random(0).sample(names, min(CHATS_SHOWN, len(names)))
    rule = (f"{len(chosen)} held-out problems drawn with random.Random(0) from their sorted ids, the same for every "
            "arm; of each arm its first seed's first chat on them")  # fmt: skip
    chats = {s.arm: [_chat(by_problem(s.chats[0])[name][0], s.seeds[0], characters) for name in chosen] for s in shown}
    return {"rule": rule, "arms": chats}


def shortened(text: str, characters: int) -> str:
    """A long text's beginning and end, about so many characters, cut between words where there are any."""
    half = characters // 2
    begin, end = text[:half].rsplit(maxsplit=1)[:1], text[-half:].split(maxsplit=1)[-1:]
    return f"{''.join(begin)} [...] {''.join(end)}"


def _chat(graded: GradedChat, seed: int, characters: int) -> Json:
    problem, private, turns = graded.chat.problem, private_numbers(graded.chat.problem), []
    for i, turn in enumerate(graded.chat.turns):
        said, clipped = numbers_in(turn.text), len(turn.text) > characters
        turns.append({
            "speaker": turn.speaker, "tokens": turn.tokens, "truncated": turn.truncated, "clipped": clipped,
            "text": shortened(turn.text, characters) if clipped else turn.text,
            "sent": sorted(private[i % 2] & said) if i < 2 else [],
            "used": sorted(private[1 - i % 2] & said) if i >= 2 else [],
        })  # fmt: skip
    return {
        "seed": seed, "problem": problem.id, "question": problem.question, "facts": problem.facts,
        "gold": problem.gold, "private": [sorted(numbers) for numbers in private], "turns": turns,
        "answers": [asdict(g) for g in graded.grades], "reward": graded.reward,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------- checks


def _checks(every: Sequence[Run], results: Json, arms: Sequence[str], seeds: Sequence[int]) -> list[Json]:
    """Every check of the experiment as {check, source, result, ok}; ok None: reported, nothing to pass."""
    trained = [run for run in every if run.seed is not None]
    rows = [*_data_checks(every, results), *_origin_checks(every, results)]
    for arm in dict.fromkeys(run.arm for run in trained):
        words = _length_words(results["arms"][arm], results["arms"].get("untrained"))
        rows.append((f"length, {arm}", "stored chats, before to after", words, None))
    for arm in dict.fromkeys(run.arm for run in trained):
        source = "wai.hack_scan on the last training batch of every seed (1 in 20 flags by chance)"
        rows.append((f"hack scan, {arm}", source, *hack_words([run for run in trained if run.arm == arm])))
    have = {arm: [run.seed for run in trained if run.arm == arm] for arm in (*arms, *(run.arm for run in trained))}
    text = "; ".join(f"{arm} {', '.join(map(str, found)) or 'none'}" for arm, found in have.items())
    whole = len(set(seeds)) > 1 and all(set(seeds) <= set(have[arm]) for arm in arms)
    rows.append(("training seeds", "run records", text, whole))
    rows.append(("chats drawn", "run records", _budget_words(results), None))
    return [dict(zip(("check", "source", "result", "ok"), row, strict=True)) for row in rows]


def _data_checks(every: Sequence[Run], results: Json) -> list[tuple[str, str, str, bool | None]]:
    noise, data = results["noise"], every[0].data
    floor = "fewer than two evaluations of the untrained pair"
    if noise:
        floor = f"run_std {num(noise['run_std'], 4)} from {noise['n_runs']} evaluations of the untrained pair"
    dropped, used = data.get("decontaminate_dropped"), data.get("train_used")
    overlap = "not recorded"
    if dropped is not None:
        overlap = f"{dropped} of {num(dropped + used, 0)} training problems dropped for overlap with the held-out ones"
    graded, changed = sum(run.graded for run in every), [run for run in every if run.changed]
    again = f"{sum(run.changed for run in changed)} of {num(graded, 0)} stored verdicts changed"
    again += f" ({', '.join(run.name for run in changed)})" if changed else ""
    compared = [delta["compare"] for both in results["deltas"].values() for delta in both.values()]
    over = sum(bool(c["over_optimized"]) for c in compared)
    return [
        ("eval noise", "wai.eval_variance", floor, bool(noise) and noise["n_runs"] >= 3),
        ("clean holdout", "wai.decontaminate", overlap, dropped is not None),
        ("reward is a program", "grading.grade",
         "compares the value in a last message's last box with the gold answer, in training as in evaluation", True),
        ("graded again", "grading.grade on the stored chats", again, not changed),
        ("proxy vs target", "wai.compare, proxy=None",
         f"the training reward is the target; over_optimized in {over} of {len(compared)} comparisons", not over),
    ]  # fmt: skip


def _origin_checks(every: Sequence[Run], results: Json) -> list[tuple[str, str, str, bool | None]]:
    header = results["header"]
    model, commit, clean = header["model"], header.get("commit"), header.get("clean")
    origin = (f"{model['id']}, revision {model.get('revision')}, {model.get('loaded_as')}; {header['device']}; "
              f"summed up at commit {(commit or 'unknown')[:12]}")  # fmt: skip
    origin += {True: "", False: ", with changes that are not committed"}.get(clean, ", not known whether clean")
    states = [run.about.get("clean") for run in every]
    origin += "; some runs were made with changes that are not committed" if False in states else ""
    unknown = [state for state in states if state not in (True, False)]
    origin += "; of some runs it is not known whether their checkout was clean" if unknown else ""
    traced = False if clean is not True or not commit or False in states else None if unknown else True
    mixed = [words for part in ("device", "commit", "clean", "model") if (words := _mixed(every, part))]
    pinned = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    versions = _mixed(every, "versions")
    return [
        ("reused from the cache", "run records", ", ".join(header.get("reused") or []) or "nothing", None),
        ("pinned versions", "run records", versions or f"the same in every record: {pinned}", not versions),
        ("model, device, commit", "run records, git", origin, traced),
        ("one machine, one commit", "run records", "; ".join(mixed) or "all records agree", not mixed),
        ("one experiment", "digests in the run records", *_one_experiment(every)),
    ]


def _one_experiment(every: Sequence[Run]) -> tuple[str, bool]:
    """Whether the records are of the same settings and the same chat, credit and training step (runs.CODE), whatever
    commits they were made at. Samplers, kernels and the grader are not in it: tests hold them to one result."""
    parts = sorted({part for run in every for part in run.key} - {"arm"})  # an arm's own definition differs by arm
    differ = [part for part in parts if len({json.dumps(run.key.get(part), sort_keys=True) for run in every}) > 1]
    if differ:
        return f"not the same in all records: {listed(differ)}", False
    words = f"the same in every record ({len(every)}): {listed(parts)}"
    return words + "; code is recipe.py's chat, credit and training step" * ("code" in parts), True


def _length_words(arm: Json, untrained: Json | None) -> str:
    def change(name: str, digits: int) -> str:
        before, after = (mean_of(row["talk"][name]) if row else None for row in (untrained, arm))
        return f"{num(before, digits)} to {num(after, digits)}"

    def seeds(name: str) -> str:
        return "" if len(arm["seeds"]) < 2 else f" (by seed {' '.join(map(num, arm['talk'][name]))})"

    return (f"message {change('message_tokens', 0)} tokens, answer {change('answer_tokens', 0)}; truncated "
            f"{change('truncated', 2)}, no box {change('no_box', 2)}, echoes {change('echoes', 2)}{seeds('echoes')}, "
            f"copies answer {change('copies_answer', 2)}{seeds('copies_answer')}")  # fmt: skip


def hack_words(runs: Sequence[Run]) -> tuple[str, bool | None]:
    """whileai's scan of each seed's last batch: does the reward pay for talk and a boxed answer, or for a shortcut?
    The second value is None where a scan could not tell."""
    import whileai as wai

    parts, regimes = [], set()
    for run in runs:
        groups = by_problem(run.last_batch).values()
        # the scan groups by prompt, so the prompt must tell problems apart; the question alone may not
        rows = wai.rows(
            [group[0].chat.problem.text for group in groups],
            [["\n".join(turn.text for turn in chat.chat.turns if turn.trained) for chat in group] for group in groups],
            [[chat.reward for chat in group] for group in groups],
            markers=[[_marks(chat) for chat in group] for group in groups],
        )
        scan = wai.hack_scan(rows, endorsed=[f"marker:{name}" for name in ("sends_own", "uses_partners", "boxed")])
        regimes.add(scan["regime"])
        strongest = f"strongest {scan['top_feature'] or 'none'} {num(scan['rho_max'])}, floor {num(scan['tau'])}"
        parts.append(f"{run.seed}: {scan['regime']}" + ("" if scan["tau"] is None else f" ({strongest})"))
    unsure = None if regimes & {"unknown", "degenerate"} else True
    return "; ".join(parts), False if "reward_hack" in regimes else unsure


def _marks(chat: GradedChat) -> dict[str, float]:
    talk = talk_measures([chat])
    marks = {"sends_own": talk.sends_own, "uses_partners": talk.uses_partners, "boxed": 1 - talk.no_box}
    return {name: value for name, value in marks.items() if not math.isnan(value)}


def _mixed(every: Sequence[Run], part: str) -> str:
    """Empty if all records agree in a part of where they come from, else who has what."""
    holders: dict[str, list[str]] = {}
    for run in every:
        value = run.about.get(part)
        shown = str(value)[:12] if part == "commit" else json.dumps(value, sort_keys=True)
        holders.setdefault(shown, []).append(run.name)
    words = [f"{value} ({', '.join(names)})" for value, names in holders.items()]
    return "" if len(holders) == 1 else f"{part}: {', '.join(words)}"


def _budget_words(results: Json) -> str:
    drawn = {key: mean_of(arm["training"]["drawn"]) for key, arm in results["arms"].items() if arm["training"]}
    base = drawn.get(BASELINE)
    ratios = {arm: f" ({count / base:.2f} x {BASELINE})" for arm, count in drawn.items() if base and arm != BASELINE}
    parts = [f"{arm} {num(count, 0)}{ratios.get(arm, '')}" for arm, count in drawn.items()]
    return f"a seed: {', '.join(parts) or 'none'}"


# ---------------------------------------------------------------------------------------------- results.json


def tidy(value: Any) -> Any:
    """Floats with 4 decimals; nan (there was nothing to count) becomes None."""
    if isinstance(value, float):
        return round(value, 4) + 0.0 if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: tidy(item) for key, item in value.items()}
    return [tidy(item) for item in value] if isinstance(value, list | tuple) else value


def to_json(results: Json) -> bytes:
    """The bytes of results.json: a line for each part of a part, so that a difference can be read."""

    def lines(value: Any, depth: int) -> str:
        if not (depth and isinstance(value, dict) and value):
            return json.dumps(value, separators=(",", ":"), allow_nan=False)
        return "{\n" + ",\n".join(f"{json.dumps(key)}:{lines(item, depth - 1)}" for key, item in value.items()) + "\n}"

    return lines(results, 2).encode() + b"\n"


PARTS = {"header": dict, "arms": dict, "deltas": dict, "reliability": dict, "cost": dict, "checks": list, "chats": dict,
         "published": dict}  # fmt: skip


def load_results(path: Path) -> Json:
    """results.json, checked. Raises ResultsError saying what is wrong and where."""
    anew = "write it again with python recipe.py --reuse"
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"{path} cannot be read ({error.strerror}): python recipe.py writes it") from None
    except ValueError as error:
        raise ResultsError(f"{path} is not whole JSON ({error}): {anew}") from None
    found = results.get("format") if isinstance(results, dict) else type(results).__name__
    if found != FORMAT:
        raise ResultsError(f"{path}: format {found!r}, this version reads {FORMAT}: {anew}")
    check_finite(results, str(path))
    for part, kind in PARTS.items():
        if not isinstance(results.get(part), kind):
            raise ResultsError(f"{path}: the part {part!r} is missing or no {kind.__name__}")
    header = results["header"]
    for name in ("arms", "seeds", "partial", "failed", "model", "data", "device", "config", "versions"):
        if name not in header:
            raise ResultsError(f"{path}: header.{name} is missing")
    for plain in dict.fromkeys(["untrained", *header["arms"], *(key.removesuffix(OTHER) for key in results["arms"])]):
        known = any(sentence.startswith(f"{plain} ") and "is missing" in sentence for sentence in header["partial"])
        for key in (plain,) if plain == "untrained" else (plain, plain + OTHER):
            if key in results["arms"]:
                _check_arm(results["arms"][key], f"{path}: arms.{key}")
            elif not known:
                raise ResultsError(f"{path}: arms.{key} is missing, and header.partial does not say so")
    return results


def _check_arm(row: Json, where: str) -> None:
    try:
        gains = {} if row["gain"] is None else {"gain": row["gain"]}
        lists = {"score": row["score"], "pass_at_1": row["pass_at_1"], "pass_at_4": row["pass_at_4"], **gains,
                 **{f"talk.{name}": row["talk"][name] for name in Talk.__dataclass_fields__}}  # fmt: skip
        for name, values in lists.items():
            if len(values) != len(row["seeds"]):
                raise ResultsError(f"{where}.{name}: {len(values)} values for {len(row['seeds'])} seeds")
        for score in (row["mean"]["value"], *row["score"]):
            if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= 1:
                raise ResultsError(f"{where}: {score!r} is no score")
        if abs(mean(row["score"]) - row["mean"]["value"]) > 2e-4:  # rounding
            raise ResultsError(f"{where}: mean.value {row['mean']['value']} is not the mean of score")
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ResultsError(f"{where}: {type(error).__name__} {error}: a field is missing or of another kind") from None


def score_text(chats: Sequence[Json]) -> str:
    """A score with its 95% interval over problems and its n, from the chats of a record as they were graded."""
    groups: dict[str, list[float]] = {}
    for chat in chats:
        groups.setdefault(chat["problem"], []).extend(float(g["correct"]) for g in chat["grades"])
    found = mean_interval([[mean(group) for group in groups.values()]], one_model=True)
    return f"{num(found['value'], 3)} ± {num(found['half'], 3)} (n {len(groups)} problems)"
