"""Maps and small images as HTML that stays sharp at any size."""

import base64
import html
import io
from collections.abc import Sequence

import matplotlib
import numpy as np
from PIL import Image, ImageDraw


SHARES, BIASES = matplotlib.colormaps["viridis"], matplotlib.colormaps["RdBu_r"]
UNSEEN = (0.6, 0.6, 0.6, 1.0)


def share_map(shares: np.ndarray, largest: float) -> Image.Image:
    """Color map of weights from 0 to `largest`."""
    return _colours(SHARES(shares / (largest or 1.0)))


def bias_map(biases: np.ndarray, limit: float) -> Image.Image:
    """Color map of position biases from -limit (blue) to limit (red), with masked positions in gray."""
    colours = BIASES(np.nan_to_num(biases, neginf=0.0) / (2 * limit) + 0.5)
    colours[np.isneginf(biases)] = UNSEEN
    return _colours(colours)


def _colours(rgba: np.ndarray) -> Image.Image:
    return Image.fromarray((rgba[..., :3] * 255).round().astype(np.uint8))


def enlarged(image: Image.Image, side: int = 480) -> Image.Image:
    """The image enlarged by an integer factor to about `side` pixels, without smoothing."""
    scale = max(1, round(side / max(image.size)))
    return image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)


def mark_patch(image: Image.Image, grid_size: tuple[int, int], patch: tuple[int, int]) -> Image.Image:
    """The enlarged image with a frame around one patch of the grid."""
    large = enlarged(image)
    height, width = large.height / grid_size[0], large.width / grid_size[1]
    top, left = patch[0] * height, patch[1] * width
    box = [round(x) for x in (left, top, left + width - 1, top + height - 1)]
    draw = ImageDraw.Draw(large)
    thickness = max(3, round(min(height, width) / 9))
    draw.rectangle(box, outline="white", width=thickness + 2)
    draw.rectangle(box, outline="#e4572e", width=thickness)
    return large


def figure(image: Image.Image, title: str, note: str = "", scale: str = "") -> str:
    """HTML of a picture with its title above, and a color scale and a note below."""
    note = f'<p class="aft-note">{html.escape(note)}</p>' if note else ""
    return (
        f'<figure class="aft-figure"><h4>{html.escape(title)}</h4>'
        f'<img src="{data_uri(image)}" alt="{html.escape(title, quote=True)}">{scale}{note}</figure>'
    )


def colour_scale(colormap: matplotlib.colors.Colormap, low: str, high: str, middle: str = "") -> str:
    """HTML of a color bar with labels under it."""
    stops = ", ".join(matplotlib.colors.to_hex(colormap(i / 8)) for i in range(9))
    labels = "".join(f"<span>{html.escape(label)}</span>" for label in (low, middle, high))
    return (
        f'<div class="aft-scale"><i style="background: linear-gradient(to right, {stops})"></i><b>{labels}</b></div>'
    )


def thumbnails(images: Sequence[Image.Image], name: str, chosen: int) -> str:
    """HTML of small pictures side by side, numbered from 1, with one of them marked."""
    cells = []
    for i, image in enumerate(images):
        marked = ' class="aft-chosen"' if i == chosen else ""
        cells.append(f'<li{marked}><img src="{data_uri(image)}" alt="{name} {i + 1}">{i + 1}</li>')
    return f'<ol class="aft-thumbnails">{"".join(cells)}</ol>'


def data_uri(image: Image.Image) -> str:
    """The image as a data URI in PNG format."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
