"""Large uploads, wrong ones, and long work that a visitor stops, in a real browser."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from harness import settle
from playwright.sync_api import expect

# A search that is not over before it is stopped, even if this process is held up for some seconds.
MANY = "plain,chain-2,chain-3,chain-4,chain-5,tree-8x4x2,tree-16x4x2,async-tree-8x4x2"
MILLION = 1_000_000
MOST_MEMORY = 700e6  # bytes of the server with a million requests in it

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def server_of(address: str) -> int:
    """Process that serves an address."""
    port = address.rpartition(":")[2]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if port in words and any(word.endswith("serve.py") for word in words):
            return int(folder.name)
    raise LookupError(f"nobody serves {address}")


def workers_of(server: int) -> list[int]:
    """Processes of its pools."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            is_worker = "spawn_main" in (folder / "cmdline").read_text()
        except OSError:
            continue
        if parent == server and is_worker:
            found.append(int(folder.name))
    return found


def processor_seconds(pid: int) -> float:
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until(page, is_so, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        page.wait_for_timeout(50)


def test_a_search_takes_all_cores_and_stop_ends_its_processes(page, address):
    server = server_of(address)
    page.goto(f"{address}/plan?trace=conv-twin&policies={MANY}")
    settle(page)
    page.get_by_role("button", name="Search").click()
    cores = len(os.sched_getaffinity(0))
    wait_until(page, lambda: len(workers_of(server)) == cores)
    page.get_by_role("button", name="Stop").click()
    wait_until(page, lambda: not workers_of(server))
    expect(page.get_by_text("No plan for this question yet")).to_be_visible()
    expect(page.get_by_role("button", name="Search")).to_be_enabled()


def test_a_wrong_upload_is_one_line_and_a_million_requests_stay_responsive(page, address, tmp_path):
    photo, large = tmp_path / "photo.csv", tmp_path / "million.csv"
    photo.write_bytes(bytes(range(256)) * 4000)
    rows = "".join(f"{n / 5},{200 + n % 1500},{5 + n % 400}\n" for n in range(MILLION))
    large.write_text("arrival,prompt_tokens,output_tokens\n" + rows)
    page.goto(f"{address}/?trace=upload")
    expect(page.get_by_text("Larger ones need no upload")).to_be_visible()
    upload = page.locator("input[type=file]")
    upload.set_input_files(photo)
    error = page.get_by_test_id("stAlertContentError").locator("p")
    expect(error).to_contain_text("photo.csv is not UTF-8 text")
    assert "\n" not in error.inner_text()
    upload.set_input_files(large)
    answer = page.locator("[data-testid=stMain] strong").first
    expect(answer).to_contain_text("tree-8x4x2 on 8")
    expect(page.get_by_text("of 1,000,000 requests").first).to_be_visible()
    before = processor_seconds(server_of(address))
    page.get_by_role("slider", name="Rows verified per request").press("ArrowRight")
    expect(answer).to_contain_text("tree-9x4x2 on 8")
    # Of the server: what others do at the time is no part. 0.7 s of the clock on an idle machine.
    assert processor_seconds(server_of(address)) - before < 8.0
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Only a part of the trace.")).to_be_visible()
    lines = (Path("/proc") / str(server_of(address)) / "status").read_text().splitlines()
    (peak,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    assert peak < MOST_MEMORY
