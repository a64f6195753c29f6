"""The documentation site: what the build generates, and how its pages look in a browser."""

import functools
import html
import http.server
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aft_hf.training.recipe import RECIPES


for name in ("mkdocs", "mkdocstrings", "latex2mathml"):
    pytest.importorskip(name, reason="the site needs: pip install -c constraints.txt -e '.[docs]'")
ROOT = Path(__file__).parents[2]
TALLEST = 6 * 900  # pixels
TALLER = {"reproduction"}  # a row for each comparison
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site: AFT_HF_SITE, made by `make docs`, or a new one. Both builds are strict: a broken
    link or anchor is an error.
    """
    if given := os.environ.get("AFT_HF_SITE"):
        return ROOT / given
    folder = tmp_path_factory.mktemp("site")
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_formulas_are_mathml(site):
    assert (site / "method" / "index.html").read_text().count("<math") > 5
    assert [page for page in site.rglob("index.html") if 'class="arithmatex">\\' in page.read_text()] == []


def test_the_reference_shows_values_and_the_search_has_an_index(site):
    conversion, fields = (
        (site / "reference" / name / "index.html").read_text() for name in ("conversion", "configuration")
    )
    assert "KERNEL_SIZE" not in conversion
    layers = html.unescape(re.sub("<[^>]*>", "", (site / "reference" / "layers" / "index.html").read_text()))
    (local,) = re.findall(r"\bAFTLocal\(\n.*?\n\)", layers, re.DOTALL)
    for argument in ("window_size: int", "num_heads: int = 1", "position_bias_dim: int | None = 128"):
        assert argument in local
    (conv,) = re.findall(r"\bAFTConv\(\n.*?\n\)", layers, re.DOTALL)
    assert "options" not in local + conv and "key_per_head" not in conv  # which a caller cannot give
    assert "1 to 131,072, default: <code>256</code>" in fields
    sections = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert any("streaming" in section["text"].lower() for section in sections)  # the search finds it


def test_the_page_of_recipes_has_every_key_with_its_type_default_and_meaning(site):
    page = html.unescape(re.sub("<[^>]*>", "", (site / "reference" / "recipes" / "index.html").read_text()))
    shared, text, _, _, images = re.split("\n(?:Keys of every recipe|Other keys with task: .*)\n", page)[-5:]
    assert "\nseed (integer >= 0, default 0): Seed of " in shared and "\nbase (text, optional): " in shared
    assert "\nema_decay (number > 0 and < 1, optional): Decay of " in shared
    assert '\nmixed_precision (no or bf16 or fp16, default "no"): ' in shared
    assert "\ndata.seq_len (" in text and "\ndata.augmentation.crop_scale (list, optional)" in images
    assert "\ndata.train (" in shared and "\ndata.train (" not in images
    keys = re.findall(r"^([a-z][\w.]*) \(", page, re.MULTILINE)
    sections = {name for kind in RECIPES.values() for name in kind.model_fields}
    assert {key.split(".")[0] for key in keys} == sections | {"base", "smoke"}


@pytest.mark.parametrize(("width", "height"), ((1280, 900), (390, 844)), ids=("desktop", "phone"))
def test_pages_fit_and_request_nothing_from_elsewhere(site, browser, width, height):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        page = browser.new_page(viewport={"width": width, "height": height})
        wrong = []
        page.on("request", lambda it: it.url.startswith((address, "data:", "blob:")) or wrong.append(it.url))
        page.on("response", lambda it: it.status < 400 or wrong.append(it.url))
        for path in sorted(site.rglob("index.html")):
            name = path.parent.relative_to(site).as_posix()
            page.goto(address + name)
            tall, wide = page.evaluate("[document.documentElement.scrollHeight, document.documentElement.scrollWidth]")
            assert wide <= width, name
            assert tall <= TALLEST or width < 1280 or name in TALLER, name
        page.close()
        server.shutdown()
    assert wrong == []
