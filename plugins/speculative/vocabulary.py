"""Whether two models mean the same by an id: checked before the second one is loaded."""

from __future__ import annotations

from headrace.core.errors import ConfigError
from headrace.core.interfaces import Checkpoint
from headrace.core.interfaces.build import WorkerContext
from headrace.models.opening import build_tokenizer, open_checkpoint

__all__ = ["check_vocabulary"]


def check_vocabulary(context: WorkerContext, checkpoint: Checkpoint, name: str) -> None:
    """Raise `ConfigError` unless the draft model `name` has the ids of the model, with the same meaning.

    Tokenizers are compared where both models have one.
    """
    advice = (
        f"drafts are ids, so both must have one vocabulary; choose another speculative_model than {name!r}"
    )
    size = int(checkpoint.config["vocab_size"])
    if size != context.vocab_size:
        raise ConfigError(
            f"the draft model has a vocabulary of {size} ids and the model one of {context.vocab_size}: {advice}",
            option="speculative_model",
        )
    target = open_checkpoint(context.model_path, context.registry)
    try:
        own = build_tokenizer(checkpoint.tokenizer, context.registry)
        other = build_tokenizer(target.tokenizer, context.registry)
    finally:
        target.close()
    if own is None or other is None:
        return
    for token_id in range(max(own.vocab_size, other.vocab_size)):
        known = token_id < min(own.vocab_size, other.vocab_size)
        if not known or own.token_bytes(token_id) != other.token_bytes(token_id):
            texts = [
                repr(one.token_bytes(token_id)) if token_id < one.vocab_size else "nothing"
                for one in (own, other)
            ]
            raise ConfigError(
                f"id {token_id} is {texts[0]} to the draft model and {texts[1]} to the model: {advice}",
                option="speculative_model",
            )
