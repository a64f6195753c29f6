"""The arms that the claims compare, by name: training runs and speed measurements.

An arm that several claims share is run once for each seed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Training:
    """A run of the training loop.

    Attributes:
        recipe: name of a file in `recipes`, without its suffix.
        overrides: overrides of the recipe, in the syntax of `aft-hf train`.
        measures: measurements of the trained model in addition to its score, as names of `measures.MEASURES`.
        start: the arm whose model of the same seed is the initial model, if any.
        convert: options of `save_converted` if the initial model is converted to an AFT first.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()
    start: str | None = None
    convert: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Speed:
    """A measurement of seconds and peak memory of our model and a peer, which take turns in fp32.

    Seeds have no effect on it: each seed is a repetition in new processes.

    Attributes:
        ours, peer: the `architecture` of a model and the fields of its config.
        task: "training" (one step) or "inference".
        batch: number of sequences or images.
        length: tokens of a sequence; None for images.
    """

    ours: Mapping[str, Any]
    peer: Mapping[str, Any]
    task: str
    batch: int
    length: int | None = None


# The values that `--scale` multiplies, by recipe; values that an arm sets to null are skipped. At scale 4 they are the
# paper's widths, heads and, for characters, T; depths, windows and image sizes are not scaled.
SCALED = {
    "characters_aft": ("steps", "model.hidden_size", "model.position_bias_dim", "data.seq_len"),
    "characters_gpt2": ("steps", "model.hidden_size", "model.num_attention_heads", "data.seq_len"),
    "characters_bloom": ("steps", "model.hidden_size", "data.seq_len"),
    "characters_baseline": ("steps", "model.hidden_size", "model.num_heads", "data.seq_len"),
    "pixels_aft": ("steps", "model.hidden_size", "model.position_bias_dim"),
    "pixels_gpt2": ("steps", "model.hidden_size", "model.num_attention_heads"),
    "images_aft_conv": ("steps", "model.hidden_size", "model.num_heads"),
    "images_aft_full": ("steps", "model.hidden_size", "model.position_bias_dim"),
    "images_vit": ("steps", "model.hidden_size", "model.num_attention_heads", "model.intermediate_size"),
    "images_lambda": ("steps", "model.hidden_size", "model.num_heads"),
    "images_pretrained": ("steps",),
}

# Overrides of `--smoke`, which replace scaling: a run takes seconds, and its numbers say nothing.
SMOKE = ("steps=4", "global_batch_size=4", "save_every=2", "log_every=1", "data.max_eval_samples=8")
SMOKE_MODEL = "model.num_hidden_layers=2"  # of a model that does not start from another arm

WIDE = ("model.hidden_size=128", "model.num_hidden_layers=4")
SHORT = ("data.seq_len=128", "global_batch_size=64", "steps=250")  # BLOOM's attention is not fused and therefore slow
KERNEL_3, KERNEL_7 = "model.kernel_size=3", "model.kernel_size=7"
FAST_BIASES = "optimizer.position_bias_scale=1000"  # as multipliers of converted models (docs/conversion.md)
FEW_HEADS = "model.num_heads=4"  # 24 features per head, as in the paper's 11/16 and 25/32
DEIT_CROPS = "data.augmentation.crop_scale=[0.08, 1.0]"
CONVERTED = {"kernel_size": 9, "num_heads": 4}  # as 25/32 at 384 px: whole grid, 24 features per head

CHARACTERS: dict[str, Training] = {
    "characters": Training("characters_aft"),
    "characters-transformer": Training("characters_gpt2"),
    "characters-simple": Training("characters_aft", ("model.aft_type=simple",)),
    "characters-wide": Training("characters_aft", WIDE),
    "characters-wide-short": Training("characters_aft", (*WIDE, "steps=250")),
    "characters-transformer-wide": Training("characters_gpt2", (*WIDE, "model.num_attention_heads=4")),
    "characters-linear": Training("characters_baseline", ("model.mixer=linear",)),
    "characters-performer": Training("characters_baseline", ("model.mixer=performer",)),
    "characters-synthesizer": Training("characters_baseline", ("model.mixer=synthesizer",)),
    "characters-window-8": Training("characters_aft", ("model.window_size=8",)),
    "characters-window-64": Training("characters_aft", ("model.window_size=64",)),
    "characters-full": Training("characters_aft", ("model.aft_type=full",)),
    "characters-t128": Training("characters_aft", ("data.seq_len=128", "global_batch_size=64")),
    "characters-t512": Training("characters_aft", ("data.seq_len=512", "global_batch_size=16")),
    "characters-alibi": Training(
        "characters_aft",
        (*SHORT, "model.aft_type=alibi", "model.num_heads=8"),
        ("lengths",),
    ),
    "characters-bloom": Training("characters_bloom", SHORT, ("lengths",)),
}

PIXELS: dict[str, Training] = {
    "pixels": Training("pixels_aft", measures=("position_biases",)),
    "pixels-transformer": Training("pixels_gpt2"),
    "pixels-simple": Training("pixels_aft", ("model.aft_type=simple",)),
    "pixels-wide": Training("pixels_aft", WIDE),
    "pixels-wide-short": Training("pixels_aft", (*WIDE, "steps=200")),
    "pixels-transformer-wide": Training("pixels_gpt2", (*WIDE, "model.num_attention_heads=4")),
    "pixels-unfactorized": Training("pixels_aft", ("model.position_bias_dim=null",), ("position_biases",)),
}

IMAGES: dict[str, Training] = {
    "conv": Training("images_aft_conv", measures=("kernels",)),
    "vit": Training("images_vit"),
    "lambda": Training("images_lambda"),
    "full": Training("images_aft_full", measures=("position_biases",)),
    "full-unfactorized": Training("images_aft_full", ("model.position_bias_dim=null",), ("position_biases",)),
    "conv-few-heads": Training("images_aft_conv", (FEW_HEADS,)),
    "conv-3": Training("images_aft_conv", (KERNEL_3,)),
    "conv-7": Training("images_aft_conv", (KERNEL_7,)),
    "conv-7-naive": Training("images_aft_conv", (KERNEL_7, "model.position_bias_reparameterized=false")),
    "conv-no-query": Training("images_aft_conv", ("model.use_query=false",)),
    "conv-3-no-global": Training("images_aft_conv", (KERNEL_3, "model.global_connectivity=false")),
    "conv-fast": Training("images_aft_conv", (FAST_BIASES,)),
    "conv-no-query-fast": Training("images_aft_conv", ("model.use_query=false", FAST_BIASES)),
    "conv-3-fast": Training("images_aft_conv", (KERNEL_3, FAST_BIASES)),
    "conv-3-no-global-fast": Training("images_aft_conv", (KERNEL_3, "model.global_connectivity=false", FAST_BIASES)),
    "conv-entropy": Training("images_aft_conv", ("model.position_bias_entropy_weight=0.001",), ("kernels",)),
    "conv-one-position": Training("images_aft_conv", ("model.position_bias_selection=gumbel",)),
    "conv-crops": Training("images_aft_conv", (DEIT_CROPS,), ("image_sizes",)),
    "vit-crops": Training("images_vit", (DEIT_CROPS,), ("image_sizes",)),
    "conv-random": Training("images_aft_conv", (FEW_HEADS, "model.kernel_size=9")),
    "conv-from-vit": Training("images_pretrained", start="vit", convert=CONVERTED),
    "vit-continued": Training("images_pretrained", start="vit"),
}

# No dropout, as in our models; attention with dropout is not fused.
_GPT2 = {"architecture": "gpt2", "vocab_size": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GPT2 |= {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
_TEXT = {"architecture": "aft", "vocab_size": 256, "use_cache": False}
_IMAGE = {"architecture": "aft", "modality": "image", "num_labels": 1000}
_NARROW = {"hidden_size": 256, "num_hidden_layers": 24}
_WIDE = {"hidden_size": 512, "num_hidden_layers": 12}
_SMALL = {"hidden_size": 384, "num_hidden_layers": 12}
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "image_size": 384}
_LOCAL_32 = {"aft_type": "local", "window_size": 32, "position_bias_dim": 256, "max_position_embeddings": 1024}
_LOCAL_256 = {"aft_type": "local", "window_size": 256, "position_bias_dim": 64, "max_position_embeddings": 3072}
_SIMPLE = {"aft_type": "simple", "max_position_embeddings": 3072}


def _beside_transformer(aft: Mapping[str, Any], size: Mapping[str, Any], heads: int, batch: int, length: int) -> Speed:
    """A training step of a language model of the paper and of the Transformer of the same size."""
    peer = {**_GPT2, **size} | {"num_attention_heads": heads, "n_positions": length}
    return Speed({**_TEXT, **aft, **size}, peer, "training", batch, length)


SPEEDS: dict[str, Speed] = {
    "speed-characters-wide": _beside_transformer(_LOCAL_32, _WIDE, 8, 2, 1024),
    "speed-characters": _beside_transformer(_LOCAL_32, _NARROW, 4, 2, 1024),
    "speed-characters-simple": _beside_transformer(_SIMPLE, _NARROW, 4, 2, 1024),
    "speed-pixels-wide": _beside_transformer(_LOCAL_256, _WIDE, 4, 1, 3072),
    "speed-pixels": _beside_transformer(_LOCAL_256, _NARROW, 2, 1, 3072),
    "speed-pixels-simple": _beside_transformer(_SIMPLE, _NARROW, 2, 1, 3072),
    "speed-deit-base": Speed(
        _IMAGE | _BASE | {"aft_type": "conv", "kernel_size": 25, "num_heads": 32},
        {"architecture": "vit", "num_attention_heads": 12, "num_labels": 1000, "intermediate_size": 3072} | _BASE,
        "inference",
        2,
    ),
    "speed-one-position": Speed(
        _IMAGE | _SMALL | {"aft_type": "conv", "num_heads": 384, "position_bias_selection": "gumbel"},
        _IMAGE | _SMALL | {"aft_type": "simple"},
        "inference",
        8,
    ),
}

ARMS: dict[str, Training | Speed] = CHARACTERS | PIXELS | IMAGES | SPEEDS


def data_of(arm: str) -> str:
    """The kind of data that an arm is trained on; "speed" for a speed measurement."""
    found = ARMS[arm]
    return found.recipe.split("_")[0] if isinstance(found, Training) else "speed"
