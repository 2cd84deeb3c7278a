"""The file edge: everything a run leaves behind appears whole or not at all, and says where it came from.

A record is `runs/ARM-sSEED.json.xz`: compressed JSON with a sha256 of its own content. Nothing here knows what a
chat is; recipe.py decides what goes into a record, report.py what is made of it.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import json
import lzma
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

FORMAT = 1
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "math-verify", "whileai")


class RecordError(ValueError):
    """A file that cannot be used; the message names it and says why."""


def canonical(value: Any) -> bytes:
    """The one JSON text of a value: sorted keys, no spaces. Raises ValueError for nan and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def digest(value: Any) -> str:
    """Sixteen hex digits that stand for a JSON value."""
    return hashlib.sha256(canonical(value)).hexdigest()[:16]


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or the next start after a kill, sees all of it or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some file systems do not let a folder be synced; the file itself is safe
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def write_record(path: Path, content: dict[str, Any]) -> None:
    """Write a record with its checksum. The bytes depend on the content alone."""
    body = {**content, "format": FORMAT}
    body["sha256"] = hashlib.sha256(canonical(body)).hexdigest()
    write_whole(path, lzma.compress(canonical(body), preset=6))


def read_record(path: Path) -> dict[str, Any]:
    """Read a record. Raises RecordError for one that is cut short, edited, or of another format."""
    try:
        body = json.loads(lzma.decompress(path.read_bytes()))
        if not isinstance(body, dict):
            raise ValueError(f"a {type(body).__name__}, not an object")
        stated = body.pop("sha256", None)
        content = canonical(body)
    except (OSError, EOFError, lzma.LZMAError, ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not a whole record ({type(error).__name__}: {error})") from None
    if body.get("format") != FORMAT:
        raise RecordError(f"{path}: record of format {body.get('format')!r}, this version reads {FORMAT}")
    if stated != hashlib.sha256(content).hexdigest():
        raise RecordError(f"{path}: its content does not match its checksum (cut short or edited)")
    return body


def file_digests(folder: Path, but: str = "so_far.json.xz") -> dict[str, str]:
    """The sha256 of every file below a folder except the one named `but`, by its place in the folder."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / but):
        with open(path, "rb") as file:
            found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def checkpoints(folder: Path) -> dict[int, Path]:
    """The checkpoints of a run by step, whole or not."""
    named = {path.name.removeprefix("checkpoint-"): path for path in folder.glob("checkpoint-*")}
    return {int(step): path for step, path in named.items() if step.isascii() and step.isdigit()}


def run_label(arm: str, seed: int | None) -> str:
    """What a run is called: its arm, and its seed where it has one (the untrained pair has none)."""
    return arm if seed is None else f"{arm} seed {seed}"


def record_name(arm: str, seed: int | None) -> str:
    """The file name of a run's record."""
    return f"{arm}.json.xz" if seed is None else f"{arm}-s{seed}.json.xz"


def set_aside(path: Path) -> Path:
    """Move a record that is not to be used into `old/` beside it, never over another one. Returns where to."""
    folder = path.parent / "old"
    folder.mkdir(exist_ok=True)
    number = 1
    while (target := folder / f"{path.name.removesuffix('.json.xz')}.{number}.json.xz").exists():
        number += 1
    os.replace(path, target)
    return target


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold an output folder. Raises RecordError, naming the holder, if another process has it.

    The lock is the operating system's, so a killed process holds nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+", errors="replace") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise RecordError(f"{folder} is in use by process {lock.read().strip() or '?'}: "
                              "wait for it, or give another --out") from None  # fmt: skip
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        for stray in [*folder.rglob(".*.tmp"), *folder.glob(".probe.*")]:  # of starts that were killed while writing
            stray.unlink(missing_ok=True)
        yield


def versions() -> dict[str, str]:
    """Python's and the packages' versions, read without importing any of them."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def git_state(folder: Path) -> dict[str, Any]:
    """The commit the code is at and whether the tree is clean. Where there is no git checkout, what GIT_COMMIT
    says, or None."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit, status = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit or os.environ.get("GIT_COMMIT"), "clean": None if status is None else status == ""}


def code_digest(path: Path, names: set[str] | None = None) -> str:
    """Sixteen hex digits of what code does: the source lines of a file (or of its definitions `names`, a method
    being "Class.method") without docstrings, whole-line comments, blank lines and indentation. Text, not a syntax
    tree: trees print differently from one Python to the next. Raises ValueError for a name that is not there."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    defined = {node.name: node for node in tree.body if hasattr(node, "name")}
    for outer in [node for node in defined.values() if isinstance(node, ast.ClassDef)]:
        defined |= {f"{outer.name}.{node.name}": node for node in outer.body if hasattr(node, "name")}
    if missing := (names or set()) - set(defined):
        raise ValueError(f"{path.name} does not define {sorted(missing)}")
    kept = tree.body if names is None else [defined[name] for name in sorted(names)]
    documentation = {
        line
        for node in [tree, *ast.walk(tree)]
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)
    }
    lines = text.splitlines()
    wanted = [
        lines[number - 1].strip()
        for node in kept
        for number in range(
            min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]), node.end_lineno + 1
        )
        if number not in documentation
    ]
    code = [line for line in wanted if line and not line.startswith("#")]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:16]
