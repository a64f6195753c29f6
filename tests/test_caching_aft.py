"""Generation: the cache of AFTForCausalLM changes time and memory, but no results."""

import copy

import pytest
import torch
from tiny_models import language_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    VisionEncoderDecoderModel,
    ViTConfig,
    ViTModel,
)

from aft_hf import AFTAlibi, AFTConv, AFTSimple
from aft_hf.caching_aft import AFTCache, AFTLayerState
from aft_hf.mixing_aft import provides


LONGEST = 170
VARIANTS = {
    "full": {"aft_type": "full"},
    "full table": {"aft_type": "full", "position_bias_dim": None},
    "local": {"aft_type": "local"},
    "local window alone": {"aft_type": "local", "global_connectivity": False},
    "local reference": {"aft_type": "local", "mixing_implementation": "reference"},
    "local portable": {"aft_type": "local", "mixing_implementation": "portable"},
    "simple": {"aft_type": "simple"},
    "conv": {"aft_type": "conv"},
    "conv gumbel": {"aft_type": "conv", "position_bias_selection": "gumbel"},
    "alibi": {"aft_type": "alibi"},
    "all in one": {"aft_type": ["full", "local", "simple", "conv", "alibi"]},
    "all portable": {
        "aft_type": ["full", "local", "simple", "conv", "alibi"],
        "mixing_implementation": "portable",
    },
}


def build(name, **options):
    """Build a small model in evaluation mode whose position biases are far from 0."""
    settings = {"max_position_embeddings": LONGEST} | VARIANTS[name]
    if isinstance(settings["aft_type"], list):
        settings["num_hidden_layers"] = len(settings["aft_type"])
    model = language_model(**(settings | options))
    for parameter_name, parameter in model.named_parameters():
        if "proj" in parameter_name:
            parameter.data.mul_(5)
    return model


@pytest.fixture(params=VARIANTS)
def model(request):
    return build(request.param)


def tokens(rows, length):
    """Random tokens without 0, the padding token here, from which `generate` would infer a mask."""
    return torch.randint(1, 256, (rows, length))


def in_pieces(model, ids, cuts, mask=None):
    """The logits of `ids` computed in pieces with a cache, and the cache after them."""
    state, logits, seen = None, [], 0
    for piece in ids.split(cuts, 1):
        seen += piece.shape[1]
        here = None if mask is None else mask[:, :seen]
        output = model(piece, attention_mask=here, cache=state, use_cache=True)
        state = output.cache
        logits.append(output.logits)
    return torch.cat(logits, 1), state


def greedy(model, ids=None, tokens=300, **options):
    return model.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **options)


def assert_near(actual, expected, tolerance=1e-4):
    scale = max(expected.abs().max().item(), 1.0)
    assert (actual - expected).abs().max().item() <= tolerance * scale


@pytest.mark.parametrize("cuts", [[163], [1, 162], [3, 1, 1, 31, 64, 5, 58], [1] * 37], ids=str)
@torch.no_grad()
def test_a_text_in_pieces_has_the_logits_of_the_text_in_one(model, cuts):
    ids = tokens(2, sum(cuts))
    logits, _ = in_pieces(model, ids, cuts)
    assert_near(logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("scale", [10, 100, 1000])
@torch.no_grad()
def test_large_keys_are_remembered_as_they_are(model, scale):
    for layer in model.aft.layers:
        layer.mixer.k_proj.weight.mul_(scale)
        # The rounding errors of keys grow with their size, so the outputs of the mixers are compared, not the logits.
        mixer, hidden = layer.mixer, torch.randn(2, LONGEST - 1, model.config.hidden_size)
        window = mixer.state_window
        state = AFTLayerState(window)
        pieces = [mixer(piece, state=state) for piece in hidden.split([150, 1, 18], 1)]
        assert_near(torch.cat(pieces, 1), mixer(hidden), tolerance=2e-6 * scale)


def test_nan_in_padding_gives_averages_of_0_and_reaches_no_token_of_later_or_earlier_pieces(model):
    padding = torch.zeros(3, 24, dtype=torch.bool)
    padding[0, :10], padding[1, 10:12], padding[2, 15:] = True, True, True  # whole pieces, too
    hidden, pieces = torch.randn(3, 24, model.config.hidden_size), [10, 1, 13]
    for layer in model.aft.layers:
        outputs, gradients = [], []
        for value in (0.0, torch.nan):
            state = AFTLayerState(layer.mixer.state_window)
            x = hidden.masked_fill(padding.unsqueeze(-1), value).requires_grad_()
            given = zip(x.split(pieces, 1), padding.logical_not().split(pieces, 1))
            outputs.append(torch.cat([layer.mixer(y, attention_mask=mask, state=state) for y, mask in given], 1))
            gradients.append(torch.autograd.grad(outputs[-1].square().sum(), x)[0][~padding])
        assert_near(*reversed(outputs))
        assert_near(*reversed(gradients))


@torch.no_grad()
def test_a_large_key_long_ago_does_not_hide_what_alibi_sees_near():
    mixer = AFTAlibi(8, num_heads=8).eval()
    mixer.k_proj.weight.copy_(torch.eye(8))
    mixer.k_proj.bias.zero_()
    for size in (80, 120, 300, 1e4):
        hidden = torch.randn(1, 1001, 8)
        hidden[:, 0] = size
        state = AFTLayerState(0)
        mixer(hidden[:, :1000], state=state)
        assert_near(mixer(hidden[:, 1000:], state=state), mixer(hidden)[:, 1000:])


@pytest.mark.parametrize("cuts", [[41], [1] * 41, [5, 1, 30, 5]], ids=["one", "tokens", "pieces"])
@torch.no_grad()
def test_every_row_of_a_padded_batch_has_the_logits_of_the_row_alone(model, cuts):
    ids, mask = tokens(4, 41), torch.ones(4, 41, dtype=torch.long)
    mask[1, :1], mask[2, :38], mask[3, 10:25] = 0, 0, 0  # left padding, and padding in the middle
    logits, _ = in_pieces(model, ids, cuts, mask)
    for row in range(4):
        real = mask[row].bool()
        assert_near(logits[row : row + 1, real], model(ids[row : row + 1, real], use_cache=False).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_in_half_precision_the_cache_is_as_near_as_rounding(model, dtype):
    model = model.to(dtype)
    ids = tokens(3, 41)
    logits, _ = in_pieces(model, ids, [9, 1, 31])
    assert torch.isfinite(logits).all()
    assert_near(logits.float(), model(ids, use_cache=False).logits.float(), tolerance=0.05)


# One model of each kind of cache, for tests of what transformers does with it.
few = pytest.mark.parametrize(
    "model", ("full table", "local window alone", "all in one", "all portable"), indirect=True
)

MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "do_sample": False, "num_return_sequences": 2},
    "beam sampling": {"num_beams": 3, "do_sample": True},
}


@few
@pytest.mark.parametrize("mode", MODES)
def test_generate_gives_the_same_tokens_and_scores_with_and_without_cache(model, mode):
    ids, outputs = tokens(2, 9), []
    for use_cache in (True, False):
        torch.manual_seed(0)
        outputs.append(
            model.generate(
                ids,
                use_cache=use_cache,
                max_new_tokens=12,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
                **MODES[mode],
            )
        )
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    for cached, whole in zip(outputs[0].scores, outputs[1].scores):
        finite = torch.isfinite(whole)
        assert_near(cached[finite], whole[finite])
    scores = [
        model.compute_transition_scores(o.sequences, o.scores, getattr(o, "beam_indices", None), normalize_logits=True)
        for o in outputs
    ]
    assert_near(scores[0], scores[1])


@few
def test_generate_returns_hidden_states_and_attentions(model):
    ids = tokens(2, 6)
    layers, width = model.config.num_hidden_layers, model.config.hidden_size
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    output = model.generate(ids, output_hidden_states=True, **options)
    assert [step[-1].shape for step in output.hidden_states] == [(2, n, width) for n in (6, 1, 1)]
    assert all(len(step) == layers + 1 for step in output.hidden_states)
    watched = model.generate(ids, output_attentions=True, **options)
    assert torch.equal(watched.sequences, output.sequences)
    assert all(len(step) == layers for step in watched.attentions)
    assert [step[0].shape for step in watched.attentions] == [(2, width, 6, 6), (2, width, 1, 7), (2, width, 1, 8)]
    whole = model(watched.sequences[:, :-1], output_attentions=True, use_cache=False).attentions
    for layer in range(layers):
        assert_near(watched.attentions[-1][layer], whole[layer][:, :, -1:])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("cuts", [[4, 5], [3, 1, 2, 3]], ids=str)
@torch.no_grad()
def test_attentions_of_a_text_in_pieces_are_those_of_the_text_in_one(model, cuts, static):
    if static and "full" in model.config.layer_aft_types:
        pytest.skip("has no static cache")
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :2] = 0
    expected = model(ids, attention_mask=mask, output_attentions=True, use_cache=False)
    cache, end = model.aft.new_cache(9 if static else None), 0
    for piece in ids.split(cuts, 1):
        start, end = end, end + piece.shape[1]
        found = model(piece, attention_mask=mask[:, :end], cache=cache, output_attentions=True)
        assert_near(found.logits[mask[:, start:end] == 1], expected.logits[:, start:end][mask[:, start:end] == 1])
        for mine, theirs in zip(found.attentions, expected.attentions):
            assert_near(mine, theirs[:, :, start:end, :end])


@torch.no_grad()
def test_attentions_after_a_piece_without_them_are_refused(model):
    ids = tokens(2, 9)
    cache = model(ids[:, :3], output_attentions=True, use_cache=True).cache
    model(ids[:, 3:5], cache=cache)
    with pytest.raises(ValueError, match=r"output_attentions needs all keys.*from the first call on"):
        model(ids[:, 5:], cache=cache, output_attentions=True)


def test_gradients_reach_attentions_with_a_cache_as_without(model):
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        output = model(torch.arange(1, 10)[None], output_attentions=True, use_cache=use_cache)
        for attention in output.attentions:
            attention.retain_grad()
        output.logits.square().sum().backward()
        found.append([attention.grad for attention in output.attentions])
    for mine, theirs in zip(*found):
        assert_near(mine, theirs)


@torch.no_grad()
def test_layers_may_be_removed_or_used_twice(model):
    layers = model.aft.layers
    for chosen in ([layers[-1]], [layers[0], layers[0]]):
        model.aft.layers = torch.nn.ModuleList(chosen)
        ids = tokens(2, 9)
        assert_near(in_pieces(model, ids, [4, 1, 4])[0], model(ids, use_cache=False).logits)


def test_gradients_of_each_row_are_those_of_the_row_alone(model):
    ids, parameters = tokens(3, 8), {name: x.detach() for name, x in model.named_parameters()}

    def loss(parameters, row):
        return torch.func.functional_call(model, parameters, (), {"input_ids": row[None], "labels": row[None]}).loss

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, ids)
    for i, row in enumerate(ids):
        for name, gradient in torch.func.grad(loss)(parameters, row).items():
            assert_near(found[name][i], gradient)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 2}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}],
    ids=str,
)
def test_generation_stops_where_the_learned_positions_end(options, caplog):
    model, prompt = build("local", max_position_embeddings=12), tokens(2, 5)
    expected = greedy(model, prompt, 8, **options)
    assert expected.shape == (2, 13) and "earlier" not in caplog.text  # the last position predicts one more token
    assert torch.equal(greedy(model, prompt, **options), expected)
    assert "generation stops 292 tokens earlier than requested" in caplog.text


def test_where_generation_stops_padding_takes_no_room_and_embeddings_count_as_tokens():
    model, prompt = build("local", max_position_embeddings=12), tokens(2, 9)
    mask = torch.ones_like(prompt)
    mask[0, :5], mask[1, :4] = 0, 0
    found = greedy(model, prompt, attention_mask=mask)
    assert found.shape == (2, 9 + 8)
    for length in (8, 300):
        static = {"cache_implementation": "static", "disable_compile": True}
        assert torch.equal(greedy(model, prompt, length, attention_mask=mask, **static), found)
    without = greedy(model, prompt, attention_mask=mask, use_cache=False)  # there, padding counts
    assert torch.equal(without, found[:, :13])
    alone = greedy(model, prompt[1:, 4:])
    assert torch.equal(found[1:, 4:], alone)
    embeds = model.get_input_embeddings()(prompt[1:, 4:])
    assert torch.equal(greedy(model, inputs_embeds=embeds), alone[:, 5:])
    with pytest.raises(ValueError, match="13 tokens"):
        greedy(model, tokens(1, 13))
    assert greedy(build("alibi", max_position_embeddings=12), tokens(1, 5), 20).shape == (1, 25)  # has no limit


def test_a_model_that_contains_an_aft_generates_without_a_cache_or_with_that_of_the_aft():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4}
    parts = {"vision_config": CLIPVisionConfig(**sizes), "text_config": build("local").config}
    model = LlavaForConditionalGeneration(LlavaConfig(**parts, image_token_index=255)).eval()
    inputs = {"input_ids": torch.tensor([[255] * 4 + [1, 2]]), "pixel_values": torch.randn(1, 3, 8, 8)}
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with pytest.raises(ValueError, match=r"got DynamicCache: in a model that contains this one.*use_cache=False"):
        model.generate(**inputs, **options)
    expected = model.generate(**inputs, **options, use_cache=False)
    found = model.generate(**inputs, **options, cache=model.model.language_model.new_cache())
    assert torch.equal(found, expected)


@pytest.mark.parametrize("use_cache", (True, False))
def test_an_aft_is_no_decoder_of_an_encoder_decoder_model(use_cache):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    model = VisionEncoderDecoderModel(encoder=ViTModel(ViTConfig(**sizes)), decoder=build("simple"))
    with pytest.raises(ValueError, match="AFT has no cross-attention"):
        model.generate(torch.randn(1, 3, 8, 8), decoder_start_token_id=0, pad_token_id=0, use_cache=use_cache)


def test_what_cannot_be_undone_says_so(model):
    ids = tokens(1, 5)
    with pytest.raises(ValueError, match="stateful"):
        model.generate(ids, assistant_model=copy.deepcopy(model), max_new_tokens=4, pad_token_id=0)
    _, state = in_pieces(model, ids, [5])
    with pytest.raises(ValueError, match="cannot be removed"):
        state.crop(2)


@torch.no_grad()
def test_a_state_can_be_reordered_repeated_selected_copied_and_reset(model):
    ids, more = tokens(3, 11), tokens(3, 1)
    order = torch.tensor([2, 0, 0])
    _, state = in_pieces(model, ids, [4, 7])
    saved = copy.deepcopy(state)
    state.reorder_cache(order)
    expected = model(torch.cat([ids[order], more], 1), use_cache=False).logits[:, -1:]
    assert_near(model(more, cache=state).logits, expected)
    repeated = copy.deepcopy(saved)
    repeated.batch_repeat_interleave(2)
    twice = torch.cat([ids, more], 1).repeat_interleave(2, 0)
    last = model(more.repeat_interleave(2, 0), cache=repeated).logits
    assert_near(last, model(twice, use_cache=False).logits[:, -1:])
    negative, chosen = copy.deepcopy(saved), copy.deepcopy(saved)
    negative.batch_select_indices(torch.tensor([-1, 0]))
    chosen.batch_select_indices(torch.tensor([True, False, True]))
    chosen.batch_select_indices(torch.tensor([1, 0]))
    for mine, theirs in zip(negative.layers, chosen.layers):
        assert all(torch.equal(x, theirs._tensors()[name]) for name, x in mine._tensors().items())
    saved.batch_select_indices(torch.tensor([1]))
    alone = torch.cat([ids[1:2], more[1:2]], 1)
    assert_near(model(more[1:2], cache=saved).logits, model(alone, use_cache=False).logits[:, -1:])
    saved.reset()
    assert saved.get_seq_length() == 0
    assert_near(model(ids, cache=saved).logits, model(ids, use_cache=False).logits)


SIZES = {"simple": 0, "alibi": 0, "local": 6, "conv": 4}


@pytest.mark.parametrize("name", SIZES)
@torch.no_grad()
def test_the_state_does_not_grow_with_the_text(name):
    model = build(name)
    ids = tokens(2, LONGEST)
    (_, short), (_, long) = in_pieces(model, ids[:, :9], [9]), in_pieces(model, ids, [50, 1, 119])
    assert short.nbytes() == long.nbytes()
    layer = long.layers[0]
    assert layer.keys.shape[2] == SIZES[name]
    # Tensors do not keep the memory of the tokens that they were cut from.
    assert all(x.untyped_storage().nbytes() <= 2 * x.nbytes for x in (layer.keys, layer.values, layer.numerator))


@pytest.mark.parametrize("name", ["conv", "alibi", "simple"])
@torch.no_grad()
def test_types_without_tables_run_on_without_limit_and_in_bounded_memory(name):
    model = build(name, use_position_embeddings=False, num_hidden_layers=1)
    state, ids = None, tokens(1, 1000)
    for _ in range(100):
        output = model(ids, cache=state, use_cache=True, logits_to_keep=1)
        state = output.cache
    assert state.get_seq_length() == 100_000
    assert state.nbytes() < 2_000
    assert torch.isfinite(output.logits).all()
    # After a hundred repetitions of the same tokens, the averages no longer change.
    again = model(ids, cache=state, logits_to_keep=1).logits
    assert_near(again, output.logits, tolerance=1e-3)


@torch.no_grad()
def test_training_keeps_no_state_and_wrong_states_and_masks_are_named(model):
    ids = tokens(2, 6)
    assert model.train()(ids).cache is None
    _, state = in_pieces(model.eval(), ids, [6])
    with pytest.raises(ValueError, match=r"batch size of 2.*3"):
        model(tokens(3, 1), cache=state)
    with pytest.raises(ValueError, match=r"6 past and 1 new"):
        model(ids[:, :1], attention_mask=torch.ones(2, 3), cache=state)
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), 0)
    others = AFTCache([None] * 9), AFTCache([77] * len(model.aft.layers))
    messages = (
        "DynamicCache",
        r"got DynamicCache.* not supported: use LoRA",
        "this model's AFTCache",
        "of another layer",
    )
    for other, message in zip((DynamicCache(), cache, *others), messages):
        with pytest.raises(ValueError, match=message):
            model(ids, cache=other)


@torch.no_grad()
def test_tokens_out_of_range_and_empty_texts_are_named(model):
    with pytest.raises(ValueError, match=r"0 \.\. 255.*256"):
        model(torch.tensor([[1, 256]]))
    with pytest.raises(ValueError, match=r"-1"):
        model(torch.tensor([[-1, 2]]))
    model.set_input_embeddings(torch.nn.Embedding(300, model.config.hidden_size))
    assert model(torch.tensor([[299]])).logits.isfinite().all()
    for call in (model, lambda ids: model.generate(ids, max_new_tokens=2, pad_token_id=0)):
        with pytest.raises(ValueError, match="empty"):
            call(torch.zeros(1, 0, dtype=torch.long))


@torch.no_grad()
def test_a_batch_without_rows_has_a_state_without_rows(model):
    assert in_pieces(model, tokens(0, 9), [4, 1, 4])[0].shape[:2] == (0, 9)


@pytest.mark.parametrize("name", ("local", "conv", "all portable"))
@torch.no_grad()
def test_a_window_of_one_has_its_own_position_bias_in_every_step(name):
    model, ids = build(name, window_size=1, kernel_size=1), tokens(1, 6)
    assert_near(in_pieces(model, ids, [3, 1, 1, 1])[0], model(ids, use_cache=False).logits)


@pytest.mark.parametrize("padded", (False, True))
def test_gradients_of_a_text_in_pieces_are_those_of_the_text_in_one(model, padded):
    model, ids = model.double(), tokens(3, 13)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :4], mask[2, 2:5] = 0, 0
    expected, found = model(ids, mask, use_cache=False).logits, in_pieces(model, ids, [6, 1, 1, 5], mask)[0]
    weights, parameters = torch.randn_like(expected) * mask.unsqueeze(-1), list(model.parameters())
    gradients = [
        torch.autograd.grad((x * weights).sum(), parameters, materialize_grads=True) for x in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


TRANSFORMS = {
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x.sin(),))[1],
    "vmap": lambda call, x: torch.func.vmap(call)(torch.stack([x, x.sin()])),
    "gradient": lambda call, x: torch.func.grad(lambda x: call(x).sin().sum())(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("trained", (False, True))
def test_transforms_of_a_call_with_a_cache_are_those_of_one_without(model, transform, trained):
    model.requires_grad_(trained)
    x = model.get_input_embeddings()(tokens(2, 12)).detach()
    transform = TRANSFORMS[transform]
    expected = transform(lambda x: model(inputs_embeds=x, use_cache=False).logits, x)
    assert_near(transform(lambda x: model(inputs_embeds=x, use_cache=True).logits, x), expected)


def test_a_state_takes_keys_per_head_without_position_biases_and_with_gradients():
    mixer, x = AFTSimple(16, num_heads=4, causal=True, key_per_head=True), torch.randn(2, 12, 16)
    assert_near(mixer(x, state=AFTLayerState(0)), mixer(x), 1e-5)


@torch.no_grad()
def test_each_step_of_conv_in_training_samples_its_position_anew():
    torch.manual_seed(0)
    mixer, state = AFTConv(6, 3, 5, spatial_dims=1, causal=True, position_bias_selection="gumbel"), AFTLayerState(4)
    torch.nn.init.normal_(mixer.kernel_shift)
    x = torch.randn(2, 1, 6)
    mixer(torch.randn(2, 9, 6), state=state)
    assert not torch.equal(mixer(x, state=copy.deepcopy(state)), mixer(x, state=copy.deepcopy(state)))


@torch.no_grad()
def test_steps_run_in_full_precision_under_autocast():
    mixer = build("local portable").aft.layers[0].mixer
    state = AFTLayerState(mixer.state_window)
    hidden = torch.randn(2, 10, 12)
    mixer(hidden[:, :9], state=state)
    twin = copy.deepcopy(state)
    expected = mixer(hidden[:, 9:], state=state)
    for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.o_proj):
        # The projections run without autocast, so autocast must have no effect on the rest.
        projection.register_forward_pre_hook(lambda *_: torch.set_autocast_enabled("cpu", False))
        projection.register_forward_hook(lambda *_: torch.set_autocast_enabled("cpu", True))
    with torch.autocast("cpu"):
        assert torch.equal(mixer(hidden[:, 9:], state=twin), expected)


@pytest.mark.parametrize("first", (False, True), ids=("without gradients", "with gradients"))
def test_a_step_without_gradients_ends_the_graph_of_the_steps_before_it(first):
    torch.manual_seed(0)
    mixer, x = AFTSimple(8, causal=True), torch.randn(2, 6, 8)
    state = AFTLayerState(mixer.state_window)
    with torch.set_grad_enabled(first):
        before = mixer(x[:, :3], state=state)
    with torch.no_grad():
        mixer(x[:, 3:5], state=state)
    (found,) = torch.autograd.grad(mixer(x[:, 5:], state=state).sum(), [mixer.v_proj.weight])
    constant = AFTLayerState(mixer.state_window)
    with torch.no_grad():
        mixer(x[:, :5], state=constant)
    (expected,) = torch.autograd.grad(mixer(x[:, 5:], state=constant).sum(), [mixer.v_proj.weight])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if first:
        before.sum().backward()  # what the first step kept is unchanged


@pytest.mark.parametrize("name", ("simple", "alibi", "local", "conv"))
def test_a_cache_with_gradients_takes_tokens_in_inference_mode_and_then_outside_of_it(name):
    model, ids = build(name, mixing_implementation="portable"), tokens(2, 9)
    cache = model(ids[:, :3], use_cache=True).cache
    with torch.inference_mode():
        model(ids[:, 3:6], cache=cache)
    with torch.no_grad():
        assert_near(model(ids[:, 6:], cache=cache).logits, model(ids).logits[:, 6:])


changed_cache = pytest.mark.parametrize(
    "change",
    (
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_repeat_interleave(1),
        lambda cache: cache.layers.__setitem__(slice(None), map(copy.copy, cache.layers)),
        lambda cache: cache.layers.__setitem__(slice(None), copy.deepcopy(cache.layers)),
    ),
    ids=("reordered", "repeated", "copied", "deeply copied"),
)


@changed_cache
@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
@pytest.mark.parametrize("max_length", (None, 8))
def test_a_cache_that_is_changed_without_gradients_keeps_no_graph(change, mode, max_length):
    model, ids = build("local"), tokens(2, 6)
    cache = model(ids[:, :5], cache=model.aft.new_cache(max_length)).cache
    assert cache.layers[0].keys.requires_grad
    with mode():
        change(cache)
    assert not any(x.requires_grad for layer in cache.layers for x in layer._tensors().values())


@pytest.mark.parametrize("name", ("local", "all portable"))
@changed_cache
def test_a_cache_that_was_changed_in_inference_mode_takes_tokens_outside_of_it(name, change):
    model, ids = build(name), tokens(2, 6)
    with torch.inference_mode():
        cache = model(ids[:, :5], attention_mask=torch.ones(2, 5), use_cache=True).cache
        change(cache)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, 5] = 0
    with torch.no_grad():
        assert model(ids[:, 5:], attention_mask=mask, cache=cache).logits.isfinite().all()


class Operations(TorchDispatchMode):
    """Counts the operations that are dispatched, views included."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def operations_of_a_step(build_model, mask, cache_name):
    """The operations of one layer in a step of decoding: those of a model of 3 layers without those of 2."""
    counts = []
    for layers in (2, 3):
        model, tokens = build_model(layers).eval(), torch.randint(50, mask.shape)
        cache = model(tokens, attention_mask=mask, use_cache=True)[cache_name]
        mask_of_all = torch.cat([mask, mask[:, -1:]], 1)
        with Operations() as operations:
            model(tokens[:, :1], attention_mask=mask_of_all, use_cache=True, **{cache_name: cache})
        counts.append(operations.count)
    return counts[1] - counts[0]


@pytest.mark.skipif(not provides("causal", "cpu"), reason="needs the CPU kernels")
@pytest.mark.parametrize("padded", (False, True))
@pytest.mark.parametrize("aft_type", ("simple", "alibi", "local", "conv"))
@torch.no_grad()
def test_a_layer_decodes_a_token_with_no_more_operations_than_gpt_2(aft_type, padded):
    mask = torch.ones(8, 12, dtype=torch.long)
    if padded:
        mask = mask.tril(4)[:, list(reversed(range(12)))]
    sizes = {"vocab_size": 50, "n_embd": 32, "n_head": 2, "bos_token_id": None, "eos_token_id": None}
    peer = operations_of_a_step(
        lambda layers: GPT2LMHeadModel(GPT2Config(n_layer=layers, **sizes)), mask, "past_key_values"
    )
    options = {"aft_type": aft_type, "num_heads": 2, "vocab_size": 50}
    assert operations_of_a_step(lambda n: language_model(num_hidden_layers=n, **options), mask, "cache") <= peer
