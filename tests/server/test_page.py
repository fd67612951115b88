"""The page in a real browser: by keyboard, on a phone, in the dark, and when the server dies.

Needs the package playwright and a Chromium in the PATH; its own download is not used.
"""
import shutil
import signal
import socket

import pytest
from helpers.serving import serving

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed"),
]
expect = sync_api.expect


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def page(browser, server):
    """The page, empty. A script error or a request to another machine is a failure."""
    context = browser.new_context()
    opened = context.new_page()
    wrong = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("request", lambda request: wrong.append(request.url) if server.url not in request.url else None)
    opened.goto(server.url)
    opened.get_by_label("Seed").fill("3")
    opened.get_by_label("At most tokens").fill("60")
    yield opened
    assert not wrong
    context.close()


def write(page, words: str) -> None:
    """Send a message by keyboard, and wait for the answer's end."""
    page.get_by_label("Message", exact=True).press_sequentially(words)
    page.keyboard.press("Enter")
    ended(page)


def ended(page) -> None:
    """Wait until nothing is being answered."""
    expect(page.get_by_role("button", name="Send")).to_be_visible(timeout=30_000)


def test_an_answer_with_its_figures_and_its_tree(page):
    write(page, "tell me something")
    answer = page.locator(".assistant").first
    expect(answer.locator(".figures")).to_contain_text("tokens/s")
    expect(answer.locator(".figures")).to_contain_text("τ")
    expect(page.locator("#model")).to_have_text("golden")
    assert page.locator(".coloured .d").count() > 0
    expect(page.locator("#tree")).to_be_visible()
    assert page.locator("#drawing g").count() > 1 and page.locator("#drawing g.taken").count() >= 1
    expect(page.locator("#treewords")).to_contain_text("nodes")


def test_regenerate_keep_and_forget(page):
    write(page, "first")
    text = page.locator(".assistant .text").inner_text()
    page.get_by_role("button", name="Regenerate").click()
    ended(page)
    assert page.locator(".assistant").count() == 1
    assert page.locator(".assistant .text").inner_text() == text  # the seed is the same
    page.keyboard.press("Alt+n")
    assert page.locator(".message").count() == 0
    write(page, "second")
    page.reload()
    names = page.locator("#conversations .pick")
    expect(names).to_have_text(["second", "first"])
    assert page.get_by_label("Seed").input_value() == "3"  # settings are kept too
    names.nth(1).click()
    assert page.locator(".user .text").inner_text() == "first"
    assert page.locator(".assistant .text").inner_text() == text
    page.get_by_role("button", name="Delete first").click()
    expect(names).to_have_text(["second"])


def test_plain_decoding_beside_it(page):
    page.get_by_label("plain decoding beside it").check()
    write(page, "both")
    panels = page.locator(".assistant .answers section")
    assert panels.count() == 2
    expect(panels.nth(1).locator(".figures")).to_contain_text("tokens/s")
    expect(page.locator(".tools")).to_contain_text("texts equal")


def test_escape_stops(page):
    page.get_by_label("At most tokens").fill("280")
    page.get_by_label("Temperature").fill("2")
    page.get_by_label("Message", exact=True).fill("long")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.keyboard.press("Escape")
    ended(page)
    write(page, "and on")  # the place is free again
    assert page.locator(".assistant").count() == 2


def test_everything_is_reached_by_keyboard(page):
    found = set()
    page.get_by_label("Message", exact=True).focus()
    for _ in range(40):
        page.keyboard.press("Tab")
        found.add(page.evaluate("document.activeElement.id"))
    assert {"dark", "new", "system", "temperature", "top_p", "seed", "max_tokens", "drafts", "beside",
            "coloured", "trees", "input", "send"} <= found


def test_a_phone(page):
    page.set_viewport_size({"width": 360, "height": 640})
    write(page, "small")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for name in ("#input", "#send", "#menu", ".assistant"):
        box = page.locator(name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360, name
        assert name == ".assistant" or box["y"] + box["height"] <= 640, name
    expect(page.locator("#side")).to_be_hidden()
    page.get_by_role("button", name="Conversations").click()
    expect(page.locator("#side")).to_be_visible()
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator("#side")).to_be_hidden()
    assert page.locator(".message").count() == 0


def test_dark_is_kept(page):
    def back():
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = back()
    page.get_by_role("button", name="Dark or light").click()
    dark = back()
    assert dark != light
    page.reload()
    assert back() == dark


HOSTILE = """# <img src=x onerror=alert(1)> **bold** `<b>` [bad](javascript:alert(1)) [good](https://a.page/)

```html
<script>alert(1)</script>
```
- one
  - two

| a | b |
|---|---|
| 1 | *x* |

![i](https://a.page/x.png) <iframe>"""


def test_what_a_model_writes_is_no_markup(page):
    page.evaluate("""async (source) => {
        const { render } = await import("./markdown.js");
        const into = document.createElement("div");
        into.id = "tried";
        document.body.append(into);
        render(into, source, [[2, 9]], () => document.createElement("i"));
    }""", HOSTILE)
    tried = page.locator("#tried")
    for tag in ("img", "script", "iframe", "b"):
        assert tried.locator(tag).count() == 0, tag
    links = [link.get_attribute("href") for link in tried.locator("a").all()]
    assert links == ["https://a.page/", "https://a.page/x.png"]  # a picture is a link: nothing is fetched
    assert tried.locator("pre code").inner_text().strip() == "<script>alert(1)</script>"
    assert tried.locator("li").count() == 2 and tried.locator("td em").inner_text() == "x"
    assert tried.locator("strong").inner_text() == "bold"
    assert tried.locator("span.d").first.inner_text() == "<img sr"


def test_a_dead_server_is_told_and_comes_back(browser, golden, tmp_path):
    with socket.socket() as any_free:
        any_free.bind(("127.0.0.1", 0))
        port = any_free.getsockname()[1]
    options = "--port", str(port), "--api-key", "secret"
    page = browser.new_context().new_page()
    page.on("dialog", lambda dialog: dialog.accept("secret"))
    with serving(golden, tmp_path / "one", *options) as server:
        page.goto(server.url)
        expect(page.locator("#model")).to_have_text("target")
        page.get_by_label("At most tokens").fill("1900")
        page.get_by_label("Temperature").fill("2")
        page.get_by_label("Message", exact=True).fill("long")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant .figures")).to_contain_text("tokens/s", timeout=30_000)
        server.end(signal.SIGKILL)
        expect(page.locator("#banner")).to_contain_text("does not answer")
        expect(page.locator(".assistant .figures")).to_contain_text("the server has gone")
    with serving(golden, tmp_path / "two", *options):
        expect(page.locator("#banner")).to_be_hidden(timeout=10_000)
        page.get_by_label("At most tokens").fill("5")
        page.get_by_role("button", name="Regenerate").click()
        ended(page)
        expect(page.locator(".assistant .figures")).to_contain_text("tokens")
        assert page.locator(".assistant .failed").count() == 0


def test_a_conversation_that_is_deleted_stays_deleted(page):
    """Also while it is being answered."""
    write(page, "first")
    page.get_by_label("At most tokens").fill("280")
    page.get_by_label("Message", exact=True).press_sequentially("second")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Delete first").click()
    page.wait_for_timeout(1500)
    expect(page.locator("#conversations li")).to_have_count(0)
    assert page.evaluate("localStorage.getItem('eagle.conversations')") == "[]"


def test_a_question_outlives_a_reload(page):
    page.get_by_label("At most tokens").fill("280")
    page.get_by_label("Message", exact=True).press_sequentially("what was asked")
    page.keyboard.press("Enter")
    page.wait_for_timeout(100)
    page.reload()
    page.get_by_role("button", name="what was asked", exact=True).click()
    expect(page.locator(".user .text")).to_have_text("what was asked")


def test_two_tabs_keep_what_both_have(page):
    other = page.context.new_page()
    other.goto(page.url)
    write(page, "from one")
    other.get_by_label("At most tokens").fill("20")
    write(other, "from the other")
    for tab in (page, other):
        expect(tab.locator("#conversations li")).to_have_count(2)
    page.reload()
    expect(page.locator("#conversations li")).to_have_count(2)


@pytest.mark.parametrize("stored", (
    "{}", "5", "[null]", '[{"title": 3}]', '[{"title": "x", "messages": [7]}]', "{",
))
def test_whatever_is_stored_the_page_works(page, stored):
    for key in ("conversations", "settings"):
        page.evaluate(f"localStorage.setItem('eagle.{key}', {stored!r})")
    page.reload()
    page.get_by_label("At most tokens").fill("20")
    write(page, "still here")
    expect(page.locator(".assistant")).to_have_count(1)
