"""results.json in words: names, numbers as they are printed, and the answer in two sentences. Shared by the card
and the README; needs the standard library alone."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

Json = dict[str, Any]

PARTNERS = ("trained_pair", "untrained_partner")  # who a trained A speaks with: two rows an arm

NAMES = {
    "untrained": "untrained",
    "grpo": "GRPO",
    "ada": "Reinforce-Ada",
    "raft": "RAFT",
    "mixed": "Mixed partners",
    "ada_mixed": "Ada, mixed partners",
    "grpo12": "GRPO, 12 chats",
}
CHANGES = {
    "untrained": "Nothing: this is the pair before training.",
    "grpo": "The baseline: each chat is credited with its reward minus the mean of its group.",
    "ada": "Problems whose chats all scored the same are played again; a balanced group is trained on.",
    "raft": "Only chats in which both copies were right are trained on, each with credit 1.",
    "mixed": "As GRPO, but in half of the chats copy B is the untrained model.",
    "ada_mixed": "As Reinforce-Ada, but in half of the chats copy B is the untrained model.",
    "grpo12": "As GRPO, with the larger number of chats that Reinforce-Ada may draw.",
}


def clean(text: Any) -> str:
    """Text from outside as it may be shown: control, direction and surrogate characters become visible escapes,
    so that nothing a model wrote moves a cursor, turns a line around or breaks a file."""

    def shown(c: str) -> str:
        unsafe = unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") and c not in "\n\t"
        return f"\\x{ord(c):02x}" if unsafe and ord(c) < 256 else f"\\u{ord(c):04x}" if unsafe else c

    return "".join(map(shown, str(text)))


def one_line(text: Any, limit: int = 300) -> str:
    line = " ".join(clean(text).split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def num(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """A number as it is printed; a dash where there was nothing to measure."""
    if value is None:
        return "–"
    return f"{round(value, digits) + 0.0:{'+' if sign else ''},.{digits}f}".replace("-", "−")  # + 0.0: no "-0.00"


def interval(low: float | None, high: float | None, digits: int = 3, sign: bool = False) -> str:
    return "" if low is None or high is None else f"[{num(low, digits, sign)}, {num(high, digits, sign)}]"


def listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def name_of(arm: str) -> str:
    return NAMES.get(arm, one_line(arm, 40))


def mean_of(numbers: Sequence[float | None] | None) -> float | None:
    known = [x for x in numbers or () if x is not None]
    return sum(known) / len(known) if known else None


def arms_of(results: Json) -> list[str]:
    """The methods, untrained first: the rows of results.json that are not an evaluation with an untrained partner."""
    return [name for name, row in results["arms"].items() if row["partner"] != "untrained_partner"]


def row_of(results: Json, arm: str, partner: str) -> Json | None:
    """One arm's row; an untrained pair is its own untrained partner."""
    key = arm if partner == "trained_pair" or arm == "untrained" else f"{arm}_untrained_partner"
    return results["arms"].get(key)


def spread(row: Json | None) -> tuple[float | None, float | None, str]:
    """Low, high and what they are over. One training seed gives no interval over seeds: then the one over
    problems stands in, and says so."""
    if row is None:
        return None, None, ""
    mean = row["mean"]
    if mean["over"] is not None:
        return mean["low"], mean["high"], mean["over"]
    first = row["pass_at_1"][0] if row["pass_at_1"] else {}
    return first.get("low"), first.get("high"), "problems only, one training seed"


def score_words(row: Json | None, digits: int = 3) -> str:
    if row is None or row["mean"]["value"] is None:
        return "not measured"
    low, high, over = spread(row)
    note = f" ({over})" if over.startswith("problems only") else ""
    return f"{num(row['mean']['value'], digits)} {interval(low, high, digits)}{note}".strip()


def matched_words(matched: Json, digits: int = 3) -> str:
    """A difference over matched seeds with its interval, if it has one."""
    bounds = interval(matched["low"], matched["high"], digits, True)
    return f"{num(matched['value'], digits, True)} {bounds}".strip()


def several_seeds(trained: dict[str, Json]) -> dict[str, Json]:
    """The rules that can be ranked: one seed may be luck."""
    return {arm: row for arm, row in trained.items() if len(row["seeds"]) > 1}


def answer(results: Json) -> tuple[str, str]:
    """The answer in two sentences: the highest mean beside the baseline, and what of the differences is resolved."""
    rows = {arm: results["arms"][arm] for arm in arms_of(results)}
    trained = {arm: row for arm, row in rows.items() if arm != "untrained" and row["mean"]["value"] is not None}
    if not trained:
        return "No trained pair has been measured yet.", "So the question is open."
    repeated = several_seeds(trained)
    best = max(repeated or trained, key=lambda arm: trained[arm]["mean"]["value"])
    beside = {"grpo": "with GRPO", "untrained": "untrained"}
    others = [f"{score_words(rows[arm], 2)} {words}" for arm, words in beside.items() if arm in rows and arm != best]
    several = "Of the rules with several seeds, " * (0 < len(repeated) < len(trained))
    first = f"{several}{name_of(best)} has the highest mean share of held-out answers right: "
    first += score_words(trained[best], 2)
    first += f", against {listed(others)}." if others else "."
    matched = {
        arm: both["trained_pair"]["matched"] for arm, both in results["deltas"].items() if both.get("trained_pair")
    }
    matched = {arm: m for arm, m in matched.items() if m and m["value"] is not None}
    if not matched:
        return first, "No other rule has been compared with GRPO on the same seeds, so which is best is open."
    told = [arm for arm, m in matched.items() if m["low"] is not None and (m["low"] > 0 or m["high"] < 0)]
    words = {arm: f"{name_of(arm)} {matched_words(m, 2)}" for arm, m in matched.items()}
    if told:
        second = (
            f"Over matched seeds, {listed([words[arm] for arm in told])} can be told apart from GRPO (95% intervals)"
        )
        rest = [words[arm] for arm in matched if arm not in told]
        return first, f"{second}; {listed(rest)} cannot." if rest else f"{second}."
    whole = [words[arm] for arm, m in matched.items() if m["low"] is not None]
    single = [words[arm] for arm, m in matched.items() if m["low"] is None]
    open_still = "Which rule is best stays open: over matched seeds"
    if not whole:
        return first, f"{open_still} {_differences(single)}, and one seed gives no interval over seeds."
    has, comes = "each 95% interval" if len(whole) > 1 else "its 95% interval", "come" if len(single) > 1 else "comes"
    rest = f"; {listed(single)} {comes} from one seed, which gives none" if single else ""
    return first, f"{open_still} {_differences(whole)}, and {has} includes zero{rest}."


def _differences(words: Sequence[str]) -> str:
    return f"the difference{'s' * (len(words) > 1)} from GRPO {'are' if len(words) > 1 else 'is'} {listed(words)}"


def gaps(results: Json) -> list[str]:
    """What is missing and what failed, a phrase each; runs that are missing are gathered by their seeds."""
    absent: dict[str, list[str]] = {}
    others: list[str] = []
    for phrase in map(str, results["header"]["partial"]):
        if found := re.fullmatch(r"(\w+) seed (\d+) is missing", phrase, re.ASCII):
            absent.setdefault(found[1], []).append(found[2])
        else:
            others.append(phrase)
    together: dict[tuple[str, ...], list[str]] = {}
    for arm, seeds in absent.items():
        together.setdefault(tuple(seeds), []).append(arm)
    runs = [
        f"{listed(arms)} seed{'s' * (len(seeds) > 1)} {listed(seeds)} {'is' if len(arms) * len(seeds) == 1 else 'are'}"
        " missing"
        for seeds, arms in together.items()
    ]
    return [*others, *runs, *map(str, results["header"]["failed"])]


def by_seeds(results: Json) -> dict[tuple[int, ...], list[str]]:
    """The trained arms by the training seeds that they have."""
    found: dict[tuple[int, ...], list[str]] = {}
    for row in results["arms"].values():
        if row["partner"] == "trained_pair":
            found.setdefault(tuple(row["seeds"]), []).append(row["arm"])
    return found


def seed_list(results: Json) -> str:
    """The training seeds that there are; whose they are, if not every arm has the same."""
    groups = by_seeds(results)
    return "; ".join(
        ", ".join(map(str, seeds)) + f" ({', '.join(arms)})" * (len(groups) > 1) for seeds, arms in groups.items()
    )


def seed_words(results: Json) -> str:
    """The training seeds that there are, as a phrase."""
    seeds = {seed for seeds in by_seeds(results) for seed in seeds}
    return f"seed{'s' * (len(seeds) != 1)} {seed_list(results)}" if seeds else "no training seed yet"


def count_words(results: Json) -> str:
    """How many problems and training seeds there are, and whose, if not every arm has as many."""
    counts: dict[int, list[str]] = {}
    for seeds, arms in by_seeds(results).items():
        counts.setdefault(len(seeds), []).extend(arms)
    problems = next(iter(results["arms"].values()))["mean"]["n_problems"]
    if len(counts) < 2:
        count = next(iter(counts), 0)
        return f"{problems} problems, {count} seed{'s' * (count != 1)}"
    return f"{problems} problems; seeds: " + ", ".join(f"{n} ({', '.join(arms)})" for n, arms in counts.items())


def shared_words(results: Json) -> str:
    """How far the runs' minutes are those of a shared card; empty where each had it to itself."""
    total = results["cost"]["total"]
    spent, taken = total["minutes"], total["card_minutes"]
    if not taken or spent < 1.05 * taken:
        return ""
    return (f"Runs made side by side shared the card, {num(spent / taken, 1)} at a time on average: {num(spent, 0)} "
            f"minutes of runs took {num(taken, 0)} minutes of the card.")  # fmt: skip


def partial_words(results: Json) -> str:
    """One line on what is missing; empty if nothing is."""
    missing = gaps(results)
    return f"Partial results: {one_line('; '.join(missing), 1000)}." if missing else ""


HABIT = 0.25  # a run with a larger share than this of something that stands in for talk is named


def habit_words(results: Json, measure: str, what: str, where: str) -> str:
    """The trained runs with much of a habit, with their scores beside those of the others; empty if none has."""
    runs = [
        (share, score, f"{arm} seed {seed}")
        for arm, row in results["arms"].items()
        if row["partner"] == "trained_pair"
        for seed, score, share in zip(row["seeds"], row["score"], row["talk"][measure], strict=True)
        if share is not None
    ]
    much, others = [sorted((r for r in runs if (r[0] > HABIT) is side), reverse=True) for side in (True, False)]
    if not much:
        return ""
    named = [f"{name} ({num(share)} of the {where}, score {num(score)})" for share, score, name in much]
    words = f"{what}: {listed(named)}."
    if others:
        words += f" Elsewhere: {span(r[0] for r in others)}, score {span(r[1] for r in others)}."
    untrained = results["arms"].get("untrained")
    return words + (f" Untrained: {num(mean_of(untrained['talk'][measure]))}." if untrained else "")


def span(values: Iterable[float | None], signed: bool = False) -> str:
    """The least and the greatest of the values that there are."""
    known = [value for value in values if value is not None]
    low, high = (num(f(known), 2, signed) for f in (min, max)) if known else ("–", "–")
    return low if low == high else f"{low} to {high}"


def learned(results: Json) -> list[str]:
    """What the runs show, and what is left open between the rules."""
    return [*runs_show(results), f"{answer(results)[1]} {results['reliability']['words']}"]


def runs_show(results: Json) -> list[str]:
    """What the numbers support: what training does, what it is worth with a stranger, which runs found something else
    than talk, what replay does, and which rules are on one side of the baseline."""
    rows = {arm: results["arms"][arm] for arm in arms_of(results) if results["arms"][arm]["mean"]["value"] is not None}
    trained = {arm: row for arm, row in rows.items() if arm != "untrained"}
    if not trained or "untrained" not in rows:
        return []
    found = [
        _gain_words(rows["untrained"], trained),
        _stuck_words(trained),
        _stranger_words(rows["untrained"], trained, results),
        habit_words(results, "echoes", "Copies that repeat each other nearly word for word", "messages"),
        habit_words(results, "copies_answer", "B boxes what A has boxed and names no other number", "chats"),
        _replay_words(trained),
        _one_sided_words(results),
    ]
    return [text for text in found if text]


def _gain_words(base: Json, trained: dict[str, Json]) -> str:
    def after(measure: str) -> str:
        return span(mean_of(row["talk"][measure]) for row in trained.values())

    high, lows = base["mean"]["high"], {arm: row["mean"]["low"] for arm, row in trained.items()}
    known = {name_of(arm): low > high for arm, low in lows.items() if low is not None and high is not None}
    above, others = ([name for name, is_above in known.items() if is_above is side] for side in (True, False))
    repeated = several_seeds(trained) or trained
    means = span(row["mean"]["value"] for row in repeated.values()).replace(" to ", "–")
    single = span(score for row in trained.values() for score in row["score"])
    words = f"Training moves the pair's score from {num(base['mean']['value'])} to {means} "
    words += f"(means over seeds, by rule; single seeds {single})."
    if known:
        words += f" With its whole interval above the untrained pair's: {listed(above) or 'none'}"
        words += f"; not so: {listed(others)}." if others else "."
    return (f"{words} A copy sends {num(mean_of(base['talk']['sends_own']))} of the numbers that only it has before, "
            f"{after('sends_own')} after, and uses {num(mean_of(base['talk']['uses_partners']))} of its partner's "
            f"before, {after('uses_partners')} after.")  # fmt: skip


def _stuck_words(trained: dict[str, Json]) -> str:
    """How many runs of each rule end no better than the untrained pair, paired by problem."""
    parts = []
    for arm, row in trained.items():
        if row["gain"] is None or any(gain["low"] is None for gain in row["gain"]):
            return ""
        stuck = [str(seed) for seed, gain in zip(row["seeds"], row["gain"], strict=True) if gain["low"] <= 0]
        named = f" (seed{'s' * (len(stuck) > 1)} {listed(stuck)})" if stuck else ""
        parts.append(f"{name_of(arm)} {len(stuck)} of {len(row['seeds'])}{named}")
    return (f"Runs not shown to be better than the untrained pair (difference by problem, 95% interval): "
            f"{listed(parts)}.")  # fmt: skip


def _stranger_words(base: Json, trained: dict[str, Json], results: Json) -> str:
    beside = [row for arm in trained if (row := row_of(results, arm, "untrained_partner"))]
    if not beside:
        return ""
    start = base["mean"]["value"]
    pair, stranger = (span((row["mean"]["value"] - start for row in rows), True) for rows in (trained.values(), beside))
    scores = span(row["mean"]["value"] for row in beside)
    return (f"With an untrained partner the trained copies score {scores} (both answers counted): {stranger} against "
            f"the untrained pair, where with each other it is {pair}.")  # fmt: skip


def _replay_words(trained: dict[str, Json]) -> str:
    flat = {
        arm: [num(mean_of(trained[arm]["training"][f"flat_{when}"])) for when in ("early", "late")]
        for arm in ("grpo", "ada")
        if arm in trained and trained[arm]["training"]
    }
    if len(flat) < 2:
        return ""
    (grpo_early, grpo_late), (ada_early, ada_late) = flat["grpo"], flat["ada"]
    return (f"Of GRPO's groups {grpo_early} are flat in the first quarter of the steps and {grpo_late} in the last, of "
            f"Ada's, after its replays, {ada_early} and {ada_late}.")  # fmt: skip


def _one_sided_words(results: Json) -> str:
    """The rules that are on one side of the baseline with every seed though their interval does not exclude zero."""
    words = []
    for arm, both in results["deltas"].items():
        if not (pair := both.get("trained_pair")) or not (matched := pair["matched"]) or matched["low"] is None:
            continue
        seeds = matched["per_seed"]
        side = "above" if min(seeds) > 0 else "below" if max(seeds) < 0 else None
        if side and matched["low"] < 0 < matched["high"]:
            words.append(f"{name_of(arm)} is {side} GRPO with each of its {len(seeds)} seeds, and `wai.compare` says "
                         f"{pair['compare']['word']}; our interval includes zero.")  # fmt: skip
    return " ".join(words)


def climb(results: Json) -> list[list[str]]:
    """Rows of round, what changed, score, against grpo: the baseline first, then each change to it."""
    arms = arms_of(results)
    order = [arm for arm in ("untrained", "grpo") if arm in arms]
    order += [arm for arm in arms if arm not in order]
    found = []
    for number, arm in enumerate(order):
        both = results["deltas"].get(arm, {}).get("trained_pair")
        against = "baseline" if arm == "grpo" else "–"
        if both and both["matched"]["value"] is not None:
            against = matched_words(both["matched"])
        found.append(
            [str(number), CHANGES.get(arm, name_of(arm)), score_words(row_of(results, arm, "trained_pair")), against]
        )
    return found
