"""What a visitor does, in a real browser: from a trace to a plan that the command line reads."""

from __future__ import annotations

import json
import re
import time
import zipfile
from pathlib import Path

import pytest
from harness import PHONE, settle
from playwright.sync_api import Locator, Page, expect

CONV = Path(__file__).parents[3] / "shared" / "data" / "traces" / "AzureLLMInferenceTrace_conv.csv"


def choose(page: Page, label: str, option: str) -> None:
    """Take the first option of a select box that holds a text."""
    box = page.get_by_role("combobox", name=label)
    box.click()
    box.press_sequentially(option)
    page.get_by_role("option").filter(has_text=option).first.click()


def traffic() -> str:
    """URL parameters of the published trace where it is, else of its twin."""
    if CONV.exists():
        return f"trace=file+on+this+machine&path={CONV}"
    return "trace=conv-twin"


def test_from_a_trace_to_a_plan_that_the_command_line_reads(page, address, cli, tmp_path):
    page.goto(f"{address}/?{traffic()}&rate_scale=0.3")
    expect(page.get_by_role("heading", name="What if")).to_be_visible()
    label = page.locator("[data-testid=stMain] strong").first
    expect(label).to_contain_text("on 8, ")  # the coarse answer, as a visitor reads
    choose(page, "Split of the machine", "2x4")
    expect(label).to_contain_text("on 2x4, ")

    page.get_by_role("link", name="Plan").click()
    settle(page)
    page.get_by_label("Requests at most").fill("40")
    page.get_by_label("Only these policies").fill("plain,tree-8x4x2,async-tree-8x4x2")
    page.get_by_label("Only these policies").press("Enter")
    settle(page)
    page.get_by_role("button", name="Search").click()
    page.get_by_role("button", name="Download plan").wait_for()
    settle(page)
    with page.expect_download() as waited:
        page.get_by_role("button", name="Download plan").click()
    with zipfile.ZipFile(waited.value.path()) as bundle:
        bundle.extractall(tmp_path)

    page.get_by_role("link", name="Open the plan's timeline").click()
    settle(page)
    expect(page.get_by_role("heading", name="Target and draft")).to_be_visible()
    expect(page.locator("[data-testid=stVegaLiteChart] > svg").first).to_be_visible()

    check_with_the_command_line(cli, tmp_path)


def check_with_the_command_line(cli, folder: Path) -> None:
    """The downloaded plan is a whole one: its requests can be simulated, its GPUs are missed."""
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["num_requests"] == 40
    run = cli("run", "--plan", "plan.json", "--out", "runs")
    assert run.returncode in (4, 5)
    assert len(run.stderr.splitlines()) == 1
    assert "llama-3.1-70b" in run.stderr or "GPU" in run.stderr
    policy, _, rest = plan["chosen"]["candidate"]["label"].partition(" on ")
    deployment, _, batch = rest.partition(", batch ")
    again = cli(
        "simulate", "--trace", plan["trace"]["path"], "--fit", plan["fit"]["path"], "--json",
        "--quiet", "--policy", policy, "--deployment", deployment, "--max-batch", batch,
        "--preemption",
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    length = json.loads(again.stdout)["metrics"]["acceptance_length"]
    predicted = plan["chosen"]["predicted"]["acceptance_length"]
    assert length == pytest.approx(predicted["value"], rel=0.1)


def test_a_plan_for_this_machine_is_downloaded_and_run(page, address, cli, tmp_path, target_dir):
    page.goto(
        f"{address}/plan?trace=conv-twin&rate_scale=0.1&max_prompt=64&max_output=8"
        "&max_requests=3&policies=plain,tree-8x2x2"
    )
    choose(page, "Step times", "fit.json")
    page.get_by_role("button", name="Search").click()
    with page.expect_download() as waited:
        page.get_by_role("button", name="Download plan").click()
    with zipfile.ZipFile(waited.value.path()) as bundle:
        bundle.extractall(tmp_path)
    run = cli("run", "--plan", "plan.json", "--out", "runs/measured")
    assert run.returncode == 0, run.stderr
    (written,) = tmp_path.glob("runs/measured/**/run.json")
    served = json.loads(written.read_text())
    assert served["origin"] == "measured"
    assert served["metrics"]["num_finished"] == 3


def test_the_timeline_follows_the_slider_and_the_link_keeps_the_round(page, address):
    page.goto(f"{address}/timeline?round=4&candidate=async-tree-8x2x2+on+1%2B1,+batch+4")
    settle(page)
    expect(page.get_by_text("Round 4 of ")).to_be_visible()
    page.get_by_role("slider", name="Round of the request").press("ArrowRight")
    settle(page)
    expect(page.get_by_text("Round 5 of ")).to_be_visible()
    expect(page).to_have_url(re.compile("round=5"))
    expect(page.locator("[data-testid=stVegaLiteChart] > svg")).to_have_count(3)
    page.reload()
    settle(page)
    expect(page.get_by_text("Round 5 of ")).to_be_visible()


def test_the_lanes_can_be_zoomed(page, address):
    page.goto(f"{address}/timeline?round=4")
    settle(page)
    lanes = page.locator("[data-testid=stVegaLiteChart] > svg").first
    lanes.scroll_into_view_if_needed()
    before = still(page, lanes)
    box = lanes.bounding_box()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 0.6 * box["height"])
    page.mouse.wheel(0, -400)
    end = time.monotonic() + 60
    while lanes.screenshot() == before:
        assert time.monotonic() < end
        page.wait_for_timeout(100)


def still(page: Page, picture: Locator) -> bytes:
    """A screenshot when nothing moves any more."""
    shots = [b"", picture.screenshot()]
    while shots[-1] != shots[-2]:
        page.wait_for_timeout(500)
        shots.append(picture.screenshot())
    return shots[-1]


def test_validate_shows_all_its_charts_and_a_wrong_folder_is_one_line(page, address):
    page.goto(f"{address}/validate")
    settle(page)
    expect(
        page.get_by_text("checked figures").or_(page.get_by_text("all within")).first
    ).to_be_visible()
    expect(page.locator("[data-testid=stVegaLiteChart] > svg")).to_have_count(6)
    folder = page.get_by_role("textbox", name="Folder of runs")
    folder.fill("nowhere")
    folder.press("Enter")
    settle(page)
    alert = page.get_by_test_id("stAlertContainer")
    expect(alert).to_contain_text("nowhere does not exist. Make it: codesign run")
    folder.fill("runs")
    folder.press("Enter")
    settle(page)
    expect(page.locator("[data-testid=stVegaLiteChart] > svg")).to_have_count(6)


@pytest.mark.parametrize(
    ("path", "scheme"),
    [("", "dark"), ("plan", "light"), ("timeline", "dark"), ("validate", "light"),
     ("profiles", "dark")],
)  # fmt: skip
def test_every_page_fits_a_phone_in_light_and_dark(browser, address, path, scheme):
    page = browser.new_page(viewport=PHONE, color_scheme=scheme)
    page.goto(f"{address}/{path}?trace=code-twin&rate_scale=0.1")
    settle(page)
    main = page.get_by_test_id("stMain")
    assert main.evaluate("e => e.scrollWidth <= e.clientWidth + 1")
    background = page.get_by_test_id("stApp").evaluate("e => getComputedStyle(e).backgroundColor")
    red = int(background.partition("(")[2].partition(",")[0])
    assert (red > 128) == (scheme == "light")
    assert page.get_by_test_id("stException").count() == 0
    page.close()
