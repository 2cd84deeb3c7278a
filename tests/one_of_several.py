"""`recipe.py` as tests/test_ranks.py starts it, one process or several of them under torchrun: rewards are dealt by a
chat's words (the small model is never right), some rows are left without an advantage, and on request (TROUBLE, as
"WHAT:ARM:STEP") the last process gets into trouble. Each leaves its adapter's weights in WEIGHTS."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import ranks
import recipe
import runs
from recipe import ChatTraining, Grade, GradedChat, rows_of

HALF_IDLE, ALL_IDLE = 1, 2  # steps of mixed in which half the problems, or all of them, have no advantage


def by_words(chat: Any) -> GradedChat:
    right = [sum(map(ord, turn.text)) % 3 == 0 for turn in chat.turns[2:]]
    return GradedChat(chat, tuple(Grade("ok", "1", r) for r in right))


def with_idle_steps(prepare: Any) -> Any:
    def prepared(self: Any, inputs: Any) -> Any:
        batch, step, config = prepare(self, inputs), self.state.global_step, self.config
        if self.arm_name != "mixed" or step not in (HALF_IDLE, ALL_IDLE):
            return batch
        order = recipe.problem_order(len(self.problems), config, self.seed)
        first = step * config.problems + (config.problems // 2 if step == HALF_IDLE else 0)
        idle = {self.problems[n].id for n in order[first : (step + 1) * config.problems]}
        kept = [dataclasses.replace(c, advantage=0.0) if c.graded.chat.problem.id in idle else c for c in batch.kept]
        return dataclasses.replace(batch, kept=tuple(kept), rows=tuple(rows_of(kept)))

    return prepared


def with_trouble(micro_loss: Any, what: str, arm: str, step: int) -> Any:
    def troubled(self: Any, rows: Any, count: int) -> float:
        loss = micro_loss(self, rows, count)
        if (self.arm_name, self.state.global_step) == (arm, step) and ranks.rank() == ranks.world() - 1:
            if what == "nan":
                next(p for p in self.model.parameters() if p.grad is not None).grad.fill_(float("nan"))
            elif what == "term":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                raise RuntimeError("this process alone is in trouble")
        return loss

    return troubled


def with_weights(make_record: Any) -> Any:
    def made(lab: Any, arm: str, seed: int | None, *rest: Any) -> Any:
        if seed is not None:
            import torch

            weights = {name: p.detach() for name, p in rest[2].model.named_parameters() if "lora_" in name}
            torch.save(weights, Path(os.environ["WEIGHTS"]) / f"{arm}-{ranks.rank()}.pt")
        return make_record(lab, arm, seed, *rest)

    return made


def changes() -> list[tuple[Any, str, Any]]:
    """What is other than in recipe.py: (of what, which attribute, its new value)."""
    made = [
        (recipe, "grade_chat", by_words),
        (ChatTraining, "_prepare_inputs", with_idle_steps(ChatTraining._prepare_inputs)),
        (runs, "make_record", with_weights(runs.make_record)),
    ]
    if "TROUBLE" in os.environ:
        what, arm, step = os.environ["TROUBLE"].split(":")
        made.append((ChatTraining, "_micro_loss", with_trouble(ChatTraining._micro_loss, what, arm, int(step))))
    return made


if __name__ == "__main__":
    for change in changes():
        setattr(*change)
    ranks.leave(recipe.main(sys.argv[1:]))
