"""The arms that the claims compare, by name: training runs and measurements of speed.

An arm that several claims share is run once for each seed. The learning rate of each arm is chosen by runs with a seed
of their own. They begin with the same `RATES` for all arms of the same data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


Values = Mapping[str, Any]


@dataclass(frozen=True)
class Training:
    """A run of the training loop.

    Attributes:
        data: "characters", "pixels", "images" or "images-100"; a key of `RECIPES` and `RATES`.
        model: the section `model` of the recipe, without `pretrained`.
        changes: other values of the recipe, by dotted key.
        measures: measurements of the trained model in addition to its score, as names of `measures.MEASURES`.
        start: the arm whose model of the same seed is the initial model, if any.
        convert: options of `convert_deit` if the initial model is converted to an AFT first.
    """

    data: str
    model: Values
    changes: Values = field(default_factory=dict)
    measures: tuple[str, ...] = ()
    start: str | None = None
    convert: Values | None = None

    @property
    def steps(self) -> int:
        """Training steps."""
        return self.changes.get("steps", RECIPES[self.data]["steps"])


@dataclass(frozen=True)
class Recall:
    """Training on associative recall (`recall.train_recall`).

    Attributes:
        model: the `architecture` of a model and the fields of its config, without its sizes of vocabulary and length.
        pairs: number of pairs in a sequence.
        rate_of: the arm with the same model whose learning rate is used.
        batch, steps: sequences of a step, and training steps.
    """

    data = "recall"

    model: Values
    pairs: int
    rate_of: str
    batch: int = 32
    steps: int = 400


@dataclass(frozen=True)
class Speed:
    """Seconds and peak memory of our model and a peer, which take turns in float32. Seeds have no effect on it.

    Attributes:
        ours, peer: the `architecture` of a model and the fields of its config.
        task: "training" (one step) or "inference".
        batch: number of sequences or images.
        length: tokens of a sequence; None for images.
    """

    data = "speed"

    ours: Values
    peer: Values
    task: str
    batch: int
    length: int | None = None


@dataclass(frozen=True)
class Widths:
    """Seconds of the operations of a layer by its width d (Table 1), forward, on one sequence of `length` tokens."""

    data = "widths"

    widths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    length: int = 1024


# The paper's optimizers, schedules that end, and a fraction of its widths, depths, lengths and steps. Patches of 4
# make a grid of 8 x 8, where the paper has 14 x 14: kernels 3, 5 and 7 cover about the share of it that 7, 11 and 15
# cover there. Position biases of images, which start at 0, learn 10 times as fast as the weights.
_ALL = {"max_grad_norm": 1.0, "evaluate_every": 10**6, "save_every": 200, "keep_checkpoints": 1, "tracker": None}
_TEXT = {"optimizer": {"betas": [0.9, 0.98], "weight_decay": 0.1}, "schedule": {"name": "cosine", "warmup_steps": 200}}
RECIPES: dict[str, dict[str, Any]] = {
    "characters": _ALL | _TEXT | {"task": "bytes", "data": {"seq_len": 256}, "steps": 2000, "global_batch_size": 8},
    "pixels": _ALL
    | _TEXT
    | {"task": "pixels", "steps": 1600, "global_batch_size": 4}
    | {"data": {"image_size": 16, "max_eval_samples": 500}},
    "images": _ALL
    | {"task": "images", "steps": 2000, "global_batch_size": 32, "label_smoothing": 0.1}
    | {"data": {"image_size": 32, "augmentation": {"crop_scale": [0.25, 1.0]}}}
    | {"optimizer": {"weight_decay": 0.05, "position_bias_scale": 10.0}}
    | {"schedule": {"name": "cosine", "warmup_steps": 200}},
}
# To convergence, for a GPU.
RECIPES["images-100"] = RECIPES["images"] | {"steps": 100 * 45_000 // 1024, "global_batch_size": 1024}
RECIPES["images-100"] |= {"data": RECIPES["images"]["data"] | {"workers": 2}}
_TEXT_RATES = (1e-3, 2e-3, 4e-3)
RATES = {"characters": _TEXT_RATES, "pixels": _TEXT_RATES, "recall": (2e-3, 4e-3, 8e-3)}
RATES |= dict.fromkeys(("images", "images-100"), (5e-4, 1e-3, 2e-3))
# A run that chooses a learning rate has one n-th of the steps. On associative recall, where losses fall late, all of
# them.
SEARCH_SHARES = {"characters": 4, "pixels": 4, "images": 4, "images-100": 20}
# Values of `--smoke`: a run takes seconds, and its numbers say nothing.
SMOKE = {"steps": 4, "global_batch_size": 4, "save_every": 2, "log_every": 1, "data.max_eval_samples": 8}

AFT = {"architecture": "aft", "hidden_size": 64, "num_hidden_layers": 8, "hidden_dropout_prob": 0.1}
LOCAL = AFT | {"aft_type": "local", "position_bias_dim": 64, "window_size": 32}
PIXELS_LOCAL = AFT | {"aft_type": "local", "position_bias_dim": 16, "window_size": 64}
SIMPLE, FULL, ALIBI = {"aft_type": "simple"}, {"aft_type": "full"}, {"aft_type": "alibi", "num_heads": 8}
LAGS = {"aft_type": "conv", "num_heads": 8, "kernel_size": 32}  # biases by lag: no table with a row for each position
SHALLOW = {"num_hidden_layers": 4}
WIDE = {"hidden_size": 128, "num_hidden_layers": 4}
# No dropout of attention, which AFT has none of: it would not be fused.
GPT2 = {"architecture": "gpt2", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 2}
GPT2 |= {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.0, "tie_word_embeddings": False}
BLOOM = {"architecture": "bloom", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 8}
BLOOM |= {"hidden_dropout": 0.1, "attention_dropout": 0.0, "tie_word_embeddings": False}
MAMBA2 = {"architecture": "mamba2", "hidden_size": 64, "num_hidden_layers": 14, "num_heads": 8, "head_dim": 16}
MAMBA2 |= {"state_size": 64, "n_groups": 1, "chunk_size": 64, "tie_word_embeddings": False}
OTHER = AFT | WIDE | {"architecture": "aft-baseline", "num_heads": 4}  # of the shape of the wide AFT
REFORMER = {"architecture": "reformer", "hidden_size": 128, "attn_layers": ["lsh"] * 4, "num_hashes": 4}
REFORMER |= {"num_attention_heads": 4, "attention_head_size": 32, "feed_forward_size": 512, "hidden_act": "gelu"}
REFORMER |= {"hidden_dropout_prob": 0.1, "is_decoder": True, "axial_pos_embds": False, "lsh_attn_chunk_length": 32}
REFORMER |= {"tie_word_embeddings": False}
# Attention to the last 64 of 768 sub-pixels: the 1-D attention of the Image Transformer. The paper has the 2-D one.
IMAGE_TRANSFORMER = {"architecture": "gpt_neo", "hidden_size": 64, "num_layers": 8, "num_heads": 2, "window_size": 64}
IMAGE_TRANSFORMER |= {"attention_types": [[["local"], 8]], "resid_dropout": 0.1, "embed_dropout": 0.1}
IMAGE_TRANSFORMER |= {"tie_word_embeddings": False}
IMAGE = {"hidden_size": 96, "num_hidden_layers": 6, "patch_size": 4, "layer_norm_eps": 1e-6}
CONV = IMAGE | {"architecture": "aft", "modality": "image", "aft_type": "conv", "num_heads": 96, "kernel_size": 5}
IMAGE_FULL = IMAGE | {"architecture": "aft", "modality": "image", "aft_type": "full", "position_bias_dim": 32}
VIT = IMAGE | {"architecture": "vit", "num_attention_heads": 3, "intermediate_size": 384}
LAMBDA_LAYERS = {"architecture": "aft-baseline", "mixer": "lambda", "key_dim": 16}
LAMBDA_LAYERS |= {"use_cls_token": False, "use_position_embeddings": True}
LAMBDA = IMAGE | LAMBDA_LAYERS | {"modality": "image", "num_heads": 3}

KERNEL_3, KERNEL_7, FEW_HEADS = {"kernel_size": 3}, {"kernel_size": 7}, {"num_heads": 4}  # 24 features per head
NO_QUERY, NO_GLOBAL = {"use_query": False}, {"global_connectivity": False}
SHORT = {"data.seq_len": 128, "global_batch_size": 16}
LENGTHS = {"data.seq_len": 64, "global_batch_size": 16, "steps": 600}
DEIT_CROPS = {"data.augmentation.crop_scale": [0.08, 1.0]}
PACE = {"position_bias_multiplier": 1000.0}  # of converted and new models alike
SAME_PACE = {"optimizer.position_bias_scale": 1.0}
CONVERTED = {"kernel_size": 9, "num_heads": 4} | PACE  # as 25/32 at 384 px: the whole grid, 24 features per head


def _half(data: str) -> Values:
    return {"steps": RECIPES[data]["steps"] // 2}


def _twice(data: str) -> Values:
    return {"steps": RECIPES[data]["steps"] * 2}


def _characters(model: Values, changes: Values | None = None, *measures: str) -> Training:
    return Training("characters", model, changes or {}, measures)


def _pixels(model: Values, changes: Values | None = None) -> Training:
    return Training("pixels", model, changes or {}, ("position_biases",))


def _images(model: Values, changes: Values | None = None, *measures: str, **start: Any) -> Training:
    return Training("images", model, changes or {}, measures, **start)


def _images_100(model: Values) -> Training:
    return Training("images-100", model)


TRAININGS: dict[str, Training] = {
    "characters": _characters(LOCAL),
    "characters-transformer": _characters(GPT2),
    "characters-transformer-alibi": _characters(BLOOM),
    "characters-rwkv": _characters(AFT | {"architecture": "aft-baseline", "mixer": "rwkv"}),
    "characters-mamba2": _characters(MAMBA2),
    "characters-aft-alibi": _characters(AFT | ALIBI),
    "characters-simple": _characters(AFT | SIMPLE),
    "characters-wide": _characters(LOCAL | WIDE),
    "characters-wide-short": _characters(LOCAL | WIDE, _half("characters")),
    "characters-simple-wide": _characters(AFT | SIMPLE | WIDE),
    "characters-linear": _characters(OTHER | {"mixer": "linear"}),
    "characters-performer": _characters(OTHER | {"mixer": "performer"}),
    "characters-synthesizer": _characters(OTHER | {"mixer": "synthesizer"}),
    "characters-reformer": _characters(REFORMER),
    "characters-window-8": _characters(LOCAL | {"window_size": 8}),
    "characters-window-64": _characters(LOCAL | {"window_size": 64}),
    "characters-full": _characters(LOCAL | FULL),
    "characters-t128": _characters(LOCAL, SHORT),
    "characters-t512": _characters(LOCAL, {"data.seq_len": 512, "global_batch_size": 4}),
    "characters-lags-t128": _characters(AFT | LAGS, SHORT),
    "characters-lags-t512": _characters(AFT | LAGS, {"data.seq_len": 512, "global_batch_size": 4}),
    "lengths-aft-alibi": _characters(AFT | ALIBI | SHALLOW, LENGTHS, "lengths"),
    "lengths-aft-conv": _characters(AFT | LAGS | SHALLOW, LENGTHS, "lengths"),
    "lengths-aft-conv-and-alibi": _characters(
        AFT | LAGS | SHALLOW | {"aft_type": ["conv", "alibi"] * 2}, LENGTHS, "lengths"
    ),
    "lengths-attention": _characters(BLOOM | SHALLOW, LENGTHS, "lengths"),
    "pixels": _pixels(PIXELS_LOCAL),
    "pixels-transformer": _pixels(GPT2),
    "pixels-simple": _pixels(AFT | SIMPLE),
    "pixels-image-transformer": _pixels(IMAGE_TRANSFORMER),
    "pixels-wide": _pixels(PIXELS_LOCAL | WIDE),
    "pixels-wide-short": _pixels(PIXELS_LOCAL | WIDE, _half("pixels")),
    "pixels-transformer-wide": _pixels(GPT2 | WIDE | {"num_attention_heads": 4}),
    "pixels-unfactorized": _pixels(PIXELS_LOCAL | {"position_bias_dim": None}),
    "conv": _images(CONV, None, "kernels"),
    "vit": _images(VIT),
    "lambda": _images(LAMBDA),
    "full": _images(IMAGE_FULL, None, "position_biases", "locality"),
    "full-unfactorized": _images(IMAGE_FULL | {"position_bias_dim": None}, None, "position_biases"),
    "conv-few-heads": _images(CONV | FEW_HEADS),
    "conv-3": _images(CONV | KERNEL_3),
    "conv-7": _images(CONV | KERNEL_7),
    "conv-7-naive": _images(CONV | KERNEL_7 | {"position_bias_reparameterized": False}),
    "conv-no-query": _images(CONV | NO_QUERY),
    "conv-3-no-global": _images(CONV | KERNEL_3 | NO_GLOBAL),
    "conv-entropy": _images(CONV | {"position_bias_entropy_weight": 0.001}, None, "kernels"),
    "conv-one-position": _images(CONV | {"position_bias_selection": "gumbel"}),
    "conv-crops": _images(CONV, DEIT_CROPS, "image_sizes"),
    "vit-crops": _images(VIT, DEIT_CROPS, "image_sizes"),
    "conv-new": _images(CONV | FEW_HEADS | {"kernel_size": 9} | PACE, SAME_PACE),
    "conv-new-long": _images(CONV | FEW_HEADS | {"kernel_size": 9} | PACE, SAME_PACE | _twice("images")),
    "conv-of-vit": _images({}, SAME_PACE, start="vit", convert=CONVERTED),
    "vit-continued": _images({}, start="vit"),
    "conv-100": _images_100(CONV),
    "vit-100": _images_100(VIT),
    "conv-3-100": _images_100(CONV | KERNEL_3),
    "full-100": _images_100(IMAGE_FULL),
}

# No dropout, as in our models; attention with dropout is not fused.
_GPT2 = {"architecture": "gpt2", "vocab_size": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GPT2 |= {"use_cache": False, "bos_token_id": None, "eos_token_id": None}
_AFT_TEXT = {"architecture": "aft", "vocab_size": 256, "use_cache": False}
_AFT_IMAGE = {"architecture": "aft", "modality": "image", "num_labels": 1000}
_DEEP = {"hidden_size": 256, "num_hidden_layers": 24}
_SMALL = {"hidden_size": 384, "num_hidden_layers": 12}
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "image_size": 384}
_LOCAL_32 = {"aft_type": "local", "window_size": 32, "position_bias_dim": 256, "max_position_embeddings": 1024}
_LOCAL_256 = {"aft_type": "local", "window_size": 256, "position_bias_dim": 64, "max_position_embeddings": 3072}
_SIMPLE = {"aft_type": "simple", "max_position_embeddings": 3072}


def _beside_gpt2(aft: Values, heads: int, batch: int, length: int) -> Speed:
    """A training step of a language model of the paper and of the Transformer of the same size."""
    peer = {**_GPT2, **_DEEP} | {"num_attention_heads": heads, "n_positions": length}
    return Speed({**_AFT_TEXT, **aft, **_DEEP}, peer, "training", batch, length)


SPEEDS: dict[str, Speed] = {
    "speed-characters": _beside_gpt2(_LOCAL_32, 4, 2, 1024),
    "speed-pixels": _beside_gpt2(_LOCAL_256, 2, 1, 3072),
    "speed-pixels-simple": _beside_gpt2(_SIMPLE, 2, 1, 3072),
    "speed-deit-base": Speed(
        _AFT_IMAGE | _BASE | {"aft_type": "conv", "kernel_size": 25, "num_heads": 32},
        {"architecture": "vit", "num_attention_heads": 12, "num_labels": 1000, "intermediate_size": 3072} | _BASE,
        "inference",
        2,
    ),
    "speed-lambda": Speed(
        _AFT_IMAGE | _SMALL | {"aft_type": "conv", "num_heads": 384},
        _AFT_IMAGE | _SMALL | LAMBDA_LAYERS | {"num_heads": 6},
        "inference",
        8,
    ),
    "speed-one-position": Speed(
        _AFT_IMAGE | _SMALL | {"aft_type": "conv", "num_heads": 384, "position_bias_selection": "gumbel"},
        _AFT_IMAGE | _SMALL | {"aft_type": "simple"},
        "inference",
        8,
    ),
}

_TWO_LAYERS = {"hidden_size": 64, "num_hidden_layers": 2}
RECALL_MODELS: dict[str, Values] = {
    "attention": {"architecture": "llama", "num_attention_heads": 2, "num_key_value_heads": 2}  # rotary positions
    | {"intermediate_size": 192, "bos_token_id": None, "eos_token_id": None},
    "Mamba-2": {"architecture": "mamba2", "num_heads": 8, "head_dim": 16, "state_size": 32, "n_groups": 1}
    | {"chunk_size": 16, "tie_word_embeddings": False},
    "RWKV-4": {"architecture": "aft-baseline", "mixer": "rwkv"},
    "AFT-local": {"architecture": "aft", "aft_type": "local", "position_bias_dim": 16, "window_size": 8},
    "AFT-conv": {"architecture": "aft", "aft_type": "conv", "num_heads": 8, "kernel_size": 8},
    "AFT-alibi": {"architecture": "aft", "aft_type": "alibi", "num_heads": 8},
}
PAIRS = (2, 4, 8, 16)
SEARCHED = 4  # pairs with which the learning rate of a model is chosen


def recall_arm(model: str, pairs: int) -> str:
    """The name of an arm on associative recall."""
    return f"recall-{model.lower()}-{pairs}"


RECALLS = {
    recall_arm(name, pairs): Recall(_TWO_LAYERS | model, pairs, recall_arm(name, SEARCHED))
    for pairs in PAIRS
    for name, model in RECALL_MODELS.items()
}

ARMS: dict[str, Training | Speed | Recall | Widths] = {**TRAININGS, **SPEEDS, **RECALLS, "widths": Widths()}
