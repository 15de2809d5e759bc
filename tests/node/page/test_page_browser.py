"""The page in a real browser: fresh by itself, on a telephone, in the dark, under its policy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import urllib.error
import urllib.request
from pathlib import Path

import harness
import page_scene as scene
import pytest
from playwright.async_api import async_playwright, expect

from node.page.feed import StatusPage

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip

#: Where pictures of the page are kept for whoever wants to look; nowhere by default.
PICTURES = os.environ.get("KVPACK_TEST_PICTURES", "")

PHONE, DESK = (390, 844), (1280, 860)


class Staged:
    """A watcher of a node that is at a busy moment for as long as the test wants."""

    node = "studio"

    def __init__(self) -> None:
        self.recorder = scene.recorder()
        self.shown = scene.status()

    def status(self):
        return self.shown


def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("chromium is not installed: the page was not looked at in a browser")
    return found


@contextlib.asynccontextmanager
async def browser():
    async with async_playwright() as played:
        started = await played.chromium.launch(executable_path=chromium(), args=list(FLAGS))
        try:
            yield started
        finally:
            await started.close()


@contextlib.asynccontextmanager
async def opened(started, url: str):
    """The page, and all that the browser complained of."""
    context = await started.new_context(viewport={"width": DESK[0], "height": DESK[1]})
    complaints: list[str] = []
    page = await context.new_page()
    page.set_default_timeout(10_000)
    page.on("console", lambda said: complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(f"not loaded: {request.url}"))
    try:
        await page.goto(url)
        await expect(page.locator("body")).to_have_attribute("data-link", "live")
        yield page, complaints
    finally:
        await context.close()


async def picture(page, name: str) -> None:
    if PICTURES:
        await page.screenshot(path=str(Path(PICTURES) / f"{name}.png"), full_page=True)


async def overflow(page) -> int:
    """Pixels by which the page is wider than the window."""
    wide = await page.locator("html").evaluate("html => html.scrollWidth - html.clientWidth")
    return int(wide)


def test_the_page_of_a_busy_node_in_a_browser(tmp_path, model_dir):
    async def look():
        async with harness.web_node(tmp_path / "data", model_dir) as web, browser() as started:
            desk, stopping = web.node.entrance.door.desk, web.node.entrance.door.stopping
            staged = Staged()
            desk.page = StatusPage(staged, stopping, look_s=0.1)
            papers = {}
            async with opened(started, web.base_url) as (page, complaints):
                for (width, height), name in ((PHONE, "phone"), (DESK, "desk")):
                    await page.set_viewport_size({"width": width, "height": height})
                    for scheme in ("light", "dark"):
                        await page.emulate_media(color_scheme=scheme)
                        assert await overflow(page) == 0
                        await everything_is_there(page)
                        papers[scheme] = await page.locator("body").evaluate(
                            "body => getComputedStyle(body).backgroundColor"
                        )
                        await picture(page, f"busy-{name}-{scheme}")
                assert complaints == []
            assert papers == {"light": "rgb(245, 246, 248)", "dark": "rgb(16, 20, 25)"}

    harness.within(look(), 90.0)


async def everything_is_there(page) -> None:
    """What the page is for, as a reader sees it."""
    await expect(page.locator("#health")).to_have_text("Serving")
    await expect(page.locator("#moves progress")).to_have_count(2)
    await expect(page.locator("#moves")).to_contain_text("143 MiB of 198 MiB")
    await expect(page.locator("#slots .slot")).to_have_count(4)
    await expect(page.locator("#sessions tbody tr")).to_have_count(5)
    await expect(page.locator("#sessions")).to_contain_text("laptop")
    await expect(page.locator("#memory svg .curve")).to_have_count(2)
    await expect(page.locator("#cache")).to_contain_text("Computed here")
    await expect(page.locator("#refusals")).to_contain_text("A key was wrong or missing.")
    for name in ("#memory svg", "#moves progress >> nth=0"):
        box = await page.locator(name).bounding_box()
        assert box is not None and box["width"] > 200, name


def test_the_page_of_a_real_node_stays_fresh_and_says_when_it_is_not(tmp_path, model_dir):
    async def look():
        async with browser() as started, contextlib.AsyncExitStack() as stopped:
            web = await stopped.enter_async_context(harness.web_node(tmp_path / "data", model_dir))
            await reads_without_its_script(started, web.base_url)
            async with opened(started, web.base_url) as (page, complaints):
                await follows_a_session(page, web.serving.sessions)
                await asyncio.to_thread(ask_for_another_model, web.base_url)
                await expect(page.locator("#refusals")).to_contain_text("does not run here")
                await picture(page, "real-desk-light")
                assert complaints == []
                await stopped.aclose()
                await expect(page.locator(".lost")).to_be_visible()
                await picture(page, "real-lost")

    harness.within(look(), 90.0)


async def follows_a_session(page, sessions) -> None:
    """A session that is opened, fed and closed comes and goes by itself."""
    await expect(page.locator("#sessions")).to_contain_text("None yet.")
    session = await sessions.open("talk-of-the-town")
    await sessions.append(session, tuple(range(1, 41)))
    row = page.locator("#sessions tbody tr")
    await expect(row).to_contain_text("talk-of-the-town")
    await expect(row).to_contain_text("Ready")
    # All but the boundary token.
    title = page.locator("#memory .dot.full title")
    await expect(title).to_contain_text("39 tokens: ")
    await sessions.close(session)
    await expect(page.locator("#sessions")).to_contain_text("None yet.")


async def reads_without_its_script(started, url: str) -> None:
    context = await started.new_context(java_script_enabled=False)
    page = await context.new_page()
    await page.goto(url)
    await expect(page.locator("h1")).to_have_text("local")
    await expect(page.locator("#memory svg .curve")).to_have_count(2)
    await context.close()


def ask_for_another_model(base_url: str) -> None:
    """It is not there."""
    with contextlib.suppress(urllib.error.HTTPError):
        urllib.request.urlopen(f"{base_url}/v1/models/other", timeout=10)  # noqa: S310 - our own
