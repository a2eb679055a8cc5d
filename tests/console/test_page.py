"""How the console's files are served: to anyone, with strict headers, once each, and from the wheel."""

import re
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

import httpx
import pytest

from holdfast.serving.http.routes_console import PATH
from tests.documents import ROOT
from tests.serving import default_chat, serving, wordy_engine
from tests.talking import chat_path, client_of, open_session, said

FILES = sorted(entry.name for entry in files("holdfast.serving.http").joinpath("console").iterdir())
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


async def test_the_page_is_served_with_headers_that_let_it_load_nothing_else() -> None:
    async with serving(wordy_engine(), default_chat()) as server, client_of(server) as http:
        for path in (PATH, *(f"{PATH}/{name}" for name in FILES)):
            answer = await http.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            again = await http.get(path, headers={"if-none-match": f'"other", W/{answer.headers["etag"]}'})
            assert (again.status_code, again.content) == (304, b"")
            assert (await http.get(path, headers={"if-none-match": '"other"'})).status_code == 200
        assert (await http.get(f"{PATH}/../app.py")).status_code == 404
        assert (await http.get(f"{PATH}/no-such.js")).status_code == 404
        slash = await http.get(f"{PATH}/")
        assert slash.next_request is not None
        assert slash.next_request.url.path == PATH


async def test_the_page_needs_no_key_and_shows_nothing_without_one(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ada:secret-of-ada\n")
    keys.chmod(0o600)
    async with serving(wordy_engine(), default_chat(), keys_file=str(keys)) as server, client_of(server) as http:
        assert (await http.get(PATH)).status_code == 200
        assert (await http.get(f"{PATH}/app.js")).status_code == 200
        assert (await http.get("/sessions")).status_code == 401
        assert (await http.get("/consoles")).status_code == 401


async def test_a_server_that_cannot_chat_has_no_console() -> None:
    async with serving(wordy_engine()) as server, httpx.AsyncClient(verify=False) as http:
        assert server.http == "" or (await http.get(f"http://{server.http}{PATH}")).status_code == 404


def test_the_page_asks_for_nothing_from_elsewhere_and_makes_no_html() -> None:
    for name in FILES:
        text = files("holdfast.serving.http").joinpath("console", name).read_text(encoding="utf-8")
        urls = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert urls <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|localStorage|sessionStorage|\bcookie =",
            text,
        ), name


@pytest.mark.slow
def test_the_wheel_has_the_page(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"holdfast/serving/http/console/{name}" for name in FILES} <= set(names)


async def test_messages_by_turn_are_the_whole_conversation_without_repetition() -> None:
    async with serving(wordy_engine(), default_chat()) as server, client_of(server) as http:
        session = await open_session(http)
        for texts in (("one",), ("two",)):  # the second is a branch
            assert (await http.post(chat_path(session), json=said(*texts))).status_code == 200
        shape = (await http.get(f"/sessions/{session}?records=messages")).json()
        assert "records" not in shape
        one, other = shape["metadata"]["tree"]
        assert [turn["messages"] for turn in (one, other)] == [
            [{"role": "user", "content": "one"}],
            [{"role": "user", "content": "two"}],
        ]
        for turn in (one, other):
            page = (await http.get(f"/sessions/{session}/tokens?turn={turn['turn']}")).json()
            assert (turn["start"], turn["end"]) == (0, page["total"])
            assert turn["sampled_start"] == page["kinds"].index("sampled")
        full = (await http.get(f"/sessions/{session}")).json()
        assert [*other["messages"], other["reply"]] == full["messages"]
