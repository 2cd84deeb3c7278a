"""The runs of a table as Ray tasks, on this machine's GPUs or a cluster's: `recipe.py --ray [ADDRESS]`.

The workers make the records and tell how far they are; this process asks for them, shows one view of all runs, and
writes each record the moment it arrives, as runs.make_runs does for runs one after another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import runs
from data import Data
from options import Options, RunName
from recipe import Config, UserError
from records import git_state, run_label
from runs import Interrupted, Lab, Progress, Signals

# what a worker needs to make a run; Ray takes these files to wherever the worker is
MODULES = (
    "cluster", "runs", "options", "recipe", "records", "data", "facts", "grading", "decode", "ops", "fuse", "ranks",
    "talk", "words",
)  # fmt: skip
RETRIES = 3  # times that a run whose worker was lost is started again


# ---------------------------------------------------------------------------------------------- in a worker


class Board:
    """Where the workers note how far they are, an actor of its own; the driver reads it."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []

    def note(self, *words: Any) -> None:
        self.notes.append(words)

    def read(self) -> list[tuple[Any, ...]]:
        """The notes since the last reading."""
        notes, self.notes = self.notes, []
        return notes


@dataclass(frozen=True)
class Teller:
    """Stands in a worker for runs.Progress: what would be shown goes to the board."""

    board: Any
    attempt: tuple[RunName, int]

    def advance(self, chats: int, doing: str) -> None:
        self.board.note.remote(self.attempt, "advance", chats, doing)

    def say(self, line: str) -> None:
        self.board.note.remote(self.attempt, "say", line)

    def say_once(self, line: str) -> None:
        self.board.note.remote(self.attempt, "say_once", line)


@dataclass(frozen=True)
class Outcome:
    """How a task ended: with a record, or one of the others."""

    record: dict[str, Any] | None = None
    trouble: str | None = None  # a UserError: wrong for every run alike
    failure: tuple[str, str] | None = None  # this run's alone: a line, and the traceback


@dataclass(frozen=True)
class Order:
    """What all tasks of a start are told, beside the problems."""

    config: Config
    options: Options
    key: dict[str, str | None]
    origin: dict[str, Any]  # commit of the driver's checkout: a worker's files are in none
    folder: Path  # the driver's working folder: a relative --model counts from it
    marker: Path  # an empty file in the output folder: a worker that sees it shares that folder
    threads: int


def run_task(order: Order, data: Data, board: Any, attempt: tuple[RunName, int]) -> Outcome | None:
    """One run, in a worker: from its checkpoint if the output folder is shared. None if told to stop."""
    (arm, seed), _ = attempt
    try:
        with Signals() as signals, tempfile.TemporaryDirectory() as alone:
            lab = make_lab(order, data, Teller(board, attempt), signals, Path(alone))
            return Outcome(record=runs.base_run(lab) if seed is None else runs.train_run(lab, arm, seed))
    except Interrupted:
        return None
    except UserError as error:
        return Outcome(trouble=str(error))
    except Exception as error:  # as text: not every exception survives the way to another process
        return Outcome(failure=runs.describe_failure(arm, seed, error))
    finally:
        runs.free_memory()


def make_lab(order: Order, data: Data, teller: Teller, signals: Signals, alone: Path) -> Lab:
    """The driver's lab, on this machine. Raises UserError if the model or the code is another one here."""
    import torch

    runs.quiet_libraries()
    teller.advance(0, ": loading")
    with contextlib.suppress(OSError):
        os.chdir(order.folder)
    config, options = order.config, order.options
    here = runs.run_key(config, order.key["data"])
    differs = [part for part, value in order.key.items() if value not in (None, here[part])]
    if differs:
        raise UserError(f"on {socket.gethostname()} the {runs.parts_differ(differs)} from this start's "
                        f"(--model {config.model}): every machine needs the same ones at the same place")  # fmt: skip
    if order.threads:
        torch.set_num_threads(order.threads)
    device = runs.pick_device(config)
    if not order.marker.exists():
        options = dataclasses.replace(options, out=alone, save_every=0)
    about = {**runs.about_this_start(config, device, options.command), **order.origin}
    return Lab(config, options, data, device, here, about, teller, signals)


# ---------------------------------------------------------------------------------------------- in the driver


def find_ray() -> Any:
    """Ray, without its usage statistics and its servers' own messages. Raises UserError where it is not installed."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}
    try:
        import ray
    except ImportError:
        raise UserError("--ray needs Ray: pip install '.[ray]' -c constraints.txt") from None
    return ray


class Heard(Signals):
    """Signals that are only noted: an exception raised within a call of Ray comes out as a fault of Ray's."""

    insisted = False

    def _handle(self, number: int, _frame: Any) -> None:
        self.insisted = self.caught is not None
        self.caught = self.caught or number
        first = "what is on finishes its step and saves; once more to stop at once"
        print("stopping at once" if self.insisted else first, file=sys.stderr)

    def hold(self) -> None:
        """Take the signals again: ray.init sets a handler of its own for SIGTERM."""
        for number in self._before:
            signal.signal(number, self._handle)


@contextlib.contextmanager
def connected(ray: Any, address: str) -> Iterator[None]:
    """While entered, Ray runs here or is the cluster at `address`. Afterwards nothing of this start is left in it."""
    files = [str(Path(__file__).with_name(f"{name}.py")) for name in MODULES]
    how: dict[str, Any] = {"runtime_env": {"py_modules": files}}
    if address == "local":  # its workers find the modules where this process found them
        how = {"include_dashboard": False, "object_store_memory": 256 * 2**20}  # a record is a few MB
    try:
        ray.init(address, log_to_driver=False, logging_level="ERROR", **how)
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, ImportError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = "" if address == "local" else " (if it asks for a token, set RAY_AUTH_MODE=token)"
        raise UserError(f"--ray {address}: {line}{hint}") from None
    try:
        yield
    finally:
        ray.shutdown()


def resources(ray: Any, config: Config, options: Options) -> tuple[dict[str, float], int]:
    """What a run asks of Ray, and its CPU threads (0: as Ray says)."""
    nodes = nodes_of(ray)
    if config.device != "cpu":
        if config.device == "auto" and not any(node.get("GPU") for node in nodes):
            raise UserError("no GPU in this Ray: use --tiny for the whole experiment in small, --device cpu if you can "
                            "wait for days, or --device cuda to wait until a GPU joins")  # fmt: skip
        return {"CPU": 1, "GPU": options.gpus_per_run}, config.threads
    threads = config.threads
    if not threads:  # as many as without Ray: the last bit of a sum may hang on it
        import torch

        threads = torch.get_num_threads()
    return {"CPU": min(threads, max(node.get("CPU", 0) for node in nodes)), "GPU": 0}, threads


def nodes_of(ray: Any) -> list[dict[str, float]]:
    """What each machine of the cluster has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def places(nodes: Sequence[dict[str, float]], need: dict[str, float]) -> int:
    """How many tasks that need so much can be on at once."""
    asked = {name: amount for name, amount in need.items() if amount}
    return sum(min(int(node.get(name, 0) / amount + 1e-9) for name, amount in asked.items()) for node in nodes)


class Table:
    """The runs of one start: which are waiting, which are with Ray, what came back."""

    def __init__(
        self, ray: Any, order: Order, options: Options, data: Data, todo: Sequence[RunName], need: dict[str, float],
        progress: Progress,
    ):  # fmt: skip
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.ray, self.order, self.options, self.need, self.progress = ray, order, options, need, progress
        self.data = ray.put(data)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        board = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)(Board)
        self.board = board.remote()
        self.reading = self.board.read.remote()
        self.task = ray.remote(
            num_cpus=need["CPU"], num_gpus=need["GPU"], max_retries=0,
            max_calls=1 if need["GPU"] else 0,  # a process that is kept would keep its part of the card's memory
        )(run_task)  # fmt: skip
        self.chats = {run: runs.chats_of(run, order.config, len(data.heldout)) for run in todo}
        self.waiting, self.tries = list(todo), Counter[RunName]()
        self.running: dict[Any, RunName] = {}  # by the reference of the task
        self.doing: dict[RunName, str] = {}  # of those that have said something
        self.done = Counter[RunName]()  # chats
        self.made: dict[RunName, dict[str, Any]] = {}
        self.failed: list[str] = []
        self.trouble: str | None = None
        self.stopping, self.start = False, time.monotonic()

    def room(self) -> int:
        """How many runs may be with Ray: all, whose queue then is the order; with --hours, which decides when a run
        starts, as many as can be on."""
        if self.options.hours is None:
            return len(self.chats)
        return max(1, places(nodes_of(self.ray), self.need))

    def submit(self) -> None:
        """Hand waiting runs to Ray."""
        while self.waiting and len(self.running) < self.room():
            run = self.waiting.pop(0)
            if not self.tries[run]:
                if late := runs.too_late(self.options, run[0], time.monotonic() - self.start, self.made.values()):
                    self.progress.say(f"{run_label(*run)}: {late}")
                    continue
                if not self.options.reuse:
                    runs.forget_checkpoints(self.options, *run)
            task = self.task.options(name=run_label(*run))
            self.running[task.remote(self.order, self.data, self.board, (run, self.tries[run]))] = run

    def stop(self) -> None:
        """What is on finishes its step and saves, what is queued never starts."""
        self.stopping = True
        self.waiting.clear()
        for task in self.running:
            self.ray.cancel(task)

    def listen(self) -> None:
        """Show what the workers noted."""
        if not self.ray.wait([self.reading], timeout=0.2)[0]:
            return
        reading, self.reading = self.reading, self.board.read.remote()
        try:
            notes = self.ray.get(reading)
        except self.ray.exceptions.RayError:
            return  # the board was lost, with what was on it; Ray makes a new one
        on = set(self.running.values())
        for (run, attempt), kind, *words in notes:
            if run not in on or attempt != self.tries[run]:
                continue  # of a worker that was lost
            if kind == "advance":
                chats, text = words
                self.doing[run] = text.partition(": ")[2].partition(",")[0] or self.doing.get(run, "")
                self.count(run, chats)
            else:
                getattr(self.progress, kind)(*words)

    def count(self, run: RunName, chats: int) -> None:
        self.done[run] += chats
        shown = [f"{run_label(*on)} {doing}".strip() for on, doing in self.doing.items()]
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        self.progress.advance(chats, ", ".join(shown[:3]) + more)

    def settle(self, task: Any) -> None:
        """Take in how a task ended."""
        run = self.running.pop(task)
        self.doing.pop(run, None)
        of = self.ray.exceptions
        try:
            outcome = self.ray.get(task)
        except of.TaskCancelledError:
            return None
        except (of.WorkerCrashedError, of.NodeDiedError, of.ObjectLostError, of.OutOfMemoryError) as error:
            return self.lost(run, error)
        except Exception as error:  # Ray's own trouble with this task
            return self.fail(run, *runs.describe_failure(*run, error))
        if outcome is None:  # told to stop, by us or by a machine that goes down
            return None if self.stopping else self.lost(run, RuntimeError("it was told to stop"))
        if outcome.trouble:
            self.trouble = self.trouble or outcome.trouble
        elif outcome.failure and not self.stopping:  # being stopped can look like a failure; a real one comes again
            self.fail(run, *outcome.failure)
        elif outcome.record:
            self.keep(run, outcome.record)

    def keep(self, run: RunName, record: dict[str, Any]) -> None:
        try:
            self.made[run] = runs.keep_record(self.options, record)
        except Exception as error:  # a full disk, say: the others may fare better
            return self.fail(run, *runs.describe_failure(*run, error))
        self.count(run, self.chats[run] - self.done[run])
        self.progress.say(runs.run_line(record))

    def fail(self, run: RunName, line: str, trace: str) -> None:
        self.failed.append(runs.log_failure(self.options, line, trace))
        self.progress.say(f"FAILED {self.failed[-1]}")

    def lost(self, run: RunName, error: Exception) -> None:
        self.tries[run] += 1
        if self.stopping:
            return
        if self.tries[run] > RETRIES:
            return self.fail(run, f"{run_label(*run)}: its worker was lost {self.tries[run]} times",
                             "".join(traceback.format_exception(error)))  # fmt: skip
        self.progress.say(f"{run_label(*run)}: its worker was lost ({type(error).__name__}); it is started again")
        self.count(run, -self.done[run])
        self.waiting.insert(0, run)


def make_runs(
    todo: Sequence[RunName], config: Config, options: Options, data: Data, key: dict[str, str | None]
) -> tuple[dict, list[str]]:
    """As runs.make_runs, as many at a time as Ray has room for."""
    ray = find_ray()
    chats = sum(runs.chats_of(run, config, len(data.heldout)) for run in todo)
    out = options.out.resolve()
    marker = out / f".probe.{uuid.uuid4().hex}"
    with Heard() as signals, contextlib.closing(Progress(chats)) as progress, connected(ray, options.ray):
        signals.hold()
        need, threads = resources(ray, config, options)
        there = dataclasses.replace(options, out=out, reuse=True)  # checkpoints not to be used are gone by then
        order = Order(config, there, key, git_state(Path(__file__).parent), Path.cwd(), marker, threads)
        table = Table(ray, order, options, data, todo, need, progress)
        marker.touch()
        progress.advance(0, "waiting for a worker")
        try:
            while (table.waiting or table.running) and not signals.insisted:
                if not table.stopping and (signals.caught or table.trouble):
                    table.stop()
                table.submit()
                done = ray.wait(list(table.running), timeout=0.3)[0] if table.running else []
                table.listen()
                for task in done:
                    table.settle(task)
        finally:
            marker.unlink(missing_ok=True)
    if signals.caught:
        raise Interrupted(signals.caught)
    if table.trouble:
        raise UserError(table.trouble)
    return table.made, table.failed
