"""Packed documents: their boundaries and positions, and conversion to rows of their own."""

import pytest
import torch

from aft_hf.mixing_aft import PACKING_INPUTS, Documents, packed_documents


STARTS = torch.tensor([[1, 0, 0, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]).bool()
POSITIONS = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7]])


def test_positions_that_start_again_at_0_and_cumulative_lengths_are_documents():
    assert Documents.from_position_ids(POSITIONS, 2).starts.equal(STARTS)
    assert Documents.from_position_ids(POSITIONS[:1], 3).starts.equal(STARTS[:1].expand(3, -1))
    within = Documents.from_position_ids(torch.tensor([[5, 6, 0, 1]]), 1)
    assert within.starts.tolist() == [[True, False, True, False]]
    for dtype in (torch.int32, torch.int64):
        boundaries = torch.tensor([0, 3, 4, 8, 16], dtype=dtype)
        assert Documents.from_cumulative_lengths(boundaries, 2, 8).starts.equal(STARTS)
    whole = Documents.from_cumulative_lengths(torch.tensor([0, 16]), 2, 8)  # a document ends with its row
    assert whole.starts[:, 0].all() and not whole.starts[:, 1:].any()
    assert Documents(STARTS).can_be_unpacked and not Documents(STARTS.to("meta")).can_be_unpacked
    inputs = dict.fromkeys(PACKING_INPUTS)
    assert packed_documents(inputs | {"position_ids": POSITIONS}, None, 2, 8).starts.equal(STARTS)
    assert packed_documents(inputs | {"position_ids": POSITIONS[1:]}, None, 1, 8) is None  # each row is one document
    assert Documents(STARTS).longest() == 8 and Documents(STARTS[:1]).longest() == 4


def test_positions_of_padding_are_ignored():
    inputs = dict.fromkeys(PACKING_INPUTS) | {"position_ids": torch.tensor([[0, 1, 0, 1, 1]])}
    documents = packed_documents(inputs, torch.tensor([[1, 1, 1, 1, 0]]), 1, 5)
    assert documents.starts.tolist() == [[True, False, True, False, False]]
    with pytest.raises(ValueError, match="position_ids must count"):
        packed_documents(inputs, torch.ones(1, 5), 1, 5)
