"""Adapting image models to another image size: kernels and patches are resampled."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from aft_hf import AFTConfig, AFTForImageClassification
from aft_hf.configuration_aft import pair
from aft_hf.conversion.resizing import adapt_to_image_size, resampled, stretched


def classifier(**changes):
    fields = {"image_size": 32, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4}
    fields |= {"modality": "image", "aft_type": "conv", "kernel_size": 5, "num_labels": 3}
    torch.manual_seed(0)
    model = AFTForImageClassification(AFTConfig(**fields | changes)).eval()
    for layer in model.aft.layers:  # nonzero kernels, gamma and beta, as after training
        for name, parameter in layer.mixer.named_parameters():
            if name.startswith("kernel"):
                torch.nn.init.normal_(parameter, std=1.0 / layer.mixer.position_bias_multiplier)
    return model


def kernels(size=5, heads=3, spread=2.0):
    return spread * torch.randn(heads, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("ratios", [(0.75, 0.75), (2.0, 2.0), (1.5, 0.8)])
def test_a_weight_is_the_mean_over_its_area(ratios):
    kernel = kernels(heads=1)
    large = stretched(kernel, ratios, longest=1000, outside=0.0)[0]
    half, reach, fine = kernel.shape[-1] // 2, large.shape[-1] // 2, 1200

    def covered(new, ratio):
        """Return the old positions at many points of a new position."""
        points = (new + (torch.arange(fine) + 0.5) / fine - 0.5) / ratio
        return points.round().long()

    field = torch.ones(101, 101, dtype=torch.float64)  # exp(w) around the kernel
    field[50 - half : 51 + half, 50 - half : 51 + half] = torch.exp(kernel[0])
    for row, column in ((0, 0), (1, 0), (-1, 2), (reach, -reach), (reach, 0)):
        row, column = (max(-reach, min(reach, x)) for x in (row, column))
        rows, columns = covered(row, ratios[0]) + 50, covered(column, ratios[1]) + 50
        expected = field[rows][:, columns].mean().log()
        actual = large[row + reach, column + reach]
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=float(field.max()) * 4 / fine)


def test_large_biases_do_not_overflow():
    large, small = (stretched(kernels() + w, (2.0, 2.0), 1000, -torch.inf) - w for w in (5000.0, 0.0))
    torch.testing.assert_close(large, small)


@pytest.mark.parametrize("reparameterized", [True, False])
@pytest.mark.parametrize("multiplier", [1.0, 1000.0])
def test_a_resized_model_has_the_stretched_kernels(reparameterized, multiplier):
    model = classifier(position_bias_reparameterized=reparameterized, position_bias_multiplier=multiplier)
    mixer = model.aft.layers[1].mixer
    expected = stretched(mixer.kernel_bias().detach(), (1.5, 1.0), longest=12, outside=0.0)
    pace = mixer.kernel.std((1, 2), correction=0).detach()
    adapt_to_image_size(model, (48, 32))
    assert tuple(model.config.image_size) == (48, 32) and model.config.kernel_size == expected.shape[-1] == 9
    torch.testing.assert_close(mixer.kernel_bias(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().amax()))
    assert mixer.kernel.requires_grad
    if reparameterized:  # an optimizer changes the kernel at the same rate as before
        torch.testing.assert_close(mixer.kernel.std((1, 2), correction=0).detach(), pace)


def test_a_kernel_without_gamma_keeps_a_shape_to_learn():
    for size in (5, 1):
        model = classifier(kernel_size=size)
        mixer = model.aft.layers[0].mixer
        torch.nn.init.zeros_(mixer.kernel_scale)
        torch.nn.init.zeros_(mixer.kernel_shift)
        adapt_to_image_size(model, 64)
        assert mixer.kernel_bias().count_nonzero() == 0
        assert (mixer.kernel.std((1, 2)) > 0).all() and mixer.window == {5: 11, 1: 3}[size]
        model(pixel_values=torch.randn(2, 3, 64, 64), labels=torch.tensor([0, 1])).loss.backward()
        assert mixer.kernel_scale.grad.abs().sum() > 0


def test_a_kernel_reaches_over_the_longer_side_of_the_grid_and_no_further():
    for old, new, kernel in ((32, 16, 7), ((16, 32), (16, 64), 31), ((16, 32), (64, 16), 31), (32, 32, 15)):
        model = classifier(image_size=old, kernel_size=15)
        before = {name: parameter.clone() for name, parameter in model.state_dict().items()}
        adapt_to_image_size(model, new)
        assert model.config.kernel_size == model.aft.layers[0].mixer.kernel.shape[-1] == kernel
        if new == old:  # the size of the training changes nothing
            assert all(torch.equal(before[name], parameter) for name, parameter in model.state_dict().items())


def unchanged(model, size, message, **options):
    """Check that adapting raises a ValueError and changes neither the weights nor the config."""
    before, config = {name: x.clone() for name, x in model.state_dict().items()}, model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        adapt_to_image_size(model, size, **options)
    assert model.config.to_dict() == config
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


@pytest.mark.parametrize("changes", [{}, {"global_connectivity": False}, {"position_bias_selection": "gumbel"}])
def test_stretch_kernels_false_keeps_the_kernels_as_trained(changes):
    model = classifier(**changes)
    kernels = [layer.mixer.kernel for layer in model.aft.layers]
    adapt_to_image_size(model, (64, 96), stretch_kernels=False)
    assert all(layer.mixer.kernel is kernel for layer, kernel in zip(model.aft.layers, kernels))
    assert model(torch.zeros(1, 3, 64, 96)).logits.isfinite().all()


def test_what_cannot_be_resized_is_refused_and_nothing_is_changed():
    model = classifier()
    adapt_to_image_size(AFTForImageClassification(model.config), 64)
    unchanged(model, 64, "own copy of the config")
    model = classifier()
    for size in (30, 0, (32, 33)):
        unchanged(model, size, "image_size")
    unchanged(classifier(global_connectivity=False), (64, 96), "same ratio")
    unchanged(classifier(kernel_size=15), 16, "kernel_size=15", stretch_kernels=False)
    unchanged(classifier(patch_size=1024, image_size=2048, kernel_size=3), 10240, "patch_size")
    for changes, message in (
        ({"aft_type": "full"}, 'aft_type "conv"'),
        ({"aft_type": ["conv", "simple"]}, 'aft_type "conv"'),
        ({"use_position_embeddings": True}, "position embeddings"),
        ({"position_bias_selection": "gumbel"}, "position_bias_selection"),
    ):
        unchanged(classifier(**changes), 48, message)


@pytest.mark.parametrize(
    "options",
    [
        {"target_parameters": ["mixer.kernel"]},
        {"target_modules": ["v_proj", "patch_embeddings"]},
        {"modules_to_save": ["embeddings"]},
        {"modules_to_save": ["mixer"]},
    ],
    ids=str,
)
def test_a_model_with_adapters_of_kernels_or_patches_is_not_resized(options):
    model = classifier()
    adapted = get_peft_model(model, LoraConfig(r=2, **{"target_modules": ["fc1"]} | options))
    pixels = torch.randn(2, 3, 32, 32)
    assert adapted(pixel_values=pixels).logits.isfinite().all()
    unchanged(model, 48, "merge or remove adapters")
    merged = adapted.merge_and_unload()
    adapt_to_image_size(merged, 48)
    assert merged.config.patch_size == 6


@pytest.mark.parametrize(("half", "new", "old"), ((3, 29, 7), (5, 25, 11), (6, 54, 26), (1, 2, 1)))
def test_rounding_of_a_ratio_does_not_enlarge_a_kernel(half, new, old):
    """(half + 1/2) new / old - 1/2 is a whole number for the ratios here, but not always in floating point."""
    size = stretched(torch.ones(1, 2 * half + 1, 2 * half + 1), (new / old, new / old), 1000, outside=0.0).shape[-1]
    assert size // 2 == -(-((2 * half + 1) * new - old) // (2 * old))


@pytest.mark.parametrize(("old", "new"), [((16, 16), (27, 27)), ((3, 5), (8, 5)), ((1, 2), (2, 7))])
def test_an_enlarged_patch_has_the_embedding_of_the_original(old, new):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 3, *old, generator=generator, dtype=torch.float64)
    patches = torch.randn(9, 3, *old, generator=generator, dtype=torch.float64)
    enlarged = torch.nn.functional.interpolate(patches, new, mode="bilinear", align_corners=False)
    actual = torch.einsum("bcij,dcij->bd", enlarged, resampled(weight, new))
    torch.testing.assert_close(actual, torch.einsum("bcij,dcij->bd", patches, weight), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("size", "patch"), [(40, 5), (48, 6), ((32, 64), (4, 8)), (24, 4), (33 * 4, 17)])
def test_patches_grow_with_the_image_around_their_place_on_the_grid(size, patch):
    model = classifier()
    adapt_to_image_size(model, size)
    assert model.config.patch_size == patch and model.config.grid_stride == (4, 4)
    pixels = torch.zeros(1, 3, *pair(size), requires_grad=True)
    embeddings, (_, columns) = model.aft.embeddings(pixels)
    row, column = 2, 3
    (gradient,) = torch.autograd.grad(embeddings[0, row * columns + column].sum(), pixels)
    seen = gradient[0].abs().sum(0).nonzero()
    for axis, (side, place) in enumerate(zip(pair(patch), (row, column))):
        first = 4 * place - (side - 4) // 2
        assert (seen[:, axis].min().item(), seen[:, axis].max().item()) == (max(first, 0), first + side - 1)


@pytest.mark.parametrize("adapted", [True, False])
def test_overlapping_patches_train_save_and_load(tmp_path, adapted):
    model = classifier() if adapted else classifier(patch_size=7, patch_stride=(4, 2))
    if adapted:
        adapt_to_image_size(model, (32, 64))
    pixels = torch.randn(2, 3, *pair(model.config.image_size))
    model.train()(pixel_values=pixels, labels=torch.tensor([0, 1])).loss.backward()
    for parameter in (model.aft.embeddings.patch_embeddings.weight, model.aft.layers[0].mixer.kernel):
        assert parameter.grad.isfinite().all()
    expected = model.eval()(pixel_values=pixels).logits
    model.save_pretrained(tmp_path)
    loaded = AFTForImageClassification.from_pretrained(tmp_path).eval()
    assert loaded.config.grid_size == (8, 16)
    torch.testing.assert_close(loaded(pixel_values=pixels).logits, expected)
    with pytest.raises(ValueError, match="multiples of patch_stride"):
        loaded(pixel_values=torch.randn(2, 3, 30, 32))
