"""Image models for another size: kernels stretch with the grid of patches."""

import math

import pytest
import torch

from aft_hf import AFTConfig, AFTForImageClassification
from aft_hf.resizing_aft import stretched


def classifier(**changes):
    fields = {"image_size": 32, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4}
    fields |= {"modality": "image", "aft_type": "conv", "conv_kernel_size": 5, "num_labels": 3}
    torch.manual_seed(0)
    model = AFTForImageClassification(AFTConfig(**fields | changes)).eval()
    for layer in model.aft.layers:  # as training leaves them
        for name, parameter in layer.mixer.named_parameters():
            if name.startswith("kernel"):
                torch.nn.init.normal_(parameter, std=1.0 / layer.mixer.position_bias_multiplier)
    return model


def kernels(size=5, heads=3, spread=2.0):
    return spread * torch.randn(heads, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def weight_outside(kernel, cells):
    """The sum of exp(w) over a square grid with the kernel in its middle."""
    return float(torch.exp(kernel).sum()) + cells**2 - kernel.shape[-1] ** 2


@pytest.mark.parametrize("ratio", [2.0, 3.0, 5.0])
def test_a_kernel_keeps_its_part_of_the_image(ratio):
    """The sum of the weights grows with the area, as that of the positions outside does."""
    for kernel in kernels():
        large = stretched(kernel[None], (ratio, ratio), longest=1000, outside=0.0)[0]
        before, after = weight_outside(kernel, 31), weight_outside(large, 31 * ratio)
        assert after == pytest.approx(before * ratio**2, rel=1e-9)


@pytest.mark.parametrize("ratio", [0.5, 0.75, 1.25, 1.5, 2.0, 3.0])
def test_weights_are_interpolated_between_neighbours(ratio):
    kernel = kernels(heads=2)
    large = stretched(kernel, (ratio, ratio), longest=1000, outside=0.0)
    half, reach = kernel.shape[-1] // 2, large.shape[-1] // 2
    width = max(1.0, 1.0 / ratio)

    def share(new, old):
        span = range(-100, 101)
        weights = {x: max(0.0, 1 - abs(x - new / ratio) / width) for x in span}
        return weights[old] / sum(weights.values())

    for row, column in ((0, 0), (1, 0), (-1, 2), (reach, -reach)):
        row, column = (max(-reach, min(reach, x)) for x in (row, column))
        expected = 0.0
        for old_row in range(-half - 3, half + 4):
            for old_column in range(-half - 3, half + 4):
                inside = max(abs(old_row), abs(old_column)) <= half
                w = float(kernel[0, old_row + half, old_column + half]) if inside else 0.0
                expected += share(row, old_row) * share(column, old_column) * math.exp(w)
        # What lies further out than 3 beyond the kernel is not reached by the triangles of these ratios.
        assert float(large[0, row + reach, column + reach]) == pytest.approx(math.log(expected), abs=1e-9)


def test_beyond_the_new_kernel_there_is_nothing_of_the_old_one():
    """One position more on each side would be all outside, w = 0; the last one is not."""
    kernel = torch.full((1, 5, 5), 3.0, dtype=torch.float64)
    for ratio in (0.5, 0.8, 1.25, 1.5, 2.0):
        large = stretched(kernel, (ratio, ratio), longest=1000, outside=0.0)[0]
        reach, width = large.shape[-1] // 2, max(1.0, 1.0 / ratio)
        assert float(large[reach, -1]) > 1e-6
        assert (reach + 1) / ratio >= 2 + width - 1e-6


def test_large_and_small_biases_stay_finite():
    kernel = torch.tensor([[-2e4, 1e4, 0.0], [3e4, -1e4, 5.0], [0.0, 0.0, -900.0]], dtype=torch.float64)[None]
    for outside in (0.0, -math.inf):
        large = stretched(kernel, (1.7, 1.7), longest=1000, outside=outside)
        assert large.isfinite().all() and float(large.amax()) == pytest.approx(3e4, abs=1)


@pytest.mark.parametrize("reparameterized", [True, False])
@pytest.mark.parametrize("multiplier", [1.0, 1000.0])
def test_a_resized_model_has_the_stretched_kernels(reparameterized, multiplier):
    model = classifier(position_bias_reparameterized=reparameterized, position_bias_multiplier=multiplier)
    mixer = model.aft.layers[1].mixer
    expected = stretched(mixer.kernel_bias().detach(), (1.5, 1.5), longest=12, outside=0.0)
    pace = mixer.kernel.std((1, 2), correction=0).detach()
    model.resize_position_biases(48)
    assert model.config.image_size == 48 and model.config.conv_kernel_size == expected.shape[-1] == 9
    torch.testing.assert_close(mixer.kernel_bias(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().amax()))
    assert mixer.kernel.requires_grad
    if reparameterized:  # an optimizer moves the shape of the kernel as fast as before
        torch.testing.assert_close(mixer.kernel.std((1, 2), correction=0).detach(), pace)


def test_a_resized_model_runs_saves_and_loads(tmp_path):
    model = classifier()
    model.resize_position_biases((40, 64))
    pixels = torch.randn(2, 3, 40, 64)
    expected = model(pixel_values=pixels).logits
    model.save_pretrained(tmp_path)
    loaded = AFTForImageClassification.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(pixel_values=pixels).logits, expected)
    assert loaded.config.grid_size == (10, 16)
    loaded.train()(pixel_values=pixels, labels=torch.tensor([0, 1])).loss.backward()
    assert loaded.aft.layers[0].mixer.kernel.grad.isfinite().all()


def test_the_size_of_the_training_changes_nothing():
    model = classifier()
    before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
    model.resize_position_biases(32)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.state_dict().items())


def test_a_kernel_without_gamma_keeps_a_shape_to_learn():
    model = classifier()
    mixer = model.aft.layers[0].mixer
    torch.nn.init.zeros_(mixer.kernel_scale)
    torch.nn.init.zeros_(mixer.kernel_shift)
    model.resize_position_biases(64)
    assert mixer.kernel_bias().count_nonzero() == 0
    assert (mixer.kernel.std((1, 2)) > 0).all()


def test_a_kernel_alone_stays_alone():
    model = classifier(global_connectivity=False)
    model.resize_position_biases(64)
    assert model.aft.layers[0].mixer.kernel_bias().isfinite().all()
    assert model(pixel_values=torch.randn(1, 3, 64, 64)).logits.isfinite().all()
    with pytest.raises(ValueError, match="same ratio"):
        model.resize_position_biases((64, 96))


def test_a_kernel_is_no_larger_than_the_grid_has_use_for():
    model = classifier(conv_kernel_size=15)
    model.resize_position_biases(16)
    assert model.config.conv_kernel_size == model.aft.layers[0].mixer.kernel.shape[-1] == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aft_type": "full"}, 'aft_type "conv"'),
        ({"aft_type": ["conv", "simple"]}, 'aft_type "conv"'),
        ({"use_position_embeddings": True}, "position embeddings"),
        ({"position_bias_selection": "gumbel"}, "position_bias_selection"),
    ],
)
def test_other_models_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        classifier(**changes).resize_position_biases(48)


@pytest.mark.parametrize("size", [30, 0, (32, 33)])
def test_sizes_that_cannot_be_are_refused(size):
    model = classifier()
    with pytest.raises(ValueError, match="image_size"):
        model.resize_position_biases(size)
    assert model.config.image_size == 32
