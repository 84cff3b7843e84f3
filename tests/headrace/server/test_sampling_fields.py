"""Fields of the sampler over HTTP: masks, log-probabilities of chosen tokens, processors, beam search."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from headrace import BeamSearchParams, hookimpl
from headrace.core.interfaces import LogitsRow

pytestmark = pytest.mark.weights


class Wanted(BaseModel):
    """Parameters of the processor below."""

    token_ids: list[int]


class Say:
    """A plugin with a processor that requests may select: the answer is what they want."""

    name = "say"
    headrace_api = ">=1,<2"

    @hookimpl
    def headrace_register(self, registrar: Any) -> None:
        def make(params: Any, parameters: Wanted) -> Any:
            def process(row: LogitsRow, logits: Any) -> Any:
                logits[parameters.token_ids[row.position - row.num_prompt_tokens]] = 1000.0
                return logits

            return process

        registrar.logits_processor("say", make, parameters=Wanted)


@pytest.fixture(scope="module")
def other(http_server: Any) -> Iterator[Any]:
    """An engine with processed log-probabilities and a plugin of one's own."""
    with http_server(
        {}, max_model_len=128, plugins=[Say()], logprobs_mode="processed_logprobs", dtype="float32"
    ) as http:
        yield http


def choice_of(answer: Any) -> Any:
    assert answer.status == 200, answer.body
    [choice] = answer.json["choices"]
    return choice


def test_only_allowed_tokens_come(server: Any) -> None:
    allowed, body = [260, 300, 451, 28], {"return_token_ids": True}
    drawn = {"temperature": 1.5, "seed": 3, "max_tokens": 12, "allowed_token_ids": allowed}
    choice = choice_of(server.complete("The", **body, **drawn))
    assert set(choice["token_ids"]) <= set(allowed)
    assert len(set(choice["token_ids"])) > 1
    assert choice["finish_reason"] == "length", "the end token is not among them"
    body |= {"max_tokens": 3, "allowed_token_ids": [451], "logit_bias": {"300": 100}}
    for answer in (server.complete("The", **body), server.chat("hi", **body)):
        assert choice_of(answer)["token_ids"] == [451] * 3


def test_bad_words_do_not_come_at_the_beginning_or_later(server: Any) -> None:
    prompt = "The capital of France is"
    plain = choice_of(server.complete(prompt, max_tokens=24))["text"]
    words = [word.strip(".,") for word in plain.split()]
    for word in {words[0], words[3], words[-1]}:
        text = choice_of(server.complete(prompt, max_tokens=24, bad_words=[word]))["text"]
        assert text != plain
        assert word not in text.replace(".", " ").replace(",", " ").split()
    two = " ".join(plain.split()[:2])
    text = choice_of(server.complete(prompt, max_tokens=24, bad_words=[two]))["text"]
    assert two not in text
    assert text.split()[0].startswith(words[0]), "the first word alone is not banned"
    assert choice_of(server.complete(prompt, max_tokens=24, bad_words=[words[0].swapcase()]))["text"] == plain


def test_ids_asked_for_are_told_in_completions(server: Any) -> None:
    for logprobs in (None, 0, 2):
        body = {"max_tokens": 3, "logprob_token_ids": [300, 5], "return_tokens_as_token_ids": True}
        if logprobs is not None:
            body["logprobs"] = logprobs
        told = choice_of(server.complete("sun", **body))["logprobs"]
        for token, top in zip(told["tokens"], told["top_logprobs"], strict=True):
            assert {"token_id:300", "token_id:5", token} <= set(top)
            assert len(top) == max(1, logprobs or 0) + 2
            assert all(value < 0 for value in top.values())
        chunks = server.complete("sun", **body, stream=True).chunks
        streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
        assert {key: [item for part in streamed for item in part[key]] for key in told} == told
    whole = choice_of(server.complete("sun", max_tokens=1, echo=True, logprob_token_ids=[5]))
    assert "".join(whole["logprobs"]["tokens"]) == whole["text"]


def test_ids_asked_for_are_told_in_chats(server: Any) -> None:
    for more, count in (({}, 0), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)):
        body = {"max_tokens": 2, "logprob_token_ids": [300, 5], "return_tokens_as_token_ids": True, **more}
        content = choice_of(server.chat("hi", **body))["logprobs"]["content"]
        for token in content:
            names = [one["token"] for one in token["top_logprobs"]]
            assert len(names) == len(set(names)) == count + 2
            assert {"token_id:300", "token_id:5"} <= set(names)
    assert choice_of(server.chat("hi", max_tokens=2))["logprobs"] is None


def test_processed_logprobs_are_minus_9999_outside_of_what_is_kept(other: Any) -> None:
    """Source: vllm-project/vllm#10234: minus infinity is no JSON. `Answer.json` is read by a strict parser."""
    body = {"temperature": 1, "seed": 1, "top_k": 2, "max_tokens": 4, "logprobs": 5}
    told = choice_of(other.complete("red green blue", **body))["logprobs"]
    for token, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert sorted(top.values())[:-2] == [-9999.0] * (len(top) - 2)
        assert math.isclose(sum(math.exp(value) for value in top.values()), 1.0, abs_tol=1e-5)
        assert top[token] == logprob > -9999.0
    raw = choice_of(other.complete("red green blue", **body, logprobs_mode="raw_logprobs"))["logprobs"]
    assert raw["tokens"] == told["tokens"]
    assert all(-100 < value < 0 for top in raw["top_logprobs"] for value in top.values())
    chat = other.chat("hi", temperature=1, top_p=0.01, max_tokens=2, logprobs=True, top_logprobs=5)
    for token in choice_of(chat)["logprobs"]["content"]:
        assert [one["logprob"] for one in token["top_logprobs"]] == [0.0, *[-9999.0] * 4]


def test_a_processor_is_selected_by_name(other: Any) -> None:
    ids = [451, 260, 28]
    body = {"max_tokens": 3, "return_token_ids": True, "processors": {"say": {"token_ids": ids}}}
    assert choice_of(other.complete("The", **body))["token_ids"] == ids
    assert choice_of(other.chat("hi", **body))["token_ids"] == ids
    assert choice_of(other.complete("The", max_tokens=3, return_token_ids=True))["token_ids"] != ids
    error = other.complete("The", processors={"sya": {}}).error
    assert error["param"] == "processors"
    assert "did you mean 'say'" in error["message"]
    assert "token_ids: Field required" in other.complete("The", processors={"say": {}}).error["message"]
    short = other.complete("The", max_tokens=3, processors={"say": {"token_ids": []}})
    assert short.status == 500
    assert "logits processor 'say' of plugin 'say' failed: IndexError" in short.error["message"]
    other.check_alive()


def test_the_description_has_the_options(server: Any) -> None:
    schemas = server.ask("GET", "/openapi.json").json["components"]["schemas"]
    for body in ("CompletionBody", "ChatBody"):
        assert {
            "allowed_token_ids",
            "bad_words",
            "processors",
            "logprob_token_ids",
            "logprobs_mode",
            "truncate_prompt_tokens",
            "truncation_side",
            "use_beam_search",
            "length_penalty",
            "spaces_between_special_tokens",
        } <= set(schemas[body]["properties"])


def test_special_tokens_may_be_a_space_apart(server: Any) -> None:
    end = server.engine.front.eos_token_ids[0]
    body = {"max_tokens": 3, "ignore_eos": True, "logit_bias": {str(end): 100}, "logprobs": 0}
    body["skip_special_tokens"] = False
    plain = choice_of(server.complete("a", **body))
    assert plain["text"] == "<|im_end|>" * 3
    spaced = choice_of(server.complete("a", **body, spaces_between_special_tokens=True))
    assert spaced["text"] == " ".join(["<|im_end|>"] * 3)
    for choice in (plain, spaced):
        for token, offset in zip(
            choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True
        ):
            assert choice["text"].startswith(token, offset)


# Beam search --------------------------------------------------------------------------------------------


def found(server: Any, prompt: Any, **fields: Any) -> Any:
    """What the engine finds without HTTP around it."""

    async def search() -> Any:
        beams = await server.engine.prepare_beams(prompt, BeamSearchParams(**fields))
        while not beams.is_over:
            outputs = []
            for request in beams.requests():
                async for update in server.engine.run(request):
                    output = update.output
                outputs.append(output)
            beams.take(outputs)
        return beams.output

    return server.run(search())


def test_completions_by_beam_search(other: Any) -> None:
    body = {"use_beam_search": True, "n": 3, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    answer = other.complete(["The river", "A dog"], **body).json
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for place, prompt in enumerate(["The river", "A dog"]):
        right = found(other, prompt, beam_width=3, max_tokens=6)
        own = answer["choices"][3 * place : 3 * place + 3]
        assert [choice["token_ids"] for choice in own] == [one.token_ids for one in right.outputs]
        assert [choice["text"] for choice in own] == [one.text for one in right.outputs]
        assert {choice["finish_reason"] for choice in own} <= {"length", "stop"}
    assert answer["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in answer["choices"])
    scores = other.complete("The river", **body, logprobs=2, length_penalty=0).json["choices"]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in scores]
    assert sums == sorted(sums, reverse=True)
    for choice in scores:
        assert all(2 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])
    plain = choice_of(other.complete("The river", max_tokens=6, return_token_ids=True))
    greedy = choice_of(other.complete("The river", **(body | {"n": 1})))
    assert greedy["token_ids"] == plain["token_ids"]
    neutral = {"top_p": 1.0, "stop": [], "seed": 4, "presence_penalty": 0, "best_of": 3, "echo": True}
    echoed = other.complete("The river", **body, **neutral).json["choices"]
    assert [c["text"] for c in echoed] == ["The river" + c["text"] for c in answer["choices"][:3]]


def test_chats_by_beam_search(other: Any) -> None:
    body = {"use_beam_search": True, "n": 2, "max_tokens": 8}
    answer = other.chat("What is the capital of France?", **body).json
    first, second = (choice["message"]["content"] for choice in answer["choices"])
    assert first != second
    assert "<|im_end|>" not in first + second
    with other.client() as client:
        made = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            n=2,
            max_tokens=8,
            temperature=0,
            extra_body={"use_beam_search": True},
        )
        assert [choice.message.content for choice in made.choices] == [first, second]
        with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
            client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                extra_body={"use_beam_search": True},
            )
    other.check_alive()
    assert other.metric("kv_cache_usage_perc") == 0
