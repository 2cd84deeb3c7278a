"""The card and its publishing: against a local server that speaks the platform's routes, and in a real browser."""

from __future__ import annotations

import copy
import html
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import fake_runs  # noqa: E402

import post  # noqa: E402
import report  # noqa: E402
import words  # noqa: E402

Json = dict[str, Any]
KEY = "zp_test_key"
ARMS = ("untrained", "grpo", "ada", "raft", "mixed")
HOSTILE = (
    "\x1b[31mred\x1b[0m <script>document.title='owned'</script> \"quoted\" 'single' & </p><img src=x onerror=alert(1)>"
    " {{ 7*7 }} \u202ereversed\x00\n```\n# no heading"
)


# ---------------------------------------------------------------------------------------------- the platform


class Platform(ThreadingHTTPServer):
    """The platform in small. `fault` breaks every call from that number on: a status, "drop", "hang" or "garbage"."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.agents: Json = {}
        self.behaviors: Json = {}
        self.experiment: Json | None = None
        self.figures: Json = {}
        self.runs: Json = {}
        self.calls: list[tuple[str, str]] = []
        self.fault: tuple[int, int | str] | None = None
        self.answer_first = False  # the fault hits the answer: the call itself was done
        self.once = False  # the fault passes

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def state(self) -> str:
        return json.dumps([self.agents, self.behaviors, self.experiment, self.figures, self.runs], sort_keys=True)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that a test drops is no news."""


class Handler(BaseHTTPRequestHandler):
    server: Platform

    def _serve(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        server, (path, _, query) = self.server, self.path.partition("?")
        server.calls.append((self.command, self.path))
        number, fault = server.fault or (None, None)
        due = number is not None and len(server.calls) >= number
        server.fault = None if due and server.once else server.fault
        if due and not server.answer_first:
            return self._break(fault)
        if self.headers.get("X-Api-Key") != KEY:
            return self._send(401, {"error": "unknown key"})
        status, answer = self._route(path.strip("/").split("/"), query, body)
        return self._break(fault) if due else self._send(status, answer)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _route(self, parts: list[str], query: str, body: Any) -> tuple[int, Any]:
        server = self.server
        match [self.command, *parts]:
            case ["POST", "agents"]:
                server.agents[body["id"]] = body
                return 200, body
            case ["PUT", "agents", _, "behaviors", name]:
                server.behaviors[name] = {"name": name, **body}
                return 200, server.behaviors[name]
            case ["GET", "agents", _, "experiment"]:
                return (200, server.experiment) if server.experiment else (404, {"error": "none"})
            case ["PUT", "agents", _, "experiment"]:
                server.experiment = body
                return 200, body
            case ["PUT", "agents", _, "figures", name]:
                server.figures[name] = {"name": name, **body}
                return 200, server.figures[name]
            case ["GET", "runs"]:
                agent = query.removeprefix("agent=")
                return 200, {"runs": [run for run in server.runs.values() if run["agent"] == agent]}
            case ["POST", "runs"]:  # an id that is there: the row is overwritten and its training points are gone
                server.runs[body["id"]] = {**body, "status": "running", "train": [], "evals": []}
                return 200, {"id": body["id"]}
            case ["POST", "runs", run, "train"]:
                server.runs[run]["train"] += body
                return 200, {}
            case ["POST", "runs", run, "evals"]:
                new = {score["behavior"]: score for score in body}
                server.runs[run]["evals"] = [e for e in server.runs[run]["evals"] if e["behavior"] not in new] + body
                return 200, {"evals": body}
            case ["PATCH", "runs", run]:
                server.runs[run] |= body
                return 200, server.runs[run]
        return 404, {"error": f"no route {self.command} {self.path}"}

    def _break(self, fault: int | str | None) -> None:
        if isinstance(fault, int):
            self._send(fault, {"error": f"it broke\x1b[31m\nfor {self.headers['X-Api-Key']}"})
        elif fault == "garbage":
            self._raw(200, b"<html>sign in to the network</html>")
        else:
            time.sleep(1.0 if fault == "hang" else 0)
            self.close_connection = True
            self.connection.close()

    def _send(self, status: int, answer: Any) -> None:
        self._raw(status, json.dumps(answer).encode())

    def _raw(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing in the tests' output."""


@pytest.fixture()
def platform(monkeypatch: pytest.MonkeyPatch) -> Iterator[Platform]:
    server = Platform()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    monkeypatch.setenv("WHILEAI_PLATFORM_URL", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("WHILEAI_API_KEY", KEY)
    yield server
    server.shutdown()
    server.server_close()


# ---------------------------------------------------------------------------------------------- results


@pytest.fixture(scope="session")
def made() -> Json:
    """Results as report.py makes them, of made-up records: four arms, two seeds."""
    arms, seeds = fake_runs.recipe.TABLE_ARMS, (17, 18)
    base, found = fake_runs.make(problems=20, steps=6, seeds=seeds, arms=arms)
    return json.loads(report.to_json(report.summarize(base, found, fake_runs.HEADER, arms, seeds, 4.0)))


@pytest.fixture()
def results(made: Json) -> Json:
    return copy.deepcopy(made)


@pytest.fixture(scope="session")
def drawn(made: Json) -> Json:
    return post.make_charts(made)


@pytest.fixture()
def quick(monkeypatch: pytest.MonkeyPatch, drawn: Json) -> None:
    """Charts drawn once for all the tests that are about something else."""
    monkeypatch.setattr(post, "make_charts", lambda _: drawn)


@pytest.fixture()
def run(tmp_path: Path, results: Json, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """post.py on `results` as they are when it is called: exit code, stdout, stderr."""

    def call(*flags: str, write: bool = True) -> tuple[int, str, str]:
        if write:
            (tmp_path / "results.json").write_text(json.dumps(results))
        code = post.main(["--results", str(tmp_path / "results.json"), "--out", str(tmp_path / "card"), *flags])
        return code, *capsys.readouterr()

    return call


def drop(results: Json, arm: str, say: bool = True) -> None:
    """Take an arm out, and say so or not."""
    for key in [key for key in results["arms"] if key.startswith(arm)]:
        del results["arms"][key]
    results["deltas"].pop(arm, None)
    if say:
        results["header"]["partial"].append(f"{arm} is missing")


# ---------------------------------------------------------------------------------------------- publishing


def test_publishes_the_whole_card(run: Any, platform: Platform, results: Json, quick: None) -> None:
    code, out, err = run()
    assert (code, err) == (0, "")
    assert "published as talk-credit" in out
    assert set(platform.runs) == {f"talk-credit-{arm}" for arm in ARMS}
    assert all(platform.experiment[part] for part in ("question", "hypothesis", "method", "measure", "decide"))
    assert {b["gradedBy"] for b in platform.behaviors.values()} == {"program"}
    for arm in ARMS:
        posted, row = platform.runs[f"talk-credit-{arm}"], results["arms"][arm]
        assert posted["status"] == "evaluated"
        assert posted["version"] == ("base" if arm == "untrained" else arm)
        scores = {e["behavior"]: e for e in posted["evals"]}
        assert scores["team-solves"]["score"] == pytest.approx(100 * row["mean"]["value"], abs=0.051)
        assert scores["team-solves"]["ci"] >= 100 * max(row["mean"]["value"] - row["mean"]["low"], 0) - 0.051
        assert scores["team-solves"]["n"] == 20
        other = results["arms"]["untrained" if arm == "untrained" else f"{arm}_untrained_partner"]
        assert scores["with-untrained-partner"]["score"] == pytest.approx(100 * other["mean"]["value"], abs=0.051)
        assert len(posted["train"]) == (0 if arm == "untrained" else 6)
        for part in ("Changed", "Moved", "Why", "Learned", "Reproduce"):
            assert f"**{part}.**" in posted["notes"]
        assert "Partial" not in posted["notes"]
        assert posted["record"]["data"]["nHoldout"] == 20
    traces = platform.figures["both-partners"]["figure"]["data"]
    assert [t["name"] for t in traces if t["type"] == "bar"] == ["with itself", "with an untrained partner"]
    assert traces[0]["y"] == [results["arms"][arm]["mean"]["value"] for arm in ARMS]


def test_twice_changes_nothing_and_posts_no_run_again(run: Any, platform: Platform, quick: None) -> None:
    run()
    state, calls = platform.state(), len(platform.calls)
    code, out, _ = run()
    assert code == 0
    assert platform.state() == state
    assert out.count("is there already") == len(ARMS)
    assert not [call for call in platform.calls[calls:] if call[1].startswith("/runs/")]


def test_new_results_replace_the_old(run: Any, platform: Platform, results: Json, quick: None) -> None:
    run()
    results["header"]["date"] = "2031-01-01"  # the same measurement on another day is not new
    assert run()[1].count("is there already") == len(ARMS)
    row = results["arms"]["ada"]
    row["score"] = [0.5, 0.6]
    row["mean"]["value"], row["mean"]["low"], row["mean"]["high"] = 0.55, 0.4, 0.7
    assert run()[1].count("is there already") == 0
    assert {e["score"] for e in platform.runs["talk-credit-ada"]["evals"] if e["behavior"] == "team-solves"} == {55.0}
    assert len(platform.runs) == len(ARMS)
    assert {len(r["train"]) for r in platform.runs.values()} == {0, 6}  # no curve is there twice


@pytest.mark.parametrize(
    ("fault", "answer_first"),
    [("drop", False), ("drop", True), (500, False)],
    ids=["call lost", "answer lost", "refused once"],
)
def test_broken_off_at_any_call_then_completed(
    made: Json, platform: Platform, fault: int | str, answer_first: bool
) -> None:
    """Break every single call of a publish in turn; the run after it must give what an unbroken one gives."""
    plan = post.publication(made)

    def publish() -> None:
        post.send(lambda tracked: post.publish(plan, tracked, lambda _: None), KEY, "talk-credit")

    publish()
    whole, count = platform.state(), len(platform.calls)
    assert count > 30
    for number in range(1, count + 1):
        platform.agents, platform.behaviors, platform.experiment, platform.figures, platform.runs = {}, {}, None, {}, {}
        platform.calls, platform.fault, platform.answer_first = [], (number, fault), answer_first
        platform.once = True
        with pytest.raises(post.PublishError, match=r"run the same command again|broke off|did not arrive"):
            publish()
        publish()
        assert platform.state() == whole


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (401, "refused the key (401): check WHILEAI_API_KEY"),
        (500, "it broke"),
        (429, "(429)"),
        ("drop", "the connection broke off"),
        ("hang", "did not answer in time"),
        ("garbage", "in a form that the client does not read"),
    ],
)
@pytest.mark.parametrize("at", [1, 12])
def test_a_failing_platform_is_one_clear_line(
    run: Any,
    platform: Platform,
    fault: int | str,
    words: str,
    at: int,
    monkeypatch: pytest.MonkeyPatch,
    quick: None,
    tmp_path: Path,
) -> None:
    if fault == "hang":
        import functools

        import whileai.platform

        monkeypatch.setattr(whileai.platform, "_request", functools.partial(whileai.platform._request, timeout=0.2))
    platform.fault = (at, fault)
    code, out, err = run()
    assert code == 1
    assert err.count("\n") == 1
    assert err.startswith("post.py: not published: ")
    assert words in err
    assert "\x1b" not in err
    assert KEY not in out + err
    assert (tmp_path / "card" / "card.html").exists()


def test_a_refused_key(run: Any, platform: Platform, monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    monkeypatch.setenv("WHILEAI_API_KEY", "zp_wrong")
    code, _, err = run()
    assert code == 1
    assert "refused the key (401)" in err
    assert "zp_wrong" not in err
    assert not platform.runs


@pytest.mark.parametrize("key", ["zp_a\nb", "zp é", "zp a"])
def test_a_key_that_cannot_be_one_is_not_sent(
    run: Any, platform: Platform, monkeypatch: pytest.MonkeyPatch, key: str, quick: None
) -> None:
    monkeypatch.setenv("WHILEAI_API_KEY", key)
    code, _, err = run()
    assert (code, platform.calls) == (1, [])
    assert "holds characters that no key has" in err
    assert key not in err


def test_nobody_there(run: Any, monkeypatch: pytest.MonkeyPatch, quick: None) -> None:
    monkeypatch.setenv("WHILEAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("WHILEAI_PLATFORM_URL", "http://127.0.0.1:1")
    code, _, err = run()
    assert code == 1
    assert "could not reach http://127.0.0.1:1" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("key", [None, "", "  "])
def test_without_a_key_the_card_is_written(
    run: Any, platform: Platform, monkeypatch: pytest.MonkeyPatch, key: str | None, quick: None, tmp_path: Path
) -> None:
    monkeypatch.delenv("WHILEAI_API_KEY")
    if key is not None:
        monkeypatch.setenv("WHILEAI_API_KEY", key)
    code, out, err = run()
    assert (code, err, platform.calls) == (0, "", [])
    assert out.splitlines()[-1] == "not published: WHILEAI_API_KEY is not set"
    assert (tmp_path / "card" / "card.html").stat().st_size > 10_000


def test_question_alone_needs_no_results_and_keeps_the_rest(run: Any, platform: Platform, tmp_path: Path) -> None:
    code, out, _ = run("--question", write=False)
    assert (code, out) == (0, "published the question\n")
    assert platform.experiment == {"question": fake_runs.recipe.QUESTION}
    assert not platform.runs
    assert not (tmp_path / "card").exists()
    platform.experiment["method"] = "as it was"
    run("--question", write=False)
    assert platform.experiment == {"question": fake_runs.recipe.QUESTION, "method": "as it was"}


def test_question_without_a_key_fails(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WHILEAI_API_KEY", raising=False)
    code, out, err = run("--question")
    assert (code, out) == (1, "")
    assert "set WHILEAI_API_KEY" in err


def test_what_the_runs_show_is_on_the_card(results: Json, drawn: Json) -> None:
    results["arms"]["raft"]["talk"]["copies_answer"][0] = 0.9  # of the first seed
    page, text = html.unescape(post.render_html(results, drawn)), post.render_markdown(results, drawn)
    shown = words.runs_show(results)
    assert any("names no other number: raft seed 17 (0.90 of the chats" in sentence for sentence in shown)
    for sentence in shown:
        assert sentence.replace("`", "") in page and sentence in text


def test_partial_results_are_called_partial_everywhere(
    run: Any, platform: Platform, results: Json, quick: None, tmp_path: Path
) -> None:
    drop(results, "raft")
    results["header"]["failed"].append("mixed seed 18 stopped")
    code, out, _ = run()
    assert code == 0
    words = "Partial results: raft is missing; mixed seed 18 stopped."
    assert words in out
    assert words in platform.experiment["notes"]
    assert all(words in posted["notes"] for posted in platform.runs.values())
    assert all(words in behavior["description"] for behavior in platform.behaviors.values())
    assert words in platform.figures["both-partners"]["caption"]
    page, text = ((tmp_path / "card" / name).read_text() for name in ("card.html", "card.md"))
    assert page.index(words) < page.index("<h1>")
    assert "<title>Partial: " in page
    assert text.index(words) < 300
    assert "talk-credit-raft" not in platform.runs


def test_a_run_of_older_results_is_named(run: Any, platform: Platform, results: Json, quick: None) -> None:
    run()
    drop(results, "raft")
    _, out, _ = run()
    assert "also holds the run talk-credit-raft" in out


# ---------------------------------------------------------------------------------------------- bad input


def _set(path: str, value: Any) -> Callable[[Json], None]:
    def change(results: Json) -> None:
        *parts, last = (int(p) if p.isdigit() else p for p in path.split("."))
        for part in parts:
            results = results[part]
        if value is KeyError:
            del results[last]
        else:
            results[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set("format", 99), "format 99"),
        (_set("arms.ada.mean.low", float("nan")), "arms.ada.mean.low"),
        (_set("arms.grpo.score.1", float("inf")), "arms.grpo.score"),
        (_set("arms.ada", KeyError), "arms.ada is missing"),
        (_set("arms.ada_untrained_partner", KeyError), "arms.ada_untrained_partner is missing"),
        (_set("arms.ada.mean.value", 0.99), "is not the mean of score"),
        (_set("arms.ada.curves.0.flat", KeyError), "arms.ada.curves.0.flat is missing"),
        (_set("deltas.ada.trained_pair.compare.word", KeyError), "deltas.ada.trained_pair.compare.word is missing"),
        (_set("chats.arms.grpo.0.turns", []), "chats.arms.grpo.0.turns: 0 of 4"),
        (_set("chats.arms.grpo.0.facts.0", 7), "is not of the kind"),
        (_set("cost.total", None), "cost.total"),
        (_set("checks.0", "fine"), "checks.0.check is missing"),
        (_set("header.config.group", "four"), "is not of the kind"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_results_say_what_and_where_and_go_nowhere(
    run: Any, platform: Platform, results: Json, change: Any, words: str, quick: None, tmp_path: Path
) -> None:
    change(results)
    code, out, err = run()
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert "results.json" in err
    assert platform.calls == []
    assert not (tmp_path / "card").exists()


@pytest.mark.parametrize("content", [None, b"", b'{"format": 1, "header": {"recipe": ', b"\xff\xfe", b"[]", b"null"])
def test_a_file_that_is_no_results(run: Any, platform: Platform, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "results.json").write_bytes(content)
    code, out, err = run(write=False)
    assert (code, out, platform.calls) == (2, "", [])
    assert str(tmp_path / "results.json") in err


def test_a_card_that_cannot_be_written(run: Any, tmp_path: Path, quick: None) -> None:
    (tmp_path / "card").write_text("a file")
    code, _, err = run()
    assert code == 2
    assert "card" in err
    assert (tmp_path / "card").read_text() == "a file"


# ---------------------------------------------------------------------------------------------- the card


class Page(html.parser.HTMLParser):
    """The text, the tags with their attributes, and the text of each element with an id."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self._hidden = "", 0
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._hidden += tag in ("style", "title")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("style", "title")

    def handle_data(self, data: str) -> None:
        self.text += data if not self._hidden else ""

    def classed(self, name: str) -> list[dict[str, str | None]]:
        return [attrs for _, attrs in self.tags if name in (attrs.get("class") or "").split()]


def poison(results: Json) -> Json:
    """Hostile words wherever a model or a file could put some."""
    for chats in results["chats"]["arms"].values():
        for chat in chats:
            chat["question"] = chat["facts"][0][0] = chat["gold"] = HOSTILE
            for turn in chat["turns"]:
                turn["text"] = HOSTILE + " " + turn["text"]
    results["checks"][0]["result"] = results["header"]["title"] = results["header"]["command"] = HOSTILE
    results["header"]["model"]["id"] = results["reliability"]["words"] = results["cost"]["unit"] = HOSTILE
    results["header"]["paper_url"] = "javascript:alert(1)"
    results["published"]["notes"] = [HOSTILE]
    return results


def assert_harmless(page: Page) -> None:
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "iframe", "object", "embed", "form", "base"}
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    links = [attrs.get(name) or "" for tag, attrs in page.tags for name in ("href", "src") if name in attrs]
    assert all(link.startswith(("#", "https://arxiv.org/", "data:,")) for link in links)
    for piece in (
        "<script>document.title='owned'</script>",
        "\"quoted\" 'single' &",
        "</p><img src=x onerror=alert(1)>",
        "{{ 7*7 }}",
    ):
        assert piece in page.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", page.text)
    assert "\\x1b[31mred" in page.text


def test_the_card_holds_the_numbers_and_needs_nothing_else(made: Json, drawn: Json) -> None:
    source = post.render_html(made, drawn)
    page = Page(source)
    words = " ".join(page.text.split()).replace("\xa0", " ")
    first, second = post.answer(made)
    assert words.index(first) < words.index(second) < words.index("What each rule changes")
    for arm, row in made["arms"].items():
        assert post.num(row["mean"]["value"], 3) in words, arm
    for both in made["deltas"].values():
        for delta in both.values():
            assert post.num(delta["matched"]["value"], 3, True) in words
            assert delta["flag"] is None or delta["flag"] in words
    for check in made["checks"]:
        assert " ".join(check["result"].split()) in words
    assert len(page.classed("example")) == sum(map(len, made["chats"]["arms"].values())) == 10
    assert len(page.classed("turn")) == 40
    pictures = [attrs for tag, attrs in page.tags if tag in ("svg", "img")]
    assert len(pictures) == 6
    assert all(attrs.get("role") == "img" and len(attrs.get("aria-label") or "") > 60 for attrs in pictures)
    assert "prefers-color-scheme: dark" in source
    assert not re.findall(r"(?:src|href|url\()\s*=?\s*[\"']?https?://(?!arxiv\.org/)", source)
    assert "Partial" not in source


def test_published_numbers_are_marked_and_none_is_ours(made: Json, drawn: Json) -> None:
    source = post.render_html(made, drawn)
    rows = re.findall(r'<tr class="pub">(.*?)</tr>', source, re.DOTALL)
    assert len(rows) == len(made["published"]["rows"])
    for row, published in zip(rows, made["published"]["rows"], strict=True):
        cells = " ".join(Page(row).text.split())
        assert cells.startswith("published ")
        assert post.num(published["mean"]) in cells
    assert made["published"]["hardware"] in source
    assert "Not the same measurement as ours" in source


def test_hostile_words_are_text_in_the_page_and_in_markdown(results: Json, drawn: Json) -> None:
    assert_harmless(Page(post.render_html(poison(results), drawn)))
    text = post.render_markdown(results, drawn)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)
    outside = re.sub(r"^(`{3,})text\n.*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert "# no heading" not in [line.strip() for line in outside.splitlines()]
    assert "<script>" in text


def test_hostile_words_stay_text_in_the_charts(results: Json) -> None:
    results["cost"]["unit"] = "</text><script>alert(1)</script> $\\frac$"
    charts = post.make_charts(results)
    assert "<script>" not in charts["cost"]["svg"]
    assert "<script>" not in post.inline(charts["cost"]["svg"], '"><script>')


def test_private_numbers_are_marked_and_nothing_around_them() -> None:
    def hits(text: str, *private: str) -> list[str]:
        pieces = post.marked(text, private)
        assert "".join(piece for piece, _ in pieces) == text
        return [piece for piece, hit in pieces if hit]

    assert hits("Ann lays 16 eggs, each sells for $2.", "16", "2") == ["16", "2"]
    assert hits("She eats three and bakes with four.", "3", "4") == ["three", "four"]
    assert hits("There are twenty five of them", "25") == ["twenty five"]
    assert hits("a total of 1,200 and 12", "1200") == ["1,200"]
    assert hits("$\\frac{1}{2}$ of it, or half", "1/2") == ["\\frac{1}{2}", "half"]
    assert hits("16 and 116 and 1.6", "16") == ["16"]
    assert hits("nothing here", "5") == hits("5 here") == []


def test_the_answer_says_what_is_open_and_what_is_not(results: Json) -> None:
    def matched(arm: str, low: float | None, high: float | None) -> None:
        results["deltas"][arm]["trained_pair"]["matched"] |= {"value": 0.1, "low": low, "high": high}

    for arm in ("ada", "raft", "mixed"):
        matched(arm, -0.1, 0.3)
    first, second = post.answer(results)
    best = max(("grpo", "ada", "raft", "mixed"), key=lambda arm: results["arms"][arm]["mean"]["value"])
    assert first.startswith(f"{words.NAMES[best]} has the highest mean share of held-out answers right: ")
    assert second.startswith("Which rule is best stays open")
    assert "each 95% interval includes zero" in second
    matched("ada", 0.05, 0.3)
    second = post.answer(results)[1]
    assert "Reinforce-Ada +0.10 [+0.05, +0.30] can be told apart from GRPO" in second
    assert second.endswith("RAFT +0.10 [−0.10, +0.30] and Mixed partners +0.10 [−0.10, +0.30] cannot.")
    matched("ada", -0.1, 0.3)
    matched("mixed", None, None)
    assert post.answer(results)[1].endswith(
        "RAFT +0.10 [−0.10, +0.30], and each 95% interval includes zero; Mixed partners +0.10 comes from one seed, "
        "which gives none."
    )
    matched("raft", None, None)
    assert post.answer(results)[1].endswith(
        "the difference from GRPO is Reinforce-Ada +0.10 [−0.10, +0.30], and its 95% interval includes zero; RAFT "
        "+0.10 and Mixed partners +0.10 come from one seed, which gives none."
    )
    for arm in ("ada", "raft", "mixed"):
        matched(arm, None, None)
    assert "one seed gives no interval over seeds" in post.answer(results)[1]
    results["deltas"] = {}
    assert "is open" in post.answer(results)[1]


def test_one_lucky_seed_is_not_named_the_best(results: Json) -> None:
    lucky = results["arms"]["mixed"]
    lucky |= {"seeds": [17], "score": [0.99], "gain": lucky["gain"][:1]}
    lucky["talk"] = {name: values[:1] for name, values in lucky["talk"].items()}
    lucky["mean"] |= {"value": 0.99, "low": None, "high": None, "over": None, "n_seeds": 1}
    best = max(("grpo", "ada", "raft"), key=lambda arm: results["arms"][arm]["mean"]["value"])
    several = f"Of the rules with several seeds, {words.NAMES[best]} has the highest mean"
    assert post.answer(results)[0].startswith(several)
    assert f"{results['arms'][best]['mean']['value']:.2f} (means over seeds" in words.runs_show(results)[0]
    for arm in ("grpo", "ada", "raft"):
        results["arms"][arm]["seeds"] = [17]
    assert post.answer(results)[0].startswith("Mixed partners has the highest mean")


def test_seeds_are_given_to_those_who_have_them(results: Json) -> None:
    problems = results["arms"]["grpo"]["mean"]["n_problems"]
    assert words.seed_words(results) == "seeds 17, 18"
    assert words.count_words(results) == f"{problems} problems, 2 seeds"
    results["arms"]["grpo"]["seeds"] = results["arms"]["ada"]["seeds"] = [17, 18, 19, 20]
    results["arms"]["mixed"]["seeds"] = [18, 19, 20]
    assert words.seed_words(results) == "seeds 17, 18, 19, 20 (grpo, ada); 17, 18 (raft); 18, 19, 20 (mixed)"
    assert words.count_words(results) == f"{problems} problems; seeds: 4 (grpo, ada), 2 (raft), 3 (mixed)"


def test_runs_that_end_no_better_than_the_untrained_pair_are_counted(results: Json) -> None:
    lows = {"grpo": [0.01, 0.0], "ada": [0.1, 0.01], "raft": [-0.1, -0.1], "mixed": [-0.01, 0.1]}
    for arm, values in lows.items():
        for gain, low in zip(results["arms"][arm]["gain"], values, strict=True):
            gain["low"] = low
    assert (
        "Runs not shown to be better than the untrained pair (difference by problem, 95% interval): GRPO 1 of 2 (seed "
        "18), Reinforce-Ada 0 of 2, RAFT 2 of 2 (seeds 17 and 18) and Mixed partners 1 of 2 (seed 17)."
    ) in words.runs_show(results)


def test_one_seed_gets_no_interval_over_seeds(results: Json, drawn: Json) -> None:
    mean = results["arms"]["ada"]["mean"]
    mean |= {"low": None, "high": None, "half": None, "over": None, "n_seeds": 1, "why": "one training seed"}
    assert "problems only, one training seed" in post.score_words(results["arms"]["ada"])
    assert "one seed" in Page(post.render_html(results, drawn)).text


def test_it_is_quick_imports_nothing_heavy_and_gives_the_same_bytes_each_time(made: Json, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(made))
    heavy = "{'torch', 'transformers', 'trl', 'datasets'}"
    code = f"import post, sys; rc = post.main(); print(sorted({heavy} & set(sys.modules))); sys.exit(rc)"
    env = {k: v for k, v in os.environ.items() if k != "WHILEAI_API_KEY"} | {"PYTHONPATH": str(ROOT)}
    start = os.times()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    end = os.times()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "[]"
    card = tmp_path / "card"
    written = {p.relative_to(card).as_posix(): p.read_bytes() for p in card.rglob("*") if p.is_file()}
    assert len(written) == 14
    assert written == post.card_files(made)
    # processor time, so that a busy machine does not fail it
    assert end.children_user + end.children_system - start.children_user - start.children_system < 5


# ---------------------------------------------------------------------------------------------- in a browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
MEASURE = """<body style="margin:0"><iframe src="card.html" style="border:0;width:390px;height:900px"></iframe>
<pre id="found"></pre><script>
document.querySelector("iframe").onload = e => {
  const d = e.target.contentDocument, text = [...d.querySelectorAll(".turn p")].map(p => p.textContent).join("\\n");
  document.getElementById("found").textContent = JSON.stringify({
    wide: d.scrollingElement.scrollWidth, title: d.title, scripts: d.scripts.length,
    chats: d.querySelectorAll("details.example").length, marks: d.querySelectorAll(".turn mark").length,
    shown: [...d.querySelectorAll("table .cell")].filter(c => c.getBoundingClientRect().right > 390).length,
    hostile: text.split("<script>document.title='owned'<\\/script>").length - 1,
    unnamed: [...d.querySelectorAll("svg, img")].filter(x => !(x.alt || x.getAttribute("aria-label"))).length,
    small: [...d.querySelectorAll("figure svg")].filter(x => x.getBoundingClientRect().width < 250).length,
  });
};
</script>"""


def browse(page: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """The page's DOM after loading, and what the console said."""
    command = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", "--enable-logging=stderr", "--log-level=0", "--virtual-time-budget=2000",
        *flags, "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_in_a_browser(results: Json, drawn: Json, tmp_path: Path) -> None:
    (tmp_path / "card.html").write_text(post.render_html(poison(results), drawn), encoding="utf-8")
    (tmp_path / "measure.html").write_text(MEASURE)
    dom, console = browse(tmp_path / "card.html", tmp_path / "profile")
    assert console == []
    assert_harmless(Page(dom))
    for row in results["arms"].values():
        assert post.num(row["mean"]["value"], 3) in Page(dom).text
    dom, console = browse(tmp_path / "measure.html", tmp_path / "profile", "--allow-file-access-from-files")
    assert console == []
    found = json.loads(Page(re.search(r'<pre id="found">.*?</pre>', dom, re.DOTALL)[0]).text)
    assert found["wide"] <= 390  # a phone does not scroll sideways
    assert (found["shown"], found["unnamed"], found["small"], found["scripts"]) == (0, 0, 0, 0)
    assert found["title"] != "owned"
    assert (found["chats"], found["hostile"]) == (10, 40)
    assert found["marks"] > 20


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [360, 768, 1030, 1045, 1200])
def test_no_table_leaves_its_card(
    width: int, results: Json, drawn: Json, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest name, seven seeds and the longest verdict in every row, three-digit differences with signs, minutes
    of a shared card."""
    for arm in ("mixed", "untrained"):
        monkeypatch.setitem(words.NAMES, arm, max(words.NAMES.values(), key=len))
    wide = copy.deepcopy(results)
    for row in wide["arms"].values():
        many = {"seeds": list(range(17, 24)), "score": [row["mean"]["value"]] * 7}
        many["pass_at_1"], many["pass_at_4"] = row["pass_at_1"][:1] * 7, row["pass_at_4"][:1] * 7
        many["gain"] = row["gain"] and row["gain"][:1] * 7
        row |= many | {"talk": {name: values[:1] * 7 for name, values in row["talk"].items()}}
    wide["cost"]["total"] |= {"minutes": 1146.2, "card_minutes": 243.7, "tokens": 140_648_505}
    wide["cost"]["card_minutes"] = dict.fromkeys(wide["cost"]["minutes"], 112.2)
    for arm in wide["cost"]["minutes"]:
        wide["cost"]["minutes"][arm]["total"] = 241.0
        wide["cost"]["chats"][arm]["training"] = 123_040
    for both in wide["deltas"].values():
        for delta in both.values():
            delta["compare"] |= {"word": "moved the wrong way", "delta": -0.271, "low": -0.300, "high": -0.241}
            seeds = [-0.271, -0.093, -0.327] * 2
            delta["matched"] |= {"value": -0.230, "low": -0.533, "high": -0.172, "per_seed": seeds}
    (tmp_path / "card.html").write_text(post.render_html(wide, drawn), encoding="utf-8")
    question = (
        "[...d.querySelectorAll('table')].filter(t => t.getBoundingClientRect().right > "
        "t.parentElement.getBoundingClientRect().right + 1).map(t => t.id || t.className)"
    )
    measure = re.sub(r"JSON\.stringify\(\{.*?\}\);", f"JSON.stringify({question});", MEASURE, flags=re.DOTALL)
    (tmp_path / "measure.html").write_text(measure.replace("width:390px", f"width:{width}px"))
    dom, console = browse(tmp_path / "measure.html", tmp_path / "profile", "--allow-file-access-from-files",
                          "--window-size=1400,1000")  # fmt: skip
    assert console == []
    assert json.loads(Page(re.search(r'<pre id="found">.*?</pre>', dom, re.DOTALL)[0]).text) == []
