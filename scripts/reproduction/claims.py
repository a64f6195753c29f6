"""The claims as data: statements, the paper's numbers, and the comparisons of our runs that decide."""

from dataclasses import dataclass
from typing import Any

from .arms import ARMS


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
        judged: whether it counts for the verdict. A control that can reverse the claim counts.
        control: whether it is ours and not the paper's.
    """

    says: str
    ours: tuple[str, str]
    other: tuple[str, str] | float
    higher: bool = False
    margin: float = 0.0
    paper: tuple[float, float] | None = None
    judged: bool = True
    control: bool = False

    @property
    def metric(self) -> str:
        """The metric of our number."""
        return self.ours[1]


@dataclass(frozen=True)
class Claim:
    """A claim: its number, its statement, where it is made, its comparisons, and a note for the page."""

    number: int
    says: str
    where: str
    comparisons: tuple[Comparison, ...]
    note: str = ""

    @property
    def arms(self) -> list[str]:
        """The arms of the comparisons, each once."""
        sides = [side for each in self.comparisons for side in (each.ours, each.other)]
        return list(dict.fromkeys(side[0] for side in sides if isinstance(side, tuple)))


def _beats(says: str, ours: str, other: str, metric: str = "test", **options: Any) -> Comparison:
    """A comparison of one metric of two arms. Of images, the test score is the accuracy: higher is better."""
    options.setdefault("higher", metric == "test" and ARMS[ours].data == "images")
    return Comparison(says, (ours, metric), (other, metric), **options)


def _control(says: str, ours: str, other: str, **options: Any) -> Comparison:
    return _beats(says, ours, other, control=True, **options)


def _faster_and_smaller(name: str, arm: str, speed: float, memory: float) -> tuple[Comparison, Comparison]:
    return (
        Comparison(f"{name}: faster", (arm, "speed_ratio"), 1.0, higher=True, paper=(speed, 1.0)),
        Comparison(f"{name}: less memory", (arm, "memory_ratio"), 1.0, paper=(memory, 1.0)),
    )


def _at_size(says: str, arm: str, metric: str, **options: Any) -> Comparison:
    return Comparison(says, (arm, metric), (arm, "test"), higher=True, margin=0.005, **options)


def _at_length(says: str, arm: str, **options: Any) -> Comparison:
    return Comparison(says, (arm, "test_at_8x"), (arm, "test_at_1x"), margin=0.02, **options)


_CLAIMS = (
    Claim(
        1,
        "AFT-local has a lower training loss on characters than a Transformer of equal size, and a similar test loss",
        "Table 4",
        (
            _beats("lower training loss", "characters", "characters-transformer", "train", paper=(0.972, 1.039)),
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
        "A Transformer with learned positions learns them slowly: one with ALiBi (BLOOM) stands beside it.",
    ),
    Claim(
        2,
        "AFT-local beats AFT-simple",
        "Tables 2, 4",
        (
            _beats("on characters", "characters", "characters-simple", paper=(1.154, 1.209)),
            _beats("on pixels", "pixels", "pixels-simple", paper=(2.74, 2.89)),
        ),
    ),
    Claim(
        3,
        "An intermediate window beats none and the full one",
        "Table 5",
        (
            _beats("window 32 beats none", "characters", "characters-simple", paper=(1.165, 1.209)),
            _beats("window 32 beats 256", "characters", "characters-full", paper=(1.165, 1.173)),
            _control("window 32 beats 8", "characters", "characters-window-8", judged=False, paper=(1.165, 1.154)),
            _control("window 32 beats 64", "characters", "characters-window-64", judged=False, paper=(1.165, 1.164)),
        ),
    ),
    Claim(
        4,
        "A longer sequence helps",
        "Table 6",
        (
            _beats("AFT-local, T = 256 beats 128", "characters", "characters-t128", paper=(1.135, 1.154)),
            _beats("AFT-local, T = 512 beats 128", "characters-t512", "characters-t128", paper=(1.134, 1.154)),
            _control("AFT-conv, T = 512 beats 128", "characters-lags-t512", "characters-lags-t128"),
        ),
        "AFT-local has tables with a row for each position, which at T = 512 gets a quarter of the samples; the "
        "biases of AFT-conv depend on the distance only.",
    ),
    Claim(
        5,
        "Factorized position biases beat unfactorized ones, with far fewer parameters",
        "Tables 3, 9",
        (
            _beats("on pixels", "pixels", "pixels-unfactorized", paper=(2.74, 2.84)),
            _beats("on images", "full", "full-unfactorized", paper=(0.798, 0.782)),
            _beats("fewer bias parameters per layer", "pixels", "pixels-unfactorized", "bias_parameters"),
        ),
    ),
    Claim(
        6,
        "Deep and narrow beats shallow and wide at equal cost",
        "Tables 2, 4",
        (
            _beats("characters", "characters", "characters-wide-short", paper=(1.154, 1.180)),
            _beats("pixels", "pixels", "pixels-wide-short", paper=(2.74, 2.80)),
            _control(
                "Transformer, characters", "characters-transformer", "characters-transformer-wide-short", judged=False
            ),
            _control("at equal steps, characters", "characters", "characters-wide", judged=False),
            _control("at equal steps, pixels", "pixels", "pixels-wide", judged=False),
        ),
        "Half the depth at twice the width takes twice the operations: equal cost is half the steps.",
    ),
    Claim(
        7,
        "AFT-local beats the Transformer of equal size on pixels",
        "Table 2",
        (
            _beats("deep and narrow", "pixels", "pixels-transformer", paper=(2.74, 2.86)),
            _beats("shallow and wide", "pixels-wide", "pixels-transformer-wide", paper=(2.80, 2.88)),
        ),
    ),
    Claim(
        8,
        "AFT-conv beats a ViT of equal size on images, and AFT-full matches it",
        "Table 7",
        (
            _beats("AFT-conv beats ViT", "conv", "vit", paper=(0.808, 0.799)),
            _beats("AFT-full at most 0.01 below ViT", "full", "vit", margin=0.01, paper=(0.798, 0.799)),
        ),
    ),
    Claim(
        9,
        "More heads help, and very small kernels already do well",
        "Tables 7, 11",
        (
            _beats("96 heads beat 4", "conv", "conv-few-heads", paper=(0.808, 0.802)),
            _beats("kernel 3 at most 0.01 below ViT", "conv-3", "vit", margin=0.01, paper=(0.808, 0.799)),
        ),
    ),
    Claim(
        10,
        "Re-parameterized kernels beat naive ones",
        "Table 10",
        (_beats("kernel 7", "conv-7", "conv-7-naive", paper=(0.808, 0.794)),),
    ),
    Claim(
        11,
        "The query matters",
        "Table 12",
        (
            _beats("accuracy", "conv", "conv-no-query", paper=(0.808, 0.793)),
            _control("with faster biases", "conv-fast", "conv-no-query-fast"),
        ),
    ),
    Claim(
        12,
        "Global connectivity matters",
        "Section 5.3",
        (
            _beats("kernel 3", "conv-3", "conv-3-no-global", paper=(0.808, 0.799)),
            _control("with faster biases", "conv-3-fast", "conv-3-no-global-fast"),
        ),
    ),
    Claim(
        13,
        "AFT-conv initialized from a DeiT beats random initialization and the DeiT, with fewer parameters, faster",
        "Table 8",
        (
            _beats("beats random initialization", "conv-of-vit", "conv-new", paper=(0.834, 0.816)),
            _control("beats random initialization of twice the steps", "conv-of-vit", "conv-new-long"),
            _beats("beats the ViT of as many steps in all", "conv-of-vit", "vit-continued", paper=(0.834, 0.829)),
            _beats("fewer parameters", "conv-of-vit", "vit", "parameters", paper=(79.7e6, 86.9e6)),
            *_faster_and_smaller("base 25/32", "speed-deit-base", 1.10, 0.65),
        ),
        "The position biases of both AFT-convs learn equally fast.",
    ),
    Claim(
        14,
        "A larger image size in testing than in training keeps or improves accuracy",
        "Section 5.3",
        (
            _at_size("40 px after 32", "conv-crops", "test_at_40_px"),
            _at_size("56 px after 32", "conv-crops", "test_at_56_px", paper=(0.816, 0.810)),
            _at_size("ViT, 40 px after 32", "vit-crops", "test_at_40_px", control=True, judged=False),
        ),
        "Random crops of 8 to 100 % of the area alone make a larger size better for any model (arXiv 1906.06423).",
    ),
    Claim(
        15,
        "Entropy regularization makes kernels sparser at no loss; one position per head costs little accuracy and is "
        "as fast as AFT-simple",
        "Section 8",
        (
            _beats("smaller fraction of a kernel in use", "conv-entropy", "conv", "kernel_use"),
            _beats("regularized at most 0.01 below", "conv-entropy", "conv", margin=0.01, paper=(0.809, 0.808)),
            _beats("one position at most 0.02 below", "conv-one-position", "conv", margin=0.02, paper=(0.799, 0.808)),
            Comparison("at least 0.8 of its speed", ("speed-one-position", "speed_ratio"), 0.8, higher=True),
        ),
    ),
    Claim(
        16,
        "AFT trains faster and in less memory than a Transformer, at the paper's sizes",
        "Tables 2, 4",
        (
            *_faster_and_smaller("AFT-local-32, L 24, d 256, T 1024", "speed-characters", 1.30, 0.40),
            *_faster_and_smaller("AFT-local-256, L 24, d 256, T 3072", "speed-pixels", 1.23, 0.42),
            *_faster_and_smaller("AFT-simple, L 24, d 256, T 3072", "speed-pixels-simple", 1.58, 0.31),
        ),
        "The paper's Transformer computes attention without fusion; ours is GPT-2 with fused attention.",
    ),
    Claim(
        17,
        "AFT with ALiBi biases, trained at T = 128, keeps its loss on longer texts, as attention does",
        "ours; ALiBi: arXiv 2108.12409",
        (
            _at_length("AFT-alibi at 1024", "characters-alibi"),
            _at_length("attention at 1024", "characters-bloom", control=True, judged=False),
        ),
    ),
    Claim(
        18,
        "AFT beats the Linear Transformer, Performer, Synthesizer and lambda layers of equal depth and width",
        "Tables 4, 7",
        (
            _beats("Linear Transformer", "characters-wide", "characters-linear", paper=(1.180, 1.207)),
            _beats("Performer", "characters-wide", "characters-performer", paper=(1.180, 1.199)),
            _beats("Synthesizer", "characters-wide", "characters-synthesizer", paper=(1.180, 1.298)),
            _beats("lambda layers", "conv", "lambda", paper=(0.808, 0.800)),
            _control("lambda layers, faster biases", "conv-fast", "lambda"),
        ),
        "The first two have learned position embeddings only, like the Transformer of claim 1.",
    ),
    Claim(
        19,
        "AFT stands beside later layers of equal depth and width on characters",
        "ours",
        (
            _beats("AFT-local, RWKV-4", "characters", "characters-rwkv"),
            _beats("AFT-alibi, RWKV-4", "characters-aft-alibi", "characters-rwkv"),
            _beats("AFT-alibi, attention with ALiBi", "characters-aft-alibi", "characters-transformer-alibi"),
        ),
        "AFT-alibi has as many parameters as its peers; a third of AFT-local's parameters are tables. RWKV-4 is an "
        "AFT with learned decays; its inputs include the token before.",
    ),
)
CLAIMS = {claim.number: claim for claim in _CLAIMS}
# The order of `all`: first what earlier, shorter runs did not decide or decided against AFT.
ORDER = (1, 19, 4, 6, 7, 11, 12, 15, 18, 13, 9, 8, 10, 2, 3, 5, 14, 16, 17)
