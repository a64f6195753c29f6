"""The claims as data: statements, the paper's numbers, and the comparisons of our runs."""

from dataclasses import dataclass
from typing import Any

from .arms import ARMS, RECALLS


@dataclass(frozen=True)
class Comparison:
    """A comparison of two numbers.

    Attributes:
        says: the comparison in words.
        ours: arm and metric of our number.
        other: arm and metric of the number to compare with, or a constant.
        higher: whether a higher number is better.
        margin: how much worse ours may be; 0 if ours has to be better.
        paper: the paper's numbers, ours and the other one.
        control: whether it is ours and not the paper's. A control does not count for the verdict.
    """

    says: str
    ours: tuple[str, str]
    other: tuple[str, str] | float
    higher: bool = False
    margin: float = 0.0
    paper: tuple[float, float] | None = None
    control: bool = False

    @property
    def metric(self) -> str:
        """The metric of our number."""
        return self.ours[1]


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, or an experiment of ours.

    Attributes:
        name: a number if it is a claim of the paper, a word if it is ours.
        says: its statement.
        where: the tables or sections of the paper.
        comparisons: what decides, and the controls.
        note: a note for the page.
        shown: arms that the page shows without a comparison.
    """

    name: str
    says: str
    where: str = ""
    comparisons: tuple[Comparison, ...] = ()
    note: str = ""
    shown: tuple[str, ...] = ()

    @property
    def arms(self) -> list[str]:
        """The arms, each once."""
        sides = [side for each in self.comparisons for side in (each.ours, each.other)]
        return list(dict.fromkeys([*(side[0] for side in sides if isinstance(side, tuple)), *self.shown]))


def _beats(says: str, ours: str, other: str, metric: str = "test", **options: Any) -> Comparison:
    """A comparison of one metric of two arms. Of images, the test score is the accuracy: higher is better."""
    options.setdefault("higher", metric == "test" and ARMS[ours].data.startswith("images"))
    return Comparison(says, (ours, metric), (other, metric), **options)


def _control(says: str, ours: str, other: str, **options: Any) -> Comparison:
    return _beats(says, ours, other, control=True, **options)


def _faster_and_smaller(name: str, arm: str, speed: float, memory: float) -> tuple[Comparison, Comparison]:
    return (
        Comparison(f"{name}: speed", (arm, "speed_ratio"), 1.0, higher=True, paper=(speed, 1.0)),
        Comparison(f"{name}: memory", (arm, "memory_ratio"), 1.0, paper=(memory, 1.0)),
    )


def _at_size(says: str, arm: str, metric: str, **options: Any) -> Comparison:
    return Comparison(says, (arm, metric), (arm, "test"), higher=True, margin=0.005, **options)


_CLAIMS = (
    Claim(
        "1",
        "AFT-local has a lower training loss on characters than a Transformer of equal depth and width, and a similar "
        "test loss",
        "Table 4",
        (
            _beats("training loss", "characters", "characters-transformer", "train", paper=(0.972, 1.039)),
            _beats(
                "test loss, at most 0.05 bits above",
                "characters",
                "characters-transformer",
                margin=0.05,
                paper=(1.154, 1.130),
            ),
            _control(
                "training loss, attention with ALiBi", "characters", "characters-transformer-alibi", metric="train"
            ),
            _control("test loss, attention with ALiBi", "characters", "characters-transformer-alibi", margin=0.05),
        ),
        "GPT-2 has learned positions, as in the paper; with ALiBi, its losses are below ours.",
    ),
    Claim(
        "2",
        "AFT-local beats AFT-simple",
        "Tables 2, 4",
        (
            _beats("characters", "characters", "characters-simple", paper=(1.154, 1.209)),
            _beats("pixels", "pixels", "pixels-simple", paper=(2.74, 2.89)),
        ),
    ),
    Claim(
        "3",
        "An intermediate window beats none and the full one",
        "Table 5",
        (
            _beats("window 32 beats none", "characters", "characters-simple", paper=(1.165, 1.209)),
            _beats("window 32 beats 256", "characters", "characters-full", paper=(1.165, 1.173)),
            _control("window 32 beats 8", "characters", "characters-window-8", paper=(1.165, 1.154)),
            _control("window 32 beats 64", "characters", "characters-window-64", paper=(1.165, 1.164)),
        ),
        "T and windows are a quarter of the paper's: 32 stands for its 128, 8 for its best, 32.",
    ),
    Claim(
        "4",
        "A longer sequence helps",
        "Table 6",
        (
            _beats("AFT-local, T = 256 beats 128", "characters", "characters-t128", paper=(1.135, 1.154)),
            _beats("AFT-local, T = 512 beats 128", "characters-t512", "characters-t128", paper=(1.134, 1.154)),
            _control("AFT-conv, T = 512 beats 128", "characters-lags-t512", "characters-lags-t128"),
        ),
        "At equal tokens, a row of a table for T = 512 gets a quarter of the samples.",
    ),
    Claim(
        "5",
        "Factorized position biases beat unfactorized ones, with far fewer parameters",
        "Tables 3, 9",
        (
            _beats("pixels", "pixels", "pixels-unfactorized", paper=(2.74, 2.84)),
            _beats("images", "full", "full-unfactorized", paper=(0.798, 0.782)),
            _beats("bias parameters per layer", "pixels", "pixels-unfactorized", "bias_parameters"),
        ),
    ),
    Claim(
        "6",
        "Deep and narrow beats shallow and wide",
        "Tables 2, 4",
        (
            _beats("characters, equal steps", "characters", "characters-wide", paper=(1.154, 1.180)),
            _beats("pixels, equal steps", "pixels", "pixels-wide", paper=(2.74, 2.80)),
            _control("characters, equal operations", "characters", "characters-wide-short"),
            _control("pixels, equal operations", "pixels", "pixels-wide-short"),
        ),
        "Equal steps, as in the paper; twice the width at half the depth doubles their operations.",
    ),
    Claim(
        "7",
        "AFT-local beats the Transformer of equal depth and width on pixels, and AFT-simple the Image Transformer",
        "Table 2",
        (
            _beats("deep and narrow", "pixels", "pixels-transformer", paper=(2.74, 2.86)),
            _beats("shallow and wide", "pixels-wide", "pixels-transformer-wide", paper=(2.80, 2.88)),
            _beats("AFT-simple, Image Transformer", "pixels-simple", "pixels-image-transformer", paper=(2.89, 2.90)),
        ),
        "The paper's Image Transformer has 2-D attention, ours 1-D.",
    ),
    Claim(
        "8",
        "AFT-conv beats a ViT of equal depth and width on images, and AFT-full matches it",
        "Table 7",
        (
            _beats("AFT-conv beats ViT", "conv", "vit", paper=(0.808, 0.799)),
            _beats("AFT-full at most 0.01 below ViT", "full", "vit", margin=0.01, paper=(0.798, 0.799)),
            _control("AFT-conv beats ViT, 100 epochs", "conv-100", "vit-100"),
            _control("AFT-full at most 0.01 below, 100 epochs", "full-100", "vit-100", margin=0.01),
        ),
    ),
    Claim(
        "9",
        "More heads help, and very small kernels already do well",
        "Tables 7, 11",
        (
            _beats("96 heads beat 4", "conv", "conv-few-heads", paper=(0.808, 0.802)),
            _beats("kernel 3 at most 0.01 below ViT", "conv-3", "vit", margin=0.01, paper=(0.799, 0.799)),
            _control("the same, 100 epochs", "conv-3-100", "vit-100", margin=0.01),
        ),
    ),
    Claim(
        "10",
        "Re-parameterized kernels beat naive ones",
        "Table 10",
        (_beats("kernel 7", "conv-7", "conv-7-naive", paper=(0.808, 0.794)),),
    ),
    Claim(
        "11",
        "The query matters",
        "Table 12",
        (_beats("accuracy", "conv", "conv-no-query", paper=(0.808, 0.793)),),
    ),
    Claim(
        "12",
        "Global connectivity matters",
        "Section 5.3",
        (_beats("kernel 3", "conv-3", "conv-3-no-global", paper=(0.808, 0.799)),),
    ),
    Claim(
        "13",
        "AFT-conv initialized from a DeiT beats random initialization and the DeiT, with fewer parameters, faster",
        "Table 8",
        (
            _beats("beats random initialization", "conv-of-vit", "conv-new", paper=(0.834, 0.816)),
            _beats("beats its ViT", "conv-of-vit", "vit", paper=(0.834, 0.829)),
            _beats("fewer parameters", "conv-of-vit", "vit", "parameters", paper=(79.7e6, 86.9e6)),
            *_faster_and_smaller("base 25/32 on a CPU", "speed-deit-base", 1.10, 0.65),
            _control("beats random initialization, equal steps in all", "conv-of-vit", "conv-new-long"),
            _control("beats its ViT, equal steps in all", "conv-of-vit", "vit-continued"),
        ),
        "The paper gives the converted model the steps of the new one, beyond those of its DeiT.",
    ),
    Claim(
        "14",
        "A larger image size in testing than in training keeps or improves accuracy",
        "Section 5.3",
        (
            _at_size("40 px after 32", "conv-crops", "test_at_40_px"),
            _at_size("56 px after 32", "conv-crops", "test_at_56_px", paper=(0.816, 0.810)),
            _at_size("ViT, 40 px after 32", "vit-crops", "test_at_40_px", control=True),
        ),
        "Random crops alone make a larger size better for any model (arXiv 1906.06423).",
    ),
    Claim(
        "15",
        "Entropy regularization makes kernels sparser at no loss; one position per head costs little accuracy and is "
        "as fast as AFT-simple",
        "Section 8",
        (
            _beats("smaller fraction of a kernel in use", "conv-entropy", "conv", "kernel_use"),
            _beats("regularized at most 0.01 below", "conv-entropy", "conv", margin=0.01, paper=(0.809, 0.808)),
            _beats("one position at most 0.02 below", "conv-one-position", "conv", margin=0.02, paper=(0.799, 0.808)),
            Comparison("0.8 of its speed on a CPU", ("speed-one-position", "speed_ratio"), 0.8, higher=True),
        ),
    ),
    Claim(
        "16",
        "AFT trains faster and in less memory than a Transformer, at the paper's sizes (here on a CPU)",
        "Tables 2, 4",
        (
            *_faster_and_smaller("AFT-local-32, T 1024", "speed-characters", 1.30, 0.40),
            *_faster_and_smaller("AFT-local-256, T 3072", "speed-pixels", 1.23, 0.42),
            *_faster_and_smaller("AFT-simple, T 3072", "speed-pixels-simple", 1.58, 0.31),
        ),
        "The paper's attention is not fused; ours is.",
    ),
    Claim(
        "18",
        "AFT beats the Linear Transformer, Performer, Synthesizer, Reformer and lambda layers of equal depth and "
        "width, and needs less memory than the last",
        "Tables 4, 7",
        (
            _beats("Linear Transformer", "characters-wide", "characters-linear", paper=(1.180, 1.207)),
            _beats("Performer", "characters-wide", "characters-performer", paper=(1.180, 1.199)),
            _beats("Synthesizer", "characters-wide", "characters-synthesizer", paper=(1.180, 1.298)),
            _beats("Reformer", "characters-wide", "characters-reformer", paper=(1.180, 1.195)),
            _beats("lambda layers", "conv", "lambda", paper=(0.808, 0.800)),
            Comparison("lambda layers, small: memory", ("speed-lambda", "memory_ratio"), 1.0, paper=(0.55, 1.0)),
            _control("AFT-simple, Linear Transformer", "characters-simple-wide", "characters-linear"),
            _control("AFT-simple, Performer", "characters-simple-wide", "characters-performer"),
        ),
        "The first two have learned positions only, as AFT-simple. Reformer hardly learns in 2,000 steps.",
    ),
    Claim(
        "20",
        "AFT-full learns local position biases",
        "Figure 3",
        (Comparison("mean distance by softmax(w), relative to equal weights", ("full", "distance"), 1.0),),
    ),
)
_OURS = (
    Claim(
        "later",
        "AFT has a lower test loss than later layers of equal depth and width on characters",
        comparisons=(
            _beats("AFT-local, RWKV-4", "characters", "characters-rwkv"),
            _beats("AFT-alibi, RWKV-4", "characters-aft-alibi", "characters-rwkv"),
            _beats("AFT-alibi, attention with ALiBi", "characters-aft-alibi", "characters-transformer-alibi"),
            _beats("AFT-alibi, Mamba-2", "characters-aft-alibi", "characters-mamba2"),
        ),
    ),
    Claim("recall", "Associative recall", shown=tuple(RECALLS)),
    Claim("widths", "Time by width", shown=("widths",)),
    Claim(
        "lengths",
        "Texts longer than in training",
        shown=("lengths-aft-alibi", "lengths-aft-conv", "lengths-aft-conv-and-alibi", "lengths-attention"),
    ),
)
CLAIMS = {claim.name: claim for claim in _CLAIMS}  # of the paper: these are counted
OURS = {claim.name: claim for claim in _OURS}
SECTIONS = CLAIMS | OURS
# The order of `all`.
_DECIDING = ("recall", "widths", "lengths", "later", "1", "6", "4", "7", "11", "12", "15", "18", "13", "8")
ORDER = tuple(dict.fromkeys((*_DECIDING, *CLAIMS)))
