"""What comes from outside, a model's words, a data set, a downloaded model, is data: any of it is read or refused in a
line, in bounded time, and none of it moves a cursor, opens a line of its own, or is run."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import data
import recipe
import records
import runs
import tables
import tiny
from facts import has_quantity, numbers_in, sentences
from grading import KINDS, grade, read_box, same_answer, self_check
from options import Options
from words import clean

MANY = 10_000
# words that the readers know, marks they cut at, and what only a text that means harm holds
PIECES = (
    *"0123456789", *"{}[]()$\\,./%^-+=!?:;&~_*#'\"<>|`@ \n\t", *"²½１−€“”’…،０٣߀№三", "\u200b", "\x00", "\x1b[2J",
    "\u202e", "\ud800", "\U000e0001", "\u2028", "\x85", r"\boxed{", r"\boxed{", r"\fbox{", r"\frac", r"\frac{1}{2}",
    r"\text{", r"\sqrt{", r"\times", "}", "####", " and ", " or ", " half ", " dozen ", " twenty", " hundred ",
    " million ", "twice ", "a third of ", "two and a half ", "Ann has 3 cats. ", "How many? ", "Mr. ", "J. K. ",
    "8:00 a.m. ", "1,200", "$.25", "1/0", "7 1/2", "9" * 40, "e" * 60, " quarters of ",
    "<script>", "{{facts}}", "%s", "../../x",
)  # fmt: skip


def texts(seed: int) -> Iterator[str]:
    """Texts of up to 30 pieces; a few are one piece five hundred times, long sums, or any characters at all."""
    draw = random.Random(seed)
    for number in range(MANY):
        if number % 50 == 10:
            yield draw.choice(PIECES) * 500
        elif number % 50 == 11:
            yield "/".join(draw.choices("123456789", k=draw.randrange(40)))
        elif number % 20 == 0:
            yield "".join(chr(draw.randrange(0x110000)) for _ in range(draw.randrange(40)))
        else:
            yield "".join(draw.choices(PIECES, k=draw.randrange(30)))


class Slowest:
    """Fails where a single input takes longer than a quarter of a second of computing."""

    def __enter__(self) -> Slowest:
        self.last, self.slowest = time.process_time(), (0.0, "")
        return self

    def saw(self, text: str) -> None:
        now = time.process_time()
        self.slowest, self.last = max(self.slowest, (now - self.last, text[:60])), now

    def __exit__(self, kind: Any, *_: object) -> None:
        assert kind or self.slowest[0] < 0.25, self.slowest


def test_any_message_is_graded() -> None:
    self_check()  # imports Math-Verify, which is not what is timed
    draw, found = random.Random(1), set()
    with Slowest() as clock:
        for text in texts(2):
            for message in (text, f"{text}\\boxed{{{text}}}"):
                answer = read_box(message)
                given = grade(message, draw.choice(("18", "1200", "-7/2", "50%")))
                assert answer.kind == given.kind in KINDS and (answer.value is None) == (answer.kind != "ok")
                assert same_answer(message, message) is (answer.value is not None)
                found.add(answer.kind)
            clock.saw(text)
    assert found == set(KINDS)


def test_any_text_is_split_or_refused_with_a_reason() -> None:
    found = set()
    with Slowest() as clock:
        for text in texts(3):
            parts = sentences(text)
            assert "".join("".join(parts).split()) == "".join(text.split())
            assert all(isinstance(number, str) for number in numbers_in(text)) and has_quantity(text) in (True, False)
            try:
                split = recipe.split_facts(text)
                assert split.question and split.facts_a and split.facts_b
                found.add("split")
            except recipe.Unsplittable as error:
                found.add(error.reason)
            clock.saw(text)
    assert found == {"split", "no_question", "too_few_facts", "half_without_quantity"}


def any_json(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(8 if depth < 3 else 6)
    if kind < 6:
        plain = (None, draw.random() < 0.5, draw.randint(-(10**18), 10**18), draw.uniform(-1e9, 1e9), float("nan"), "")
        return "".join(draw.choices(PIECES, k=draw.randrange(12))) if kind == 5 else plain[kind]
    if kind == 6:
        return [any_json(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(("question", "answer", "x", "")): any_json(draw, depth + 1) for _ in range(draw.randrange(4))}


def lines(seed: int) -> Iterator[bytes]:
    """Rows that are no rows: other types in either field, other JSON, JSON cut short, bytes."""
    draw = random.Random(seed)
    good = {"question": "Ann has 3 eggs. Ben has 4 eggs. How many eggs have they?", "answer": "3 + 4\n#### 7"}
    for number in range(MANY):
        row: Any = {**good, draw.choice(("question", "answer", "other")): any_json(draw)}
        if number % 4 == 1:
            row = any_json(draw)
        line = json.dumps(row, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
        if number % 4 == 2:
            line = line[: draw.randrange(len(line))]
        elif number % 40 == 3:
            line = draw.choice((b"[" * 100_000, b"\xff\xfe", b"9" * 5000, b"\xef\xbb\xbf" + line, draw.randbytes(50)))
        yield line


def test_any_row_of_a_data_set_is_read_or_named(tmp_path: Path) -> None:
    read = refused = 0
    with Slowest() as clock:
        for line in lines(4):
            (tmp_path / "train.jsonl").write_bytes(line + b"\n")
            try:
                problems, counted = data.split_rows(str(tmp_path), "train")
                assert counted["kept"] == len(problems) and counted["rows"] <= 1
                read += counted["rows"]
            except recipe.UserError as error:
                assert "train.jsonl" in str(error) and len(str(error).splitlines()) == 1 and clean(error) == str(error)
                refused += 1
            clock.saw(repr(line[:60]))
    assert read > MANY / 10 and refused > MANY / 4


def test_a_row_may_hold_a_line_break_that_json_lets_stand_and_no_half_characters(tmp_path: Path) -> None:
    row = {"question": "Ann has 3 eggs.\u2028Ben has 4 eggs.\x85How many eggs have they?", "answer": "#### 7"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\r\n" + json.dumps(row), "utf-8")
    problems, counted = data.split_rows(str(tmp_path), "train")
    assert counted["rows"] == 2 and problems[0].facts == (("Ann has 3 eggs.",), ("Ben has 4 eggs.",))
    (tmp_path / "train.jsonl").write_text(json.dumps({**row, "question": "Ann has \ud800 eggs."}))
    with pytest.raises(recipe.UserError, match=r"row 1: the field 'question' holds half of a character"):
        data.split_rows(str(tmp_path), "train")


# ------------------------------------------------------------------------------------------- terminal and paths

EVIL = "\x1b[2J\x1b]0;owned\x07\u202e\r\nfailed: ada seed 17: all is well"


def harmless(text: str) -> bool:
    return clean(text) == text and "\nfailed: ada" not in text


def test_names_that_mean_harm_are_shown_as_text(stand_in: tiny.TinyPaths, tmp_path: Path, capsys: Any) -> None:
    """A model, a data set, an output folder and a record whose names hold escapes and line breaks."""
    folder = tmp_path / EVIL.replace("/", "")
    folder.mkdir()
    out = ["--out", str(tmp_path / "out")]
    usual = ["--model", str(stand_in.model), "--data", str(stand_in.data), "--device", "cpu"]
    for words in (["--data", str(folder)], ["--data", str(folder / "no")], ["--model", str(folder), "--steps", "1"],
                  ["--out", str(stand_in.model / "config.json" / folder.name)], ["--device", EVIL]):  # fmt: skip
        assert recipe.main([*usual, *out, *words]) == 2
        shown = capsys.readouterr()
        assert harmless(shown.out) and harmless(shown.err) and len(shown.err.splitlines()) == 1
    name = EVIL.replace("/", "")
    records.write_record(tmp_path / "out" / "runs" / f"{name}-s17.json.xz",
                         {"arm": name, "seed": 17, "key": {}, "config": {}, "seconds": {}})  # fmt: skip
    assert recipe.main([*usual, *out, "--plan", "--arm", "ada"]) == 1
    shown = capsys.readouterr()
    assert harmless(shown.out) and "is no arm's name" in shown.out and shown.out.count("left aside: ") == 1


def test_a_failure_that_quotes_a_message_stays_one_entry(tmp_path: Path, capsys: Any) -> None:
    options = Options(tmp_path, ("ada",), (17,), False, 0, None, 4.0, False, "")
    for kind in (RuntimeError, OSError, recipe.NonFiniteError, recipe.OutOfMemoryError, records.RecordError):
        line = runs.report_failure(options, "ada", 17, kind(f"the chat said {EVIL}"))
        assert harmless(line) and len(line.splitlines()) == 1 and "the chat said" in line
    log = (tmp_path / "failures.log").read_text("utf-8")
    assert harmless(log)
    entries = [line for line in log.split("\n") if line and not line.startswith("    ")]
    assert len(entries) == 2 and all(re.match(r"[\d-]{10} [\d:]{8} ada seed 17: ", line) for line in entries)


def test_a_word_of_a_message_cannot_leave_its_cell_in_the_readme() -> None:
    """The scan for shortcuts quotes what it found in messages."""
    table = tables.markdown(["check"], [[f"a | b <script> <!-- /results:checks --> {EVIL}"]])
    assert harmless(table) and len(table.splitlines()) == 3 and table.count(" | ") == 0
    assert "<" not in table


# ------------------------------------------------------------------------------------------- code of a model's own

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class Config(LlamaConfig):
    model_type = "own"
class Model(LlamaForCausalLM):
    config_class = Config
"""


@pytest.mark.parametrize("kind", ["own", "llama"])
def test_a_models_own_code_runs_only_where_it_is_let(
    kind: str, stand_in: tiny.TinyPaths, config: recipe.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with Python files that its config names: of a kind that transformers knows, and of its own."""
    import dataclasses

    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(stand_in.model, folder)
    (folder / "own.py").write_text(CODE.format(marker=str(marker)))
    about = json.loads((folder / "config.json").read_text())
    about |= {"model_type": kind, "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(about))
    changed = dataclasses.replace(config, model=str(folder))
    if kind == "own":
        with pytest.raises(recipe.UserError, match="; --trust-remote-code lets it run code of its own"):
            runs.load_model(changed, "cpu", False)
    else:
        runs.load_model(changed, "cpu", False)
    assert not marker.exists()
    runs.load_model(changed, "cpu", True)
    assert marker.exists()  # it does run where it is let
