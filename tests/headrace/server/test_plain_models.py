"""Models that have no text, no chat, or no answers at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = [5, 6, 7]


def test_a_model_without_tokenizer_takes_and_gives_ids(
    http_server: Callable[..., Any], tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    with http_server({"served_model_name": []}, str(tiny_gguf(tmp_path / "tiny.gguf"))) as server:
        body = {"max_tokens": 3, "return_token_ids": True, "logprobs": 1, "ignore_eos": True}
        answer = server.complete(PROMPT, **body).json
        [choice] = answer["choices"]
        assert choice["text"] == ""
        assert len(choice["token_ids"]) == 3
        assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        assert server.complete(PROMPT, **body, stream=True).chunks
        echo = server.complete(PROMPT, **body, echo=True).json["choices"][0]
        assert len(echo["logprobs"]["tokens"]) == 6
        assert "no tokenizer" in server.complete("text", max_tokens=1).error["message"]
        assert "need a tokenizer" in server.complete(PROMPT, stop="a").error["message"]
        for path, more in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert "no tokenizer" in server.ask("POST", path, more).error["message"]
        error = server.chat("hi").error
        assert "no chat template" in error["message"]
        assert "--chat-template" in error["message"]
        assert server.ask("POST", "/tokenize", {"messages": []}).status == 400
        assert server.complete(PROMPT, max_tokens=1).status == 200


def test_what_a_template_refuses_is_told(
    http_server: Callable[..., Any], tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """Source: vllm-project/vllm#17977."""
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}{{ 1 / 0 }}"
    )
    with http_server({}, str(tiny_gguf(tmp_path / "tiny.gguf")), chat_template=template) as server:
        for role, text in (("system", "no system here"), ("user", "division by zero")):
            for stream in (False, True):
                error = server.chat([{"role": role, "content": "a"}], stream=stream).error
                assert text in error["message"]
                assert error["param"] == "messages"


def test_forced_calls_need_structured_answers(
    http_server: Callable[..., Any], tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = str(tiny_gguf(tmp_path / "tiny.gguf"))
    with http_server({}, path, chat_template="a", disable_plugins=["structured"]) as server:
        tool = {"type": "function", "function": {"name": "f"}}
        error = server.chat("hi", tools=[tool], tool_choice="required").error
        assert "need the plugin 'structured'" in error["message"]
        assert "no tokenizer" in server.chat("hi").error["message"]


def test_an_encoder_has_no_answers(
    http_server: Callable[..., Any], tiny_bert: Callable[..., Path], tmp_path: Path
) -> None:
    with http_server({}, str(tiny_bert(tmp_path / "bert"))) as server:
        for body in ({"max_tokens": 2}, {"max_tokens": 0, "echo": True, "logprobs": 1}):
            assert server.complete(PROMPT, **body).status == 400
            assert server.complete(PROMPT, **body, stream=True).error["message"]
