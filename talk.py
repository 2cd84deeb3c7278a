"""How much the copies tell each other: the talk measures of some chats."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from facts import numbers_in
from grading import Answer, same_answer

if TYPE_CHECKING:
    from recipe import Batch, GradedChat, Problem


@lru_cache(maxsize=4096)
def private_numbers(problem: Problem) -> tuple[frozenset[str], frozenset[str]]:
    """The numbers only A has and the numbers only B has; those in the question count for neither."""
    a, b = (numbers_in(" ".join(facts)) for facts in problem.facts)
    question = numbers_in(problem.question)
    return a - b - question, b - a - question


ECHO_WORDS, ECHO_SHARE = 8, 0.8


def is_echo(heard: str, said: str) -> bool | None:
    """Whether a message repeats the one before it: of its runs of 8 words, at least 8 in 10 stand there too. None
    if it has no 8 words, which agreement can share by chance."""
    before, after = (
        {tuple(words[i : i + ECHO_WORDS]) for i in range(len(words) - ECHO_WORDS + 1)}
        for words in (heard.split(), said.split())
    )
    return len(before & after) >= ECHO_SHARE * len(after) if after else None


@dataclass(frozen=True)
class Talk:
    """Talk measures over a set of chats. Shares are pooled: counted over all copies of all chats, then divided."""

    sends_own: float  # of the numbers only this copy has, the share it put in a message before its last turn
    uses_partners: float  # of the numbers only the partner has, the share in this copy's last message
    asks: float  # share of first messages with a question mark
    message_tokens: float  # mean length of the messages before the last turns
    answer_tokens: float  # mean length of the last messages
    agree: float  # share of chats in which both boxes hold the same value
    truncated: float  # share of messages cut at the cap
    no_box: float  # share of last messages without a box
    echoes: float  # share of messages after the first, of 8 words or more, that repeat the one before
    copies_answer: float  # share of chats in which B's last message boxes A's answer and names no other number


def talk_measures(graded: Sequence[GradedChat]) -> Talk:
    """The talk measures of some chats; nan where nothing was there to count."""

    def share(pairs: Iterable[tuple[float, float]]) -> float:
        top, bottom = map(sum, zip(*pairs, strict=True)) if (pairs := list(pairs)) else (0, 0)
        return top / bottom if bottom else float("nan")

    sent, used, agree, copied = [], [], [], []
    for g in graded:
        named = [numbers_in(turn.text) for turn in g.chat.turns]
        for copy, mine in enumerate(private_numbers(g.chat.problem)):
            theirs = private_numbers(g.chat.problem)[1 - copy]
            sent.append((len(mine & named[copy]), len(mine)))
            used.append((len(theirs & named[2 + copy]), len(theirs)))
        agree.append(same_answer(*(Answer(grade.value, grade.kind) for grade in g.grades)))
        # B has read A's last message: with no number but A's answer it may be right and has worked nothing out
        copied.append(agree[-1] and len(named[3]) <= 1)
    early = [turn for g in graded for turn in g.chat.turns[:2]]
    last = [turn for g in graded for turn in g.chat.turns[2:]]
    echoes = [is_echo(heard.text, said.text) for g in graded for heard, said in itertools.pairwise(g.chat.turns)]
    return Talk(
        sends_own=share(sent),
        uses_partners=share(used),
        asks=share(("?" in turn.text, 1) for turn in early),
        message_tokens=share((turn.tokens, 1) for turn in early),
        answer_tokens=share((turn.tokens, 1) for turn in last),
        agree=share((same, 1) for same in agree),
        truncated=share((turn.truncated, 1) for turn in [*early, *last]),
        no_box=share((g.kind == "no_box", 1) for pair in graded for g in pair.grades),
        echoes=share((echo, 1) for echo in echoes if echo is not None),
        copies_answer=share((same, 1) for same in copied),
    )


def pooled_talk(parts: Sequence[Batch]) -> Talk:
    """The talk of several batches as one: each measure weighted by what it was counted over, the private numbers
    of the problems played or, for all the others, the chats."""
    chats, numbers = [], []
    for part in parts:
        problems = {c.graded.chat.problem.id: c.graded.chat.problem for c in part.kept}
        chats.append(sum(len(d.rewards) for d in part.drawn))
        numbers.append(sum(len(d.rewards) * sum(map(len, private_numbers(problems[d.problem]))) for d in part.drawn))

    def mean(name: str) -> float:
        weights = numbers if name in ("sends_own", "uses_partners") else chats
        known = [(w, getattr(part.talk, name)) for w, part in zip(weights, parts, strict=True) if w]
        return sum(w * x for w, x in known) / sum(w for w, _ in known) if known else float("nan")

    return Talk(**{f.name: mean(f.name) for f in dataclasses.fields(Talk)})
