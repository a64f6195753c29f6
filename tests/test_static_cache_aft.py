"""`generate` with a static cache: the requirements of transformers' own tests of static caches."""

import copy

import pytest
import torch
from tiny_models import language_model
from transformers import CompileConfig

from aft_hf import AFTCache, AFTForCausalLM
from aft_hf.caching_aft import AFTLayerState


STATIC_TYPES = {
    "simple": {"aft_type": "simple"},
    "alibi": {"aft_type": "alibi", "num_heads": 2},
    "local": {"aft_type": "local"},
    "local table": {"aft_type": "local", "position_bias_dim": None, "use_position_embeddings": False},
    "local window alone": {"aft_type": "local", "global_connectivity": False},
    "conv": {"aft_type": "conv", "num_heads": 4},
    "all four": {"aft_type": ["simple", "local", "conv", "alibi"], "num_hidden_layers": 4, "num_heads": 2},
}


def build(name: str) -> AFTForCausalLM:
    sizes = {"hidden_size": 16, "num_heads": 1, "vocab_size": 40, "max_position_embeddings": 64}
    sizes |= {"window_size": 5, "kernel_size": 4, "position_bias_dim": 8}
    return language_model(**(sizes | STATIC_TYPES[name]))


@pytest.mark.parametrize("name", ("local", "conv"))
def test_a_reset_drops_the_graph_of_earlier_tokens(name):
    model, prompt = build(name), torch.randint(0, 40, (2, 9))
    cache = model.aft.new_cache(20)
    for _ in range(2):
        logits = [model(part, cache=cache).logits for part in prompt.split([8, 1], 1)]
        torch.cat(logits, 1).sum().backward()
        cache.reset()


@pytest.fixture(params=STATIC_TYPES)
def model(request) -> AFTForCausalLM:
    torch._dynamo.reset()
    return build(request.param)


def padded_prompts(length: int = 9) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, :4] = 0
    return {"input_ids": torch.randint(0, 40, (2, length)), "attention_mask": mask}


def generate(model, prompts, tokens=12, **options):
    return model.generate(
        **prompts, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
    )


def assert_same(actual, expected):
    assert torch.equal(actual.sequences, expected.sequences)
    for mine, theirs in zip(actual.logits, expected.logits):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_a_static_cache_gives_the_tokens_of_no_cache_and_the_attentions_of_a_dynamic_one(model, padded):
    prompts = padded_prompts()
    if not padded:
        prompts["attention_mask"].fill_(1)
    expected = generate(model, prompts, use_cache=False)
    dynamic = generate(model, prompts, output_attentions=True)
    actual = generate(model, prompts, cache_implementation="static", output_attentions=True)
    assert_same(actual, expected)
    torch.testing.assert_close(actual.attentions, dynamic.attentions, rtol=1e-4, atol=1e-5)
    cache = actual.cache
    assert isinstance(cache, AFTCache) and cache.is_compileable and len(cache.layers) == len(model.aft.layers)
    assert all(isinstance(layer, AFTLayerState) and layer.is_compileable for layer in cache.layers)
    assert int(cache.get_seq_length()) == 9 + 12 - 1
    beams, static = (
        model.generate(**prompts, max_new_tokens=6, num_beams=3, do_sample=False, cache_implementation=name)
        for name in (None, "static")
    )
    assert torch.equal(static, beams)


def test_the_tensors_of_a_static_cache_stay_in_place_and_begin_anew_after_a_reset(model):
    def places():
        tensors = [x for layer in cache.layers for x in layer._tensors().values()]
        return [(x.data_ptr(), x.shape) for x in tensors]

    cache, prompts = model.aft.new_cache(40), padded_prompts()
    with torch.no_grad():
        expected = model(**prompts, cache=model.aft.new_cache(40), output_attentions=True)
        model(**padded_prompts(), cache=cache)
        before = places()
        for _ in range(3):
            model(input_ids=torch.randint(0, 40, (2, 1)), cache=cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.reset()
        assert places() == before and int(cache.get_seq_length()) == 0
        actual = model(**prompts, cache=cache, output_attentions=True)
    real = prompts["attention_mask"].bool()
    torch.testing.assert_close(actual.logits[real], expected.logits[real], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual.attentions, expected.attentions, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "model",
    ["all four", *(pytest.param(f"local {kind}", marks=pytest.mark.slow) for kind in ("table", "window alone"))],
    indirect=True,
)
def test_generate_compiles_the_forward_of_a_static_cache_as_one_graph_and_once(model):
    """As in `test_generate_compile_model_forward_fullgraph` of transformers."""
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True, dynamic=False)
    config._compile_all_devices = True
    options = {"cache_implementation": "static", "compile_config": config}
    first, second = padded_prompts(), padded_prompts()
    plain = copy.deepcopy(model)
    actual = generate(model, first, **options)
    assert hasattr(model, "_compiled_call")
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    again = generate(model, second, **options)
    longer = generate(model, padded_prompts(7), 15, **options)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert_same(actual, generate(plain, first))
    assert_same(again, generate(plain, second))
    assert longer.sequences.shape[1] == 7 + 15


@pytest.mark.parametrize("implementation", [None, "static"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_prompt_is_prefilled_in_chunks(model, size, implementation):
    prompts = padded_prompts()
    expected = generate(model, prompts)
    options = {} if implementation is None else {"cache_implementation": implementation}
    assert_same(generate(model, prompts, prefill_chunk_size=size, **options), expected)


@torch.no_grad()
def test_a_mask_of_another_shape_is_named(model):
    prompts = padded_prompts()
    ids, mask = prompts["input_ids"], prompts["attention_mask"]
    wide = torch.nn.functional.pad(mask, (0, 7), value=1)
    for wrong in (wide, mask[:1], mask[:, 1:], mask[0], mask[:, None, None]):
        with pytest.raises(ValueError, match=r"attention_mask must be \(2, 9\), for 0 past and 9 new tokens"):
            model(ids, attention_mask=wrong, cache=model.aft.new_cache(16))
    cache = model.aft.new_cache(16)
    model(ids, attention_mask=mask, cache=cache)
    for wrong in (mask[:1], mask[:, :2]):
        with pytest.raises(ValueError, match="attention_mask must be"):
            model(ids[:, :3], attention_mask=wrong, cache=cache)
    embeds = model.get_input_embeddings()(ids)
    options = {"cache_implementation": "static", "prefill_chunk_size": 5, "max_new_tokens": 2, "pad_token_id": 0}
    with pytest.raises(ValueError, match="attention_mask must be"):  # transformers would drop it
        model.generate(inputs_embeds=embeds, attention_mask=mask, **options)


def test_new_tokens_continue_the_static_cache_of_an_earlier_call(model):
    prompts = padded_prompts()
    expected = generate(model, prompts, 8)
    cache = model.aft.new_cache(20)
    first = generate(model, prompts, 3, cache=cache)
    grown = {
        "input_ids": first.sequences,
        "attention_mask": torch.nn.functional.pad(prompts["attention_mask"], (0, 3), value=1),
    }
    second = generate(model, grown, 5, cache=cache)
    assert torch.equal(second.sequences, expected.sequences)


def test_a_static_cache_of_full_or_longer_than_the_learned_positions_is_refused():
    model = build("local")
    with pytest.raises(ValueError, match=r"79 tokens .* max_position_embeddings=64"):
        model.aft.new_cache(79)
    generated = model.generate(
        torch.tensor([[1, 2]]), max_new_tokens=78, min_new_tokens=78, cache_implementation="static", pad_token_id=0
    )
    assert generated.shape == (1, 65)  # the last position predicts one token more
    with pytest.raises(ValueError, match="constant size"):
        language_model("full").generate(torch.tensor([[1, 2]]), max_new_tokens=2, cache_implementation="static")
    with pytest.raises(NotImplementedError, match="padded batch"):
        model.generate_batch(inputs=[[1, 2]], max_new_tokens=2)


@pytest.mark.parametrize("length", (None, 40), ids=("dynamic", "static"))
def test_a_cache_that_is_filled_in_inference_mode_is_continued_without_it(model, length):
    cache, prompts = model.aft.new_cache(length), padded_prompts()
    with torch.inference_mode():
        model(**prompts, cache=cache)
    with torch.no_grad():
        actual = model(prompts["input_ids"][:, :1], cache=cache).logits
    prompts = {name: torch.cat([x, x[:, -1:] if "mask" in name else x[:, :1]], 1) for name, x in prompts.items()}
    torch.testing.assert_close(actual, model(**prompts).logits[:, -1:], rtol=1e-4, atol=1e-4)
