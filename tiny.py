r"""The stand-in: word problems and a language model so small that the whole experiment runs on a laptop, offline.

    from tiny import TINY, build_tiny
    paths = build_tiny(Path("tiny"))                          # about a minute the first time, then cached
    config = Config(**TINY, model=str(paths.model), data=str(paths.data))

The problems have GSM8K's row format and go through the same split, chat, reader, trainer and evaluation. The model
(2 layers, 80,000 parameters) is warmed up on scripted chats until it can do the arithmetic and knows how to tell,
ask and use, but does so unreliably: that unreliability is what training is left to remove. The stand-in shows
that the machinery works and learns; it does not predict which arm wins with a real model.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import itertools
import json
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # recipe imports this file for its --help, which needs neither torch nor transformers
    import numpy as np

    from recipe import ChatTemplate, Config, Problem

# Overrides of recipe.Config. The prompts are terse because each of tens of thousands of chats reads every token of
# them; what a copy tells takes up to 7 tokens, the longest answer 16: the caps leave room and bound a babbling policy.
TINY: dict[str, Any] = {
    "system_prompt": "You talk.",
    "facts_prompt": "{facts} {question}",
    "partner_prompt": "You hear: {message}",
    "talk_prompt": "Talk.",
    "last_prompt": "End with \\boxed{answer}.",
    "message_tokens": 10,
    "last_message_tokens": 20,
    "steps": 30,
    "lora_rank": 16,
    "lora_alpha": 32,
    "learning_rate": 1e-3,
    "warmup_steps": 5,
}


@dataclass(frozen=True)
class Habits:
    """How often a scripted speaker does what a good partner does."""

    share: float  # tells its own numbers
    share_if_asked: float  # ... when the partner just asked for them
    ask: float  # asks, if it does not tell
    use: float  # works with the partner's numbers, if it was told them
    copy: float  # B boxes whatever A boxed


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is built."""

    seed: int = 0
    train: int = 1400  # a few hundred above the 1,024 and 300 of the experiment
    test: int = 500
    steps: int = 900  # many small steps learn the arithmetic in half the time of few large ones
    rows: int = 32  # streams a step
    learning_rate: float = 6e-3
    solo: float = 0.3  # share of rows with all facts in one view: the arithmetic
    # The arithmetic is learned from good partners; the habits are diluted only afterwards, because a model that
    # sees them diluted from the start never learns to reckon.
    skilled_steps: float = 0.8
    skilled: Habits = Habits(share=0.9, share_if_asked=0.95, ask=0.3, use=0.75, copy=0.1)
    diluted: Habits = Habits(share=0.5, share_if_asked=0.75, ask=0.3, use=0.22, copy=0.12)


@dataclass(frozen=True)
class TinyPaths:
    model: Path
    data: Path


# ------------------------------------------------------------------------------------------- problems

NAMES = ("Ann", "Ben", "Eva", "Leo", "Mia", "Sam", "Tom", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stones")
ASIDES = ("It is a warm day.", "The sun is up.", "They are good friends.")
HIGHEST = 36  # the largest number with a token
HIGHEST_PRODUCT = 24  # every product is a fact to be learned by heart

# the facts, the question, and the operation on the numbers; the last comes twice, for it is the hardest to learn
KINDS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("{a} has {} {t}.", "{b} has {} {t}."), "How many {t} do they have in all?", "+"),
    (("{a} has {} {t}.", "{b} has {} {t}."), "How many more {t} does {a} have than {b}?", "-"),
    (("{a} has {} {t}.", "{b} takes {} of them."), "How many {t} are left?", "-"),
    (("{a} has {} bags.", "Each bag holds {} {t}."), "How many {t} are in the bags?", "*"),
    (("{a} has {} {t}.", "{b} has {} {t}."), "How many are twice the {t} they have?", "++"),
    *2 * ((("{a} has {} {t}.", "{b} has {} {t}.", "{c} has {} {t}."), "How many {t} do all of them have?", "+"),),
)


def work(operation: str, own: Sequence[int], other: Sequence[int]) -> tuple[str, int]:
    """The steps as a copy writes them, and the answer: ("3 + 5 = 8.", 8). Its own numbers come first, but two come
    before one, so that "I have 3 and 4." is taken up as it was heard."""
    numbers = [*other, *own] if len(other) > len(own) else [*own, *other]
    total, *others = sorted(numbers, reverse=True) if operation == "-" else numbers
    steps = []
    for number in others:
        result = {"-": total - number, "*": total * number}.get(operation, total + number)
        steps.append(f"{total} {operation[0]} {number} = {result}.")
        total = result
    if operation == "++":
        steps.append(f"{total} + {total} = {2 * total}.")
        total *= 2
    return " ".join(steps), total


def make_rows(random_: random.Random, heldout: Iterable[dict[str, Any]] = ()) -> Iterator[dict[str, Any]]:
    """Endless rows in GSM8K's format, no two with the same text, and none that has the question and all facts but
    one in common with a held-out row (decontamination would drop it). `operation` and `gist` ride along."""
    seen: set[str] = set()
    taken = {gist for row in heldout for gist in row["gist"]}
    while True:
        facts, question, operation = random_.choice(KINDS)
        numbers = [random_.randint(1, 9) for _ in facts]
        steps, answer = work(operation, numbers, [])
        if answer > (HIGHEST_PRODUCT if operation == "*" else HIGHEST):
            continue
        if operation == "-" and numbers[0] <= numbers[1]:
            continue
        words = dict(zip("abc", random_.sample(NAMES, 3), strict=True), t=random_.choice(THINGS))
        sentences = [fact.format(number, **words) for fact, number in zip(facts, numbers, strict=True)]
        asked = question.format(**words)
        gist = {" ".join([*kept, asked]) for kept in itertools.combinations(sentences, len(sentences) - 1)}
        if random_.random() < 0.25:  # first or last: in the middle it would leave one copy without a number
            sentences.insert(random_.choice((0, len(sentences))), random_.choice(ASIDES))
        text = " ".join([*sentences, asked])
        if text not in seen and not gist & taken:
            seen.add(text)
            yield {"question": text, "answer": f"{steps}\n#### {answer}", "operation": operation, "gist": gist}


def write_data(folder: Path, settings: Settings) -> Iterator[dict[str, Any]]:
    """Write train.jsonl and test.jsonl; returns the endless further rows, for the warm start."""
    random_ = random.Random(settings.seed)
    heldout = list(itertools.islice(make_rows(random_), settings.test))
    rows = make_rows(random_, heldout)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", heldout), ("train", itertools.islice(rows, settings.train))):
        lines = (json.dumps({key: row[key] for key in ("question", "answer")}) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return rows


# ------------------------------------------------------------------------------------------- tokenizer

END, PAD, UNKNOWN = "<|end|>", "<|pad|>", "<|unknown|>"
SPECIALS = (PAD, UNKNOWN, END, "<|system|>", "<|user|>", "<|assistant|>")
WORD = r"\\boxed\{|\w+|[^\w\s]"
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TELL, ASK, CHAT, GUESS, COPY = "I have {}.", "What do you have?", "Let us talk.", "I guess. {}", "You say {}"


def box(number: int) -> str:
    return f"\\boxed{{{number}}}"


def vocabulary() -> dict[str, int]:
    """Every word of every text above and of the prompts, so that none can be forgotten."""
    texts = [*NAMES, *THINGS, *ASIDES, TELL, ASK, CHAT, GUESS, COPY, "and - + * =", box(0)]
    texts += [text for facts, question, _ in KINDS for text in (*facts, question)]
    texts += [value for value in TINY.values() if isinstance(value, str)]
    words = {word for text in texts for word in re.findall(WORD, re.sub(r"(?<!boxed)\{\w*\}", " ", text))}
    numbers = [str(n) for n in range(HIGHEST + 1)]
    return {word: i for i, word in enumerate([*SPECIALS, *numbers, *sorted(words - set(numbers))])}


def make_tokenizer() -> Any:
    """A word-level tokenizer whose text reads like text ("3 + 5 = 8. \\boxed{8}") and encodes back to the same ids,
    as it must: a partner's message is delivered as text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(vocabulary(), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="removed", invert=True)
    tight = [decoders.Replace("\\boxed{ ", "\\boxed{"), decoders.Replace(" }", "}")]
    tight += [decoders.Replace(f" {mark}", mark) for mark in ".?:"]
    tokenizer.decoder = decoders.Sequence([decoders.WordPiece("##", cleanup=False), decoders.Fuse(), *tight])
    tokenizer.add_special_tokens(list(SPECIALS))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, pad_token=PAD, eos_token=END, chat_template=TEMPLATE,
        extra_special_tokens=list(SPECIALS[3:]), clean_up_tokenization_spaces=False,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ warm start


class Script:
    """A Generate (see recipe.py) whose words come from habits: play_chats then builds the rows of the warm start,
    token for token as it builds those of the experiment."""

    def __init__(self, encode: Callable[[str], list[int]], problems: Sequence[tuple[Problem, str]], habits: Habits):
        self.encode, self.problems, self.habits = encode, problems, habits
        self.acts: list[list[str]] = [[] for _ in problems]  # what was done in the turns so far
        self.boxed = [0] * len(problems)  # A's answer, once given

    def __call__(self, prompts: Any, *, streams: list[int], uniforms: np.ndarray, **_: Any) -> list[list[int]]:
        return [self.encode(self.message(*divmod(s, 2), uniforms[row]) + END) for row, s in enumerate(streams)]

    def message(self, chat: int, copy: int, u: Sequence[float]) -> str:
        problem, operation = self.problems[chat]
        habits, acts = self.habits, self.acts[chat]
        own, others = (numbers_of(problem.facts[c]) for c in (copy, 1 - copy))
        if len(acts) < 2:
            share = habits.share_if_asked if "ask" in acts else habits.share
            acts.append("share" if u[0] < share else "ask" if u[1] < habits.ask else "chat")
            return {"share": TELL.format(" and ".join(map(str, own))), "ask": ASK, "chat": CHAT}[acts[-1]]
        told = acts[1 - copy] == "share"
        acts.append("answer")
        if copy == 1 and u[0] < habits.copy:
            return COPY.format(box(self.boxed[chat]))
        if told and u[1] < habits.use:
            steps, self.boxed[chat] = work(operation, own, others)
            return f"{steps} {box(self.boxed[chat])}"
        self.boxed[chat] = own[0]
        return GUESS.format(box(own[0]))


def numbers_of(facts: Sequence[str]) -> list[int]:
    """The numbers in order, twice if written twice (unlike facts.numbers_in, which gives a set)."""
    return [int(number) for number in re.findall(r"\d+", " ".join(facts))]


def split_row(row: dict[str, str], name: str) -> Problem:
    from recipe import Problem, split_facts

    split = split_facts(row["question"])
    return Problem(name, split.question, (tuple(split.facts_a), tuple(split.facts_b)), row["answer"].split("#### ")[1])


Row = tuple[Sequence[int], Sequence[bool]]  # the ids of a stream, and which of them are learned


def solo_row(problem: Problem, operation: str, template: ChatTemplate, config: Config) -> Row:
    """One copy that knows all the facts and answers at once."""
    from recipe import view

    facts = tuple(fact for pair in itertools.zip_longest(*problem.facts) for fact in pair if fact)
    words = view(replace(problem, facts=(facts, ())), 0, 0, None, replace(config, talk_prompt=config.last_prompt))
    prompt = template.opening(config.system_prompt, words)
    steps, answer = work(operation, numbers_of(facts), [])
    own = encode(template.tokenizer, f"{steps} {box(answer)}{END}")
    return [*prompt, *own], [False] * len(prompt) + [True] * len(own)


def quick_template(tokenizer: Any) -> ChatTemplate:
    """recipe.ChatTemplate, several times faster on this tokenizer: it encodes every word and special token by
    itself, so an opening is the ends of an empty one around the user's words; splices repeat."""
    from recipe import ChatTemplate

    template = ChatTemplate(tokenizer, [tokenizer.eos_token_id])
    empty = template.opening(TINY["system_prompt"], "")
    template.opening = lambda system, user: [*empty[:-2], *encode(tokenizer, user), *empty[-2:]]
    template.splice = lru_cache(maxsize=None)(template.splice)
    return template


def encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids


def phase_rows(
    rows: Iterator[dict[str, Any]], count: int, habits: Habits, settings: Settings, tokenizer: Any
) -> list[Row]:
    """`count` shuffled rows of one phase: solo problems, and both streams of scripted chats."""
    from recipe import Config, Plan, play_chats

    config, template = Config(**TINY), quick_template(tokenizer)
    solos = int(count * settings.solo)
    solos += (count - solos) % 2  # a chat gives two rows
    problems = [
        (split_row(row, f"warm-{i}"), row["operation"])
        for i, row in enumerate(itertools.islice(rows, (count + solos) // 2))
    ]
    out = [solo_row(*pair, template, config) for pair in problems[:solos]]
    plans = [Plan(problem, (settings.seed, i)) for i, (problem, _) in enumerate(problems[solos:])]
    script = Script(lru_cache(maxsize=None)(partial(encode, tokenizer)), problems[solos:], habits)
    for chat in play_chats(plans, script, template, config):
        out += [(stream.ids, stream.own) for stream in chat.streams]
    random.Random(settings.seed).shuffle(out)
    # every other step has the longer rows: a quarter less padding
    pairs = [out[i : i + 2 * settings.rows] for i in range(0, len(out), 2 * settings.rows)]
    return [row for pair in pairs for row in sorted(pair, key=lambda row: len(row[0]))]


def make_model(tokenizer: Any) -> Any:
    """Random weights. Llama with Qwen2's biases, because AutoTokenizer gives a folder that says Qwen2 a Qwen2Tokenizer,
    whatever its tokenizer.json holds."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.08,
        tie_word_embeddings=True, attention_bias=True, **ids,
    ))  # fmt: skip
    model.generation_config = GenerationConfig(**ids)
    return model


def train(model: Any, rows: Sequence[Row], settings: Settings, progress: Callable[[int, int], None] | None) -> None:
    """Supervised learning of the rows' own tokens, `settings.rows` a step, in their order."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98))
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / settings.steps)
    for step in range(settings.steps):
        batch = rows[step * settings.rows : (step + 1) * settings.rows]
        width = max(len(ids) for ids, _ in batch)
        # padded on the right, where no real token looks: causal attention needs no mask
        ids = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids, _ in batch])
        learned = torch.tensor([[*own, *[False] * (width - len(own))] for _, own in batch])[:, 1:]
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[learned]), ids[:, 1:][learned])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        if progress:
            progress(step + 1, settings.steps)


def warm_start(rows: Iterator[dict[str, Any]], settings: Settings, progress: Callable[[int, int], None] | None) -> Any:
    """(model, tokenizer) after the two phases."""
    import torch

    if progress:
        progress(0, settings.steps)
    tokenizer = make_tokenizer()
    skilled = int(settings.steps * settings.skilled_steps)
    phases = ((skilled, settings.skilled), (settings.steps - skilled, settings.diluted))
    stream = [row for steps, habits in phases
              for row in phase_rows(rows, steps * settings.rows, habits, settings, tokenizer)]  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = make_model(tokenizer)
        train(model, stream, settings, progress)
    return model, tokenizer


# --------------------------------------------------------------------------------------------- building

MARKER = "built.json"
PROBLEMS = "generated-problems"  # the data set's name in the results
NAME = "the stand-in (82,000 parameters)"


def cache_folder() -> Path:
    """Where `recipe.py --tiny` keeps the stand-in."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "talk-credit" / "tiny"


def build_bar(step: int, steps: int) -> None:
    """Progress on one line of a terminal; a log gets the first and the last step only."""
    terminal = sys.stderr.isatty()
    if terminal or step in (0, steps):
        end = "" if terminal and step < steps else "\n"
        print(f"\rbuilding the stand-in: step {step} of {steps}", end=end, file=sys.stderr, flush=True)


def fingerprint(settings: Settings) -> str:
    """Changes with whatever decides the result: the settings, this file, how a chat is put into tokens, versions."""
    import recipe

    code = [inspect.getsource(part) for part in (recipe.view, recipe.ChatTemplate, recipe.play_chats)]
    versions = [version(package) for package in ("torch", "transformers", "tokenizers")]
    source = Path(__file__).read_text(encoding="utf-8")
    return hashlib.sha256(json.dumps([asdict(settings), source, code, versions]).encode()).hexdigest()


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARKER)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def is_whole(folder: Path, key: str) -> bool:
    """Whether `folder` holds exactly what a finished build with this fingerprint left there."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return marker == {"fingerprint": key, "files": digests(folder)}


def build(folder: Path, settings: Settings, progress: Callable[[int, int], None] | None) -> None:
    """Problems, model and tokenizer into a new folder; the marker last."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # of writing and reading a file of a third of a megabyte
    rows = write_data(folder / PROBLEMS, settings)
    model, tokenizer = warm_start(rows, settings, progress)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    marker = {"fingerprint": fingerprint(settings), "files": digests(folder)}
    (folder / MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")


def build_tiny(
    folder: Path, progress: Callable[[int, int], None] | None = None, threads: int = 1, settings: Settings = Settings()
) -> TinyPaths:
    """The stand-in in `folder`, built if it is not there whole and up to date; `progress(step, steps)` is called
    during the warm start. The same settings and number of threads give the same bytes on one machine. One thread
    takes a minute; two are a third faster on an idle machine and many times slower on a busy one."""
    import torch

    folder, key = Path(folder), fingerprint(settings)
    paths = TinyPaths(folder / "model", folder / PROBLEMS)
    if is_whole(folder, key):
        return paths
    if folder.exists() and {path.name for path in folder.iterdir()} - {"model", PROBLEMS, MARKER}:
        raise FileExistsError(f"{folder} holds other files too and would be replaced: name another folder")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with scratch_beside(folder) as scratch:
            if not is_whole(folder, key):  # unless another process was faster
                build(scratch / "new", settings, progress)
                if folder.exists():
                    os.rename(folder, scratch / "old")
                os.rename(scratch / "new", folder)
    finally:
        torch.set_num_threads(threads_before)
    return paths


@contextlib.contextmanager
def scratch_beside(folder: Path) -> Iterator[Path]:
    """A folder to build in. One process at a time has one, the next waits, and what a killed build left is cleared
    away: the lock is the operating system's, so a killed process holds none."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}-build-"
    place = os.open(folder.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks: then nothing is cleared
            fcntl.flock(place, fcntl.LOCK_EX)
            for stray in folder.parent.glob(f"{prefix}*"):
                shutil.rmtree(stray, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    finally:
        os.close(place)
