r"""Read the boxed answer of a chat's last message and grade it: one reader for reward, evaluation, agreement.

The last `\boxed{...}` counts (`\box` and `\fbox` too), its braces counted, and it must hold one number. Dressing is
taken off first: currency, unit words, LaTeX text and spacing, thousands separators, closing punctuation. What then is
a plain number (whole, decimal, fraction, mixed, percent, or in words) is compared exactly. Short arithmetic, such as
`\frac{3+5}{2}` or `\sqrt{324}`, is compared by Math-Verify through whileai's MathEqual. All else is wrong,
and counted by kind.

Decisions a reader of the scores should know:
- "50%" equals 50 and 0.5; 0.5 does not equal 50. 0.3333 does not equal 1/3.
- "2 million" is 2000000, "18 dozen" is 18 (the dozen is a unit), "18:00" and "7:13" are no numbers.
- "1 200" and "1,200" are 1200; "17, 18" and "1, 200" are two values; a comma is never a decimal point.
- "x = 18" is 18, "18 = 18.0" too; an equation with another number on its left is two values.
- A clock time, a variable ("18x"), an inequality, a factorial or a power tower is unreadable.
"""

from __future__ import annotations

import functools
import logging
import re
import threading
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

# Stored verdicts name the version that made them, so that they are graded again when the reader changes.
GRADER_VERSION = 1

KINDS = ("ok", "no_box", "unbalanced_box", "empty_box", "several_values", "unreadable")


@dataclass(frozen=True)
class Answer:
    """What a box holds: `value` is "18", "-15/2", "50%" or arithmetic, and None unless `kind` is "ok"."""

    value: str | None
    kind: str


@dataclass(frozen=True)
class Grade:
    """A graded answer; `kind` says how the box was read, also when the value that was read is wrong."""

    kind: str
    value: str | None
    correct: bool


# A message's end is read, and a box longer than this is a text: both bound the time spent on hostile input.
_MAX_CHARS = 10_000
_MAX_BOX_CHARS = 200
_MAX_DIGITS = 30

_BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_POWERS = str.maketrans({c: f"^{n}" for n, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")})
_MINUS_SIGNS = str.maketrans(dict.fromkeys("−‐‑‒–—﹣－", "-"))

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBER_WORDS = {word: n for n, word in enumerate(_SMALL.split())}
NUMBER_WORDS |= {word: 10 * n for n, word in enumerate(_TENS.split(), 2)}
NUMBER_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
# Words that change the number beside them, so that it is not the answer as it stands.
_CHANGING = (
    "half halves third thirds quarter tenth tenths hundredths twice double triple squared cubed factorial "
    "plus minus negative root sqrt not divided multiplied trillion"
)
_CHANGING_WORDS = frozenset(_CHANGING.split())
# One letter after a number is a unit (metres, grams ...) or "a" ("18 a day"); any other is a variable.
_UNIT_LETTERS = frozenset("acdfghlmstw")
_CURRENCY_CODES = r"(?:US|USD|EUR|GBP|Rs\.?|INR)"

_VALUE = re.compile(
    r"(?:(?P<sign>[-+])\s*)?(?:(?P<whole>\d++)\s+(?=\d+\s*/\s*\d))?(?P<num>\d++(?:\.\d*+)?|\.\d++)"
    r"(?:\s*/\s*(?P<den>\d++(?:\.\d++)?))?(?:(?:st|nd|rd|th)\b)?\s*(?P<percent>%|percent\b)?",
    re.ASCII,
)
_ARITHMETIC = re.compile(
    r"(?:[\d.+\-*/() {}]|\^(?:\d|\{\d\})(?!\d)|\\(?:frac|sqrt|times|cdot|div)(?![a-z]))+", re.ASCII
)
_OPERATION = re.compile(r"[\d)}] *(?:[-+*/^]|\\times|\\cdot|\\div) *[-\d({.\\]|\\frac|\\sqrt", re.ASCII)
_WORD = re.compile(r"[^\W\d_]+")
_HARMLESS = re.compile(r"[^\W\d_]|[\s.,;:()\[\]{}'\"?~=≈/#-]")
_LINE_BREAKS = re.compile(r"[\t-\r\x1c-\x1f\x85\u2028\u2029]")
_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\ud800-\uf8ff\U000e0000-\U0010ffff]"
)


def read_box(text: str) -> Answer:
    r"""Read the last `\boxed{...}` (or `\fbox{...}`) of a message. Takes any string and never raises."""
    boxes = list(_BOX.finditer(text := _clean(text[-_MAX_CHARS:])))
    if not boxes:
        return Answer(None, "no_box")
    start, depth = boxes[-1].end(), 1
    for brace in _BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)  # an escaped brace is text
        if depth == 0:
            return _read_content(text[start : brace.start()])
    return Answer(None, "unbalanced_box")


def boxed_answer(text: str) -> str | None:
    """The value in the last box, or None where there is none to read."""
    return read_box(text).value


def grade(text: str | Answer, gold: str) -> Grade:
    """Grade a message, or an answer already read from it, against a gold answer.

    A gold that cannot be read raises ValueError: graded as wrong, or worse as right, it would go unnoticed.
    """
    answer = text if isinstance(text, Answer) else read_box(text)
    wanted = _read_gold(gold)
    return Grade(answer.kind, answer.value, answer.value is not None and _equal(answer.value, wanted))


def is_correct(text: str | Answer, gold: str) -> bool:
    """Whether the last box of a message holds the gold answer."""
    return grade(text, gold).correct


def same_answer(a: str | Answer, b: str | Answer) -> bool:
    """Whether two messages box the same value; two messages without a readable box do not agree."""
    first, second = (x.value if isinstance(x, Answer) else read_box(x).value for x in (a, b))
    return first is not None and second is not None and _equal(first, second)


def gold_answer(answer_field: str, where: str) -> str:
    """The gold answer of a GSM8K row: the text after the last "####", without commas.

    `where` names the file and row in the error that an unreadable gold raises.
    """
    _, mark, tail = answer_field.rpartition("####")
    tail = tail.strip()
    if not mark or _read_content(_clean(tail)).kind != "ok":
        raise ValueError(f"{where}: no readable gold answer after '####': {tail[:80]!r}")
    return tail.replace(",", "")


def self_check() -> None:
    """Grade a few known answers, one of them through Math-Verify; raises RuntimeError if a verdict is wrong.

    Run once before training: a comparer that is missing or has changed would otherwise show as a low reward.
    """
    known = [
        ("18", True),
        ("18 dollars", True),
        (r"\frac{36}{2}", True),
        (r"2 \times 9", True),
        ("17", False),
    ]
    for content, right in [*known, (r"2 \times 8", False), ("17, 18", False)]:
        if is_correct(rf"\boxed{{{content}}}", "18") is not right:
            raise RuntimeError(f"grading is broken: \\boxed{{{content}}} against 18 should be {right}")


def _clean(text: str) -> str:
    """One form for Unicode's look-alikes: full-width digits, minus signs, thin spaces, invisible marks."""
    text = text.translate(_POWERS).translate(_MINUS_SIGNS)  # before NFKC, which makes 5² into 52
    text = re.sub(r"([¼-¾⅐-⅞])", r" \1", text)  # and 2½ into 21/2
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/").translate(_MINUS_SIGNS)
    return _INVISIBLE.sub("", _LINE_BREAKS.sub(" ", text))


def _read_content(content: str) -> Answer:
    """Read what stands inside the braces: a plain number, arithmetic, or a kind of failure."""
    if not content.strip(" {}"):
        return Answer(None, "empty_box")
    if len(content) > _MAX_BOX_CHARS:
        return Answer(None, "unreadable")
    plain = _undress(content)
    left, equals, right = plain.rpartition("=")
    if equals and left.strip(" ="):
        return _read_equation(left, right)
    if _ARITHMETIC.fullmatch(plain) and _OPERATION.search(plain) and not _VALUE.fullmatch(plain):
        return _read_arithmetic(plain)
    return _read_number(plain)


def _read_equation(left: str, right: str) -> Answer:
    """Read "x = 18" as 18, and "18 = 18.0" too; any other equation names two values."""
    answer = _read_number(right)
    if re.search(r"\d", left) and (answer.value is None or _read_number(left).value != answer.value):
        return Answer(None, "several_values")
    return answer


def _undress(content: str) -> str:
    """Take off what does not change the value: LaTeX text and spacing, currency, thousands separators."""
    s = re.sub(r"\\(?:text|mathrm|mathbf|textbf|textit|mbox|mathit|operatorname)\s*\{([^{}]*)\}", r" \1 ", content)
    s = re.sub(r"\\[dtc]frac", r"\\frac", s)
    s = re.sub(r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}", s)
    s = re.sub(r"\\frac\s*\{\s*(-?[\d.]+)\s*\}\s*(?:\{\s*([\d.]+)\s*\}|(\d))", r" \1/\2\3 ", s)
    s = s.replace("{,}", ",").replace("\\!", "")
    s = re.sub(r"(?<=\d)(?:\\[,:; ]|~)(?=\d)", " ", s)
    s = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°", "", s)
    s = re.sub(r"\\(?:left|right|displaystyle|approx)(?![a-z])", "", s)
    s = re.sub(r"\\(?:pounds|euro|[$])|[$€£¥₹¢]", " ", s).replace("\\%", "%")
    s = re.sub(r"\\(?:quad|qquad|[,:; ])|~|`|^\s*[*]{2}|[*]{2}\s*$", " ", s)
    s = re.sub(rf"\b{_CURRENCY_CODES}(?=\s*[-\d.])|(?<=\d){_CURRENCY_CODES}\b", " ", s)
    s = re.sub(r"(?<=[^\W\d_])\s*\^\s*\{?\s*[23]\s*\}?(?!\d)", "", s)  # the power of a unit: 18 m^2
    s = re.sub(r"(?<![\d.,])([1-9]\d{0,2})((?:,\d{3})+|(?: \d{3})+)(?!\d|,\d| ?/ ?\d)", _join_groups, s)
    s = s.replace("\\{", "{").replace("\\}", "}").strip()
    while s[:1] + s[-1:] in ("{}", "()", "[]") and not re.search(r"[{}()\[\]]", s[1:-1]):
        s = s[1:-1].strip()
    return re.sub(r"[.,;:]+$", "", s).strip()


def _join_groups(match: re.Match[str]) -> str:
    return re.sub(r"[ ,]", "", match[0])


def _read_number(plain: str) -> Answer:
    """Read text that must hold exactly one number, with only units and other harmless words around it."""
    plain = re.sub(r"(?<=\d)w\b", "", number_words_to_digits(plain.lower()))
    plain = re.sub(r"^\s*(?:minus|negative)\s+(?=\d)", "-", plain)
    numbers = list(_VALUE.finditer(plain))
    if not numbers:
        return Answer(None, "unreadable")
    if re.search(r"\d\s*:\s*\d", plain):
        return Answer(None, "unreadable")  # a clock time or a ratio
    if len(numbers) > 1:
        return Answer(None, "unreadable" if re.search(r"[\^*\\]", plain) else "several_values")
    number = numbers[0]
    before, after = plain[: number.start()], plain[number.end() :]
    words = _WORD.findall(f"{before} {after}")
    harmless = not _HARMLESS.sub("", before + after) and not any(map(_changes_number, words))
    # A letter against the digits is a name ("A18"), a minus after a word may be a subtraction ("total - 18").
    named = re.search(r"[^\W\d_]-?$", before) or (number["sign"] and before.strip() and number[0][1:2].isspace())
    if not harmless or named:
        return Answer(None, "unreadable")
    return _value(number)


def _changes_number(word: str) -> bool:
    return word in _CHANGING_WORDS or (len(word) == 1 and word < "\u2e80" and word not in _UNIT_LETTERS)


def _value(number: re.Match[str]) -> Answer:
    """The canonical value of a number that was found."""
    digits, under, whole = number["num"], number["den"], number["whole"]
    if len(number[0]) > _MAX_DIGITS or (under and not Fraction(under)):
        return Answer(None, "unreadable")
    value = Fraction(digits.rstrip(".")) / Fraction(under or 1) + Fraction(whole or 0)
    value = -value if number["sign"] == "-" else value
    return Answer(f"{value}{'%' if number['percent'] else ''}", "ok")


def number_words_to_digits(text: str) -> str:
    """Write the number words of a lower-case text as digits, marked "w": "two hundred and five" -> "205w"."""
    if not _WORD.search(text):
        return text
    text = _WORD.sub(lambda m: f"{NUMBER_WORDS[m[0]]}w" if m[0] in NUMBER_WORDS else m[0], text)
    text = re.sub(r"\b([2-9])0w[ -]([1-9]w)\b(?!-\d)", r"\1\2", text)  # but "twenty 5-dollar bills"
    for word, scale in NUMBER_SCALES.items():
        if word in text:
            scaled = rf"(?:(?<![\d.,])(\d{{1,9}}(?:\.\d{{1,9}})?)w?[ -])?\b{word}\b"
            text = re.sub(scaled, lambda m, scale=scale: f"{Fraction(m[1] or 1) * scale}w", text, flags=re.ASCII)
        if "00w" in text:
            text = re.sub(r"\b(\d+)00w(?: and)? (\d{1,2})w\b", lambda m: f"{m[1]}{int(m[2]):02}w", text)
            text = re.sub(r"\b(\d+)000w (\d{3})w\b", r"\1\2w", text)
    return text


def _read_arithmetic(plain: str) -> Answer:
    """Accept arithmetic that Math-Verify computes at once; its time doubles with each "/" of 1/2/3/4..."""
    operations = len(re.findall(r"[-+*/^(]|\\[a-z]+", plain))
    slow = plain.count("/") > 2 or plain.count("(") > 2 or plain.count("^") > 1 or plain.count("sqrt") > 1
    if len(plain) > 60 or operations > 8 or slow or re.search(r"\d{13}|\*\*", plain) or not _balanced(plain):
        return Answer(None, "unreadable")
    return Answer(re.sub(r" +", " ", plain), "ok")


def _balanced(plain: str) -> bool:
    return plain.count("{") == plain.count("}") and plain.count("(") == plain.count(")")


@functools.lru_cache(maxsize=4096)
def _read_gold(gold: str) -> str:
    answer = _read_content(_clean(gold))
    if answer.value is None:
        raise ValueError(f"gold answer {gold[:80]!r} cannot be read: {answer.kind}")
    return answer.value


def _equal(value: str, wanted: str) -> bool:
    """Exact for plain numbers, Math-Verify for arithmetic."""
    numbers, wanted_numbers = _numbers(value), _numbers(wanted)
    if numbers and wanted_numbers:
        return not numbers.isdisjoint(wanted_numbers)
    return _math_equal(value, wanted)


def _numbers(value: str) -> set[Fraction]:
    """The numbers a value may stand for: a percentage is read both as 50 and as 0.5; empty for arithmetic."""
    if not re.fullmatch(r"-?\d+(?:/\d+)?%?", value):
        return set()
    number = Fraction(value.rstrip("%"))
    return {number, number / 100} if value.endswith("%") else {number}


@functools.lru_cache(maxsize=4096)
def _math_equal(value: str, wanted: str) -> bool:
    """Ask MathEqual, in a thread of its own.

    On the main thread it sets signal.alarm, which clears an alarm already running (Math-Verify#55); on
    any other thread it sets none. The size limits on what is read as arithmetic stand in for that clock.
    """
    verifier = _math_verifier()  # a missing package shows here, not as a wrong answer
    verdict: list[bool] = []

    def check() -> None:
        try:
            score, _ = verifier.check(f"${value}$", wanted.replace("%", r"\%"), {})
        except Exception:  # whatever the parser trips over, the answer is not known to be right
            score = None
        verdict.append(bool(score))

    thread = threading.Thread(target=check)
    thread.start()
    thread.join()
    return verdict == [True]


@functools.cache
def _math_verifier():
    """MathEqual, imported when first needed: it takes seconds, and plain numbers need none of it."""
    from whileai.simulations.verify.math import MathEqual

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on each call that it has no clock
    return MathEqual()
