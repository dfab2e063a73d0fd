"""The live page: on loopback, behind a random word, read-only, and refreshed by its parts."""

from __future__ import annotations

import http.client
import shutil
import threading
from html import unescape
from urllib.parse import urlsplit

import pytest

from sharpscope.analysis.live import LivePage, server_of, wait_for_runs
from sharpscope.traces import RunLock, TraceWriter, rewind, update_run_info
from tests.analysis.conftest import write_report_run
from tests.traces.synthetic import new_run, rows


@pytest.fixture
def live(tmp_path):
    folder = write_report_run(tmp_path / "a", steps=3, spike=False)
    server, address = server_of([folder])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield folder, urlsplit(address)
    server.shutdown()
    server.server_close()
    thread.join()


def ask(place, path, method="GET", **headers):
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_only_this_machine_with_the_word_reads_it_and_nothing_is_written(live, tmp_path):
    _, place = live
    before = sorted(tmp_path.rglob("*"))
    assert place.hostname == "127.0.0.1" and len(place.path) > 20
    status, html = ask(place, place.path)
    assert (
        status == 200
        and "connect-src 'self'" in unescape(html)
        and "default-src 'none'" in unescape(html)
    )
    for path in (
        "/",
        "/version",
        f"{place.path}../run.json",
        place.path[:-2] + "x/",
        place.path + "x",
    ):
        assert ask(place, path)[0] == 404, path
    assert ask(place, place.path, Host="evil.example")[0] == 403
    assert ask(place, place.path, Host=f"evil.example:{place.port}")[0] == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(place, place.path, method)[0] == 501
    assert sorted(tmp_path.rglob("*")) == before


def test_a_new_step_is_a_new_version_and_a_page_with_it(live):
    folder, place = live
    first = ask(place, place.path + "version")
    assert ask(place, place.path + "version") == first
    with TraceWriter(folder) as writer:
        writer.append("steps", rows("steps", 4, 1) | {"grad_norm": 1.0, "reward_mean": 0.125})
    second = ask(place, place.path + "version")
    assert second[0] == 200 and second != first
    assert '"x":[1,2,3,4]' in ask(place, place.path)[1]


def test_a_run_may_appear_grow_be_resumed_and_vanish_while_its_page_is_live(tmp_path):
    folder, said = tmp_path / "run", []

    def sleep(_):
        assert not LivePage([folder]).current()
        new_run(folder)

    wait_for_runs([folder], said.append, sleep=sleep)
    assert said == [f"waiting for a run below {folder}; Ctrl-C ends it"]
    wait_for_runs([folder], pytest.fail)  # it is there
    page, versions = LivePage([folder]), []
    versions.append(page.current())
    for steps in ((1, 2), (3,)):
        with TraceWriter(folder) as writer:
            for step in steps:
                writer.append("steps", rows("steps", step, 1) | {"reward_mean": 0.1 * step})
        versions.append(page.current())
    assert '"x":[1,2,3]' in page.html
    rewind(folder, 2)
    versions.append(page.current())
    assert '"x":[1,2]' in page.html and '"x":[1,2,3]' not in page.html
    assert all(versions) and len(set(versions[:3])) == 3 and versions[3] == versions[1]
    last = page.html
    shutil.rmtree(folder)
    assert page.current() == versions[-1] and page.html == last


def test_a_run_that_does_not_exist_yet_leaves_the_page_of_another(tmp_path):
    here = write_report_run(tmp_path / "here", steps=3, spike=False)
    page = LivePage([here, tmp_path / "later"])
    first = page.current()
    assert first and '"x":[1,2,3]' in page.html
    write_report_run(tmp_path / "later", steps=2, spike=False)
    assert page.current() != first and "2 runs" in page.html


def test_a_run_whose_process_was_killed_is_said_to_have_died(tmp_path):
    folder = write_report_run(tmp_path / "a", steps=3, spike=False)
    update_run_info(folder, status="running")
    page = LivePage([folder])
    with RunLock(folder):
        first = page.current()
        assert "running" in page.html and "died" not in page.html
        assert page.current() == first
    assert page.current() != first and "died" in page.html


def test_the_page_takes_over_what_is_new(chromium, live):
    folder, place = live
    page = chromium.new_context().new_page()
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on(
        "console", lambda message: said.append(message.text) if message.type == "error" else None
    )
    page.goto(place.geturl())
    page.locator(".live", has_text="live").wait_for()
    page.wait_for_selector("html[data-curves=drawn]")
    with TraceWriter(folder) as writer:
        writer.append("steps", rows("steps", 4, 1) | {"grad_norm": 1.0, "reward_mean": 0.125})
    page.locator(".live", has_text="refreshed").wait_for(timeout=20_000)
    assert page.evaluate("Curves.groups[0].charts[0].x") == [1, 2, 3, 4]
    assert page.evaluate("Curves.plots[0].u.data[0]") == [1, 2, 3, 4]
    assert not said
    page.context.close()
