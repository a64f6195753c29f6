"""The byte tokenizer: ids are bytes, encoding is lossless, and AutoTokenizer loads it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from aft_hf import build_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_byte_tokenizer()


@given(text=st.text())
def test_ids_are_the_bytes_of_utf8_and_decode_to_the_text(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode()) and tokenizer.decode(ids) == text


def test_every_byte_has_its_own_id_and_special_tokens_follow_in_a_fixed_order(tokenizer):
    assert len(tokenizer) == 258
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257)
    assert len(build_byte_tokenizer(eos_token=None, pad_token=None)) == 256
    assert tokenizer.decode(list(range(32, 127))) == "".join(map(chr, range(32, 127)))
    tokenizer = build_byte_tokenizer(bos_token="<s>", pad_token="<pad>")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (256, 257, 258)
    assert tokenizer("<s>a<pad>").input_ids == [258, 97, 257]
    with pytest.raises(ValueError, match="end_token"):
        build_byte_tokenizer(end_token="<e>")


def test_autotokenizer_loads_it_from_what_was_saved(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "  two  spaces Grüße\r\n 日本語 \U0001f389 foo's <s> \u2028 \x00\x7f \u017f\u0301"
    assert loaded(text).input_ids == list(text.encode()) and loaded.decode(loaded(text).input_ids) == text
    assert (loaded.eos_token_id, loaded.pad_token_id) == (256, 257)
    assert loaded(["abc", "a"], padding=True).input_ids == [[97, 98, 99], [97, 257, 257]]
