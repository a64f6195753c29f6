"""The recipes in configs/: they load, have notes, and match the rows of the paper's tables that they name."""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    BeitConfig,
    BeitForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from aft_hf import AFTConfig, AFTForCausalLM, AFTForImageClassification
from aft_hf.training.recipe import load_recipe
from scripts.reproduction import baselines  # noqa: F401  (registers their architecture)


CONFIGS = Path(__file__).parents[2] / "configs"
# Files whose names begin with _ are not recipes: they hold settings that recipes share.
RECIPES = sorted(path for path in CONFIGS.glob("*/*.yaml") if path.name[0] != "_" and path.parent.name != "accelerate")
NAMES = [path.relative_to(CONFIGS).with_suffix("").as_posix() for path in RECIPES]


def model_of(recipe):
    """Build the full-size model of a recipe on the meta device, without memory for its weights."""
    fields = {key: value for key, value in recipe.model.items() if key != "architecture"}
    with torch.device("meta"):
        if recipe.task == "images":
            sizes = {"image_size": recipe.data.image_size, "num_labels": 1000, **fields}
            if recipe.model.get("architecture") == "resnet":
                del sizes["image_size"]
            if recipe.model.get("architecture") == "aft-baseline":
                sizes["modality"] = "image"
            if recipe.model.get("architecture", "aft") != "aft":
                config = AutoConfig.for_model(recipe.model["architecture"], **sizes)
                return AutoModelForImageClassification.from_config(config)
            return AFTForImageClassification(AFTConfig(modality="image", **sizes))
        length = recipe.data.seq_len if recipe.task == "bytes" else 3 * recipe.data.image_size**2
        if recipe.model["architecture"] != "aft":
            sizes = {"vocab_size": 256, "max_position_embeddings": length, "bos_token_id": None, "eos_token_id": None}
            config = AutoConfig.for_model(recipe.model["architecture"], **sizes, **fields)
            return AutoModelForCausalLM.from_config(config)
        return AFTForCausalLM(AFTConfig(max_position_embeddings=length, **fields))


@cache
def recipe_at(path):
    return load_recipe(path)


@cache
def model_at(path):
    return model_of(recipe_at(path))


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_has_notes_and_its_own_output_directory(path):
    recipe = recipe_at(path)
    assert len(recipe.notes) > 20
    assert path.read_text().startswith("# ")
    others = {recipe_at(other).output_dir for other in RECIPES if other != path}
    assert recipe.output_dir not in others


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_smoke_run_is_small_and_elsewhere_and_no_path_is_that_of_a_machine(path):
    recipe = load_recipe(path, ["data.train=generated"], smoke=True)
    assert recipe.steps <= 40 and recipe.global_batch_size <= 32
    assert recipe.output_dir != recipe_at(path).output_dir and recipe_at(path).data.train is None
    if "pretrained" not in recipe.model:
        assert count(model_of(recipe)) < 1e6


# --------------------------------------------------------------------------------------------------- the paper's rows

# Hyper-parameters that Section 5 gives for all runs of a task, by recipe key; "config.*" is a field of the model's
# config.
TRAINING = {
    "cifar10": {  # 5.1
        "optimizer.learning_rate": 3e-3,
        "optimizer.weight_decay": 0.1,
        "schedule.name": "inverse_sqrt",
        "data.image_size": 32,
        "data.flip": True,
        "data.brightness_shift": 10,
        "epochs": 200,
        "config.max_position_embeddings": 3072,
    },
    "enwik8": {  # 5.2, "largely the same"
        "optimizer.learning_rate": 3e-3,
        "optimizer.weight_decay": 0.5,
        "schedule.name": "inverse_sqrt",
        "epochs": 100,
        "global_batch_size": 128,
    },
    "imagenet": {  # 5.3, as DeiT (its Table 9)
        "optimizer.weight_decay": 0.05,
        "schedule.warmup_epochs": 5,
        "label_smoothing": 0.1,
        "data.augmentation.rand_augment_operations": 2,
        "data.augmentation.rand_augment_magnitude": 9,
        "data.augmentation.rand_augment_noise": 0.5,
        "data.augmentation.erasing": 0.25,
        "data.augmentation.mixup": 0.8,
        "data.augmentation.cutmix": 1.0,
        "data.augmentation.repetitions": 3,
    },
}
DEIT = {
    "optimizer.learning_rate": 1e-3,
    "global_batch_size": 1024,
    "epochs": 300,
    "data.image_size": 224,
    "config.drop_path_rate": 0.1,
    "config.layer_norm_eps": 1e-6,
    "config.num_hidden_layers": 12,
    "config.patch_size": 16,
}


def aft(aft_type, layers, width, **more):
    dropout = {"hidden_dropout_prob": 0.1, "use_position_embeddings": True}
    fields = {"aft_type": aft_type, "num_hidden_layers": layers, "hidden_size": width, "num_heads": 1}
    return {f"config.{name}": value for name, value in (fields | dropout | more).items()}


def pixels(aft_type, layers, width, **more):
    return {"global_batch_size": 128, **aft(aft_type, layers, width, **more)}


def window(s, **more):
    return aft("local", 24, 256, window_size=s, position_bias_dim=256, max_position_embeddings=1024, **more)


def transformer(layers, width, heads, **more):
    fields = {"model_type": "gpt2", "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return {**{f"config.{name}": value for name, value in (fields | {"resid_pdrop": 0.1}).items()}, **more}


def baseline(mixer):
    fields = {
        "model_type": "aft-baseline",
        "mixer": mixer,
        "num_hidden_layers": 12,
        "hidden_size": 512,
        "num_heads": 8,
    }
    fields |= {"hidden_dropout_prob": 0.1, "max_position_embeddings": 1024}
    return {f"config.{name}": value for name, value in fields.items()} | {"data.seq_len": 1024}


def lambda_model(width, heads):
    fields = {"mixer": "lambda", "hidden_size": width, "num_heads": heads, "key_dim": 16, "pooling": "mean"}
    return DEIT | {f"config.{name}": value for name, value in fields.items()}


def deit(width, heads):
    fields = {"model_type": "beit", "hidden_size": width, "num_attention_heads": heads}
    return DEIT | {f"config.{name}": value for name, value in fields.items()}


def image(aft_type, width, **more):
    fields = {"aft_type": aft_type, "hidden_size": width, "use_query": True, "global_connectivity": True}
    fields |= {"position_bias_entropy_weight": 0.0, "position_bias_selection": None}
    fields |= {"position_bias_dim": 128, "use_cls_token": True} if aft_type == "full" else {"pooling": "mean"}
    return DEIT | {f"config.{name}": value for name, value in (fields | more).items()}


def conv(width, kernel, heads, **more):
    fields = {"kernel_size": kernel, "num_heads": heads, "position_bias_reparameterized": True}
    return image("conv", width, **(fields | more))


FROM_DEIT = {"epochs": 100, "global_batch_size": 64, "data.image_size": 384}
RANDOM = {"kernel_size": 25, "num_heads": 32, "aft_type": "conv", "hidden_size": 768, "num_hidden_layers": 12}
RANDOM = {f"config.{name}": value for name, value in RANDOM.items()}
POSITIONS = {"max_position_embeddings": 1024}
REFORMER = {"model_type": "reformer", "num_hidden_layers": 12, "hidden_size": 512, "num_attention_heads": 8}
REFORMER = {f"config.{name}": value for name, value in (REFORMER | POSITIONS).items()} | {"data.seq_len": 1024}
RESNET = {"config.model_type": "resnet", "config.depths": [3, 4, 6, 3], "data.image_size": 224}
FACTORS = {"window_size": 256, "position_bias_dim": 64, "position_bias_init_std": 0.1}
BATCH = {"global_batch_size": 32}
LENGTH = {"data.seq_len": 1024}

# Every row that has a recipe, by table and folder: (recipe, score, hyper-parameters in addition to TRAINING).
CIFAR = {
    "2: Transformer, L = 12, d = 512, h = 4": ("transformer_l12_d512_h4", 2.88, transformer(12, 512, 4, **BATCH)),
    "2: Transformer, L = 24, d = 256, h = 2": ("transformer_l24_d256_h2", 2.86, transformer(24, 256, 2, **BATCH)),
    "2: AFT-local-256, L = 12, d = 512": ("aft_local_256_l12_d512", 2.80, pixels("local", 12, 512, **FACTORS)),
    "2: AFT-local-256, L = 24, d = 256": ("aft_local_256_l24_d256", 2.74, pixels("local", 24, 256, **FACTORS)),
    "2: AFT-simple, L = 24, d = 256": ("aft_simple_l24_d256", 2.89, pixels("simple", 24, 256)),
    "3: factorized": ("aft_local_256_l24_d256", 2.74, {"config.position_bias_dim": 64}),
    "3: not factorized": (
        "aft_local_256_l24_d256_unfactorized",
        2.84,
        pixels("local", 24, 256, **FACTORS | {"position_bias_dim": None}),
    ),
}
LOCAL_12 = aft("local", 12, 512, window_size=32, position_bias_dim=256, **POSITIONS)
ENWIK8 = {
    "4: Transformer, L = 12, d = 512, h = 8": ("transformer_l12_d512_h8", 1.137, transformer(12, 512, 8, **LENGTH)),
    "4: Transformer, L = 24, d = 256, h = 4": ("transformer_l24_d256_h4", 1.130, transformer(24, 256, 4, **LENGTH)),
    "4: Reformer, L = 12, d = 512, h = 8": ("reformer_l12_d512_h8", 1.195, REFORMER),
    "4: Synthesizer, L = 12, d = 512, h = 8": ("synthesizer_l12_d512_h8", 1.298, baseline("synthesizer")),
    "4: Linear Transformer, L = 12, d = 512, h = 8": ("linear_transformer_l12_d512_h8", 1.207, baseline("linear")),
    "4: Performer, L = 12, d = 512, h = 8": ("performer_l12_d512_h8", 1.199, baseline("performer")),
    "4: AFT-local-32, L = 12, d = 512": ("aft_local_32_l12_d512", 1.180, LOCAL_12),
    "4: AFT-local-32, L = 24, d = 256": ("aft_local_32_l24_d256", 1.154, window(32)),
    "4: AFT-simple, L = 24, d = 256": ("aft_simple_l24_d256", 1.209, aft("simple", 24, 256, **POSITIONS)),
    "5: window 0": ("aft_simple_l24_d256", 1.209, aft("simple", 24, 256)),
    "6: T = 1024": ("aft_local_32_l24_d256", 1.154, LENGTH),
}
WINDOWS = {1: 1.205, 2: 1.176, 4: 1.165, 8: 1.162, 32: 1.154, 64: 1.160, 128: 1.165, 256: 1.164, 512: 1.171}
for size, score in (WINDOWS | {1024: 1.173}).items():
    ENWIK8[f"5: window {size}"] = (f"aft_local_{size}_l24_d256", score, window(size))
for length, score in ((2048, 1.135), (4096, 1.134)):
    longer = {"data.seq_len": length, "config.max_position_embeddings": length}
    ENWIK8[f"6: T = {length}"] = (f"aft_local_32_l24_d256_t{length}", score, window(32) | longer)
ABLATED = "ablation_aft_conv_small_{}".format
IMAGENET = {
    "7: ResNet50": ("resnet50", 0.769, RESNET),
    "7: DeiT tiny": ("deit_tiny", 0.722, deit(192, 3)),
    "7: DeiT small": ("deit_small", 0.799, deit(384, 6)),
    "7: Lambda tiny": ("lambda_tiny", 0.724, lambda_model(192, 3)),
    "7: Lambda small": ("lambda_small", 0.800, lambda_model(384, 6)),
    "7: AFT-full tiny": ("aft_full_tiny", 0.724, image("full", 192, num_heads=1)),
    "7: AFT-full small": ("aft_full_small", 0.798, image("full", 384, num_heads=1)),
    "7: AFT-conv tiny 11/32": ("aft_conv_tiny_11_32", 0.739, conv(192, 11, 32)),
    "7: AFT-conv tiny 11/192": ("aft_conv_tiny_11_192", 0.748, conv(192, 11, 192)),
    "7: AFT-conv small 11/16": ("aft_conv_small_11_16", 0.802, conv(384, 11, 16)),
    "7: AFT-conv small 11/384": ("aft_conv_small_11_384", 0.808, conv(384, 11, 384)),
    "7: AFT-conv small 15/384": ("aft_conv_small_15_384", 0.810, conv(384, 15, 384)),
    "8: AFT-conv ft 25/32": ("aft_conv_base_25_32_384_from_deit", 0.834, FROM_DEIT),
    "8: AFT-conv rand 25/32": ("aft_conv_base_25_32_384_rand", 0.816, FROM_DEIT | RANDOM),
    "9: factorized": ("aft_full_small", 0.798, image("full", 384)),
    "9: not factorized": (
        "ablation_aft_full_small_unfactorized",
        0.782,
        image("full", 384, position_bias_dim=None),
    ),
    "10: re-parameterized": ("aft_conv_small_7_384", 0.808, conv(384, 7, 384)),
    "10: naive": (ABLATED("7_384_naive"), 0.794, conv(384, 7, 384, position_bias_reparameterized=False)),
    "11: DeiT small": ("deit_small", 0.799, deit(384, 6)),
}
for size, score in {3: 0.799, 7: 0.808, 11: 0.808, 15: 0.810, 25: 0.807, 27: 0.810}.items():
    IMAGENET[f"11: kernel {size}"] = (f"aft_conv_small_{size}_384", score, conv(384, size, 384))
for size, score, without in ((11, 0.808, 0.793), (15, 0.810, 0.795)):
    IMAGENET[f"12: kernel {size}, with query"] = (f"aft_conv_small_{size}_384", score, conv(384, size, 384))
    no_query = (ABLATED(f"{size}_384_no_query"), without, conv(384, size, 384, use_query=False))
    IMAGENET[f"12: kernel {size}, without query"] = no_query
NO_GLOBAL = conv(384, 7, 384, global_connectivity=False)
ENTROPY = conv(384, 11, 384, position_bias_entropy_weight=0.001)
GUMBEL = conv(384, 11, 384, position_bias_selection="gumbel", gumbel_temperature=0.5)
OF_SECTIONS = {
    "5.3: global connectivity": ("aft_conv_small_7_384", 0.808, conv(384, 7, 384)),
    "5.3: no global connectivity": (ABLATED("7_384_no_global"), 0.799, NO_GLOBAL),
    "8: entropy regularization": (ABLATED("11_384_entropy"), 0.809, ENTROPY),
    "8: one position per head": (ABLATED("11_384_gumbel"), 0.799, GUMBEL),
}
PAPER = {
    f"{kind} {row}": (f"{folder}/{name}", score, says)
    for kind, folder, rows in (
        ("Table", "cifar10", CIFAR),
        ("Table", "enwik8", ENWIK8),
        ("Table", "imagenet", IMAGENET),
        ("Section", "imagenet", OF_SECTIONS),
    )
    for row, (name, score, says) in rows.items()
}


def value_of(recipe, config, key):
    holder, path = (config, key.removeprefix("config.")) if key.startswith("config.") else (recipe, key)
    for name in path.split("."):
        holder = getattr(holder, name)
    return holder


@pytest.mark.parametrize("row", PAPER)
def test_a_row_of_the_paper_has_a_recipe_with_its_score_and_hyper_parameters(row):
    name, score, says = PAPER[row]
    recipe = recipe_at(CONFIGS / f"{name}.yaml")
    assert row in recipe.paper.rows and recipe.paper.score == score
    says = TRAINING[name.split("/")[0]] | says
    config = None if "pretrained" in recipe.model else model_at(CONFIGS / f"{name}.yaml").config
    assert {key: value_of(recipe, config, key) for key in says} == says


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_a_recipe_names_its_rows_of_the_paper_or_is_marked_as_ours(path):
    paper, name = recipe_at(path).paper, path.relative_to(CONFIGS).with_suffix("").as_posix()
    ours = path.parent.name == "examples" or path.name.startswith("ours_")
    assert ours == (paper is None) == ("ours" in path.read_text(encoding="utf-8").split("\nmodel")[0])
    assert {row for row, (recipe, *_) in PAPER.items() if recipe == name} == set(paper.rows if paper else [])


# Number of parameters in Tables 7 and 8, in millions.
MILLIONS = {
    "resnet50": 25.6,
    "deit_tiny": 5.7,
    "deit_small": 22.1,
    "lambda_tiny": 4.8,
    "lambda_small": 17.7,
    "aft_full_tiny": 6.3,
    "aft_full_small": 22.6,
    "aft_conv_tiny_11_32": 5.4,
    "aft_conv_tiny_11_192": 5.9,
    "aft_conv_small_11_16": 20.3,
    "aft_conv_small_11_384": 22.5,
    "aft_conv_small_15_384": 23.0,
    "aft_conv_base_25_32_384_rand": 79.7,
}


@pytest.mark.parametrize(("name", "millions"), MILLIONS.items(), ids=MILLIONS)
def test_imagenet_models_have_the_parameter_counts_of_the_paper(name, millions):
    model = model_at(CONFIGS / "imagenet" / f"{name}.yaml")
    # The rounding in the paper varies by 0.1. For the model of 79.7 M, ours has 79.86 M parameters, 0.2 % more.
    assert count(model) / 1e6 == pytest.approx(millions, abs=max(0.1, 0.0025 * millions))


@pytest.mark.parametrize(("suffix", "millions"), [("", 0.6), ("_unfactorized", 9.6)])
def test_table_3_counts_the_layers_without_their_output_projections(suffix, millions):
    mixer = model_at(CONFIGS / "cifar10" / f"aft_local_256_l24_d256{suffix}.yaml").aft.layers[0].mixer
    assert f"{(count(mixer) - count(mixer.o_proj)) / 1e6:.1f}" == str(millions)
    assert f"{count(mixer) / 1e6:.1f}" != str(millions)


ABLATIONS = [path for path in RECIPES if path.stem.startswith("ablation_")]


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda path: path.stem)
def test_an_ablation_differs_from_its_base_model_in_one_setting(path):
    base = next(line for line in path.read_text().splitlines() if line.startswith("base: ")).removeprefix("base: ")
    ablated, whole = recipe_at(path).model_dump(), recipe_at(path.parent / base).model_dump()
    assert len((ablated["model"].items() ^ whole["model"].items()) - {("gumbel_temperature", 0.5)}) in (1, 2)
    assert {key for key in whole if ablated[key] != whole[key]} == {"model", "paper", "output_dir"}


def test_the_deit_of_the_recipes_gives_the_outputs_of_vit():
    """The recipes build DeiT as a BEiT with stochastic depth, whose keys lack the bias that softmax cancels."""
    recipe = dict(recipe_at(CONFIGS / "imagenet" / "deit_tiny.yaml").model)
    recipe.pop("architecture")
    shared = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    shared |= {"image_size": 32, "patch_size": 8, "num_labels": 5, "layer_norm_eps": recipe["layer_norm_eps"]}
    torch.manual_seed(0)
    vit = ViTForImageClassification(ViTConfig(**shared)).eval()
    beit = BeitForImageClassification(BeitConfig(**(recipe | shared))).eval()
    for parameter in vit.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    names = {key.replace("vit.", "beit."): value for key, value in vit.state_dict().items()}
    missing = beit.load_state_dict(names, strict=False)
    assert not missing.missing_keys and all(key.endswith("k_proj.bias") for key in missing.unexpected_keys)
    pixels = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(beit(pixels).logits, vit(pixels).logits, rtol=1e-4, atol=1e-4)
    assert [layer.drop_path.drop_prob for layer in beit.beit.layers[1:]] == [0.1]
