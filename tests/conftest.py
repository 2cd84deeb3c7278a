"""Shared parts of the tests: a small real model with a real tokenizer, problems, and chats played on them."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach a hub
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

import pytest

import recipe
import records
import tiny


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyPaths:
    """A stand-in whose warm start is a few steps long: real files and shapes, a policy that babbles."""
    settings = dataclasses.replace(tiny.Settings(), steps=30)
    return tiny.build_tiny(tmp_path_factory.mktemp("stand-in") / "tiny", settings=settings)


@pytest.fixture(scope="session")
def config(stand_in: tiny.TinyPaths) -> recipe.Config:
    small = {"steps": 2, "train_problems": 64, "heldout_problems": 12, "problems": 4, "device": "cpu"}
    return recipe.Config(**{**tiny.TINY, "model": str(stand_in.model), "data": str(stand_in.data), **small})


@pytest.fixture(scope="session")
def data(config: recipe.Config) -> Any:
    from data import load_data

    return load_data(config)


@pytest.fixture()
def loaded(config: recipe.Config) -> tuple[Any, Any, recipe.ChatTemplate]:
    """(model, tokenizer, template), the model fresh for each test."""
    import runs

    return runs.load_model(config, "cpu", trust_remote_code=False)


@pytest.fixture()
def make_trainer(config: recipe.Config, data: Any, loaded: Any, tmp_path: Path) -> Any:
    """A function from an arm (and changed settings) to its trainer on the small model."""
    import runs

    def make(
        arm: str, *, folder: Path | None = None, save_every: int = 0, model: Any = None, seed: int = 17, **changes: Any
    ) -> Any:
        changed = dataclasses.replace(config, **changes)
        fresh, tokenizer, template = loaded if model is None else (model, *loaded[1:])
        return recipe.make_trainer(
            arm, seed, changed, data.train, fresh, tokenizer, template, folder=folder or tmp_path / "run",
            save_every=save_every, identity="test", on_step=lambda _: None,
            make_generator=runs.generator_for(changed, template, tokenizer.pad_token_id, lambda _: None),
        )  # fmt: skip

    return make


def small_flags(stand_in: tiny.TinyPaths, **changes: Any) -> list[str]:
    """The command line of a start that is over in seconds: the stand-in's settings, few problems, `changes`."""
    small: dict[str, Any] = {
        **tiny.TINY, "model": stand_in.model, "data": stand_in.data, "device": "cpu", "threads": 1, "problems": 2,
        "train_problems": 32, "warmup_steps": 1, **changes,
    }  # fmt: skip
    return [word for name, value in small.items() for word in (recipe.flag(name), str(value))]


def adapter_weights(model: Any) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def base_weights(model: Any) -> dict[str, Any]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}


def timeless(path: Path) -> dict[str, Any]:
    """A record without what the clock put into it."""
    record = records.read_record(path)
    for name in ("about", "seconds"):
        record.pop(name)
    for evaluation in record["evaluations"]:
        evaluation.pop("seconds")
    for step in record["steps"]:
        for name in ("play_seconds", "grade_seconds", "update_seconds"):
            step.pop(name)
    return record
