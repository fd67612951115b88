"""The page in a real browser: keyboard only, on a phone, in dark mode, and with a server that stops.

Needs the package playwright, and a Chromium in the PATH or playwright's own (`playwright install chromium`).
"""
import re
import shutil
from pathlib import Path

import pytest
from helpers.launching import free_port
from helpers.serving import serving

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.slow
expect = sync_api.expect
PHONE = {"width": 360, "height": 400}
LABELS = {"seed": "Seed", "most": "Max tokens", "temperature": "Temperature"}


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        path = CHROMIUM or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("Chromium is not installed")
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser, server):
    """A new page. Script errors and requests to other hosts fail the test."""
    context = browser.new_context()
    opened, wrong = context.new_page(), []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("request", lambda request: wrong.append(request.url) if server.url not in request.url else None)
    opened.goto(server.url)
    fill(opened, seed=3, most=60)
    yield opened
    assert not wrong
    context.close()


def fill(page, **settings) -> None:
    """Fill in settings, see LABELS."""
    for name, value in settings.items():
        page.get_by_label(LABELS[name]).fill(str(value))


def write(page, words: str) -> None:
    """Send a message by keyboard, and wait for the end of the answer."""
    page.get_by_label("Message", exact=True).press_sequentially(words)
    page.keyboard.press("Enter")
    ended(page)


def ended(page) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=30_000)


def press(page, name: str) -> None:
    page.get_by_role("button", name=name).click()


def test_a_first_visit_an_answer_its_tree_and_an_export(page):
    page.get_by_label("Compare with plain decoding").check()
    page.locator(".welcome .prompts button").first.click()
    ended(page)
    panels = page.locator(".assistant .answers section")
    expect(panels.locator("h2")).to_have_text(["Speculative decoding (eagle3)", "Plain decoding"])
    for panel in panels.all():
        expect(panel.locator(".figures")).to_contain_text("tokens/s")
    expect(panels.first.locator(".figures")).to_contain_text("τ")
    expect(panels.last.locator(".figures")).to_contain_text("1.00 tokens per step")
    expect(page.locator(".speedup strong")).to_have_text(re.compile(r"^\d+\.\d\d×$"))
    expect(page.locator(".speedup")).to_contain_text("identical output")
    expect(page.locator("#drawing")).to_be_hidden()
    page.locator("#tree summary").click()
    steps = int(page.locator("#step").inner_text().split()[-1])
    expect(page.get_by_role("button", name="Next tree")).to_be_disabled()
    press(page, "Previous tree")
    expect(page.locator("#step")).to_have_text(f"Tree {steps - 1} of {steps}")
    while not (accepted := page.locator("#drawing g.taken").count()):
        press(page, "Previous tree")
    expect(page.locator("#tree summary")).to_contain_text(f"{accepted} of ")
    assert "taken" not in (page.locator("#drawing g").first.get_attribute("class") or "")
    page.locator("#drawing g").nth(1).click()
    expect(page.locator("#tip")).to_contain_text(re.compile(r"likely, with its path .* %$"))
    page.reload()
    expect(page.locator("#step")).to_have_text(f"Tree {min(steps, 32)} of {min(steps, 32)}")
    with page.expect_download() as download:
        press(page, "Export chat")
    assert "**user**" in download.value.path().read_text()


def test_conversations_are_kept_in_every_tab_and_forgotten(page):
    write(page, "first")
    text = page.locator(".assistant .text").inner_text()
    press(page, "Regenerate")
    ended(page)
    expect(page.locator(".assistant .text")).to_have_text([text])  # the seed is the same
    page.keyboard.press("Alt+n")
    assert page.locator(".message").count() == 0
    write(page, "second")
    page.reload()
    expect(page.locator(".user .text")).to_have_text("second")  # the conversation in view
    other = page.context.new_page()
    other.goto(page.url)
    write(page, "more")
    expect(other.locator(".user")).to_have_count(2)
    press(other, "New chat")
    write(other, "third")  # two tabs keep what both have
    names = page.locator("#conversations .pick")
    expect(names).to_have_text(["third", "second", "first"])
    assert page.get_by_label("Seed").input_value() == "3"  # settings are kept too
    names.nth(2).click()
    expect(page.locator(".assistant .text")).to_have_text(text)
    page.once("dialog", lambda dialog: dialog.accept("the oldest"))
    press(page, "Rename first")
    page.get_by_label("Search chats").fill("OLDEST")
    expect(names).to_have_text(["the oldest"])
    page.get_by_label("Search chats").fill("second")  # a message, too
    expect(names).to_have_text(["second"])
    page.get_by_label("Search chats").fill("nowhere")
    expect(page.locator("#conversations")).to_have_text("No results.")
    page.get_by_label("Search chats").fill("")
    page.once("dialog", lambda dialog: dialog.accept("first"))
    press(page, "Rename the oldest")
    press(page, "Delete first")
    expect(names).to_have_text(["third", "second"])
    expect(page.locator("#banner")).to_have_class("note")  # no warning
    press(page, "Undo")
    expect(names).to_have_text(["third", "second", "first"])
    page.get_by_label("Temperature").fill("1000")
    page.get_by_label("Seed").focus()
    expect(page.locator("#banner")).to_contain_text("must be 0 to 100")
    page.keyboard.press("Escape")
    expect(page.locator("#banner")).to_be_hidden()


def test_a_phone_in_the_dark(page):
    def back():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = back()
    press(page, "Dark mode")
    dark = back()
    page.set_viewport_size(PHONE)
    page.reload()
    assert back() == dark != light
    write(page, "small")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for name in ("#input", "#send", "#menu", ".assistant"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360, name
    page.locator("#tree summary").click()  # it covers no part of the answer
    expect(page.get_by_role("button", name="Regenerate")).to_be_in_viewport()
    expect(page.locator("#side")).to_be_hidden()
    press(page, "Chats")
    press(page, "New chat")
    expect(page.locator("#side")).to_be_hidden()
    assert page.locator(".message").count() == 0


HOSTILE = """# <img src=x onerror=alert(1)> **bold** `<b>` [bad](javascript:alert(1)) [good](https://a.page/)

```html
<script>alert(1)</script>
```
- one
  - two

![i](https://a.page/x.png) <iframe>"""


def test_model_output_is_not_html(page):
    page.evaluate("""async (source) => {
        const { render } = await import("./markdown.js");
        const into = document.createElement("div");
        into.id = "tried";
        document.body.append(into);
        render(into, source, [[2, 9]], () => document.createElement("i"));
    }""", HOSTILE)
    tried = page.locator("#tried")
    assert not any(tried.locator(tag).count() for tag in ("img", "script", "iframe", "b"))
    links = [link.get_attribute("href") for link in tried.locator("a").all()]
    assert links == ["https://a.page/", "https://a.page/x.png"]  # a picture is a link: nothing is fetched
    expect(tried.locator(".code .head span")).to_have_text("html")
    assert tried.locator("pre .hljs-tag").count() >= 1
    assert tried.locator("pre code").inner_text().strip() == "<script>alert(1)</script>"


def test_a_dead_server_is_shown_and_comes_back(browser, golden, tmp_path):
    """Both servers run without a drafter, so the page shows no speculation switch."""
    options = "--port", str(free_port()), "--api-key", "secret", "--speculate", "none"
    page = browser.new_context().new_page()
    page.on("dialog", lambda dialog: dialog.accept("secret"))
    with serving(golden, tmp_path / "one", *options) as server:
        page.goto(server.url)
        expect(page.locator(".welcome")).to_contain_text("Plain decoding")
        expect(page.locator("#drafting")).to_be_hidden()
        fill(page, most=1900, temperature=2)
        page.get_by_label("Message", exact=True).fill("long")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant .figures")).to_contain_text("tokens/s", timeout=30_000)
        server.process.kill()
        expect(page.locator("#banner")).to_contain_text("unreachable")
        expect(page.locator(".assistant .figures")).to_contain_text("server unreachable")
    with serving(golden, tmp_path / "two", *options):
        expect(page.locator("#banner")).to_be_hidden(timeout=10_000)
        fill(page, most=5)
        press(page, "Regenerate")
        ended(page)
        expect(page.locator(".assistant .figures")).to_contain_text("token limit")
        fill(page, most=1900)
        press(page, "Regenerate")
        expect(page.locator(".assistant .figures")).to_contain_text("tokens/s", timeout=30_000)
    expect(page.locator(".assistant .figures")).to_contain_text("token limit")  # the previous answer
    expect(page.locator("#banner")).to_contain_text("unreachable")


def test_messages_are_refused_edited_and_deleted(page):
    """The text of a refused message returns to the input box, also after a reload."""
    write(page, "first")
    too_long = "word " * 400
    page.locator("#input").fill(too_long)
    page.keyboard.press("Enter")
    expect(page.locator("#banner")).to_contain_text("shorten it")
    expect(page.locator(".message")).to_have_count(2)
    page.reload()
    assert page.locator("#input").input_value() == too_long.strip()
    page.locator("#input").fill("")
    write(page, "second")
    expect(page.locator(".message")).to_have_count(4)
    page.get_by_role("button", name="Edit").first.click()
    assert page.locator("#input").input_value() == "first"
    page.locator("#input").fill("another beginning")
    page.keyboard.press("Enter")
    ended(page)
    expect(page.locator(".user .text")).to_have_text(["another beginning"])
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".welcome")).to_be_visible()
    press(page, "Undo")
    expect(page.locator(".message")).to_have_count(2)


def test_an_answer_says_why_it_ended_and_is_kept_until_another_has(page):
    """Leaving the page, reloading, or Escape keeps the old answer."""
    fill(page, most=2)
    page.get_by_label("Compare with plain decoding").check()
    write(page, "first")
    expect(page.locator(".speedup")).to_contain_text("too few to compare")
    page.get_by_label("Compare with plain decoding").uncheck()
    press(page, "Regenerate")
    ended(page)
    expect(page.locator(".figures")).to_contain_text("stopped at the token limit")
    text = page.locator(".assistant .text").inner_text()
    fill(page, most=280, temperature=2)

    def begin_another():
        press(page, "Regenerate")
        expect(page.locator(".assistant .figures")).to_contain_text("tokens/s")

    begin_another()
    page.reload()
    expect(page.locator(".assistant .text")).to_have_text(text)
    begin_another()
    page.locator("#tree summary").click()
    expect(page.get_by_role("button", name="Previous tree")).to_be_enabled()
    press(page, "Previous tree")
    chosen = page.locator("#step").inner_text().split()[1]
    expect(page.locator("#step")).not_to_have_text(re.compile(f"of {int(chosen) + 1}$"))  # more steps come
    assert page.locator("#step").inner_text().split()[1] == chosen
    page.keyboard.press("Escape")
    ended(page)
    expect(page.locator(".figures")).to_contain_text("stopped")
    press(page, "Restore previous answer")
    expect(page.locator(".assistant .text")).to_have_text(text)
    fill(page, most=20)
    press(page, "Regenerate")  # the place is free again
    ended(page)
