"""The command line: what to run and where, and the numbers of Config from defaults, records and flags."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import records
from recipe import ARMS, QUESTION, TABLE_ARMS, Config, UserError, flag

RunName = tuple[str, int | None]  # arm and seed; ("untrained", None) is the evaluation of the base


@dataclass(frozen=True)
class Options:
    """What to run and where, beside the numbers of Config."""

    out: Path
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    reuse: bool
    save_every: int
    hours: float | None  # time left: no run is started that would not be done by then
    price: float  # dollars an hour of the card, for the cost table
    trust_remote_code: bool
    command: str
    ray: str | None = None  # address of the Ray that makes the runs; None: this process does
    gpus_per_run: float = 1.0

    @property
    def wanted(self) -> list[RunName]:
        """Every run of the table that is asked for, the untrained pair first."""
        return [("untrained", None), *((arm, seed) for arm in self.arms for seed in self.seeds)]


def parser() -> argparse.ArgumentParser:
    """The command line: a few flags of what to run, then one for each field of Config."""
    top = argparse.ArgumentParser(
        prog="recipe.py",
        description=QUESTION,
        usage="recipe.py [--tiny] [--arm ARM] [--reuse] [--out DIR] [flags below]",
    )
    what = top.add_argument_group("what to run")

    def add(name: str, sentence: str, **how: Any) -> None:
        what.add_argument(name, help=sentence, **{"default": argparse.SUPPRESS, **how})

    arms = ", ".join(ARMS)
    add("--tiny", "the whole experiment in small: a stand-in model, made here, on the CPU", action="store_true")
    add("--selftest", "check the rules on worked examples (no torch, seconds) and leave", action="store_true")
    add("--plan", "say what would run, what is reused and about how long it takes, and leave", action="store_true")
    add("--bench", "measure what the experiment costs on this machine, beside the published way", action="store_true")
    add("--arm", f"an arm to run, repeatable: {arms} (the first four if none is given)", action="append",
        choices=list(ARMS), metavar="ARM")  # fmt: skip
    add("--seeds", "training seeds (17 18 19)", nargs="+", type=int, metavar="SEED", default=[17, 18, 19])
    add("--reuse", "take finished runs from their records, and settings not given too", action="store_true")
    add("--out", "folder of runs/ and results.json (this folder; out/tiny with --tiny)", type=Path, metavar="DIR")
    add("--save-every", "steps between checkpoints, 0 for none (20)", type=int, metavar="N", default=20)
    add("--hours", "start no run that would not be done in so many hours", type=float, metavar="H")
    add("--ray", "make the runs as Ray tasks, here or on the Ray at ADDRESS", nargs="?", const="", metavar="ADDRESS")
    add("--gpus-per-run", "with --ray, a run's share of a GPU (1.0)", type=float, metavar="SHARE", default=1.0)
    add("--price", "dollars an hour of the card, for the cost table (4.0)", type=float, metavar="DOLLARS", default=4.0)
    add("--trust-remote-code", "let a downloaded model run code of its own", action="store_true")
    parts = dict.fromkeys(f.metadata["part"] for f in dataclasses.fields(Config))
    groups = {part: top.add_argument_group(part) for part in parts}
    for f in dataclasses.fields(Config):
        shown = str(f.default) if len(str(f.default)) < 40 else str(f.default)[:30] + "..."
        sentence = f"{f.metadata['help']} ({shown})".replace("%", "%%").replace("\n", " ")
        how: dict[str, Any] = {"type": type(f.default), "metavar": f.name.rsplit("_", 1)[-1].upper()}
        if isinstance(f.default, bool):
            how = {"action": argparse.BooleanOptionalAction}
        groups[f.metadata["part"]].add_argument(flag(f.name), default=argparse.SUPPRESS, help=sentence, **how)
    return top


def recorded_config(out: Path) -> dict[str, Any]:
    """The settings of the records in a folder (the untrained pair's if it is there); {} without records."""
    for path in sorted((out / "runs").glob("*.json.xz"), key=lambda p: p.name != "untrained.json.xz"):
        with contextlib.suppress(records.RecordError):
            config = records.read_record(path).get("config")
            if isinstance(config, dict):
                return config
    return {}


def configure(words: argparse.Namespace) -> tuple[Config, Options]:
    """Settings from, in rising order: the defaults, --tiny's, the records' (with --reuse), the flags given."""
    fields = {f.name for f in dataclasses.fields(Config)}
    given = {name: value for name, value in vars(words).items() if name in fields}
    tiny, reuse = hasattr(words, "tiny"), hasattr(words, "reuse")
    out = getattr(words, "out", Path("out/tiny") if tiny else Path("."))
    settings: dict[str, Any] = {}
    if tiny:
        import tiny as stand_in

        settings |= {**stand_in.TINY, "device": "cpu", "threads": 1}
    if reuse:
        kept = {"model_name", *(f.name for f in dataclasses.fields(Config) if f.metadata["part"] != "machine")}
        settings |= {name: value for name, value in recorded_config(out).items() if name in kept}
    if tiny and not {"model", "data"} <= set(given):
        paths = stand_in.build_tiny(stand_in.cache_folder(), progress=stand_in.build_bar)
        settings |= {"model": str(paths.model), "data": str(paths.data), "model_name": stand_in.NAME}
    for name in ("price", "hours", "save_every"):
        if not 0 <= getattr(words, name, 0) < math.inf:
            raise UserError(f"{flag(name)} {getattr(words, name):g}: must be at least 0")
    if not 0 < words.gpus_per_run <= 1:
        raise UserError(f"--gpus-per-run {words.gpus_per_run:g}: must be above 0 and at most 1")
    options = Options(
        out=out,
        arms=tuple(dict.fromkeys(getattr(words, "arm", TABLE_ARMS))),
        seeds=tuple(dict.fromkeys(words.seeds)),
        reuse=reuse,
        save_every=words.save_every,
        hours=getattr(words, "hours", None),
        price=words.price,
        trust_remote_code=hasattr(words, "trust_remote_code"),
        command=shlex.join(["python", "recipe.py", *sys.argv[1:]]),
        ray=(words.ray or os.environ.get("RAY_ADDRESS") or "local") if hasattr(words, "ray") else None,
        gpus_per_run=words.gpus_per_run,
    )
    return Config(**{**settings, **given}), options
