"""results.json as text: the table in the terminal and the tables of the README.

    python tables.py            rewrite the tables of README.md from results.json (--check: exit 1 if they differ)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from recipe import BASELINE
from records import write_whole
from report import (
    DASH,
    OTHER,
    PHASES,
    ResultsError,
    load_results,
    num,
)
from words import (
    PARTNERS,
    Json,
    answer,
    clean,
    climb,
    count_words,
    gaps,
    learned,
    mean_of,
    partial_words,
    seed_words,
    shared_words,
)

# ---------------------------------------------------------------------------------------------- terminal

WIDTH = 100


def plus_minus(row: Json | None) -> str:
    """A mean with half its interval; without, where one seed gives none."""
    if not row:
        return DASH
    value, half = (num(row["mean"][name], 3) for name in ("value", "half"))
    return value if row["mean"]["half"] is None else f"{value}±{half}"


def bracket(found: Json, low: str = "low", high: str = "high", value: str = "value") -> str:
    bounds = "" if found[low] is None else f" [{num(found[low], 3, True)}, {num(found[high], 3, True)}]"
    return num(found[value], 3, True) + bounds


def _table_rows(results: Json) -> list[list[str]]:
    """method, mean, per seed, untrained partner, sends own, uses partner's, minutes, verdict; one row an arm."""
    rows, arms, shared = [], results["arms"], shared_words(results)
    for arm in dict.fromkeys(["untrained", *results["header"]["arms"], *(row["arm"] for row in arms.values())]):
        row, delta = arms.get(arm), results["deltas"].get(arm, {}).get("trained_pair")
        if row is None:
            rows.append([arm, *[DASH] * 7])
            continue
        seeds = " ".join(map(num, row["score"]))
        if len(row["score"]) > 5:
            seeds = f"{num(min(row['score']))} to {num(max(row['score']))} ({len(row['score'])})"
        verdict = "baseline" if arm == BASELINE else DASH
        if delta:
            verdict = delta["compare"]["word"] + "*" * bool(delta["flag"])
        means = [num(mean_of(row["talk"][name])) for name in ("sends_own", "uses_partners")]
        minutes = num(mean_of(row["minutes"]), 1)
        if shared and row["minutes"]:
            minutes += f" ({num(results['cost']['card_minutes'][arm] / len(row['minutes']), 1)})"
        rows.append([arm, plus_minus(row), seeds, plus_minus(arms.get(arm + OTHER)), *means, minutes, verdict])
    return rows


def render_table(results: Json) -> str:
    """The table in the terminal, at most 100 columns, and what it says in words."""
    minutes = f"{results['cost']['unit'].split()[0]} min"
    heads = ["method", "team solves", "per seed", "untrained B", "sends", "uses", minutes, f"against {BASELINE}"]
    rows = [heads, *_table_rows(results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    gap = "  " if sum(widths) + 2 * len(widths) <= WIDTH else " "
    lines = [gap.join(map(str.ljust, row, widths)).rstrip()[:WIDTH] for row in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    for sentence in in_words(results):
        lines += textwrap.wrap(sentence, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def how_to_read(results: Json) -> list[str]:
    """What ± is over, n and noise, and how far the minutes are those of a shared card."""
    noise = results["noise"]
    floor = "the noise of an evaluation was not measured"
    if noise:
        floor = "the untrained pair evaluated again moves by "
        floor += f"{num(noise['run_std'], 3)} (std of {noise['n_runs']} re-runs)"
        if noise["trained_std"] is not None:
            floor += f", a trained one by {num(noise['trained_std'], 3)} (from its chats on the same problems)"
    first = ("± is half a 95% interval, over training seeds and problems (untrained: over problems, its scores are "
             f"re-runs). n: {count_words(results)}; {floor}.")  # fmt: skip
    shared = shared_words(results)
    return [first, shared] if shared else [first]


def in_words(results: Json) -> list[str]:
    """What the table says and what it does not: how to read it, differences resolved, flags, reliability, gaps."""
    sentences = how_to_read(results)
    for partner in PARTNERS:
        known = []
        for arm, both in results["deltas"].items():
            m = both[partner]["matched"]
            resolved = "" if m["low"] is None else ", resolved" if m["low"] * m["high"] > 0 else ", not resolved"
            known += [f"{arm} {bracket(m)}{resolved}"] if m["value"] is not None else []
        if known:
            sentences.append(f"Matched seeds against {BASELINE}, {partner.replace('_', ' ')}: {'; '.join(known)}.")
    flags, missing = flagged(results), gaps(results)
    sentences += [f"* {'; '.join(flags)}."] if flags else []
    if results["deltas"]:
        sentences.append("The last column is wai.compare's verdict; `resolved` is ours, by intervals over matched "
                         "seeds and problems, and the two may differ.")  # fmt: skip
    return [*sentences, results["reliability"]["words"], *([f"Partial: {'; '.join(missing)}."] if missing else [])]


def flagged(results: Json) -> list[str]:
    """What to mind of the differences."""
    return [delta["flag"] for both in results["deltas"].values() for delta in both.values() if delta["flag"]]


# ---------------------------------------------------------------------------------------------- README


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a cell may quote a message, and cannot open another cell, a line, a tag or a comment."""
    escapes = str.maketrans({"|": "\\|", "*": "\\*", "\n": " ", "<": "&lt;"})
    cells = [[clean(cell).translate(escapes) for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [heads, ["---"] * len(heads), *cells])


def readme_tables(results: Json, benchmark: Json | None = None) -> dict[str, str]:
    """The README's tables by the name of their markers; the table of speed comes from benchmark.json."""
    makers: dict[str, Callable[[Json], str]] = {
        "answer": _answer, "result": _result_table, "deltas": _delta_table, "checks": _check_table,
        "cost": _cost_table, "published": _published_table, "climb": _climb_table, "learned": _learned,
    }  # fmt: skip
    speed = {} if benchmark is None else {"speed": _speed_table(benchmark)}
    return {name: make(results) for name, make in makers.items()} | speed


def _speed_table(benchmark: Json) -> str:
    about, rows = benchmark["about"], []
    for row in benchmark["rows"]:
        more = [f"{name.replace('_', ' ')} {value:,}" for name, value in row.items()
                if name not in ("work", "value", "unit")]  # fmt: skip
        rows.append([row["work"], f"{row['value']:,.3g} {row['unit']}", ", ".join(more)])
    versions, commit = about["versions"], (about["commit"] or "?")[:12]
    words = f"{about['device']}, {about['model']['id']}, {about['model']['loaded_as']}, torch {versions['torch']}, "
    words += f"transformers {versions['transformers']}, TRL {versions['trl']}, {about['date'][:10]}, commit {commit}."
    checks = []
    for check in benchmark.get("checks", []):
        found = "; ".join(f"{name}: {value}" for name, value in check["found"].items())
        line = f"- `{check['command']}`, {check['device']}, torch {check['torch']}, {check['date']}: "
        line += f"{check['passed']} passed, {len(check['failed'])} failed"
        checks.append(f"{line}. {found}" if found else line)
    last = "\n".join(["\n\nThe tests that need a GPU, as they last ran:\n", *checks]) if checks else ""
    return f"{markdown(['work', 'measured', 'and'], rows)}\n\n{words}{last}".rstrip()


def _answer(results: Json) -> str:
    model, words = results["header"]["model"]["id"], seed_words(results)
    return f"{' '.join(answer(results))} (Model: {model}; {words}.) {partial_words(results)}".strip()


def _climb_table(results: Json) -> str:
    return markdown(["round", "what changed", "score", f"against {BASELINE}, matched seeds"], climb(results))


def _learned(results: Json) -> str:
    return "\n".join(f"- {bullet}" for bullet in learned(results))


def _result_table(results: Json) -> str:
    head, unit = results["header"], results["cost"]["unit"]
    part = " (its part of the card)" * bool(shared_words(results))
    heads = ["method", "team solves it", "per seed", "with an untrained partner", "sends own facts", "uses partner's",
             f"{unit} a seed{part}", f"against {BASELINE}"]  # fmt: skip
    where = (f"{head['model']['id']} on {head['device']}, {seed_words(results)}, "
             f"summed up at commit {(head.get('commit') or 'unknown')[:12]}.")  # fmt: skip
    mind = ["*: see `mind` in the next table."] if flagged(results) else []
    words = " ".join([where, *how_to_read(results), *mind]).replace("*", "\\*")
    return f"{markdown(heads, _table_rows(results))}\n\n{words}"


def _delta_table(results: Json) -> str:
    rows = []
    for arm, both in results["deltas"].items():
        for partner, delta in both.items():
            c, matched = delta["compare"], bracket(delta["matched"])
            one_seed = f"seed {c['seed_after']}: {bracket(c, value='delta')}"
            over_seeds = bracket(c, "train_low", "train_high", "train_delta")
            verdict = f"{c['word']} (`{c['verdict']}`)"
            rows.append([arm, partner.replace("_", " "), one_seed, over_seeds, verdict, matched, delta["flag"] or ""])
    heads = ["method", "partner", "`wai.compare`, one seed", "`wai.compare`, all seeds", "its verdict",
             "ours, matched seeds and problems", "mind"]  # fmt: skip
    return markdown(heads, rows) if rows else f"No deltas: {BASELINE} or the other arms are missing."


def _check_table(results: Json) -> str:
    marks = {True: "yes", False: "no", None: "reported"}
    rows = [[c["check"], c["source"], c["result"], marks[c["ok"]]] for c in results["checks"]]
    return markdown(["check", "source", "result", "passed"], rows)


def _cost_table(results: Json) -> str:
    cost, rows = results["cost"], []
    for arm, minutes in cost["minutes"].items():
        chats, tokens = cost["chats"][arm], cost["tokens"][arm]
        spent = [num(value, 1) for value in (*(minutes[phase] for phase in PHASES), cost["card_minutes"].get(arm))]
        counts = [num(chats["training"], 0), num(chats["evaluation"], 0), num(sum(tokens.values()) / 1e6)]
        rows.append([arm, *spent, *counts])
    total, dollars = cost["total"], "no card was used"
    if total["dollars"] is not None:
        dollars = (f"{num(total['card_minutes'], 1)} minutes of the card, ${num(total['dollars'])} at "
                   f"${num(cost['price_per_hour'])} an hour")  # fmt: skip
    words = (f"{cost['unit']} over all seeds, on {cost['device']}. Together {num(total['minutes'], 1)} minutes, "
             f"{num(total['chats'], 0)} chats, {num(total['tokens'], 0)} tokens; {dollars}.")  # fmt: skip
    if shared := shared_words(results):
        words += (f" {shared} `total` is the wall time of the runs and the phases are its parts, both longer beside "
                  "others; `on the card` is each arm's part of the time the card was taken.")  # fmt: skip
    heads = ["method", *PHASES, "on the card", "training chats played", "evaluation chats", "million tokens"]
    return f"{markdown(heads, rows)}\n\n{words}"


def _published_table(results: Json) -> str:
    published, head, arms, rows = results["published"], results["header"], results["arms"], []
    for row in published["rows"]:
        ours = arms.get(row["arm"])
        seeds = [" / ".join(map(num, values)) or DASH for values in (row["per_seed"], row["partner_per_seed"])]
        talk = [num(row["sends_own"]), num(row["uses_partners"]), num(row["minutes"], 0)]
        scores = " / ".join(map(num, ours["score"])) if ours else DASH
        mine = [plus_minus(ours), scores, plus_minus(arms.get(row["arm"] + OTHER))]
        rows.append([row["arm"], num(row["mean"]), *seeds, *talk, *mine])
    theirs = ["team solves it", "per seed", "untrained partner", "sends own", "uses partner's", "minutes"]
    heads = ["method", *(f"published: {name}" for name in theirs), *(f"ours: {name}" for name in theirs[:3])]
    order = _order({row["arm"]: row["mean"] for row in published["rows"]})
    both = [row["arm"] for row in published["rows"] if row["arm"] in arms]
    seeds = {tuple(arms[arm]["seeds"]) for arm in both if arm != "untrained"}
    uneven = ", not all of them over the same seeds" * (len(seeds) > 1)
    our_order = _order({arm: arms[arm]["mean"]["value"] for arm in both})
    words = (f"Published: {published['model']} on {published['hardware']} ({published['versions']}), "
             f"{num(published['total_minutes'], 0)} GPU minutes, ${num(published['dollars'])}; "
             f"{'; '.join(published['notes'])}. Ours: {head['model']['id']} on {head['device']}. Highest mean first, "
             f"published: {order}; ours: {our_order}{uneven}. Theirs are {published['source']}.")  # fmt: skip
    return f"{markdown(heads, rows)}\n\n{words}"


def _order(means: dict[str, float | None]) -> str:
    """The trained arms, the highest mean first."""
    known = {arm: mean for arm, mean in means.items() if mean is not None and arm != "untrained"}
    return ", ".join(sorted(known, key=known.__getitem__, reverse=True)) or DASH


MARKER = re.compile(r"<!-- (/?)results:(\w+) -->")


def update_readme(text: str, results: Json, benchmark: Json | None = None) -> str:
    """The text with what stands between `<!-- results:NAME -->` and `<!-- /results:NAME -->` made anew."""
    tables, out, end, opened = readme_tables(results, benchmark), [], 0, None
    for mark in MARKER.finditer(text):
        closing, name = mark[1] == "/", mark[2]
        if name not in tables or opened != (name if closing else None):
            line = text.count("\n", 0, mark.start()) + 1
            raise ResultsError(f"line {line}: {mark[0]} does not fit: {', '.join(tables)}, opened and closed in turn")
        out.append(f"\n{tables[name]}\n{mark[0]}" if closing else text[end : mark.end()])
        end, opened = mark.end(), None if closing else name
    if opened:
        raise ResultsError(f"<!-- results:{opened} --> is never closed")
    return "".join([*out, text[end:]])


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite or check the README. Returns 0; 1 where --check finds a difference; 2 for input that cannot be used."""
    words = argparse.ArgumentParser(prog="tables.py", description="Write the tables of the README from results.json.")
    words.add_argument("--readme", type=Path, default=Path("README.md"))
    words.add_argument("--results", type=Path, default=Path("results.json"))
    words.add_argument("--benchmark", type=Path, default=Path("benchmark.json"))
    words.add_argument("--check", action="store_true", help="change nothing; exit 1 if the tables are out of date")
    given = words.parse_args(argv)
    try:
        old = given.readme.read_text(encoding="utf-8")
        benchmark = json.loads(given.benchmark.read_text()) if given.benchmark.exists() else None
        new = update_readme(old, load_results(given.results), benchmark)
    except (ResultsError, OSError, ValueError, KeyError) as error:
        print(f"tables.py: {error}", file=sys.stderr)
        return 2
    if given.check:
        print(f"{given.readme} {'is as' if old == new else 'differs from'} {given.results}")
        return int(old != new)
    write_whole(given.readme, new.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
