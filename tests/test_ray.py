"""`--ray` with a real Ray on this machine: the serial records, whatever happens to a worker or to the start."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from conftest import small_flags, timeless
from test_interruption import start, wait_for

import cluster
import recipe
import runs
import tiny
from options import configure, parser


@pytest.fixture(scope="module")
def flags(stand_in: tiny.TinyPaths) -> list[str]:
    words = small_flags(stand_in, steps=16, train_problems=64, heldout_problems=10, base_evals=1)
    return [*words, "--arm", "grpo", "--arm", "raft", "--seeds", "17", "--save-every", "1"]


@pytest.fixture(scope="module")
def serial(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The records of a start without Ray."""
    out = tmp_path_factory.mktemp("serial")
    done = start(flags, out)
    assert done.wait() == 0, done.stdout.read()
    return recorded(out)


def recorded(out: Path) -> dict[str, dict[str, Any]]:
    return {path.name: timeless(path) for path in (out / "runs").glob("*.xz")}


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that are still there after a while; one that is dead and only not yet fetched is not."""

    def runs_on(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    for _ in range(100):
        if processes := list(filter(runs_on, processes)):
            time.sleep(0.1)
    return processes


def test_a_lost_worker_is_replaced_and_a_run_that_fails_leaves_the_others_alone(
    flags: list[str], serial: Any, tmp_path: Path
) -> None:
    """grpo's worker is killed after its first checkpoint; a file stands where mixed would save."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mixed-s17").touch()
    process = start(flags, tmp_path, "--arm", "mixed", "--ray")
    wait_for((tmp_path / "checkpoints" / "grpo-s17" / "checkpoint-1" / "so_far.json.xz").exists, process)
    members = family(process)
    (worker,) = [p for p in members if p.cmdline() and p.cmdline()[0].startswith("ray::grpo seed 17")]
    worker.kill()
    shown, _ = process.communicate()
    assert process.returncode == 1, shown
    assert "grpo seed 17: its worker was lost (WorkerCrashedError); it is started again" in shown
    assert "grpo seed 17: going on after step" in shown
    assert "failed: mixed seed 17: FileExistsError" in shown and "Traceback" not in shown
    assert "make_trainer" in (tmp_path / "failures.log").read_text()  # the worker's traceback
    assert recorded(tmp_path) == serial
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", "checkpoints", "failures.log", "results.json", "runs"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["mixed-s17"]
    assert not alive(members)


def test_ctrl_c_saves_leaves_no_process_and_the_next_start_goes_on(
    flags: list[str], serial: Any, tmp_path: Path
) -> None:
    process = start(flags, tmp_path, "--save-every", "1000", "--ray")  # what is saved is saved by the signal
    wait_for((tmp_path / "checkpoints" / "grpo-s17").exists, process)
    members = family(process)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate()
    assert process.returncode == 130, shown
    assert "go on with the same command and --reuse" in shown and "Traceback" not in shown
    assert not alive(members)
    assert not list(tmp_path.glob(".probe*")) and "grpo-s17.json.xz" not in recorded(tmp_path)
    saved = {path.parent.name for path in tmp_path.glob("checkpoints/*/checkpoint-*")}
    again = start(flags, tmp_path, "--reuse")
    shown, _ = again.communicate()
    assert again.returncode == 0, shown
    for name in saved:
        assert f"{name.replace('-s', ' seed ')}: going on after step" in shown
    assert recorded(tmp_path) == serial
    assert not list((tmp_path / "checkpoints").iterdir())


def test_without_ray_it_says_what_to_install(flags: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert recipe.main([*flags, "--out", str(tmp_path / "out"), "--ray"]) == 2
    assert "pip install '.[ray]'" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_cluster_that_is_not_there_is_named(flags: list[str], tmp_path: Path, capsys: Any) -> None:
    assert recipe.main([*flags, "--out", str(tmp_path), "--ray", "nowhere"]) == 2
    assert "--ray nowhere: " in capsys.readouterr().err


@pytest.mark.parametrize("share", ["0", "1.5"])
def test_a_share_of_a_gpu_is_above_0_and_at_most_1(share: str, flags: list[str], capsys: Any) -> None:
    assert recipe.main([*flags, "--ray", "--gpus-per-run", share]) == 2
    assert f"--gpus-per-run {share}: must be" in capsys.readouterr().err


def test_address_by_flag_by_environment_or_here(flags: list[str], monkeypatch: Any) -> None:
    def address(*words: str) -> str | None:
        return configure(parser().parse_args([*flags, *words]))[1].ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert (address(), address("--ray"), address("--ray", "auto")) == (None, "local", "auto")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert (address(), address("--ray"), address("--ray", "local")) == (None, "head:6379", "local")


def test_room_is_counted_machine_by_machine() -> None:
    """8 GPUs with CPUs to spare take 16 halves; 4 GPUs beside 3 CPUs take 3, a run needing a CPU; no GPU takes none."""
    machines = [{"GPU": 8, "CPU": 96}, {"GPU": 4, "CPU": 3}, {"CPU": 64}]
    assert cluster.places(machines, {"CPU": 1, "GPU": 0.5}) == 19
    assert cluster.places([{"GPU": 1, "CPU": 8}], {"CPU": 1, "GPU": 0.1}) == 8
    assert cluster.places([{"CPU": 7}, {"CPU": 1}], {"CPU": 2, "GPU": 0}) == 3


def test_what_a_run_asks_of_ray(config: recipe.Config, flags: list[str]) -> None:
    options = configure(parser().parse_args([*flags, "--ray", "--gpus-per-run", "0.5"]))[1]
    cpus = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": {"CPU": 2}},
                                          {"Alive": False, "Resources": {"CPU": 64, "GPU": 8}}])  # fmt: skip
    with_gpu = SimpleNamespace(nodes=lambda: [{"Alive": True, "Resources": {"CPU": 64, "GPU": 8}}])

    def asked(ray: Any, device: str, threads: int) -> Any:
        return cluster.resources(ray, dataclasses.replace(config, device=device, threads=threads), options)

    assert asked(cpus, "cpu", 1) == ({"CPU": 1, "GPU": 0}, 1)
    assert asked(cpus, "cpu", 4) == ({"CPU": 2, "GPU": 0}, 4)  # else it would never start
    assert asked(with_gpu, "auto", 0) == ({"CPU": 1, "GPU": 0.5}, 0)
    assert asked(cpus, "cuda", 0) == ({"CPU": 1, "GPU": 0.5}, 0)  # waits for a GPU to join
    with pytest.raises(recipe.UserError, match="no GPU in this Ray"):
        asked(cpus, "auto", 0)


@pytest.fixture()
def order(config: recipe.Config, data: Any, flags: list[str], tmp_path: Path) -> cluster.Order:
    options = configure(parser().parse_args([*flags, "--ray", "--out", str(tmp_path / "out")]))[1]
    key = runs.run_key(config, data.report["fingerprint"])
    origin = {"commit": "of the driver", "clean": True}
    return cluster.Order(config, options, key, origin, Path.cwd(), tmp_path / "marker", threads=1)


class Noted(list):
    """A board without an actor."""

    @property
    def note(self) -> Any:
        return SimpleNamespace(remote=lambda *words: self.append(words))


def test_a_worker_apart_from_the_output_folder_leaves_nothing_behind(order: cluster.Order, data: Any) -> None:
    notes = Noted()
    outcome = cluster.run_task(order, data, notes, (("grpo", 17), 0))
    assert outcome.record["arm"] == "grpo" and len(outcome.record["steps"]) == order.config.steps
    assert outcome.record["about"]["commit"] == "of the driver"
    assert not order.options.out.exists()
    assert {attempt for attempt, *_ in notes} == {(("grpo", 17), 0)}
    counted = sum(words[1] for _, *words in notes if words[0] == "advance")
    assert counted == runs.chats_of(("grpo", 17), order.config, len(data.heldout))


def test_a_worker_with_another_model_stops_the_start(order: cluster.Order, data: Any) -> None:
    other = dataclasses.replace(order, key={**order.key, "model": "another"})
    outcome = cluster.run_task(other, data, Noted(), (("grpo", 17), 0))
    assert "the model differs from this start's" in outcome.trouble and order.config.model in outcome.trouble


def test_a_worker_is_sent_every_module_that_it_imports() -> None:
    """On a cluster the project's files are elsewhere; what the driver alone imports stays here."""
    driver = {"report", "tables", "tiny", "bench", "selftest"}
    here = {path.stem for path in Path(cluster.__file__).parent.glob("*.py")}
    for name in cluster.MODULES:
        tree = ast.parse(Path(cluster.__file__).with_name(f"{name}.py").read_text())
        found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        found |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert found & here <= {*cluster.MODULES, *driver}, name
