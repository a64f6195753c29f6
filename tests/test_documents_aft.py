"""Who sees whom: packed documents, padding, and both, as one value for all layers."""

import math

import pytest
import torch
from test_caching_aft import Operations
from tiny_models import language_model
from torch import nn

from aft_hf import AFTConv
from aft_hf.mixing_aft import PACKING_INPUTS, Visibility, visibility_of


POSITIONS = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])
FIRST = [[0, 0, 0, 3, 4, 4, 4, 4], [0] * 8]


def seen(mask=None, batch_size=2, length=8, **packing):
    return visibility_of(dict.fromkeys(PACKING_INPUTS) | packing, mask, batch_size, length)


def test_positions_that_start_again_at_0_and_cumulative_lengths_are_documents():
    for dtype in (torch.int32, torch.int64):
        boundaries = torch.tensor([0, 3, 4, 8, 16], dtype=dtype)
        for actual in (seen(position_ids=POSITIONS.to(dtype)), seen(cu_seq_lens_q=boundaries)):
            assert actual.first.tolist() == FIRST and actual.position.equal(POSITIONS)
            assert actual.is_packed and actual.longest == 8
    shared = seen(position_ids=POSITIONS[:1], batch_size=3)
    assert shared.first.tolist() == FIRST[:1] * 3 and shared.longest == 4


def test_rows_that_hide_nothing_have_no_visibility():
    assert seen() is None and seen(torch.ones(2, 8)) is None
    assert seen(position_ids=POSITIONS[1:], batch_size=1) is None
    assert seen(cu_seq_lens_q=torch.tensor([0, 8, 16])) is None  # a document ends with its row


def test_padding_has_no_position_and_sees_nothing():
    actual = seen(torch.tensor([[0, 0, 1, 1, 0], [1, 1, 1, 1, 1]]), length=5)
    assert actual.first.tolist() == [[5, 5, 2, 2, 5], [0] * 5] and actual.longest == 5
    assert actual.position[0, 2:4].tolist() == [0, 1] and not actual.is_packed
    packed = seen(torch.tensor([[0, 1, 1, 1, 0]]), 1, 5, position_ids=torch.tensor([[0, 0, 1, 0, 7]]))
    assert packed.first.tolist() == [[5, 1, 1, 3, 5]]


def test_position_ids_of_padded_rows_as_gpt_2_takes_them_are_one_document():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    for position_ids in (mask.cumsum(1) - 1).clamp_min(0), (mask.cumsum(1) - 1).masked_fill(mask == 0, 1):
        actual, expected = seen(mask, length=5, position_ids=position_ids), seen(mask, length=5)
        assert not actual.is_packed and actual.first.equal(expected.first)
        assert all(map(torch.equal, actual.order, expected.order))
    holes = torch.tensor([[0, 1, 1, 0, 0, 1], [1, 1, 0, 1, 1, 0]])
    for elsewhere in (0, 1, 7):
        position_ids = (holes.cumsum(1) - 1).masked_fill(holes == 0, elsewhere)
        actual, expected = seen(holes, length=6, position_ids=position_ids), seen(holes, length=6)
        assert not actual.is_packed and actual.position[holes == 1].equal(expected.position[holes == 1])
    # Padding that starts a document, as in packed rows
    documents = seen(torch.tensor([[1, 1, 0, 0, 1, 1]]), 1, 6, position_ids=torch.tensor([[0, 1, 0, 1, 2, 3]]))
    assert documents.is_packed and documents.first.tolist() == [[0, 0, 6, 6, 4, 4]]


def test_padding_between_tokens_of_a_document_moves_behind_them():
    actual = seen(torch.tensor([[0, 1, 0, 1, 1]]), 1, 5)
    order, back = actual.order
    assert actual.first is None and order.tolist() == [[1, 3, 4, 0, 2]]
    assert order.gather(1, back)[actual.real].tolist() == [1, 3, 4]
    assert actual.position[0, [1, 3, 4]].tolist() == [0, 1, 2]


def test_position_ids_that_do_not_count_the_real_tokens_are_refused():
    position_ids = torch.tensor([[0, 1, 0, 1, 1]])
    assert seen(torch.tensor([[1, 1, 1, 1, 0]]), 1, 5, position_ids=position_ids).first.tolist() == [[0, 0, 2, 2, 5]]
    with pytest.raises(ValueError, match="position_ids must count"):
        seen(torch.ones(1, 5), 1, 5, position_ids=position_ids)


def test_position_ids_of_documents_may_count_their_padding_or_not():
    mask = torch.tensor([[0, 0, 0, 1, 0, 0, 1]])
    for position_ids in ([[0, 0, 0, 1, 2, 3, 0]], [[0, 0, 0, 0, 1, 1, 0]], [[1, 1, 0, 1, 9, 9, 0]]):
        actual = seen(mask, 1, 7, position_ids=torch.tensor(position_ids))
        assert actual.position[0, [3, 6]].tolist() == [0, 0]


@pytest.mark.parametrize("hidden", (-torch.inf, -1e4, 0.5, -10000, 2))
def test_a_mask_that_is_added_to_logits_or_numbers_documents_is_refused(hidden):
    mask = torch.tensor([[0, hidden, 0, 0]])
    with pytest.raises(ValueError, match="give mask == 0"):
        Visibility.of(mask)
    assert Visibility.of((mask == 0).float()).real.tolist() == [[True, False, True, True]]


@pytest.mark.parametrize(
    "boundaries", ([0, 8, -1], [0, 9, 8, 16], [4, 16], [0, 8], [0, 17], [], [0.0, 16.0], [[0, 8, 16]], 16), ids=str
)
def test_boundaries_that_do_not_divide_the_tokens_are_refused(boundaries):
    with pytest.raises(ValueError, match="cu_seq_lens_q must hold integers from 0 to 16"):
        seen(cu_seq_lens_q=torch.tensor(boundaries))
    seen(cu_seq_lens_q=torch.tensor([0, 3, 3, 16, 16], dtype=torch.int32))  # documents may be empty


def test_a_mixer_on_a_grid_refuses_packed_documents():
    starts = torch.zeros(1, 16, dtype=torch.bool).index_fill(1, torch.tensor([5]), True)
    with pytest.raises(ValueError, match="packed documents are sequences"):
        AFTConv(8, 2, 3)(torch.randn(1, 16, 8), visibility=Visibility.of(None, starts))


@pytest.mark.parametrize(("aft_type", "padded"), [("full", False), ("local", True), ("conv", False)])
@torch.no_grad()
def test_packed_documents_compile_as_one_graph_also_after_texts_of_other_lengths(aft_type, padded):
    torch.compiler.reset()  # the programs of other tests count as recompilations
    model = language_model(aft_type).eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for shape in ((2, 6), (2, 7), (3, 9)):  # sizes are symbols from then on, but those of new inputs are not
        compiled(torch.ones(shape, dtype=torch.long), use_cache=False)
    ids, mask = torch.arange(16).view(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, 6:] = 0
    inputs = {"position_ids": POSITIONS, "use_cache": False} | ({"attention_mask": mask} if padded else {})
    torch.testing.assert_close(compiled(ids, **inputs).logits[mask == 1], model(ids, **inputs).logits[mask == 1])


PADDED = {
    "left": [[0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0]],
    "holes": [[0, 1, 0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1, 1, 1]],
    "nothing real": [[0] * 8, [1] * 8],
}
TYPES = ("full", "local", "simple", "conv", "alibi", ["full", "local"])


@pytest.mark.parametrize("mask", PADDED.values(), ids=PADDED)
@pytest.mark.parametrize("aft_type", TYPES, ids=str)
def test_a_model_moves_padding_once_for_all_layers_or_leaves_it_where_layers_are_observed(aft_type, mask):
    """Both give the same outputs and gradients, whatever the embeddings of padding are."""
    model, real = language_model(aft_type).double(), torch.tensor(mask).bool()
    given, outputs = torch.randn(2, 8, model.config.hidden_size, dtype=torch.float64), []

    def run(padding=1.0, **options):
        embedded = given.masked_fill(~real[..., None], padding).requires_grad_()
        output = model.aft(inputs_embeds=embedded, attention_mask=real.long(), **options)
        seen = output.last_hidden_state
        return output, [seen, *torch.autograd.grad(seen.square().sum(), [embedded, *model.aft.layers.parameters()])]

    nn.init.normal_(model.aft.layernorm.bias)
    _, actual = run(padding=math.nan)
    assert actual[0][~real].eq(model.aft.layernorm.bias).all()
    observed, expected = run(output_hidden_states=True)
    torch.testing.assert_close(actual, expected)
    for layer in (model.aft.layers[0], model.aft.layernorm):
        with layer.register_forward_hook(lambda module, inputs, output: outputs.append(output)):
            run()
    torch.testing.assert_close(outputs[0][real], observed.hidden_states[1][real])
    torch.testing.assert_close(outputs[1], actual[0])
    with model.aft.layers[1].register_full_backward_hook(lambda module, of_inputs, given: outputs.append(given[0])):
        run()
    assert outputs[2][~real].eq(0).all() and outputs[2][real].ne(0).any(-1).all()


@pytest.mark.parametrize("mask", list(PADDED.values())[:3], ids=list(PADDED)[:3])
@pytest.mark.parametrize("aft_type", TYPES[:5])
@torch.no_grad()
def test_a_layer_runs_the_operations_of_one_without_padding(aft_type, mask):
    ids, counts = torch.arange(16).view(2, 8), []
    for given in (None, torch.tensor(mask)):
        for layers in (2, 3):
            model = language_model(aft_type, num_hidden_layers=layers)
            model(ids, attention_mask=given, use_cache=False)
            with Operations() as operations:
                model(ids, attention_mask=given, use_cache=False)
            counts.append(operations.count)
    assert counts[3] - counts[2] == counts[1] - counts[0]
