"""One run over several processes: `torchrun --nproc_per_node 4 recipe.py`, or `accelerate launch`.

Each process plays and trains its share of every step; the first decides, writes and speaks for all. Whatever knows
of ranks goes through the few functions here, and with one process each of them is trivial."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

PATIENCE = timedelta(minutes=30)  # with a process that lives; one that dies is noticed at once
SHARDERS = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")  # accelerate's ACCELERATE_USE_...
MPI = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


class LaunchError(ValueError):
    """The processes were started in a way that cannot work; the message says what to do."""


class Left(BaseException):
    """Another process of this start is gone, so this one cannot go on either."""


class Alone(BaseException):
    """This process failed where the others may not have: they cannot be told, so the start ends."""


def world() -> int:
    """How many processes this start has."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is, from 0."""
    return int(os.environ.get("RANK", "0")) if world() > 1 else 0


def is_main() -> bool:
    """Whether this process decides, writes and speaks for all."""
    return rank() == 0


def join() -> None:
    """Meet the other processes of this start. Raises LaunchError for one that cannot work."""
    check_launch(os.environ)
    if world() == 1:
        return
    import torch

    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backend, timeout=PATIENCE)


def check_launch(environment: Mapping[str, str]) -> None:
    """Raises LaunchError for what would shard the model, or would silently be another number of processes."""
    torchrun = "start it with torchrun --nproc_per_node N recipe.py"
    for sharder in SHARDERS:
        if environment.get(f"ACCELERATE_USE_{sharder}", "false").lower() in ("1", "true"):
            raise LaunchError(
                f"ACCELERATE_USE_{sharder} is on: it cuts the weights up between the processes, and the generator needs"
                " them whole. Use a smaller --model or a larger card; several processes, each with a whole model, work:"
                f" {torchrun}"
            )
    several = "WORLD_SIZE" in environment
    if not several and any(int(environment.get(name, "1")) > 1 for name in MPI):
        raise LaunchError(f"started by MPI, without WORLD_SIZE, RANK and MASTER_ADDR: {torchrun}")
    # accelerate's launcher of a single process sets these two together only where it was asked for several
    if not several and {"ACCELERATE_DYNAMO_BACKEND", "MASTER_PORT"} <= set(environment):
        raise LaunchError("accelerate launch was asked for several processes and started one (it does so with --cpu, "
                          f"and without --multi_gpu on one GPU): {torchrun}, on a CPU with --device cpu")  # fmt: skip
    missing = {"RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} - set(environment)
    if int(environment.get("WORLD_SIZE", "1")) > 1 and missing:
        raise LaunchError(f"WORLD_SIZE is {environment['WORLD_SIZE']}, but {' and '.join(sorted(missing))} not set: "
                          f"{torchrun}, or unset WORLD_SIZE for one process")  # fmt: skip


def take_device(device: str) -> None:
    """Make this process's own card the current one. Raises LaunchError if there are fewer cards than processes."""
    if world() == 1:
        return
    import torch

    if device == "cpu":  # accelerate would call it cpu:1, and a checkpoint cannot be loaded to a device of that name
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        return
    here, cards = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if here >= cards:
        raise LaunchError(f"{here + 1} or more processes, but {cards} GPUs here: start at most {cards}")
    torch.cuda.set_device(here)


def share(items: Sequence[T]) -> Sequence[T]:
    """This process's part of `items`: contiguous, and in the order of ranks they make up the whole."""
    return items[len(items) * rank() // world() : len(items) * (rank() + 1) // world()]


@contextlib.contextmanager
def with_the_others() -> Iterator[None]:
    """A process that dies closes its connections, which is an error here."""
    try:
        yield
    except RuntimeError as error:
        first = str(error).strip().split(". ")[0]
        raise Left(f"another process of this start is gone, so this one goes too ({first})") from None


def gather(value: T) -> list[T]:
    """The value of every process, in the order of ranks, on all of them."""
    if world() == 1:
        return [value]
    import torch

    values: list[Any] = [None] * world()
    with with_the_others():
        torch.distributed.all_gather_object(values, value)
    return values


def broadcast(value: T) -> T:
    """The first process's value, on all of them."""
    if world() == 1:
        return value
    import torch

    box = [value]
    with with_the_others():
        torch.distributed.broadcast_object_list(box, src=0)
    return box[0]


def barrier() -> None:
    """Go on when every process is here."""
    gather(None)


def sum_gradients(parameters: Iterable[Any]) -> None:
    """Give every parameter the sum of its gradients over all processes. A process without one adds nothing; where
    none has one it stays None, so that the optimizer leaves the parameter alone."""
    if world() == 1:
        return
    import torch

    parameters = [p for p in parameters if p.requires_grad]
    held = gather([p.grad is not None for p in parameters])
    live = [p for p, *has in zip(parameters, *held, strict=True) if any(has)]
    if not live:
        return
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in live])
    with with_the_others():
        torch.distributed.all_reduce(flat)
    for p, total in zip(live, flat.split([p.numel() for p in live]), strict=True):
        p.grad = total.view_as(p).to(p.dtype, copy=True)


def leave(code: int) -> NoReturn:
    """End this process. One of several that failed goes at once: the others may be waiting for it, and a tidy end
    would wait for them."""
    if world() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        if code:
            os._exit(code)
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    sys.exit(code)
