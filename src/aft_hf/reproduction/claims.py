"""The claims of the paper as data: statements, the paper's numbers, and the comparisons of our runs that decide."""

from dataclasses import dataclass
from typing import Any

from .arms import data_of


LOWER, HIGHER = False, True

# Units of the test scores by kind of data, and of other metrics.
SCORES = {"characters": "bits per character", "pixels": "bits per dimension", "images": "accuracy"}
UNITS = {"parameters": "parameters", "bias_parameters": "parameters", "kernel_use": "fraction of the positions"}
UNITS |= {"speed_ratio": "times the speed", "memory_ratio": "times the memory"}


@dataclass(frozen=True)
class Row:
    """A row of a claim's table: a metric of an arm, and the paper's number or None if the paper gives none."""

    name: str
    arm: str
    metric: str
    paper: float | None = None

    @property
    def unit(self) -> str:
        """The unit of the metric; training losses of classifiers are in nats, other losses in bits."""
        data = data_of(self.arm)
        return UNITS.get(self.metric) or ("nats" if (self.metric, data) == ("train", "images") else SCORES[data])


@dataclass(frozen=True)
class Comparison:
    """A comparison of two numbers that decides a claim.

    Attributes:
        says: the comparison in words, for the page.
        ours: arm and metric of our number.
        other: arm and metric of the number to compare with, or a constant.
        higher: whether a higher number is better.
        margin: how much worse ours may be; 0 if ours has to be better.
        judged: whether the comparison counts for the verdict; False for a control that the paper does not have.
    """

    says: str
    ours: tuple[str, str]
    other: tuple[str, str] | float
    higher: bool
    margin: float = 0.0
    judged: bool = True

    @property
    def paired(self) -> bool:
        """Whether both numbers come from the same run."""
        return isinstance(self.other, tuple) and self.ours[0] == self.other[0]


@dataclass(frozen=True)
class Claim:
    """A claim: its number, its statement, where the paper makes it, its rows and its comparisons."""

    number: int
    says: str
    where: str
    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    note: str = ""

    @property
    def arms(self) -> list[str]:
        """The arms of the rows and comparisons, each once, without the arms that they start from."""
        named = [row.arm for row in self.rows]
        for comparison in self.comparisons:
            named += [side[0] for side in (comparison.ours, comparison.other) if isinstance(side, tuple)]
        return list(dict.fromkeys(named))


def _test(arm: str) -> tuple[str, str]:
    return arm, "test"


def _beats(says: str, ours: str, other: str, higher: bool, **options: Any) -> Comparison:
    """A comparison of test scores, in which ours has to be better."""
    return Comparison(says, _test(ours), _test(other), higher, **options)


def _gains(name: str, arm: str, speed: float, memory: float) -> tuple[Row, Row]:
    return Row(f"{name}, speed", arm, "speed_ratio", speed), Row(f"{name}, memory", arm, "memory_ratio", memory)


def _faster_and_smaller(name: str, arm: str) -> tuple[Comparison, Comparison]:
    return (
        Comparison(f"{name} is faster", (arm, "speed_ratio"), 1.0, HIGHER),
        Comparison(f"{name} takes less memory", (arm, "memory_ratio"), 1.0, LOWER),
    )


ADDED_CONTROLS = (
    "In the controls, which were added after the other runs, position biases learn 1000 times as fast as the other "
    "weights, in place of 10 times."
)
T4_LOCAL, T4_SIMPLE = "AFT-local-32, deep and narrow", "AFT-simple, deep and narrow"

CLAIMS = {
    claim.number: claim
    for claim in (
        Claim(
            1,
            "AFT-local has a lower training loss on characters than a Transformer of equal size, and a similar test "
            "loss",
            "Table 4",
            (
                Row(f"{T4_LOCAL}, training", "characters", "train", 0.972),
                Row("Transformer, deep and narrow, training", "characters-transformer", "train", 1.039),
                Row(f"{T4_LOCAL}, test", "characters", "test", 1.154),
                Row("Transformer, deep and narrow, test", "characters-transformer", "test", 1.130),
            ),
            (
                Comparison("lower training loss", ("characters", "train"), ("characters-transformer", "train"), LOWER),
                _beats("test loss within 0.05 bits", "characters", "characters-transformer", LOWER, margin=0.05),
            ),
            "The training loss is the mean over the last tenth of the steps, with dropout; all models see the same "
            "samples.",
        ),
        Claim(
            2,
            "AFT-local beats AFT-simple",
            "Tables 2 and 4",
            (
                Row(f"{T4_LOCAL}, characters", "characters", "test", 1.154),
                Row(f"{T4_SIMPLE}, characters", "characters-simple", "test", 1.209),
                Row("AFT-local-256, deep and narrow, pixels", "pixels", "test", 2.74),
                Row("AFT-simple, deep and narrow, pixels", "pixels-simple", "test", 2.89),
            ),
            (
                _beats("on characters", "characters", "characters-simple", LOWER),
                _beats("on pixels", "pixels", "pixels-simple", LOWER),
            ),
        ),
        Claim(
            3,
            "An intermediate window beats none and beats the full one (a U-shape)",
            "Table 5",
            (
                Row("no window (AFT-simple)", "characters-simple", "test", 1.209),
                Row("8 of 256 (the paper's 32 of 1024)", "characters-window-8", "test", 1.154),
                Row("32 of 256 (128 of 1024)", "characters", "test", 1.165),
                Row("64 of 256 (256 of 1024)", "characters-window-64", "test", 1.164),
                Row("256 of 256 (1024 of 1024)", "characters-full", "test", 1.173),
            ),
            (
                _beats("a window of 32 beats none", "characters", "characters-simple", LOWER),
                _beats("a window of 32 beats the full one", "characters", "characters-full", LOWER),
            ),
            "Each of the paper's numbers is in the row of the window that is the same fraction of T. The window that "
            "decides the verdict was chosen before any run.",
        ),
        Claim(
            4,
            "A longer sequence helps",
            "Table 6",
            (
                Row("T = 128 (the paper's 1024)", "characters-t128", "test", 1.154),
                Row("T = 256 (2048)", "characters", "test", 1.135),
                Row("T = 512 (4096)", "characters-t512", "test", 1.134),
                Row("T = 128, training", "characters-t128", "train"),
                Row("T = 256, training", "characters", "train"),
                Row("T = 512, training", "characters-t512", "train"),
            ),
            (
                _beats("T = 256 beats 128", "characters", "characters-t128", LOWER),
                _beats("T = 512 beats 128", "characters-t512", "characters-t128", LOWER),
            ),
            "Every T has the same number of characters per step. Position embeddings and factors of position biases "
            "have a row for each position, so at T = 512 each row gets a quarter of the samples that it gets at T = "
            "128. The training losses have the same order as the test losses, which points to slower learning, not to "
            "overfitting.",
        ),
        Claim(
            5,
            "Factorized position biases beat unfactorized ones, with far fewer parameters",
            "Tables 3 and 9",
            (
                Row("AFT-local-256 on pixels, factorized", "pixels", "test", 2.74),
                Row("AFT-local-256 on pixels, unfactorized", "pixels-unfactorized", "test", 2.84),
                Row("AFT-full on images, factorized", "full", "test", 0.798),
                Row("AFT-full on images, unfactorized", "full-unfactorized", "test", 0.782),
                Row("position-bias parameters per layer on pixels, factorized", "pixels", "bias_parameters"),
                Row(
                    "position-bias parameters per layer on pixels, unfactorized",
                    "pixels-unfactorized",
                    "bias_parameters",
                ),
            ),
            (
                _beats("on pixels", "pixels", "pixels-unfactorized", LOWER),
                _beats("on images", "full", "full-unfactorized", HIGHER),
                Comparison(
                    "fewer parameters",
                    ("pixels", "bias_parameters"),
                    ("pixels-unfactorized", "bias_parameters"),
                    LOWER,
                ),
            ),
            "The paper's 0.6 M and 9.6 M per layer include the projections; ours count the position biases alone.",
        ),
        Claim(
            6,
            "Deep and narrow beats shallow and wide at equal cost",
            "Tables 2 and 4",
            (
                Row("AFT-local, deep and narrow, characters", "characters", "test", 1.154),
                Row("AFT-local, shallow and wide, characters", "characters-wide", "test", 1.180),
                Row("AFT-local, shallow and wide, characters, half the steps", "characters-wide-short", "test"),
                Row("Transformer, deep and narrow, characters", "characters-transformer", "test", 1.130),
                Row("Transformer, shallow and wide, characters", "characters-transformer-wide", "test", 1.137),
                Row("AFT-local, deep and narrow, pixels", "pixels", "test", 2.74),
                Row("AFT-local, shallow and wide, pixels", "pixels-wide", "test", 2.80),
                Row("AFT-local, shallow and wide, pixels, half the steps", "pixels-wide-short", "test"),
                Row("Transformer, deep and narrow, pixels", "pixels-transformer", "test", 2.86),
                Row("Transformer, shallow and wide, pixels", "pixels-transformer-wide", "test", 2.88),
            ),
            (
                _beats("AFT-local on characters", "characters", "characters-wide", LOWER),
                _beats("AFT-local on pixels", "pixels", "pixels-wide", LOWER),
                _beats(
                    "AFT-local on characters, wide for half the steps",
                    "characters",
                    "characters-wide-short",
                    LOWER,
                    judged=False,
                ),
                _beats(
                    "AFT-local on pixels, wide for half the steps", "pixels", "pixels-wide-short", LOWER, judged=False
                ),
                _beats(
                    "Transformer on characters",
                    "characters-transformer",
                    "characters-transformer-wide",
                    LOWER,
                    judged=False,
                ),
                _beats("Transformer on pixels", "pixels-transformer", "pixels-transformer-wide", LOWER, judged=False),
            ),
            "Shallow and wide means half the depth and twice the width, as in the paper: about twice the parameters "
            "and twice the operations. In the paper, a step of the wide models takes at most 1.1 times as long; on "
            "our CPUs it takes 1.4 to 1.6 times as long at the paper's sizes (`seconds_ours` of claim 16 in the JSON "
            "file). In the controls with half the steps, which were added after the other runs, wide models are "
            "trained with about as many operations as the deep ones.",
        ),
        Claim(
            7,
            "AFT-local beats the Transformer of equal size on pixels in bits per dimension",
            "Table 2",
            (
                Row("AFT-local-256, deep and narrow", "pixels", "test", 2.74),
                Row("Transformer, deep and narrow", "pixels-transformer", "test", 2.86),
                Row("AFT-local-256, shallow and wide", "pixels-wide", "test", 2.80),
                Row("Transformer, shallow and wide", "pixels-transformer-wide", "test", 2.88),
            ),
            (
                _beats("deep and narrow", "pixels", "pixels-transformer", LOWER),
                _beats("shallow and wide", "pixels-wide", "pixels-transformer-wide", LOWER),
            ),
            "Resized images and images stored as JPEG have other bits per dimension than the original CIFAR-10, so "
            "our numbers compare with each other only.",
        ),
        Claim(
            8,
            "AFT-conv beats a ViT of equal size on images, and AFT-full matches it",
            "Table 7",
            (
                Row("AFT-conv, a head for each feature (small 11/384)", "conv", "test", 0.808),
                Row("AFT-full (small)", "full", "test", 0.798),
                Row("ViT (DeiT small)", "vit", "test", 0.799),
            ),
            (
                _beats("AFT-conv beats ViT", "conv", "vit", HIGHER),
                _beats("AFT-full at most 0.01 below ViT", "full", "vit", HIGHER, margin=0.01),
            ),
        ),
        Claim(
            9,
            "More heads help, and very small kernels already do well",
            "Tables 7 and 11",
            (
                Row("kernel 5, 4 heads (small 11/16)", "conv-few-heads", "test", 0.802),
                Row("kernel 5, 96 heads (small 11/384)", "conv", "test", 0.808),
                Row("kernel 3, 96 heads (small 7/384)", "conv-3", "test", 0.808),
                Row("kernel 7, 96 heads (small 15/384)", "conv-7", "test", 0.810),
                Row("ViT (DeiT small)", "vit", "test", 0.799),
            ),
            (
                _beats("96 heads beat 4", "conv", "conv-few-heads", HIGHER),
                _beats("kernel 3 at most 0.01 below ViT", "conv-3", "vit", HIGHER, margin=0.01),
            ),
            "The headers of Table 11 are missing from the paper's text; its first entry, kernel size 3, is 79.9 %.",
        ),
        Claim(
            10,
            "Re-parameterized kernels beat naive ones (kernel 7)",
            "Table 10",
            (
                Row("re-parameterized", "conv-7", "test", 0.808),
                Row("naive", "conv-7-naive", "test", 0.794),
                Row("re-parameterized, training loss", "conv-7", "train", 2.94),
                Row("naive, training loss", "conv-7-naive", "train", 3.11),
            ),
            (_beats("accuracy", "conv-7", "conv-7-naive", HIGHER),),
        ),
        Claim(
            11,
            "The query matters",
            "Table 12",
            (
                Row("with query", "conv", "test", 0.808),
                Row("without query", "conv-no-query", "test", 0.793),
                Row("with query, faster position biases", "conv-fast", "test"),
                Row("without query, faster position biases", "conv-no-query-fast", "test"),
            ),
            (
                _beats("accuracy", "conv", "conv-no-query", HIGHER),
                _beats("with faster position biases", "conv-fast", "conv-no-query-fast", HIGHER, judged=False),
            ),
            ADDED_CONTROLS,
        ),
        Claim(
            12,
            "Global connectivity matters",
            "Section 5.3",
            (
                Row("kernel 3 with global connectivity (the paper's kernel 7)", "conv-3", "test", 0.808),
                Row("kernel 3 without global connectivity", "conv-3-no-global", "test", 0.799),
                Row("with global connectivity, faster position biases", "conv-3-fast", "test"),
                Row("without global connectivity, faster position biases", "conv-3-no-global-fast", "test"),
            ),
            (
                _beats("accuracy", "conv-3", "conv-3-no-global", HIGHER),
                _beats("with faster position biases", "conv-3-fast", "conv-3-no-global-fast", HIGHER, judged=False),
            ),
            "A kernel of size 3 spans 3/8 of the side of our 8 x 8 grid, and the paper's 7 half of 14 x 14. A model "
            "with global connectivity starts with nearly uniform averages over the image (w = 0) and has to learn its "
            "kernels; one without it starts with averages over 3 x 3 patches. " + ADDED_CONTROLS,
        ),
        Claim(
            13,
            "AFT-conv initialized from a DeiT beats random initialization and the DeiT, with fewer parameters and a "
            "higher speed",
            "Table 8",
            (
                Row("AFT-conv from the ViT", "conv-from-vit", "test", 0.834),
                Row("AFT-conv from random weights", "conv-random", "test", 0.816),
                Row("ViT", "vit", "test", 0.829),
                Row("ViT, continued for the same number of steps", "vit-continued", "test"),
                Row("AFT-conv, parameters", "conv-from-vit", "parameters", 79.7e6),
                Row("ViT, parameters", "vit", "parameters", 86.9e6),
                *_gains("AFT-conv base 25/32 at 384 px over ViT base, inference", "speed-deit-base", 1.10, 0.65),
            ),
            (
                _beats("beats random initialization", "conv-from-vit", "conv-random", HIGHER),
                _beats("beats the ViT", "conv-from-vit", "vit", HIGHER),
                Comparison("fewer parameters", ("conv-from-vit", "parameters"), ("vit", "parameters"), LOWER),
                *_faster_and_smaller("AFT-conv base", "speed-deit-base"),
                _beats("beats the continued ViT", "conv-from-vit", "vit-continued", HIGHER, judged=False),
            ),
            "The paper trains its AFT-conv for 100 epochs after the DeiT's own training; our control is the ViT "
            "continued for the same number of steps.",
        ),
        Claim(
            14,
            "Testing at a larger image size than in training keeps or improves accuracy",
            "Section 5.3",
            (
                Row("AFT-conv at 32 px (the paper's 224)", "conv-crops", "test", 0.810),
                Row("AFT-conv at 40 px", "conv-crops", "test_at_40_px"),
                Row("AFT-conv at 48 px", "conv-crops", "test_at_48_px"),
                Row("AFT-conv at 56 px (384)", "conv-crops", "test_at_56_px", 0.816),
                Row("ViT at 32 px", "vit-crops", "test"),
                Row("ViT at 40 px", "vit-crops", "test_at_40_px"),
            ),
            (
                Comparison("at 5/4 of the size", ("conv-crops", "test_at_40_px"), _test("conv-crops"), HIGHER, 0.005),
                Comparison("at 7/4 of the size", ("conv-crops", "test_at_56_px"), _test("conv-crops"), HIGHER, 0.005),
                Comparison(
                    "ViT at 5/4 of the size",
                    ("vit-crops", "test_at_40_px"),
                    _test("vit-crops"),
                    HIGHER,
                    0.005,
                    judged=False,
                ),
            ),
            "The models are trained on random crops of 8 to 100 % of the area, like DeiT. Such crops alone make a "
            "larger test size better for any model (Touvron et al. 2019, arXiv 1906.06423), so a ViT is the control. "
            "Accuracy counts as kept if it falls by less than 0.005.",
        ),
        Claim(
            15,
            "Entropy regularization makes kernels sparser without loss of accuracy; one position per head costs "
            "little accuracy and runs at AFT-simple's speed",
            "Section 8",
            (
                Row("AFT-conv", "conv", "test", 0.808),
                Row("with entropy regularization", "conv-entropy", "test", 0.809),
                Row("one position per head", "conv-one-position", "test", 0.799),
                Row("fraction of a kernel in use", "conv", "kernel_use"),
                Row("fraction of a kernel in use, regularized", "conv-entropy", "kernel_use"),
                Row("speed of one position per head over AFT-simple", "speed-one-position", "speed_ratio"),
            ),
            (
                Comparison("sparser", ("conv-entropy", "kernel_use"), ("conv", "kernel_use"), LOWER),
                _beats("regularized at most 0.01 below", "conv-entropy", "conv", HIGHER, margin=0.01),
                _beats("one position at most 0.02 below", "conv-one-position", "conv", HIGHER, margin=0.02),
                Comparison("at least 0.8 of AFT-simple's speed", ("speed-one-position", "speed_ratio"), 0.8, HIGHER),
            ),
            "The fraction of a kernel in use is exp(entropy of softmax(w)) divided by the kernel's size, averaged "
            "over layers and heads; it is 1 for a uniform kernel. A first measurement of the speed with one position "
            "per head gave 0.31 times AFT-simple's; the CPU backend was then improved, and the speed measured again.",
        ),
        Claim(
            16,
            "AFT trains faster and in less memory than a Transformer, at the paper's sizes",
            "Tables 2 and 4",
            (
                *_gains("AFT-local-32, L = 12, d = 512, T = 1024", "speed-characters-wide", 1.30, 0.38),
                *_gains("AFT-local-32, L = 24, d = 256, T = 1024", "speed-characters", 1.30, 0.40),
                *_gains("AFT-simple, L = 24, d = 256, T = 1024", "speed-characters-simple", 1.66, 0.34),
                *_gains("AFT-local-256, L = 12, d = 512, T = 3072", "speed-pixels-wide", 1.24, 0.37),
                *_gains("AFT-local-256, L = 24, d = 256, T = 3072", "speed-pixels", 1.23, 0.42),
                *_gains("AFT-simple, L = 24, d = 256, T = 3072", "speed-pixels-simple", 1.58, 0.31),
            ),
            tuple(
                comparison
                for name, arm in (
                    ("AFT-local-32 wide at 1024", "speed-characters-wide"),
                    ("AFT-local-32 at 1024", "speed-characters"),
                    ("AFT-simple at 1024", "speed-characters-simple"),
                    ("AFT-local-256 wide at 3072", "speed-pixels-wide"),
                    ("AFT-local-256 at 3072", "speed-pixels"),
                    ("AFT-simple at 3072", "speed-pixels-simple"),
                )
                for comparison in _faster_and_smaller(name, arm)
            ),
            "A training step in fp32. The paper's Transformer computes attention without fusion; ours is GPT-2 with "
            "fused attention, which takes less time and much less memory.",
        ),
        Claim(
            17,
            "AFT with ALiBi biases, trained on short texts, keeps its loss on longer texts, as attention does",
            "ALiBi (Press et al. 2022, arXiv 2108.12409); not a claim of the AFT paper",
            (
                Row("AFT-alibi at T = 128, as trained", "characters-alibi", "test_at_1x"),
                Row("AFT-alibi at 256", "characters-alibi", "test_at_2x"),
                Row("AFT-alibi at 512", "characters-alibi", "test_at_4x"),
                Row("AFT-alibi at 1024", "characters-alibi", "test_at_8x"),
                Row("attention with ALiBi at T = 128, as trained", "characters-bloom", "test_at_1x"),
                Row("attention with ALiBi at 256", "characters-bloom", "test_at_2x"),
                Row("attention with ALiBi at 512", "characters-bloom", "test_at_4x"),
                Row("attention with ALiBi at 1024", "characters-bloom", "test_at_8x"),
            ),
            (
                Comparison(
                    "AFT-alibi at 8 times the length",
                    ("characters-alibi", "test_at_8x"),
                    ("characters-alibi", "test_at_1x"),
                    LOWER,
                    0.02,
                ),
                Comparison(
                    "attention at 8 times the length",
                    ("characters-bloom", "test_at_8x"),
                    ("characters-bloom", "test_at_1x"),
                    LOWER,
                    0.02,
                    judged=False,
                ),
            ),
            "The same text is split into windows that do not overlap, so at greater lengths more characters have a "
            "long context. The loss counts as kept if it rises by less than 0.02 bits.",
        ),
        Claim(
            18,
            "AFT beats the Linear Transformer, Performer, Synthesizer and lambda layers of equal depth and width",
            "Tables 4 and 7",
            (
                Row("AFT-local, shallow and wide", "characters-wide", "test", 1.180),
                Row("Linear Transformer", "characters-linear", "test", 1.207),
                Row("Performer", "characters-performer", "test", 1.199),
                Row("Synthesizer (dense)", "characters-synthesizer", "test", 1.298),
                Row("AFT-conv (small 11/384)", "conv", "test", 0.808),
                Row("AFT-conv, faster position biases", "conv-fast", "test"),
                Row("lambda layers (small)", "lambda", "test", 0.800),
            ),
            (
                _beats("the Linear Transformer", "characters-wide", "characters-linear", LOWER),
                _beats("the Performer", "characters-wide", "characters-performer", LOWER),
                _beats("the Synthesizer", "characters-wide", "characters-synthesizer", LOWER),
                _beats("lambda layers", "conv", "lambda", HIGHER),
                _beats("lambda layers, with faster position biases", "conv-fast", "lambda", HIGHER, judged=False),
            ),
            "The other layers take the place of AFT in the same blocks, with the same MLPs, norms and training. "
            + ADDED_CONTROLS,
        ),
    )
}
