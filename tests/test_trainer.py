"""The trainer against computations by hand: a real small model, real TRL, real chats."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from conftest import adapter_weights, base_weights

import recipe
from recipe import ARMS, TABLE_ARMS, NonFiniteError, collate, micro_batches, problem_order


@pytest.fixture(autouse=True)
def rewards_by_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model never answers right, so rewards are dealt by a hash of the chat's words and place."""
    count = iter(range(10**9))

    def deal(chat: Any) -> recipe.GradedChat:
        right = [(next(count) * 7919 % 13) < 4 for _ in range(2)]
        return recipe.GradedChat(chat, tuple(recipe.Grade("ok", "1", r) for r in right))

    monkeypatch.setattr(recipe, "grade_chat", deal)


def played(trainer: Any, step: int = 0) -> recipe.Batch:
    size = trainer.config.problems * trainer.config.group
    return trainer._prepare_inputs([trainer.train_dataset[i] for i in range(step * size, (step + 1) * size)])


def gradients(trainer: Any, batch: recipe.Batch) -> dict[str, torch.Tensor]:
    trainer.model.zero_grad()
    trainer._backward(batch)
    found = {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad()
    return found


def gradients_by_hand(model: Any, batch: recipe.Batch, temperature: float) -> dict[str, torch.Tensor]:
    """-sum over kept chats, trained copies and own tokens of advantage x log p(token | what came before), over the
    number of those tokens: one stream at a time, unpadded, from plain logits."""
    model.zero_grad()
    total, count = 0.0, 0
    for credited in batch.kept:
        for number, stream in enumerate(credited.graded.chat.streams):
            if not credited.graded.chat.turns[number].trained:
                continue
            ids = torch.tensor([stream.ids])
            logp = (model(input_ids=ids).logits[0, :-1].double() / temperature).log_softmax(-1)
            for place in range(1, len(stream.ids)):
                if stream.own[place]:
                    total = total - credited.advantage * logp[place - 1, stream.ids[place]]
                    count += 1
    (total / count).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("arm", list(ARMS))
def test_the_gradient_is_the_one_computed_by_hand(arm: str, make_trainer: Any) -> None:
    trainer = make_trainer(arm, token_budget=150)  # several micro-batches
    for name, p in trainer.model.named_parameters():
        if "lora_B" in name:  # zero at the start, which would hide lora_A's gradient
            p.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    batch = played(trainer)
    assert any(c.advantage != 0 for c in batch.kept) and len(micro_batches(batch.rows, 150)) > 1
    found, by_hand = gradients(trainer, batch), gradients_by_hand(trainer.model, batch, trainer.config.temperature)
    assert found.keys() == by_hand.keys() and all("lora_" in name for name in found)
    assert max(float(g.abs().max()) for g in by_hand.values()) > 1e-3
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, by_hand[name], atol=1e-6, rtol=0)


def test_an_untrained_partners_tokens_are_in_no_row_and_no_count(make_trainer: Any) -> None:
    batch = played(make_trainer("mixed"))
    copies = [(c.graded.chat, number) for c in batch.kept for number in (0, 1)]
    trained = [(chat, number) for chat, number in copies if chat.turns[number].trained]
    assert len(batch.rows) == len(trained) == len(copies) * 3 // 4
    assert batch.trained_tokens == sum(chat.turns[n].tokens + chat.turns[n + 2].tokens for chat, n in trained)
    assert batch.sampled_tokens > batch.trained_tokens


def test_labels_mark_own_tokens_and_nothing_else(make_trainer: Any) -> None:
    batch = played(make_trainer("grpo"))
    rows = batch.rows[:5]
    tensors = collate(rows, 0, "cpu")
    for i, row in enumerate(rows):
        length = len(row.stream.ids)
        assert tensors["input_ids"][i, :length].tolist() == list(row.stream.ids)
        assert (tensors["labels"][i] != -100).tolist()[:length] == list(row.stream.own)
        assert (tensors["labels"][i, length:] == -100).all()


def test_micro_batches_hold_every_live_row_once_within_the_budget(make_trainer: Any) -> None:
    rows = played(make_trainer("grpo")).rows
    for budget in (1, 100, 300, 10**6):
        batches = micro_batches(rows, budget)
        assert sorted(map(id, (r for b in batches for r in b))) == sorted(id(r) for r in rows if r.advantage != 0)
        assert all(len(b) == 1 or len(b) * max(len(r.stream.ids) for r in b) <= budget for b in batches)


def test_skipping_rows_without_advantage_leaves_the_count(make_trainer: Any) -> None:
    """The loss's N counts flat rows, so a flat group makes the step smaller, not the other groups' tokens heavier."""
    batch = played(make_trainer("raft"))
    assert any(row.advantage == 0 for row in batch.rows) and any(row.advantage == 1 for row in batch.rows)
    assert batch.trained_tokens == sum(sum(row.stream.own) for row in batch.rows)


def test_ada_replays_through_the_trainer(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round of every problem scores 0; then one chat in the second round is right."""
    seen: dict[str, int] = {}

    def deal(chat: Any) -> recipe.GradedChat:
        place = seen[chat.problem.id] = seen.get(chat.problem.id, -1) + 1
        right = place == 5
        return recipe.GradedChat(chat, tuple(recipe.Grade("ok", "1", right) for _ in range(2)))

    monkeypatch.setattr(recipe, "grade_chat", deal)
    trainer = make_trainer("ada")
    batch = played(trainer)
    for drawn in batch.drawn:
        assert drawn.rewards == (0, 0, 0, 0, 0, 1, 0, 0)
        assert drawn.kept == (0, 1, 2, 5)  # two highest (the 1, then the first 0) and the two lowest (the next 0s)
    assert sorted({c.advantage for c in batch.kept}) == [-0.125, 0.875]
    found, by_hand = gradients(trainer, batch), gradients_by_hand(trainer.model, batch, trainer.config.temperature)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, by_hand[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("arm", TABLE_ARMS)
def test_training_moves_every_adapter_and_no_base_weight(arm: str, make_trainer: Any) -> None:
    trainer = make_trainer(arm, steps=3, warmup_steps=0)  # lora_A has no gradient until lora_B has moved
    base, adapter = base_weights(trainer.model), adapter_weights(trainer.model)
    trainer.train()
    assert all(torch.equal(base[name], p) for name, p in base_weights(trainer.model).items())
    assert all(not torch.equal(adapter[name], p) for name, p in adapter_weights(trainer.model).items())
    assert [m.step for m in trainer.history] == [0, 1, 2] and all(math.isfinite(m.grad_norm) for m in trainer.history)


def test_an_all_flat_batch_changes_nothing_and_is_counted(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after steps that gave the optimizer momentum."""
    trainer = make_trainer("grpo", steps=4)
    step_one: list[Any] = []
    deal = recipe.grade_chat

    def flat_after_two_steps(chat: Any) -> recipe.GradedChat:
        if trainer.state.global_step < 2:
            return deal(chat)
        if not step_one:
            step_one.append(adapter_weights(trainer.model))
        return recipe.GradedChat(chat, (recipe.Grade("ok", "1", False),) * 2)

    monkeypatch.setattr(recipe, "grade_chat", flat_after_two_steps)
    trainer.train()
    assert [m.unchanged for m in trainer.history] == [False, False, True, True]
    assert all(torch.equal(step_one[0][name], p) for name, p in adapter_weights(trainer.model).items())


def test_a_non_finite_gradient_stops_the_run_before_the_update(make_trainer: Any) -> None:
    trainer = make_trainer("grpo", steps=3)
    before: list[Any] = []

    def poison(metrics: recipe.StepMetrics) -> None:
        if metrics.step == 0:
            hook = next(p for n, p in trainer.model.named_parameters() if "lora_B" in n)
            hook.register_hook(lambda grad: before.append(adapter_weights(trainer.model)) or grad * float("nan"))

    trainer.on_step = poison
    with pytest.raises(NonFiniteError, match=r"grpo, seed 17, step 1: loss .*, gradient norm nan"):
        trainer.train()
    assert len(trainer.history) == 1
    assert all(torch.equal(before[-1][name], p) for name, p in adapter_weights(trainer.model).items())
    assert all(torch.isfinite(p).all() for p in adapter_weights(trainer.model).values())


def test_the_same_seed_gives_the_same_run_and_another_does_not(
    make_trainer: Any, loaded: Any, monkeypatch: Any
) -> None:
    def texts(seed: int) -> list[str]:
        trainer = make_trainer("grpo", model=copy.deepcopy(loaded[0]), seed=seed)
        return [t.text for c in played(trainer).kept for t in c.graded.chat.turns]

    assert texts(17) == texts(17)
    assert texts(17) != texts(18)


def test_the_order_of_problems_is_whole_passes_and_hangs_on_the_seed(config: recipe.Config) -> None:
    import dataclasses

    longer = dataclasses.replace(config, steps=20)  # 80 places for 64 problems
    order = problem_order(64, longer, 17)
    assert sorted(order[:64]) == list(range(64)) and len(order) == 80
    assert order == problem_order(64, longer, 17) != problem_order(64, longer, 18)
    assert problem_order(64, config, 17) == order[: config.steps * config.problems]


def test_a_run_taken_up_from_a_checkpoint_ends_as_if_never_interrupted(
    make_trainer: Any, loaded: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    import runs

    monkeypatch.setattr(recipe, "grade_chat", by_words)
    whole = make_trainer("ada", model=copy.deepcopy(loaded[0]), folder=tmp_path / "a", steps=4)
    whole.train()
    cut = make_trainer("ada", model=copy.deepcopy(loaded[0]), folder=tmp_path / "b", steps=4, save_every=1)

    def kill(metrics: recipe.StepMetrics) -> None:
        if metrics.step == 2:
            raise KeyboardInterrupt  # in the third step, after the second's checkpoint

    cut.on_step = kill
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    again = make_trainer("ada", model=copy.deepcopy(loaded[0]), folder=tmp_path / "b", steps=4)
    folder, so_far = runs.newest_checkpoint(tmp_path / "b", "test")
    assert folder.name == "checkpoint-2" and runs.newest_checkpoint(tmp_path / "b", "another run") is None
    again.restore(so_far)
    again.train(resume_from_checkpoint=str(folder))
    assert all(torch.equal(adapter_weights(whole.model)[n], p) for n, p in adapter_weights(again.model).items())
    timeless = [(m.step, m.reward, m.loss, m.grad_norm, m.drawn) for m in whole.history]
    assert [(m.step, m.reward, m.loss, m.grad_norm, m.drawn) for m in again.history] == timeless
    assert again.tally == whole.tally and again.last_batch == whole.last_batch


def by_words(chat: Any) -> recipe.GradedChat:
    """Right or wrong by the words alone, the same in every process."""
    right = [sum(map(ord, turn.text)) % 3 == 0 for turn in chat.turns[2:]]
    return recipe.GradedChat(chat, tuple(recipe.Grade("ok", "1", r) for r in right))


def test_every_step_is_played_with_the_weights_of_that_step(make_trainer: Any) -> None:
    """After an update large enough to change what is said, the trainer's chats are those that transformers'
    `generate` samples from the model as it is now."""
    from decode import HFGenerate

    trainer = make_trainer("grpo", steps=1, warmup_steps=0, learning_rate=0.05)
    trainer.train()
    stale = [t.text for c in trainer.last_batch for t in c.graded.chat.turns]
    now = [t.text for c in played(trainer, 0).kept for t in c.graded.chat.turns]
    plain = HFGenerate(trainer.model, sorted(trainer.template.eos_ids), trainer.processing_class.pad_token_id)
    trainer.generator = plain
    assert [t.text for c in played(trainer, 0).kept for t in c.graded.chat.turns] == now != stale


def test_a_chats_sampling_hangs_on_seed_and_step(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    play = recipe.play_chats

    def spy(plans: Any, *rest: Any) -> Any:
        seen.extend(plan.seed for plan in plans)
        return play(plans, *rest)

    monkeypatch.setattr(recipe, "play_chats", spy)
    make_trainer("grpo", seed=23).train()
    half = len(seen) // 2
    assert {s[0] for s in seen} == {23} and {s[2] for s in seen[:half]} == {0} and {s[2] for s in seen[half:]} == {1}
    assert len(set(seen)) == len(seen)
