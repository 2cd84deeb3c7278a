r"""Which way of assigning credit teaches two copies of a language model to talk to each other best?

Copy A and copy B each hold half the facts of a GSM8K problem and talk: A, B, A, B. Each ends with an answer,
and both are paid the same team reward: the share of the two answers that are right. Only the credit changes:

    arm     which chats                                   advantage of chat i, reward r_i
    grpo    4 a problem                                   r_i - mean(r over the 4)
    ada     replay while all scored the same, up to 12;   r_i - mean(r over every chat drawn)
            keep the 2 highest and the 2 lowest
    raft    4 a problem                                   1 if r_i = 1, else 0
    mixed   4 a problem, in 2 of them B is untrained      as grpo

    python recipe.py --tiny       all of it in small, on a laptop, in minutes
    python recipe.py --selftest   the rules on worked examples, in seconds, without torch
    python recipe.py              four arms x three seeds on a GPU (--reuse: take finished runs as they are)

Sections: config, task, chat, credit, trainer, evaluation, main. Around them: facts.py and grading.py read problems
and answers, talk.py measures the talk, data.py reads the data set; decode.py samples (ops.py: its operations), fuse.py
makes the update cheap; runs.py makes and reuses runs, ranks.py shares one between processes, cluster.py makes them with
Ray, records.py writes their files; report.py holds the statistics, tables.py shows them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ranks
from facts import NOTE, has_quantity, question_places, sentences
from grading import Grade, grade
from talk import Talk, pooled_talk, talk_measures
from words import one_line

if TYPE_CHECKING:  # the heavy packages are imported where they are used: --help and --selftest need none
    import numpy as np
    import torch

QUESTION = "Which way of assigning credit teaches two copies of a language model to talk to each other best?"
PAPER = "Reinforce-Ada: An Adaptive Sampling Framework under Non-linear RL Objectives, arXiv:2510.04996"


class UserError(Exception):
    """Something the user can put right: the message says what is wrong, where, and what to do. Exit code 2."""


class NonFiniteError(RuntimeError):
    """A loss or gradient was not finite; raised before the update, so the weights are as they were."""


class OutOfMemoryError(RuntimeError):
    """Not even the smallest micro-batch fits; the message says what to lower. One run's trouble: others may fit."""


# ---------------------------------------------------------------------------------------------- config


def option(default: Any, part: str, sentence: str) -> Any:
    """A field of Config. `part` groups the flags and names what of a record goes stale when it changes."""
    return field(default=default, metadata={"part": part, "help": sentence})


@dataclass(frozen=True)
class Config:
    """Every number of the experiment. Each field is a flag (`message_tokens` is --message-tokens)."""

    model: str = option("Qwen/Qwen2.5-1.5B-Instruct", "model", "Hugging Face id or folder of a causal LM")
    revision: str = option("main", "model", "revision of a model id on the hub")
    data: str = option("openai/gsm8k", "data", "hub id, or a folder with train.jsonl and test.jsonl")
    train_problems: int = option(1024, "data", "training problems, from the train split")
    heldout_problems: int = option(300, "data", "held-out problems, from the test split")
    data_seed: int = option(0, "data", "seed that shuffles the problems before they are counted off")
    system_prompt: str = option(
        "You and your partner solve a math problem together by talking. Each of you knows facts that the other "
        "cannot see, and both are needed. You speak in turn, two messages each.",
        "prompts", "the system message of both copies")  # fmt: skip
    facts_prompt: str = option(
        "The facts you know:\n{facts}\n\nThe question: {question}", "prompts", "how a copy is told its facts"
    )
    partner_prompt: str = option("Your partner says:\n{message}", "prompts", "how a partner's message arrives")
    talk_prompt: str = option("Write a short message to your partner.", "prompts", "asks for a copy's first message")
    last_prompt: str = option(
        "Write your last message: work out the answer step by step and end with it in \\boxed{}.",
        "prompts", "asks for a copy's last message")  # fmt: skip
    message_tokens: int = option(160, "chat", "cap on the new tokens of a message")
    last_message_tokens: int = option(384, "chat", "cap on the new tokens of a copy's last message")
    temperature: float = option(0.9, "chat", "sampling temperature, the same in training and evaluation")
    steps: int = option(80, "training", "updates of a run")
    problems: int = option(8, "training", "problems a step")
    group: int = option(4, "training", "chats a problem (even: mixed and ada take halves of it)")
    rounds: int = option(3, "training", "rounds of `group` chats that ada may draw for a problem")
    lora_rank: int = option(32, "training", "LoRA r, on q, k, v, o, gate, up and down projections")
    lora_alpha: int = option(64, "training", "LoRA alpha: the adapter is scaled by alpha / r")
    learning_rate: float = option(1e-4, "training", "AdamW's peak learning rate, with linear decay")
    warmup_steps: int = option(0, "training", "steps of linear warm-up")
    max_grad_norm: float = option(1.0, "training", "gradient clipping")
    eval_chats: int = option(2, "evaluation", "chats on each held-out problem")
    base_evals: int = option(3, "evaluation", "evaluations of the untrained pair (the noise floor)")
    token_budget: int = option(7680, "machine", "tokens of a micro-batch, padding included")
    checkpointing: bool = option(False, "machine", "recompute activations in the backward pass (less memory)")
    cache_gb: float = option(0.0, "machine", "most memory for keys and values, GB; 0 for 50 on a GPU, 2 on a CPU")
    generator: str = option("auto", "machine", "auto, fast (decode.py) or generate (transformers)")
    device: str = option("auto", "machine", "auto, cuda or cpu")
    threads: int = option(0, "machine", "torch's CPU threads, 0 for its own choice; more than the idle cores is slow")
    model_name: str = option("", "machine", "the model's name in the results, where the folder's says little")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            may_be_zero = f.name in ("data_seed", "warmup_steps", "temperature", "threads", "cache_gb")
            if not 0 <= value < math.inf or (value == 0 and not may_be_zero):
                raise UserError(f"{flag(f.name)} {value}: must be {'at least 0' if may_be_zero else 'above 0'}")
        if self.group % 2:
            raise UserError(f"--group {self.group} does not fit: mixed and ada take halves, so it must be even")
        if self.problems > self.train_problems:
            raise UserError(f"--problems {self.problems} a step exceeds --train-problems {self.train_problems}")

    def part(self, name: str) -> dict[str, Any]:
        """The fields of one part, for the key of a record."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["part"] == name}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# ---------------------------------------------------------------------------------------------- task


class Unsplittable(ValueError):
    """The problem cannot be shared; `reason` is no_question, too_few_facts or half_without_quantity."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Split:
    """Who reads what. The facts alternate: A has the 1st, 3rd, 5th ..., B the 2nd, 4th ...."""

    question: str  # the question's sentences and the notes after it, read by both
    facts_a: tuple[str, ...]
    facts_b: tuple[str, ...]
    question_has_facts: bool  # it names a quantity ("If 3 leave, how many ...?"), which both then know
    question_at: tuple[int, ...]  # the places of its sentences in sentences(text), to rebuild the order


def split_facts(text: str) -> Split:
    """Share a problem between two copies, or raise Unsplittable.

    Every sentence with a question mark is the question; without one, the last that demands an answer
    ("Calculate ..."). Instructions and bracketed remarks after it go with it ("(There are 128 ounces to a
    gallon.)"); all else is a fact, also when it comes after the question.
    """
    parts = sentences(text)
    asking = question_places(parts)
    notes = [i for i in range(asking[-1] + 1, len(parts)) if NOTE.match(parts[i])] if asking else []
    question_at = tuple(asking + notes)
    facts = [part for i, part in enumerate(parts) if i not in set(question_at)]
    if not asking:
        raise Unsplittable("no_question")
    if len(facts) < 2:
        raise Unsplittable("too_few_facts")
    facts_a, facts_b = tuple(facts[0::2]), tuple(facts[1::2])
    if not all(any(map(has_quantity, half)) for half in (facts_a, facts_b)):
        raise Unsplittable("half_without_quantity")
    question = " ".join(parts[i] for i in question_at)
    return Split(question, facts_a, facts_b, has_quantity(question), question_at)


@dataclass(frozen=True)
class Problem:
    """A GSM8K problem cut in two: `facts[0]` is copy A's half, `facts[1]` copy B's; both see the question."""

    id: str  # "train-17": split and row of the source file, from 0
    question: str
    facts: tuple[tuple[str, ...], tuple[str, ...]]
    gold: str

    @property
    def row(self) -> int:
        return int(self.id.rsplit("-", 1)[1])

    @property
    def text(self) -> str:
        """The whole problem, A's facts, B's and the question."""
        return " ".join([*self.facts[0], *self.facts[1], self.question])


# ---------------------------------------------------------------------------------------------- chat

SPEAKERS = "ABAB"


@dataclass(frozen=True)
class Turn:
    """One message: what the partner was given to read."""

    speaker: str
    text: str
    tokens: int  # sampled, the end of the turn included
    truncated: bool  # cut at the cap
    trained: bool  # sampled by the model in training, not by the untrained base


@dataclass(frozen=True)
class Stream:
    """What one copy read and wrote, as one row of tokens. `own` marks the tokens it sampled itself."""

    ids: tuple[int, ...]
    own: tuple[bool, ...]


@dataclass(frozen=True)
class Chat:
    """A, B, A, B on one problem. `streams` are A's and B's; a chat read from a record has none."""

    problem: Problem
    turns: tuple[Turn, ...]
    streams: tuple[Stream, ...] = ()


@dataclass(frozen=True)
class GradedChat:
    """A chat with the grades of both last messages, A's first."""

    chat: Chat
    grades: tuple[Grade, Grade]

    @property
    def reward(self) -> float:
        """Team reward: the share of the two answers that are right (0, 0.5 or 1)."""
        return sum(g.correct for g in self.grades) / 2


@dataclass(frozen=True)
class Plan:
    """A chat to be played. `seed` alone decides its sampling, whatever else is in the batch;
    `trained` says for A and B whether the model in training speaks (or the untrained base)."""

    problem: Problem
    seed: tuple[int, ...]
    trained: tuple[bool, bool] = (True, True)


class Generate(Protocol):
    """Continues prompts (token ids, ragged). `streams` numbers the stream a row belongs to, so that a
    generator may keep its keys and values from one turn to the next; `uniforms` [rows, max_new_tokens] in
    [0, 1) is the only source of chance. Returns the sampled ids, the end of the turn included if sampled."""

    def __call__(
        self, prompts: list[list[int]], *, streams: list[int], trained: list[bool], uniforms: np.ndarray,
        max_new_tokens: int, temperature: float,
    ) -> list[list[int]]: ...  # fmt: skip


class ChatTemplate:
    """The tokenizer's chat template, cut so that sampled tokens are never decoded and encoded again.

    `eos_ids` are all ids that end a turn when sampled; `end_of_turn` is the one the template itself puts
    after an assistant message, used to close a truncated one. Raises UserError for a tokenizer without a
    template, or with one that does not end an assistant's turn with such an id.
    """

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int]):
        self.tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(f"the tokenizer of {tokenizer.name_or_path} has no chat template: use an instruct model")
        self.eos_ids = frozenset(eos_ids)
        self.specials = sorted(set(tokenizer.all_special_tokens), key=len, reverse=True)
        self._dialogue = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        ids = self._render(self._dialogue, prompt=False)
        ends = [i for i, token in enumerate(ids) if token in self.eos_ids]
        if not ends:
            raise UserError(f"the chat template of {tokenizer.name_or_path} does not end an assistant's turn with "
                            f"one of its end-of-turn ids {sorted(self.eos_ids)}")  # fmt: skip
        self.end_of_turn = ids[ends[-1]]
        self._cut = ends[-1] + 1

    def _render(self, messages: list[dict[str, str]], prompt: bool) -> list[int]:
        out = self.tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        return list(out)

    def opening(self, system: str, user: str) -> list[int]:
        """The ids up to a copy's first own token."""
        try:
            return self._render([{"role": "system", "content": system}, {"role": "user", "content": user}], True)
        except Exception as error:  # some templates (Gemma's) know no system role, and say so in words of their own
            if "system" not in str(error).lower():
                raise
            return self._render([{"role": "user", "content": f"{system}\n\n{user}"}], True)

    def splice(self, user: str) -> list[int]:
        """The ids between a copy's end of turn and its next own token: the partner's words as a user turn."""
        return self._render([*self._dialogue, {"role": "user", "content": user}], True)[self._cut :]

    def read(self, ids: Sequence[int]) -> str:
        """A message as text. Spelled-out special tokens are taken out: a message cannot open a turn."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        while any(token in text for token in self.specials):
            for token in self.specials:
                text = text.replace(token, "")
        return text.strip()


def view(problem: Problem, copy: int, turn: int, heard: str | None, config: Config) -> str:
    """The user message before `turn` (0 to 3) of `copy` (0 is A): its own facts, the question and what the
    partner just said. Never the partner's facts."""
    parts = []
    if turn < 2:
        facts = "\n".join(f"- {fact}" for fact in problem.facts[copy])
        parts.append(config.facts_prompt.replace("{facts}", facts).replace("{question}", problem.question))
    if heard is not None:
        parts.append(config.partner_prompt.replace("{message}", heard))
    parts.append(config.talk_prompt if turn < 2 else config.last_prompt)
    return "\n\n".join(parts)


def uniforms(plans: Sequence[Plan], turn: int, count: int) -> np.ndarray:
    """[chats, count] numbers in [0, 1): chat i's row depends on its own seed and the turn only."""
    import numpy as np

    return np.stack([np.random.default_rng([*plan.seed, turn]).random(count) for plan in plans])


def play_chats(plans: Sequence[Plan], generate: Generate, template: ChatTemplate, config: Config) -> list[Chat]:
    """Play every chat, all at once, turn by turn: the one function behind training, evaluation and tests.

    Each copy's view is one token stream: its own tokens exactly as sampled, the partner's words spliced in as
    a user turn. A truncated message is closed with an end of turn that is not its own.
    """
    ids: list[tuple[list[int], list[int]]] = [([], []) for _ in plans]
    own: list[tuple[list[bool], list[bool]]] = [([], []) for _ in plans]
    turns: list[list[Turn]] = [[] for _ in plans]
    for turn, speaker in enumerate(SPEAKERS):
        copy, cap = turn % 2, config.message_tokens if turn < 2 else config.last_message_tokens
        for i, plan in enumerate(plans):
            words = view(plan.problem, copy, turn, turns[i][-1].text if turns[i] else None, config)
            new = template.opening(config.system_prompt, words) if turn < 2 else template.splice(words)
            ids[i][copy].extend(new)
            own[i][copy].extend([False] * len(new))
        messages = generate(
            [streams[copy] for streams in ids], streams=[2 * i + copy for i in range(len(plans))],
            trained=[plan.trained[copy] for plan in plans], uniforms=uniforms(plans, turn, cap),
            max_new_tokens=cap, temperature=config.temperature,
        )  # fmt: skip
        for i, (plan, message) in enumerate(zip(plans, messages, strict=True)):
            truncated = not message or message[-1] not in template.eos_ids
            closing = [template.end_of_turn] if truncated else []
            ids[i][copy].extend([*message, *closing])
            own[i][copy].extend([True] * len(message) + [False] * len(closing))
            turns[i].append(Turn(speaker, template.read(message), len(message), truncated, plan.trained[copy]))
    return [
        Chat(plan.problem, tuple(turns[i]), tuple(Stream(tuple(ids[i][c]), tuple(own[i][c])) for c in (0, 1)))
        for i, plan in enumerate(plans)
    ]


def grade_chat(chat: Chat) -> GradedChat:
    """Read and grade the boxed answers of A's and B's last messages. Raises ValueError naming the problem."""
    try:
        first, second = (grade(turn.text, chat.problem.gold) for turn in chat.turns[2:])
    except Exception as error:  # the reader takes any text; whatever it trips over must name its chat
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"a chat on problem {chat.problem.id} could not be graded ({why})") from error
    return GradedChat(chat, (first, second))


def problems_json(graded: Iterable[GradedChat]) -> dict[str, Any]:
    """The problems of some chats by id, so that a record can be read and graded alone."""
    problems = {g.chat.problem.id: g.chat.problem for g in graded}
    return {name: {"question": p.question, "facts": [list(half) for half in p.facts], "gold": p.gold}
            for name, p in sorted(problems.items())}  # fmt: skip


def problems_from_json(content: dict[str, Any]) -> dict[str, Problem]:
    return {name: Problem(name, p["question"], (tuple(p["facts"][0]), tuple(p["facts"][1])), p["gold"])
            for name, p in content.items()}  # fmt: skip


def chat_json(graded: GradedChat) -> dict[str, Any]:
    """A chat as a record keeps it: its words, not its tokens."""
    return {"problem": graded.chat.problem.id, "turns": [dataclasses.asdict(turn) for turn in graded.chat.turns],
            "grades": [dataclasses.asdict(g) for g in graded.grades]}  # fmt: skip


def chat_from_json(content: dict[str, Any], problems: Mapping[str, Problem]) -> GradedChat:
    """A chat from a record, with its grades as they were given."""
    chat = Chat(problems[content["problem"]], tuple(Turn(**turn) for turn in content["turns"]))
    return GradedChat(chat, tuple(Grade(**g) for g in content["grades"]))


# ---------------------------------------------------------------------------------------------- credit


def grpo_advantages(rewards_K: Sequence[float], rewards_D: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r over the group). GRPO, Shao et al. 2024, arXiv:2402.03300, eq. 4, without the division
    by the standard deviation (Dr. GRPO, arXiv:2503.20783). For GRPO the kept chats are the drawn ones."""
    baseline = sum(rewards_K) / len(rewards_K)
    return [r - baseline for r in rewards_K]


def ada_advantages(rewards_K: Sequence[float], rewards_D: Sequence[float]) -> list[float]:
    """A_i = r_i - mean(r over every chat drawn), for the K kept of D drawn chats. Reinforce-Ada, Xiong et al.
    2025, arXiv:2510.04996, section 3: the baseline is the whole pool's, which balancing does not bias."""
    baseline = sum(rewards_D) / len(rewards_D)
    return [r - baseline for r in rewards_K]


def raft_advantages(rewards_K: Sequence[float], rewards_D: Sequence[float]) -> list[float]:
    """A_i = 1 if r_i = 1, else 0: fine-tuning on the chats that both copies got right. RAFT, Dong et al. 2023,
    arXiv:2304.06767, algorithm 1, with the best reward there is as the bar."""
    return [1.0 if r == 1.0 else 0.0 for r in rewards_K]


def chats_used(rewards_D: Sequence[float], round_size: int) -> int:
    """The replay rule: of chats drawn in rounds, how many a learner draws that goes on while all so far scored
    the same. Drawing every round at once and cutting here gives the very chats that drawing in turn gives."""
    for used in range(round_size, len(rewards_D), round_size):
        if len(set(rewards_D[:used])) > 1:
            return used
    return len(rewards_D)


def keep_all(rewards_D: Sequence[float], group: int) -> list[int]:
    """Every chat drawn, in order."""
    return list(range(len(rewards_D)))


def keep_balanced(rewards_D: Sequence[float], group: int) -> list[int]:
    """Indices of the `group` chats to train on: all if no more were drawn, else the group/2 highest and the
    group/2 lowest rewards, the earlier chat first among equals."""
    if len(rewards_D) <= group:
        return list(range(len(rewards_D)))
    order = sorted(range(len(rewards_D)), key=lambda i: (-rewards_D[i], i))
    high = order[: group // 2]
    low = sorted(set(order) - set(high), key=lambda i: (rewards_D[i], i))[: group // 2]
    return sorted(high + low)


@dataclass(frozen=True)
class Arm:
    """What one arm changes. Chats are drawn in rounds of `round_groups` groups, up to `rounds` of them (None:
    config.rounds) while all rewards are the same; `keep` chooses the chats to train on, `advantages` credits
    them, and in `untrained_half` arms the second half of each group has the untrained base as B."""

    formula: str
    advantages: Callable[[Sequence[float], Sequence[float]], list[float]]
    keep: Callable[[Sequence[float], int], list[int]] = keep_all
    rounds: int | None = 1
    round_groups: int = 1
    untrained_half: bool = False


ARMS: dict[str, Arm] = {
    "grpo": Arm("r_i - mean(group)", grpo_advantages),
    "ada": Arm("replay, balance; r_i - mean(drawn)", ada_advantages, keep_balanced, rounds=None),
    "raft": Arm("1 if r_i = 1 else 0", raft_advantages),
    "mixed": Arm("as grpo, B untrained in half", grpo_advantages, untrained_half=True),
    # controls, run with --arm: Ada's choice with mixed partners, and Ada's budget without its choice
    "ada_mixed": Arm("as ada, B untrained in half", ada_advantages, keep_balanced, None, untrained_half=True),
    "grpo12": Arm("as grpo, 12 chats in the group", grpo_advantages, round_groups=3),
}
TABLE_ARMS = ("grpo", "ada", "raft", "mixed")
BASELINE = "grpo"


def seats(arm: Arm, draw: int, group: int) -> tuple[bool, bool]:
    """Who plays draw number `draw` of a problem: for A and B, whether it is the model in training."""
    return True, not (arm.untrained_half and draw % group >= group // 2)


def draw_chats(
    problems: Sequence[Problem], arm: Arm, config: Config, seed: tuple[int, ...], ahead: bool,
    play: Callable[[list[Plan]], list[GradedChat]],
) -> tuple[list[list[GradedChat]], int]:  # fmt: skip
    """The chats each problem's rule draws, in order, and how many were played and thrown away.

    `ahead` plays every round at once, as one batch, and cuts by the replay rule afterwards (on a GPU a batch of
    96 chats takes little longer than 32); else only problems still without a spread are played again. A chat's
    sampling hangs on its own seed, so both give the same chats."""
    size = config.group * arm.round_groups
    rounds = config.rounds if arm.rounds is None else arm.rounds
    drawn: list[list[GradedChat]] = [[] for _ in problems]
    live, wave = list(range(len(problems))), rounds if ahead else 1
    for first in range(0, rounds, wave):
        numbers = range(first * size, (first + wave) * size)
        plans = [
            Plan(problems[p], (*seed, problems[p].row, n), seats(arm, n, config.group)) for p in live for n in numbers
        ]
        played = iter(play(plans))
        for p in live:
            drawn[p].extend(islice(played, len(numbers)))
        live = [p for p in live if len({chat.reward for chat in drawn[p]}) == 1]
        if not live:
            break
    used = [chats[: chats_used([chat.reward for chat in chats], size)] for chats in drawn]
    return used, sum(map(len, drawn)) - sum(map(len, used))


# ---------------------------------------------------------------------------------------------- trainer


@dataclass(frozen=True)
class Row:
    """One copy's stream of one chat, ready to train on: every own token gets the chat's advantage."""

    stream: Stream
    advantage: float

    @property
    def trained_tokens(self) -> int:
        return sum(self.stream.own)


@dataclass(frozen=True)
class Drawn:
    """One problem's chats in one step: every reward drawn, and which were kept."""

    step: int
    problem: str
    rewards: tuple[float, ...]
    kept: tuple[int, ...]


@dataclass(frozen=True)
class CreditedChat:
    """A chat that was trained on, with its advantage."""

    graded: GradedChat
    advantage: float


@dataclass(frozen=True)
class Batch:
    """One step's chats after credit. `trained_tokens` counts all rows, those without advantage included: it is
    the N of the loss, the same for every arm."""

    rows: tuple[Row, ...]
    trained_tokens: int
    kept: tuple[CreditedChat, ...]
    drawn: tuple[Drawn, ...]
    talk: Talk  # over every chat drawn
    sampled_tokens: int  # over every chat played, those thrown away included
    thrown_away: int
    play_seconds: float
    grade_seconds: float


def whole_step(parts: Sequence[Batch]) -> Batch:
    """The batches of all processes as one: problems in order, the times of the process that played longest, which
    the others waited for. The rows stay where they are."""
    if len(parts) == 1:
        return parts[0]
    slowest = max(parts, key=lambda part: part.play_seconds + part.grade_seconds)
    return Batch(
        rows=(), trained_tokens=sum(part.trained_tokens for part in parts),
        kept=tuple(c for part in parts for c in part.kept), drawn=tuple(d for part in parts for d in part.drawn),
        talk=pooled_talk(parts), sampled_tokens=sum(part.sampled_tokens for part in parts),
        thrown_away=sum(part.thrown_away for part in parts), play_seconds=slowest.play_seconds,
        grade_seconds=slowest.grade_seconds,
    )  # fmt: skip


@dataclass(frozen=True)
class StepMetrics:
    """What one step did. Rewards, flat groups and talk are over the chats drawn."""

    step: int
    reward: float  # mean team reward
    flat: float  # share of groups in which every chat drawn scored the same
    drawn: int
    kept: int
    thrown_away: int  # played ahead and not drawn by the rule
    sampled_tokens: int
    trained_tokens: int
    truncated: float
    sends_own: float | None
    uses_partners: float | None
    message_tokens: float
    answer_tokens: float
    loss: float
    grad_norm: float
    unchanged: bool  # no chat had an advantage: nothing was updated
    play_seconds: float
    grade_seconds: float
    update_seconds: float

    @property
    def seconds(self) -> float:
        return self.play_seconds + self.grade_seconds + self.update_seconds


def credit(
    drawn_P: Sequence[Sequence[GradedChat]], arm: Arm, config: Config, step: int
) -> tuple[list[CreditedChat], list[Drawn]]:
    """Apply an arm's rule to each problem's drawn chats: the kept chats with their advantages, and the tally."""
    kept_chats, tally = [], []
    for chats in drawn_P:
        rewards_D = [chat.reward for chat in chats]
        kept = arm.keep(rewards_D, config.group)
        advantages = arm.advantages([rewards_D[i] for i in kept], rewards_D)
        kept_chats += [CreditedChat(chats[i], a) for i, a in zip(kept, advantages, strict=True)]
        tally.append(Drawn(step, chats[0].chat.problem.id, tuple(rewards_D), tuple(kept)))
    return kept_chats, tally


def rows_of(chats: Sequence[CreditedChat]) -> list[Row]:
    """Two rows a chat, A's stream and B's; an untrained B's stream is no row, so its tokens are in no count."""
    return [
        Row(stream, c.advantage)
        for c in chats
        for copy, stream in enumerate(c.graded.chat.streams)
        if c.graded.chat.turns[copy].trained
    ]


def micro_batches(rows: Sequence[Row], budget: int) -> list[list[Row]]:
    """Rows with an advantage, sorted by length and cut so that rows x longest stays within `budget` tokens
    (one row may exceed it alone). A row without advantage has no gradient and is left out."""
    live = sorted((row for row in rows if row.advantage != 0), key=lambda row: len(row.stream.ids))
    batches: list[list[Row]] = []
    for row in live:
        if batches and (len(batches[-1]) + 1) * len(row.stream.ids) <= budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def collate(rows: Sequence[Row], pad_id: int, device: Any) -> dict[str, torch.Tensor]:
    """Right-padded tensors of a micro-batch: input_ids and labels [rows, longest] (labels are -100 on all but own
    tokens), advantages [rows]. No attention mask: a causal model never looks at the padding behind a row."""
    import torch

    longest = max(len(row.stream.ids) for row in rows)
    ids = torch.full((len(rows), longest), pad_id)
    labels = torch.full((len(rows), longest), -100)
    for i, row in enumerate(rows):
        length = len(row.stream.ids)
        ids[i, :length] = torch.tensor(row.stream.ids)
        labels[i, :length] = torch.where(torch.tensor(row.stream.own), ids[i, :length], -100)
    tensors = {"input_ids": ids, "labels": labels}
    tensors["advantages"] = torch.tensor([row.advantage for row in rows], dtype=torch.float32)
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def problem_order(count: int, config: Config, seed: int) -> list[int]:
    """Indices of the problems of all steps, in order: one seeded shuffle after another, each whole before the
    next. The order hangs on the seed alone, so a run that was killed goes on with the same problems."""
    order: list[int] = []
    passes = 0
    while len(order) < config.steps * config.problems:
        one_pass = list(range(count))
        random.Random(f"{seed}/{passes}").shuffle(one_pass)
        order += one_pass
        passes += 1
    return order[: config.steps * config.problems]


class ChatTraining:
    """What changes in TRL's GRPOTrainer, as a mixin (trainer_class joins them, so that this file imports
    without TRL). TRL keeps the optimizer, the schedule, clipping, logging and checkpoints.

    Change 1, `_get_train_sampler`: the problems of all steps in a fixed order.
    Change 2, `_prepare_inputs`: a batch is played chats with advantages, in rows of any number and length.
    Change 3, `training_step`: the loss over own tokens, in micro-batches by a token budget.
    """

    def __init__(
        self, *, arm: str, problems: Sequence[Problem], template: ChatTemplate, config: Config, seed: int,
        identity: str, make_generator: Callable[[Any], Any], on_step: Callable[[StepMetrics], None], **kwargs: Any,
    ):  # fmt: skip
        from fuse import fuse

        args, processes = kwargs["args"], ranks.world()
        args._n_gpu = min(args.n_gpu, 1)  # one process, one card: Trainer would put a batch on each that it sees
        args.save_total_limit = None  # Trainer's own count goes by the clock; _save_checkpoint keeps two
        if processes > 1:  # each takes whole groups, and one step's together are those of one process
            args.per_device_train_batch_size = config.problems // processes * config.group
            args.generation_batch_size = config.problems * config.group
        super().__init__(**kwargs)
        if processes > 1:  # no DDP wrapper: gradients are summed once a step, and not every process has a row to train
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        fuse(self.model)
        self.arm_name, self.arm, self.problems, self.template = arm, ARMS[arm], problems, template
        self.config, self.seed, self.identity, self.on_step = config, seed, identity, on_step
        self.generator = make_generator(self.model)
        self.token_budget = config.token_budget
        self.history: list[StepMetrics] = []
        self.tally: list[Drawn] = []
        self.last_batch: tuple[CreditedChat, ...] = ()

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        from torch.utils.data import SequentialSampler

        # Change 1: the dataset is already the whole order, each problem `group` times as TRL's batches want it
        return SequentialSampler(self.train_dataset if dataset is None else dataset)

    def _prepare_inputs(self, generation_batch: list[dict[str, Any]]) -> Batch:
        """Play one step's chats with the weights as they are and credit them."""
        group, step = self.config.group, self.state.global_step
        numbers = [row["number"] for row in generation_batch[::group]]
        if [row["number"] for row in generation_batch] != [n for n in numbers for _ in range(group)]:
            raise AssertionError("the batch is not whole groups of one problem each")
        self.generator.refresh()
        clock = {"play": 0.0, "grade": 0.0}

        def play(plans: list[Plan]) -> list[GradedChat]:
            start = time.perf_counter()
            chats = play_chats(plans, self.generator, self.template, self.config)
            middle = time.perf_counter()
            graded = [grade_chat(chat) for chat in chats]
            clock["play"] += middle - start
            clock["grade"] += time.perf_counter() - middle
            tokens.extend(turn.tokens for chat in chats for turn in chat.turns)
            return graded

        tokens: list[int] = []
        ahead = self.accelerator.device.type == "cuda"
        chosen = [self.problems[n] for n in numbers]
        drawn_P, thrown_away = draw_chats(chosen, self.arm, self.config, (self.seed, 0, step), ahead, play)
        kept, tally = credit(drawn_P, self.arm, self.config, step)
        rows = rows_of(kept)  # Change 2
        return Batch(
            rows=tuple(rows), trained_tokens=sum(row.trained_tokens for row in rows), kept=tuple(kept),
            drawn=tuple(tally), talk=talk_measures([chat for chats in drawn_P for chat in chats]),
            sampled_tokens=sum(tokens), thrown_away=thrown_away, play_seconds=clock["play"],
            grade_seconds=clock["grade"],
        )  # fmt: skip

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Play, credit, and leave the gradient of one step on the adapter. Raises NonFiniteError before any
        update if the loss or the gradient is not finite."""
        import torch

        batch = self._prepare_inputs(inputs)
        model.train()
        start = time.perf_counter()
        loss = self._backward(batch)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        norm = float(torch.nn.utils.get_total_norm(gradients.values())) if gradients else 0.0
        if not (math.isfinite(loss) and math.isfinite(norm)):
            bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
            model.zero_grad()
            raise NonFiniteError(
                f"{self.arm_name}, seed {self.seed}, step {self.state.global_step}: loss {loss}, gradient norm {norm}"
                f" ({len(bad)} of {len(gradients)} gradients not finite, the last in {bad[-1] if bad else 'none'}); "
                "the weights are those before this step"
            )
        self._keep(batch, loss, norm, unchanged=not gradients, seconds=time.perf_counter() - start)
        self._step += 1  # TRL's own count of backward passes
        return torch.tensor(loss, device=self.accelerator.device)

    def _backward(self, batch: Batch) -> float:
        """Leave the gradient of -sum(advantage x logp over own tokens) / N on the adapter and return that loss; rows,
        N, gradient and loss are those of all processes."""
        trained_tokens = sum(ranks.gather(batch.trained_tokens))
        loss = self._backward_passes(batch.rows, trained_tokens)
        ranks.sum_gradients(self.model.parameters())
        return sum(ranks.gather(loss))

    def _backward_passes(self, rows: Sequence[Row], trained_tokens: int) -> float:
        """The passes over this process's rows; returns their part of the loss. Out of memory: the token budget is
        halved, for good, and the step's passes start again."""
        import torch
        from peft.helpers import disable_input_dtype_casting

        while True:
            try:
                # autocast casts the inputs already; PEFT's own round trip through float32 costs a sixth of the time
                with disable_input_dtype_casting(self.model):
                    parts = [self._micro_loss(few, trained_tokens) for few in micro_batches(rows, self.token_budget)]
                return float(sum(parts))
            except torch.cuda.OutOfMemoryError:
                longest = max(len(row.stream.ids) for row in rows)
                if self.token_budget <= longest:
                    raise OutOfMemoryError(
                        f"out of memory on a single row of {longest} tokens: use --checkpointing, a smaller --model, "
                        "or lower --message-tokens and --last-message-tokens") from None  # fmt: skip
            self.model.zero_grad()
            self.generator.release()
            torch.cuda.empty_cache()
            self.token_budget //= 2
            print(f"out of memory: going on with --token-budget {self.token_budget}", file=sys.stderr)

    def _micro_loss(self, rows: list[Row], trained_tokens: int) -> float:
        # Change 3: the head runs on own tokens only (labels -100 elsewhere), at the sampling temperature
        inputs = collate(rows, self.processing_class.pad_token_id, self.accelerator.device)
        advantages = inputs.pop("advantages")
        with self.accelerator.autocast():
            # logp [rows, longest - 1], 0 where nothing is trained
            logp = self.accelerator.unwrap_model(self.model)(**inputs, fused_lm_head=True).log_probs
        loss = -(advantages[:, None] * logp).sum() / trained_tokens
        self.accelerator.backward(loss)
        return float(loss.detach())

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """TRL's checkpoint and what was measured so far; of the checkpoints, the latest two are kept. One that cannot
        be written (a full disk) is said and taken away, and the run goes on without it."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if ranks.is_main():
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one, which the run did not go on from
        ranks.barrier()
        with or_without(folder):
            super()._save_checkpoint(model, trial)
        ranks.barrier()  # every process has its random state in there
        if ranks.is_main() and folder.exists():
            with or_without(folder):
                self._seal(folder)
        ranks.barrier()  # no process may leave, and so end the start, while it is written

    def _seal(self, folder: Path) -> None:
        """What was measured so far, with a checksum of every other file: written last, so that a checkpoint has it
        and agrees with it, or is not whole. Then all but the latest two go."""
        import records

        so_far = {"identity": self.identity, "history": [dataclasses.asdict(m) for m in self.history],
                  "tally": [dataclasses.asdict(d) for d in self.tally],
                  "last_batch": [credited_json(c) for c in self.last_batch],
                  "problems": problems_json([c.graded for c in self.last_batch]),
                  "files": records.file_digests(folder)}  # fmt: skip
        records.write_record(folder / "so_far.json.xz", so_far)
        there = records.checkpoints(folder.parent)
        kept = sorted(step for step in there if step <= self.state.global_step)[-2:]
        for step in there.keys() - set(kept):  # a later one is damaged or of other settings
            shutil.rmtree(there[step], ignore_errors=True)

    def restore(self, so_far: dict[str, Any]) -> None:
        """Take up what was measured before the run was interrupted."""
        self.history = [StepMetrics(**m) for m in so_far["history"]]
        self.tally = [Drawn(d["step"], d["problem"], tuple(d["rewards"]), tuple(d["kept"])) for d in so_far["tally"]]
        problems = problems_from_json(so_far["problems"])
        self.last_batch = tuple(CreditedChat(chat_from_json(c, problems), c["advantage"]) for c in so_far["last_batch"])

    def _keep(self, batch: Batch, loss: float, norm: float, unchanged: bool, seconds: float) -> None:
        shares = ranks.gather((dataclasses.replace(batch, rows=()), seconds))
        seconds = max(shares, key=lambda share: share[0].play_seconds + share[0].grade_seconds)[1]
        batch = whole_step([part for part, _ in shares])
        rewards = [r for group in batch.drawn for r in group.rewards]
        metrics = StepMetrics(
            step=self.state.global_step, reward=sum(rewards) / len(rewards),
            flat=sum(len(set(group.rewards)) == 1 for group in batch.drawn) / len(batch.drawn),
            drawn=len(rewards), kept=len(batch.kept), thrown_away=batch.thrown_away,
            sampled_tokens=batch.sampled_tokens, trained_tokens=batch.trained_tokens,
            truncated=batch.talk.truncated, sends_own=none_if_nan(batch.talk.sends_own),
            uses_partners=none_if_nan(batch.talk.uses_partners), message_tokens=batch.talk.message_tokens,
            answer_tokens=batch.talk.answer_tokens, loss=loss, grad_norm=norm, unchanged=unchanged,
            play_seconds=batch.play_seconds, grade_seconds=batch.grade_seconds, update_seconds=seconds,
        )  # fmt: skip
        self.history.append(metrics)
        self.tally.extend(batch.drawn)
        self.last_batch = batch.kept
        for name, value in dataclasses.asdict(metrics).items():
            if value is not None and name not in ("step", "loss", "grad_norm"):  # TRL logs those itself
                self._metrics["train"][name].append(float(value))
        self.on_step(metrics)


@contextlib.contextmanager
def or_without(folder: Path) -> Iterator[None]:
    """While a checkpoint is written: if it cannot be, say so, take away what there is of it, and go on."""
    try:
        yield
    except Exception as error:  # a full disk is an OSError, a RuntimeError of torch's or a SafetensorError
        shutil.rmtree(folder, ignore_errors=True)
        why = one_line(error) or type(error).__name__
        with contextlib.suppress(OSError):
            print(f"{folder} could not be written ({why}): the run goes on without it", file=sys.stderr)


def credited_json(credited: CreditedChat) -> dict[str, Any]:
    return {**chat_json(credited.graded), "advantage": credited.advantage}


def none_if_nan(value: float) -> float | None:
    """JSON has no nan."""
    return None if value != value else value


def trainer_class() -> type:
    """GRPOTrainer with ChatTraining in front of it."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports its use otherwise
    from trl import GRPOTrainer

    return type("ChatGRPOTrainer", (ChatTraining, GRPOTrainer), {})


def make_trainer(
    arm: str, seed: int, config: Config, problems: Sequence[Problem], model: Any, tokenizer: Any,
    template: ChatTemplate, *, folder: Path, save_every: int, identity: str, make_generator: Callable[[Any], Any],
    on_step: Callable[[StepMetrics], None], callbacks: Sequence[Any] = (),
) -> Any:  # fmt: skip
    """The trainer of one run: TRL's, with the spec's settings in place of its defaults. Checkpoints go to `folder`
    every `save_every` steps (0: none); `identity` stands for all that determines the run."""
    trainer_type = trainer_class()  # first: it turns TRL's telemetry off
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback
    from trl import GRPOConfig

    weights = next(model.parameters())
    args = GRPOConfig(
        output_dir=str(folder), seed=seed, max_steps=config.steps,
        per_device_train_batch_size=config.problems * config.group, num_generations=config.group,
        gradient_accumulation_steps=1, steps_per_generation=1, num_iterations=1, beta=0.0,
        temperature=config.temperature, loss_type="dapo", scale_rewards="none", disable_dropout=True,
        learning_rate=config.learning_rate, lr_scheduler_type="linear", warmup_steps=config.warmup_steps,
        max_grad_norm=config.max_grad_norm, bf16=weights.dtype.itemsize == 2, use_cpu=weights.device.type == "cpu",
        gradient_checkpointing=config.checkpointing, logging_steps=1, logging_nan_inf_filter=False, report_to=[],
        disable_tqdm=True, dataloader_num_workers=0, dataloader_pin_memory=False,
        save_strategy="steps" if save_every else "no", save_steps=save_every or 500, save_total_limit=2,
    )  # fmt: skip
    order = problem_order(len(problems), config, seed)
    rows = [{"prompt": problems[n].question, "number": n} for n in order for _ in range(config.group)]
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=0.0, bias="none",
                      task_type="CAUSAL_LM", target_modules=projections)  # fmt: skip
    trainer = trainer_type(
        model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, peft_config=lora,
        reward_funcs=[lambda prompts, **_: [0.0] * len(prompts)],  # TRL wants one; the team reward is not asked of it
        callbacks=list(callbacks), arm=arm, problems=problems, template=template, config=config, seed=seed,
        identity=identity, on_step=on_step, make_generator=make_generator,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


# ---------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Evaluation:
    """The held-out chats of one sitting: `untrained` (repeat 0, 1, 2), `trained_pair` or `untrained_partner`."""

    name: str
    repeat: int
    chats: tuple[GradedChat, ...]
    seconds: float


# who speaks as A and as B: the model in training, or the untrained base
SITTINGS = {"untrained": (False, False), "trained_pair": (True, True), "untrained_partner": (True, False)}


def evaluate(
    name: str,
    repeat: int,
    seed: int,
    problems: Sequence[Problem],
    config: Config,
    generate: Generate,
    template: ChatTemplate,
) -> Evaluation:
    """Play `eval_chats` chats on each held-out problem, with the sampling of training, and grade both answers."""
    start = time.perf_counter()
    trained = SITTINGS[name]
    plans = [
        Plan(problem, (seed, 1 + list(SITTINGS).index(name), repeat, problem.row, chat), trained)
        for problem in problems
        for chat in range(config.eval_chats)
    ]
    graded = tuple(grade_chat(chat) for chat in play_chats(plans, generate, template, config))
    return Evaluation(name, repeat, graded, time.perf_counter() - start)


# ---------------------------------------------------------------------------------------------- main


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and turn every foreseeable trouble into one line and an exit code."""
    import records
    import report
    import runs
    from options import parser

    words = parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without "±" must not end a run
    try:
        with runs.Signals():  # from the first moment, not only while runs are made
            code = act(words)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read along (head, less) has left; runs made so far are in runs/
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, ranks.LaunchError, records.RecordError, report.ResultsError, OSError) as error:
        print(f"recipe.py: {one_line(error, 2000)}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # the disk under a redirected output is full: no second word about it on the way out
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except (ranks.Left, ranks.Alone) as end:
        print(f"recipe.py, process {ranks.rank()} of {ranks.world()}: {one_line(end, 2000)}", file=sys.stderr)
        return 1
    except (runs.Interrupted, KeyboardInterrupt) as stop:
        if ranks.is_main():
            said = str(stop) or "interrupted by SIGINT"
            print(f"{said}: what is finished is safe; go on with the same command and --reuse", file=sys.stderr)
        return getattr(stop, "exit_code", 130)


def act(words: Any) -> int:
    """What the command line asks for; returns the exit code."""
    import runs
    from options import configure

    ranks.join()
    if not ranks.is_main():
        return runs.follow()
    for alone in ("selftest", "plan", "bench"):
        if hasattr(words, alone) and ranks.world() > 1:
            raise UserError(f"--{alone} takes one process: start it with python recipe.py, without a launcher")
    if hasattr(words, "selftest"):
        import selftest

        return selftest.main()
    config, options = configure(words)
    if hasattr(words, "plan"):
        return runs.plan(config, options)
    if hasattr(words, "bench"):
        import bench

        return bench.main(config, options)
    return ranks.broadcast(runs.experiment(config, options))


if __name__ == "__main__":
    from recipe import main as entry  # as the module `recipe`, which the other files import, not as a second copy

    ranks.leave(entry())
