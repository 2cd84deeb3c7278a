"""What surrounds the recipe: the model from disk or hub, which runs are still good, making the missing ones. What a
run *is* stands in recipe.py; what was asked for, in options.py; how files are written, in records.py."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import pickle
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ranks
import records
from data import Data, load_data
from options import Options, RunName
from recipe import (
    ARMS,
    BASELINE,
    TABLE_ARMS,
    ChatTemplate,
    Config,
    Evaluation,
    NonFiniteError,
    OutOfMemoryError,
    Problem,
    StepMetrics,
    UserError,
    chat_json,
    credited_json,
    evaluate,
    make_trainer,
    problems_json,
)
from records import record_name, run_label
from words import clean, listed, one_line


@dataclass(frozen=True)
class Lab:
    """What every run of one start shares."""

    config: Config
    options: Options
    data: Data
    device: str
    key: dict[str, str | None]
    about: dict[str, Any]
    progress: Progress
    signals: Signals


def show(text: str) -> None:
    """Print. Where the disk under a redirected output is full, say so and go on without it."""
    try:
        print(clean(text), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        # what is left in its buffer would raise again at each flush, and each fork flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with contextlib.suppress(OSError):
            print(f"standard output cannot be written ({error.strerror}): going on without it", file=sys.stderr)


class Progress:
    """One bar over all runs, in chats, with the time left (in a log, a line a minute); and a line for each thing
    that is done. Of several processes the first alone shows them."""

    def __init__(self, total: int):
        from tqdm import tqdm

        self._tqdm, self._quiet = tqdm, not ranks.is_main()
        off = self._quiet or None  # None: only where there is no terminal
        self._bar = tqdm(total=total, unit="chat", smoothing=0.1, mininterval=0.5, disable=off, file=sys.stderr)
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._next_line = self._start + 60
        self._said: set[str] = set()

    def advance(self, chats: int, doing: str) -> None:
        self._done += chats
        self._bar.set_description(doing, refresh=False)
        self._bar.update(chats)
        now = time.monotonic()
        if self._bar.disable and not self._quiet and now >= self._next_line and self._done:
            left = (now - self._start) * (self._total - self._done) / self._done / 60
            with contextlib.suppress(OSError):  # a log that cannot be written must not end a run
                print(f"{doing}; about {left:.1f} min left", file=sys.stderr, flush=True)
            self._next_line = now + 60

    def say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.say(line)

    def say(self, line: str) -> None:
        if self._quiet:
            return
        with self._tqdm.external_write_mode(file=sys.stdout):
            show(one_line(line, 2000))

    def close(self) -> None:
        self._bar.close()


# What decides what a run measures; formatting, statistics and bookkeeping are not in it. The split shows in the
# data's fingerprint. How decode.py comes to its samples is guarded by its tests, not by the key: a faster kernel
# must not make a finished run worthless.
CODE = {
    "ChatTemplate", "view", "uniforms", "play_chats", "draw_chats", "seats", "credit", "rows_of", "collate",
    "problem_order", "evaluate", "chats_used", "keep_balanced", "grpo_advantages", "ada_advantages",
    "raft_advantages", "make_trainer", "ChatTraining._prepare_inputs", "ChatTraining.training_step",
    "ChatTraining._micro_loss",
}  # fmt: skip


def file_sha256(file: BinaryIO) -> bytes:
    """SHA-256 of an open file, read 64 MiB at a time: a thread that hashes waits for the interpreter up to 5 ms a
    piece while another one works, which with hashlib.file_digest's 256 KiB was nearly all of its time."""
    total = hashlib.sha256()
    while piece := file.read(64 << 20):
        total.update(piece)
    return total.digest()


@functools.lru_cache(maxsize=1)
def weights_digest(model: str) -> str | None:
    """What stands for a model folder's weights and tokenizer; None for an id on the hub."""
    folder = Path(model)
    if not folder.is_dir():
        return None
    total = hashlib.sha256()
    for path in sorted(
        p for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")
    ):
        total.update(path.name.encode())
        with open(path, "rb") as file:
            total.update(file_sha256(file))
    return total.hexdigest()[:16]


@contextlib.contextmanager
def hashing(model: str) -> Iterator[None]:
    """While entered, the weights are hashed by a thread: when it is left weights_digest knows, and the files are in
    the page cache."""

    def quietly() -> None:
        with contextlib.suppress(OSError):  # whoever asks for it next gets to hear of it
            weights_digest(model)

    thread = threading.Thread(target=quietly)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def run_key(config: Config, fingerprint: str | None) -> dict[str, str | None]:
    """What determines a run, by part; None for a part that cannot be told on this machine (a model or data set
    that is not here), which is then taken from the records on trust. Arm and seed are in the record's name,
    the arm's definition in `arm`, which make_record adds."""
    known = weights_digest(config.model)
    if known is None and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", config.model):
        known = f"{config.model}@{config.revision}"  # an id on the hub; else a folder that is not on this machine
    return {
        "model": known,
        "data": fingerprint,
        "prompts": records.digest(config.part("prompts")),
        "chat": records.digest(config.part("chat")),
        "training": records.digest(config.part("training")),
        "evaluation": records.digest(config.part("evaluation")),
        "code": records.code_digest(Path(inspect.getfile(Config)), CODE),
    }


def arm_digest(arm: str) -> str:
    """What stands for an arm's definition (the untrained pair has none)."""
    if arm not in ARMS:
        return arm
    row = ARMS[arm]
    return records.digest(
        [row.advantages.__name__, row.keep.__name__, row.rounds, row.round_groups, row.untrained_half]
    )


def checkpoint_folder(options: Options, arm: str, seed: int) -> Path:
    return options.out / "checkpoints" / f"{arm}-s{seed}"


def record_path(options: Options, arm: str, seed: int | None) -> Path:
    return options.out / "runs" / record_name(arm, seed)


def make_record(
    lab: Lab,
    arm: str,
    seed: int | None,
    evaluations: Sequence[Evaluation],
    seconds: dict[str, float],
    trainer: Any = None,
) -> dict[str, Any]:
    """Everything one run measured, as JSON: enough to grade again, to read every chat, to rebuild the table."""
    last = trainer.last_batch if trainer else ()
    return {
        "arm": arm,
        "seed": seed,
        "key": {**lab.key, "arm": arm_digest(arm)},
        "about": lab.about,
        "config": dataclasses.asdict(lab.config),
        "data": lab.data.report,
        "problems": problems_json([*(chat for e in evaluations for chat in e.chats), *(c.graded for c in last)]),
        "evaluations": [{"name": e.name, "repeat": e.repeat, "seconds": round(e.seconds, 3),
                         "chats": [chat_json(chat) for chat in e.chats]} for e in evaluations],
        "last_batch": [credited_json(c) for c in last],
        "steps": [dataclasses.asdict(m) for m in trainer.history] if trainer else [],
        "drawn": [dataclasses.asdict(d) for d in trainer.tally] if trainer else [],
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
    }  # fmt: skip


def cause(error: BaseException) -> str:
    """What an exception says, in one line."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def load_model(config: Config, device: str, trust_remote_code: bool) -> tuple[Any, Any, ChatTemplate]:
    """The base model on its device, its tokenizer, its chat template. Raises UserError for a folder or id that
    is not a causal language model with an instruct tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"trust_remote_code": trust_remote_code, "revision": config.revision}
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model, padding_side="left", **where)
        model = AutoModelForCausalLM.from_pretrained(config.model, dtype=weights_dtype(device), **where)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        own_code = "; --trust-remote-code lets it run code of its own" if "trust_remote_code" in str(error) else ""
        raise UserError(f"--model {config.model} could not be loaded as a causal language model "
                        f"({cause(error)}){own_code}") from None  # fmt: skip
    ends = model.generation_config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    if tokenizer.eos_token_id is not None:
        ends.append(tokenizer.eos_token_id)
    template = ChatTemplate(tokenizer, ends)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if device == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass gave non-finite gradients on padded rows
    return model.to(device), tokenizer, template


def generator_for(
    config: Config, template: ChatTemplate, pad_id: int, say: Callable[[str], None]
) -> Callable[[Any], Any]:
    """A function from a model to its generator; `say` is told which one it is and why."""

    def make(model: Any) -> Any:
        import decode

        try:
            generator, why = decode.make_generate(
                model, sorted(template.eos_ids), pad_id, config.generator, config.cache_gb or None
            )
        except ValueError as error:
            raise UserError(f"--generator {config.generator}: {error}") from None
        say(why)
        return generator

    return make


class Interrupted(BaseException):
    """SIGTERM or Ctrl-C, after what was in hand is safe."""

    def __init__(self, number: int):
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class Signals:
    """While entered, SIGTERM and Ctrl-C raise Interrupted; while `deferred`, they only set `caught`, so that a
    step is finished and saved first. A second signal is never deferred."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self.deferred = False

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: Any) -> None:
        if self.deferred and self.caught is None:
            self.caught = number
            if ranks.is_main():
                with contextlib.suppress(OSError):  # not print: the signal may have come in the middle of one
                    os.write(2, b"finishing this step, then saving; once more to stop at once\n")
        else:
            raise Interrupted(number)

    def agreed(self) -> int | None:
        """The signal that any process of this start has caught, so that all stop after the same step."""
        return next((number for number in ranks.gather(self.caught) if number is not None), None)

    def callback(self) -> Any:
        """Tells the trainer to save and stop after the step in which a signal came."""
        from transformers import TrainerCallback

        class StopAfterStep(TrainerCallback):
            def on_step_end(_, args: Any, state: Any, control: Any, **__: Any) -> Any:
                if self.agreed() is not None:
                    control.should_save = control.should_training_stop = True
                return control

        return StopAfterStep()


def newest_checkpoint(
    folder: Path, identity: str, say: Callable[[str], None] = lambda _: None
) -> tuple[Path, dict[str, Any]] | None:
    """The latest whole checkpoint of this very run, and what it had measured; None if there is none. `say` is told
    of those that are damaged."""
    for _, path in sorted(records.checkpoints(folder).items(), reverse=True):
        try:
            so_far = records.read_record(path / "so_far.json.xz")
            if so_far.get("identity") != identity:
                say(f"not used: {path} is of other settings, data or code")
                continue
            there, stated = records.file_digests(path), so_far.get("files", {})
            if wrong := sorted(name for name in {*there, *stated} if there.get(name) != stated.get(name)):
                raise records.RecordError(f"{path}: {', '.join(wrong)}: not as it was written (cut short or changed)")
            return path, so_far
        except (records.RecordError, OSError) as error:
            say(f"not used: {error}")
    return None


def evaluate_shared(
    name: str, repeat: int, seed: int, problems: Sequence[Problem], config: Config, generate: Any,
    template: ChatTemplate,
) -> Evaluation:  # fmt: skip
    """An evaluation whose problems are shared between the processes of this start: the chats of all, in the
    problems' order, and the seconds of the slowest."""
    mine = ranks.share(problems)
    part = evaluate(name, repeat, seed, mine, config, generate, template) if mine else Evaluation(name, repeat, (), 0.0)
    parts = ranks.gather(part)
    return Evaluation(name, repeat, tuple(chat for p in parts for chat in p.chats), max(p.seconds for p in parts))


def train_run(lab: Lab, arm: str, seed: int) -> dict[str, Any]:
    """One arm with one seed: train, evaluate twice, and return the record. Raises Interrupted after saving."""
    clock = [time.perf_counter()]
    config, name = lab.config, run_label(arm, seed)
    model, tokenizer, template = load_model(config, lab.device, lab.options.trust_remote_code)

    def on_step(m: StepMetrics) -> None:
        lab.progress.advance(
            config.problems * config.group, f"{name}: step {m.step + 1}/{config.steps}, reward {m.reward:.2f}"
        )

    folder = checkpoint_folder(lab.options, arm, seed)
    identity = records.digest({**lab.key, "arm": arm_digest(arm), "name": arm, "seed": seed})
    trainer = make_trainer(
        arm, seed, config, lab.data.train, model, tokenizer, template, folder=folder, identity=identity,
        save_every=lab.options.save_every, on_step=on_step, callbacks=[lab.signals.callback()],
        make_generator=generator_for(config, template, tokenizer.pad_token_id, lab.progress.say_once),
    )  # fmt: skip
    own = newest_checkpoint(folder, identity, lab.progress.say) if lab.options.reuse and ranks.is_main() else None
    found = ranks.broadcast(own)
    spent = 0.0
    if found:
        trainer.restore(found[1])
        spent = sum(m.seconds for m in trainer.history)
        lab.progress.advance(config.problems * config.group * len(trainer.history), name)
        lab.progress.say(f"{name}: going on after step {len(trainer.history)}")
    clock.append(time.perf_counter())
    lab.signals.deferred = True
    try:
        trainer.train(resume_from_checkpoint=str(found[0]) if found else None)
    except pickle.UnpicklingError as error:  # its checksums hold, so whoever made them put something else there
        raise records.RecordError(f"{folder}: a checkpoint holds more than weights and is not read: delete the folder "
                                  f"({cause(error)})") from None  # fmt: skip
    finally:
        lab.signals.deferred = False
    if (number := lab.signals.agreed()) is not None:
        raise Interrupted(number)
    clock.append(time.perf_counter())
    trainer.generator.refresh()
    sittings = []
    for sitting in ("trained_pair", "untrained_partner"):
        lab.progress.advance(0, f"{name}: evaluation, {sitting.replace('_', ' ')}")
        sittings.append(evaluate_shared(sitting, 0, seed, lab.data.heldout, config, trainer.generator, template))
        lab.progress.advance(len(sittings[-1].chats), name)
    clock.append(time.perf_counter())
    spans = {
        phase: end - start for phase, start, end in zip(("load", "train", "evaluate"), clock, clock[1:], strict=False)
    }
    spans["train"] += spent
    spans["total"] = sum(spans.values())
    spans |= {"earlier": spent} if found else {}  # of its seconds, those before this start
    return make_record(lab, arm, seed, sittings, spans, trainer)


def base_run(lab: Lab) -> dict[str, Any]:
    """The untrained pair, evaluated `base_evals` times: where every arm starts, and how much an evaluation moves."""
    start = time.perf_counter()
    config = lab.config
    model, tokenizer, template = load_model(config, lab.device, lab.options.trust_remote_code)
    generator = generator_for(config, template, tokenizer.pad_token_id, lab.progress.say_once)(model)
    loaded, sittings = time.perf_counter(), []
    for repeat in range(config.base_evals):
        lab.progress.advance(0, f"untrained: evaluation {repeat + 1}/{config.base_evals}")
        sittings.append(
            evaluate_shared("untrained", repeat, config.data_seed, lab.data.heldout, config, generator, template)
        )
        lab.progress.advance(len(sittings[-1].chats), "untrained")
    end = time.perf_counter()
    return make_record(
        lab, "untrained", None, sittings, {"load": loaded - start, "evaluate": end - loaded, "total": end - start}
    )


# ---------------------------------------------------------------------------------------------- all runs


def read_runs(options: Options, say: Callable[[str], None]) -> tuple[dict[RunName, dict[str, Any]], dict[Path, str]]:
    """Every readable record in runs/ by (arm, seed), and a sentence on each that is not by its path."""
    found, broken = {}, {}
    for path in sorted((options.out / "runs").glob("*.json.xz")):
        try:
            record = records.read_record(path)
            for name, kind in (("arm", str), ("seed", int | None), ("key", dict), ("config", dict), ("seconds", dict)):
                if not isinstance(record.get(name), kind):
                    raise records.RecordError(f"{path}: its field {name!r} is missing or of another kind")
            if not re.fullmatch(r"\w+", record["arm"], re.ASCII):
                raise records.RecordError(f"{path}: {record['arm']!r} is no arm's name")
            if path != record_path(options, record["arm"], record["seed"]):
                raise records.RecordError(
                    f"{path}: holds {record['arm']}, seed {record['seed']}: not what its name says"
                )
            found[record["arm"], record["seed"]] = record
        except records.RecordError as error:
            broken[path] = one_line(error, 2000)
            say(f"left aside: {broken[path]}")
    return found, broken


def parts_differ(parts: Sequence[str]) -> str:
    """"model and code differ", "training differs": the parts of a key, as a phrase."""
    return f"{listed(parts)} {'differs' if len(parts) == 1 and parts[0] != 'prompts' else 'differ'}"


def stale_parts(record: dict[str, Any], key: dict[str, str | None]) -> list[str]:
    """The parts in which a record differs from what would be run now. A part that cannot be told here is trusted."""
    want = {**key, "arm": arm_digest(record["arm"])}
    return [part for part, value in want.items() if value is not None and record["key"].get(part) != value]


def sort_runs(
    options: Options, found: dict[RunName, dict[str, Any]], key: dict[str, str | None], say: Callable[[str], None]
) -> tuple[dict, list, list[str]]:
    """(records to use, runs to make, names reused) of the records that were found. With --reuse a wanted record of
    the same key is used; a stale one is made again, and it is said which part differs. Without it, wanted runs are
    made anew. The untrained pair is made again only where it is stale or every arm of the table is wanted. No file is
    touched but checkpoints of finished runs: an old record goes to runs/old when its run is made."""
    wanted = options.wanted
    usable, reused = {}, []
    for name, record in found.items():
        differs = stale_parts(record, key)
        label = run_label(*name)
        fresh = (
            name in wanted
            and not options.reuse
            and not (name[0] == "untrained" and set(options.arms) != set(TABLE_ARMS))
        )
        if not differs and not fresh:
            usable[name] = record
            reused.append(label)
            forget_checkpoints(options, *name)  # a kill may have come between the record and this
        elif name in wanted:
            why = f"its {parts_differ(differs)}" if differs else "made anew (--reuse would have kept it)"
            say(f"{label}: {why}; when it is made, the old record goes to {options.out / 'runs' / 'old'}")
        else:
            say(f"{label}: not used, its {parts_differ(differs)} from this start's")
    return usable, [name for name in wanted if name not in usable], reused


def pick_device(config: Config) -> str:
    """cuda or cpu. Raises UserError without a GPU, unless the CPU was asked for."""
    import torch

    if config.device not in ("auto", "cuda", "cpu"):
        raise UserError(f"--device {config.device}: it is auto, cuda or cpu")
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.device == "cpu" or torch.cuda.is_available():
        device = "cpu" if config.device == "cpu" else "cuda"
        ranks.take_device(device)
        if device == "cuda" and weights_dtype(device) == "float32" and ranks.is_main():
            print("this GPU has no bfloat16: running in float32", file=sys.stderr)
        return device
    raise UserError(
        "no GPU here: use --tiny for the whole experiment in small, or --device cpu if you can wait for days"
    )


def weights_dtype(device: str) -> str:
    """How the base's weights are held: bfloat16 on a card that has it, else float32."""
    import torch

    return "bfloat16" if device == "cuda" and torch.cuda.is_bf16_supported() else "float32"


def about_this_start(config: Config, device: str, command: str) -> dict[str, Any]:
    """Where a record comes from: model, device, versions, commit, command, date."""
    import torch

    card = {"card": str(torch.cuda.get_device_properties().uuid)} if device == "cuda" else {}
    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    several = {"processes": ranks.world()} if ranks.world() > 1 else {}
    return {
        "model": {
            "id": config.model_name or config.model,
            "revision": config.revision,
            "weights": weights_digest(config.model),
            "loaded_as": weights_dtype(device),
        },
        "device": f"{name}, {ranks.world()} processes" if several else name,
        **card,
        **several,
        "versions": records.versions(),
        **records.git_state(Path(__file__).parent),
        "date": utc_now(),
        "command": command,
    }


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def make_runs(
    todo: Sequence[RunName], config: Config, options: Options, data: Data, key: dict[str, str | None], device: str
) -> tuple[dict, list[str]]:
    """Make the runs that are missing, each record written the moment it is whole. A run that fails is reported
    and the others go on. Returns the records and the failures.

    Every process of this start goes through here; the first decides and writes. A failure that all of them share, a
    gradient that is not finite, ends the run; after any other they might wait for each other, so the start ends."""
    quiet_libraries()
    chats = sum(chats_of(run, config, len(data.heldout)) for run in todo)
    made, failed = {}, []
    with Signals() as signals, contextlib.closing(Progress(chats)) as progress:
        about = ranks.broadcast(about_this_start(config, device, options.command) if ranks.is_main() else {})
        lab = Lab(config, options, data, device, key, about, progress, signals)
        started = time.monotonic()
        for arm, seed in todo:
            if late := ranks.broadcast(too_late(options, arm, time.monotonic() - started, made.values())):
                progress.say(f"{run_label(arm, seed)}: {late}")
                continue
            if not options.reuse and ranks.is_main():
                forget_checkpoints(options, arm, seed)
            lab = dataclasses.replace(lab, about={**about, "date": utc_now()})  # of the run, not of the start
            try:
                record = base_run(lab) if seed is None else train_run(lab, arm, seed)
                made[arm, seed] = keep_record(options, record) if ranks.is_main() else record
            except UserError as error:
                if ranks.world() > 1 or not (made or failed):
                    raise  # wrong for every run alike
                failed.append(f"{run_label(arm, seed)}: {error}")
                progress.say(f"FAILED {failed[-1]}")
                continue
            except Exception as error:  # whatever it is, it must not take the other runs down
                failed.append(report_failure(options, arm, seed, error))
                progress.say(f"FAILED {failed[-1]}")
                if ranks.world() > 1 and not isinstance(error, NonFiniteError):
                    raise ranks.Alone(failed[-1]) from error
                continue
            finally:
                free_memory()
            progress.say(run_line(record))
    return made, failed


def chats_of(run: RunName, config: Config, heldout: int) -> int:
    """How many chats a run counts in the progress bar."""
    sitting = config.eval_chats * heldout
    training = config.steps * config.problems * config.group
    return config.base_evals * sitting if run[1] is None else training + 2 * sitting


def too_late(options: Options, arm: str, elapsed: float, made: Iterable[dict[str, Any]]) -> str:
    """Why a run is not started `elapsed` seconds after the start, with --hours; else nothing."""
    expected = expected_minutes(options, arm, made)
    if options.hours is None or elapsed + 60 * expected <= 3600 * options.hours:
        return ""
    return f"not started, it would take about {expected:.1f} minutes"


def forget_checkpoints(options: Options, arm: str, seed: int | None) -> None:
    if seed is not None:
        shutil.rmtree(checkpoint_folder(options, arm, seed), ignore_errors=True)


def keep_record(options: Options, record: dict[str, Any]) -> dict[str, Any]:
    """Write a finished run's record and drop its checkpoints. Returns the record as a later start will see it. A
    damaged one in its place, which was named when the records were read, is set aside. Raises RecordError where it
    cannot be written."""
    name = record["arm"], record["seed"]
    path = record_path(options, *name)
    try:
        if path.exists():
            records.set_aside(path)
        records.write_record(path, record)
    except OSError as error:
        raise records.RecordError(f"{path} could not be written: {error.strerror}") from None
    forget_checkpoints(options, *name)
    return records.read_record(path)


def expected_minutes(options: Options, arm: str, made: Iterable[dict[str, Any]]) -> float:
    """About how long a run takes: as the last of its arm in this start, else as the benchmark of this folder says,
    else as the longest so far; 0 where nothing is known."""
    spent = {record["arm"]: record["seconds"]["total"] / 60 for record in made}
    benchmark = estimated_minutes(options.out)
    replays = arm in ARMS and ARMS[arm].rounds is None
    known = benchmark.get("ada" if replays else arm, benchmark.get(BASELINE))
    return spent.get(arm) or known or max(spent.values(), default=0.0)


def free_memory() -> None:
    """Let go of a finished run's model and caches: a trainer is full of cycles, and the next run needs the room."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Where a run can run out of the card's memory, told by the function it was in, and what to do about it.
MEMORY = (
    ("_backward", " in an update", "lower --token-budget or use --checkpointing"),
    ("evaluate", " in an evaluation", "lower --eval-chats or --heldout-problems, or the caps --message-tokens and "
     "--last-message-tokens"),
    ("play_chats", " while playing", "lower --problems, --message-tokens or --last-message-tokens"),
    ("", "", "use a smaller --model"),
)  # fmt: skip


def report_failure(options: Options, arm: str, seed: int | None, error: Exception) -> str:
    """A failed run in a line; the traceback of an unforeseen error goes to failures.log in the output folder."""
    return log_failure(options, *describe_failure(arm, seed, error))


def describe_failure(arm: str, seed: int | None, error: Exception) -> tuple[str, str]:
    """A failed run in a line, and the traceback of an unforeseen error."""
    import torch

    label = run_label(arm, seed)
    if isinstance(error, NonFiniteError):
        return one_line(error, 2000), ""
    if isinstance(error, OutOfMemoryError | records.RecordError):
        return f"{label}: {one_line(error, 2000)}", ""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        inside = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
        _, where, what = next(row for row in MEMORY if not row[0] or row[0] in inside)
        return one_line(f"{label}: out of memory{where}: see that nothing else is on the card, or {what}"), ""
    return one_line(f"{label}: {cause(error)}", 1000), "".join(traceback.format_exception(error))


def log_failure(options: Options, line: str, trace: str) -> str:
    """Put a traceback into failures.log. Returns the line, which then says so."""
    if not trace:
        return line
    # each line set in, so that no message can pass for an entry of its own
    details = textwrap.indent(clean(trace), "    ", lambda _: True)
    try:
        with open(options.out / "failures.log", "a", encoding="utf-8") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n{details}\n")
        return f"{line} ({log.name} has the traceback)"
    except OSError:  # the disk may be what failed
        return line


def run_line(record: dict[str, Any]) -> str:
    """A finished run in a line, each score with its 95% interval over problems and its n."""
    import report

    scores = [f"{e['name'].replace('_', ' ')} {report.score_text(e['chats'])}" for e in record["evaluations"]]
    return f"{run_label(record['arm'], record['seed'])}: {'; '.join(scores)}; {record['seconds']['total'] / 60:.1f} min"


def quiet_libraries() -> None:
    """One bar and our own lines on the screen, not five libraries' notices."""
    import logging
    import warnings

    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("accelerate").setLevel(logging.ERROR)


def plan(config: Config, options: Options) -> int:
    """Say what would run and what would be reused, and about how long it takes, by a benchmark.json if there is
    one. Touches nothing and needs no GPU."""
    here = Path(config.data).exists()
    data = load_data(config) if here else None
    key = run_key(config, data.report["fingerprint"] if data else None)
    found, broken = read_runs(options, show)
    known = () if estimated_minutes(options.out) else found.values()  # the benchmark had the card to itself
    total, left = 0.0, 0
    for arm, seed in options.wanted:
        differs = stale_parts(found[arm, seed], key) if (arm, seed) in found else ["absent"]
        if options.reuse and not differs:
            what = "reused"
        else:
            started = seed is not None and any(checkpoint_folder(options, arm, seed).glob("checkpoint-*"))
            spent = expected_minutes(options, arm, known)
            total, left = total + spent, left + 1
            what = "goes on from its checkpoint" if options.reuse and started else "runs"
            what += f", about {spent:.1f} min" if spent else ""
            what += f" (its {parts_differ(differs)})" if options.reuse and differs != ["absent"] else ""
        print(f"{run_label(arm, seed):<20} {what}")
    for name in (name for name in found if name not in options.wanted):  # a table holds every record that fits
        differs = stale_parts(found[name], key)
        print(f"{run_label(*name):<20} {f'not used, its {parts_differ(differs)}' if differs else 'reused'}")
    if total:
        price = "" if config.device == "cpu" else f", ${total / 60 * options.price:.2f} at ${options.price:g} an hour"
        print(f"in all about {total:.0f} min{price}")
    elif not left:
        print("nothing is left to run: without --plan the table is made of what is reused")
    else:
        print(f"no estimate: python recipe.py --bench writes {options.out / 'benchmark.json'}, from which it is made")
    return 1 if broken else 0


def estimated_minutes(out: Path) -> dict[str, float]:
    """Minutes of a run by arm, from the benchmark of this folder; {} without one."""
    try:
        return {arm: float(m) for arm, m in json.loads((out / "benchmark.json").read_text())["minutes"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def follow() -> int:
    """What all processes of a start but the first do: make the runs beside it. Returns its exit code."""
    todo, config, options, data, key = ranks.broadcast(None)
    if todo:
        make_runs(todo, config, options, data, key, pick_device(config))
    return ranks.broadcast(0)


def check_shares(config: Config) -> None:
    """Raises UserError where a step's problems cannot be dealt out evenly, whole groups to each process."""
    if config.problems % ranks.world():
        fits = [n for n in range(1, config.problems + 1) if config.problems % n == 0]
        raise UserError(f"--problems {config.problems} a step cannot be dealt out to {ranks.world()} processes: start "
                        f"{', '.join(map(str, fits))} of them, or change --problems")  # fmt: skip


def experiment(config: Config, options: Options) -> int:
    """Load, run what is missing, summarize, write results.json, print the table. Returns the exit code."""
    check_shares(config)
    if options.ray:
        if ranks.world() > 1:
            raise UserError("--ray gives each run one process: start it with python recipe.py, without a launcher")
        import cluster

        cluster.find_ray()  # before anything is loaded
    check_writable(options.out)
    state = records.git_state(Path(__file__).parent)  # now: the tree may change before the runs are done
    with records.only_one(options.out):
        device = None if options.reuse or options.ray else pick_device(config)  # before anything is loaded
        with hashing(config.model):
            data = load_data(config) if Path(config.data).exists() or not options.reuse else None
        key = run_key(config, data.report["fingerprint"] if data else None)
        found, broken = read_runs(options, show)
        usable, todo, reused = sort_runs(options, found, key, show)
        if reused:
            show(f"reused: {', '.join(reused)}")
        made, failed = {}, []
        not_tried: list[RunName] = []
        if todo and not device and not options.ray:  # the driver of a cluster may have none
            device = device_or_not(config, bool(usable))
            todo, not_tried = (todo, []) if device else ([], todo)
        if todo:
            data = data or load_data(config)
            key = {**key, "data": data.report["fingerprint"]}
        ranks.broadcast((todo, config, options, data, key))  # follow() waits for it
        if not options.reuse:  # going on with --reuse would take them
            for name in set(todo) & set(found):
                records.set_aside(record_path(options, *name))
        if todo and options.ray:
            made, failed = cluster.make_runs(todo, config, options, data, key)
        elif todo:
            made, failed = make_runs(todo, config, options, data, key, device)
        usable |= made
        mended = {record_path(options, *name) for name in made}
        failed += [line for path, line in broken.items() if path not in mended]
        if usable:
            failed += write_results(options, usable, reused, failed, state)
        else:
            print("nothing was finished: no results.json", file=sys.stderr)
    for line in failed:
        print(f"failed: {one_line(line, 2000)}", file=sys.stderr)
    if failed:
        print(f"go on with: {options.command}{'' if options.reuse else ' --reuse'}", file=sys.stderr)
    return 1 if failed or not_tried or not usable else 0


def device_or_not(config: Config, table_without: bool) -> str | None:
    """The device to make runs on. Where there is none, None if a table can be made without them, which is said."""
    try:
        return pick_device(config)
    except UserError as error:
        if not table_without:
            raise
        print(f"{error}: the table is made of the runs that are there", file=sys.stderr)
        return None


def write_results(
    options: Options, usable: dict[RunName, dict[str, Any]], reused: list[str], failed: list[str], state: dict[str, Any]
) -> list[str]:
    """Write results.json and print the table. Returns what failed: records that cannot be summarized, which are left
    out, and the file itself where it cannot be written."""
    import report
    import tables

    bad: list[str] = []
    show(f"summing up {len(usable)} records; their intervals are resampled, which takes a minute for a whole table")
    try:
        results = summary(options, usable, reused, failed, state)
    except report.ResultsError:
        unreadable = report.unreadable(usable)
        usable = {name: usable[name] for name in usable if name not in unreadable}
        if not unreadable or not usable:
            raise
        for name, why in unreadable.items():  # out of the way, so that the next start makes it anew
            bad.append(f"{why}; the record is now {records.set_aside(record_path(options, *name))}")
        results = summary(options, usable, reused, [*failed, *bad], state)
    path = options.out / "results.json"
    try:
        records.write_whole(path, report.to_json(results))
        last_line = f"written: {path}"
    except OSError as error:
        last_line = f"{path} could not be written: {error.strerror}"
        bad.append(last_line)
    show(f"{tables.render_table(results)}\n{last_line}")
    return bad


def summary(
    options: Options, usable: dict[RunName, dict[str, Any]], reused: list[str], failed: list[str], state: dict[str, Any]
) -> dict[str, Any]:
    """What results.json holds. Raises report.ResultsError for a record that cannot be used."""
    import report

    header = {"command": options.command, "date": time.strftime("%Y-%m-%d"), "reused": reused, "failed": failed}
    runs = {name: record for name, record in usable.items() if name[1] is not None}
    arms = [*options.arms, *dict.fromkeys(arm for arm, _ in runs if arm not in options.arms)]
    base = usable.get(("untrained", None))
    return report.summarize(base, runs, {**header, **state}, arms, options.seeds, options.price)


def check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out {folder} cannot be written ({error.strerror}): give a folder that can") from None
