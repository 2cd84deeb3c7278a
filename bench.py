"""`python recipe.py --bench`: what the experiment costs on this machine, phase by phase, beside the published way.

The published way of playing (transformers' `generate` through TRL, the adapter unmerged, a step's chats a batch) runs
in the same process on the same prompts, so every ratio is of two numbers measured side by side. The worst case is
measured: no message ever ends, every one runs to its cap, and every row is trained. A second row gives the model's
own lengths. Writes `benchmark.json`, and until it is whole `benchmark.partial.json`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fuse
import recipe
import records
import runs
from data import Data, load_data
from options import Options
from recipe import ARMS, TABLE_ARMS, Arm, Config, Plan, Row, Stream, keep_balanced, play_chats
from talk import talk_measures

ENDLESS = -1  # an end-of-turn id that is never sampled
READ = 416  # tokens of a row that a copy reads, prompts and its partner's messages: about what GSM8K's chats have


def alternate(rewards_K: Sequence[float], rewards_D: Sequence[float]) -> list[float]:
    """Advantages of which none is 0: every row is trained, whatever the rewards."""
    return [(-1.0) ** i for i in range(len(rewards_K))]


WORST = {
    "grpo": Arm("every row trained", alternate),
    "ada": Arm("all rounds drawn, every kept row trained", alternate, keep_balanced, rounds=None),
    "mixed": Arm("every row trained, B untrained in half", alternate, untrained_half=True),
}


def timed(device: str, action: Callable[[], Any], repeats: int = 1) -> float:
    """Median seconds of an action, the device's work included."""
    import torch

    spans = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        spans.append(time.perf_counter() - start)
    return statistics.median(spans)


def never_end(trainer: Any) -> None:
    """From now on every message runs to its cap."""
    trainer.generator.eos_ids = [ENDLESS]
    trainer.generator.release()  # what was captured knows the old ends


@contextmanager
def arms_of_the_worst_case() -> Iterator[None]:
    usual = dict(ARMS)
    ARMS.update(WORST)
    try:
        yield
    finally:
        ARMS.update(usual)


def memory_bandwidth(device: str) -> float:
    """Bytes a second that the device reads and writes when it copies 1 GB."""
    import torch

    source = torch.zeros(10**9, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.numel() / timed(device, lambda: target.copy_(source), 5)


class Bench:
    """The parts that every measurement shares: a trainer on the model at hand, prompts as long as a chat's."""

    def __init__(self, config: Config, options: Options, data: Data):
        self.config, self.options, self.data = config, options, data
        read = since_start()
        self.device = runs.pick_device(config)
        runs.quiet_libraries()
        self.model, self.tokenizer, self.template = runs.load_model(config, self.device, options.trust_remote_code)
        self.about = runs.about_this_start(config, self.device, options.command)
        self.scratch = tempfile.TemporaryDirectory()  # the trainers' folder, gone with the process
        self.rows: list[dict[str, Any]] = []
        self.start = {"imports_and_data": round(read, 1), "model": round(since_start() - read, 1)}

    def trainer(self, arm: str, endless: bool, steps: int, model: Any = None) -> Any:
        """A trainer of `steps` steps, whose messages never end if `endless`."""

        if model is None:
            model = runs.load_model(self.config, self.device, self.options.trust_remote_code)[0]
        generator = runs.generator_for(self.config, self.template, self.tokenizer.pad_token_id, lambda _: None)
        trainer = recipe.make_trainer(
            arm, 17, dataclasses.replace(self.config, steps=steps), self.data.train, model, self.tokenizer,
            self.template, folder=Path(self.scratch.name), save_every=0, identity="bench",
            make_generator=generator, on_step=lambda _: None,
        )  # fmt: skip
        if endless:
            never_end(trainer)
        return trainer

    def peak_memory(self) -> float:
        """Peak memory of the device in GB since this was last asked; 0 on a CPU."""
        import torch

        if self.device != "cuda":
            return 0.0
        peak = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
        return round(peak, 2)

    def prompts(self, count: int) -> list[list[int]]:
        """First prompts, lengthened to what a copy has read halfway through a chat (about 600 tokens)."""
        problems = itertools.islice(itertools.cycle(self.data.train), count)
        config, long = self.config, "I know this much. " * 60
        return [self.template.opening(config.system_prompt, recipe.view(p, 0, 0, long, config)) for p in problems]

    def note(self, work: str, value: float, unit: str, **more: Any) -> None:
        """Keep a row of the report and show it."""
        self.rows.append({"work": work, "value": round(value, 4), "unit": unit, **more})
        self.write(self.partial)
        extra = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in more.items())
        print(f"{work:<58} {value:>10.3g} {unit:<8} {extra}", flush=True)

    @property
    def partial(self) -> Path:
        return self.options.out / "benchmark.partial.json"

    def write(self, path: Path, **more: Any) -> None:
        report = {"about": self.about, "config": dataclasses.asdict(self.config), "rows": self.rows, **more}
        records.write_whole(path, json.dumps(report, indent=1).encode() + b"\n")

    def step_seconds(self, call: Callable[[int], Any], few: int, many: int) -> float:
        """Seconds a decode step takes: the difference of a long and a short call, over their steps."""
        call(few)
        return (timed(self.device, lambda: call(many)) - timed(self.device, lambda: call(few))) / (many - few)

    def decode_steps(self, trainer: Any) -> None:
        """ms a decode step with the chats of a step, four times as many and an evaluation's, and the published way
        with the first, on the same prompts."""
        import numpy as np
        import torch

        weights = sum(p.numel() * p.element_size() for n, p in trainer.model.named_parameters() if "lora_" not in n)

        def call(rows: int, count: int) -> None:
            uniforms = np.random.default_rng(0).random((rows, count))
            trainer.generator(self.prompts(rows), streams=list(range(rows)), trained=[True] * rows, uniforms=uniforms,
                              max_new_tokens=count, temperature=self.config.temperature)  # fmt: skip

        trainer.generator.release()  # its keys and values may have most of the memory
        bandwidth, ours = memory_bandwidth(self.device), {}
        self.note("copying memory", bandwidth / 1e12, "TB/s")
        step = self.config.problems * self.config.group
        for rows in dict.fromkeys((step, 4 * step, self.config.heldout_problems * self.config.eval_chats)):
            ours[rows] = self.step_seconds(lambda count, rows=rows: call(rows, count), 32, 160)
            share = weights / bandwidth / ours[rows]
            self.note(f"a decode step, {rows} chats", 1000 * ours[rows], "ms", tokens_per_s=round(rows / ours[rows]),
                      share_of_weights_bound=round(share, 2))  # fmt: skip
        prompts = self.prompts(step)

        def published(count: int) -> None:
            trainer.generation_config.max_new_tokens = trainer.generation_config.min_new_tokens = count
            with torch.no_grad():
                trainer._generate_single_turn(prompts, None, {}, num_generations=1)

        fuse.unfuse(trainer.model)
        theirs = self.step_seconds(published, 8, 40)
        fuse.fuse(trainer.model)
        trainer.generation_config.min_new_tokens = None
        ratio = round(theirs / ours[step], 1)
        self.note(f"a decode step, {step} chats, the published way", 1000 * theirs, "ms", ours_is_faster_by=ratio)

    def steps_of(self, arm: str) -> dict[str, float]:
        """Seconds of a training step at the caps (the median of the last three of four) and its peak memory."""
        with arms_of_the_worst_case():
            trainer = self.trainer(arm, endless=True, steps=4)
            self.peak_memory()
            trainer.train()
        last = trainer.history[1:]
        phases = {
            name: statistics.median(getattr(m, f"{name}_seconds") for m in last) for name in ("play", "grade", "update")
        }
        total = sum(phases.values())
        self.note(f"one {arm} step of {self.config.problems} problems at the caps", total, "s",
                  play=round(phases["play"], 2), update=round(phases["update"], 2), peak_GB=self.peak_memory(),
                  sampled_tokens=last[-1].sampled_tokens)  # fmt: skip
        del trainer
        runs.free_memory()
        return {"total": total, **phases}

    def update(self, trainer: Any) -> None:
        """The update of a step's rows, both copies' of every chat at the caps, with the fused passes and without."""
        config, vocabulary = self.config, trainer.model.config.vocab_size
        count, own = 2 * config.problems * config.group, config.message_tokens + config.last_message_tokens
        width = READ + own
        trained = (False,) * READ + (True,) * own
        ids = [tuple((7919 * i + k) % vocabulary for k in range(width)) for i in range(count)]
        rows = tuple(Row(Stream(row, trained), 1.0) for row in ids)
        batch = recipe.Batch(rows, count * own, (), (), talk_measures([]), 0, 0, 0.0, 0.0)

        def once() -> None:
            trainer.model.zero_grad()
            trainer._backward(batch)

        trainer.generator.release()
        for how in ("", ", as PEFT and transformers compute it"):
            if how:
                fuse.unfuse(trainer.model)
            once()
            self.peak_memory()
            seconds = timed(self.device, once, 3)
            self.note(f"update of {count} rows x {width} tokens{how}", seconds, "s", peak_GB=self.peak_memory(),
                      token_budget=trainer.token_budget)  # fmt: skip
        trainer.model.zero_grad()
        fuse.fuse(trainer.model)

    def evaluation(self, trainer: Any, lengths: str) -> float:
        """Seconds to play every held-out chat once."""
        problems = self.data.heldout
        plans = [Plan(p, (0, 9, p.row, chat)) for p in problems for chat in range(self.config.eval_chats)]
        tokens: list[int] = []

        def once() -> None:
            chats = play_chats(plans, trainer.generator, self.template, self.config)
            tokens[:] = [turn.tokens for chat in chats for turn in chat.turns]

        self.peak_memory()
        seconds = timed(self.device, once)
        self.note(
            f"evaluation of {len(plans)} chats, {lengths}", seconds, "s", tokens=sum(tokens), peak_GB=self.peak_memory()
        )
        return seconds


def estimate(bench: Bench, start: float, steps: dict[str, dict[str, float]], evaluation: float) -> dict[str, float]:
    """Minutes that a seed of each arm, the base and the whole table would take, at the caps."""
    config, seeds = bench.config, len(bench.options.seeds)
    run = {arm: start + config.steps * step["total"] + 2 * evaluation for arm, step in steps.items()}
    run["raft"] = run["grpo"]
    base = start + config.base_evals * evaluation
    spans = {"a grpo or raft seed": run["grpo"], "an ada seed": run["ada"], "a mixed seed": run["mixed"],
             f"the table, {seeds} seeds": seeds * sum(run[arm] for arm in TABLE_ARMS) + base}  # fmt: skip
    for what, seconds in spans.items():
        paid = {} if bench.device == "cpu" else {"dollars": round(seconds / 3600 * bench.options.price, 2)}
        bench.note(f"{what}, estimated at the caps", seconds / 60, "min", **paid)
    return {name: seconds / 60 for name, seconds in {**run, "untrained": base}.items()}


def gpu_checks(path: Path) -> list[Any]:
    """What tests/gpu_decode.py added to the report that is replaced; its entries carry their own dates."""
    try:
        return list(json.loads(path.read_text("utf-8")).get("checks", []))
    except (OSError, ValueError, AttributeError, TypeError):
        return []


def since_start() -> float:
    """Seconds since this process started, the imports included."""
    import psutil

    return time.time() - psutil.Process().create_time()


def main(config: Config, options: Options) -> int:
    """Measure, print row by row, and write benchmark.json."""
    with runs.hashing(config.model):
        data = load_data(config)
    bench = Bench(config, options, data)
    print(f"{bench.about['device']}, {bench.about['model']['id']}, torch {bench.about['versions']['torch']}")
    made = since_start()
    trainer = bench.trainer("grpo", endless=False, steps=1, model=bench.model)
    trainer.train()
    first = trainer.history[0]
    start = since_start() - first.seconds
    bench.note("start to first step, model on disk", start, "s", **bench.start, trainer=round(start - made, 1))
    bench.note("the first grpo step, the model's own lengths", first.seconds, "s", sampled_tokens=first.sampled_tokens)
    bench.evaluation(trainer, "the model's own lengths")
    never_end(trainer)
    bench.decode_steps(trainer)
    bench.update(trainer)
    evaluation = bench.evaluation(trainer, "at the caps")
    trainer.generator.release()
    del trainer
    steps = {arm: bench.steps_of(arm) for arm in WORST}
    bench.note("an ada step over a grpo step", steps["ada"]["total"] / steps["grpo"]["total"], "x")
    minutes = {arm: round(m, 2) for arm, m in estimate(bench, start, steps, evaluation).items()}
    path = options.out / "benchmark.json"
    bench.write(path, minutes=minutes, checks=gpu_checks(path))
    bench.partial.unlink()
    print(f"written: {path}")
    return 0
