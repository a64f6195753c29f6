"""The pictures of the pages are readable anywhere, and the numbers of the README are those of the records."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image


ROOT = Path(__file__).parents[2]
# The maps of position biases have a scale of colors, from dark to light.
PICTURES = [path for path in sorted((ROOT / "docs" / "images").glob("**/*.svg")) if path.stem != "position_biases"]
PAGES = {"white": "#ffffff", "dark": "#0d1117"}
PHONE = 328  # pixels of the text of a page of GitHub on a phone of 360 pixels


def luminance(color: str) -> float:
    """Return the relative luminance of a color as defined by WCAG 2."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(first: str, second: str) -> float:
    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_every_color_of_a_drawing_is_visible_on_white_and_on_dark_pages(path):
    text = path.read_text()
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    colors = set(re.findall(r"#[0-9a-f]{6}\b", text))
    assert colors and {(x, page) for x in colors for page in PAGES if contrast(x, PAGES[page]) < 2.9} == set()


@pytest.mark.parametrize("name", ["aft", "benchmark_text", "benchmark_images"])
def test_the_text_of_a_drawing_has_at_least_8_pixels_on_a_phone(name):
    text = (ROOT / "docs" / "images" / f"{name}.svg").read_text()
    width, unit = re.search(r'width="([\d.]+)(pt)?"', text).groups()
    pixels = float(width) * (96 / 72 if unit else 1)
    sizes = [float(size) for size in re.findall(r'font-size="(\d+)"', text)] or [8 * 96 / 72]  # matplotlib: 8 points
    assert min(sizes) * min(1, PHONE / pixels) >= 8


def test_the_picture_of_the_demo_shows_the_whole_page_in_full_color():
    image = Image.open(ROOT / "docs" / "images" / "demo.png").convert("RGB")
    assert len(image.getcolors(2**24)) > 2000 and image.height > image.width


def test_the_times_of_the_gpu_page_and_the_readme_are_those_of_the_records():
    text, records = ((ROOT / "docs" / f"gpu.{end}").read_text(encoding="utf-8") for end in ("md", "json"))
    measured = [each for each in json.loads(records) if "attention" in each.get("ms", {})]
    assert len(measured) == 13
    for each in measured:
        kernels, attention, limit = (each["ms"].get(name, "") for name in ("kernels", "attention", "limit"))
        cells = each["model"], each["task"], kernels, attention, f"{attention / kernels:.2f}", limit
        assert f"| {' | '.join(map(str, cells))}".rstrip() in text
    speeds = " / ".join(f"{each['ms']['attention'] / each['ms']['kernels']:.2f}" for each in measured[:3])
    memory = measured[0]["MiB"]
    share = f"{memory['kernels'] / memory['attention']:.2f} x the memory at 1,024"
    assert f"| GPU: the same | {speeds} x the speed, {share} |" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"{memory[name] / 1024:.1f} GiB" in text for name in ("kernels", "attention", "portable"))


def test_the_speeds_of_the_readme_are_those_of_the_records_and_of_the_page():
    records = {each["case"]: each for each in json.loads((ROOT / "docs" / "benchmark.json").read_text())}
    cases = [records[f"table: AFT-local-32, {n} tokens, training, fp32"] for n in ("1,024", "4,096", "16,384")]
    speeds = " / ".join(f"{each['ratio']['peer']:.2f}" for each in cases)
    peaks = [{name: each["bytes"][name] + each["weights"][name] for name in ("ours", "peer")} for each in cases]
    memory = " / ".join(f"{peak['ours'] / peak['peer']:.2f}" for peak in peaks)
    for page in ("README.md", "docs/benchmark.md"):
        assert f"| {speeds} x the speed, {memory} x the memory |" in (ROOT / page).read_text(encoding="utf-8")
