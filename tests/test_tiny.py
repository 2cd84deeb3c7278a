"""The stand-in: problems and tokenizer through the real split, chat and reader; builds that repeat and are cached."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import grading
import recipe
import runs
import tiny
from facts import numbers_in

SMALL = tiny.Settings(steps=4, rows=8, train=40, test=20)
MESSAGES = [
    tiny.TELL.format(3), tiny.TELL.format("3 and 4"), tiny.ASK, tiny.CHAT, tiny.GUESS.format(tiny.box(7)),
    tiny.COPY.format(tiny.box(36)), "9 + 9 = 18. 18 + 9 = 27. \\boxed{27}", "8 - 3 = 5. \\boxed{5}",
    "4 * 9 = 36. \\boxed{36}",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny.make_tokenizer()


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return list(itertools.islice(tiny.make_rows(random.Random(1)), 3000))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyPaths:
    return tiny.build_tiny(tmp_path_factory.mktemp("built") / "tiny", settings=SMALL)


@pytest.fixture()
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds without a warm start, for tests of what happens around it."""
    monkeypatch.setattr(tiny, "train", lambda model, rows, settings, progress: progress and progress(1, 1))


def test_import_is_light() -> None:
    heavy = "import sys, tiny; print(sorted({'torch', 'transformers', 'numpy', 'recipe'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", heavy], cwd=Path(tiny.__file__).parent, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_overrides_are_fields_of_config() -> None:
    config = recipe.Config(**tiny.TINY)
    assert config.last_message_tokens == tiny.TINY["last_message_tokens"]


# ------------------------------------------------------------------------------------------- problems


def test_every_problem_can_be_split_and_its_answer_follows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        split = recipe.split_facts(row["question"])
        assert all(numbers_in(" ".join(half)) for half in (split.facts_a, split.facts_b))
        problem = tiny.split_row(row, "x-0")
        numbers = [tiny.numbers_of(half) for half in problem.facts]
        for own, other in (numbers, numbers[::-1]):  # either copy's way of working gives the gold answer
            text, answer = tiny.work(row["operation"], own, other)
            assert grading.grade(f"{text} {tiny.box(answer)}", problem.gold).correct
            for left, sign, right, result in re.findall(r"(\d+) (\S) (\d+) = (\d+)\.", text):
                a, b = int(left), int(right)
                assert int(result) == {"+": a + b, "-": a - b, "*": a * b}[sign]
            assert 0 < answer <= tiny.HIGHEST


def test_every_kind_and_some_asides_occur(rows: list[dict[str, Any]]) -> None:
    assert {row["operation"] for row in rows} == {operation for _, _, operation in tiny.KINDS}
    share = sum(any(aside in row["question"] for aside in tiny.ASIDES) for row in rows) / len(rows)
    assert 0.2 < share < 0.3
    first = sum(row["question"].startswith(tiny.ASIDES) for row in rows) / len(rows)
    assert 0.3 * share < first < 0.7 * share


def test_data_of_the_experiment_is_whole_and_disjoint(tmp_path: Path) -> None:
    """What the experiment asks for is there after the split, and decontamination finds next to nothing."""
    settings = tiny.Settings()
    warm = tiny.write_data(tmp_path, settings)
    config = recipe.Config(**tiny.TINY, data=str(tmp_path))
    report = runs.load_data(config).report
    assert report["train"]["left_out"] == report["test"]["left_out"] == {}
    assert (report["train"]["kept"], report["test"]["kept"]) == (settings.train, settings.test)
    assert report["decontaminate_dropped"] <= 10  # of 1,024; 112 where rows are only told apart by their text
    files = [
        [json.loads(line) for line in (tmp_path / f"{n}.jsonl").read_text().splitlines()] for n in ("train", "test")
    ]
    texts = [row["question"] for part in (*files, itertools.islice(warm, 20_000)) for row in part]
    assert len(set(texts)) == len(texts) == settings.train + settings.test + 20_000
    assert set(files[0][0]) == {"question", "answer"}


# ------------------------------------------------------------------------------------------ tokenizer


def test_no_text_has_an_unknown_word(tokenizer: Any, rows: list[dict[str, Any]]) -> None:
    config = recipe.Config(**tiny.TINY)
    texts = [config.system_prompt, *MESSAGES]
    for row in rows:
        problem = tiny.split_row(row, "x-0")
        texts += [
            recipe.view(problem, copy, turn, "I have 3.", config) for turn, copy in ((0, 0), (1, 1), (2, 0), (3, 1))
        ]
    unknown = {text for text in texts if tokenizer.unk_token_id in tokenizer.encode(text)}
    assert not unknown
    assert tokenizer.unk_token_id in tokenizer.encode("zebra")  # or nothing was tested


def test_messages_survive_being_delivered_as_text(tokenizer: Any) -> None:
    for message in MESSAGES:
        assert tokenizer.decode(tokenizer.encode(message)) == message
    words = [i for i in range(len(tokenizer)) if i not in tokenizer.all_special_ids]
    draw = random.Random(0)
    for _ in range(2000):  # babble too, numbers and boxes next to each other
        ids = draw.choices(words, k=12)
        assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_numbers_and_the_opening_of_a_box_are_single_tokens(tokenizer: Any) -> None:
    for number in range(tiny.HIGHEST + 1):
        assert len(tokenizer.encode(str(number))) == 1
        ids = tokenizer.encode(tiny.box(number))
        assert len(ids) == 3
        text = tokenizer.decode(ids)
        assert grading.read_box(text).value == str(number)
        assert numbers_in(text) == {str(number)}


def test_longest_script_fits_the_caps(tokenizer: Any) -> None:
    config = recipe.Config(**tiny.TINY)
    longest = max(len(tokenizer.encode(message)) + 1 for message in MESSAGES)
    told = len(tokenizer.encode(tiny.TELL.format("3 and 4"))) + 1
    assert told <= config.message_tokens and longest <= config.last_message_tokens


def test_quick_template_gives_the_tokens_of_the_real_one(tokenizer: Any, rows: list[dict[str, Any]]) -> None:
    config = recipe.Config(**tiny.TINY)
    real, quick = recipe.ChatTemplate(tokenizer, [tokenizer.eos_token_id]), tiny.quick_template(tokenizer)
    assert real.end_of_turn == tokenizer.eos_token_id
    for row in rows[:50]:
        problem = tiny.split_row(row, "x-0")
        first = recipe.view(problem, 1, 1, "I have 3.", config)
        last = recipe.view(problem, 1, 3, "I have 3.", config)
        assert quick.opening(config.system_prompt, first) == real.opening(config.system_prompt, first)
        assert quick.splice(last) == real.splice(last)


# ----------------------------------------------------------------------------------------- warm start


def phase(tokenizer: Any, habits: tiny.Habits, count: int = 400, solo: float = 0.3) -> list[tuple[str, str]]:
    """(stream, own words) of the rows of a phase, as text."""
    settings = tiny.Settings(solo=solo)
    rows = tiny.phase_rows(tiny.make_rows(random.Random(2)), count, habits, settings, tokenizer)
    assert len(rows) == count
    return [
        (tokenizer.decode(ids), tokenizer.decode([i for i, own in zip(ids, owned, strict=True) if own]))
        for ids, owned in rows
    ]


def test_good_partners_are_right_and_only_own_words_are_learned(tokenizer: Any) -> None:
    good = tiny.Habits(share=1, share_if_asked=1, ask=0, use=1, copy=0)
    streams = phase(tokenizer, good)
    solos = [own for text, own in streams if "hear" not in text]
    assert len(solos) == 120 and all("have" not in own and "\\boxed" in own for own in solos)
    for text, own in streams:
        if "hear" in text:
            assert own.startswith("I have") and " = " in own and "hear" not in own and "Talk" not in own
            assert own.count(tiny.END) == 2 and own.endswith(tiny.END)


@pytest.mark.parametrize("turned_off", ["share", "use", "ask"])
def test_a_habit_turned_off_is_absent(tokenizer: Any, turned_off: str) -> None:
    every = {"share": 0.5, "share_if_asked": 0.5, "ask": 0.5, "use": 0.5, "copy": 0.5}
    off = {turned_off: 0.0} | ({"share_if_asked": 0.0} if turned_off == "share" else {})
    sign = {"share": "I have", "use": " = ", "ask": "?"}[turned_off]
    assert not any(sign in own for _, own in phase(tokenizer, tiny.Habits(**{**every, **off}), 200, solo=0))
    assert any(sign in own for _, own in phase(tokenizer, tiny.Habits(**every), 200, solo=0))


def test_the_warm_start_learns(tokenizer: Any) -> None:
    """Forty steps on one batch: its own words become likely, the partner's do not."""
    import torch

    settings = tiny.Settings(steps=60, rows=16)
    batch = tiny.phase_rows(tiny.make_rows(random.Random(3)), 16, settings.skilled, settings, tokenizer)
    torch.manual_seed(0)
    model = tiny.make_model(tokenizer)
    tiny.train(model, batch * settings.steps, settings, None)
    chance: dict[bool, list[float]] = {True: [], False: []}
    for ids, own in batch:
        logp = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        for place in range(1, len(ids)):
            chance[own[place]].append(float(logp[place - 1, ids[place]].detach().exp()))
    assert sum(chance[True]) / len(chance[True]) > 0.7
    assert sum(chance[False]) / len(chance[False]) < 0.2


# ------------------------------------------------------------------------------------------- building


def digest(paths: tiny.TinyPaths) -> dict[str, str]:
    return tiny.digests(paths.model.parent)


def test_the_folders_are_what_the_experiment_loads(built: tiny.TinyPaths, tokenizer: Any) -> None:
    config = recipe.Config(**tiny.TINY, model=str(built.model), data=str(built.data))
    model, loaded, template = runs.load_model(config, "cpu", trust_remote_code=False)
    for message in MESSAGES:  # AutoTokenizer gives some kinds of model a tokenizer of its own
        assert loaded.encode(message) == tokenizer.encode(message)
        assert template.read(loaded.encode(message + tiny.END)) == message
    assert template.eos_ids == {tokenizer.eos_token_id} and loaded.pad_token_id not in template.eos_ids
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {"config.json", "model.safetensors", "generation_config.json"} <= {p.name for p in built.model.iterdir()}


def test_a_build_repeats_bit_for_bit(built: tiny.TinyPaths, tmp_path: Path) -> None:
    assert digest(tiny.build_tiny(tmp_path / "again", settings=SMALL)) == digest(built)
    other = tiny.build_tiny(tmp_path / "other", settings=dataclasses.replace(SMALL, seed=1))
    assert digest(other)["model/model.safetensors"] != digest(built)["model/model.safetensors"]
    assert digest(other)[f"{tiny.PROBLEMS}/train.jsonl"] != digest(built)[f"{tiny.PROBLEMS}/train.jsonl"]


def test_the_second_call_does_no_work(built: tiny.TinyPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "build", lambda *_: pytest.fail("built again"))
    assert tiny.build_tiny(built.model.parent, settings=SMALL) == built


def stale(folder: Path) -> None:
    marker = folder / tiny.MARKER
    marker.write_text(marker.read_text().replace(tiny.fingerprint(SMALL), "0" * 64))


def half_model(folder: Path) -> None:
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def no_data(folder: Path) -> None:
    (folder / tiny.PROBLEMS / "test.jsonl").unlink()


def no_marker(folder: Path) -> None:
    (folder / tiny.MARKER).unlink()


def half_marker(folder: Path) -> None:
    (folder / tiny.MARKER).write_text('{"finger')


@pytest.mark.parametrize("damage", [stale, half_model, no_data, no_marker, half_marker])
def test_a_stale_or_half_built_folder_is_rebuilt(damage: Any, tmp_path: Path, no_training: None) -> None:
    paths = tiny.build_tiny(tmp_path / "tiny", settings=SMALL)
    whole = digest(paths)
    damage(tmp_path / "tiny")
    assert not tiny.is_whole(tmp_path / "tiny", tiny.fingerprint(SMALL))
    assert digest(tiny.build_tiny(tmp_path / "tiny", settings=SMALL)) == whole
    assert tiny.is_whole(tmp_path / "tiny", tiny.fingerprint(SMALL))
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]  # nothing is left beside it


def test_the_fingerprint_follows_settings_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    before = tiny.fingerprint(SMALL)
    assert tiny.fingerprint(dataclasses.replace(SMALL, learning_rate=1e-3)) != before
    monkeypatch.setattr(recipe, "view", lambda problem, copy, turn, heard, config: "")
    assert tiny.fingerprint(SMALL) != before


def test_other_files_in_the_folder_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="other files"):
        tiny.build_tiny(tmp_path, settings=SMALL)
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


KILLED = """
import os, sys, tiny
from pathlib import Path
settings = tiny.Settings(steps=4, rows=8, train=40, test=20)
tiny.build_tiny(Path(sys.argv[1]), lambda step, _: os._exit(9) if step == 2 else None, settings=settings)
"""


def test_a_build_killed_half_way_looks_unbuilt(tmp_path: Path, no_training: None) -> None:
    """Killed as a process is, without any clean-up, when the data is written and the weights are not."""
    folders = tmp_path / "first", tmp_path / "rebuild"
    old = digest(tiny.build_tiny(folders[1], settings=dataclasses.replace(SMALL, learning_rate=1e-3)))
    cwd = Path(tiny.__file__).parent
    processes = [subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], cwd=cwd) for folder in folders]
    assert [process.wait() for process in processes] == [9, 9]
    assert not folders[0].exists()
    assert tiny.digests(folders[1]) == old
    for folder in folders:
        assert not tiny.is_whole(folder, tiny.fingerprint(SMALL))
        tiny.build_tiny(folder, settings=SMALL)
        assert tiny.is_whole(folder, tiny.fingerprint(SMALL))


def test_an_interrupted_build_leaves_nothing(tmp_path: Path, no_training: None) -> None:
    def interrupt(step: int, steps: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny.build_tiny(tmp_path / "tiny", interrupt, settings=SMALL)
    assert not list(tmp_path.iterdir())
