"""A model drafts for another: for itself everything is accepted, for a stranger nothing; ids stay the same."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, RequestOutput, SamplingParams
from headrace.core.errors import ConfigError

PROMPTS = [[5, 9, 2, 7], [1] * 21, [3, 4, 5] * 13, [100], [9] * 16, [2, 7, 1, 8, 2, 8]]
Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """(kind, seed, **changes) -> a random model of 128 ids and 256 positions, made once."""
    made: dict[str, Path] = {}

    def make(kind: str = "Llama", seed: int = 0, **changes: Any) -> Path:
        import torch
        import transformers

        key = repr((kind, seed, sorted(changes.items())))
        if key not in made:
            torch.manual_seed(seed)
            sizes: dict[str, Any] = {
                "vocab_size": 128,
                "hidden_size": 64,
                "intermediate_size": 96,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 256,
                "initializer_range": 0.2,
            }
            config = getattr(transformers, f"{kind}Config")(**{**sizes, **changes})
            path = tmp_path_factory.mktemp("model")
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
            made[key] = path
        return made[key]

    return make


def make(model: Path, draft: Path | None = None, **options: Any) -> LLM:
    speculative = options.pop("speculative", {})
    if draft is not None:
        options["speculative"] = {
            "method": "draft_model",
            "model": str(draft),
            "num_speculative_tokens": 4,
            "adaptive": False,
            **speculative,
        }
    options.setdefault("dtype", "bfloat16")
    options.setdefault("max_model_len", 256)
    return LLM(str(model), show_report=False, **options)


def params(**changes: Any) -> list[SamplingParams]:
    mixes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.3, "min_p": 0.02, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0, "presence_penalty": 1.5, "logit_bias": {7: 2.0}},
        {"temperature": 1.0, "min_tokens": 9, "stop_token_ids": list(range(0, 128, 5))},
    ]
    common = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1, **changes}
    return [SamplingParams(seed=i, **{**mix, **common}) for i, mix in enumerate(mixes)]


def run(llm: LLM, asked: Sequence[SamplingParams] | None = None) -> list[RequestOutput]:
    return llm.generate(PROMPTS, list(asked or params()), use_tqdm=False)


def told(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs, o.outputs[0].finish_reason) for o in outputs]


def acceptance(llm: LLM) -> float:
    metrics = llm.metrics()
    assert metrics["spec_decode_num_draft_tokens"] > 20
    return metrics["spec_decode_num_accepted_tokens"] / metrics["spec_decode_num_draft_tokens"]


@pytest.fixture(scope="module")
def plain(folder: Folder) -> list[Any]:
    return told(run(make(folder())))


def test_for_itself_everything_is_accepted(folder: Folder, plain: list[Any]) -> None:
    llm = make(folder(), folder())
    assert told(run(llm)) == plain
    assert acceptance(llm) == 1.0
    assert llm.metrics()["num_steps"] < 14
    assert llm.report.executor["graph"] == "yes"


def test_for_a_stranger_next_to_nothing_is(folder: Folder, plain: list[Any]) -> None:
    llm = make(folder(), folder(seed=1))
    assert told(run(llm)) == plain
    assert acceptance(llm) < 0.15


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 9, "max_num_seqs": 4},
        {"num_kv_blocks": 8, "max_model_len": 90},
        {"enable_prefix_caching": False, "max_num_seqs": 1},
        {"enforce_eager": True, "block_size": 32},
    ],
    ids=str,
)
def test_its_kv_follows_chunks_preemptions_and_prefix_hits(
    folder: Folder, plain: list[Any], options: dict[str, Any]
) -> None:
    """All drafts of a model for itself are right only while its KV is that of the confirmed ids."""
    llm = make(folder(), folder(), **options)
    for _ in range(2):
        assert told(run(llm)) == plain
    assert acceptance(llm) == 1.0
    metrics = llm.metrics()
    if "num_kv_blocks" in options:
        assert metrics["num_preemptions"] > 0
    if options.get("enable_prefix_caching", True):
        assert metrics["prefix_cache_hits"] > 0


def drafted_and_accepted(ranks: Sequence[int], count: int) -> tuple[int, int]:
    """What becomes of greedy drafts of a model for itself, from the ranks of the tokens that are drawn."""
    drafted = accepted = 0
    at = 1  # the first token comes with the prompt
    while at < len(ranks):
        drafts = min(count, len(ranks) - at - 1)
        right = 0
        while right < drafts and ranks[at + right] == 1:
            right += 1
        drafted, accepted, at = drafted + drafts, accepted + right, at + right + 1
    return drafted, accepted


def test_a_prompt_that_was_only_computed_serves_drafts_of_others(folder: Folder) -> None:
    llm = make(folder(), folder())
    prompt = [i % 100 for i in range(90)]
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    asked = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (output,) = llm.generate([prompt], asked, use_tqdm=False)
    assert output.num_cached_tokens == 80
    assert acceptance(llm) == 1.0


def test_after_rejections_it_goes_on_from_what_was_drawn(folder: Folder) -> None:
    """A greedy draft is right wherever the likeliest token is drawn, if the KV behind rejections is mended."""
    llm = make(folder(), folder(), speculative={"draft_sampling": "greedy"})
    asked = [
        SamplingParams(temperature=0.3, seed=i, max_tokens=60, ignore_eos=True, logprobs=0) for i in range(6)
    ]
    outputs = run(llm, asked)
    assert told(outputs) == told(run(make(folder()), asked))
    counts = []
    for output in outputs:
        logprobs = output.outputs[0].logprobs or []
        counts.append(drafted_and_accepted([next(iter(one.values())).rank for one in logprobs], 4))
    metrics = llm.metrics()
    assert metrics["spec_decode_num_draft_tokens"] == sum(drafted for drafted, _ in counts)
    assert metrics["spec_decode_num_accepted_tokens"] == sum(accepted for _, accepted in counts)
    assert 0.2 < acceptance(llm) < 0.9


@pytest.mark.usefixtures("drafts_that_pay")
def test_adaptive_lengths_change_no_token(folder: Folder, plain: list[Any]) -> None:
    for draft in (folder(), folder(seed=1)):
        llm = make(folder(), draft, speculative={"adaptive": True})
        assert told(run(llm)) == plain
        assert told(run(llm)) == plain
        assert llm.metrics()["spec_decode_num_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (("Mistral", {"sliding_window": 16}), ("Llama", {"num_hidden_layers": 1})),
        (("Llama", {"num_hidden_layers": 3}), ("Mistral", {"sliding_window": 16})),
        (
            (
                "Gemma3Text",
                {"num_hidden_layers": 4, "sliding_window": 16, "head_dim": 16, "sliding_window_pattern": 2},
            ),
            ("Llama", {"num_key_value_heads": 1}),
        ),
        (
            (
                "Gemma3Text",
                {"num_hidden_layers": 4, "sliding_window": 16, "head_dim": 16, "sliding_window_pattern": 2},
            ),
            (
                "Gemma3Text",
                {"num_hidden_layers": 4, "sliding_window": 16, "head_dim": 16, "sliding_window_pattern": 2},
            ),
        ),
    ],
    ids=["window", "window draft", "windows and not", "both"],
)
def test_layers_that_look_back_differently_share_the_pool(folder: Folder, target: Any, draft: Any) -> None:
    model = folder(target[0], **target[1])
    right = told(run(make(model)))
    llm = make(model, folder(draft[0], **draft[1]))
    assert told(run(llm)) == right
    assert told(run(llm)) == right
    if target == draft:
        assert acceptance(llm) == 1.0


@pytest.mark.parametrize("short", [1, 2, 4, 6])
def test_drafts_end_with_the_context(folder: Folder, short: int) -> None:
    """The pool holds one request of full length, places for drafting included."""
    prompt = [i % 100 for i in range(64 - short)]
    asked = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    answers = []
    for draft in (None, folder()):
        llm = make(folder(), draft, max_model_len=64, num_kv_blocks=4)
        (output,) = llm.generate([prompt], asked, use_tqdm=False)
        answers.append((output.outputs[0].token_ids, output.outputs[0].finish_reason))
    assert answers[0] == answers[1]
    assert len(answers[0][0]) == short


def test_a_draft_model_of_a_shorter_context_drafts_as_far_as_it_goes(
    folder: Folder, plain: list[Any]
) -> None:
    llm = make(folder(), folder(seed=0, max_position_embeddings=50))
    assert told(run(llm)) == plain
    assert acceptance(llm) == 1.0
    before = llm.metrics()["spec_decode_num_draft_tokens"]
    asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    llm.generate([[i % 100 for i in range(60)]], asked, use_tqdm=False)
    assert llm.metrics()["spec_decode_num_draft_tokens"] == before


def test_both_models_pay_for_the_pool(folder: Folder) -> None:
    alone = make(folder(), kv_cache_memory=2**20).report
    both = make(folder(), folder(num_hidden_layers=1), kv_cache_memory=2**20).report
    assert both.page_bytes * 2 == alone.page_bytes * 3
    assert both.num_blocks == 2**20 // both.page_bytes < alone.num_blocks


def test_another_vocabulary_is_refused(
    folder: Folder, tiny_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"of 96 ids and the model one of 128: .*speculative_model"):
        make(folder(), folder(vocab_size=96))
    paths = []
    for name, tokens in (("one", "abc"), ("same", "abc"), ("other", "abd")):
        keys = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": [*tokens, "ab", *(f"x{i}" for i in range(60))],
            "tokenizer.ggml.merges": ["a b"],
        }
        paths.append(tiny_gguf(tmp_path / f"{name}.gguf", keys))
    make(paths[0], paths[1], max_model_len=64)
    with pytest.raises(ConfigError, match=r"id 2 is b'd' to the draft model and b'c' to the model: .*other"):
        make(paths[0], paths[2], max_model_len=64)


def test_what_is_no_model_is_refused(folder: Folder, tmp_path: Path) -> None:
    from headrace.core.errors import CheckpointError

    with pytest.raises(CheckpointError, match="no model is called 'nowhere'"):
        make(folder(), Path("nowhere"))
    with pytest.raises(ConfigError, match="draft_model and heads need a model"):
        make(folder(), speculative_method="draft_model")


@pytest.mark.weights
def test_real_weights() -> None:
    texts = ["The capital of France is", "def fibonacci(n):\n    ", "Once upon a time"]
    asked = [SamplingParams(temperature=t, seed=4, max_tokens=24, ignore_eos=True) for t in (0, 1.0, 0.7)]

    def ids(llm: LLM) -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(texts, asked, use_tqdm=False)]

    options: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256, "show_report": False}
    drafting = {"method": "draft_model", "model": "smollm2", "adaptive": False}
    llm = LLM("smollm2", speculative=drafting, **options)
    assert ids(llm) == ids(LLM("smollm2", **options))
    assert acceptance(llm) == 1.0


def test_rejection_sampling_gives_the_distribution_and_says_that_tokens_differ(folder: Folder) -> None:
    """Pairs of the first two tokens, over 3,000 seeds: the counts of a plain run, and not its tokens."""
    allowed = [3, 30, 60, 90, 120]
    asked = [SamplingParams(seed=seed, max_tokens=3, allowed_token_ids=allowed) for seed in range(3000)]
    counts, ids = [], []
    judged = {"num_speculative_tokens": 2, "acceptance": "rejection"}
    for llm in (make(folder()), make(folder(), folder(seed=1), speculative=judged)):
        outputs = llm.generate([PROMPTS[0]] * len(asked), asked, use_tqdm=False)
        ids.append([output.outputs[0].token_ids for output in outputs])
        counts.append(collections.Counter((first, second) for first, second, _ in ids[-1]))
    assert 0.2 < acceptance(llm) < 0.9
    assert any("NOT the tokens" in line for line in llm.report.lines())
    pairs = [pair for pair in counts[0] | counts[1] if counts[0][pair] + counts[1][pair] >= 10]
    assert len(pairs) > 10
    chi2 = sum((counts[0][p] - counts[1][p]) ** 2 / (counts[0][p] + counts[1][p]) for p in pairs)
    assert chi2 < len(pairs) + 4.5 * (2 * len(pairs)) ** 0.5
    assert ids[0] != ids[1]


def test_rejection_sampling_leaves_greedy_tokens_alone(folder: Folder) -> None:
    llm = make(folder(), folder(seed=1), speculative={"acceptance": "rejection"})
    greedy = params(temperature=0)
    assert told(run(llm, greedy)) == told(run(make(folder()), greedy))
    assert acceptance(llm) < 0.9
