"""The page in a real Chromium: what a model writes does nothing, what a reader does works, and what it looks like
(`make test-page`, which leaves its pictures in .cache/page)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks.browsing import make
from foul import ESCAPES, XSS
from made_runs import make_run

pytestmark = pytest.mark.slow
sync_api = pytest.importorskip("playwright.sync_api", reason="make test-page installs Playwright")
CHROMIUM = os.environ.get("PLAUDIT_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("there is no Chromium", allow_module_level=True)

CACHE = Path(__file__).parents[2] / ".cache"
PICTURES = CACHE / "page"
AXE = CACHE / "axe" / "node_modules" / "axe-core" / "axe.min.js"
TABS = ("curves", "answers", "pairs", "lanes", "settings", "table")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "ppo", steps=30, state="running")
    make_run(folder / "other", steps=20, seed=1, rate=1e-3)
    make_run(folder / "<img src=x onerror=window.hit=1>", steps=2, prompts=25, texts=XSS, references=XSS)
    make_run(folder / "escapes", steps=1, prompts=5, texts=ESCAPES)
    make_run(folder / "a, b 100%", steps=10, seed=2)
    make_plain(folder / "plain")
    make_episodes(folder / "episodes")
    make_run(folder / "wordless", steps=1, prompts=1, texts=["", " Four."])
    make_run(folder / "graded", steps=2, prompts=2, references=["\u202ebright", "\n".join(map(str, range(99)))])
    return folder


def make_plain(folder: Path) -> None:
    """A run whose judge is its only reward, whose sampler is its learner and which repeats its alarms."""
    make_run(folder, steps=12, seed=3)
    figures = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for one in figures:
        del one["reward/gold"]
        one |= {"kl/sampler": 1e-14, "unfinished": 0, "groups/equal": 0.0, "reward/first": one["step"] % 2}
    answers = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for one in answers:
        one["learner"] = [value + 1e-6 * place for place, value in enumerate(one["logprobs"])]
    about = {"severity": 1, "numbers": {}, "why": "It has settled.", "advice": "Try a lower rate."}
    alarms: list[dict[str, Any]] = [
        {"step": step, "sign": "entropy", "saw": f"it fell by {step}"} for step in (3, 5, 9)
    ]
    alarms += [{"step": step, "sign": "length", "saw": "<b>it grew</b>"} for step in range(4, 12)]
    files = {"metrics": figures, "samples": answers, "health": [one | about for one in alarms]}
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (folder / "samples.index.jsonl").unlink()


def make_episodes(folder: Path) -> None:
    """Answers of several turns: a call of a tool, its result, and what the policy makes of it."""
    make_run(folder, steps=1, prompts=1)
    answers = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    call = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": {"a": "<b>2</b>"}}}
    for one in answers:
        one["messages"] = [
            {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": "<i>5</i>"},
            {"role": "assistant", "content": "It is 5."},
        ]
        one["turns"] = [1, 2, len(one["ids"]) - 3]
    (folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in answers))
    (folder / "samples.index.jsonl").unlink()


@pytest.fixture(scope="module")
def address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(folder, tmp_path_factory.mktemp("cache")) as address:
        yield address


@contextmanager
def served(folder: Path, cache: Path) -> Iterator[str]:
    import plaudit

    source = str(Path(plaudit.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "PLAUDIT_CACHE": str(cache)}
    command = [sys.executable, "-m", "plaudit.commands.cli", "monitor", str(folder), "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield found[0]
        server.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


def until(page: Any, holds: str) -> None:
    """Wait until an expression is true. Playwright's own wait evaluates a string, which the page's policy forbids."""
    end = time.monotonic() + 30
    while not page.evaluate(holds):
        assert time.monotonic() < end, holds
        time.sleep(0.05)


class Visit:
    """A page and what went wrong on it."""

    def __init__(self, browser: Any, **context: Any):
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("dialog", lambda dialog: (self.wrong.append("dialog"), dialog.dismiss()))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.wrong.append(message.text))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def go(self, address: str, **state: str) -> Any:
        from urllib.parse import urlencode

        self.page.goto("about:blank")
        self.page.goto(f"{address}#{urlencode(state)}")
        self.page.wait_for_selector("#view > *")
        return self.page


@pytest.fixture
def visit(browser: Any) -> Iterator[Visit]:
    visit = Visit(browser)
    yield visit
    visit.context.close()
    assert visit.wrong == []


def test_a_hundred_scripts_of_a_model_are_text(visit: Visit, address: str, tmp_path: Path) -> None:
    assert len(XSS) == 100
    page = visit.go(address, run="<img src=x onerror=window.hit=1>", tab="answers", kind="train")
    page.get_by_role("button", name="More").click()
    until(page, "document.querySelectorAll('#view .answer').length === 100")
    shown = page.eval_on_selector_all("#view .answer > .text", "all => all.map(one => one.textContent)")
    assert shown == XSS
    assert references(page, ".prompt") == [f"reference: {text}" for text in XSS[:25]]
    for place in range(0, 100, 9):
        page.locator("#view .answer").nth(place).click()
        page.wait_for_selector("dialog[open] .tokens span")
        assert page.locator("dialog .tokens").text_content() == XSS[place]
        page.keyboard.press("Escape")
    for tab in ("curves", "pairs", "lanes", "settings", "table"):
        visit.go(address, run="<img src=x onerror=window.hit=1>", tab=tab)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "export.html")
    page.goto((tmp_path / "export.html").as_uri())
    page.get_by_role("button", name="Answers").click()
    page.wait_for_selector("#view .answer")
    assert page.evaluate("window.hit") is None
    assert page.evaluate("document.querySelectorAll('img, iframe, object, video, a').length") == 0
    assert page.title() != "hit"
    assert not [url for url in visit.requests if not url.startswith((address, "about:", "blob:", "data:", "file:"))]


def test_what_a_terminal_or_a_reader_would_obey_is_visible(visit: Visit, address: str) -> None:
    assert len(ESCAPES) == 20
    page = visit.go(address, run="escapes", tab="answers")
    page.wait_for_selector(".answer")
    shown = page.eval_on_selector_all(".answer > .text", "all => all.map(one => one.textContent)")
    assert len(shown) == 20
    assert all(re.search(r"\\u[0-9a-f]{4}", text) for text in shown)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202e\u2066\u2028\ufeff]", "".join(shown))


def test_an_answer_without_words_says_so(visit: Visit, address: str) -> None:
    page = visit.go(address, run="wordless", tab="answers")
    page.wait_for_selector(".answer")
    shown = page.eval_on_selector_all(".answer > .text", "all => all.map(one => one.textContent)")
    assert shown == ["(an empty answer)", " Four."] * 2


def references(page: Any, within: str) -> list[str]:
    found = page.eval_on_selector_all(f"{within} > .text", "all => all.map(one => one.textContent)")
    return [text for text in found if text.startswith("reference")]


def test_a_prompts_reference_stands_below_it_once(visit: Visit, address: str) -> None:
    page = visit.go(address, run="graded", tab="answers")
    page.wait_for_selector(".answer")
    first, long = references(page, ".prompt")
    assert (first, long[:14]) == ("reference: \\u202ebright", "reference: 0\n1")
    heights = page.eval_on_selector_all(".prompt .text", "all => all.map(one => one.clientHeight)")
    assert max(heights) < 200 and len(heights) == 4, "it is cut as a long prompt is"
    page.locator(".answer").first.click()
    page.wait_for_selector("dialog[open] .tokens span")
    assert references(page, "dialog") == [first]
    page = visit.go(address, run="graded", tab="pairs", **{"with": "ppo"})
    page.wait_for_selector(".two .answer")
    assert references(page, ".prompt") == [first], "of the run that has one"
    for state in ({"tab": "answers"}, {"tab": "pairs"}):
        page = visit.go(address, run="other", **state)
        page.wait_for_selector(".answer")
        assert not references(page, ".prompt")
    page.locator(".answer").first.click()
    page.wait_for_selector("dialog[open] .tokens span")
    assert not references(page, "dialog")
    assert "null" not in page.locator("dialog").inner_text()


def test_a_reader_finds_sorts_and_opens_answers(visit: Visit, address: str) -> None:
    page = visit.go(address, run="ppo", tab="answers")
    page.get_by_role("slider").fill("9")
    until(page, "document.querySelector('#view h3')?.textContent.startsWith('Step 10')")
    page.get_by_label("Search in prompts and answers").fill("great")
    page.get_by_label("all steps").check()
    texts = "[...document.querySelectorAll('.answer > .text')].map(one => one.textContent)"
    until(page, f"(found => found.length && found.every(one => one.includes('great')))({texts})")
    page.get_by_label("Sort by").select_option("part:gold")
    facts = "[...document.querySelectorAll('.answer > .facts')].map(one => one.textContent)"
    gold = f"{facts}.map(one => Number(one.match(/gold (\\S+?)(advantage|length)/)[1]))"
    until(page, f"(found => found.length > 9 && found.every((v, i) => !i || v <= found[i - 1]))({gold})")
    page.locator(".answer").first.click()
    tokens = page.locator("dialog .tokens")
    for way in ("gap", "entropy", "advantage"):
        page.get_by_label("Colour by").select_option(way)
        colours = page.eval_on_selector_all("dialog .tokens span", "all => all.map(one => one.style.backgroundColor)")
        assert all(colours)
        assert (len(set(colours)) > 1) == (way != "advantage" and len(colours) > 1)
    tokens.focus()
    page.keyboard.press("ArrowRight")
    assert "sampler -" in page.locator("dialog .about").inner_text()


def test_two_runs_stand_side_by_side(visit: Visit, address: str) -> None:
    page = visit.go(address, run="ppo", tab="settings", **{"with": "other"})
    rows = page.eval_on_selector_all(
        "tbody tr", "all => all.map(one => [...one.children].map(cell => cell.textContent))"
    )
    assert rows == [["seed", "0", "1"], ["optimizer.learning_rate", "0.0003", "0.001"]]
    page = visit.go(address, run="ppo", tab="pairs", **{"with": "other"})
    page.wait_for_selector(".two .answer")
    assert page.locator(".two > div").count() == 2
    assert page.locator(".two > div:nth-child(2) .answer").count() > 0
    page = visit.go(address, run="ppo", tab="curves", **{"with": "other"})
    page.wait_for_selector(".uplot canvas")
    assert page.locator(".chart").count() >= 8
    values = page.eval_on_selector_all(".legend .u-value", "all => all.map(one => one.textContent)")
    assert all(values), "without a pointer, each line of both runs has its latest value"
    assert "Step 15, entropy" in page.locator(".alarms").inner_text()
    assert page.locator(".chart h3", has_text="Judge and gold").count() == 1


def colours(page: Any, where: str) -> list[str]:
    found = page.eval_on_selector_all(
        f"{where} .swatch", "all => all.map(one => getComputedStyle(one).backgroundColor)"
    )
    return [str(one) for one in found]


def painted(page: Any, chart: int) -> set[str]:
    """The colours of a chart's opaque points."""
    found = page.evaluate(
        f"""(canvas => {{
          const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
          const found = new Set();
          for (let at = 0; at < data.length; at += 4)
            if (data[at + 3] === 255) found.add(`rgb(${{data[at]}}, ${{data[at + 1]}}, ${{data[at + 2]}})`);
          return [...found];
        }})(document.querySelectorAll('.chart canvas')[{chart}])"""
    )
    return set(found)


def test_each_of_many_runs_has_a_colour_that_stays_its_own_and_each_figure_its_dashes(
    visit: Visit, address: str, tmp_path: Path
) -> None:
    page = visit.go(address, run="ppo", tab="curves")
    for name in ("other", "a, b 100%", "<img src=x onerror=window.hit=1>", "plain"):
        page.get_by_role("checkbox", name=f"Compare {name}", exact=True).check()
    until(page, "document.querySelectorAll('.chart:first-child .legend tbody tr').length === 5")
    mine = colours(page, ".chips")
    assert len(set(mine)) == 5
    assert colours(page, ".chart:first-child .legend") == mine
    assert set(colours(page, "#list")) == set(mine)
    assert set(mine) <= painted(page, 0)
    dashes = page.eval_on_selector_all(
        ".chart:first-child .line path", "all => all.map(one => one.getAttribute('stroke-dasharray'))"
    )
    assert len(dashes) == len(set(dashes)) == 2
    page.get_by_role("button", name="Compare no longer with a, b 100%").click()
    until(page, "document.querySelectorAll('.chart:first-child .legend tbody tr').length === 4")
    assert colours(page, ".chips") == [*mine[:2], *mine[3:]]
    page.get_by_role("button", name=re.compile("^plain")).first.click()  # opened, it stands first and keeps its colour
    until(page, "document.querySelector('h2').textContent === 'plain'")
    assert colours(page, ".chips") == [mine[4], mine[0], mine[1], mine[3]]
    page.get_by_role("checkbox", name="Compare a, b 100%", exact=True).check()
    until(page, "document.querySelectorAll('.chart:first-child .legend tbody tr').length === 5")
    assert sorted(colours(page, ".chips")) == sorted(mine)
    page.reload()
    until(page, "document.querySelectorAll('.chart:first-child .legend tbody tr').length === 5")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    download.value.save_as(tmp_path / "export.html")
    page.goto((tmp_path / "export.html").as_uri())
    until(page, "document.querySelectorAll('.chart:first-child .legend tbody tr').length === 5")
    assert sorted(colours(page, ".chips")) == sorted(mine)
    assert painted(page, 1), "the rewards of the answers"
    for name, row in (("All runs", ".runs tbody tr"), ("Settings", "tbody tr"), ("One prompt", ".two > div")):
        page.get_by_role("button", name=name).click()
        until(page, f"document.querySelectorAll('{row}').length >= 2")
    assert page.evaluate("window.hit") is None


def test_more_runs_than_colours_of_the_palette_still_have_one_each(visit: Visit, address: str) -> None:
    page = visit.go(address, run="ppo", tab="curves")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        found = page.evaluate("Array.from({length: 40}, (_, place) => plaudit.colour(place, true))")
        assert len(set(found)) == 40


def test_all_runs_are_a_table_that_is_sorted_by_any_column(visit: Visit, address: str) -> None:
    page = visit.go(address, run="ppo", tab="table")
    page.wait_for_selector(".runs tbody tr")
    names = "[...document.querySelectorAll('.runs tbody th')].map(one => one.textContent)"
    heads = page.eval_on_selector_all(".runs thead th", "all => all.map(one => one.textContent)")
    assert heads[:4] == ["run", "state", "method", "step"]
    assert {"reward/mean, last", "reward/mean, best", "kl/reference, last", "seed", "optimizer.learning_rate"} <= set(
        heads
    )
    assert "rewards.0.kind" not in heads, "it is the same in all runs"
    page.get_by_role("button", name="step", exact=True).click()
    until(page, "document.querySelector('th[aria-sort=descending]')?.textContent.startsWith('step')")
    assert page.evaluate(names)[:3] == ["ppo", "other", "plain"]
    page.get_by_role("button", name="step", exact=True).press("Enter")
    until(page, "document.querySelector('th[aria-sort=ascending]')?.textContent.startsWith('step')")
    assert page.evaluate(names)[-3:] == ["plain", "other", "ppo"]
    assert page.evaluate("document.activeElement.textContent").startswith("step")
    page.get_by_role("button", name="reward/gold, last").click()
    until(page, "document.querySelector('th[aria-sort=descending]')?.textContent.startsWith('reward/gold')")
    assert page.evaluate(names)[-1] == "plain", "what a run lacks is last"
    page.locator(".runs").get_by_role("checkbox", name="Compare other", exact=True).check()
    page.get_by_label("only those compared").check()
    assert sorted(page.evaluate(names)) == ["other", "ppo"]
    assert page.evaluate("location.hash").count("other") == 1
    page.locator(".runs tbody").get_by_role("button", name="other").click()
    page.wait_for_selector(".chart")
    assert page.locator("h2").first.inner_text() == "other"


def test_panels_without_content_are_hidden_until_they_are_asked_for(visit: Visit, address: str) -> None:
    page = visit.go(address, run="plain", tab="curves")
    titles = (
        "[...document.querySelectorAll('.chart .uplot')].map(one => one.closest('.chart').innerText.split('\\n')[0])"
    )
    titles += ".filter(one => !one.startsWith('Rewards of'))"  # which come when they are counted
    page.wait_for_selector(".chart")
    shown = page.evaluate(titles)
    assert "Judge" not in shown
    assert not [one for one in shown if one.startswith(("KL between", "Shares"))]
    assert {"Reward", "Other rewards", "Entropy, nats a token"} <= set(shown)
    page.get_by_role("button", name="3 panels without content: show").click()
    until(page, f"{titles}.includes('Judge')")
    assert len(page.evaluate(titles)) == len(shown) + 3
    assert page.get_by_role("button", name="3 panels without content: hide").count() == 1


def test_curves_are_smoothed_before_the_values_themselves(visit: Visit, address: str) -> None:
    page = visit.go(address, run="plain", tab="curves")
    figures = page.evaluate("plaudit.ask('metrics', {run: 'plain'})")["reward/first"]
    page.get_by_label("Smoothing").focus()
    page.get_by_label("Smoothing").fill("0.9")
    until(page, "location.hash.includes('smooth=0.9')")
    mean = sum(one * 0.9 ** (11 - place) for place, one in enumerate(figures))
    weight = sum(0.9**place for place in range(12))
    row = page.locator(".chart", has=page.locator("h3", has_text="Other rewards")).locator("tbody tr")
    until(page, "document.querySelector('.legend thead').textContent.includes('smoothed')")
    assert row.locator("td").inner_text() == f"{mean / weight:.4g} ({figures[-1]})"
    assert page.evaluate("document.activeElement.id") == "smooth"


def test_rewards_of_answers_are_shades_and_their_numbers_are_read_by_pointing(visit: Visit, address: str) -> None:
    page = visit.go(address, run="ppo", tab="curves")
    chart = page.locator(".chart", has=page.locator("h3", has_text="Rewards of the answers"))
    chart.locator(".u-over").hover(position={"x": 60, "y": 80})
    told = chart.locator(".about").inner_text()
    assert re.fullmatch(r"step \d+, reward \S+ to \S+: \d+ of 1[56] answers", told)
    page.mouse.move(2, 2)
    until(page, "[...document.querySelectorAll('.about')].some(one => one.textContent.startsWith('450 answers'))")


def test_an_alarm_is_shown_once_and_what_was_dismissed_stays_away(visit: Visit, address: str) -> None:
    page = visit.go(address, run="plain", tab="curves")
    alarms = page.locator(".alarms")
    told = alarms.inner_text()
    assert "2 alarms" in told
    assert "Steps 3 to 9 (3 times), entropy: it fell by 9" in told
    assert "Steps 4 to 11 (8 times), length: <b>it grew</b>" in told
    alarms.get_by_role("button", name="Dismiss entropy").click()
    until(page, "document.querySelector('.alarms h3').textContent === '1 alarm'")
    page.reload()
    page.wait_for_selector(".alarms h3")
    assert "entropy" not in alarms.inner_text()
    visit.go(address, run="ppo", tab="curves")
    assert "Step 15, entropy" in page.locator(".alarms").inner_text(), "another run's alarm is another one"
    visit.go(address, run="plain", tab="curves")
    page.get_by_role("button", name="1 dismissed: show again").click()
    until(page, "document.querySelector('.alarms h3').textContent === '2 alarms'")


def test_an_episode_is_a_chat_with_folded_calls_and_what_the_environment_said_in_grey(
    visit: Visit, address: str
) -> None:
    page = visit.go(address, run="episodes", tab="answers")
    page.locator(".answer").first.click()
    until(page, "document.querySelectorAll('.turn').length === 3")
    assert page.locator(".turn b").all_inner_texts() == ["assistant", "tool (add)", "assistant"]
    assert page.locator(".turn.heard .text").all_inner_texts() == ["<i>5</i>"]
    assert not page.locator(".turn code").is_visible()
    page.get_by_text("calls add").click()
    assert page.locator(".turn code").inner_text() == '{"a":"<b>2</b>"}'
    assert page.locator(".tokens span.heard").evaluate_all("all => all.map((one) => one.dataset.place)") == ["1", "2"]
    page.locator(".tokens span").nth(1).hover()
    assert "said by the environment" in page.locator(".about").inner_text()


def test_tokens_are_coloured_by_what_varies_among_them(visit: Visit, address: str) -> None:
    page = visit.go(address, run="plain", tab="answers")
    page.locator(".answer").first.click()
    choice = page.get_by_label("Colour by")
    assert choice.input_value() == "entropy"
    assert choice.locator("option").all_inner_texts()[-2:] == [
        "log-prob gap (learner - sampler) (the same for all)",
        "advantage (the same for all)",
    ]
    visit.go(address, run="ppo", tab="answers")
    page.locator(".answer").first.click()
    assert choice.input_value() == "gap"


@pytest.mark.parametrize(
    ("stretch", "expected"),
    [
        ("0.03, 0.98, 6", [0.2, 0.4, 0.6, 0.8]),
        ("71.3, 101.2, 5", [80, 90, 100]),
        ("0, 59, 4", [0, 20, 40]),
        ("100, 400, 6", [120, 180, 240, 300, 360]),
        ("0, 7300, 4", [0, 3600, 7200]),
        ("0, 1e9, 4", [0, 1e9]),
    ],
)
def test_ticks_of_lanes_are_round_times(visit: Visit, address: str, stretch: str, expected: list[float]) -> None:
    page = visit.go(address, run="ppo", tab="lanes")
    assert page.evaluate(f"plaudit.ticks({stretch})") == expected


def test_on_a_phone_the_first_answer_is_in_sight(browser: Any, address: str) -> None:
    visit = Visit(browser, viewport={"width": 420, "height": 800})
    for beside in ("", "ppo,other,plain"):
        page = visit.go(address, run="ppo", tab="answers", **{"with": beside})
        page.wait_for_selector(".answer")
        assert page.locator(".answer").first.bounding_box()["y"] <= 430
        assert not page.get_by_label("Sort by").is_visible()
    page.locator("summary", has_text="Search, sort").click()
    page.get_by_label("Sort by").select_option("reward")
    page.reload()
    page.wait_for_selector(".answer")
    assert page.get_by_label("Sort by").is_visible(), "what limits the list is not hidden"
    visit.context.close()
    assert visit.wrong == []


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    make(folder / "million", 1_000_000)
    make_run(folder / "ppo", steps=60, state="running")
    make_run(folder / "ppo-high-rate", seed=1, rate=1e-3)
    make_run(folder / "seeds" / "failed", state="failed", steps=12)
    (folder / "new").mkdir()
    (folder / "new" / "settings.yaml").write_text("method: grpo\n")
    return folder


@pytest.fixture(scope="module")
def states(all_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, dict[str, str]]]]:
    """Each state of the page: its address, and what the address asks for."""
    with (
        served(all_runs, tmp_path_factory.mktemp("cache")) as full,
        served(tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("cache")) as bare,
    ):
        yield {
            "running": (full, {"run": "ppo"}),
            "done": (full, {"run": "ppo-high-rate"}),
            "failed": (full, {"run": "seeds/failed"}),
            "new": (full, {"run": "new"}),
            "empty": (bare, {}),
            "two": (full, {"run": "ppo", "with": "ppo-high-rate", "smooth": "0.8"}),
            "million": (full, {"run": "million"}),
        }


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 420])
def test_every_state_fits_the_window_and_axe_finds_nothing_serious(
    browser: Any, all_runs: Path, states: dict[str, tuple[str, dict[str, str]]], width: int, scheme: str
) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    visit = Visit(browser, viewport={"width": width, "height": 800}, color_scheme=scheme)
    found = []
    for state, (address, asked) in states.items():
        for tab in TABS if state == "two" else ("curves", "answers") if asked else ("curves",):
            if state == "running":  # however long the tests before took
                (all_runs / "ppo" / "log.txt").touch()
            page = visit.go(address, tab=tab, **asked)
            page.wait_for_timeout(200)
            page.screenshot(path=PICTURES / f"{state}-{tab}-{width}-{scheme}.png")
            found += [(state, tab, one) for one in serious(page)]
            if page.evaluate("document.documentElement.scrollWidth - innerWidth") > 0:
                found.append((state, tab, "is wider than the window"))
    page = visit.go(states["running"][0], tab="answers", run="ppo")
    page.locator(".answer").first.click()
    page.wait_for_selector("dialog[open] .tokens span")
    found += [("answer", "gap", one) for one in serious(page)]
    page.screenshot(path=PICTURES / f"answer-{width}-{scheme}.png")
    visit.context.close()
    assert (found, visit.wrong) == ([], [])


def serious(page: Any) -> list[str]:
    """What axe calls serious or critical: the rule and the element."""
    assert AXE.exists(), "axe is not here: make test-page fetches it by npm"
    page.evaluate(AXE.read_text(encoding="utf-8"))
    return [
        f"{one['id']}: {node['html'][:120]}: {node['failureSummary'][:200]}"
        for one in page.evaluate("axe.run()")["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def test_a_million_answers_are_there_within_a_second_or_two(
    browser: Any, states: dict[str, tuple[str, dict[str, str]]]
) -> None:
    """The limit is generous for busy machines; docs/monitor.md has what was measured."""
    visit = Visit(browser)
    address, asked = states["million"]
    begun = time.monotonic()
    page = visit.go(address, tab="answers", **asked)
    page.wait_for_selector("#view .answer")
    assert time.monotonic() - begun < 4
    assert "of 64 answers" in page.get_by_role("status").inner_text()
    visit.context.close()
    assert visit.wrong == []


def test_the_page_is_used_by_keys_only(visit: Visit, address: str) -> None:
    page = visit.go(address, run="ppo", tab="curves")
    keys = page.keyboard

    def tab_to(holds: str) -> None:
        for _ in range(60):
            keys.press("Tab")
            if page.evaluate(f"document.activeElement.{holds}"):
                return
        raise AssertionError(f"Tab reaches nothing whose {holds}")

    tab_to("textContent === 'Answers'")
    keys.press("Enter")
    page.wait_for_selector("#view .answer")
    assert page.evaluate("document.activeElement.textContent") == "Answers"
    tab_to("type === 'range'")
    keys.press("Home")
    until(page, "document.querySelector('#view h3').textContent.startsWith('Step 1,')")
    keys.press("ArrowRight")
    until(page, "document.querySelector('#view h3').textContent.startsWith('Step 2,')")
    tab_to("className === 'answer'")
    keys.press("Enter")
    page.wait_for_selector("dialog[open] .tokens span")
    assert page.evaluate("document.querySelector('dialog').contains(document.activeElement)")
    keys.press("Escape")
    page.wait_for_selector("dialog", state="hidden")
    assert page.evaluate("document.activeElement.className") == "answer"
    shown = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert shown != "none"


def test_a_run_that_goes_on_is_followed_and_its_reader_left_in_peace(visit: Visit, address: str, folder: Path) -> None:
    def goes_on(steps: int) -> None:
        later = make_run(folder.parent / f"later{steps}", steps=steps, state="running")
        for file in later.iterdir():
            (folder / "grows" / file.name).write_bytes(file.read_bytes())

    (folder / "grows").mkdir()
    goes_on(10)
    page = visit.go(address, run="grows", tab="curves")
    legend = "document.querySelector('.chart .legend').textContent"
    until(page, f"{legend}.includes('step 10')")
    page.locator("summary", has_text="further figure").click()
    chart = page.locator(".chart .u-over").nth(2)
    chart.scroll_into_view_if_needed()
    chart.drag_to(chart, source_position={"x": 30, "y": 50}, target_position={"x": 150, "y": 50})
    page.mouse.move(2, 2)
    above = page.evaluate("scrollY")
    box = page.locator(".chart canvas").nth(2).bounding_box()
    axis = {"x": box["x"], "y": box["y"] + box["height"] - 26, "width": box["width"], "height": 26}
    zoomed = page.screenshot(clip=axis)
    goes_on(20)
    until(page, f"{legend}.includes('step 20')")
    assert page.evaluate("document.querySelector('#view details').open")
    assert page.evaluate("scrollY") == above
    assert page.screenshot(clip=axis) == zoomed
    page = visit.go(address, run="grows", tab="answers")
    until(page, "document.querySelector('#view h3')?.textContent.startsWith('Step 20')")
    goes_on(30)
    until(page, "document.querySelector('input[type=range]').max === '29'")
    assert page.locator("#view h3").first.inner_text().startswith("Step 20"), "what is being read stays"


def test_a_view_that_was_left_before_it_came_does_not_come(visit: Visit, address: str) -> None:
    page = visit.go(address, run="ppo", tab="settings")
    page.route("**/api/metrics*", lambda route: (time.sleep(0.7), route.continue_()))
    page.get_by_role("button", name="Curves").click()
    page.get_by_role("button", name="Answers").click()
    page.wait_for_selector("#view .answer")
    page.wait_for_timeout(1500)
    assert page.locator("#view .answer").count() > 0
    assert page.locator("#view .chart").count() == 0


def test_without_javascript_of_ours_nothing_runs(visit: Visit, address: str) -> None:
    """The policy stops what textContent could not."""
    page = visit.go(address, run="ppo", tab="settings")
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hit=1\">')")
    page.wait_for_timeout(300)
    assert page.evaluate("window.hit") is None
    assert any("Content Security Policy" in text or "onerror" in text for text in visit.wrong)
    visit.wrong.clear()
