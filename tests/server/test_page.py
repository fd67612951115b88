"""The page in a real browser.

Needs the package playwright and a Chromium in the PATH; its own download is not used.
"""
import re
import shutil
from itertools import pairwise

import pytest
from helpers.launching import free_port
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
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    opened, wrong = context.new_page(), []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("request", lambda request: wrong.append(request.url) if server.url not in request.url else None)
    opened.goto(server.url)
    fill(opened, Seed=3, Max_tokens=60)
    yield opened
    assert not wrong
    context.close()


def fill(page, **settings) -> None:
    """Fill in settings, by their labels."""
    for label, value in settings.items():
        page.get_by_label(label.replace("_", " ")).fill(str(value))


def write(page, words: str, wait: bool = True) -> None:
    """Send a message by keyboard, and wait for the answer's end."""
    page.locator("#input").press_sequentially(words)
    page.keyboard.press("Enter")
    if wait:
        ended(page)


def ended(page) -> None:
    expect(page.locator("#send")).to_be_visible(timeout=30_000)


def press(page, name: str) -> None:
    page.get_by_role("button", name=name).click()


def test_an_answer_beside_plain_decoding_and_its_tree(page):
    expect(page.locator("#model")).to_have_text("golden")
    page.get_by_label("Compare with plain decoding").check()
    page.locator(".prompts button").first.click()
    ended(page)
    panels = page.locator(".assistant .answers section")
    expect(panels.locator("h2")).to_have_text(["Speculative decoding", "Plain decoding"])
    words = re.compile(r"^[\d.]+ tokens/s · [\d.]+ tokens per step \(τ\) · 60 tokens · .* cut at the limit")
    expect(panels.locator(".figures")).to_have_text([words, words])
    expect(page.locator(".speedup")).to_have_text(re.compile(r"^\d+\.\d\d×.* texts equal$"))
    assert page.locator("#drawing g").count() > 1 and page.locator("#drawing g.taken").count() >= 1
    expect(page.locator("#drawing g title").nth(1)).to_have_text(re.compile(r" likely, with its path .* %$"))
    assert page.locator(".coloured .d[title*='% likely']").count()
    marks = page.evaluate("JSON.parse(localStorage['eagle.conversations'])[0].messages[1].marks")
    assert all(end <= start for (_, end, _), (start, _, _) in pairwise(marks))
    shown = page.evaluate(
        "import('./tree.js').then((tree) => [1, 0.996, 0.25, 1e-5].map((p) => tree.percent(Math.log(p))))")
    assert shown == ["100 %", "100 %", "25 %", "< 0.1 %"]


def test_conversations_are_kept_in_every_tab_and_forgotten(page):
    write(page, "first")
    text = page.locator(".assistant .text").inner_text()
    press(page, "Regenerate")
    ended(page)
    expect(page.locator(".assistant .text")).to_have_text([text])  # the seed is the same
    other = page.context.new_page()
    other.goto(page.url)
    press(other, "New conversation")
    write(other, "second")
    write(page, "more")  # a tab keeps what the other one has kept
    names = page.locator("#conversations .pick")
    expect(names).to_have_text(["first", "second"])
    page.reload()
    expect(page.locator(".user .text")).to_have_text(["first", "more"])
    assert page.get_by_label("Seed").input_value() == "3"  # settings are kept too
    names.nth(1).click()
    expect(page.locator(".user .text")).to_have_text("second")
    press(page, "Delete second")
    expect(names).to_have_text(["first"])


HOSTILE = """# <img src=x onerror=alert(1)> **bold** `<b>` *slant*

```html
<script>alert(1)</script>
```
![i](https://a.page/x.png) <iframe>"""


def test_what_a_model_writes_is_no_markup(page):
    page.evaluate("""async (source) => {
        const { element, render } = await import("./markdown.js");
        const into = element("div", { id: "tried" });
        document.body.append(into);
        render(into, { source, marks: [[2, 9]] }, () => element("i"));
    }""", HOSTILE)
    tried = page.locator("#tried")
    assert not any(tried.locator(tag).count() for tag in ("img", "script", "iframe", "b"))
    assert tried.locator("pre code").inner_text().strip() == "<script>alert(1)</script>"
    for tag, words in ("strong", "bold"), ("em", "slant"), ("h3 code", "<b>"), ("span.d", "<img sr"):
        assert tried.locator(tag).inner_text() == words


def test_a_dead_server_is_shown(browser, golden, tmp_path):
    options = "--port", str(free_port()), "--api-key", "secret", "--speculate", "none"
    page = browser.new_context().new_page()
    page.on("dialog", lambda dialog: dialog.accept("secret"))
    with serving(golden, tmp_path / "one", *options) as server:
        page.goto(server.url)
        expect(page.locator(".welcome")).to_contain_text("without drafts")
        expect(page.locator("#model")).to_have_text("target")
        expect(page.locator("#drafting")).to_be_hidden()
        fill(page, Max_tokens=1900, Temperature=2)
        write(page, "long", wait=False)
        expect(page.locator(".figures")).to_contain_text("tokens/s", timeout=30_000)
    ended(page)
    expect(page.locator(".figures.failed")).to_contain_text("error")


def test_what_ends_an_answer_before_its_end(page):
    """A refusal, Escape, another conversation, a reload: each can be followed by another answer."""
    sent = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.post_data else None)
    page.locator("#input").fill("word " * 400)
    page.keyboard.press("Enter")
    expect(page.locator(".figures.failed")).to_contain_text("shorten it")
    fill(page, Max_tokens=280, Temperature=2)
    figures = page.locator(".figures").last

    def begin_another(words: str) -> None:
        write(page, words, wait=False)
        expect(figures).to_contain_text("tokens/s")

    begin_another("first")  # a question without an answer is not sent again
    assert [message["content"] for message in sent[-1]["messages"]] == ["first"]
    page.keyboard.press("Escape")
    expect(figures).to_contain_text("stopped")
    begin_another("second")
    page.reload()
    expect(figures).to_contain_text(re.compile("interrupted|network error"))  # as it was kept
    fill(page, Max_tokens=280, Temperature=2)
    begin_another("third")
    press(page, "Delete word")
    ended(page)
    expect(page.locator(".welcome")).to_be_visible()
    assert page.evaluate("localStorage.getItem('eagle.conversations')") == "[]"
    fill(page, Max_tokens=20)
    write(page, "fourth")
    expect(figures).to_contain_text("20 tokens")
