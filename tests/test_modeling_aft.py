"""The models: every type in both modalities, and the interfaces of transformers. tests/configs counts parameters."""

import re
from importlib import metadata

import pytest
import torch
import transformers
from safetensors import safe_open
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
)
from transformers.models.auto import modeling_auto

from aft_hf import (
    AFTConfig,
    AFTForCausalLM,
    AFTForImageClassification,
    AFTForSequenceClassification,
    AFTForTokenClassification,
    AFTModel,
    modeling_aft,
)
from aft_hf.modeling_aft import AFTLayer


KINDS = [("text", t) for t in ("full", "local", "simple", "conv", "alibi")]
KINDS += [("image", t) for t in ("full", "local", "simple", "conv")]
VOCAB, LABELS, LAYERS, WIDTH = 32, 5, 2, 16


def tiny_config(modality, aft_type, **options):
    """A config of two layers of width 16: at most 48 tokens and a vocabulary of 32, or 4 x 4 patches and 5 labels."""
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_heads": 2, "position_bias_dim": 4}
    sizes |= {"window_size": 4, "kernel_size": 3}
    if modality == "text":
        sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 48}
    else:
        sizes |= {"image_size": 16, "patch_size": 4, "num_labels": LABELS}
    return AFTConfig(modality=modality, aft_type=aft_type, **(sizes | options))


def head_class(config):
    return AFTForCausalLM if config.modality == "text" else AFTForImageClassification


def build(config, model_class=None):
    """The model with a head in evaluation mode, with kernels that are not 0 and logits that are not negligible."""
    torch.manual_seed(0)
    model = (model_class or head_class(config))(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("kernel_scale", "kernel_shift", "lm_head.weight", "classifier.weight")):
            torch.nn.init.normal_(parameter)
    return model


def inputs_of(config, batch=2, length=19):
    generator = torch.Generator().manual_seed(1)
    if config.modality == "text":
        return {"input_ids": torch.randint(0, config.vocab_size, (batch, length), generator=generator)}
    return {"pixel_values": torch.randn(batch, config.num_channels, 16, 16, generator=generator)}


def labels_of(config, batch=2):
    return inputs_of(config)["input_ids"] if config.modality == "text" else torch.arange(batch)


@pytest.fixture(params=KINDS, ids=" ".join)
def config(request):
    return tiny_config(*request.param)


@pytest.fixture(params=[kind for kind in KINDS if kind[0] == "text"], ids=" ".join)
def text_config(request):
    return tiny_config(*request.param)


# ------------------------------------------------------------------------------------------------ structure


def test_the_modules_and_weights_have_the_names_of_the_design(config):
    model = build(config)
    names = {name.rpartition(".")[0] for name in model.state_dict()}
    layer = {"layernorm_before", "layernorm_after", "mlp.fc1", "mlp.fc2"}
    layer |= {f"mixer.{projection}_proj" for projection in "qkvo"}
    expected = {f"aft.layers.{i}.{name}" for i in range(LAYERS) for name in layer}
    expected |= {"aft.layernorm", "lm_head" if config.modality == "text" else "classifier"}
    own = {f"aft.layers.{i}.mixer" for i in range(LAYERS)}
    assert {name for name in names if not name.startswith("aft.embeddings")} - own == expected
    assert model.base_model_prefix == "aft" and len(model.aft.layers) == LAYERS
    assert all(layer.mixer.causal is (config.modality == "text") for layer in model.aft.layers)
    # FSDP of Accelerate refuses names of absent modules, and wraps embeddings of tokens by itself.
    assert set(model._no_split_modules) == {"AFTLayer"} | (
        {"AFTImageEmbeddings"} if config.modality == "image" else set()
    )


def test_new_weights_are_drawn_as_the_config_says():
    options = {"hidden_size": 64, "initializer_range": 0.03, "position_bias_init_std": 0.5}
    model = AFTForCausalLM(tiny_config("text", "full", **options))
    mixer = model.aft.layers[0].mixer
    for weight in (
        mixer.v_proj.weight,
        model.aft.layers[0].mlp.fc1.weight,
        model.aft.embeddings.word_embeddings.weight,
    ):
        assert weight.std().item() == pytest.approx(0.03, rel=0.1)
    assert mixer.position_bias_query.std().item() == pytest.approx(0.5, rel=0.2)
    assert mixer.v_proj.bias.eq(0).all()
    embeddings = AFTModel(tiny_config("image", "full", hidden_size=512, initializer_range=0.05)).embeddings
    for parameter in (embeddings.cls_token, embeddings.position_embeddings):
        assert parameter.std().item() == pytest.approx(0.05, rel=0.1)


OPTIONS = {
    "qkv_bias": ("full", False, lambda mixer: mixer.q_proj.bias is mixer.k_proj.bias is mixer.v_proj.bias is None),
    "use_query": ("full", False, lambda mixer: mixer.q_proj is None),
    "use_output_projection": ("full", False, lambda mixer: isinstance(mixer.o_proj, torch.nn.Identity)),
    "query_activation": ("full", "relu", lambda mixer: isinstance(mixer.query_activation, torch.nn.ReLU)),
    "mixing_implementation": ("full", "reference", lambda mixer: mixer.mixing_implementation == "reference"),
    "position_bias_dim": ("full", None, lambda mixer: hasattr(mixer, "position_bias_table")),
    "max_position_embeddings": ("full", 99, lambda mixer: mixer.max_positions == 99),
    "global_connectivity": ("local", False, lambda mixer: mixer.position_bias()[0, 9, 0] == -torch.inf),
    "window_size": ("local", 7, lambda mixer: mixer.window == 7),
    "kernel_size": ("conv", 5, lambda mixer: mixer.kernel.shape == (2, 5)),
    "position_bias_reparameterized": ("conv", False, lambda mixer: mixer.kernel_scale is None),
    "position_bias_selection": ("conv", "gumbel", lambda mixer: mixer.position_bias_selection == "gumbel"),
    "position_bias_multiplier": ("local", 20.0, lambda mixer: mixer.position_bias_multiplier == 20.0),
    "gumbel_temperature": ("conv", 0.25, lambda mixer: mixer.gumbel_temperature == 0.25),
    "num_heads": ("alibi", 8, lambda mixer: mixer.position_bias(2).shape == (8, 2, 2)),
}


@pytest.mark.parametrize(("field", "case"), OPTIONS.items(), ids=OPTIONS)
def test_an_option_of_the_config_reaches_the_mixers(field, case):
    aft_type, value, holds = case
    model = AFTModel(tiny_config("text", aft_type, **{field: value}))
    assert all(holds(layer.mixer) for layer in model.layers)
    default = AFTModel(tiny_config("text", aft_type))
    assert not any(holds(layer.mixer) for layer in default.layers)


# ------------------------------------------------------------------------------------------------ forward and backward


def test_every_parameter_gets_a_finite_gradient_from_the_loss(config):
    model = head_class(config)(config).train()
    model(**inputs_of(config), labels=labels_of(config)).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        # With the initial scale gamma = 0 a kernel has no gradient; the bias of a key cancels in Eq. 2.
        if not name.endswith(("kernel", "k_proj.bias")):
            assert parameter.grad.ne(0).any(), name


def test_the_loss_of_text_is_the_cross_entropy_of_the_next_token(text_config):
    model, input_ids = build(text_config), inputs_of(text_config)["input_ids"]
    labels = input_ids.clone()
    labels[0, 5:9] = -100
    output = model(input_ids, labels=labels)
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(output.loss, expected)


def test_the_loss_of_images_is_that_of_the_problem_type():
    for options, labels, loss in (
        ({}, torch.tensor([1, 4]), F.cross_entropy),
        ({"problem_type": "multi_label_classification"}, torch.rand(2, LABELS), F.binary_cross_entropy_with_logits),
    ):
        config = tiny_config("image", "conv", **options)
        output = build(config)(**inputs_of(config), labels=labels)
        torch.testing.assert_close(output.loss, loss(output.logits, labels))


def test_attentions_times_values_are_what_the_first_layer_adds(config):
    """Checks Eq. 3 through the whole model."""
    model = build(config).aft
    output = model(**inputs_of(config), output_attentions=True, output_hidden_states=True)
    length = output.last_hidden_state.shape[1]
    assert [x.shape for x in output.attentions] == [(2, WIDTH, length, length)] * LAYERS
    assert len(output.hidden_states) == LAYERS + 1 and output.hidden_states[-1].equal(output.last_hidden_state)
    layer, inputs = model.layers[0], output.hidden_states[0]
    values = layer.mixer.v_proj(layer.layernorm_before(inputs))
    mixed = layer.mixer.o_proj(torch.einsum("bdts,bsd->btd", output.attentions[0], values))
    expected = inputs + mixed
    expected = expected + layer.mlp(layer.layernorm_after(expected))
    torch.testing.assert_close(output.hidden_states[1], expected, rtol=1e-5, atol=1e-5)
    plain = model(**inputs_of(config))
    torch.testing.assert_close(output.last_hidden_state, plain.last_hidden_state)
    assert plain.attentions is None


def loss_gradients(model, config):
    model.zero_grad()
    torch.manual_seed(2)
    model(**inputs_of(config), labels=labels_of(config)).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


CHECKPOINTED = [tiny_config(*kind) for kind in KINDS]
# The random numbers of the forward pass are drawn again in the backward pass.
CHECKPOINTED += [tiny_config("image", "conv", **{field: 0.3}) for field in ("hidden_dropout_prob", "drop_path_rate")]
CHECKPOINTED += [tiny_config("image", "conv", position_bias_selection="gumbel")]


@pytest.mark.parametrize("config", CHECKPOINTED, ids=lambda config: f"{config.modality} {config.aft_type}")
def test_gradient_checkpointing_gives_equal_gradients(config):
    model = build(config).train()
    runs = []
    model.aft.layers[0].mixer.register_forward_hook(lambda *_: runs.append(1))
    expected = loss_gradients(model, config)
    assert len(runs) == 1
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(loss_gradients(model, config), expected)
    assert len(runs) == 3  # recomputed in the backward pass


def test_gradient_checkpointing_takes_no_cache_in_training():
    model = build(tiny_config("text", "alibi"))
    ids = inputs_of(model.config)["input_ids"]
    with torch.no_grad():
        cache = model(ids, use_cache=True).cache
    model.gradient_checkpointing_enable()
    model(ids, cache=cache)
    with pytest.raises(ValueError, match="gradient checkpointing takes no cache"):
        model.train()(ids, cache=cache)


# --------------------------------------------------------------------------------------------------- dropout and depth


@pytest.mark.parametrize("field", ("hidden_dropout_prob", "drop_path_rate"))
def test_dropout_and_drop_path_change_training_and_not_evaluation(config, field):
    plain = build(config)
    setattr(config, field, 0.5)
    dropping, inputs = build(config), inputs_of(config, batch=8)
    expected = plain(**inputs).logits
    assert dropping(**inputs).logits.equal(expected)
    torch.testing.assert_close(plain.train()(**inputs).logits, expected)
    assert not torch.allclose(dropping.train()(**inputs).logits, expected, atol=1e-3)
    for layer in dropping.eval().aft.layers:  # which are on by themselves while the rest evaluates
        layer.dropout.train(), layer.drop_path.train()
    assert not torch.allclose(dropping(**inputs).logits, expected, atol=1e-3)


def test_drop_path_drops_whole_samples_keeps_the_expectation_and_rises_linearly_with_depth():
    branch = 1 + torch.rand(20_000, 3, 2)
    layer = AFTLayer(tiny_config("text", "simple", num_hidden_layers=2, drop_path_rate=0.25), layer_idx=1)
    dropped = layer._add(torch.zeros_like(branch), branch)
    kept = dropped.ne(0)
    assert kept.flatten(1).all(1).eq(kept.flatten(1).any(1)).all()
    assert kept[:, 0, 0].float().mean().item() == pytest.approx(0.75, abs=0.02)
    torch.testing.assert_close(dropped[kept], branch[kept] / 0.75)
    torch.testing.assert_close(dropped.mean(0), branch.mean(0), rtol=0.03, atol=0)
    model = AFTModel(tiny_config("text", "simple", num_hidden_layers=5, drop_path_rate=0.4))
    assert [layer.drop_path.p for layer in model.layers] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


# --------------------------------------------------------------------------------------------------------- entropy


@pytest.mark.parametrize("modality", ("text", "image"))
def test_entropy_is_reported_apart_and_included_in_the_loss(modality):
    config = tiny_config(modality, ["full", "conv"], position_bias_entropy_weight=0.25)
    model, plain = build(config), build(tiny_config(modality, ["full", "conv"]))
    plain.load_state_dict(model.state_dict())
    inputs = {**inputs_of(config), "labels": labels_of(config)}
    output, expected = model(**inputs), plain(**inputs)
    entropy = model.aft.layers[1].mixer.position_bias_entropy()  # the conv layer alone has one
    torch.testing.assert_close(output.position_bias_entropy, entropy)
    torch.testing.assert_close(output.loss, expected.loss + 0.25 * entropy)
    torch.testing.assert_close(model(**inputs_of(config)).position_bias_entropy, entropy)
    assert expected.position_bias_entropy is None


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_of_layers_keep_the_gradient_of_the_entropy(use_reentrant):
    gradients = []
    for checkpoints in (False, True):
        config = tiny_config("text", "conv", position_bias_entropy_weight=0.25)
        model, ids = build(config).train(), inputs_of(config)["input_ids"]
        for layer in model.aft.layers:
            torch.nn.init.ones_(layer.mixer.kernel_scale)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model(ids, labels=ids).position_bias_entropy.backward()
        gradients.append([layer.mixer.kernel_scale.grad for layer in model.aft.layers])
    assert all(x.abs().min() > 0 for x in gradients[0])
    torch.testing.assert_close(*gradients)


def test_the_entropy_is_that_of_the_layers_that_are_there():
    config = tiny_config("text", ["conv", "simple", "conv"], num_hidden_layers=3, position_bias_entropy_weight=0.1)
    model, ids = build(config), torch.randint(0, 20, (2, 6))
    layers = model.aft.layers
    for chosen, expected in (([0, 2], [0, 2]), ([1, 2], [2]), ([1], [])):
        model.aft.layers = torch.nn.ModuleList([layers[i] for i in chosen])
        actual = model(ids).position_bias_entropy
        entropies = [layers[i].mixer.position_bias_entropy() for i in expected]
        assert actual is None if not entropies else actual.item() == pytest.approx(sum(entropies).item())
    model.aft.layers = layers
    layers[0].mixer = torch.compile(layers[0].mixer, backend="eager")  # a wrapper that forwards attributes
    assert model.aft.position_bias_entropy().item() == pytest.approx(
        sum(layers[i].mixer.position_bias_entropy() for i in (0, 2)).item()
    )


def test_a_model_of_images_takes_them_by_position_as_a_vit_does():
    config = tiny_config("image", "conv")
    model, inputs = build(config), inputs_of(config)
    assert torch.equal(model.aft(inputs["pixel_values"])[0], model.aft(**inputs)[0])


@pytest.mark.parametrize("modality", ["text", "image"])
def test_a_loss_computed_outside_the_model_is_told_that_the_entropy_is_not_in_it(modality, monkeypatch):
    said = []
    monkeypatch.setattr(modeling_aft.logger, "warning_once", said.append)
    config = tiny_config(modality, "conv", position_bias_entropy_weight=0.25)
    model, inputs = build(config).train(), inputs_of(config)
    model(**inputs, labels=labels_of(config))
    model.eval()(**inputs)
    for name, parameter in model.train().named_parameters():
        parameter.requires_grad_("kernel" not in name)
    model(**inputs)  # nobody learns the entropy
    assert not said
    model.requires_grad_(True)(**inputs)
    assert len(said) == 1 and "position_bias_entropy_weight=0.25" in said[0]


# ------------------------------------------------------------------------------------------------------ text inputs


def test_a_token_that_a_boolean_mask_hides_from_later_ones_does_not_matter_to_them(text_config):
    model, input_ids = build(text_config), inputs_of(text_config)["input_ids"]
    mask = torch.ones(1, 19, 19, dtype=torch.bool)
    mask[:, 5:, 4] = False
    other = input_ids.clone()
    other[:, 4] = (other[:, 4] + 1) % VOCAB
    logits, other_logits = (model(x, attention_mask=mask).logits[:, 5:] for x in (input_ids, other))
    torch.testing.assert_close(other_logits, logits, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits, model(input_ids).logits[:, 5:], atol=1e-3)


def test_logits_to_keep_keeps_the_last_positions_or_those_asked_for():
    config = tiny_config("text", "local")
    model, inputs = build(config), inputs_of(config)
    expected = model(**inputs).logits
    torch.testing.assert_close(model(**inputs, logits_to_keep=3).logits, expected[:, -3:])
    torch.testing.assert_close(model(**inputs, logits_to_keep=torch.tensor([2, 7])).logits, expected[:, [2, 7]])


# ------------------------------------------------------------------------------------------------------ image inputs


@pytest.mark.parametrize("size", ((24, 24), (8, 32), (40, 12)), ids=str)
def test_aft_conv_takes_images_of_any_size_in_patches(size):
    model, made_for_it = build(tiny_config("image", "conv")), build(tiny_config("image", "conv", image_size=size))
    made_for_it.load_state_dict(model.state_dict())
    pixel_values = torch.randn(2, 3, *size)
    output = model.aft(pixel_values=pixel_values)
    assert output.last_hidden_state.shape == (2, size[0] * size[1] // 16, WIDTH)
    torch.testing.assert_close(output.pooler_output, output.last_hidden_state.mean(1))
    assert model(pixel_values).logits.equal(made_for_it(pixel_values).logits)


@pytest.mark.parametrize("aft_type", ("full", "local", "simple"))
def test_images_with_a_class_token_are_classified_by_it_or_by_the_mean_of_the_patches(aft_type):
    for pooling in ("cls", "mean"):
        config = tiny_config("image", aft_type, pooling=pooling)
        output = build(config).aft(**inputs_of(config))
        assert output.last_hidden_state.shape == (2, 17, WIDTH)
        cls_token, patches = output.last_hidden_state[:, 0], output.last_hidden_state[:, 1:]
        torch.testing.assert_close(output.pooler_output, cls_token if pooling == "cls" else patches.mean(1))


WRONG = [
    (("image", "conv"), {"pixel_values": torch.zeros(2, 1, 16, 16)}, r"3, height.*\(2, 1, 16, 16\)"),
    (("image", "conv"), {"pixel_values": torch.zeros(3, 16, 16)}, r"got \(3, 16, 16\)"),
    (("image", "conv"), {"pixel_values": torch.zeros(2, 3, 16, 18)}, "4 x 4, got 16 x 18"),
    (("image", "conv"), {"pixel_values": torch.zeros(2, 3, 0, 16)}, "0 x 16"),
    (("image", "full"), {"pixel_values": torch.zeros(2, 3, 24, 16)}, "24 x 16 .* image_size=16 x 16"),
    (("image", "full"), {}, "pixel_values"),
    (("text", "full"), {}, "input_ids or inputs_embeds"),
    (
        ("text", "full"),
        {"input_ids": torch.zeros(1, 3, dtype=torch.long), "inputs_embeds": torch.zeros(1, 3, WIDTH)},
        "input_ids or inputs_embeds",
    ),
    (("text", "full"), {"input_ids": torch.zeros(1, 50, dtype=torch.long)}, "50 .*max_position_embeddings=48"),
    (("text", "simple"), {"input_ids": torch.zeros(1, 50, dtype=torch.long)}, "50 .*=48"),
    (
        ("text", "full"),
        {"input_ids": torch.zeros(1, 5, dtype=torch.long), "attention_mask": torch.ones(1, 4)},
        r"\(1, 5\).* got \(1, 4\)",
    ),
]


@pytest.mark.parametrize(("kind", "inputs", "message"), WRONG, ids=[each[-1] for each in WRONG])
def test_a_wrong_input_is_a_value_error_that_names_it(kind, inputs, message):
    model = build(tiny_config(*kind))
    with pytest.raises(ValueError, match=message):
        model.aft(**inputs)


def test_a_head_of_the_other_modality_is_a_value_error():
    heads = dict.fromkeys((AFTForCausalLM, AFTForSequenceClassification, AFTForTokenClassification), "image")
    for model_class, modality in (heads | {AFTForImageClassification: "text"}).items():
        with pytest.raises(ValueError, match=f'{model_class.__name__} .* got "{modality}"'):
            model_class(tiny_config(modality, "full"))


# --------------------------------------------------------------------------------------------------- saved and loaded


def test_a_saved_model_loads_by_its_class_and_the_auto_classes_with_equal_outputs(config, tmp_path):
    model, inputs = build(config), inputs_of(config)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    assert not list(tmp_path.glob("*.bin")) and isinstance(AutoConfig.from_pretrained(tmp_path), AFTConfig)
    _, info = head_class(config).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    is_text = config.modality == "text"
    auto = AutoModelForCausalLM if is_text else AutoModelForImageClassification
    task = "CAUSAL_LM" if is_text else "IMAGE_CLASSIFICATION"  # as the library knows it by the name of the class
    assert getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")["aft"] == head_class(config).__name__
    loaded, backbone = auto.from_pretrained(tmp_path, device_map="cpu"), AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is type(auto.from_config(config)) is head_class(config)
    assert type(backbone) is type(AutoModel.from_config(config)) is AFTModel
    assert loaded(**inputs).logits.equal(model(**inputs).logits)
    assert backbone(**inputs).last_hidden_state.equal(model.aft(**inputs).last_hidden_state)


def test_tied_weights_are_one_tensor_saved_once_and_tied_again_on_loading(tmp_path):
    config = tiny_config("text", "local", tie_word_embeddings=True)
    model = build(config)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert len({"lm_head.weight", "aft.embeddings.word_embeddings.weight"} & set(file.keys())) == 1
    plain, loaded = build(tiny_config("text", "local")), AFTForCausalLM.from_pretrained(tmp_path)
    assert plain.lm_head.weight is not plain.get_input_embeddings().weight
    for each in (model, loaded):
        assert each.lm_head.weight is each.get_input_embeddings().weight
    assert loaded(**inputs_of(config)).logits.equal(model(**inputs_of(config)).logits)


@pytest.mark.parametrize("modality", ("text", "image"))
def test_the_entropy_term_of_accumulated_batches_is_that_of_the_whole_batch(modality):
    config = tiny_config(modality, "conv", position_bias_entropy_weight=0.5)
    model, labels, ((name, rows),) = build(config), labels_of(config), inputs_of(config).items()
    count = labels.numel() - (len(rows) if modality == "text" else 0)  # the first token of a row is not predicted
    parts = [
        model(**{name: row[None]}, labels=label[None], num_items_in_batch=count).loss
        for row, label in zip(rows, labels)
    ]
    torch.testing.assert_close(sum(parts), model(**{name: rows}, labels=labels).loss)


def packed(config: AFTConfig, *lengths: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Documents, and the row into which `DataCollatorWithFlattening` packs them."""
    documents = [torch.randint(config.vocab_size, (1, length)) for length in lengths]
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
    return documents, {"input_ids": torch.cat(documents, 1), "position_ids": position_ids}


def test_packed_documents_equal_the_documents_one_by_one(text_config):
    model = build(text_config)
    documents, row = packed(text_config, 5, 1, 9, 4)
    expected = torch.cat([model(document).logits for document in documents], 1)
    boundaries = torch.tensor([0, 5, 6, 15, 19], dtype=torch.int32)
    as_boundaries = {"input_ids": row["input_ids"], "cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    for inputs in (row, as_boundaries):
        output = model(**inputs)
        torch.testing.assert_close(output.logits, expected, rtol=1e-5, atol=1e-5)
        assert output.cache is None


@pytest.mark.parametrize("aft_type", ("full", "local", "simple"))
def test_a_row_of_packed_documents_may_be_longer_than_the_learned_positions(aft_type):
    config = tiny_config("text", aft_type)
    model, limit = build(config), config.max_position_embeddings
    documents, row = packed(config, limit, limit, 3)
    expected = torch.cat([model(document).logits for document in documents], 1)
    torch.testing.assert_close(model(**row).logits, expected, rtol=1e-4, atol=1e-5)
    _, row = packed(config, limit + 1, 2)
    with pytest.raises(ValueError, match=f"{limit + 1} tokens"):
        model(**row)


@torch.no_grad()
def test_position_ids_beside_a_cache_that_has_tokens_are_those_of_the_cache():
    config = tiny_config("text", "local")
    model, ids = build(config), inputs_of(config)["input_ids"]
    expected = model(ids).logits[:, -1:]
    cache = model(ids[:, :-1]).cache
    position_ids = torch.full((len(ids), 1), ids.shape[1] - 1)
    actual = model(ids[:, -1:], cache=cache, position_ids=position_ids).logits
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_cache_of_packed_documents_is_refused():
    config = tiny_config("text", "simple")
    model, (_, row) = build(config), packed(config, 3, 4)
    with pytest.raises(ValueError, match="cache"):
        model(**row, cache=model.aft.new_cache())


def test_layers_may_lie_on_the_disk(text_config, tmp_path):
    text_config.position_bias_entropy_weight = 0.5 * (text_config.aft_type == "conv")
    model, ids = build(text_config), inputs_of(text_config)["input_ids"]
    model.save_pretrained(tmp_path / "model")
    device_map = dict.fromkeys(("aft.embeddings", "aft.layernorm", "lm_head"), "cpu")
    device_map |= {f"aft.layers.{i}": "disk" if i else "cpu" for i in range(LAYERS)}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    ).eval()
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    for options in ({}, {"use_cache": False}, {"attention_mask": mask}, {"output_attentions": True}):
        torch.testing.assert_close(loaded(ids, **options).logits, model(ids, **options).logits)
    torch.testing.assert_close(loaded(ids, labels=ids).loss, model(ids, labels=ids).loss)


def test_the_old_name_of_the_cache_works_with_the_warning_of_the_library():
    model = build(tiny_config("text", "local"))
    tokens = torch.randint(0, 20, (2, 6))
    with torch.no_grad():
        expected = model(tokens).logits[:, 4:]
        for one in (model, model.aft):
            cache = one(tokens[:, :4], use_cache=True).cache
            with pytest.warns(FutureWarning, match="`past_key_values` is deprecated"):
                actual = one(tokens[:, 4:], past_key_values=cache)
            assert actual.past_key_values is actual.cache is cache and cache.get_seq_length() == 6
            logits = actual.logits if one is model else model.lm_head(actual.last_hidden_state)
            torch.testing.assert_close(logits, expected)


def test_an_untested_release_of_transformers_is_named_once_and_an_old_one_refused_as_the_package_requires(monkeypatch):
    said = []
    monkeypatch.setattr(modeling_aft.logger, "warning_once", said.append)
    newest = ".".join(map(str, modeling_aft.NEWEST_TRANSFORMERS))
    for version in (transformers.__version__, "5.24.0", "5.24.1.dev0", f"{newest}.9"):
        modeling_aft._check_transformers(version)
    assert said == []
    for version in ("5.99.0", "6.0.0rc1", "5.99.0.dev0"):
        modeling_aft._check_transformers(version)
        assert f"tested with transformers up to {newest}, and this is {version}" in said.pop()
    for version in ("5.23.1", "4.57.6", "5.9.0"):
        with pytest.raises(ImportError, match=f"needs transformers 5.24 or newer.*{version}"):
            modeling_aft._check_transformers(version)
    (required,) = [one for one in metadata.requires("aft-hf") if re.match(r"transformers[<>=]", one)]
    (oldest, newest) = modeling_aft.OLDEST_TRANSFORMERS, modeling_aft.NEWEST_TRANSFORMERS
    following = f"{newest[0]}.{newest[1] + 1}"
    assert set(required.removeprefix("transformers").split(",")) == {f">={oldest[0]}.{oldest[1]}", f"<{following}"}
