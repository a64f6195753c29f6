"""sentence-transformers: texts are cut at the limit of the model, and nowhere if it has none."""

import pytest
from client_models import LONGEST, language_model

from aft_hf import build_byte_tokenizer


pytest.importorskip("sentence_transformers", reason="needs sentence-transformers: run `make clients`")


@pytest.mark.parametrize(("aft_type", "limit"), [("alibi", None), ("conv", None), ("local", LONGEST)])
def test_texts_are_cut_at_the_limit_of_the_model(aft_type, limit, tmp_path):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    language_model(aft_type).save_pretrained(tmp_path)
    build_byte_tokenizer().save_pretrained(tmp_path)
    modules = [Transformer(str(tmp_path)), Pooling(16)]
    model = SentenceTransformer(modules=modules, device="cpu")
    text, other = "a" * 3000 + "zzz", "a" * 3000
    cut = abs(model.encode(text) - model.encode(other)).max() == 0
    assert cut == (limit is not None) and (limit is None or model.max_seq_length == limit)
