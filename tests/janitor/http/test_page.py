"""The status page in a real browser: contents, untrusted names, and updates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from janitor.state.base import State, TopicCount
from janitor.state.figures import ConsumerFigures
from janitor.state.records import MessagesLeft, RunRecord, StoreBytes
from janitor.state.topic_history import save_sizes, save_topics
from janitor.status.status import HeldTopic, OpenTransaction, Status, TopicFigures
from tests.builders import DAY, HOUR, MINUTE, SECOND
from tests.janitor.http import statuses
from tests.janitor.http.browser import Browser, Page
from tests.janitor.http.conftest import ARGUMENTS, HttpKit
from tests.janitor.http.statuses import HOSTILE, FixedViews
from tests.janitor.state.entries import entry
from tms_core.clock import SystemClock
from tms_core.topic import TopicId, TopicMetadata

#: The page shows the server's status and the plot.
DRAWN = "document.documentElement.dataset.shown"

#: The event of a return to the tab, which refreshes the page.
COME_BACK = "document.dispatchEvent(new Event('visibilitychange'))"

#: The visible texts whose contrast is below WCAG's minimum (4.5), with their contrasts.
LOW_CONTRAST = """(() => {
  const rgba = color => { const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const linear = value => value <= .04045 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r / 255) + .7152 * linear(g / 255) + .0722 * linear(b / 255);
  const ground = node => { for (; node; node = node.parentElement) {
    const color = rgba(getComputedStyle(node).backgroundColor); if (color[3]) return color; } };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), low = [];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement, style = getComputedStyle(node);
    if (!walker.currentNode.data.trim() || !node.getClientRects().length || node.tagName.endsWith("SCRIPT")) continue;
    const ink = rgba(node.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [dark, bright] = [light(ink), light(ground(node))].sort((a, b) => a - b);
    if ((bright + .05) / (dark + .05) < 4.5) low.push([node.className, walker.currentNode.data]);
  }
  return low;
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser.start(tmp_path_factory.mktemp("browser")) as started:
        yield started


class Pages:
    """Browser tabs with status pages; they use the system clock, because the page compares it with the server's."""

    def __init__(self, browser: Browser, serve: Callable[..., HttpKit]) -> None:
        self.browser, self.serve = browser, serve
        self.now_ms = SystemClock().now_ms()
        self.opened: list[Page] = []

    def open(self, kit: HttpKit, width: int = 1280, **features: str) -> Page:
        """Open a page and wait until it shows the status."""
        page = self.browser.open()
        self.opened.append(page)
        page.resize(width, 800)
        page.prefer(**{"prefers_color_scheme": "light", **features})
        page.go(f"{kit.url}/")
        page.until(DRAWN)
        return page

    def show(self, status: Status, past: tuple[RunRecord, ...] = (), width: int = 1280, **features: str) -> Page:
        return self.open(self.serve(FixedViews(status, past)), width, **features)


@pytest.fixture
def pages(browser: Browser, serve: Callable[..., HttpKit]) -> Iterator[Pages]:
    tabs = Pages(browser, serve)
    yield tabs
    for page in tabs.opened:
        page.close()


def test_page_of_a_running_janitor_fills_every_part(pages: Pages) -> None:
    page = pages.show(statuses.full(pages.now_ms), statuses.runs(pages.now_ms))
    assert page.text("h1") == "Healthy. A run is in progress."
    assert page.run("document.title") == "Healthy · janitor"
    expected = {
        "#store": ["leveldb data/messaging"],
        "#updated": ["Last updated", "(", ")"],
        "#facts": ["Applies", "every 60 s", "up for 11 d", "✓ done", "took 1.4 s", "1,400 deleted, 210 inverted"],
        "#running": ["messages", "payloads", "default:orders", "182,340", "r-20481"],
        "#held": ["finance:ledger", "protected", "12,400 rows, 48 MB", "oldest 40 d ago", "not released automatically"],
        "#aside": ["No topic is quarantined, and nothing is paused."],
        "#overdue": [
            "Not deleted by the last run: 640 message rows (expired).",
            "default:audit",
            "480",
            "system:time.events",
        ],
        "#snapshot": ["s old", "1,731", str((pages.now_ms - 31 * HOUR) * 10**6), "1 d 7 h ago"],
        "#boundary": [
            "1 d 2 h ago",
            str((pages.now_ms - 26 * HOUR) * 10**6),
            "r-20180",
            "younger transactions could still",
        ],
        "#guards": ["! clock warns:", "2 s behind", "monotonic", "-2.1 s"],
        "#phases": ["messages", "610 ms", "sync", "11 ms"],
        "#kept": ["referenced by a message", "1,204 rows", "of undecided transactions"],
        "#statistics": [
            "5 h ago",
            "900,000, 100,000",
            "25,000 rows, 2.5\u00a0%",
            "17",
            "default:orders, generation 3",
            "for 6 h by transaction",
        ],
        "#queues": ["65", "50 of 65, biggest first", "9,400,000", "2.0 GB", "kept for"],
        "footer": ["tms-janitor 0.1.0", "/metrics"],
    }
    seen = {part: page.text(part) for part in expected}
    assert [(part, word) for part, words in expected.items() for word in words if word not in seen[part]] == []
    assert "unrecognized" not in seen["#kept"], "a reason without rows is not shown"
    assert page.console == []


def test_page_before_adoption_shows_the_commands_and_no_blanks(pages: Pages) -> None:
    page = pages.show(statuses.empty(pages.now_ms))
    assert page.text("h1") == "Action required. This store is not adopted. Nothing is deleted until you adopt it."
    assert page.texts("#adopt code") == [f"janitor plan {ARGUMENTS}", f"janitor adopt {ARGUMENTS}"]
    for part, sentence in {
        "#facts": "None yet",
        "#rows": "No run has finished yet.",
        "#held": "Nothing is deleted until the store is adopted.",
        "#aside": "nothing is paused",
        "#overdue": "No run has counted overdue rows yet.",
        "#snapshot": "No transaction snapshots are configured.",
        "#boundary": "No boundary is published yet.",
        "#guards": "No run has checked the guards yet.",
        "#phases": "No run has finished yet.",
        "#kept": "No run has read the store yet.",
        "#queues": "The store has no topics yet.",
    }.items():
        assert sentence in page.text(part)
    silent = ("running", "run", "filter", "plot", "history", "stale")
    assert [part for part in silent if page.run(f"document.getElementById('{part}').checkVisibility()")] == []
    assert page.console == []


def test_page_with_every_problem_shows_states_and_commands(pages: Pages) -> None:
    page = pages.show(statuses.wrong(pages.now_ms), statuses.runs(pages.now_ms)[:5])
    assert page.text("h1") == "Down. No janitor is running. This is the last recorded state."
    assert page.run("document.querySelector('#health').dataset.level") == "down"
    assert page.texts("#reasons a")[0].startswith("The clock guard blocked")
    targets = page.run("[...document.querySelectorAll('#reasons a')].map(link => document.querySelector(link.hash).id)")
    assert targets == ["guards", "run", "aside", "snapshot", "late", "held", "aside"]
    for part, words in {
        "#facts": ["Plans only", "nothing is deleted", "× failed", "None planned", "Held elsewhere", "3 h ago"],
        "#run": ["the disk is full: no space left on device", "default:audit: no space left on device"],
        "#held": [
            "more rows became due at once than time alone explains",
            "released automatically in",
            "not released automatically",
        ],
        "#aside": ["everything, 1 h ago", "after 4 failures", "next attempt in"],
        "#overdue": [
            "111,013 message rows (expired), 8,100 payload rows (of old generations) and 3 message rows (to invert)"
        ],
        "#late": ["default:audit, 3 more", " by transaction 1699990000000000001 of import@", "tms tx invalidate 16999"],
        "#snapshot": ["Snapshot stale. it is older than twice its interval"],
        "#boundary": ["No boundary is published yet.", "no complete pass has covered the message table yet"],
        "#guards": ["× clock tripped: the clock is 7200 s ahead", "! identity warns:"],
        "#statistics": ["none", "3"],
        "#queues": ["deleted", "not counted"],
    }.items():
        text = page.text(part)
        assert [word for word in words if word not in text] == [], part
    assert page.texts("#held code")[1:] == [
        f"janitor approve 'default:orders' {ARGUMENTS}",
        f"janitor approve 'default:new' {ARGUMENTS}",
    ]
    assert page.texts("#aside code")[0] == f"janitor resume {ARGUMENTS}"


def test_page_without_work_says_so_and_shows_its_age(pages: Pages) -> None:
    now_ms = pages.now_ms - 10 * MINUTE - SECOND
    counted = TopicFigures("a", "b", 1, 60, 0, 0, None, None, now_ms)
    calm = replace(statuses.full(now_ms), held=(), overdue=(), kept={}, guards=(), topics=(counted,))
    page = pages.show(calm, statuses.runs(now_ms))
    for part, sentence in {
        "#held": "No topic is held.",
        "#overdue": "No rows are overdue.",
        "#kept": "The last run kept no rows.",
        "#guards": "No guard tripped or warned.",
        "#queues tbody": "empty",
        "#stale": "Stale data. The janitor responds, but its data is from 10 min",
    }.items():
        assert sentence in page.text(part)


def test_page_of_many_held_topics_at_impossible_times_shows_the_first(pages: Pages) -> None:
    held = tuple(HeldTopic(f"a:{number:03d}", "frontier", 1, 1, -(2**62), 2**62, "x") for number in range(200))
    page = pages.show(replace(statuses.full(pages.now_ms), held=held))
    assert len(page.texts("#held li")) == 20
    assert "and 180 more, in janitor status" in page.text("#held")
    assert "released automatically at no time" in page.text("#held")
    assert page.console == []


def test_page_of_plans_says_that_nothing_was_deleted(pages: Pages) -> None:
    past = tuple(replace(run, mode="plan") for run in statuses.runs(pages.now_ms)[:9])
    last = replace(past[0], messages=MessagesLeft(1_000_000, 533_000, past[0].started_ms - 20 * SECOND))
    page = pages.show(replace(statuses.full(pages.now_ms), mode="plan_only", last_run=last), (last, *past[1:]))
    left = "467,000 of about 1,000,000 would be deleted, about 533,000 left"
    assert "only planned, nothing was deleted" in page.text("#caption")
    assert "to invert" in page.text("#legend")
    assert [words for words in ("1,400 to delete", f"messages: {left}") if words not in page.text("#facts")] == []
    page.go(f"{page.run('location.origin')}/runs/{last.id}")
    page.until("document.querySelector('#detail h2')")
    assert f"{left} (counted 20 s before)" in page.text("#detail")


def test_page_of_a_failed_run_shows_no_number_of_rows(pages: Pages) -> None:
    failed = next(run for run in statuses.runs(pages.now_ms) if run.error)
    page = pages.show(replace(statuses.full(pages.now_ms), last_run=failed), (failed,))
    assert "deleted" not in page.text("#facts .wide")
    page.run("document.querySelector('#history').open = true")
    assert page.text("#history-table tbody td:nth-child(3)") == "–"
    page.go(f"{page.run('location.origin')}/runs/{failed.id}")
    page.until("document.querySelector('#detail h2')")
    assert "0 rows" not in page.text("#detail")
    assert "janitor ledger" in page.text("#detail")


def test_plot_has_axes_legend_failures_and_a_table(pages: Pages) -> None:
    past = statuses.runs(pages.now_ms)
    page = pages.show(statuses.full(pages.now_ms), past)
    rules = ("expired", "old_generation", "processed", "invalid_transaction")
    totals = [sum(getattr(run, rule) for run in past) for rule in rules]
    words = ("expired", "of old generations", "processed", "inverted")
    legend = [f"{total:,} {word}" for total, word in zip(totals, words, strict=True)]
    assert [line.strip().replace("\n", "") for line in page.texts("#legend li")] == [*legend, "×1 run not done"]
    labels = page.run("[...document.querySelectorAll('#plot > text')].map(node => node.textContent)")
    assert "rows per 30 min" in labels
    assert "0" in labels
    assert len([label for label in labels if label[2:3] == ":"]) > 3
    drawn = page.run("[...document.querySelectorAll('#plot title')].map(node => node.textContent)")
    assert sum(int(title.split(", ")[1].split()[0]) for title in drawn) == len(past), "each run is in one bar"
    assert len(page.run("[...document.querySelectorAll('#plot .fail')].map(String)")) == 1
    assert f"{len(past)} runs in the last 24 h" in page.text("#caption")
    [bad] = [run for run in past if run.result == "failed"]
    assert page.run("document.querySelector('#caption a').getAttribute('href')") == f"/runs/{bad.id}"
    page.run("document.querySelector('summary').click()")
    assert len(page.texts("#history tbody tr")) == 20
    assert "1,400" in page.texts("#history tbody tr")[0]


@pytest.mark.parametrize(
    ("span", "name", "bars"),
    [(0, "1 h", 60), (59, "1 h", 60), (3_600, "24 h", 48), (90_000, "7 d", 42), (29 * 86_400, "30 d", 30)],
)
def test_chosen_range_draws_its_runs_and_has_a_link(pages: Pages, span: int, name: str, bars: int) -> None:
    times = (pages.now_ms, pages.now_ms - span * 1000, pages.now_ms - 31 * DAY)
    past = tuple(RunRecord(f"r{n}", "apply", at_ms, pages.now_ms, "done", 3) for n, at_ms in enumerate(times))
    page = pages.show(statuses.full(pages.now_ms), past)
    page.run(f"[...document.querySelectorAll('#ranges button')].find(one => one.textContent === '{name}').click()")
    page.until(f"document.querySelector('#caption').textContent.includes('2 runs in the last {name}')")
    titles = page.run("[...document.querySelectorAll('#plot title')].map(node => node.textContent)")
    assert sum(int(title.split(", ")[1].split()[0]) for title in titles) == 2
    assert len(titles) == bars
    labels = page.run("[...document.querySelectorAll('#plot > text')].map(node => node.textContent)")
    assert len(labels) == len(set(labels)), "no two bars have the same label"
    assert page.run("location.search") == ("" if name == "24 h" else f"?range={name.replace(' ', '')}")
    assert page.console == []


def test_clicked_bar_lists_its_runs(pages: Pages) -> None:
    page = pages.show(statuses.full(pages.now_ms), statuses.runs(pages.now_ms)[:3])
    page.run(
        "[...document.querySelectorAll('#plot g')].filter(bar => bar.querySelector('rect')).at(-1)"
        ".dispatchEvent(new MouseEvent('click'))"
    )
    page.until("document.querySelector('#chosen tbody tr')")
    newest = statuses.runs(pages.now_ms)[0]
    assert page.run("document.querySelector('#chosen tbody a').getAttribute('href')") == f"/runs/{newest.id}"
    page.go(f"{page.run('location.origin')}/runs/{newest.id}")
    page.until("document.querySelector('#detail h2')")
    assert newest.id in page.text("#detail h2")
    assert "1,400 rows" in page.text("#detail")
    assert page.run("document.querySelector('#overview').checkVisibility()") is False
    assert page.console == []


@pytest.mark.parametrize(
    ("store_bytes", "text"),
    [
        ({"before": 130_000_000, "after": 4_700_000}, "130 MB before, 4.7 MB after"),
        ({"before": 130_000_000, "after": None}, "130 MB on disk"),
        ({"before": None, "after": None}, ""),
    ],
)
def test_run_shows_the_store_before_and_after(pages: Pages, store_bytes: dict[str, int | None], text: str) -> None:
    last = replace(statuses.runs(pages.now_ms)[0], deleted_bytes=1_300_000, store_bytes=StoreBytes(**store_bytes))
    page = pages.show(replace(statuses.full(pages.now_ms), last_run=last), (last,))
    assert f"the store: {text}" in page.text("#facts") if text else "the store:" not in page.text("#facts")
    page.go(f"{page.run('location.origin')}/runs/{last.id}")
    page.until("document.querySelector('#detail h2')")
    assert "1.3 MB" in page.text("#detail")
    assert text in page.text("#detail")
    assert ("The store" in page.text("#detail")) is bool(text)


@pytest.mark.parametrize(
    ("path", "text"),
    [("topics/default:gone", "topic does not exist"), ("runs/r-1", "run does not exist"), ("topics/x", "x")],
)
def test_page_of_an_unknown_item_says_so_and_stays_healthy(pages: Pages, path: str, text: str) -> None:
    page = pages.show(statuses.full(pages.now_ms), statuses.runs(pages.now_ms))
    page.go(f"{page.run('location.origin')}/{path}")
    page.until("document.querySelector('#detail .empty')")
    assert text in page.text("#detail .empty")
    assert page.text("h1").startswith("Healthy.")


def test_topic_page_has_sizes_changes_and_ways_out_of_a_hold(pages: Pages) -> None:
    topic, name = TopicId("default", "orders"), "default:orders"

    def prepare(state: State) -> None:
        for ttl_seconds, at_ms in [(3650 * 86_400, pages.now_ms - 2 * DAY), (86_400, pages.now_ms - HOUR)]:
            save_topics(state, [TopicMetadata(topic, 1, ttl_seconds, {})], at_ms)
        for number in range(5):
            save_sizes(
                state, {topic: TopicCount(number, 1000 * number, None, None, pages.now_ms - (9 - number) * HOUR)}
            )
        state.add_ledger([entry(run_id="r-7")])

    commands = ("tms topic update default:orders --ttl 315360000", "janitor pause default:orders")
    held = HeldTopic(
        name, "frontier", 2800, 9, None, pages.now_ms + DAY, "janitor approve x", "ttl 3650 d → 1 d", commands
    )
    figures = TopicFigures("default", "orders", 1, 86_400, 4, 4000, pages.now_ms - 2 * HOUR, pages.now_ms, pages.now_ms)
    status = replace(statuses.full(pages.now_ms), held=(held,), topics=(figures,))
    kit = pages.serve(FixedViews(status, prepare=prepare))
    page = pages.open(kit)
    assert page.texts("#held code") == [held.command, *commands]
    assert "ttl 3650 d → 1 d" in page.text("#held")
    assert page.run("document.querySelector('#held a').getAttribute('href')") == "/topics/default%3Aorders"
    page.go(f"{kit.url}/topics/{name}")
    page.until("document.querySelector('#detail h2')")
    shown_text = page.text("#detail")
    for words in (
        name,
        "ttl 3,650 d → 1 d, seen 1 h ago",
        "at most 4.0 kB",
        "at most 4 messages",
        "Keep:",
        "No consumer is registered or counted yet.",
    ):
        assert words in shown_text
    assert page.run("document.querySelectorAll('#detail svg.curve polyline').length") == 2
    assert page.run("document.querySelector('#detail a[href=\"/runs/r-7\"]') !== null")
    page.type_into("#detail input", "ab" * 20)
    page.run("document.querySelector('#detail form').requestSubmit()")
    assert f"janitor why {name} {'ab' * 20} {ARGUMENTS}" in page.text("#detail form + .cmds")
    page.type_into("#detail input", "12")
    page.run("document.querySelector('#detail form').requestSubmit()")
    assert "40 hex digits" in page.text("#detail")
    assert page.console == []


def test_topic_page_leads_to_the_front_page_and_shows_open_claims(pages: Pages) -> None:
    held = HeldTopic("default:orders", "frontier", 1, 1, None, None, "janitor approve default:orders")
    lag = (pages.now_ms, pages.now_ms, 4, pages.now_ms - HOUR, False, pages.now_ms)
    groups = [
        ConsumerFigures("default", "orders", 1, "alone", *lag),
        ConsumerFigures("default", "orders", 1, "group", *lag, open_claims=1200, redelivered=1),
    ]
    sizes = ((pages.now_ms - 2 * HOUR, 8000), (pages.now_ms - HOUR, 0), (pages.now_ms, 4000))
    drawn = replace(TopicFigures("default", "drawn", 1, 60, 5, 4000, counted_ms=pages.now_ms), sizes=sizes)
    topics = (drawn, TopicFigures("default", "orders", 1, 60), replace(drawn, topic="once", sizes=sizes[:1]))
    kit = pages.serve(FixedViews(replace(statuses.full(pages.now_ms), topics=topics, held=(held,), consumers=groups)))
    page = pages.open(kit)
    points = "[...document.querySelectorAll('#queues .spark polyline')].map(line => line.getAttribute('points'))"
    assert page.run(points) == ["0.0,1.0 50.0,19.0 100.0,10.0"]
    assert page.text("#behind").count("1,200 open claims, 1 redelivered") == page.text("#behind").count("claim") == 1
    page.go(f"{kit.url}/topics/default:orders")
    page.until("document.querySelector('#detail h2')")
    assert "1,200 open claims, 1 redelivered" in page.text("#detail")
    assert "This topic is not counted yet." in page.text("#detail")
    assert page.run("document.querySelector('#headline a').getAttribute('href')") == "/#held"


def test_page_of_many_topics_sorts_and_pages_them(pages: Pages) -> None:
    page = pages.show(statuses.full(pages.now_ms))
    assert len(page.texts("#queues tbody tr")) == 50
    page.run("document.querySelector('[data-key=\"more topics\"]').click()")
    assert len(page.texts("#queues tbody tr")) == 65
    page.run("document.querySelector('[data-key=\"sort topic\"]').click()")
    names = page.texts("#queues tbody th")
    assert names == sorted(names)
    assert page.run("document.querySelector('#queues th[aria-sort]').textContent") == "topic"


@pytest.mark.parametrize("width", [420, 1280])
def test_page_with_a_long_topic_name_fits_the_window(pages: Pages, width: int) -> None:
    long = "n" * 120
    full = statuses.full(pages.now_ms)
    topics = (
        TopicFigures("default", long, 1, 60, 5, 5, pages.now_ms, pages.now_ms, pages.now_ms, 7, pages.now_ms),
        *full.topics,
    )
    held = (HeldTopic(f"default:{long}", "frontier", 1, 1, None, None, f"janitor approve default:{long}"),)
    page = pages.show(replace(full, topics=topics, held=held), width=width)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert (
        page.run(
            "[...document.querySelectorAll('.part')].filter(part => part.scrollWidth > part.clientWidth + 1)"
            ".map(part => part.id)"
        )
        == []
    )


def test_page_with_hostile_names_shows_them_as_text(pages: Pages) -> None:
    status = statuses.wrong(pages.now_ms)
    assert status.last_run is not None
    hostile = replace(status, last_run=replace(status.last_run, error=HOSTILE), kept={HOSTILE: 2})
    past = (replace(hostile.last_run or status.last_run, id=HOSTILE, phase_seconds={HOSTILE: 1.0}, result=HOSTILE),)
    kit = pages.serve(FixedViews(hostile, past))
    page = pages.open(kit)
    for part in (
        "#store",
        "#reasons",
        "#facts",
        "#run",
        "#held",
        "#aside",
        "#overdue",
        "#snapshot",
        "#boundary",
        "#guards",
    ):
        assert HOSTILE in page.text(part), part
    assert HOSTILE in page.text("#queues")
    assert HOSTILE in page.text("#kept")
    assert page.run("document.querySelectorAll('img, script[src], iframe, link[href^=\"/\"], [onerror]').length") == 0
    assert page.run("document.title") == "Down · janitor"
    assert set(kit.recorder.paths) == {"/", "/api/status", "/api/runs", "/api/history"}
    assert {request.removeprefix(kit.url).partition("?")[0] for request in page.requests} == set(kit.recorder.paths)
    assert page.console == []


def test_content_policy_blocks_injected_elements(pages: Pages) -> None:
    kit = pages.serve(FixedViews(statuses.empty(pages.now_ms)))
    page = pages.open(kit)
    page.run("""document.body.insertAdjacentHTML("beforeend", `<img src=/injected onerror="window.hurt = 1">`)""")
    page.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hurt = 2'}))")
    page.run("document.body.append(Object.assign(document.createElement('script'), {src: '/injected'}))")
    with pytest.raises(AssertionError, match="Failed to fetch"):
        page.run("fetch('http://localhost:1/elsewhere')")
    assert page.run("window.hurt ?? 0") == 0
    assert "/injected" not in kit.recorder.paths
    assert len(page.console) >= 4, "the browser reports the blocked elements"


@pytest.mark.parametrize("draw", [statuses.full, statuses.empty, statuses.wrong])
def test_page_at_phone_width_fits_without_horizontal_scrolling(pages: Pages, draw: Callable[[int], Status]) -> None:
    page = pages.show(draw(pages.now_ms), statuses.runs(pages.now_ms), 360)
    assert page.run("document.documentElement.scrollWidth") == 360
    outside = """[...document.querySelectorAll('main *, header *, footer *')].filter(node => node.checkVisibility()
      && !node.closest('.hush, thead') && node.getBoundingClientRect().right > 360.5).map(node => node.outerHTML)"""
    assert page.run(outside) == []


@pytest.mark.parametrize("width", [700, 821, 1199, 1200, 1280])
def test_page_at_any_width_keeps_tables_inside_their_section(pages: Pages, width: int) -> None:
    full = statuses.full(pages.now_ms)
    # Ages in minutes and seconds have the longest texts.
    lately = OpenTransaction(str((pages.now_ms - 112_000) * 10**6), pages.now_ms - 112_000, pages.now_ms - 91_000)
    status = replace(full, snapshot=replace(full.snapshot, oldest_open=[lately] * 3))
    page = pages.show(status, statuses.runs(pages.now_ms), width)
    assert page.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    wider = """[...document.querySelectorAll('section.part table')].filter(table => table.checkVisibility()
      && table.getBoundingClientRect().right > table.closest('section').getBoundingClientRect().right + 0.5)
      .map(table => table.closest('section').id)"""
    assert page.run(wider) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("draw", [statuses.full, statuses.empty, statuses.wrong])
def test_page_has_enough_contrast_for_every_text(pages: Pages, draw: Callable[[int], Status], scheme: str) -> None:
    page = pages.show(draw(pages.now_ms), statuses.runs(pages.now_ms), prefers_color_scheme=scheme)
    assert page.run(LOW_CONTRAST) == []


def test_page_with_reduced_motion_does_not_animate(pages: Pages) -> None:
    kit = pages.serve(FixedViews(statuses.empty(pages.now_ms)))
    moves = """[getComputedStyle(document.querySelector('#figures')).transitionDuration,
      getComputedStyle(document.documentElement).scrollBehavior]"""
    assert pages.open(kit).run(moves) == ["0.25s", "smooth"]
    assert pages.open(kit, prefers_reduced_motion="reduce").run(moves) == ["0s", "auto"]


def test_page_is_accessible_by_screen_reader_and_keyboard(pages: Pages) -> None:
    page = pages.show(statuses.wrong(pages.now_ms), statuses.runs(pages.now_ms))
    assert page.run("document.querySelectorAll('h1').length") == 1
    unnamed = """[...document.querySelectorAll('section')].filter(part =>
      !document.getElementById(part.getAttribute('aria-labelledby')))"""
    headless = """[...document.querySelectorAll('table')].filter(table =>
      !table.caption || !table.querySelector('thead th[scope=col]'))"""
    assert (page.run(unnamed), page.run(headless)) == ([], [])
    page.press("Tab")
    assert page.run("document.activeElement.textContent") == "Skip to the data"
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    assert any(role == "image" and "Rows by rule" in name and "runs in the last" in name for role, name in roles)
    assert ("button", f"Copy: janitor resume {ARGUMENTS}") in roles
    assert ("searchbox", "Filter topics by name") in roles
    assert {"columnheader", "rowheader"} <= {role for role, _ in roles}


def test_page_without_script_names_the_api(pages: Pages) -> None:
    kit = pages.serve(FixedViews(statuses.empty(pages.now_ms)))
    page = pages.browser.open()
    page.call("Emulation.setScriptExecutionDisabled", value=True)
    page.go(f"{kit.url}/")
    page.wait_for_load()
    assert "The same data is at /api/status" in page.text("noscript")
    page.close()


def test_copy_button_copies_the_whole_command(pages: Pages) -> None:
    page = pages.show(statuses.wrong(pages.now_ms))
    page.browser.call(
        "Browser.grantPermissions",
        permissions=["clipboardReadWrite", "clipboardSanitizedWrite"],
        browserContextId=page.context,
    )
    page.run("document.execCommand = () => false")
    page.run("document.querySelector('#aside button').click()")
    page.until("document.querySelector('#aside button').textContent === 'Copied'")
    assert page.run("navigator.clipboard.readText()") == f"janitor resume {ARGUMENTS}"
    assert page.text("#announce") == "The command is copied"


def test_copy_without_a_clipboard_selects_the_command(pages: Pages) -> None:
    page = pages.show(statuses.wrong(pages.now_ms))
    page.run("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.run("document.querySelector('#aside button').click()")
    page.until("document.querySelector('#aside button').textContent === 'Copied'")
    assert page.run("getSelection().toString()") == f"janitor resume {ARGUMENTS}"


def test_page_filter_searches_all_topics(pages: Pages) -> None:
    page = pages.show(statuses.full(pages.now_ms))
    names = "#queues tbody th"
    assert len(page.texts(names)) == 50
    assert page.texts(names)[:2] == ["system:orders", "default:audit"]
    page.type_into("#filter", "TENANT-6")
    assert page.texts(names) == ["system:tenant-60.events", *(f"default:tenant-6{n}.events" for n in (1, 2, 3))]
    assert page.text("#shown") == "4 of 65"
    page.type_into("#filter", "<b>nothing")
    assert "No topic's name contains “<b>nothing”." in page.text("#queues")


def test_page_refresh_keeps_focus_and_filter(pages: Pages) -> None:
    views = FixedViews(statuses.wrong(pages.now_ms), statuses.runs(pages.now_ms)[:3])
    page = pages.open(pages.serve(views))
    page.type_into("#filter", "audit")
    page.run("document.querySelectorAll('#aside button')[1].focus()")
    views.shown = replace(
        views.shown, now_ms=pages.now_ms + 1, paused=views.shown.paused[1:], process="running", running=None
    )
    views.requests.clear()
    page.run(COME_BACK)
    page.until("document.documentElement.dataset.shown == " + str(pages.now_ms + 1))
    assert page.text("h1").startswith("Action required.")
    assert page.run("document.activeElement.dataset.key").startswith("janitor resume 'team"), "the focus stays"
    assert page.run("document.querySelector('#filter').value") == "audit"
    assert page.texts("#queues tbody th") == ["default:audit"]
    assert views.requests == ["status"], "runs are requested only after a new run"
    views.shown = replace(views.shown, now_ms=pages.now_ms + 2, last_run=statuses.runs(pages.now_ms)[0])
    page.run(COME_BACK)
    page.until("document.documentElement.dataset.shown == " + str(pages.now_ms + 2))
    assert [view for view in views.requests if view == "past"] == ["past", "past"]


def test_page_refreshes_every_five_seconds_only_while_visible(pages: Pages) -> None:
    views = FixedViews(statuses.empty(pages.now_ms))
    kit = pages.serve(views)
    page = pages.browser.open()
    page.run_before_pages("""
      window.timers = new Map();
      const [set, clear] = [window.setTimeout, window.clearTimeout];
      window.setTimeout = (act, ms) => { const id = set(act, ms); window.timers.set(id, ms); return id; };
      window.clearTimeout = id => { window.timers.delete(id); clear(id); };
    """)
    page.go(f"{kit.url}/")
    page.until(DRAWN)
    page.until("[...timers.values()].includes(5000)")
    views.shown = replace(views.shown, now_ms=pages.now_ms + 1)
    hide = "Object.defineProperty(document, 'hidden', {value: true, configurable: true})"
    page.run(f"{COME_BACK}, {hide}, {COME_BACK}")
    page.until(f"{DRAWN} == {pages.now_ms + 1}")
    assert page.run("[...timers.values()]") == [], "a hidden page requests nothing"
    requested = len(page.requests)
    page.run(COME_BACK)
    page.run("Object.defineProperty(document, 'hidden', {value: false})")
    page.run(COME_BACK)
    page.until("[...timers.values()].includes(5000)")
    assert page.requests[requested:] == [f"{kit.url}/api/status"], "one request after the return"
    page.close()


def test_page_without_its_janitor_keeps_the_values_and_recovers(pages: Pages) -> None:
    views = FixedViews(statuses.full(pages.now_ms), statuses.runs(pages.now_ms))
    kit = pages.serve(views)
    page = pages.open(kit)
    kit.server.stop()
    page.run(COME_BACK)
    page.until("document.documentElement.dataset.state === 'unreachable'")
    assert page.text("h1").startswith("Cannot reach the janitor. Since ")
    assert "no connection. Retrying every 5 s." in page.text("h1")
    assert page.run("document.title") == "Cannot reach the janitor · janitor"
    assert "finance:ledger" in page.text("#held")
    pages.serve(views, port=kit.server.port)
    page.run(COME_BACK)
    page.until("document.documentElement.dataset.state === 'fresh'")
    assert page.text("h1") == "Healthy. A run is in progress."


def test_page_of_a_failed_response_shows_the_error(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    views = FixedViews(statuses.full(pages.now_ms))
    page = pages.open(pages.serve(views))
    monkeypatch.setattr(views, "status", lambda: 1 / 0)
    page.run(COME_BACK)
    page.until("document.documentElement.dataset.state === 'unreachable'")
    assert "the response failed; the janitor's log has the reason" in page.text("h1")


def test_page_shows_a_next_run_in_the_past_as_now(pages: Pages) -> None:
    status = replace(statuses.full(pages.now_ms), running=None, next_run_ms=pages.now_ms - 30 * SECOND)
    page = pages.show(status)
    next_run = "[...document.querySelectorAll('#facts dd')][3].firstChild"
    assert page.run(f"{next_run}.textContent") == "now"
    page.run(f"{next_run}.textContent = 'in 1 s'")
    page.until(f"{next_run}.textContent !== 'in 1 s'")
    assert page.run(f"{next_run}.textContent") == "now", "the text stays at the next second"


def test_hostile_name_runs_in_a_page_that_does_not_escape_it(browser: Browser, tmp_path: Path) -> None:
    """Check that the name is an effective attack; otherwise the test of the status page proves nothing."""
    naive = tmp_path / "naive.html"
    naive.write_text(f'<title>naive</title><p title="{HOSTILE}">{json.dumps(HOSTILE)}', encoding="utf-8")
    page = browser.open()
    page.go(naive.as_uri())
    page.until("document.title === 'injected'")
    page.close()
