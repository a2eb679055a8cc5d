"""The members of a cluster in the console: two real ones on a real PostgreSQL, and states that are hard to come by."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.console.browser import CHROMIUM, chromium
from tests.console.conftest import Open
from tests.postgres import fresh_database
from tests.serving import Server, default_chat, serving_aside, wordy_engine

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH: apt-get install chromium")
FAINT, UNNAMED = ((Path(__file__).parent / name).read_text() for name in ("faint.js", "unnamed.js"))
NONE = "\u2013"


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Server, Server]]:
    with fresh_database() as url:
        options: dict[str, Any] = {"journal": url, "lease_s": 2.0, "max_parked": 100}
        engines = [wordy_engine(num_slabs=num, forward_s=0.0) for num in (4, 6)]
        with (
            serving_aside(engines[0], default_chat(), member="a", **options) as first,
            serving_aside(engines[1], default_chat(), member="b", **options) as second,
        ):
            yield first, second


@pytest.fixture(scope="module")
def server(pair: tuple[Server, Server]) -> Server:
    return pair[0]


@pytest.fixture(scope="module")
def browser(pair: tuple[Server, Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as started:
        yield started


def summary(page: Page) -> Locator:
    return page.locator(".members summary")


def row(page: Page, member: str) -> Locator:
    name = page.locator("b").get_by_text(member, exact=True)
    return page.get_by_role("table", name="Members of the cluster").get_by_role("row").filter(has=name)


def cells(page: Page, member: str) -> dict[str, str]:
    """The texts of a member's row by the heads of their columns."""
    heads = page.locator(".members th").all_inner_texts()
    return dict(zip(heads, row(page, member).get_by_role("cell").all_inner_texts(), strict=True))


def told(name: str, **facts: Any) -> dict[str, Any]:
    """A member as `GET /cluster` tells of it."""
    place = {"http": f"{name}.example:8000", "grpc": f"{name}.example:50051"}
    number = {"lease_left_s": 8.14, "epoch": 1, "sessions": 1234, "room": 5}
    return {"name": name, "state": "serving", **number, "version": "0.1.0", **place} | facts


def answer_with(page: Page, *members: dict[str, Any]) -> None:
    """From now on the page gets this for `GET /cluster`."""
    view = {"this": members[0]["name"], "is_cluster": True, "members": members}
    page.unroute("**/cluster")
    page.route("**/cluster", lambda route: route.fulfill(json=view))


def test_the_members_are_shown_as_the_server_tells_of_them(open_tab: Open, pair: tuple[Server, Server]) -> None:
    first, second = pair
    page = open_tab().page
    expect(summary(page)).to_have_text("Cluster2 members, all serving")
    with httpx.Client(base_url=f"http://{second.http}", verify=False) as client:
        client.post("/sessions").raise_for_status()
        expect(row(page, "b").get_by_role("cell").nth(2)).to_have_text("1")
        view = httpx.get(f"http://{first.http}/cluster", verify=False).json()
    assert set(view["members"][0]) == set(told("a"))
    for member in view["members"]:
        shown = cells(page, member["name"])
        assert re.fullmatch(r"[0-2]\.\d s", shown.pop("Lease"))
        assert shown == {
            "Member": "athis server" if member["name"] == "a" else "b",
            "State": "serving",
            "Sessions": str(member["sessions"]),
            "Room": str(member["room"]),
            "HTTP": member["http"],
            "gRPC": member["grpc"],
            "Version": member["version"],
        }
    assert [cells(page, name)["Room"] for name in "ab"] == ["4", "5"]


def test_members_that_drain_die_leave_or_lose_their_lease_are_told_apart(open_tab: Open, server: Server) -> None:
    tab = open_tab()
    page = tab.page
    answer_with(
        page,
        told("one"),
        told("two", state="draining", grpc=""),
        told("three", lease_left_s=-3.2),
        told("four", state="dead", lease_left_s=-90.0),
        told("five", state="left", lease_left_s=0.0, sessions=0),
    )
    expect(summary(page)).to_have_text("Cluster5 members, 1 serving")
    leases = {name: cells(page, name)["Lease"] for name in ("one", "two", "three", "four", "five")}
    assert leases == {"one": "8.1 s", "two": "8.1 s", "three": "expired", "four": NONE, "five": NONE}
    for name, look in (("one", "state serving"), ("two", "state draining"), ("three", "state"), ("four", "state dead")):
        expect(row(page, name).locator(".state")).to_have_attribute("class", look)
    assert (cells(page, "two")["State"], cells(page, "two")["gRPC"]) == ("draining", NONE)
    assert cells(page, "one")["Sessions"] == "1,234"
    answer_with(page, told("one"), told("six"))
    expect(row(page, "four")).to_have_count(0)
    expect(summary(page)).to_have_text("Cluster2 members, all serving")


def test_a_database_that_does_not_answer_is_said_and_looked_at_again(open_tab: Open, server: Server) -> None:
    tab = open_tab()
    tab.expected = ("503",)
    page = tab.page
    expect(summary(page)).to_contain_text("all serving")
    error = {"error": {"message": "the database does not answer", "code": "storage_unavailable"}}
    page.route("**/cluster", lambda route: route.fulfill(status=503, json=error))
    expect(summary(page)).to_contain_text("The members could not be read: the database does not answer")
    page.unroute("**/cluster")
    expect(summary(page)).to_contain_text("all serving")


def test_a_selected_address_stays_selected(open_tab: Open, server: Server) -> None:
    page = open_tab().page
    answer_with(page, told("one"), told("two"))
    address = row(page, "two").locator("code").first
    address.select_text()
    answer_with(page, told("one"), told("two", lease_left_s=3.0))
    expect(row(page, "two")).to_contain_text("3.0 s")
    assert page.evaluate("String(getSelection())") == "two.example:8000"


@pytest.mark.parametrize("width", [360, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_members_fit_and_their_texts_have_contrast(open_tab: Open, server: Server, width: int, scheme: str) -> None:
    page = open_tab(viewport={"width": width, "height": 800}, color_scheme=scheme).page
    states = ("serving", "serving", "draining", "dead", "left", "serving", "serving")
    answer_with(page, *(told(f"member-{index}", state=state) for index, state in enumerate(states)))
    expect(summary(page)).to_contain_text("7 members, 4 serving")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(FAINT) == []
    assert page.evaluate(UNNAMED) == []
    list_height = page.locator(".list-frame").bounding_box()
    assert list_height is not None
    assert list_height["height"] >= 220
