"""GSM8K from a folder or the hub: read, split, shuffled, counted off, and what was left out by reason."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
from grading import gold_answer, self_check
from recipe import Config, Problem, Unsplittable, UserError, flag, split_facts
from words import one_line

LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Data:
    """The problems and what was left out. `report` goes into results.json as it is."""

    train: tuple[Problem, ...]
    heldout: tuple[Problem, ...]
    report: dict[str, Any]


def read_rows(data: str, split: str) -> list[tuple[str, str, str]]:
    """(where, question, answer) of every row of a split. Raises UserError naming file, row and field."""
    folder = Path(data)
    if folder.exists():
        path = folder / f"{split}.jsonl"
        if not path.is_file():
            raise UserError(f"{path} is missing: --data takes a hub id or a folder with train.jsonl and test.jsonl")
        try:
            lines = [
                (f"{path}, row {i}", line)
                for i, line in enumerate(path.read_text("utf-8").split("\n"), 1)
                if line.strip()
            ]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        rows = []
        for where, line in lines:
            try:
                rows.append((where, json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where}: not a JSON object ({error})") from None
    else:
        from datasets import load_dataset

        try:
            loaded = load_dataset(data, "main", split=split)
        except Exception as error:  # the hub's own errors are of many kinds; all mean that there is no data
            raise UserError(f"--data {data}: neither a folder here nor a data set that could be loaded "
                            f"({type(error).__name__}: {one_line(error)})") from None  # fmt: skip
        rows = [(f"{data} {split}, row {i}", row) for i, row in enumerate(loaded, 1)]
    for where, row in rows:
        for name in ("question", "answer"):
            if not isinstance(row, dict) or not isinstance(row.get(name), str):
                raise UserError(f"{where}: the field {name!r} is missing or not a text")
            if LONE_SURROGATE.search(row[name]):
                raise UserError(f"{where}: the field {name!r} holds half of a character (a lone surrogate)")
    return [(where, row["question"], row["answer"]) for where, row in rows]


def split_rows(data: str, split: str) -> tuple[list[Problem], dict[str, Any]]:
    """Every problem of a split that can be cut in two, and the count of the others by reason."""
    kept, left_out, shared = [], Counter(), 0
    rows = read_rows(data, split)
    for number, (where, question, answer) in enumerate(rows):
        try:
            gold = gold_answer(answer, where)
        except ValueError as error:
            raise UserError(str(error)) from None
        try:
            parts = split_facts(question)
        except Unsplittable as error:
            left_out[error.reason] += 1
            continue
        shared += parts.question_has_facts
        kept.append(Problem(f"{split}-{number}", parts.question, (parts.facts_a, parts.facts_b), gold))
    report = {
        "rows": len(rows),
        "kept": len(kept),
        "left_out": dict(sorted(left_out.items())),
        "question_has_facts": shared,
    }
    return kept, report


def load_data(config: Config) -> Data:
    """Split, shuffle and count off the problems; drop training problems that overlap the held-out ones
    (wai.decontaminate). Raises UserError naming file and row, or what to lower."""
    import whileai as wai

    self_check()
    chosen: dict[str, list[Problem]] = {}
    report: dict[str, Any] = {}
    for split, name in (("train", "train_problems"), ("test", "heldout_problems")):
        problems, report[split] = split_rows(config.data, split)
        wanted = getattr(config, name)
        if not problems:
            raise UserError(f"{config.data}: of {report[split]['rows']} {split} rows none can be split in two halves")
        if len(problems) < wanted:
            raise UserError(f"{config.data}: {len(problems)} {split} problems are left after the split, {wanted} are "
                            f"wanted: lower {flag(name)} to {len(problems)} or less")  # fmt: skip
        random.Random(config.data_seed).shuffle(problems)
        chosen[split] = problems[:wanted]
    texts = {split: [{"prompt": p.text, "row": p.id} for p in problems]
             for split, problems in chosen.items()}  # fmt: skip
    with warnings.catch_warnings():  # it notes that rewordings are not looked for; the check in results.json says so
        warnings.simplefilter("ignore", UserWarning)
        clean, overlap = wai.decontaminate(texts["train"], against=texts["test"])
    clean_rows = {row["row"] for row in clean}
    train = tuple(problem for problem in chosen["train"] if problem.id in clean_rows)
    if len(train) < config.problems:
        raise UserError(f"{config.data}: {len(train)} training problems are left after dropping those that overlap "
                        f"the held-out ones, a step takes {config.problems}: raise --train-problems")  # fmt: skip
    heldout = tuple(chosen["test"])
    report["train_used"], report["heldout_used"] = len(train), len(heldout)
    report["decontaminate_dropped"] = overlap["n_contaminated"]
    report["fingerprint"] = records.digest([dataclasses.astuple(problem) for problem in (*train, *heldout)])
    return Data(train, heldout, report)
