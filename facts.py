"""Read a word problem: its sentences, which of them ask, which are notes to the question, and its numbers."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from grading import number_words_to_digits

# A terminator with the quotes and brackets that close behind it, or a newline. Whether it ends a sentence is
# decided in `_ends_sentence`; a point inside a number (1.5, $.25) is never followed by white space.
_TERMINATOR = re.compile(r"(?:[.?!…][\"”’'»)\]\u200b]*+)++|[\n\r\v\f\x85\u2028\u2029]+")
# Quoted or bracketed text on one line. A quote mark after a digit is an inch mark and opens nothing.
_QUOTED = re.compile(r"“[^“”\n]*”|(?<![\w.?!\"'’])\"(?=\S)[^\"\n]*\"|\([^()\n]*\)")
_HIDE_TERMINATORS = str.maketrans(".?!…", "____")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_NEVER_END = _words("Mr mr Mrs mrs Ms Mx Dr dr Prof Rev Sgt Capt Lt Col Gen Gov Sen Hon vs e.g i.e approx")
# These end a sentence unless the next word is lower case: "3 lbs. of coffee", "at 8 a.m. Paul arrived".
_UNITS = _words("a.m p.m ph.d lb lbs oz ft sq in yd yds mi hr hrs min mins sec secs pt pts qt gal tsp tbsp wt avg etc")
# These end a sentence only before a word that opens one: "St. Louis", but "on Main St. She ...".
_NAME_PARTS = _words("st mt jr sr inc co corp ltd ave blvd rd")
_OPENERS = _words(
    "a after all altogether an and another are as assuming at because before between both but by "
    "calculate can compute determine did do does during each every finally find first for from given half "
    "has her his how however i if in is it its last later many most my next no now of on once one only "
    "other others our she he since so some that the their then there these they this those three to today "
    "together tomorrow two unfortunately we what when where which while who whose why will with yesterday "
    "you your"
)
# Nouns that a single letter labels: "Team B. Mary ..." ends a sentence, "John B. Smith" does not.
_LABELS = _words(
    "box bucket building bus candidate car city class company district farm grade group house initial jar "
    "letter line machine movie option packet plan point pond room route scheme school section stock store "
    "table team train tree type"
)
_WH = r"(?:how|what|what's|when|where|which|who|whose|whom|why)"
_CLAUSE = r"(?:^|[,;:.]\s*|\b(?:and|then|so|please)\s+)[\"“(]?(?:(?:at|in|for|by|to|on|of|from)\s+)?"
_ASKS = re.compile(
    rf"\b(?:how|what|what's|why|whose|who)\b|{_CLAUSE}(?:{_WH}|is|are|was|were|do|does|did|has|have|had|can|could"
    r"|will|would|should)\b",
    re.IGNORECASE,
)
_DEMANDS = re.compile(
    rf"{_CLAUSE}(?:calculate|compute|count|determine|estimate|evaluate|express|figure out|find|give|how|list"
    r"|name|report|show|solve|state|tell|what|what's|work out|write)\b"
    r"|\bhow (?:many|much|long|far|old|often|tall)\b",
    re.IGNORECASE,
)
# What begins like this after the question, an instruction or a bracketed remark, is part of the question.
NOTE = re.compile(
    r"\(|(?:please |also,? )?(?:answer|assume|consider|express|give|hint|ignore|note|recall|remember|round"
    r"|use|write|your answer)\b",
    re.IGNORECASE,
)


def sentences(text: str) -> list[str]:
    """Cut a problem into its sentences; joined they are the source, white space aside.

    A newline ends a sentence. Lists joined by ";" or ":" stay whole: their items lean on what stands before.
    """
    shadow = _QUOTED.sub(_hide_inner_terminators, text)
    parts, start = [], 0
    for match in _TERMINATOR.finditer(shadow):
        end = match.end()
        newline = match[0][0].isspace()
        if not newline and end < len(text) and not text[end].isspace():
            continue
        if newline or _ends_sentence(text[max(start, end - 80) : end].strip(), text[end : end + 40], match[0]):
            parts.append(text[start:end].strip())
            start = end
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _hide_inner_terminators(quoted: re.Match[str]) -> str:
    """Mask the marks inside a quote, not those at its end, which may end the sentence around it too."""
    inner = quoted[0].rstrip(".?!…\"”’')")
    return inner.translate(_HIDE_TERMINATORS) + quoted[0][len(inner) :]


def _ends_sentence(before: str, after: str, mark: str) -> bool:
    """Whether the mark that closes `before` ends its sentence, given the text `after` it."""
    following = after.split(maxsplit=1)
    word = following[0].lstrip("\"“‘'([") if following else ""
    if not word:
        return True
    lower = word[0].islower()
    if mark != ".":
        # In mid-sentence: `15 "Where's Waldo?" books`, "wait... then", "(triplets.) each".
        return not (lower and (len(mark) > 1 and set(mark) != {"?"}))
    if lower and re.match(r"(?:and|or|[ap]\.?m)\b", word):
        return False
    opens = re.split(r"[^a-z]", word.lower())[0] in _OPENERS or not word[0].isalpha()
    words = before[:-1].split()
    last = words[-1].lstrip("\"“‘'([$") if words else ""
    if last in _NEVER_END:
        return False
    if last == "No":
        return not word[0].isdigit()
    if last.lower() in _UNITS:
        return not lower and not re.match(r"[ECMP][SD]?T\b", word)
    if last.lower() in _NAME_PARTS or re.fullmatch(r"(?:[A-Za-z]\.)+[A-Za-z]", last):
        return opens
    if len(words) == 1 and re.fullmatch(r"[A-Z]|\d{1,2}", last):
        return False  # "J. Smith has ..." or the number of a list item, at the start of a sentence
    if re.fullmatch(r"[A-Z]", last):
        return opens or not _is_initial(words[:-1], word)
    return True


def _is_initial(words: list[str], after: str) -> bool:
    """Whether a capital after `words` is an initial ("John F. Kennedy"), not a label ("city B. Ann has")."""
    before = words[-1]
    if re.match(r"[A-Z]\.", after):
        return True
    if before.lower() in {after.lower(), *_LABELS} or re.fullmatch(r"[A-Z]\W*", after):
        return False
    if before == "and" and len(words) > 1 and re.fullmatch(r"[A-Z],?", words[-2]):
        return False  # "two schemes: A and B. Scheme A ..."
    return before[0].isupper() or before in {"by", "and", "with", "for", "to", "from"}


def question_places(parts: list[str]) -> list[int]:
    """The places of the sentences that ask: those with a question mark, or else the last that demands an answer."""
    marked = [i for i, part in enumerate(parts) if part.rstrip("\"”’')]»\u200b.! ").endswith("?")]
    # Beside a real question, a statement that ends in "?" is a fact; so is one that quotes a question.
    real = [i for i in marked if _ASKS.search(_QUOTED.sub("", parts[i]))]
    if marked:
        return real or marked[-1:]
    return [i for i, part in enumerate(parts) if _DEMANDS.search(part)][-1:]


_MULTIPLES = {"once": 1, "twice": 2, "couple": 2, "thrice": 3}
_MULTIPLES |= {verb + ending: n for verb, n in (("doubl", 2), ("tripl", 3)) for ending in ("e", "es", "ed", "ing")}
_PARTS = {"half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7}
_PARTS |= {"eighth": 8, "ninth": 9, "tenth": 10, "hundredth": 100}
_PART = "|".join(_PARTS)
_SOME_PART = re.compile(_PART)
# A "one" that stands for a noun, and a "once" that means "as soon as", are no quantities.
_PRONOUNS = re.compile(
    r"\b(?:the|this|that|each|every|other|another|no|any|some|new|old|which|last|first|\w+er|\w+est) one\b"
    r"|\bone (?:another|day)\b|\bonce (?!(?:an?|per|each|every|in|and|more)\b)"
)
_NUMBER = re.compile(r"(?<![a-z0-9.])(?:([0-9]+) (?=[0-9]+/[1-9]))?([0-9]*\.?[0-9]+)(?:/([0-9]{1,9})(?![0-9/]))?")


_DIGIT = re.compile(r"\d")


def has_quantity(text: str) -> bool:
    """Whether the text names a quantity, in digits or in words."""
    return bool(_DIGIT.search(text) or numbers_in(text))  # the first is quick, and settles three texts in four


def numbers_in(text: str) -> frozenset[str]:
    """The numbers a text names, each in one canonical form: "$1,200.50" -> "2401/2", "a dozen" -> "12".

    Signs, currency and "%" do not count ("50%" is "50"), "half", "0.5" and "1/2" are one number, and a
    clock's ":00" is left out, so that a fact and a message saying it in other words agree.
    """
    found = set()
    for whole, digits, under in _NUMBER.findall(_words_to_digits(_plain_digits(text))):
        if max(len(whole), len(digits)) > 300:  # near Python's limit for reading whole numbers
            found.add(digits)
        elif under and not int(under):
            found |= {str(Fraction(digits)), "0"}
        else:
            found.add(str(Fraction(digits) / int(under or 1) + int(whole or 0)))
    return frozenset(found)


def _plain_digits(text: str) -> str:
    """Lower case, with every number in plain digits: "½" -> " 1/2", "1,200" -> "1200", "8:00" -> "8"."""
    if not text.isascii():
        text = re.sub(r"([¼-¾⅐-⅞])", r" \1", text)  # 2½, which NFKC alone would make 21/2
        text = unicodedata.normalize("NFKC", text).replace("\u2044", "/")
    text = text.lower()
    text = re.sub(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}", r" \1/\2", text).replace("{,}", ",")
    text = re.sub(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])", lambda m: m[0].replace(",", ""), text)
    return re.sub(r"(?<=[0-9])(?: (?=000\b)|:00\b)", "", text)


def _words_to_digits(text: str) -> str:
    """Write number words as digits; a "w" marks those that were words."""
    text = number_words_to_digits(_PRONOUNS.sub(" ", text))
    text = re.sub(r"[a-z]+", lambda m: f"{_MULTIPLES[m[0]]}w" if m[0] in _MULTIPLES else m[0], text)
    if _SOME_PART.search(text):
        text = _parts_to_digits(text)
    if "dozen" in text:
        text = re.sub(r"\bhalf a dozen\b", "6w", text)
        text = re.sub(r"(?:(?<![0-9.])([0-9]{1,9})w? )?\bdozen\b", lambda m: f"{12 * int(m[1] or 1)}w", text)
    text = re.sub(r"\bhal(?:f|ves|ved)\b", "0.5w", text) if "hal" in text else text
    return re.sub(r"\bquarters?\b", "0.25w", text) if "quarter" in text else text


def _parts_to_digits(text: str) -> str:
    """"two and a half" becomes 2 1/2; "two thirds", "one-third" and "a third of" become 2/3 and 1/3. Quarters are
    coins as well: a number before them is joined only in "three quarters of"."""
    text = re.sub(rf"\b([0-9]+)w? and (?:a|1w)[ -]({_PART})\b", lambda m: f"{m[1]} 1/{_PARTS[m[2]]}", text)
    text = re.sub(rf"\b(?:an?|1w) ({_PART})\b(?= (?:of|as|the|more|less)|[.,])", lambda m: f"1/{_PARTS[m[1]]}", text)
    parts = rf"\b(?:([0-9])w?[ -](?!quarters(?! of))({_PART})s|1w-({_PART}))\b"
    text = re.sub(parts, lambda m: f"{m[1] or 1}/{_PARTS[m[2] or m[3]]}", text)
    return re.sub(r"\bhalf an? ([0-9]{1,12})w\b", lambda m: f"{int(m[1]) / 2}w", text)
