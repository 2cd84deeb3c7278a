"""Each credit rule on examples worked out by hand, and the table of arms."""

from __future__ import annotations

import itertools
import random

import pytest

from recipe import (
    ARMS,
    TABLE_ARMS,
    Config,
    UserError,
    ada_advantages,
    chats_used,
    grpo_advantages,
    keep_all,
    keep_balanced,
    raft_advantages,
    seats,
)


def test_grpo_subtracts_the_groups_mean_and_divides_by_nothing() -> None:
    assert grpo_advantages([1, 0.5, 0, 0.5], [1, 0.5, 0, 0.5]) == [0.5, 0, -0.5, 0]
    assert grpo_advantages([1, 0, 0, 0], [1, 0, 0, 0]) == [0.75, -0.25, -0.25, -0.25]


def test_raft_credits_only_chats_that_both_got_right() -> None:
    assert raft_advantages([1, 0.5, 0, 1], [1, 0.5, 0, 1]) == [1, 0, 0, 1]


def test_ada_subtracts_the_mean_of_every_chat_drawn_not_of_the_kept() -> None:
    drawn = [0, 0, 0, 0, 1, 0, 0, 0.5]  # mean 0.1875
    kept = keep_balanced(drawn, 4)
    assert kept == [0, 1, 4, 7]  # the two zeros drawn first, the 1 and the 0.5
    assert ada_advantages([drawn[i] for i in kept], drawn) == [-0.1875, -0.1875, 0.8125, 0.3125]


@pytest.mark.parametrize("rule", [grpo_advantages, ada_advantages])
def test_equal_rewards_get_no_advantage(rule) -> None:
    assert rule([0.5] * 4, [0.5] * 12) == [0] * 4


@pytest.mark.parametrize("rule", [grpo_advantages, ada_advantages, raft_advantages])
def test_a_rule_follows_a_permutation_of_the_chats(rule) -> None:
    rewards = [1, 0.5, 0, 0]
    for order in itertools.permutations(range(4)):
        permuted = [rewards[i] for i in order]
        assert rule(permuted, permuted) == [rule(rewards, rewards)[i] for i in order]


@pytest.mark.parametrize(
    ("rewards", "used"),
    [
        ([0, 0, 0, 1] + [0] * 8, 4),  # a spread in the first round: no replay
        ([0] * 4 + [0, 1, 0, 0] + [0] * 4, 8),
        ([0] * 12, 12),  # never a spread: all three rounds
        ([1] * 4 + [0] * 8, 8),  # all right is flat too; the second round differs from the first
        ([0] * 8 + [1] * 4, 12),
    ],
)
def test_replay_goes_on_while_every_chat_so_far_scored_the_same(rewards: list[float], used: int) -> None:
    assert chats_used(rewards, 4) == used


def test_replay_cut_afterwards_equals_replay_drawn_in_turn() -> None:
    chance = random.Random(0)
    for _ in range(500):
        pool = [chance.choices([0, 0.5, 1], [8, 1, 1])[0] for _ in range(12)]
        drawn: list[float] = []
        while len(drawn) < 12 and len(set(drawn)) <= 1:  # the rule as it is told: four more while all the same
            drawn += pool[len(drawn) : len(drawn) + 4]
        assert pool[: chats_used(pool, 4)] == drawn


def test_balance_takes_two_highest_and_two_lowest_of_any_pool() -> None:
    chance = random.Random(1)
    for size in (4, 8, 12):
        for _ in range(200):
            pool = [chance.choice([0, 0.5, 1]) for _ in range(size)]
            kept = keep_balanced(pool, 4)
            assert len(set(kept)) == 4
            ranked = sorted(pool)
            assert sorted(pool[i] for i in kept) == (ranked[:2] + ranked[-2:])


def test_keep_all_keeps_all() -> None:
    assert keep_all([0, 1, 0], 2) == [0, 1, 2]


def test_the_table_of_arms_is_the_specs() -> None:
    assert TABLE_ARMS == ("grpo", "ada", "raft", "mixed")
    assert [ARMS[a].advantages for a in TABLE_ARMS] == [
        grpo_advantages,
        ada_advantages,
        raft_advantages,
        grpo_advantages,
    ]
    assert [ARMS[a].keep for a in TABLE_ARMS] == [keep_all, keep_balanced, keep_all, keep_all]
    assert [ARMS[a].rounds for a in TABLE_ARMS] == [1, None, 1, 1]
    assert [[seats(ARMS[a], n, 4) for n in range(4)].count((True, False)) for a in TABLE_ARMS] == [0, 0, 0, 2]


def test_an_odd_group_is_refused() -> None:
    with pytest.raises(UserError, match=r"--group 3 does not fit"):
        Config(group=3)


def test_mean_advantage_on_a_coin_is_the_gradient_it_estimates() -> None:
    """With rewards that are coin flips of chance p, E[A | r] of grpo is (r - p) (G-1)/G; ada's baseline over the
    drawn chats leaves replayed flat groups at 0 too."""
    chance, p, group = random.Random(2), 0.3, 4
    wins = []
    for _ in range(20000):
        rewards = [float(chance.random() < p) for _ in range(group)]
        wins += [a for r, a in zip(rewards, grpo_advantages(rewards, rewards), strict=True) if r == 1]
    assert sum(wins) / len(wins) == pytest.approx((1 - p) * (group - 1) / group, abs=0.01)
