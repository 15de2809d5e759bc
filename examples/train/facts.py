"""Invented facts that are told early and asked for later, and the words to do both with."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

RESERVED_SHARE = 8  # one invented value in eight is kept for evaluation and never trained on


def words(text: str) -> tuple[str, ...]:
    """The words of a text, so that long lists stay readable."""
    return tuple(text.split())


FIRST_NAMES = words(
    "Ada Albert Alice Amelia Anna Arthur Beatrice Benjamin Catherine Charles Clara Daniel Dorothy "
    "Edith Edmund Edward Eleanor Elias Eliza Ellen Emily Ernest Esther Felix Florence Frances "
    "Frederick George Grace Hannah Harold Harriet Helen Henry Hugo Ida Isaac Isabel Jacob James "
    "Jane Jasper Joan Jonas Joseph Julia Kate Laura Leonard Lewis Lucy Lydia Mabel Margaret Maria "
    "Martin Matthew Maud Miriam Nathan Nora Oliver Oscar Patrick Paul Peter Philip Phoebe Ralph "
    "Rebecca Robert Rosa Rupert Ruth Samuel Sarah Silas Simon Sophia Stephen Susan Theodore Thomas "
    "Ursula Victor Violet Walter William Winifred Aiko Amara Chen Dmitri Elena Fatima Giovanni "
    "Ingrid Javier Kofi Lars Mateo Nadia Olga Priya Rashid Sven Tomas Yusuf Zofia"
)
LAST_NAMES = words(
    "Abbott Archer Ashdown Barlow Baxter Bennington Blackwood Bramley Brook Calder Carver Chandler "
    "Cooper Crowther Dalton Dunmore Ellery Fairweather Fletcher Forsyth Garland Gibson Hale Harker "
    "Hartley Hawthorne Holloway Hughes Ironside Jarvis Kendall Kingsley Lambert Langford Larkin "
    "Lockwood Marlowe Mercer Millbrook Morton Nightingale Norwood Oakley Osborne Pemberton Penrose "
    "Quincey Radley Ravenscroft Redfern Rowntree Sinclair Stanhope Sutton Tanner Thornbury Upton "
    "Vance Wakefield Warwick Weston Whitlock Winslow Wren Yardley Alvarez Becker Diallo Eriksen "
    "Fontaine Haddad Ivanov Kowalski Lindqvist Moreau Nakamura Okafor Petrov Rossi Tanaka"
)
ONSETS = words(
    "b br c ch cl d dr f fl g gl gr h j k kn l m n p pr qu r s sh sk st t th tr v w wh y z"
)
VOWELS = words("a e i o u ai ea ee ie oa ou")
CODAS = words("b ck d l ll m n nd ng r rk rt s sk st t th v x z") + ("",) * 8


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fact: how it is told, asked for, answered and acknowledged."""

    name: str
    tells: tuple[str, ...]
    asks: tuple[str, ...]
    answer: str
    unknown: str


NAME = Kind(
    "name",
    (
        "My name is {}.",
        "My name is {}.",
        "My name is {}.",
        "Hello, my name is {}.",
        "Please remember that my name is {}.",
        "I am called {}.",
        "Good day. My name is {}.",
        "Remember this: my name is {}.",
    ),
    (
        "What is my name?",
        "What is my name?",
        "What is my name?",
        "Do you remember my name?",
        "Tell me my name.",
        "Please tell me, what is my name?",
        "What was my name?",
    ),
    "Your name is {}.",
    "You have not told me your name.",
)
OTHER_KINDS = (
    Kind(
        "town",
        ("I live in {}.", "I come from {}, and I live there.", "My home is in {}."),
        ("Where do I live?", "Do you remember where I live?", "Tell me where I live."),
        "You live in {}.",
        "You have not told me where you live.",
    ),
    Kind(
        "dog",
        ("My dog is called {}.", "I have a dog called {}.", "The name of my dog is {}."),
        ("What is my dog called?", "What is the name of my dog?", "Who is my dog?"),
        "Your dog is called {}.",
        "You have not told me about a dog.",
    ),
    Kind(
        "ship",
        ("My ship is called the {}.", "I sail on a ship called the {}."),
        ("What is my ship called?", "What is the name of my ship?"),
        "Your ship is called the {}.",
        "You have not told me about a ship.",
    ),
    Kind(
        "word",
        ("The secret word is {}.", "Remember the secret word: {}.", "Our secret word is {}."),
        ("What is the secret word?", "Tell me the secret word.", "What was the secret word?"),
        "The secret word is {}.",
        "You have not told me a secret word.",
    ),
)


def is_reserved(value: str) -> bool:
    """Whether this value is kept for evaluation."""
    return zlib.crc32(value.encode()) % RESERVED_SHARE == 0


def pick(rng: np.random.Generator, options: tuple[str, ...] | list[str]) -> str:
    """One of the options, evenly."""
    return options[int(rng.integers(len(options)))]


def invented_word(rng: np.random.Generator, syllables: int) -> str:
    """A pronounceable word that is in no dictionary, in lower case."""
    parts = [pick(rng, ONSETS) + pick(rng, VOWELS) + pick(rng, CODAS) for _ in range(syllables)]
    return "".join(parts)


def invented_name(rng: np.random.Generator) -> str:
    """One capitalised word: from the lists, or made of two or three syllables."""
    return invented_word(rng, int(rng.integers(2, 4))).capitalize()


def person(rng: np.random.Generator) -> str:
    """A name of one to three words, several tokens long."""
    first = pick(rng, FIRST_NAMES) if rng.random() < 0.5 else invented_name(rng)
    last = pick(rng, LAST_NAMES) if rng.random() < 0.5 else invented_name(rng)
    form = rng.random()
    if form < 0.2:
        return first
    return f"{first} {invented_name(rng)} {last}" if form > 0.9 else f"{first} {last}"


def draw_value(kind: Kind, rng: np.random.Generator) -> str:
    """A value of this kind, reserved or not."""
    if kind.name == "name":
        return person(rng)
    if kind.name == "word":
        return invented_word(rng, 2) if rng.random() < 0.7 else str(rng.integers(100, 99999))
    return invented_name(rng) if rng.random() < 0.7 else pick(rng, LAST_NAMES)


def value(kind: Kind, rng: np.random.Generator, *, reserved: bool = False) -> str:
    """A value from the training share, or from the share reserved for evaluation.

    Raises:
        RuntimeError: None was found in a thousand draws.
    """
    for _ in range(1000):
        drawn = draw_value(kind, rng)
        if is_reserved(drawn) == reserved:
            return drawn
    raise RuntimeError("no value of the wanted share was drawn")
