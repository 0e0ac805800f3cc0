"""Openings of user turns, in our own words, that the target continues into whole user turns.

An opening fixes the kind of request; the model supplies the rest at temperature 1. Nothing here is
copied from an evaluation set. The `finish` and `cut` rules end a continued turn where a user would
have stopped.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from prompt_words import (
    ADJECTIVES,
    CITIES,
    CLUBS,
    CODE_GOALS,
    CODE_NOUNS,
    CODE_VERBS,
    COUNTRIES,
    FIRST_NAMES,
    GERMAN_ADJECTIVES,
    GERMAN_CLAUSES,
    GERMAN_NAMES,
    GERMAN_NOUNS,
    GERMAN_PLACES,
    GERMAN_TIMES,
    GERMAN_VERBS,
    JOBS,
    LAST_NAMES,
    NEWS_ACTIONS,
    ORGANISATIONS,
    THINGS,
    TOPICS,
)

CATEGORIES = (
    "qa", "chat", "followup", "math", "code", "translation", "summary", "retrieval",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stub:
    """Opening of a user turn; `is_whole` when nothing is to be added."""

    text: str
    is_whole: bool = False


def _person(rng: random.Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


_QUESTION_OPENINGS = (
    "who", "who is the", "who was the first", "who wrote", "who played", "who sang",
    "who won the", "who invented", "what", "what is the", "what is a", "what are the",
    "what does", "what year did", "what was the", "what kind of", "what is the name of the",
    "what is the capital of", "what is the difference between", "what happens when", "when",
    "when did", "when was the", "when is the", "when does the", "where", "where is the",
    "where did", "where was", "where does the", "how", "how many", "how much", "how long does",
    "how old is", "how do you", "how does a", "how far is", "how did", "why", "why do",
    "why is the", "why did", "which", "which country", "which of the", "which city", "is the",
    "is it", "can you", "can a", "does", "do", "did", "name the", "show me the", "tell me the",
    "list the", "in which", "the name of", "number of", "meaning of", "whose", "are there", "has",
    "was", "would",
)  # fmt: skip


def qa(rng: random.Random) -> Stub:
    """A short factual question, often in the lower case of a search box."""
    opening = rng.choice(_QUESTION_OPENINGS)
    draw = rng.random()
    if draw < 0.35:
        subject = rng.choice((rng.choice(TOPICS), rng.choice(COUNTRIES), rng.choice(THINGS)))
        opening = f"{opening} {subject}"
    elif draw < 0.45:
        opening = f"{opening} {_person(rng)}"
    if rng.random() < 0.8:
        opening = opening[0].upper() + opening[1:]
    return Stub(opening)


_TASK_OPENINGS = (
    "Write a", "Write an essay about", "Write a short story about", "Write a poem about",
    "Write an email to", "Write a letter", "Write a blog post about", "Draft a", "Compose a",
    "Create a", "Come up with", "Suggest", "Give me", "Give an example of", "Explain",
    "Explain to a child", "Describe", "Describe the difference between", "Compare",
    "What are the pros and cons of", "Imagine you are", "Pretend to be", "You are a", "Act as a",
    "Play the part of", "Suppose that", "Help me", "How can I", "How would you", "Plan a",
    "Make a list of", "List five", "Classify", "Extract", "Identify", "Rewrite",
    "Edit the following", "Correct the grammar of", "Proofread", "Rate", "Evaluate", "Analyse",
    "Discuss", "Argue that", "Is it true that", "If", "There are", "In a", "Two", "A company",
    "I have", "I want to", "I am", "My", "Please", "Can you", "Could you", "Read the following",
    "Given the following", "Answer the following", "Consider", "Design", "Develop", "Provide",
    "Outline", "Tell me about", "Tell me a", "What would happen if", "Why do", "Which", "Who was",
    "Find the", "Solve", "Calculate", "Implement", "Write a program", "Write a function",
    "Write a Python", "Write an HTML", "Write a SQL query", "Determine",
)  # fmt: skip


def chat(rng: random.Random) -> Stub:
    """Writing, role play, reasoning, extraction; a third without any opening."""
    draw = rng.random()
    if draw < 0.35:
        return Stub("")
    opening = rng.choice(_TASK_OPENINGS)
    if draw < 0.55:
        opening = f"{opening} {rng.choice(rng.choice((TOPICS, THINGS, JOBS)))}"
    return Stub(opening)


_FOLLOWUP_OPENINGS = (
    "", "", "", "Now", "Can you", "Rewrite your", "What about", "Why", "How", "Explain",
    "Give me", "Thanks", "Thank you", "Could you", "Make it", "Is", "In your", "What", "Please",
    "Add", "Change", "Summarize", "I think", "But", "Can you please", "Shorten", "Write", "Which",
    "Do the same", "And", "Translate", "Also", "Suppose", "Provide", "Great",
    "I don't understand",
)  # fmt: skip


def followup(rng: random.Random) -> Stub:
    """The second user turn of a conversation."""
    return Stub(rng.choice(_FOLLOWUP_OPENINGS))


_MATH_OPENINGS = (
    "{name} has {n} {things}", "{name} buys {n} {things}", "{name} is", "{name} bought",
    "{name} and {other}", "{name} earns ${n}", "{name} wants to", "{name} has twice as many",
    "{name} spends", "{name} reads", "{name} runs {n} miles", "{name} works", "{name} went to",
    "{name} needs", "{name} made {n}", "{name} picked", "{name}'s", "{name} saves", "{name} can",
    "{name} sells", "There are {n} {things}", "A {job} has {n} {things}", "A {job}",
    "A store sells {things}", "A school", "A train", "A car", "A bakery", "A farmer", "A recipe",
    "A factory makes {n}", "A box of {things}", "A rectangular", "A class of {n} students",
    "In a", "On Monday, {name}", "The cost of", "The price of", "Each", "If {n} {things}",
    "If {name}", "One", "Two", "Half of the", "{n} {things}", "How many", "At the",
    "Every day, {name}", "Last year", "The number of", "It takes {name}", "The {things}", "After",
    "During", "For every", "Out of the {n}", "{name} gets", "{name} drove", "{name} baked {n}",
    "{name} and {other} share",
)  # fmt: skip


def math(rng: random.Random) -> Stub:
    """A word problem of primary school."""
    text = rng.choice(_MATH_OPENINGS).format(
        name=rng.choice(FIRST_NAMES),
        other=rng.choice(FIRST_NAMES),
        n=rng.choice((rng.randint(2, 20), rng.randint(2, 100), 10 * rng.randint(1, 60))),
        things=rng.choice(THINGS),
        job=rng.choice(JOBS),
    )
    return Stub(text)


_ARGUMENTS = (
    "numbers", "s", "text", "n", "lst", "values", "items", "a, b", "x, y", "words", "string",
    "arr", "x", "n: int", "s: str", "numbers: list", "values: List[int]", "text: str",
    "a: int, b: int", "lst, k", "grid", "matrix", "numbers: List[float]", "strings: List[str]",
    "x, y, z", "lst1, lst2", "start, end", "data", "d", "words: List[str]", "arr, n", "nums",
    "l: list", "string: str", "list_of_numbers", "a, b, c", "s, n", "q, w", "number", "sentence",
    "dic", "date",
)  # fmt: skip
_RETURNS = (
    "", "", "", "", " -> int", " -> str", " -> bool", " -> list", " -> List[int]", " -> float",
)  # fmt: skip


def _signature(rng: random.Random) -> str:
    name = f"{rng.choice(CODE_VERBS)}_{rng.choice(CODE_NOUNS)}"
    if rng.random() < 0.25:
        name = rng.choice((rng.choice(CODE_NOUNS), f"{rng.choice(CODE_ADJECTIVE)}_{name}"))
    return f"def {name}({rng.choice(_ARGUMENTS)}){rng.choice(_RETURNS)}:"


CODE_ADJECTIVE = (
    "is", "largest", "smallest", "sorted", "unique", "common", "even", "odd", "prime", "valid",
    "max", "min", "total", "closest", "longest", "shortest", "first", "last", "rounded",
    "special", "nested", "next",
)  # fmt: skip
_CODE_REQUESTS = (
    "Write a Python function to", "Write a Python program that", "Write a function that",
    "Implement", "Create a Python class", "Write a SQL query", "Write a C++ program",
    "Write a JavaScript function", "How do I", "Fix the bug in this code:\n```python\ndef ",
    "Explain this code:\n```python\n", "Write an HTML page", "Develop a Python function called",
    "Write a script", "Given a list of", "Design a Python", "Write a unit test",
    "Write a regular expression", "Write a function to find the", "Write code to",
)  # fmt: skip


def code(rng: random.Random) -> Stub:
    """A function to complete from its docstring, or another request for code."""
    if rng.random() < 0.2:
        return Stub(rng.choice(_CODE_REQUESTS))
    lines = ["Complete the following Python function.", "```python", ""]
    if rng.random() < 0.25:
        lines.append(rng.choice(("from typing import List\n\n", "import math\n\n", "\n")))
    lines.append(_signature(rng))
    quotes = '"""' if rng.random() < 0.8 else "'''"
    gap = rng.choice(("", "", " ", "\n    "))
    goal = rng.choice(CODE_GOALS) if rng.random() < 0.75 else ""
    lines.append(f"    {quotes}{gap}{goal}")
    return Stub("\n".join(lines))


def finish_code(text: str, rng: random.Random) -> str:
    """The turn cut after the docstring it opened, fence closed; other requests as they are."""
    quotes = next((mark for mark in ('"""', "'''") if mark in text), None)
    if not text.startswith("Complete the following") or quotes is None:
        return text
    head, _, rest = text.partition(quotes)
    doc, closing, _ = rest.partition(quotes)
    if not closing:
        doc = doc.rsplit("\n", 1)[0]
    doc = doc.split("```")[0].rstrip()
    tail = f"{quotes}" if "\n" not in doc and rng.random() < 0.5 else f"\n    {quotes}"
    return f"{head}{quotes}{doc}{tail}\n```"


_ARTICLES = {
    "m": {"nom": "der", "acc": "den", "dat": "dem", "gen": "des"},
    "f": {"nom": "die", "acc": "die", "dat": "der", "gen": "der"},
    "n": {"nom": "das", "acc": "das", "dat": "dem", "gen": "des"},
}


def _german_noun_phrase(rng: random.Random, case: str) -> str:
    gender, noun = rng.choice(GERMAN_NOUNS)
    article = _ARTICLES[gender][case]
    ending = "en" if case in ("dat", "gen") or (case == "acc" and gender == "m") else "e"
    if case == "gen" and gender != "f":
        noun += "es" if noun.endswith(("t", "d", "s", "z", "g")) else "s"
    if rng.random() < 0.45:
        return f"{article} {rng.choice(GERMAN_ADJECTIVES)}{ending} {noun}"
    return f"{article} {noun}"


def german_sentence(rng: random.Random) -> str:
    """A made-up German sentence in the manner of a newspaper."""
    subject = rng.choice(GERMAN_NAMES) if rng.random() < 0.3 else _german_noun_phrase(rng, "nom")
    if rng.random() < 0.35:
        subject += " " + _german_noun_phrase(rng, "gen")
    finite, closing = rng.choice(GERMAN_VERBS)
    middle = [_german_noun_phrase(rng, "acc")]
    if rng.random() < 0.5:
        middle.insert(0, rng.choice(GERMAN_TIMES))
    if rng.random() < 0.4:
        middle.append(rng.choice(GERMAN_PLACES))
    if rng.random() < 0.3:
        preposition = rng.choice(("mit", "nach", "seit", "von", "bei", "aus"))
        middle.append(f"{preposition} {_german_noun_phrase(rng, 'dat')}")
    if closing:
        middle.append(closing)
    if rng.random() < 0.3:
        first, rest = rng.choice(GERMAN_TIMES + GERMAN_PLACES), f"{finite} {subject}"
    else:
        first, rest = subject, finite
    sentence = f"{first} {rest} {' '.join(middle)}"
    if rng.random() < 0.45:
        finite, closing = rng.choice(GERMAN_VERBS)
        nouns = f"{_german_noun_phrase(rng, 'nom')} {_german_noun_phrase(rng, 'acc')}"
        sentence += f", {rng.choice(GERMAN_CLAUSES)} {nouns} {closing} {finite}".replace("  ", " ")
    if rng.random() < 0.15:
        sentence = f"„{sentence}“, sagte {rng.choice(GERMAN_NAMES)}"
    sentence = sentence[0].upper() + sentence[1:] + "."
    if rng.random() < 0.5:  # some corpora set punctuation apart
        sentence = "".join(f" {c} " if c in ",.„“" else c for c in sentence)
        sentence = " ".join(sentence.split())
    return sentence


def german_headline(rng: random.Random) -> str:
    """A short German headline without an article in front."""
    gender, noun = rng.choice(GERMAN_NOUNS)
    ending = {"m": "er", "f": "e", "n": "es"}[gender]
    adjective = f"{rng.choice(GERMAN_ADJECTIVES).capitalize()}{ending}"
    head = f"{adjective} {noun} {_german_noun_phrase(rng, 'gen')}"
    draw = rng.random()
    if draw < 0.3:
        return f"{rng.choice(GERMAN_NAMES).split()[-1]} : {head}"
    return head if draw < 0.6 else f"{head} {rng.choice(GERMAN_PLACES)}"


_OTHER_TRANSLATIONS = (
    "Translate English to German: ", "Translate French to English: ",
    "Translate Spanish to English: ", "Translate English to French: ",
    "Translate the following sentence into Spanish: ", "Translate to English: ",
    "Translate Italian to English: ", "Translate the following German text into English: ",
    "How do you say in German: ",
)  # fmt: skip


def translation(rng: random.Random) -> Stub:
    """Mostly German to English; whole sentences from the grammar, or their beginnings."""
    draw = rng.random()
    if draw < 0.12:
        return Stub(rng.choice(_OTHER_TRANSLATIONS))
    lead = "Translate German to English: "
    sentence = german_headline(rng) if rng.random() < 0.15 else german_sentence(rng)
    if draw < 0.7:
        return Stub(lead + sentence, is_whole=True)
    words = sentence.split()
    return Stub(lead + " ".join(words[: rng.randint(1, max(1, len(words) // 2))]))


_NEWS_OPENINGS = (
    "{person} has {action}", "{person}, {age}, {action}", "{org} has {action}", "{club} {action}",
    "({city}) — {person}", "{club} manager {person}", "{club} are", "{club} striker {person}",
    "A {age}-year-old {job} from {city}", "A {adj} {thing}", "Police in {city}", "The {job} who",
    "The government of {country}", "It was a", "Residents of {city}", "Scientists", "({source})A",
    "({source}){person}", "{city}, {country} ({source})", "By {person}\n",
    "The family of {person}", "A court in {city}", "{country}'s", "{org} chief {person}",
    "After {n} years", "More than {n},000", "Hundreds of", "A new study", "New figures",
    "With the", "When {person}", "As the", "In a {adj}", "The {adj}", "{person} and {person2}",
    "Former {job} {person}", "The mother of", "Actress {person}", "Singer {person}",
    "The world's", "Thousands of {things}", "Two {job}s", "Campaigners", "{org} is to",
    "The owner of", "Pictured:", "An investigation", "Prime Minister", "President",
    "Shares in {org}",
)  # fmt: skip


def _news_opening(rng: random.Random) -> str:
    return rng.choice(_NEWS_OPENINGS).format(
        person=_person(rng),
        person2=_person(rng),
        age=rng.randint(17, 88),
        org=rng.choice(ORGANISATIONS),
        club=rng.choice(CLUBS),
        city=rng.choice(CITIES),
        country=rng.choice(COUNTRIES),
        job=rng.choice(JOBS),
        adj=rng.choice(ADJECTIVES),
        thing=rng.choice(TOPICS),
        things=rng.choice(THINGS),
        action=rng.choice(NEWS_ACTIONS),
        n=rng.randint(2, 60),
        source=rng.choice(("CNN", "Reuters", "AP")),
    )


def article(rng: random.Random) -> Stub:
    """The user turn "Summarize: ..." around a news article that the model goes on writing."""
    return Stub("Summarize: " + _news_opening(rng))


_SUMMARY_LEADS = (
    "Summarize the following article:\n\n", "Give a summary of this text: ",
    "Write a one-sentence summary: ", "TL;DR of this:\n",
    "What are the key points of this article?\n\n",
    "Summarise this news story in two sentences.\n\n",
)  # fmt: skip


def vary_summary(text: str, rng: random.Random) -> str:
    """The same article, sometimes under another instruction."""
    if rng.random() < 0.8:
        return text
    return rng.choice(_SUMMARY_LEADS) + text.removeprefix("Summarize: ")


_PASSAGE_OPENINGS = (
    "{t} {t} is a", "{t} {t} was", "{t} The {t}", "{person} {person} (born",
    "{person} {person} was an", "{t} is", "the {t}", "{place} {place} is a city in",
    "{place} {place} is", "of the {t}", "and the {t} were", "{org} {org} is",
    "in {year}, when {person}", "{t} ({year} film) \"{t}\" is a {year}",
    "\"{t}\" is a song by {person}", "{t} (season {n}) The", "{club} {club} is a", "List of {t}",
    "{person} won the", "{year} {t} The {year}", "The history of {t}", "{t} in {place}",
    "as well as {t}", "{person} also", "is the", "the first {t}", "by {person}. The",
    "{place}. It is",
)  # fmt: skip


def passages(rng: random.Random, count: int) -> list[Stub]:
    """Beginnings of encyclopedia passages on one subject, at times in the middle of a sentence."""
    topic = rng.choice(rng.choice((TOPICS, THINGS, TOPICS)))
    words = {
        "t": topic.title() if rng.random() < 0.6 else topic,
        "person": _person(rng),
        "place": rng.choice(CITIES + COUNTRIES),
        "org": rng.choice(ORGANISATIONS),
        "club": rng.choice(CLUBS),
        "year": rng.randint(1890, 2021),
        "n": rng.randint(1, 12),
    }
    kinds = rng.sample(_PASSAGE_OPENINGS, k=min(count, 3))
    return [Stub(rng.choice(kinds).format(**words)) for _ in range(count)]


def question_after(text: str, rng: random.Random) -> Stub:
    """A user turn that ends in a passage and the first word of a question about it."""
    opening = rng.choice(_QUESTION_OPENINGS)
    return Stub(f"{text}\n{opening[0].upper()}{opening[1:]}")


def cut_question(text: str) -> str:
    """The text up to its first question mark, if it has one."""
    head, mark, _ = text.partition("?")
    return head + mark


def cut_words(text: str, limit: int) -> str:
    """At most `limit` words, as a retriever cuts passages."""
    return " ".join(text.split()[:limit])


def cut_sentence(text: str) -> str:
    """The text up to its last full stop, if that leaves most of it."""
    end = max(text.rfind(mark) for mark in (". ", ".\n", '." '))
    return text[: end + 1] if end > len(text) // 2 else text
