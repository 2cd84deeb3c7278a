r"""Run records with known scores, made without a model: for tests of the report and the card.

    python tests/fake_runs.py OUT.json [--problems 300 --steps 80 --seeds 17 18 19 --no-base --drop raft:18]

writes the results.json that the report makes of them. Chats are built from the recipe's own types and go through
its own make_record, so the records have the schema of real ones.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import recipe
import runs
from recipe import Chat, Config, Evaluation, GradedChat, Problem, StepMetrics, Turn
from talk import talk_measures

SEEDS = (17, 18, 19)
# the mean of an arm, how far its seeds lie from it (repeated), and what an untrained partner leaves of it
LEVELS = {
    "untrained": (0.11, (0.0,), 1.0),
    "grpo": (0.30, (0.10, -0.15, 0.05), 0.45),
    "ada": (0.38, (0.02, 0.01, -0.02), 0.5),
    "raft": (0.25, (0.06, -0.15, 0.10), 0.6),
    "mixed": (0.31, (-0.10, 0.15, -0.06), 0.55),
    "ada_mixed": (0.36, (0.04, 0.0, -0.05), 0.6),
    "grpo12": (0.33, (0.05, -0.10, 0.05), 0.45),
}
HEADER = {"command": "python recipe.py --reuse", "date": "2025-12-01", "commit": "0123456789abcdef", "clean": True,
          "reused": [], "failed": []}  # fmt: skip


def problem(split: str, number: int) -> Problem:
    """Two numbers for A, one for B, and one that the question gives to both."""
    draw = random.Random(f"{split}/{number}")
    shelf, boxes, sold, days = draw.randint(41, 90), draw.randint(11, 19), draw.randint(21, 39), draw.randint(2, 9)
    first = ("Ann keeps a shop by the river.", f"She has {shelf} jars on a shelf and {boxes} in a box.")
    question = f"How many jars of honey are left after {days} quiet days?"
    second = (f"On Monday she sold {sold} of them.",)
    return Problem(f"{split}-{number}", question, (first, second), str(shelf + boxes - sold))


def chat(p: Problem, chance: float, talk: float, draw: random.Random, trained: tuple[bool, bool]) -> GradedChat:
    """A chat whose answers are each right with `chance`, and whose speakers tell with `talk`."""
    shelf, boxes, sold = (f"{n}" for n in _numbers(p))
    tells = (f"Hello! Ann has {shelf} jars on a shelf and {boxes} more in the box.", f"I see. She sold {sold}.")
    texts = [tell if draw.random() < talk else "Hello partner. What do you know about the jars?" for tell in tells]
    uses = (f"You sold {sold}.", f"There were {shelf} and {boxes}.")
    work = [use if draw.random() < talk else "I guess." for use in uses]
    for copy in (0, 1):
        value = p.gold if draw.random() < chance else str(draw.randint(100, 999))
        box = f"So \\boxed{{{value}}}." if draw.random() < 0.95 or value == p.gold else "I do not know."
        texts.append(f"{work[copy]} We add shelf and box, and take away what was sold on Monday. {box}")
    turns = tuple(
        Turn("AB"[i % 2], text, len(text) // 4 + draw.randint(0, 30), draw.random() < 0.02, trained[i % 2])
        for i, text in enumerate(texts)
    )
    return recipe.grade_chat(Chat(p, turns))


def _numbers(p: Problem) -> list[int]:
    return [int(word) for fact in (*p.facts[0], *p.facts[1]) for word in fact.split() if word.isdigit()]


def difficulty(p: Problem) -> float:
    """What a problem takes from or adds to the chance of a right answer; 0 on average."""
    return random.Random(f"hard/{p.id}").choice((-0.1, 0.1))


def sitting(name: str, repeat: int, problems: Sequence[Problem], chance: float, talk: float, key: str) -> Evaluation:
    draws = [(p, random.Random(f"{key}/{name}/{repeat}/{p.id}/{i}")) for p in problems for i in (0, 1)]
    chats = [chat(p, chance + difficulty(p), talk, draw, recipe.SITTINGS[name]) for p, draw in draws]
    return Evaluation(name, repeat, tuple(chats), 60.0)


def trainer(arm: str, seed: int, config: Config, chance: float) -> Any:
    """What make_record reads of a trainer: history, tally and last batch."""
    draw = random.Random(f"train/{arm}/{seed}")
    history, tally, last = [], [], []
    pool = [problem("train", n) for n in range(config.train_problems)]
    rule = recipe.ARMS[arm]
    for step in range(config.steps):
        done = (step + 1) / config.steps
        level = 0.11 + (chance - 0.11) * done
        chosen = draw.sample(pool, config.problems)

        def play(plans: list[recipe.Plan], level: float = level) -> list[GradedChat]:
            return [chat(q.problem, level + difficulty(q.problem), 0.6, draw, q.trained) for q in plans]

        drawn, thrown = recipe.draw_chats(chosen, rule, config, (seed, step), True, play)
        kept, groups = recipe.credit(drawn, rule, config, step)
        flat = sum(len(set(g.rewards)) == 1 for g in groups) / len(groups)
        every = [c for chats in drawn for c in chats]
        talk = talk_measures(every)
        tokens = sum(turn.tokens for c in every for turn in c.chat.turns)
        history.append(StepMetrics(
            step=step, reward=sum(c.reward for c in every) / len(every), flat=flat, drawn=len(every), kept=len(kept),
            thrown_away=thrown, sampled_tokens=tokens + 400 * thrown, trained_tokens=tokens, truncated=talk.truncated,
            sends_own=talk.sends_own, uses_partners=talk.uses_partners, message_tokens=talk.message_tokens,
            answer_tokens=talk.answer_tokens, loss=0.01, grad_norm=0.5, unchanged=flat == 1,
            play_seconds=30.0 + len(every) / 4, grade_seconds=0.2, update_seconds=12.0))  # fmt: skip
        tally += groups
        last = kept
    return SimpleNamespace(history=history, tally=tally, last_batch=tuple(last))


def make(
    problems: int = 300, steps: int = 80, seeds: Sequence[int] = SEEDS, arms: Sequence[str] = recipe.TABLE_ARMS,
    base: bool = True, device: str = "NVIDIA H200", base_evals: int = 3,
    levels: dict[str, tuple[float, tuple[float, ...], float]] | None = None,
) -> tuple[dict[str, Any] | None, dict[tuple[str, int], dict[str, Any]]]:  # fmt: skip
    """(the untrained pair's record, the runs' records)."""
    levels = {**LEVELS, **(levels or {})}
    config = Config(steps=steps, heldout_problems=problems, train_problems=64, base_evals=base_evals)
    heldout = [problem("test", n) for n in range(problems)]
    lab = SimpleNamespace(key={"model": "m", "data": "d"}, about=about(config, device), config=config,
                          data=SimpleNamespace(report=data_report(problems)))  # fmt: skip
    found = {}
    for arm in arms:
        mean, offsets, left = levels[arm]
        for i, seed in enumerate(seeds):
            chance = mean + offsets[i % len(offsets)]
            sittings = [sitting("trained_pair", 0, heldout, chance, 0.9, f"{arm}/{seed}"),
                        sitting("untrained_partner", 0, heldout, chance * left, 0.8, f"{arm}/{seed}")]  # fmt: skip
            spent = {"load": 20.0, "train": steps * 60.0, "evaluate": 120.0, "total": 140.0 + steps * 60.0}
            found[arm, seed] = runs.make_record(lab, arm, seed, sittings, spent, trainer(arm, seed, config, chance))
    chance = levels["untrained"][0]
    sittings = [sitting("untrained", repeat, heldout, chance, 0.5, "base") for repeat in range(base_evals)]
    spent = {"load": 20.0, "evaluate": 180.0, "total": 200.0}
    return runs.make_record(lab, "untrained", None, sittings, spent) if base else None, found


def about(config: Config, device: str) -> dict[str, Any]:
    packages = ("python", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "math-verify", "whileai")
    model = {"id": config.model, "revision": "main", "weights": None, "loaded_as": "bfloat16"}
    return {"model": model, "device": device, "versions": dict.fromkeys(packages, "1.0"), "commit": HEADER["commit"],
            "clean": True, "date": "2025-12-01T00:00:00Z", "command": "python recipe.py"}  # fmt: skip


def data_report(problems: int) -> dict[str, Any]:
    left_out = {"half_without_quantity": 4, "too_few_facts": 6}
    split = {"rows": 1000, "kept": 990, "left_out": left_out, "question_has_facts": 12}
    return {"train": split, "test": split, "train_used": 64, "heldout_used": problems, "decontaminate_dropped": 0,
            "fingerprint": "0123456789abcdef"}  # fmt: skip


def main() -> None:
    import report

    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("out", type=Path)
    words.add_argument("--problems", type=int, default=300)
    words.add_argument("--steps", type=int, default=80)
    words.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    words.add_argument("--arms", nargs="+", default=list(recipe.TABLE_ARMS))
    words.add_argument("--device", default="NVIDIA H200")
    words.add_argument("--no-base", action="store_true")
    words.add_argument("--drop", nargs="*", default=[], metavar="ARM:SEED")
    given = words.parse_args()
    base, found = make(given.problems, given.steps, given.seeds, given.arms, not given.no_base, given.device)
    for name in given.drop:
        arm, _, seed = name.partition(":")
        del found[arm, int(seed)]
    results = report.summarize(base, found, HEADER, given.arms, given.seeds, 4.0)
    given.out.write_bytes(report.to_json(results))
    print(report.render_table(results))


if __name__ == "__main__":
    main()
