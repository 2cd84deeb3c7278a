"""Show results.json where people look: a card to read offline, and the experiment on the While platform.

    python post.py                   write card/ (card.html, card.md, charts); with WHILEAI_API_KEY also publish
    python post.py --question        publish the question alone, before there are results
    python post.py --results out/tiny/results.json --out out/tiny/card

Every number is read from results.json. What a model wrote is shown as text, never as markup. Publishing twice
changes nothing; after a publish that broke off, the same command completes it.
Exit code: 0 done, 1 the platform did not take it (the card is written all the same), 2 bad input.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from facts import numbers_in
from records import write_whole
from words import (
    CHANGES,
    PARTNERS,
    Json,
    answer,
    arms_of,
    clean,
    interval,
    matched_words,
    mean_of,
    name_of,
    num,
    one_line,
    partial_words,
    row_of,
    runs_show,
    score_words,
    seed_list,
    seed_words,
    shared_words,
    spread,
)

if TYPE_CHECKING:  # matplotlib and whileai are imported where they are used: a refused file costs no second
    from matplotlib.axes import Axes
    from whileai.platform import Tracked

AGENT = "talk-credit"  # the card's name on the platform
BEHAVIORS = {"trained_pair": "team-solves", "untrained_partner": "with-untrained-partner"}
# Okabe and Ito's palette, which holds for the colour-blind, and a marker an arm for print. The four greys are
# stand-ins: in the page every colour becomes a CSS variable, so that one drawing serves light and dark.
INK, MUTED, GRID, PAPER = "#1b1f25", "#5d6671", "#dfe3e8", "#fffffe"
LOOKS = {
    "untrained": ("#6b7683", "X"), "grpo": ("#0072b2", "o"), "ada": ("#d55e00", "^"), "raft": ("#009e73", "s"),
    "mixed": ("#cc79a7", "D"), "ada_mixed": ("#e69f00", "v"), "grpo12": ("#56b4e9", "P"),
}  # fmt: skip
GLYPHS = {"X": "✖", "o": "●", "^": "▲", "s": "■", "D": "◆", "v": "▼", "P": "✚"}
PHASES = {
    "play": ("#0072b2", ""),
    "update": ("#e69f00", "///"),
    "evaluate": ("#009e73", "\\\\\\"),
    "rest": ("#6b7683", ""),
}
CURVES = {
    "reward": ("Team reward", "share of the two answers right, in training chats"),
    "flat": ("Flat groups", "share of problems whose chats all scored the same"),
    "sends_own": ("Sends own facts", "share of a copy's private numbers that it tells its partner"),
    "uses_partners": ("Uses the partner's facts", "share of the partner's private numbers in the last message"),
}


class PublishError(Exception):
    """The platform did not take something; the message is one line and says what to do."""


# ---------------------------------------------------------------------------------------------- charts


def draw_scores(ax: Axes, results: Json) -> None:
    """Each arm twice, with itself (filled) and with an untrained partner (hollow): mean, interval, a dot a seed."""
    published = {row["arm"]: row for row in results["published"]["rows"]}
    arms, right = arms_of(results), 0.05
    for y, arm in enumerate(arms):
        color, marker = LOOKS.get(arm, (INK, "o"))
        theirs = published.get(arm, {})
        for partner, at in zip(PARTNERS, (y, y) if arm == "untrained" else (y - 0.19, y + 0.21), strict=True):
            row = row_of(results, arm, partner)
            if row is None or row["mean"]["value"] is None or (arm == "untrained" and partner != PARTNERS[0]):
                continue
            full, (low, high, _) = partner == PARTNERS[0], spread(row)
            if low is not None and high is not None:
                ax.plot([low, high], [at, at], color=color, lw=2.2, solid_capstyle="round", zorder=2)
                right = max(right, high)
            ax.plot(row["score"], [at + 0.13] * len(row["score"]), "o", color=color, ms=3.2, mew=0, zorder=3)
            ax.plot(row["mean"]["value"], at, marker, mfc=color if full else PAPER, mec=color, mew=1.6, ms=8, zorder=4)
            beside = theirs.get("mean") if full else mean_of(theirs.get("partner_per_seed"))
            if beside is not None:
                ax.plot(beside, at, "|", color=MUTED, ms=20, mew=1.6, zorder=1)
            ax.annotate(num(row["mean"]["value"], 3), (1, at), xycoords=("axes fraction", "data"), xytext=(30, 0),
                        textcoords="offset points", ha="right", va="center", color=INK if full else MUTED)  # fmt: skip
            right = max(right, *row["score"], beside or 0)
    ax.set(ylim=(len(arms) - 0.4, -0.6), xlim=(0, right * 1.04), xlabel="share of held-out answers right")
    ax.set_yticks(range(len(arms)), [name_of(arm) for arm in arms])
    keys = [
        ("o", MUTED, 7, "with itself"),
        ("o", PAPER, 7, "with an untrained partner"),
        (".", MUTED, 6, "one seed"),
        ("|", PAPER, 11, "published"),
    ]
    for marker, face, size, label in keys:
        ax.plot([], [], marker, mfc=face, mec=MUTED, mew=1.5 if marker != "." else 0, ms=size, label=label)
    ax.legend(
        loc="upper center", bbox_to_anchor=(0.36, -0.13), ncols=2, frameon=False, handletextpad=0.2, columnspacing=1.2
    )
    ax.grid(axis="x", color=GRID, lw=0.8)


def smooth(values: Sequence[float], width: int = 5) -> list[float]:
    """A running mean over `width` neighbours, fewer at the ends."""
    windows = (values[max(0, i - width // 2) : i + width // 2 + 1] for i in range(len(values)))
    return [sum(w) / len(w) for w in windows]


def curve_of(row: Json, measure: str) -> tuple[list[float], list[list[float]]]:
    """The steps at which every seed has a value, and at each the smoothed values of the seeds."""
    tracks = []
    for curve in row["curves"]:
        known = [(s, v) for s, v in zip(curve["step"], curve[measure], strict=True) if v is not None]
        tracks.append(dict(zip([s for s, _ in known], smooth([v for _, v in known]), strict=True)))
    shared = sorted(set.intersection(*map(set, tracks))) if tracks else []
    return shared, [[track[step] for track in tracks] for step in shared]


def draw_curve(measure: str) -> Callable[[Axes, Json], None]:
    def draw(ax: Axes, results: Json) -> None:
        for arm in arms_of(results):
            steps, values = curve_of(results["arms"][arm], measure)
            if not steps:
                continue
            color, marker = LOOKS.get(arm, (INK, "o"))
            if len(values[0]) > 1:
                ax.fill_between(
                    steps, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.13, lw=0
                )
            ax.plot(steps, [sum(v) / len(v) for v in values], color=color, lw=1.8, marker=marker, ms=5,
                    markevery=max(1, len(steps) // 6), label=name_of(arm))  # fmt: skip
        ax.set_ylim(0, min(1.02, 1.1 * (ax.dataLim.y1 if ax.lines else 1)))
        ax.set_xlim(left=0)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_xlabel("step")
        ax.tick_params(axis="y", labelcolor=MUTED)
        ax.grid(axis="y", color=GRID, lw=0.8)
        if ax.lines:
            ax.legend(
                loc="lower center",
                bbox_to_anchor=(0.5, 1.0),
                ncols=2,
                frameon=False,
                handlelength=1.6,
                columnspacing=1.2,
            )

    return draw


def phases_of(minutes: Json) -> dict[str, float]:
    """Minutes by phase, the small ones together."""
    named = {phase: minutes.get(phase) or 0.0 for phase in ("play", "update", "evaluate")}
    return {**named, "rest": max(0.0, (minutes.get("total") or 0.0) - sum(named.values()))}


def draw_cost(ax: Axes, results: Json) -> None:
    """Minutes of each arm, all seeds together, by what they were spent on."""
    arms = [arm for arm in arms_of(results) if arm in results["cost"]["minutes"]]
    totals = [results["cost"]["minutes"][arm].get("total") or 0.0 for arm in arms]
    start = [0.0] * len(arms)
    for phase, (color, hatch) in PHASES.items():
        width = [phases_of(results["cost"]["minutes"][arm])[phase] for arm in arms]
        ax.barh(
            range(len(arms)),
            width,
            left=start,
            color=color,
            hatch=hatch,
            edgecolor=PAPER,
            lw=0.6,
            height=0.56,
            label=phase,
        )
        start = [a + b for a, b in zip(start, width, strict=True)]
    for y, total in enumerate(totals):
        ax.annotate(
            num(total, 0 if total >= 10 else 1),
            (total, y),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
    ax.set(
        ylim=(len(arms) - 0.4, -0.6),
        xlim=(0, (max(totals, default=0) or 1) * 1.14),
        xlabel=f"{results['cost']['unit']}, all seeds",
    )
    ax.set_yticks(range(len(arms)), [name_of(arm) for arm in arms])
    ax.legend(
        loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=4, frameon=False, handlelength=1.2, columnspacing=1.2
    )
    ax.grid(axis="x", color=GRID, lw=0.8)


def scores_alt(results: Json) -> str:
    parts = []
    for arm in arms_of(results):
        parts.append(f"{name_of(arm)}: {score_words(row_of(results, arm, PARTNERS[0]))}")
        if arm != "untrained":
            parts[-1] += f", with an untrained partner {score_words(row_of(results, arm, PARTNERS[1]))}"
    return f"Share of held-out answers right, mean and interval. {'; '.join(parts)}."


def curve_alt(results: Json, measure: str) -> str:
    parts = []
    for arm in arms_of(results):
        _, values = curve_of(results["arms"][arm], measure)
        if values:
            parts.append(f"{name_of(arm)} from {num(mean_of(values[0]))} to {num(mean_of(values[-1]))}")
    return f"{CURVES[measure][0]} by training step, mean over seeds. {'; '.join(parts) or 'No curve was recorded'}."


def cost_alt(results: Json) -> str:
    parts = [f"{name_of(arm)} {num(m.get('total'), 1)}" for arm, m in results["cost"]["minutes"].items()]
    return f"{results['cost']['unit']}, all seeds together: {', '.join(parts)}."


def render_chart(name: str, draw: Callable[[Axes, Json], None], results: Json, height: float) -> tuple[str, bytes]:
    """One chart as SVG and PNG; the same results give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {
        "svg.fonttype": "none", "svg.hashsalt": name, "text.parse_math": False, "font.family": ["DejaVu Sans"],
        "font.size": 11, "legend.fontsize": 10.5, "hatch.linewidth": 0.7, "axes.edgecolor": GRID, "text.color": INK,
        "axes.labelcolor": MUTED, "xtick.labelcolor": MUTED, "ytick.labelcolor": INK,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.9, height), facecolor=PAPER, layout="constrained")
        ax = figure.add_subplot(facecolor=PAPER)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(length=0)
        ax.set_axisbelow(True)
        draw(ax, results)
        svg, png = io.StringIO(), io.BytesIO()
        figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
        figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
    return svg.getvalue(), png.getvalue()


def inline(svg: str, alt: str) -> str:
    """A chart for the page: colours as variables of the style sheet, the page's font, a label for who cannot see it."""
    import markupsafe

    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*">', "<g>", svg)  # the same ids in each chart of a page
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    names = {
        INK: "ink",
        MUTED: "muted",
        GRID: "grid",
        PAPER: "paper",
        **{color: f"c-{arm}" for arm, (color, _) in LOOKS.items()},
    }
    for color, variable in names.items():
        svg = svg.replace(color, f"var(--{variable})")
    box = re.search(r'viewBox="[^"]*"', svg)
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    head = f'<svg {box[0] if box else ""} role="img" aria-label="{markupsafe.escape(alt)}" {spaces}>'
    return re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1)


def make_charts(results: Json) -> dict[str, Json]:
    """Every chart, by file name: SVG, PNG, what to say above it and in its place."""
    rows = len(arms_of(results))
    plan = {"scores": (draw_scores, "Held-out score", scores_alt(results), 1.5 + 0.62 * rows)}
    plan |= {
        f"curve-{m.replace('_', '-')}": (draw_curve(m), title, curve_alt(results, m), 3.3)
        for m, (title, _) in CURVES.items()
    }
    plan["cost"] = (draw_cost, "Cost", cost_alt(results), 1.1 + 0.42 * rows)
    charts = {}
    for name, (draw, title, alt, height) in plan.items():
        svg, png = render_chart(name, draw, results, height)
        charts[name] = {"svg": svg, "png": png, "title": title, "alt": one_line(alt, 2000)}
    return charts


# ---------------------------------------------------------------------------------------------- card

_PIECE = re.compile(r"\\[dt]?frac\{\d+\}\{\d+\}|[½¼¾⅐-⅞]|\d[\d,]*(?:\.\d+)?(?:/\d+)?|\.\d+|[A-Za-z]+(?:-[A-Za-z]+)*")


def marked(text: str, private: Sequence[str]) -> list[tuple[str, bool]]:
    """A text in pieces, each with whether it names one of the private numbers; the shortest run of up to four
    words that does, so that "twenty five" is found and the words around it are not."""
    pieces, out, done, i = list(_PIECE.finditer(text)), [], 0, 0
    wanted = frozenset(private)
    while wanted and i < len(pieces):
        for j in range(i, min(i + 4, len(pieces))):
            start, end = pieces[i].start(), pieces[j].end()
            if hits := numbers_in(text[start:end]) & wanted:
                if j > i and hits <= numbers_in(text[pieces[i + 1].start() : end]):
                    break  # the first word has no part in it
                out += [(text[done:start], False), (text[start:end], True)]
                done, i = end, j
                break
        i += 1
    return [(part, hit) for part, hit in [*out, (text[done:], False)] if part]


def chat_of(chat: Json) -> Json:
    """An example chat, ready to lay out: texts made safe, private numbers marked where they are sent and used."""
    turns = []
    for number, turn in enumerate(chat["turns"]):
        speaker, early = number % 2, number < 2
        owner = speaker if early else 1 - speaker  # whose private numbers count here: sent first, used last
        hits = turn["sent"] if early else turn["used"]
        turns.append({
            **turn, "speaker": "AB"[speaker], "owner": "AB"[owner], "early": early, "hits": len(hits),
            "of": len(chat["private"][owner]), "pieces": marked(clean(turn["text"]), hits),
            "answer": None if early else chat["answers"][speaker],
        })  # fmt: skip
    facts = [[marked(clean(fact), chat["private"][copy]) for fact in chat["facts"][copy]] for copy in (0, 1)]
    return {**chat, "turns": turns, "marked_facts": facts}


def context(results: Json, charts: dict[str, Json]) -> Json:
    """What the template reads: results.json itself, and what is worked out from it here."""
    # no line break inside an interval
    first, second = (re.sub(r"\[[^\]]*\]", lambda m: m[0].replace(" ", "\u00a0"), s) for s in answer(results))
    published = {row["arm"]: row for row in results["published"]["rows"]}
    rows = [
        {"arm": arm, "row": results["arms"][arm], "partner": row_of(results, arm, PARTNERS[1]),
         "published": published.get(arm), "deltas": results["deltas"].get(arm, {})}
        for arm in arms_of(results)
    ]  # fmt: skip
    chats = {arm: [chat_of(chat) for chat in chats] for arm, chats in results["chats"]["arms"].items() if chats}
    scores = {arm: results["arms"][arm]["mean"]["value"] or 0 for arm in chats if arm in results["arms"]}
    return {
        "r": results, "h": results["header"], "first": first, "second": second, "partial": partial_words(results),
        "shared": shared_words(results), "seeds": seed_list(results), "runs_show": runs_show(results),
        "rows": rows, "chats": chats, "opened": {"untrained", max(scores, key=scores.__getitem__, default="")},
        "partners": PARTNERS, "changes": CHANGES, "glyphs": {arm: GLYPHS[marker] for arm, (_, marker) in LOOKS.items()},
        "curve_notes": {f"curve-{m.replace('_', '-')}": note for m, (_, note) in CURVES.items()},
        "charts": {name: {**chart, "inline": inline(chart["svg"], chart["alt"])} for name, chart in charts.items()},
    }  # fmt: skip


def render_html(results: Json, charts: dict[str, Json]) -> str:
    """card.html: one file, no script, nothing fetched. Everything but the drawn charts goes through autoescape."""
    import jinja2
    import markupsafe

    def shown(value: Any) -> Any:
        return value if isinstance(value, markupsafe.Markup) or not isinstance(value, str) else clean(value)

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, finalize=shown,
    )  # fmt: skip
    env.filters |= {"num": num, "name": name_of, "mean_of": mean_of, "drawn": markupsafe.Markup}
    env.globals |= {"interval": interval, "spread": spread, "row_of": row_of}
    return env.get_template("card.html.j2").render(context(results, charts)) + "\n"


def fenced(text: str) -> str:
    """Text as a Markdown code block that it cannot close."""
    text = clean(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def flat(value: Any) -> Any:
    """The same JSON with every text on one line and safe to show."""
    if isinstance(value, dict):
        return {key: flat(part) for key, part in value.items()}
    return (
        [flat(part) for part in value]
        if isinstance(value, list)
        else one_line(value, 2000)
        if isinstance(value, str)
        else value
    )


def chat_markdown(arm: str, chat: Json) -> list[str]:
    facts = [f"{'AB'[copy]} knows: {fact}" for copy in (0, 1) for fact in chat["facts"][copy]]
    title = f"### {name_of(arm)}, {one_line(chat['problem'], 40)}: team reward {chat['reward']}"
    messages = [f"{'AB'[i % 2]} says:\n\n{fenced(turn['text'])}" for i, turn in enumerate(chat["turns"])]
    return [title, fenced("\n".join([*facts, f"question: {chat['question']}", f"right: {chat['gold']}"])), *messages]


def render_markdown(results: Json, charts: dict[str, Json]) -> str:
    """card.md: what card.html says, for a terminal or a repository page. Its tables are the README's."""
    from tables import readme_tables

    def picture(name: str) -> str:
        return f"![{charts[name]['alt']}](charts/{name}.svg)"

    head, partial = results["header"], partial_words(results)
    # a cell may quote a message (what the hack scan found): it must not open a tag or a new line
    plain = flat(results)
    tables = {name: table.replace("<", "&lt;") for name, table in readme_tables(plain).items()}
    parts = [f"# {one_line(head['question'])}", f"**{partial}**" if partial else "", "\n\n".join(answer(results))]
    parts += ["## Result", picture("scores"), tables["result"], "## Against GRPO", tables["deltas"]]
    parts += ["## Reliability", one_line(results["reliability"]["words"], 2000)]
    parts += ["## What the runs show", "\n".join(f"- {clean(text)}" for text in runs_show(plain))]
    parts += ["## Published, on other hardware and software", tables["published"]]
    parts += ["## While training", *(picture(name) for name in charts if name.startswith("curve-"))]
    parts += ["## Cost", picture("cost"), tables["cost"], "## Checks", tables["checks"]]
    parts += ["## How they talk", one_line(results["chats"]["rule"], 2000)]
    for arm, chats in results["chats"]["arms"].items():
        parts += [part for chat in chats for part in chat_markdown(arm, chat)]
    parts += ["## Run it again", fenced(f"{head['command']}\npython post.py")]
    return clean("\n\n".join(part for part in parts if part)) + "\n"


def card_files(results: Json) -> dict[str, bytes]:
    """The card's files by name. The names are fixed: none is made of what was read."""
    charts = make_charts(results)
    files = {"card.html": render_html(results, charts), "card.md": render_markdown(results, charts)}
    pictures = {f"charts/{name}.{kind}": chart[kind] for name, chart in charts.items() for kind in ("svg", "png")}
    return {
        name: content.encode() if isinstance(content, str) else content for name, content in (files | pictures).items()
    }


def write_card(files: dict[str, bytes], out: Path) -> None:
    for name, content in files.items():
        write_whole(out / name, content)


# ---------------------------------------------------------------------------------------------- platform


def digest_of(results: Json) -> str:
    """What a published run carries to say that it is complete and from these results; dates and commands aside."""
    header = {k: v for k, v in results["header"].items() if k not in ("date", "command", "reused")}
    return hashlib.sha256(json.dumps({**results, "header": header}, sort_keys=True).encode()).hexdigest()[:16]


def experiment_words(results: Json) -> dict[str, str]:
    """The experiment block, its numbers from the configuration that ran."""
    head, config, data = results["header"], results["header"]["config"], results["header"]["data"]
    rules = [
        f"- {name_of(arm)}: {CHANGES.get(arm, '')} Advantage: {one_line(results['arms'][arm]['formula'] or '–')}"
        for arm in arms_of(results) if arm != "untrained"
    ]  # fmt: skip
    method = [
        f"Two copies of {one_line(head['model']['id'])} each hold half of the facts of a problem and talk: A, B, A, B.",
        f"{config['steps']} steps of {config['problems']} problems x {config['group']} chats,",
        f"training {seed_words(results)}. Only the credit changes:",
    ]
    notes = [partial_words(results), " ".join(answer(results)), one_line(results["reliability"]["words"], 1000)]
    return {
        "question": one_line(head["question"], 1000),
        "hypothesis": "A group whose chats all scored the same gives GRPO no gradient. Playing those problems again "
        "and training on a balanced group of the same size should recover that signal and beat the other rules.",
        "method": " ".join(method) + "\n" + "\n".join(rules),
        "measure": "Share of the two final answers that are right, decided by a program, on "
        f"{data['heldout_used']} held-out problems, {config['eval_chats']} chats each; once with itself, once with the "
        "untrained model as partner.",
        "decide": "A rule replaces GRPO if its difference, paired by seed and problem, has an interval that excludes "
        "zero and lies outside the noise of repeated evaluations; else the question stays open.",
        "notes": "\n\n".join(note for note in notes if note),
    }


def note_words(results: Json, arm: str) -> str:
    """A run's note: changed, moved, why, learned, reproduce."""
    head, row, deltas = results["header"], results["arms"][arm], results["deltas"].get(arm, {})
    other, talk, training = row_of(results, arm, PARTNERS[1]), row["talk"], row["training"]
    moved = [f"held-out score {score_words(row)}; with an untrained partner {score_words(other)}"]
    for partner, both in deltas.items():
        c, over_seeds = both["compare"], f"{name_of(arm)} {matched_words(both['matched'])}"
        one_seed = f"{num(c['delta'], 3, True)} {interval(c['low'], c['high'], 3, True)}"
        moved.append(f"{partner.replace('_', ' ')} against GRPO: wai.compare says {one_line(c['word'])}")
        moved[-1] += f" (seed {c['seed_after']}: {one_seed}); over matched seeds {over_seeds}"
    why = f"sends own facts {num(mean_of(talk['sends_own']))}, uses the partner's {num(mean_of(talk['uses_partners']))}"
    if training:
        flat, chats = (training["flat_early"], training["flat_late"]), (training["drawn"], training["kept"])
        why += f"; flat groups {num(mean_of(flat[0]))} early, {num(mean_of(flat[1]))} late"
        why += f"; chats a seed: {num(mean_of(chats[0]), 0)} drawn, {num(mean_of(chats[1]), 0)} kept"
    each = ", ".join(f"{seed}: {num(score, 3)}" for seed, score in zip(row["seeds"], row["score"], strict=True))
    flags = [one_line(both["flag"]) for both in deltas.values() if both["flag"]]
    tree = " with changes not committed" if head["clean"] is False else ""
    command = "python recipe.py"
    command += "" if arm == "untrained" else f" --arm {arm} --seeds {' '.join(map(str, row['seeds']))}"
    sections = {
        "Changed": CHANGES.get(arm, one_line(row["formula"])),
        "Moved": "; ".join(moved) + ".",
        "Why": why + ". These were measured beside the score; they do not prove the cause.",
        "Learned": "; ".join([f"by {one_line(row['unit'])} {each}", *flags]) + ".",
        "Reproduce": f"`{command}` at commit {one_line(head['commit'] or 'unknown')}{tree}. "
        f"The whole table: `{one_line(head['command']).replace('`', '')}`",
    }
    parts = [f"**{partial}**"] if (partial := partial_words(results)) else []
    return "\n\n".join([*parts, *(f"**{title}.** {text}" for title, text in sections.items())])[:8000]


def plotly_scores(results: Json) -> Json:
    """The chart of both partners, as the platform draws it: a bar with its interval, and a point a seed."""
    traces = []
    for partner, label, look in zip(
        PARTNERS, ("with itself", "with an untrained partner"), ("grpo", "ada"), strict=True
    ):
        rows = {name_of(arm): row for arm in arms_of(results) if (row := row_of(results, arm, partner))}
        values, ends, color = (
            [row["mean"]["value"] for row in rows.values()],
            map(spread, rows.values()),
            LOOKS[look][0],
        )
        spans = [(v - (v if low is None else low), (v if high is None else high) - v)
                 for v, (low, high, _) in zip(values, ends, strict=True)]  # fmt: skip
        bars = {"type": "data", "symmetric": False, "arrayminus": [s[0] for s in spans], "array": [s[1] for s in spans]}
        seeds = [(name, score) for name, row in rows.items() for score in row["score"]]
        traces += [
            {"type": "bar", "name": label, "x": list(rows), "y": values, "error_y": bars, "marker": {"color": color}},
            {"type": "scatter", "mode": "markers", "name": f"{label}, one seed", "x": [name for name, _ in seeds],
             "y": [score for _, score in seeds], "marker": {"color": color, "size": 7, "symbol": "circle-open"}},
        ]  # fmt: skip
    axis = {"title": {"text": "share of held-out answers right"}, "rangemode": "tozero"}
    return {"data": traces, "layout": {"barmode": "group", "yaxis": axis}}


def record_of(results: Json, arm: str) -> Json:
    """The run's record: data, optimizer, evaluation, provenance. Its pin `results` is the mark of completion."""
    head, noise, seeds = results["header"], results["noise"] or {}, results["arms"][arm]["seeds"]
    config, data = head["config"], head["data"]
    optimizer = {"loss_type": "dapo", "lr": config["learning_rate"], "beta": 0.0, "num_generations": config["group"],
                 "prompts_per_step": config["problems"], "max_completion_tokens": config["last_message_tokens"],
                 "temperature": config["temperature"], "lora_rank": config["lora_rank"], "seed": seeds[0]}  # fmt: skip
    return {
        "data": {
            "train": f"{one_line(data['id'])} train", "n_train": data["train_used"],
            "holdout": f"{one_line(data['id'])} test", "n_holdout": data["heldout_used"],
            "holdout_hash": data["fingerprint"], "decontaminated_dropped": data["decontaminate_dropped"],
        },
        "optimizer": None if arm == "untrained" else optimizer,
        "eval": {"metric": "pass@1", "k": 2 * config["eval_chats"], "reader": "boxed",
                 "run_std": noise.get("run_std"), "run_std_runs": noise.get("n_runs")},
        "provenance": {"pins": {**{k: str(v) for k, v in head["versions"].items()}, "results": digest_of(results)},
                       "recipe": head["recipe"], "commit": head["commit"], "paper": head["paper_url"]},
    }  # fmt: skip


def graded_examples(results: Json, arm: str) -> list[Json]:
    """The example chats' answers as graded rows."""
    return [
        {"prompt": clean(chat["question"]), "reply": clean(chat["turns"][2 + copy]["text"]), "ok": answer["correct"],
         "reference": clean(chat["gold"]), "why": f"the box: {one_line(answer['kind'])}", "tags": {"copy": "AB"[copy]}}
        for chat in results["chats"]["arms"].get(arm, []) for copy, answer in enumerate(chat["answers"])
    ]  # fmt: skip


def run_plan(results: Json, arm: str) -> Json:
    """What is published of one method."""
    row, cost, trained = results["arms"][arm], results["cost"], arm != "untrained"
    steps, values = curve_of(row, "reward")
    scores = []
    for partner, behavior in BEHAVIORS.items():
        if scored := row_of(results, arm, partner):
            value, (low, high, _) = scored["mean"]["value"], spread(scored)
            half = None if low is None or high is None else max(value - low, high - value)
            shown = graded_examples(results, arm) if partner == PARTNERS[0] else []
            scores.append({"behavior": behavior, "score": value, "ci": half, "n": scored["mean"]["n_problems"],
                           "examples": shown or None})  # fmt: skip
    minutes, paid = cost["minutes"].get(arm, {}).get("total"), cost["total"]["dollars"] is not None
    hours, steps_run = None if minutes is None else minutes / 60, results["header"]["config"]["steps"]
    dollars = round(cost["card_minutes"][arm] / 60 * cost["price_per_hour"], 2) if paid and hours is not None else None
    return {
        "open": {"version": arm if trained else "base", "method": arm if trained else None},
        "curve": [(round(step), mean_of(at)) for step, at in zip(steps, values, strict=True)],
        "scores": scores,
        "note": note_words(results, arm),
        "finish": {"hours": hours, "cost_usd": dollars, "gpu": one_line(cost["device"], 40) if paid else None,
                   "steps": steps_run if trained else None, "record": record_of(results, arm)},
    }  # fmt: skip


def publication(results: Json) -> Json:
    """All that goes to the platform, made and checked by its models before the first call: bad results then never
    stop a publish half-way. Raises ValueError for what those models refuse."""
    from whileai.platform import Behavior, Experiment, RunRecord

    data, band, partial = results["header"]["data"], (results["noise"] or {}).get("noise_band"), partial_words(results)
    played = {"trained_pair": "with a copy of itself", "untrained_partner": "with the untrained model as its partner"}
    behaviors = [
        {"name": name, "graded_by": "program", "reward_is_judge": False, "n": data["heldout_used"],
         "test_version": data["fingerprint"], "noise_floor": None if band is None else round(100 * band, 2),
         "contamination": 0,  # what overlapped was dropped; the record has the count
         "description": f"Share of the final answers right, {played[partner]}. {partial}"[:400].strip(),
         "rubric": "A program reads the last box of a copy's last message and compares its value with the right "
                   "answer. No box, several values in it, or one that cannot be read count as wrong."}
        for partner, name in BEHAVIORS.items()
    ]  # fmt: skip
    plan = {
        "experiment": experiment_words(results), "behaviors": behaviors, "digest": digest_of(results),
        "runs": {arm: run_plan(results, arm) for arm in arms_of(results)}, "figure": plotly_scores(results),
        "caption": f"{partial} Mean over seeds with its 95% interval, and each seed."[-1000:].strip(),
    }  # fmt: skip
    parts = [(Experiment, [plan["experiment"]]), (Behavior, behaviors),
             (RunRecord, [run["finish"]["record"] for run in plan["runs"].values()])]  # fmt: skip
    for model, values in parts:
        for value in values:
            model.model_validate(value)
    return plan


def post_run(tracked: Tracked, plan: Json, run_id: str) -> None:
    """One method, whole: opened anew under its id (which empties what a broken publish left), the curve, a score
    a partner, the note; last the record with the digest, which marks it complete."""
    targets = list(BEHAVIORS.values())
    run = tracked.run(**plan["open"], id=run_id, targets=targets, flush_every=10**6, flush_seconds=1e9)
    for step, reward in plan["curve"]:
        run.log(step, reward=round(reward, 4))
    run.flush()
    if run.errors:  # flush never raises, being made for training loops; this call does, if the cause is still there
        tracked.open(run_id)
        raise PublishError(f"the training curve of {run.version} did not arrive")
    for score in plan["scores"]:
        run.score(**score, fraction=True)
    run.note(plan["note"])
    run.finish(**plan["finish"], say=False)


def is_complete(row: Json | None, digest: str) -> bool:
    """Whether a run on the platform carries the mark that post_run sets last."""
    record = (row or {}).get("record") or {}
    return ((record.get("provenance") or {}).get("pins") or {}).get("results") == digest


def publish(plan: Json, tracked: Tracked, say: Callable[[str], None]) -> None:
    """Bring the platform's card to what the plan says; a run that is there already stays as it is."""
    tracked.register()
    tracked.experiment(**plan["experiment"])
    for behavior in plan["behaviors"]:
        tracked.behavior(behavior["name"], **{k: v for k, v in behavior.items() if k != "name"})
    there = {str(row.get("id")): row for row in tracked.runs(archived=True)}
    ids = {arm: f"{tracked.id[:48]}-{arm}" for arm in plan["runs"]}
    for arm, run_id in ids.items():
        done = is_complete(there.get(run_id), plan["digest"])
        if not done:
            post_run(tracked, plan["runs"][arm], run_id)
        say(f"{name_of(arm)}: {'is there already' if done else 'published'}")
    tracked.figure("both-partners", plan["figure"], caption=plan["caption"])
    for run_id in sorted(there.keys() - set(ids.values())):
        say(f"the platform also holds the run {one_line(run_id, 80)}, which these results do not: archive it there")


def publish_question(question: str, tracked: Tracked) -> None:
    """The question alone; the other fields of a block that is there stay."""
    tracked.register()
    before = tracked.experiment()
    tracked.experiment(**{**(before.model_dump() if before else {}), "question": question})


def reach(work: Callable[[], None], key: str) -> None:
    """Run `work`; whatever keeps the platform from taking it becomes one line that says what to do."""
    from whileai.platform import PlatformError, platform_url

    again = "run the same command again to complete it"
    try:
        work()
        return
    except PublishError as error:
        reason = f"{error}; {again}"
    except PlatformError as error:
        if error.status in (401, 403):
            reason = f"it refused the key ({error.status}): check WHILEAI_API_KEY"
        else:
            reason = f"{error} ({error.status or 'no answer'}); {again}"
    except (OSError, http.client.HTTPException) as error:  # the client lets a dropped connection and a time-out through
        late = isinstance(error, TimeoutError)
        reason = (
            f"{'it did not answer in time' if late else f'the connection broke off ({type(error).__name__})'}; {again}"
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it answered in a form that the client does not read ({type(error).__name__}: {error})"
    raise PublishError(one_line(f"{platform_url()}: {reason}".replace(key, "***"), 500))


# ---------------------------------------------------------------------------------------------- command line

# What the card reads and report.load_results leaves unchecked: a place ("*" is every entry) and its fields.
FIELDS = {
    "header": "title question command commit clean date reused paper paper_url recipe",
    "header.model": "id revision loaded_as",
    "header.data": "id fingerprint train_used heldout_used decontaminate_dropped",
    "header.config": "steps problems group eval_chats learning_rate last_message_tokens temperature lora_rank",
    "arms.*": "arm partner formula unit minutes training curves",
    "arms.*.mean": "value low high over n_problems",
    "arms.*.curves.*": "step reward flat sends_own uses_partners",
    "deltas.*": "trained_pair untrained_partner",
    "deltas.*.*": "compare matched flag",
    "deltas.*.*.compare": "word delta low high seed_after train_delta train_low train_high",
    "deltas.*.*.matched": "value low high per_seed",
    "reliability": "test arms pairs words",
    "cost": "unit device price_per_hour minutes card_minutes chats tokens total",
    "cost.total": "minutes card_minutes tokens dollars",
    "checks.*": "check source result ok",
    "chats": "rule arms",
    "chats.arms.*.*": "seed problem question facts gold private turns answers reward",
    "chats.arms.*.*.turns.*": "text tokens truncated clipped sent used",
    "chats.arms.*.*.answers.*": "kind value correct",
    "published": "source model hardware versions rows deltas notes total_minutes dollars",
    "published.rows.*": "arm mean per_seed partner_per_seed sends_own uses_partners minutes",
}


def places(value: Any, pattern: Sequence[str], where: str) -> Iterator[tuple[str, Any]]:
    """Every part that a pattern names, with where it is."""
    if not pattern:
        yield where, value
    elif pattern[0] == "*":
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(part, pattern[1:], f"{where}.{key}")
    else:
        yield from places(value[pattern[0]], pattern[1:], f"{where}.{pattern[0]}")


def load(path: Path) -> Json:
    """results.json, checked down to what the card reads. Raises report.ResultsError."""
    import report

    results = report.load_results(path)
    for place, names in FIELDS.items():
        try:
            for where, part in places(results, place.split("."), str(path)):
                for name in names.split():
                    if name not in part:
                        raise report.ResultsError(f"{where}.{name} is missing")
        except (LookupError, TypeError) as error:
            raise report.ResultsError(f"{path}: {place}: {type(error).__name__} {error}") from None
    for where, chat in places(results, ["chats", "arms", "*", "*"], str(path)):
        counts = {"turns": 4, "answers": 2, "facts": 2, "private": 2}
        if wrong := [name for name, count in counts.items() if len(chat[name]) != count]:
            raise report.ResultsError(f"{where}.{wrong[0]}: {len(chat[wrong[0]])} of {counts[wrong[0]]}")
    return results


def api_key() -> str | None:
    """WHILEAI_API_KEY, or None if it is not set. Raises PublishError for what cannot be a key."""
    key = os.environ.get("WHILEAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise PublishError("WHILEAI_API_KEY holds characters that no key has: copy it again")
    return key or None


def parser() -> argparse.ArgumentParser:
    what = "Write the card of results.json and, with WHILEAI_API_KEY, publish it."
    top = argparse.ArgumentParser(prog="post.py", description=what)
    top.add_argument("--results", type=Path, default=Path("results.json"), metavar="FILE", help="(%(default)s)")
    top.add_argument("--out", type=Path, default=Path("card"), metavar="DIR", help="folder of the card (%(default)s)")
    top.add_argument("--question", action="store_true", help="publish the question alone; needs no results")
    top.add_argument("--agent", default=AGENT, metavar="NAME", help="the card's name on the platform (%(default)s)")
    return top


def send(work: Callable[[Tracked], None], key: str, agent: str, model: str | None = None) -> None:
    from whileai.platform import track

    logging.getLogger("whileai.platform").setLevel(logging.ERROR)  # what it warns of is said here, in one line
    tracked = track(agent, model=model, api_key=key, register=False)
    reach(lambda: work(tracked), key)


def post_question(args: argparse.Namespace) -> None:
    """Publish the question of the results; before there are any, the recipe's."""
    if not (key := api_key()):
        raise PublishError("--question goes to the platform only: set WHILEAI_API_KEY")
    import recipe

    question = load(args.results)["header"]["question"] if args.results.exists() else recipe.QUESTION
    send(lambda tracked: publish_question(one_line(question, 1000), tracked), key, args.agent)
    print("published the question")


def post(args: argparse.Namespace) -> None:
    """Write the card, then publish if there is a key."""
    import report

    results = load(args.results)
    try:
        files, plan = card_files(results), publication(results)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise report.ResultsError(
            f"{args.results}: a value is not of the kind that the card shows ({reason})"
        ) from error
    write_card(files, args.out)
    partial = partial_words(results)
    print(f"wrote {args.out / 'card.html'} and {len(files) - 1} more files{'. ' + partial if partial else ''}")
    if not (key := api_key()):
        print("not published: WHILEAI_API_KEY is not set")
        return
    send(
        lambda tracked: publish(plan, tracked, print), key, args.agent, one_line(results["header"]["model"]["id"], 100)
    )
    print(f"published as {one_line(args.agent)}")


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    from report import ResultsError

    try:
        (post_question if args.question else post)(args)
        return 0
    except PublishError as error:
        print(f"post.py: not published: {error}", file=sys.stderr)
        return 1
    except (ResultsError, OSError) as error:
        print(f"post.py: {one_line(error, 500)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
