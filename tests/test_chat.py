"""Playing a chat: what each copy reads, what counts as its own, and how it is graded and measured."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from recipe import (
    ARMS,
    Chat,
    ChatTemplate,
    Config,
    Plan,
    Problem,
    Turn,
    UserError,
    chat_from_json,
    chat_json,
    draw_chats,
    grade_chat,
    play_chats,
    problems_from_json,
    problems_json,
    uniforms,
    view,
)
from selftest import LetterTokenizer, scripted
from talk import is_echo, private_numbers, talk_measures

PROBLEM = Problem("test-3", "How many eggs?", (("Ann has 3 eggs.",), ("Ben has 4 eggs.",)), "7")
CONFIG = Config(
    system_prompt="S", facts_prompt="{facts} {question}", partner_prompt="P:{message}", talk_prompt="T",
    last_prompt="L", message_tokens=6, last_message_tokens=12,
)  # fmt: skip


def picture(stream) -> str:
    """The stream's text over its mask: ^ where a token is the copy's own."""
    text = "".join(map(chr, stream.ids)).replace("\n", " ")
    return f"{text}\n{''.join('^' if own else ' ' for own in stream.own)}".rstrip()


def test_the_two_streams_of_a_chat_drawn() -> None:
    """Letters are tokens, § ends a turn. B's first message is longer than its cap of 7 tokens: it is cut, and
    closed with a § that is not B's own. A's last message fits."""
    template = ChatTemplate(LetterTokenizer(), [ord("§")])
    lines = ["3 mine", "I have 4", r"\boxed{7}", "7"]
    chat = play_chats([Plan(PROBLEM, (0,))], scripted(lines), template, dataclasses.replace(CONFIG, message_tokens=7))[
        0
    ]
    a, b = chat.streams
    assert picture(a) == (
        "<s>S§<u>- Ann has 3 eggs. How many eggs?  T§<a>3 mine§<u>P:I have  L§<a>\\boxed{7}§\n"
        "                                               ^^^^^^^                  ^^^^^^^^^^"
    )
    assert picture(b) == (
        "<s>S§<u>- Ben has 4 eggs. How many eggs?  P:3 mine  T§<a>I have §<u>P:\\boxed{7}  L§<a>7§\n"
        "                                                         ^^^^^^^                      ^^"
    )
    assert [t.truncated for t in chat.turns] == [False, True, False, False]
    assert [t.tokens for t in chat.turns] == [7, 7, 10, 2]


def test_no_stream_ever_holds_the_partners_facts() -> None:
    template = ChatTemplate(LetterTokenizer(), [ord("§")])
    chat = play_chats([Plan(PROBLEM, (0,))], scripted(["hi", "yo", "no", "no"]), template, CONFIG)[0]
    a, b = ("".join(map(chr, s.ids)) for s in chat.streams)
    assert "Ann has 3" in a and "Ben" not in a
    assert "Ben has 4" in b and "Ann" not in b
    assert "Ben" not in view(PROBLEM, 0, 0, None, CONFIG) and "Ann" not in view(PROBLEM, 1, 1, "hi", CONFIG)


def test_a_message_cannot_open_a_turn_or_fill_in_a_prompt() -> None:
    template = ChatTemplate(LetterTokenizer(), [ord("§")])
    chat = play_chats([Plan(PROBLEM, (0,))], scripted(["{facts}", "a§§b", "c", "d"]), template, CONFIG)[0]
    assert "P:{facts}"[:8] in "".join(map(chr, chat.streams[1].ids))  # as typed (cut at 6), not filled in
    assert "§" not in chat.turns[1].text

    class Nested(LetterTokenizer):
        all_special_tokens = ("<end>",)

        def decode(self, ids, skip_special_tokens):
            return "x<e<end>nd>y"  # taking the inner one out makes another

    assert ChatTemplate(Nested(), [ord("§")]).read([1]) == "xy"


def test_sampling_of_a_chat_hangs_on_its_own_seed_alone() -> None:
    one, two = Plan(PROBLEM, (17, 0, 3)), Plan(PROBLEM, (17, 0, 4))
    assert (uniforms([one, two], 1, 5)[1] == uniforms([two], 1, 5)[0]).all()
    assert (uniforms([one], 1, 5) != uniforms([two], 1, 5)).any()
    assert (uniforms([one], 1, 5) != uniforms([one], 2, 5)).any()


def test_tokenizers_that_cannot_chat_are_refused_with_a_reason() -> None:
    class Plain(LetterTokenizer):
        chat_template = None

    class Endless(LetterTokenizer):
        def apply_chat_template(self, *args, **kwargs):
            return [i for i in super().apply_chat_template(*args, **kwargs) if i != ord("§")]

    with pytest.raises(UserError, match="has no chat template"):
        ChatTemplate(Plain(), [ord("§")])
    with pytest.raises(UserError, match="does not end an assistant's turn"):
        ChatTemplate(Endless(), [ord("§")])


def test_a_template_without_a_system_role_gets_it_in_the_user_turn() -> None:
    class NoSystem(LetterTokenizer):
        def apply_chat_template(self, messages, **kwargs):
            if messages[0]["role"] == "system":
                raise ValueError("System role not supported")
            return super().apply_chat_template(messages, **kwargs)

    ids = ChatTemplate(NoSystem(), [ord("§")]).opening("Be kind.", "Hello")
    assert "".join(map(chr, ids)) == "<u>Be kind.\n\nHello§<a>"


def test_real_templates_are_cut_where_their_turns_end(loaded) -> None:
    """Playing token by token gives the ids that the tokenizer's own rendering of the whole chat gives."""
    _, tokenizer, template = loaded
    turns = [("user", "You talk."), ("assistant", "I have 3 ."), ("user", "You hear: 4"), ("assistant", "I guess.")]
    whole = tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in turns], return_dict=False)
    own = [tokenizer(text, add_special_tokens=False)["input_ids"] + [template.end_of_turn] for _, text in turns[1::2]]
    first = template._render([{"role": "user", "content": "You talk."}], True)
    played = [*first, *own[0], *template.splice("You hear: 4"), *own[1]]
    assert played == list(whole)[: len(played)]


def chat_of(*texts: str, problem: Problem = PROBLEM) -> Chat:
    turns = tuple(Turn("ABAB"[i], text, len(text.split()), False, True) for i, text in enumerate(texts))
    return Chat(problem, turns)


@pytest.mark.parametrize(
    ("a", "b", "reward"),
    [(r"\boxed{7}", r"\boxed{7}", 1.0), (r"\boxed{7}", r"\boxed{8}", 0.5), ("7", r"\boxed{7.0}", 0.5), ("", "", 0.0)],
)
def test_team_reward_is_the_share_of_right_answers(a: str, b: str, reward: float) -> None:
    assert grade_chat(chat_of("x", "y", a, b)).reward == reward


def test_only_a_copys_last_message_is_its_answer() -> None:
    assert grade_chat(chat_of(r"\boxed{7}", r"\boxed{7}", "done", "done")).reward == 0


def test_talk_measures_by_hand() -> None:
    problem = Problem("t-0", "Out of 10, how many?", (("Ann has 3.", "And 5."), ("Ben has 4 of 10.",)), "12")
    assert private_numbers(problem) == (frozenset({"3", "5"}), frozenset({"4"}))  # 10 is in the question
    first = chat_of("I have 3. You?", "I have 4", r"3+4 \boxed{7}", r"3+5+4 \boxed{7.0}", problem=problem)
    second = chat_of("hello", "hello", "I guess 4", r"\boxed{5}", problem=problem)
    talk = talk_measures([grade_chat(first), grade_chat(second)])
    assert talk.sends_own == pytest.approx((1 + 1 + 0 + 0) / 6)  # A: 3 of {3, 5}, B: 4; then none of three
    assert talk.uses_partners == pytest.approx((1 + 2 + 1 + 1) / 6)  # A has 4; B has 3 and 5; A "guess 4"; B boxes 5
    assert talk.asks == 0.25
    assert talk.agree == 0.5
    assert talk.no_box == 0.25
    assert talk.message_tokens == pytest.approx((4 + 3 + 1 + 1) / 4)


def test_a_message_that_repeats_the_one_before_is_an_echo() -> None:
    """17 words have 10 runs of 8; 2 more words make it 12, 3 more 13."""
    heard = "the quick brown fox jumps over the lazy dog and runs home to its den at last"
    assert is_echo(heard, heard) and is_echo(heard, f"{heard} now now")  # 10 of 10; 10 of 12
    assert not is_echo(heard, f"{heard} now now now")  # 10 of 13 is less than 8 in 10
    assert is_echo(heard, "one two three four five six seven eight") is False
    assert is_echo(heard, "the quick brown fox jumps over the") is None  # 7 words
    assert is_echo("short", heard) is False
    graded = grade_chat(chat_of(heard, heard, "no", f"{heard} now now now"))
    assert talk_measures([graded]).echoes == 0.5  # of the second and the fourth message; the third has one word
    assert math.isnan(talk_measures([grade_chat(chat_of("a", "b", "c", "d"))]).echoes)


def test_copying_the_answer_is_to_box_it_and_name_no_other_number() -> None:
    """B has read A's last message when it writes its own."""

    def copied(a: str, b: str) -> float:
        return talk_measures([grade_chat(chat_of("I have 3.", "I have 4.", a, b))]).copies_answer

    assert copied(r"3 + 4 = \boxed{7}", r"work out the answer step by step: \boxed{7}") == 1
    assert copied(r"3 + 4 = \boxed{7}", r"3 + 4 is \boxed{7}") == 0  # worked out
    assert copied(r"3 + 4 = \boxed{7}", r"\boxed{8}") == 0
    assert copied("7", r"\boxed{7}") == 0 and copied("none", "none") == 0  # A has boxed nothing


def test_a_chat_goes_through_json_and_back_and_can_be_graded_again() -> None:
    graded = grade_chat(chat_of("x", "y", r"\boxed{7}", "none"))
    problems = problems_from_json(problems_json([graded]))
    assert chat_from_json(chat_json(graded), problems) == graded
    forged = chat_json(graded)
    forged["grades"][0]["correct"] = False
    assert chat_from_json(forged, problems).reward == 0
    assert grade_chat(chat_from_json(forged, problems).chat).reward == 0.5


def test_drawing_ahead_gives_the_chats_that_drawing_in_turn_gives() -> None:
    """Every chat's reward is a function of its seed; the two ways must then draw the same chats."""
    problems = [dataclasses.replace(PROBLEM, id=f"train-{i}") for i in range(12)]

    def play(plans: list[Plan]) -> list:
        right = [uniforms([plan], 0, 1)[0, 0] < 0.12 for plan in plans]
        return [grade_chat(chat_of(str(plan.seed), "", r"\boxed{7}" if r else "", "", problem=plan.problem))
                for plan, r in zip(plans, right, strict=True)]  # fmt: skip

    in_turn, none_lost = draw_chats(problems, ARMS["ada"], CONFIG, (17, 0, 0), False, play)
    ahead, lost = draw_chats(problems, ARMS["ada"], CONFIG, (17, 0, 0), True, play)
    assert [[c.chat.turns[0].text for c in chats] for chats in ahead] == [
        [c.chat.turns[0].text for c in chats] for chats in in_turn
    ]
    assert {len(chats) for chats in ahead} == {4, 8, 12}
    assert none_lost == 0 and lost == 12 * 12 - sum(map(len, ahead))


def test_mixed_gives_half_of_each_group_an_untrained_partner() -> None:
    seen: list[tuple[bool, bool]] = []

    def play(plans: list[Plan]) -> list:
        seen.extend(plan.trained for plan in plans)
        return [grade_chat(chat_of("", "", "", "", problem=plan.problem)) for plan in plans]

    draw_chats([PROBLEM], ARMS["mixed"], CONFIG, (17, 0, 0), False, play)
    assert seen == [(True, True), (True, True), (True, False), (True, False)]


def test_every_prompt_of_the_default_config_names_its_parts() -> None:
    config = Config()
    first, last = view(PROBLEM, 1, 1, "hello", config), view(PROBLEM, 1, 3, "hello", config)
    assert "Ben has 4 eggs." in first and "How many eggs?" in first and "hello" in first
    assert r"\boxed{" in last and "Ben has" not in last and not re.search(r"\{(facts|question|message)\}", first + last)
