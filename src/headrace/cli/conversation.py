"""A conversation, turn by turn, and the loop that reads turns: no terminal and no engine are needed to run either.

Answers go to standard output; everything else goes to `say`, which writes to standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.cli.requests import Streamed
from headrace.core.errors import EngineError, HeadraceError, RequestError, nearest

__all__ = ["COMMANDS", "Conversation", "Message", "messages_of", "talk"]

Message = dict[str, str]
Reply = Callable[[list[Message]], Streamed]
"""Answers a conversation and writes the answer. Raises `RequestError` with `param="prompt"` if it does not fit."""

COMMANDS = {
    "/help": "show this",
    "/reset": "forget the conversation; the system message stays",
    "/system": "/system TEXT sets the system message and forgets the conversation; without TEXT it is removed",
    "/stats": "tokens and speed of the last answer",
    "/quit": "end, as Ctrl-D does",
}
"""What a line may begin with, and what it does."""

HELP = "\n".join(
    [
        *(f"  {name:8} {text}" for name, text in COMMANDS.items()),
        "  //text   sends /text as it is",
        "Ctrl-C stops an answer, which is kept as far as it came; at the prompt it clears the line. When the",
        "conversation no longer fits the model's context, the older half of its turns is dropped.",
    ]
)


def messages_of(system: str | None, question: str, turns: Sequence[tuple[str, str]] = ()) -> list[Message]:
    """Return a conversation as messages. turns: earlier questions and answers."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for asked, answered in turns:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answered})
    return [*messages, {"role": "user", "content": question}]


@dataclass
class Conversation:
    """The turns so far. reply: answers; say: tells the user something, a line at a time."""

    reply: Reply
    say: Callable[[str], None]
    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)
    """Questions with their answers."""
    last: Streamed | None = None

    def ask(self, question: str) -> Streamed:
        """Answer a question and keep the turn; the older half of the turns goes when they do not fit.

        Raises what the request raises, with the conversation as it was before.
        """
        turns = list(self.turns)
        while True:
            try:
                answer = self.reply(messages_of(self.system, question, turns))
                break
            except RequestError as error:
                if error.param != "prompt" or not turns:
                    raise
                # Half at once: room for the answer, too, and the rest is found in the prefix cache again.
                turns = turns[(len(turns) + 1) // 2 :]
        dropped = len(self.turns) - len(turns)
        if dropped:
            count = f"the {dropped} oldest turns were" if dropped > 1 else "the oldest turn was"
            self.say(f"note: the conversation no longer fits the model's context; {count} dropped")
        if answer.error is not None:
            self.say(f"error: {' '.join(answer.error.split())}")
            self.turns = turns
            return answer
        if answer.finish_reason == "length":
            self.say("note: the answer ends here because max_tokens or the model's context is used up")
        self.turns = [*turns, (question, answer.text)]
        self.last = answer
        return answer

    def command(self, line: str) -> bool:
        """Do what a line with a slash says; False: end. Raises `RequestError` for an unknown command."""
        name, _, text = line.partition(" ")
        if name == "/quit":
            return False
        if name == "/help":
            self.say(HELP)
        elif name == "/stats":
            self.say(_stats(self.last))
        elif name == "/reset":
            self.turns, self.last = [], None
            self.say("the conversation begins anew")
        elif name == "/system":
            self.system, self.turns, self.last = text.strip() or None, [], None
            self.say("system message set" if self.system else "system message removed")
        else:
            raise RequestError(
                f"unknown command {name!r}{nearest(name, COMMANDS)}; there are: {', '.join(COMMANDS)}. "
                "Two slashes send a line that begins with one"
            )
        return True


def talk(conversation: Conversation, read: Callable[[], str], *, keeps_going: bool) -> bool:
    """Take turns until `read` raises `EOFError` or a line says /quit; return whether every answer came.

    read: returns the next line; raises `KeyboardInterrupt` where Ctrl-C is pressed.
    keeps_going: for a person: Ctrl-C at the prompt and a refused turn are told and the loop goes on; else both
        are raised. A stopped engine always is.
    """
    good = True
    while True:
        try:
            line = read()
        except EOFError:
            return good
        except KeyboardInterrupt:
            if not keeps_going:
                raise
            conversation.say("")
            continue
        if not line.strip():
            continue
        try:
            if line.startswith("/") and not line.startswith("//"):
                if not conversation.command(line.strip()):
                    return good
                continue
            answer = conversation.ask(line[1:] if line.startswith("//") else line)
            good = good and answer.error is None
        except HeadraceError as error:
            if not keeps_going or isinstance(error, EngineError):
                raise
            conversation.say(f"error: {' '.join(str(error).split())}")


def _stats(answer: Streamed | None) -> str:
    """Tokens, and their speed behind the first, which waits for the prompt."""
    if answer is None or len(answer.times) < 2:
        return "there is no answer yet"
    first, last = answer.times[1], answer.times[-1]
    tokens = f"{answer.num_tokens} token{'s' if answer.num_tokens != 1 else ''}"
    speed = f", then {(answer.num_tokens - 1) / (last - first):.1f} tok/s" if last > first else ""
    return f"{tokens}; the first after {first - answer.times[0]:.2f} s{speed}"
