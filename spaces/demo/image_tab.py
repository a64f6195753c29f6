"""The tab "Classify": the class of an image, and what the layers look at."""

import tempfile
from pathlib import Path

import gradio as gr
import numpy as np
import torch
from gradio.media import get_image
from images import example_digits, image_input, is_image
from loading import Loaded
from maps import PatchMaps, patch_maps
from messages import explained
from pictures import BIASES, SHARES, bias_map, colour_scale, enlarged, figure, mark_patch, share_map, thumbnails
from PIL import Image

from aft_hf.data.image_files import open_image
from aft_hf.data.image_size import pixel_values


EXPLANATION = """Each patch takes an average over all patches with weights exp(K + w). The **key** K of a patch is the
same for every patch that reads it; the **position bias** w depends on the positions of both. **Tap a patch** to see
which patches it reads."""
NOTHING_YET = '<p class="aft-hint">Choose an image to see its maps here.</p>'
EXPECT = """It knows the classes it was trained on and calls any other image one of them. The maps show where
it looks."""
MOST_HEADS = 32
MOST_AT_ONCE = 4  # images of visitors that are computed at the same time; the default of gradio is 1


class ImageDemo:
    """The computations for one model: probabilities, the image that it sees, and the maps of a layer and head."""

    def __init__(self, model, processor):
        self.model, self.processor = model, processor
        self.num_layers, self.num_heads = model.config.num_hidden_layers, model.config.num_heads

    def pixels(self, image: Image.Image) -> torch.Tensor:
        """The pixel values of an image, (1, 3, height, width)."""
        return pixel_values(self.processor, [image])

    def seen(self, pixels: torch.Tensor) -> Image.Image:
        """The image of pixel values, after undoing the normalization."""
        picture = pixels[0].permute(1, 2, 0).numpy()
        if getattr(self.processor, "do_normalize", False):
            picture = picture * np.array(self.processor.image_std) + np.array(self.processor.image_mean)
        return Image.fromarray((picture.clip(0, 1) * 255).round().astype(np.uint8))

    def grid_size(self, pixels: torch.Tensor) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.model.config.grid_of(pixels.shape[-2:])

    def patch_at(self, image: Image.Image, point: tuple[int, int]) -> tuple[int, int]:
        """Row and column of the patch at (x, y) in the picture that `look` returns."""
        pixels = self.pixels(image)
        rows, columns = self.grid_size(pixels)
        width, height = enlarged(self.seen(pixels)).size
        row, column = point[1] * rows // height, point[0] * columns // width
        return min(max(int(row), 0), rows - 1), min(max(int(column), 0), columns - 1)

    def classify(self, image: Image.Image | None) -> dict[str, float] | None:
        """The probability of each label; None without an image."""
        if image is None:
            return None
        with torch.no_grad():
            logits = self.model(pixel_values=self.pixels(image)).logits[0]
        names = self.model.config.id2label
        return {str(names[i]): p for i, p in enumerate(logits.float().softmax(-1).tolist())}

    def most_telling(self, image: Image.Image) -> tuple[int, int]:
        """The layer and head, counted from 1, to show first.

        It is the head in which position biases of various sizes change the weights of the central patch most while the
        weights are still spread over several patches.
        """
        pixels, best = self.pixels(image), (0.0, 1, 1)
        for layer in range(self.num_layers):
            maps = patch_maps(self.model, pixels, layer=layer)
            weights, keys = maps.weights.flatten(1), maps.keys.flatten(1)
            moved = (weights - keys).abs().sum(1)  # (h,), twice the weight that moved
            spread = torch.special.entr(weights).sum(1)  # nats
            inside = [w[(w != 0) & w.isfinite()] for w in maps.biases]  # of the kernel or window
            varied = torch.stack([w.std() if len(w) > 1 else torch.tensor(0.0) for w in inside])
            score, head = (moved * spread * varied / (1 + varied)).max(0)
            best = max(best, (score.item(), layer + 1, int(head) + 1))
        return best[1:]

    def look(self, image: Image.Image | None, layer: int, head: int, query: tuple[int, int] | None):
        """The image with the query marked, its three maps, and small maps of all heads; layer and head count from 1.

        Raises:
            ValueError: the layer, head or patch does not exist.
        """
        if image is None:
            return None, NOTHING_YET, "", "", ""
        if not 1 <= head <= self.num_heads:
            raise ValueError(f"The heads are 1 to {self.num_heads}; there is no head {head}.")
        pixels = self.pixels(image)
        grid_size = self.grid_size(pixels)
        maps = patch_maps(self.model, pixels, layer=layer - 1, query=query)
        query = (grid_size[0] // 2, grid_size[1] // 2) if query is None else query
        maps = PatchMaps(*(each.numpy() for each in maps))
        return mark_patch(self.seen(pixels), grid_size, query), *_pictures(maps, head - 1), _all_heads(maps, head - 1)


def _pictures(maps: PatchMaps, head: int) -> tuple[str, str, str]:
    limit = _limit(maps.biases[head])
    biases = colour_scale(BIASES, f"\N{MINUS SIGN}{limit:.2g}", f"+{limit:.2g}", "0")
    return (
        _shares(maps.keys[head], "Keys", "exp(K): from the key alone"),
        figure(bias_map(maps.biases[head], limit), "Position bias", "w: red counts more, blue less", biases),
        _shares(maps.weights[head], "Weights", "exp(K + w): what the patch reads"),
    )


def _shares(shares: np.ndarray, title: str, note: str) -> str:
    largest = float(shares.max())
    return figure(share_map(shares, largest), title, note, colour_scale(SHARES, "0", f"{largest:.1%}"))


def _limit(biases: np.ndarray) -> float:
    return float(np.abs(np.nan_to_num(biases, neginf=0.0)).max()) or 1.0


def _all_heads(maps: PatchMaps, chosen: int) -> str:
    heads = len(maps.keys)
    if heads == 1:
        return ""
    shown = slice(0, MOST_HEADS)
    limit = _limit(maps.biases)
    keys = thumbnails([share_map(x, float(x.max())) for x in maps.keys[shown]], "head", chosen)
    biases = thumbnails([bias_map(x, limit) for x in maps.biases[shown]], "head", chosen)
    title = f"the {heads} heads" if heads <= MOST_HEADS else f"the first {MOST_HEADS} of {heads} heads"
    return f"<h4>Keys of {title}</h4>{keys}<h4>Position biases of {title}</h4>{biases}"


def build(app: gr.Blocks, loaded: Loaded) -> None:
    """Lay out the tab and connect its events."""
    demo = ImageDemo(loaded.model, loaded.processor)
    examples = [str(path) for path in sorted(Path(loaded.source).glob("*.jpg")) if is_image(path)]  # beside the model
    names = set(map(str, demo.model.config.id2label.values()))
    if names == set("0123456789"):
        examples = example_digits(tempfile.mkdtemp(prefix="aft_digits_"))
    elif names >= {"cat", "truck"}:
        examples += [get_image("bus.png"), get_image("lion.jpg")]  # that come with gradio
    start_image = open_image(examples[0]) if examples else Image.new("RGB", (32, 32), "grey")
    first_layer, first_head = demo.most_telling(start_image)
    query = gr.State(None)
    with gr.Row(elem_classes="aft-columns"):
        with gr.Column(scale=2, min_width=300):
            image = image_input(examples[0] if examples else None, elem_id="image-upload")
            label = gr.Label(num_top_classes=3, label="Prediction", elem_id="image-label")
            if examples:
                gr.Examples([[path] for path in examples], image, label="Images it was not trained on")
        with gr.Column(scale=3, min_width=300):
            gr.Markdown(EXPLANATION)
            with gr.Row():
                options = {"step": 1, "minimum": 1, "buttons": [], "min_width": 140}
                layer, head = (
                    gr.Slider(
                        value=first,
                        maximum=max(count, 2),
                        label=name.capitalize(),
                        visible=count > 1,
                        elem_id=name,
                        **options,
                    )
                    for name, first, count in (
                        ("layer", first_layer, demo.num_layers),
                        ("head", first_head, demo.num_heads),
                    )
                )
            with gr.Row(elem_classes="aft-maps"):
                with gr.Column(min_width=0, elem_classes="aft-view"):
                    gr.HTML("<h4>Image</h4>", padding=False)
                    view = gr.Image(interactive=False, show_label=False, container=False, buttons=[], elem_id="view")
                maps = [gr.HTML(elem_id=f"map-{name}", padding=False) for name in ("keys", "biases", "weights")]
            heads = gr.HTML(elem_id="all-heads", padding=False)

    look = explained(demo.look)
    shown, inputs = [view, *maps, heads], [image, layer, head, query]
    quietly = {"show_progress": "hidden", "trigger_mode": "always_last"}
    quietly |= {"concurrency_id": "images", "concurrency_limit": MOST_AT_ONCE}

    def start(picture, *choice):
        return explained(demo.classify)(picture), None, *look(picture, *choice, None)

    def choose(picture, layer, head, event: gr.SelectData):
        patch = demo.patch_at(picture, event.index)
        return patch, *look(picture, layer, head, patch)

    image.change(start, [image, layer, head], [label, query, *shown], **quietly)
    gr.on([layer.change, head.change], look, inputs, shown, **quietly)
    view.select(choose, [image, layer, head], [query, *shown], **quietly)
    if examples:
        app.load(start, [image, layer, head], [label, query, *shown], **quietly)
