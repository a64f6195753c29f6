"""Classes: names for messages, and which models choose one class."""

import pytest

from aft_hf import AFTConfig
from aft_hf.data.classes import chooses_a_class, shortened


@pytest.mark.parametrize(("count", "chooses"), ((1, False), (2, True)))
def test_a_model_chooses_among_at_least_two_classes(count, chooses):
    assert chooses_a_class(AFTConfig(num_labels=count)) == chooses


def test_a_list_is_shortened_if_it_has_more_than_five_labels():
    assert shortened("abcde") == "'a', 'b', 'c', 'd', 'e'"
    assert shortened("abcdef") == "'a', 'b', 'c', 'd', 'e' ... (6 in all)"
