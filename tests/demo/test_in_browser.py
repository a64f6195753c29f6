"""Tests of the demo in a browser: the real app on the loopback interface, in headless Chromium."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from PIL import Image


pytest.importorskip("gradio", reason="the demo needs gradio: pip install -c constraints.txt -e '.[demo-test]'")
playwright = pytest.importorskip("playwright.sync_api", reason="needs: pip install -e '.[demo-test]'")
pytestmark = pytest.mark.slow

APP = Path(__file__).parents[2] / "spaces" / "demo" / "app.py"
TIMEOUT = 180  # seconds for the app to start, on a busy machine
WIDTHS = {"desktop": (1200, 900), "phone": (375, 800)}


@pytest.fixture(scope="module")
def app(models, tmp_path_factory):
    """The URL of the app, which runs in a process of its own."""
    directory = tmp_path_factory.mktemp("app")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log, url = directory / "app.log", f"http://127.0.0.1:{port}"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(directory / "hf")}
    environment |= {"GRADIO_TEMP_DIR": str(directory / "gradio")}
    command = [sys.executable, str(APP), "--host", "127.0.0.1", "--port", str(port)]
    command += [text for path in models.values() for text in ("--model", path)]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=directory, env=environment, stdout=out, stderr=subprocess.STDOUT)
    started = time.monotonic()
    try:
        while True:
            assert process.poll() is None and time.monotonic() - started < TIMEOUT, log.read_text()[-2000:]
            try:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5).close()
                break
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def open_page(browser):
    """Open pages, and check that they log no errors and send requests only to the loopback interface."""
    complaints, contexts = [], []

    def watch(message):
        if message.type == "error":
            complaints.append(f"console: {message.text}")

    def stay(request):
        address = urlsplit(request.url)
        if address.scheme not in ("data", "blob") and address.hostname != "127.0.0.1":
            complaints.append(f"request to {request.url}")

    def visit(url, width="desktop", loaded="#map-weights img"):
        """Open a page, and wait until an element shows that it is loaded: by default the maps of the first example.

        Until then, Gradio may reset fields to their initial values and ignore clicks.
        """
        size = dict(zip(("width", "height"), WIDTHS[width]))
        contexts.append(browser.new_context(viewport=size))
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("console", watch)
        page.on("pageerror", lambda error: complaints.append(f"page error: {error}"))
        page.on("request", stay)
        page.goto(url)
        page.wait_for_selector(loaded)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def picture(tmp_path):
    """An image file to upload."""
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    path = tmp_path / "picture.png"
    Image.fromarray(pixels).save(path)
    return path


def changed(page, selector, before, part=""):
    """Wait until the content of an element differs from `before` and has an element `part`, and return it."""
    page.wait_for_function(
        "([selector, before, part]) => { const found = document.querySelector(selector); "
        "return found && found.innerHTML !== before && (part === '' || found.querySelector(part)); }",
        arg=[selector, before, part],
    )
    return page.inner_html(selector)


def open_tab(page, name):
    page.get_by_role("tab", name=name).click()


def until_it_works(page, attempt, seconds, failure):
    """Repeat an attempt, which gets a timeout in milliseconds; on failure, the error contains the text of the page."""
    for _ in range(TIMEOUT // seconds):
        try:
            return attempt(1000 * seconds)
        except playwright.TimeoutError:
            continue
    raise AssertionError(f"{failure} on the page: {page.inner_text('body')}")


def set_count(page, tokens):
    """Set the number of new tokens in the settings, which are closed at first, until it takes effect."""
    settings = page.locator(".aft-settings:visible button.label-wrap")
    field = page.locator("#count input[type=number]")

    def attempt(timeout):
        if not field.is_visible():
            settings.click(timeout=timeout)
        field.fill(str(tokens), timeout=timeout)
        field.press("Tab", timeout=timeout)  # the value counts once the field has lost the focus
        page.wait_for_function(
            "tokens => document.querySelector('#count input[type=range]').value === tokens",
            arg=str(tokens),
            timeout=timeout,
        )

    until_it_works(page, attempt, 5, f"{tokens} new tokens had no effect")


def press(page, button, result):
    """Click until the result appears, as a visitor would.

    A click has no effect while the layout moves below it, while Gradio's client closes its stream of events, and while
    an earlier click is processed.
    """

    def attempt(timeout):
        page.click(button, timeout=timeout)
        result.first.wait_for(timeout=timeout)

    until_it_works(page, attempt, 20, f"no result of {button}")


def ends_above_the_fold(page, selector):
    """Whether the first match is fully visible without scrolling."""
    box = page.locator(selector).first.bounding_box()
    return page.evaluate("window.scrollY") == 0 and box["y"] + box["height"] <= page.viewport_size["height"]


def no_wider_than(page):
    """Whether the page is no wider than the window."""
    return page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]


def upload(page, selector, path):
    """Upload a file, and remove the current image before if there is one."""
    remove = page.locator(f"{selector} button[aria-label='Remove Image']")
    if remove.count():
        remove.click()
        remove.wait_for(state="detached")
    page.set_input_files(f"{selector} input[type=file]", path)


def test_an_uploaded_image_is_classified_and_its_maps_follow_layer_and_patch(app, open_page, picture):
    page = open_page(app)
    page.wait_for_selector("#map-keys img")
    example = page.inner_html("#map-keys")
    upload(page, "#image-upload", picture)  # which first replaces the maps by a hint and empties the label
    changed(page, "#map-keys", example, "img")
    # Gradio may render the label again at any time, so its text is read once.
    actual = page.wait_for_function(
        "() => { const shares = document.querySelector('#image-label').innerText.match(/\\d+(?=%)/g);"
        " return shares?.length === 3 && shares; }"
    )
    shares = [int(x) for x in actual.json_value()]
    assert shares == sorted(shares, reverse=True)
    biases = page.inner_html("#map-biases")
    slider = page.locator("#layer input[type=range]")
    slider.focus()
    slider.press("ArrowLeft" if slider.input_value() == slider.get_attribute("max") else "ArrowRight")
    biases = changed(page, "#map-biases", biases)
    page.locator("#view img").click(position={"x": 5, "y": 5})
    changed(page, "#map-biases", biases)


def test_what_a_visitor_gets_wrong_is_said_on_the_page(app, open_page, tmp_path):
    page = open_page(app)
    Image.new("1", (9000, 9000)).save(tmp_path / "many.png")  # few bytes, many pixels
    (tmp_path / "broken.png").write_bytes(b"no image at all")
    (tmp_path / "large.png").write_bytes(bytes(21 * 2**20))
    for name, told in (
        ("broken.png", "cannot be read as an image"),
        ("many.png", "at most 67 million pixels are read"),
        ("large.png", "more than 20 MB"),
    ):
        upload(page, "#image-upload", tmp_path / name)
        page.get_by_text(told).wait_for()
    open_tab(page, "Write")
    page.fill("#prompt textarea", "a" * 60)
    press(page, "#write", page.get_by_text("ask for at most 4 new ones"))
    open_tab(page, "Draw")
    page.locator("#pixel-upload button[aria-label='Remove Image']").click()
    press(page, "#draw", page.get_by_text("There is no image yet"))
    assert "Traceback" not in page.content()


def test_a_phone_shows_the_results_of_every_tab_on_the_first_screen(app, open_page, picture):
    page = open_page(app, "phone")
    assert ends_above_the_fold(page, "#image-label") and no_wider_than(page)
    open_tab(page, "Write")
    set_count(page, 20)
    page.fill("#prompt textarea", "a" * 30)  # one long word
    press(page, "#write", page.locator(".aft-text:not(:has(.aft-cursor))"))
    assert ends_above_the_fold(page, "#text") and no_wider_than(page)
    written = page.inner_text(".aft-text")
    assert written.startswith("a" * 30) and len(written) > 30
    open_tab(page, "Draw")
    press(page, "#draw", page.get_by_text("Drawing 1"))
    assert ends_above_the_fold(page, "#pixels img") and no_wider_than(page)
    upload(page, "#pixel-upload", picture)
    page.wait_for_selector("#pixel-upload img")
    press(page, "#draw", page.get_by_text("Drawing 4"))
    assert page.locator("#pixels img").count() == 6
