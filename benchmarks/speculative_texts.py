"""Prompts for work with drafts: texts that a model copies, and questions that it answers in its own words."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

__all__ = ["QUESTIONS", "chat_prompts", "copying_prompts", "passages"]

DOCS = Path(__file__).resolve().parents[1] / "docs"
CHARACTERS = 600
"""Of a passage."""
STRIDE = 4000
"""Between passages; a text that ends sooner is gone through again, a little further on."""

SUBJECTS = (
    *("the sea", "a small town", "winter", "bread", "a bicycle", "the moon", "a library", "honey bees"),
    *("old maps", "a violin", "glass", "the desert", "a lighthouse", "tea", "paper", "a long journey"),
)
QUESTIONS = (
    "Tell me something interesting about {}.",
    "Write a short story about {}.",
    "What should a child know about {}?",
    "Why do people like {}?",
    "Describe {} to somebody who has never seen anything like it.",
)


def _texts() -> list[str]:
    """The standard library's help topics, and this project's own pages."""
    pages = sorted(DOCS.glob("*.md"))
    return [
        "\n".join(topics[name] for name in sorted(topics)),
        "\n".join(page.read_text(encoding="utf-8") for page in pages),
    ]


def passages(count: int) -> list[str]:
    """Return passages cut at fixed offsets, from the texts in turn."""
    texts = _texts()
    found = []
    for i in range(count):
        text = texts[i % len(texts)]
        start = (i // len(texts)) * STRIDE
        start = start % (len(text) - CHARACTERS) + 37 * (start // (len(text) - CHARACTERS))
        cut = text[start : start + CHARACTERS]
        found.append(cut[cut.index(" ") + 1 : cut.rindex(" ")])
    return found


def copying_prompts(count: int) -> list[str]:
    """Return prompts that ask for a passage again, and begin it."""
    return [
        f"Repeat this text:\n\n{text}\n\nThe same text again:\n\n{text[: text.index(' ', 40)]}"
        for text in passages(count)
    ]


def chat_prompts(count: int) -> list[str]:
    """Return questions, all different up to 80."""
    return [
        QUESTIONS[i // len(SUBJECTS) % len(QUESTIONS)].format(SUBJECTS[i % len(SUBJECTS)])
        for i in range(count)
    ]
