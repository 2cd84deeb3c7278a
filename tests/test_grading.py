"""The reader and grader: each way that an answer has been misread, its value worked out by hand."""

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grading import (
    KINDS,
    Answer,
    boxed_answer,
    gold_answer,
    grade,
    is_correct,
    read_box,
    same_answer,
    self_check,
)


def box(content: str) -> str:
    return rf"So the answer is \boxed{{{content}}}."


READS = {
    "18": [
        "18",
        "18.",
        "18.00",
        "018",
        "+18",
        "(18)",
        "{18}",
        r"\{18\}",
        "**18**",
        "$18$",
        "18 dollars",
        "18 eggs",
    ],
    "18 ": [
        "18 hours/day",
        "18 dozen",
        r"18\text{ dollars}",
        r"\text{18 dollars}",
        r"18~\text{hours}",
        "18 USD",
    ],
    "18  ": [
        "$18",
        r"\$18.00",
        "€18",
        "£18",
        "18¢",
        "US$18",
        "18kg",
        "18g",
        "18°C",
        r"18^\circ",
        "18 m^2",
        "18 m²",
    ],
    "18   ": [
        "１８",
        "1\u200b8",
        "eighteen",
        "x = 18",
        "18 = 18.0",
        r"\mathbf{18}",
        "36/2",
        r"\frac{36}{2}",
        "18th",
    ],
    "18    ": [
        "18 more apples",
        "The answer is 18",
        r"\approx 18",
        "18-year-old",
        r"18\quad",
        "18\x00",
        "18 a day",
    ],
    "1200": ["1,200", "1{,}200", r"1,\!200", r"1\,200", "1 200", "1\u2009200", "1\u202f200", r"\$1,200.00"],
    "-18": ["-18", "−18", "–18", "-$18", "$-18", "- 18", "negative 18", "Total: -18"],
    "15/2": ["7 1/2", "7½", r"7\frac{1}{2}", "7.5", "15/2", r"\frac{15}{2}", "seven 1/2"],
    "1/2": ["0.5", ".5", "1/2", r"\frac12", r"\dfrac{1}{2}", "½"],
    "50%": ["50%", r"50\%", "50 percent"],
    "2000000": ["2 million", "2,000,000", "two million dollars"],
    "105": ["one hundred and five", "105"],
    "25": ["twenty-five dollars", "twenty five"],
    "0": ["0", "-0", "zero", "0.00"],
}


@pytest.mark.parametrize(("value", "content"), [(v.strip(), c) for v, contents in READS.items() for c in contents])
def test_reads(value, content):
    assert read_box(box(content)) == Answer(value, "ok")


FAILS = {
    "several_values": [
        "17, 18", "17 and 18", "17 or 18", "{17,18}", r"17 \text{ and } 18", "17; 18", "17 18", "17 = 18",
        "1, 200", "3 hours 20 minutes", "18 or eighteen", "seventeen and eighteen",
        "1,20", "1.200,50", "1e400",
        "twice 18 and 2",
    ],
    "unreadable": [
        "18:00", "7:13", "18x", "x18", "A18", "18!", "18i", "18π", "18K",
        "> 18", r"\pm 18", "blue", "x",
        "not 18", "18 squared", "(1+2",
        "total - 18", "x - 18", "1/0", "9^{9^9}", "9^{99}", "1/7/7/7/7", "((((1+1))))",
        "9" * 100, "word " * 50 + "18",
    ],
    "empty_box": ["", "  ", "\u200b \n"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "content"), [(k, c) for k, contents in FAILS.items() for c in contents])
def test_fails(kind, content):
    assert read_box(box(content)) == Answer(None, kind)


def test_the_last_box_counts():
    assert boxed_answer(r"\boxed{17} and \boxed{18}") == "18"
    assert boxed_answer(r"\boxed{\text{Cost: } \frac{36}{2}} then \fbox {19}") == "19"
    assert boxed_answer(r"\boxed {18}") == "18"
    assert boxed_answer(r"\boxed{\boxed{18}}") == "18"


def test_no_box_and_open_box():
    assert read_box("Total: $18 for 3 people in 2 days").kind == "no_box"
    assert read_box("").kind == "no_box"
    assert read_box(r"\boxed{17} so \boxed{18").kind == "unbalanced_box"
    assert read_box(r"\boxed{18\}").kind == "unbalanced_box"


def test_percentages():
    assert is_correct(box("50%"), "50")
    assert is_correct(box("50%"), "0.5")
    assert not is_correct(box("0.5"), "50")
    assert not is_correct(box("0.3333"), "1/3")


@pytest.mark.parametrize("content", [r"2 \times 9", r"\sqrt{324}", "20-2", r"\frac{30+6}{2}", "3*6"])
def test_arithmetic_is_compared_by_math_verify(content):
    assert grade(box(content), "18").correct
    assert not grade(box(content), "17").correct


def test_a_number_is_wanted():
    assert not is_correct(box("x"), "18")
    assert not is_correct(box("17 = 18"), "18")
    assert not is_correct(box("1 200"), "201")
    assert not is_correct(box("7 1/2"), "4")


def test_unreadable_gold_is_an_error():
    with pytest.raises(ValueError, match="cannot be read"):
        is_correct(box("18"), "blue")
    with pytest.raises(ValueError, match="train row 7"):
        gold_answer("no mark", "train row 7")
    with pytest.raises(ValueError, match="row 8"):
        gold_answer("2\n#### 1,2", "row 8")
    assert gold_answer("#### 5\n... #### -1,200", "row 9") == "-1200"


def test_same_answer():
    assert same_answer(box("$1,200"), box("1200.0"))
    assert not same_answer(box("17"), box("18"))
    assert not same_answer("no box", "no box")
    assert same_answer(box("3*6"), box("18"))


def test_no_alarm_is_set_and_threads_work():
    signal.setitimer(signal.ITIMER_REAL, 100)
    try:
        assert is_correct(box("19-1"), "18")
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 50
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    verdicts = []
    threads = [
        threading.Thread(target=lambda n=n: verdicts.append(is_correct(box(f"{n}+1"), str(n + 1)))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == [True] * 8


HOSTILE = [
    "9" * 100_000, "a" * 100_000, r"\boxed{" * 14_000, r"\boxed " * 15_000, "{" * 100_000, "\x00" * 100_000,
    "\ud800" * 100_000, box("9" * 100_000), box("9^{9^9}"), box("9**9**9"), box("(9^9)^9"),
    box("1" + "/7" * 39), box("{" * 90 + "18" + "}" * 90), box("(" * 30 + "1+1" + ")" * 30),
    box(r"\frac{" * 30 + "1" + "}{2}" * 30),
    box(r"\sqrt{" * 10 + "2" + "}" * 10), box("-" * 199), box("1 " * 99), box("7!" * 50), box("1e999999999"),
    box("\x00\ud800\u202e18"), box(r"\text{" * 25 + "18" + "}" * 25),
]  # fmt: skip


def test_hostile_input_is_cheap():
    self_check()  # imports Math-Verify, which is not what is timed
    for text in HOSTILE:
        start = time.process_time()
        grade(text, "18")
        assert time.process_time() - start < 0.05, text[:40]


def test_fuzz():
    """10,000 random boxes are read without an exception."""
    rng = random.Random(0)
    pieces = [
        *"0123456789",
        *r"{}\$,./%^-+=() !:_&~x½²１",
        "\u200b",
        "\x00",
        "\ud800",
        r"\frac",
        r"\text{",
        " and ",
    ]
    for _ in range(10_000):
        answer = read_box(box("".join(rng.choices(pieces, k=rng.randint(0, 12)))))
        assert answer.kind in KINDS
        assert (answer.value is None) == (answer.kind != "ok")


@settings(max_examples=300, deadline=None)
@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["{}", "${}", "{} apples", r"\text{{{} m}}", "{}.0", "{}."]),
)
def test_a_dressed_number_is_itself(number, dress):
    assert is_correct(box(dress.format(number)), str(number))
    assert is_correct(box(dress.format(f"{number:,}")), str(number))
    assert not is_correct(box(dress.format(number)), str(number + 1))


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read(text):
    assert read_box(text).kind in KINDS
    assert read_box(box(text)).kind in KINDS


def test_gsm8k_golds_verify_against_themselves():
    folder = os.environ.get("GSM8K_DIR")
    if not folder:
        pytest.skip("set GSM8K_DIR to a folder with train.jsonl and test.jsonl of GSM8K")
    for name, rows in (("train", 7473), ("test", 1319)):
        lines = (Path(folder) / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
        answers = [json.loads(line)["answer"] for line in lines if line]
        assert len(answers) == rows
        for row, answer in enumerate(answers):
            gold = gold_answer(answer, f"{name}.jsonl row {row}")
            assert is_correct(box(gold), gold)
            assert not is_correct(box(f"{gold}1"), gold)
