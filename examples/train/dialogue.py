"""Build training sequences: stretches of novels, facts told and asked for, and chat.

Every sequence is mostly text of the training novels; what is put between teaches three things:
the chat format, going on with a passage, and finding a fact told thousands of tokens ago. The
facts are invented anew each time, so only attention to the full history can answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from facts import NAME, OTHER_KINDS, Kind, invented_word, pick, value
from novels import TITLES, Ids, Novel
from numpy.typing import NDArray
from tokenizers import Tokenizer

NOVEL_WEIGHT = 1.0  # the loss weight of a token of a novel
PROMPT_WEIGHT = 0.1  # what a user types need hardly be predicted
ANSWER_WEIGHT = 8.0  # few tokens, and the only ones that teach retrieval
REPLY_WEIGHT = 2.0

CONTINUE = (
    "Continue this passage:\n\n",
    "Please go on from here:\n\n",
    "Continue the story:\n\n",
    "",
)
ABOUT = ("Tell me about {}.", "Write a passage with the word {}.", "Say something about {}.")
STORY = ("Tell me a story.", "Read to me.", "Write something in the old style.", "Go on.")
REPEAT = ("Repeat after me: {}", "Say these words: {}", "Repeat: {}")
SMALL_TALK = (
    ("Hello.", "Good day to you."),
    ("Hello!", "Good day to you."),
    ("Good morning.", "Good morning to you."),
    ("How are you?", "I am very well, I thank you."),
    ("Who are you?", "I am a small language model that has read a few old novels."),
    ("What can you do?", "I can go on with a passage, and I can remember what you tell me."),
    ("Thank you.", "You are very welcome."),
    ("Goodbye.", "Farewell, and a good night to you."),
)
NOTED = ("I will remember that.", "Very well, I shall remember it.", "Thank you for telling me.")
SYSTEMS = (
    "You are a narrator of old novels.",
    "You are a helpful assistant.",
    "You remember what you are told.",
)


@dataclass(slots=True)
class Sequence:
    """A token sequence under construction, with one loss weight per token."""

    tokenizer: Tokenizer
    pieces: list[Ids] = field(default_factory=list)
    weights: list[NDArray[np.float32]] = field(default_factory=list)
    length: int = 0

    def add(self, ids: Ids, weight: float) -> None:
        """Append tokens that all have one weight."""
        self.pieces.append(ids)
        self.weights.append(np.full(len(ids), weight, dtype=np.float32))
        self.length += len(ids)

    def text(self, text: str, weight: float) -> None:
        """Append text; special tokens in it become those tokens."""
        self.add(np.array(self.tokenizer.encode(text).ids, dtype=np.int64), weight)

    def finish(self, tokens: int) -> tuple[Ids, NDArray[np.float32]]:
        """The first ``tokens`` ids and weights.

        Raises:
            ValueError: There are fewer.
        """
        if self.length < tokens:
            raise ValueError(f"the sequence has {self.length} tokens, {tokens} are needed")
        return np.concatenate(self.pieces)[:tokens], np.concatenate(self.weights)[:tokens]


Event = tuple[int, Callable[[Sequence], None]]


@dataclass(frozen=True, slots=True)
class Author:
    """Writes sequences of ``tokens`` tokens from the training novels."""

    novels: tuple[Novel, ...]
    tokenizer: Tokenizer
    tokens: int
    plain_share: float = 0.45

    def sample(self, rng: np.random.Generator) -> tuple[Ids, NDArray[np.float32]]:
        """Plain novel, or novel with facts put between paragraphs, or chat."""
        sequence = Sequence(self.tokenizer)
        choice = rng.random()
        if choice < self.plain_share:
            self.plain(sequence, rng)
        elif choice < self.plain_share + (1 - self.plain_share) * 0.45:
            self.plain_with_facts(sequence, rng)
        else:
            self.chat(sequence, rng)
        return sequence.finish(self.tokens)

    def novel(self, rng: np.random.Generator, tokens: int) -> Novel:
        """A novel longer than ``tokens``, drawn in proportion to the places to start at."""
        room = np.array([max(len(novel.ids) - tokens, 0) for novel in self.novels], dtype=float)
        return self.novels[int(rng.choice(len(self.novels), p=room / room.sum()))]

    def passage(self, rng: np.random.Generator, tokens: int) -> tuple[Novel, int, int]:
        """(novel, start, end) of whole paragraphs that have ``tokens`` tokens or a few more."""
        novel = self.novel(rng, tokens + 1000)
        usable = int(np.searchsorted(novel.starts, len(novel.ids) - tokens - 1000))
        start = int(novel.starts[int(rng.integers(max(usable, 1)))])
        return novel, start, paragraph_end(novel, start + tokens)

    def plain(self, sequence: Sequence, rng: np.random.Generator) -> None:
        """A stretch of one novel from any token on, half the time after ``<|bos|>``."""
        if rng.random() < 0.5:
            sequence.text("<|bos|>", 0.0)
        novel = self.novel(rng, self.tokens)
        start = int(rng.integers(len(novel.ids) - self.tokens))
        sequence.add(novel.ids[start : start + self.tokens], NOVEL_WEIGHT)

    def plan(
        self, rng: np.random.Generator, tell: Callable[..., None], ask: Callable[..., None]
    ) -> list[Event]:
        """Where which fact is told and asked for, in order of position."""
        kinds = [NAME] if rng.random() < 0.85 else []
        others = [OTHER_KINDS[i] for i in rng.permutation(len(OTHER_KINDS))]
        kinds += others[: int(rng.integers(0 if kinds else 1, 5))]
        last = self.tokens - 150
        events: list[Event] = []
        for kind in kinds:
            content = value(kind, rng)
            told = 0 if rng.random() < 0.35 else int(rng.integers(0, last * 2 // 5))
            asked = last if rng.random() < 0.25 else int(rng.integers(told + 40, last))
            events.append((told, partial(tell, kind=kind, content=content, rng=rng)))
            events.append((asked, partial(ask, kind=kind, content=content, rng=rng)))
            for _ in range(int(rng.binomial(max(self.tokens // 2048, 1), 0.3))):
                again = int(rng.integers(told + 40, last))
                events.append((again, partial(ask, kind=kind, content=content, rng=rng)))
        return sorted(events, key=lambda event: event[0])

    def plain_with_facts(self, sequence: Sequence, rng: np.random.Generator) -> None:
        """One novel, with facts told and asked for between its paragraphs."""
        if rng.random() < 0.5:
            sequence.text("<|bos|>", 0.0)
        novel = self.novel(rng, self.tokens + 2000)
        start = int(rng.integers(len(novel.ids) - self.tokens - 2000))
        here = int(novel.starts[np.searchsorted(novel.starts, start)])
        for position, event in self.plan(rng, plain_tell, plain_ask):
            missing = position - sequence.length
            if missing > 0:
                stop = min(
                    int(np.searchsorted(novel.starts, here + missing)), len(novel.starts) - 1
                )
                end = max(int(novel.starts[stop]), here)
                sequence.add(novel.ids[here:end], NOVEL_WEIGHT)
                here = end
            event(sequence)
        sequence.add(novel.ids[here : here + self.tokens], NOVEL_WEIGHT)

    def chat(self, sequence: Sequence, rng: np.random.Generator) -> None:
        """A conversation: facts told and asked for, passages and small talk between."""
        sequence.text("<|bos|>", 0.0)
        if rng.random() < 0.25:
            sequence.text(f"<|system|>{pick(rng, SYSTEMS)}<|end|>", PROMPT_WEIGHT)
        events = self.plan(rng, self.chat_tell, self.chat_ask)
        if rng.random() < 0.3:
            events.append((int(rng.integers(self.tokens)), partial(ask_untold, rng=rng)))
        told = {event.keywords["kind"].name for _, event in events if "kind" in event.keywords}
        for position, event in sorted(events, key=lambda event: event[0]):
            while position - sequence.length > 60:
                self.turn(sequence, rng, position - sequence.length)
            if event.func is ask_untold:
                event(sequence, told=told)
            else:
                event(sequence)
        while sequence.length < self.tokens:
            self.turn(sequence, rng, max(self.tokens - sequence.length, 80))

    def turn(self, sequence: Sequence, rng: np.random.Generator, room: int) -> None:
        """One exchange that is not about facts, of about ``room`` tokens at most."""
        choice = rng.random()
        if choice < 0.12:
            question, reply = SMALL_TALK[int(rng.integers(len(SMALL_TALK)))]
            exchange(sequence, question, reply, REPLY_WEIGHT)
        elif choice < 0.18:
            title, author = TITLES[pick(rng, [novel.name for novel in self.novels])]
            exchange(sequence, f"Who wrote {title}?", f"{title} is by {author}.", REPLY_WEIGHT)
        elif choice < 0.3:
            words = " ".join(invented_word(rng, 2) for _ in range(int(rng.integers(2, 7))))
            exchange(sequence, pick(rng, REPEAT).format(words), words, ANSWER_WEIGHT)
        elif choice < 0.5:
            self.paragraph_turn(sequence, rng)
        else:
            longest = max(min(room - 30, 3000), 61)
            tokens = int(np.exp(rng.uniform(np.log(60), np.log(longest))))
            self.passage_turn(sequence, rng, tokens, pick(rng, CONTINUE))

    def passage_turn(
        self, sequence: Sequence, rng: np.random.Generator, tokens: int, request: str
    ) -> None:
        """The user gives the beginning of a passage, the reply goes on with it."""
        novel, start, end = self.passage(rng, tokens)
        cut = word_end(novel, start + int((end - start) * rng.uniform(0.2, 0.9)))
        if rng.random() < 0.4:
            cut = paragraph_end(novel, cut) if paragraph_end(novel, cut) < end else cut
        sequence.text(f"<|user|>{request}", PROMPT_WEIGHT)
        sequence.add(novel.ids[start:cut], NOVEL_WEIGHT)
        sequence.text("<|end|><|assistant|>", PROMPT_WEIGHT)
        sequence.add(novel.ids[cut : end - 1], NOVEL_WEIGHT)
        sequence.text("<|end|>", REPLY_WEIGHT)

    def paragraph_turn(self, sequence: Sequence, rng: np.random.Generator) -> None:
        """The reply is one whole paragraph, asked for by a word that is in it or by nothing."""
        novel = self.novel(rng, 400)
        paragraph = novel.paragraphs[int(rng.integers(len(novel.paragraphs)))]
        about = pick(rng, ABOUT).format(pick(rng, list(paragraph.words)))
        request = about if rng.random() < 0.7 else pick(rng, STORY)
        sequence.text(f"<|user|>{request}<|end|><|assistant|>", PROMPT_WEIGHT)
        sequence.add(novel.ids[paragraph.start : paragraph.end - 1], NOVEL_WEIGHT)
        sequence.text("<|end|>", REPLY_WEIGHT)

    def chat_tell(
        self, sequence: Sequence, *, kind: Kind, content: str, rng: np.random.Generator
    ) -> None:
        """The user tells a fact, alone or before a passage; the reply notes it or goes on."""
        sequence.text("<|user|>", PROMPT_WEIGHT)
        sequence.text(pick(rng, kind.tells).format(content), 0.0)
        if rng.random() < 0.3:
            novel, start, end = self.passage(rng, int(rng.integers(60, 300)))
            cut = word_end(novel, start + 40)
            sequence.text(pick(rng, ("\n\n", " Continue this passage:\n\n")), PROMPT_WEIGHT)
            sequence.add(novel.ids[start:cut], NOVEL_WEIGHT)
            sequence.text("<|end|><|assistant|>", PROMPT_WEIGHT)
            sequence.add(novel.ids[cut : end - 1], NOVEL_WEIGHT)
        else:
            sequence.text("<|end|><|assistant|>", PROMPT_WEIGHT)
            greeting = kind is NAME and rng.random() < 0.4
            reply = f"How do you do, {content}." if greeting else pick(rng, NOTED)
            sequence.text(reply, REPLY_WEIGHT)
        sequence.text("<|end|>", REPLY_WEIGHT)

    def chat_ask(
        self, sequence: Sequence, *, kind: Kind, content: str, rng: np.random.Generator
    ) -> None:
        """The user asks for a fact, sometimes at the end of a passage."""
        sequence.text("<|user|>", PROMPT_WEIGHT)
        if rng.random() < 0.2:
            novel, start, end = self.passage(rng, int(rng.integers(40, 200)))
            sequence.add(novel.ids[start:end], NOVEL_WEIGHT)
        sequence.text(pick(rng, kind.asks), PROMPT_WEIGHT)
        sequence.text("<|end|><|assistant|>", PROMPT_WEIGHT)
        sequence.text(f"{kind.answer.format(content)}<|end|>", ANSWER_WEIGHT)


def paragraph_end(novel: Novel, place: int) -> int:
    """The first paragraph boundary at or after a token, or the novel's end."""
    index = int(np.searchsorted(novel.starts, place))
    return int(novel.starts[index]) if index < len(novel.starts) else len(novel.ids)


def word_end(novel: Novel, place: int) -> int:
    """The first token at or after ``place`` that begins with white space."""
    index = int(np.searchsorted(novel.gaps, place))
    return int(novel.gaps[index]) if index < len(novel.gaps) else len(novel.ids)


def exchange(sequence: Sequence, question: str, reply: str, weight: float) -> None:
    """One user turn and one assistant turn."""
    sequence.text(f"<|user|>{question}<|end|><|assistant|>", PROMPT_WEIGHT)
    sequence.text(f"{reply}<|end|>", weight)


def ask_untold(sequence: Sequence, *, told: set[str], rng: np.random.Generator) -> None:
    """The user asks for something that this conversation never tells."""
    untold = [kind for kind in (NAME, *OTHER_KINDS) if kind.name not in told]
    if untold:
        kind = untold[int(rng.integers(len(untold)))]
        exchange(sequence, pick(rng, kind.asks), kind.unknown, REPLY_WEIGHT)


def plain_tell(sequence: Sequence, *, kind: Kind, content: str, rng: np.random.Generator) -> None:
    """A fact told as a paragraph of its own."""
    sequence.text(pick(rng, kind.tells).format(content) + "\n\n", 0.0)


def plain_ask(sequence: Sequence, *, kind: Kind, content: str, rng: np.random.Generator) -> None:
    """A question and its answer as one paragraph, or as two."""
    sequence.text(pick(rng, kind.asks), PROMPT_WEIGHT)
    between = " " if rng.random() < 0.7 else "\n\n"
    sequence.text(f"{between}{kind.answer.format(content)}\n\n", ANSWER_WEIGHT)
