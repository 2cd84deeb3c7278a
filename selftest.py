"""`python recipe.py --selftest`: the rules of the experiment on examples worked out by hand, a line each.

Imports neither torch nor transformers nor TRL, needs no network and no files."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from grading import boxed_answer, grade
from recipe import (
    ARMS,
    Chat,
    ChatTemplate,
    Config,
    Plan,
    Problem,
    Turn,
    Unsplittable,
    ada_advantages,
    chats_used,
    grade_chat,
    grpo_advantages,
    keep_balanced,
    play_chats,
    raft_advantages,
    seats,
    split_facts,
    view,
)
from talk import private_numbers, talk_measures

TEXT = "Mr. Ode has 3.5 boxes. Each box holds 12 pens. He gives 6 pens away. How many pens are left?"
PROBLEM = Problem(
    "example-0", "How many pens are left?",
    (("Mr. Ode has 3.5 boxes.", "He gives 6 pens away."), ("Each box holds 12 pens.",)), "36",
)  # fmt: skip


class LetterTokenizer:
    """A tokenizer of one id a character, with a chat template: enough to play a chat without a model."""

    chat_template = "plain"
    name_or_path = "letters"
    all_special_tokens = ("§",)

    def apply_chat_template(
        self, messages: list[dict[str, str]], add_generation_prompt: bool, return_dict: bool
    ) -> list[int]:
        text = "".join(f"<{m['role'][0]}>{m['content']}§" for m in messages) + ("<a>" if add_generation_prompt else "")
        return [ord(c) for c in text]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids)).replace("§" if skip_special_tokens else "", "")


def scripted(lines: list[str]) -> Callable[..., list[list[int]]]:
    """A generator that says one line a turn, whatever it is asked."""
    said = iter(lines)

    def generate(prompts: list[list[int]], *, max_new_tokens: int, **_: object) -> list[list[int]]:
        line = next(said)
        return [[ord(c) for c in line + "§"][:max_new_tokens] for _ in prompts]

    return generate


def example_chat(lines: list[str], config: Config) -> Chat:
    """A scripted chat on PROBLEM."""
    template = ChatTemplate(LetterTokenizer(), [ord("§")])
    return play_chats([Plan(PROBLEM, (0,))], scripted(lines), template, config)[0]


def split_checks() -> Iterator[tuple[str, object, object]]:
    parts = split_facts(TEXT)
    yield "split: the question goes to both", parts.question, PROBLEM.question
    yield "split: A has the 1st and 3rd fact", parts.facts_a, PROBLEM.facts[0]
    yield "split: B has the 2nd", parts.facts_b, PROBLEM.facts[1]
    for text, reason in (
        ("Tom has 3 pens. How many has he?", "too_few_facts"),
        ("Tom is 3. He is old. How old?", "half_without_quantity"),
    ):
        try:
            found: object = split_facts(text)
        except Unsplittable as error:
            found = error.reason
        yield f"split: {text!r} is left out", found, reason
    yield "numbers: A's own, B's own", private_numbers(PROBLEM), (frozenset({"7/2", "6"}), frozenset({"12"}))


def reader_checks() -> Iterator[tuple[str, object, object]]:
    for text, value in (
        (r"so \boxed{36}", "36"), (r"\boxed{$1{,}200}", "1200"), (r"\boxed{18 \text{ dollars}}.", "18"),
        (r"\boxed{1} then \boxed{36}", "36"), (r"\boxed{17 and 18}", None), (r"\boxed{36", None), ("it is 36", None),
    ):  # fmt: skip
        yield f"reader: {text}", boxed_answer(text), value
    yield "grade: 36.0 is 36", grade(r"\boxed{36.0}", "36").correct, True
    yield (
        "grade: no box is wrong, and counted so",
        (grade("36", "36").correct, grade("36", "36").kind),
        (False, "no_box"),
    )


def chat_checks() -> Iterator[tuple[str, object, object]]:
    config = Config(message_tokens=30, last_message_tokens=20)
    yield "view: A's first prompt holds none of B's facts", "12 pens" in view(PROBLEM, 0, 0, None, config), False
    chat = example_chat(
        ["I have 3.5 boxes.", "Each holds 12.", r"\boxed{36}", r"3.5 x 12 - 6 = \boxed{36} pens"], config
    )
    a, b = chat.streams
    own_text = "".join(chr(i) for i, own in zip(a.ids, a.own, strict=True) if own)
    yield "chat: A's own tokens are what A sampled", own_text, r"I have 3.5 boxes.§\boxed{36}§"
    yield (
        "chat: B reads A's words as a user turn",
        "Your partner says:\nI have 3.5 boxes." in "".join(map(chr, b.ids)),
        True,
    )
    yield "chat: B's last message is cut at 20 tokens", (chat.turns[3].tokens, chat.turns[3].truncated), (20, True)
    yield "chat: the end put after a cut message is not B's own", (b.ids[-1], b.own[-1]), (ord("§"), False)
    graded = grade_chat(chat)
    yield "reward: A right, B's box cut off", (graded.reward, graded.grades[1].kind), (0.5, "no_box")
    talk = talk_measures([graded])
    yield "talk: 3.5 and 12 of 3.5, 6 and 12 are sent", round(talk.sends_own, 4), round(2 / 3, 4)


def credit_checks() -> Iterator[tuple[str, object, object]]:
    rewards = [1.0, 0.5, 0.0, 0.5]
    yield "grpo: r - mean(group)", grpo_advantages(rewards, rewards), [0.5, 0.0, -0.5, 0.0]
    yield "raft: 1 for a chat both got right", raft_advantages(rewards, rewards), [1.0, 0.0, 0.0, 0.0]
    drawn = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.5]
    yield (
        "ada: a flat group is replayed, a mixed one is not",
        (chats_used(drawn + [1.0] * 4, 4), chats_used([*rewards, *drawn], 4)),
        (8, 4),
    )
    yield "ada: keeps the 2 highest and the 2 lowest", keep_balanced(drawn, 4), [0, 1, 5, 7]
    kept = [drawn[i] for i in keep_balanced(drawn, 4)]
    yield "ada: r - mean(every chat drawn)", ada_advantages(kept, drawn), [-0.1875, -0.1875, 0.8125, 0.3125]
    yield (
        "mixed: B is untrained in half of a group",
        [seats(ARMS["mixed"], n, 4)[1] for n in range(4)],
        [True, True, False, False],
    )
    yield "no credit where all scored the same", grpo_advantages([0.5] * 4, [0.5] * 4), [0.0] * 4


def main() -> int:
    """Run every check; 0 if all hold, 1 otherwise."""
    failed = count = 0
    for checks in (split_checks, reader_checks, chat_checks, credit_checks):
        for name, found, wanted in checks():
            count += 1
            failed += found != wanted
            print(f"ok    {name}" if found == wanted else f"FAIL  {name}: {found!r}, should be {wanted!r}")
    heavy = sorted({"torch", "transformers", "trl"} & set(sys.modules))
    print(f"{count - failed} of {count} checks hold" + (f"; imported {heavy}" if heavy else ""))
    return 1 if failed or heavy else 0


__all__ = ["PROBLEM", "LetterTokenizer", "Turn", "example_chat", "main", "scripted"]
