"""`transformers serve` with an OpenAI client, `transformers chat`, pipelines, and streaming from Python."""

import sys
import threading
from types import SimpleNamespace

import pytest
from client_models import LONGEST
from transformers import TextIteratorStreamer, pipeline

from aft_hf import AFTForCausalLM, cli


PROMPT = "To be or"


@pytest.fixture(scope="module")
def server(server_port):
    openai = pytest.importorskip("openai", reason="needs openai: run `make clients`")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server_port}/v1", api_key="none")


@pytest.fixture
def expected(saved, tokenizer) -> str:
    """Greedy continuation of the prompt by six bytes."""
    return continuation(saved, tokenizer, PROMPT)


def continuation(saved, tokenizer, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    tokens = AFTForCausalLM.from_pretrained(saved).generate(ids, max_new_tokens=6, do_sample=False)
    return tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)


def streamed(text: str) -> str:
    """Return what the server streams of a decoded text: all but an incomplete last character."""
    return text.removesuffix("\N{REPLACEMENT CHARACTER}")


def test_completions_of_an_openai_client_equal_those_of_generate(server, saved, expected):
    options = {"model": str(saved), "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    assert server.completions.create(**options).choices[0].text == expected
    pieces = server.completions.create(**options, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == streamed(expected)


def test_a_request_beyond_the_maximum_length_gets_the_tokens_that_fit(server, saved):
    options = {"model": str(saved), "prompt": PROMPT, "max_tokens": 10 * LONGEST, "temperature": 0}
    completion = server.completions.create(**options)
    assert 0 < completion.usage.completion_tokens <= LONGEST + 1 - len(PROMPT)


def test_a_chat_completion_uses_the_chat_template_of_the_tokenizer(server, saved, tokenizer):
    messages = [{"role": "user", "content": PROMPT}]
    options = {"model": str(saved), "messages": messages, "max_tokens": 6, "temperature": 0}
    expected = continuation(saved, tokenizer, f"{PROMPT}\n")
    assert server.chat.completions.create(**options).choices[0].message.content == expected
    pieces = server.chat.completions.create(**options, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == streamed(expected)


def test_transformers_chat_prints_an_answer(server_port, saved, monkeypatch, capsys):
    typed = iter([PROMPT, "n", "!exit"])  # at the token limit, the chat asks whether to continue
    monkeypatch.setattr("builtins.input", lambda *_: next(typed))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # offline mode also blocks local servers
    with pytest.raises(SystemExit, match="0"):
        cli.app(["transformers", "chat", str(saved), f"http://127.0.0.1:{server_port}", "max_new_tokens=6"])
    assert next(typed, None) is None
    assert "tokens in" in capsys.readouterr().out


def test_text_is_streamed(load, tokenizer, expected):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    options = {"max_new_tokens": 6, "do_sample": False, "streamer": streamer}
    model, inputs = load(), tokenizer(PROMPT, return_tensors="pt")
    thread = threading.Thread(target=model.generate, kwargs={**inputs, **options})
    thread.start()
    assert "".join(streamer) == expected
    thread.join()


def test_a_pipeline_pads_a_batch(load, tokenizer, expected):
    texts = pipeline("text-generation", load(), tokenizer=tokenizer, batch_size=2)
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    (first,), (second,) = texts([PROMPT, "a much longer prompt"], **options)
    assert first["generated_text"] == expected and second["generated_text"] != expected


def test_the_command_passes_its_arguments_to_transformers(monkeypatch):
    taken = []
    library = SimpleNamespace(app=lambda args, prog_name: taken.append(args))
    monkeypatch.setitem(sys.modules, "transformers.cli.transformers", library)
    with pytest.raises(SystemExit, match="0"):
        cli.app(["transformers", "serve", "model", "--port", "8000"])
    assert taken == [["serve", "model", "--port", "8000"]]
