"""Exact output laws of verification, by enumeration: no draws, so no noise floor.

A law over V tokens is a vector p. For candidates chosen in any way that does not see the target's
noise, the tokens that ``walk`` emits, continued by plain decoding, must have the very law of plain
decoding. Rules that are known to be wrong go through the same enumeration and must be caught.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codesign.policy.tree import DraftTree
from codesign.policy.walk import Walk, walk

VOCABULARY = 4
ROOT = 99
EXACT = 1e-12

Law = dict[tuple[int, ...], float]
Tree = tuple[tuple[int, ...], tuple[int, ...]]  # tokens, parents
Next = Callable[[tuple[int, ...]], np.ndarray]  # law of the next token after a path


def random_law(rng: np.random.Generator) -> np.ndarray:
    return rng.dirichlet(np.full(VOCABULARY, 0.7))


def random_laws(seed: int) -> Next:
    """A law for every path, drawn once."""
    laws: dict[tuple[int, ...], np.ndarray] = {}

    def law(path: tuple[int, ...]) -> np.ndarray:
        if path not in laws:
            laws[path] = random_law(np.random.default_rng([seed, *(t + 1 for t in path)]))
        return laws[path]

    return law


class NeedsTokenError(Exception):
    """The walk asks for a sample that the script does not hold."""

    def __init__(self, row: int) -> None:
        super().__init__(row)
        self.row = row


def walks(tree: Tree, law: Next, limit: int) -> Iterator[tuple[Walk, float]]:
    """Every outcome of the real ``walk`` with its chance, by replaying scripted samples."""
    tokens, parents = tree

    def path(row: int) -> tuple[int, ...]:
        return () if row == 0 else (*path(parents[row]), tokens[row])

    def outcomes(script: tuple[int, ...], chance: float) -> Iterator[tuple[Walk, float]]:
        left = iter(script)

        def sample(row: int) -> int:
            token = next(left, None)
            if token is None:
                raise NeedsTokenError(row)
            return token

        try:
            yield walk(tokens, parents, sample, limit=limit), chance
        except NeedsTokenError as needs:
            for token, p in enumerate(law(path(needs.row))):
                yield from outcomes((*script, token), chance * float(p))

    return outcomes((), 1.0)


def continued(emitted: tuple[int, ...], chance: float, law: Next, length: int) -> Law:
    """Law of ``length`` tokens when plain decoding goes on after ``emitted``."""
    if len(emitted) >= length:
        return {emitted[:length]: chance}
    total: Law = {}
    for token, p in enumerate(law(emitted)):
        add(total, continued((*emitted, token), chance * float(p), law, length))
    return total


def add(total: Law, part: Law) -> None:
    for tokens, chance in part.items():
        total[tokens] = total.get(tokens, 0.0) + chance


def walked_law(trees: Iterator[tuple[Tree, float]], law: Next, length: int) -> Law:
    total: Law = {}
    for tree, weight in trees:
        for walked, chance in walks(tree, law, limit=length):
            add(total, continued(walked.tokens, weight * chance, law, length))
    return total


def distance(found: Law, true: Law) -> float:
    """Total variation."""
    keys = found.keys() | true.keys()
    return 0.5 * sum(abs(found.get(key, 0.0) - true.get(key, 0.0)) for key in keys)


def plain(law: Next, length: int) -> Law:
    return continued((), 1.0, law, length)


# Ways to choose candidates.


def tree_of(paths: Sequence[tuple[int, ...]]) -> Tree:
    """The rows of the given paths and all their beginnings."""
    nodes = sorted({path[:n] for path in paths for n in range(len(path) + 1)} | {()}, key=len)
    index = {path: row for row, path in enumerate(nodes)}
    tokens = (ROOT, *(path[-1] for path in nodes[1:]))
    return tokens, (-1, *(index[path[:-1]] for path in nodes[1:]))


def top_k(draft: Next, k: int, depth: int) -> Iterator[tuple[Tree, float]]:
    """The k likeliest children at every level."""
    paths: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        paths = [(*p, int(t)) for p in paths for t in np.argsort(-draft(p))[:k]]
    yield tree_of(paths), 1.0


def best_first(draft: Next, rows: int) -> Iterator[tuple[Tree, float]]:
    """The tree that the policy itself selects."""
    tree = DraftTree(ROOT, base_len=1, max_depth=3)
    while len(tree) < 3 * rows and (leaves := tree.leaves(2)):
        tree.expand(leaves)
        for leaf in leaves:
            law = draft(tuple(tree.tokens[n] for n in tree.path(leaf)[1:]))
            order = np.argsort(-law)
            tree.add_children(leaf, order.tolist(), np.log(law[order]).tolist())
    selection = tree.select(tree.best(rows))
    yield (selection.tokens, selection.parents), 1.0


def drawn(draft: Next, draws: int) -> Iterator[tuple[Tree, float]]:
    """Children drawn with replacement, duplicates merged: fine for the walk."""
    for tokens in itertools.product(range(VOCABULARY), repeat=draws):
        weight = float(np.prod([draft(())[t] for t in tokens]))
        yield tree_of([(t,) for t in dict.fromkeys(tokens)]), weight


def drawn_chain(draft: Next, depth: int) -> Iterator[tuple[Tree, float]]:
    for path in itertools.product(range(VOCABULARY), repeat=depth):
        weight = np.prod([draft(path[:n])[t] for n, t in enumerate(path)])
        yield tree_of([path]), float(weight)


def drawn_and_trimmed(draft: Next, depth: int, least: float) -> Iterator[tuple[Tree, float]]:
    """A drawn chain, cut before the first token whose own chance is small."""
    for (tokens, parents), weight in drawn_chain(draft, depth):
        path = tokens[1:]
        length = next((n for n, t in enumerate(path) if draft(path[:n])[t] < least), depth)
        yield (tokens[: length + 1], parents[: length + 1]), weight


CHOICES = {
    "root only": lambda draft: iter([(((ROOT,), (-1,)), 1.0)]),
    "top 1": lambda draft: top_k(draft, 1, 2),
    "top 2, two levels": lambda draft: top_k(draft, 2, 2),
    "every token": lambda draft: top_k(draft, VOCABULARY, 2),
    "best first": lambda draft: best_first(draft, 6),
    "drawn, duplicates merged": lambda draft: drawn(draft, 3),
    "drawn chain": lambda draft: drawn_chain(draft, 2),
    "drawn chain, trimmed by its own confidence": lambda draft: drawn_and_trimmed(draft, 2, 0.3),
}


@pytest.mark.parametrize("choice", CHOICES)
@given(seed=st.integers(0, 2**32))
def test_walk_emits_the_target_s_law_whatever_the_candidates(choice, seed):
    target, draft = random_laws(seed), random_laws(seed + 1)
    found = walked_law(CHOICES[choice](draft), target, length=2)
    assert sum(found.values()) == pytest.approx(1.0)
    assert distance(found, plain(target, 2)) < EXACT


@given(seed=st.integers(0, 2**32))
def test_walk_accepts_as_often_as_a_child_carries_the_sample(seed):
    target, draft = random_laws(seed), random_laws(seed + 1)
    ((tree, _),) = top_k(draft, 2, 1)
    accepted = sum(chance for w, chance in walks(tree, target, limit=9) if len(w.tokens) > 1)
    assert accepted == pytest.approx(target(())[list(tree[0][1:])].sum())


# Known wrong rules. Each is caught by the same comparison; a right one of their kind is not.


def normalised(x: np.ndarray) -> np.ndarray:
    return x / x.sum() if x.sum() > 0 else x


def rejection(target: np.ndarray, tokens: Sequence[int], drafts: Sequence[np.ndarray]) -> Law:
    """Try candidates one after another: accept with p/q, else go on with max(p - q, 0)."""
    law: Law = {}
    left, residual = 1.0, target
    for token, draft in zip(tokens, drafts, strict=True):
        accept = min(1.0, residual[token] / draft[token])
        add(law, {(token,): left * accept})
        left *= 1.0 - accept
        if left <= 0.0:
            return law
        residual = normalised(np.maximum(residual - draft, 0.0))
    add(law, {(token,): left * float(p) for token, p in enumerate(residual)})
    return law


def mixed(parts: Iterator[tuple[float, Law]]) -> Law:
    total: Law = {}
    for weight, law in parts:
        add(total, {tokens: weight * chance for tokens, chance in law.items()})
    return total


def chain_rejection(target: np.ndarray, draft: np.ndarray) -> Law:
    return mixed((float(q), rejection(target, [t], [draft])) for t, q in enumerate(draft))


def drawn_rejection(target: np.ndarray, draft: np.ndarray, *, merged: bool) -> Law:
    def parts() -> Iterator[tuple[float, Law]]:
        for tokens in itertools.product(range(VOCABULARY), repeat=3):
            tried = list(dict.fromkeys(tokens)) if merged else list(tokens)
            weight = float(np.prod(draft[list(tokens)]))
            yield weight, rejection(target, tried, [draft] * len(tried))

    return mixed(parts())


def top_k_rejection(target: np.ndarray, draft: np.ndarray) -> Law:
    tokens = np.argsort(-draft)[:2].tolist()
    return rejection(target, tokens, [draft] * 2)


def trimmed_rejection(target: np.ndarray, draft: np.ndarray, *, own: bool) -> Law:
    """Propose only when sure; unsure rounds sample the target plainly."""

    def is_kept(token: int) -> bool:
        return (draft[token] if own else draft.max()) >= 0.3

    bonus = {(t,): float(p) for t, p in enumerate(target)}
    return mixed(
        (float(q), rejection(target, [t], [draft]) if is_kept(t) else bonus)
        for t, q in enumerate(draft)
    )


def argmax_acceptance(target: np.ndarray, draft: np.ndarray) -> Law:
    """Accept the draft's best token if it is the target's best, else sample."""
    if draft.argmax() == target.argmax():
        return {(int(target.argmax()),): 1.0}
    return {(t,): float(p) for t, p in enumerate(target)}


def resampled_bonus(target: np.ndarray, draft: np.ndarray) -> Law:
    """A walk that, off the tree, samples again among all tokens instead of keeping its sample."""
    children = np.argsort(-draft)[:2].tolist()
    outside = 1.0 - float(target[children].sum())
    return {
        (t,): float(p) * (outside + (1.0 if t in children else 0.0)) for t, p in enumerate(target)
    }


RIGHT = {
    "chain rejection": chain_rejection,
    "drawn, duplicates tried twice": lambda p, q: drawn_rejection(p, q, merged=False),
    "trimmed by the row's confidence": lambda p, q: trimmed_rejection(p, q, own=False),
}
WRONG = {
    "top-k with the p/q test": top_k_rejection,
    "drawn, duplicates merged": lambda p, q: drawn_rejection(p, q, merged=True),
    "trimmed by the token's own confidence": lambda p, q: trimmed_rejection(p, q, own=True),
    "accept what both argmax": argmax_acceptance,
    "bonus sampled again": resampled_bonus,
}


def distances(rule: Callable[[np.ndarray, np.ndarray], Law]) -> np.ndarray:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(60):
        target, draft = random_law(rng), random_law(rng)
        law = rule(target, draft)
        assert sum(law.values()) == pytest.approx(1.0)
        found.append(distance(law, {(t,): float(p) for t, p in enumerate(target)}))
    return np.array(found)


@pytest.mark.parametrize("rule", RIGHT)
def test_right_rejection_rules_pass_the_same_comparison(rule):
    assert distances(RIGHT[rule]).max() < EXACT


@pytest.mark.parametrize("rule", WRONG)
def test_wrong_rules_are_caught(rule):
    found = distances(WRONG[rule])
    assert found.mean() > 0.01
    assert found.max() > 0.05


def walk_with_a_second_try(tokens, parents, sample, *, stop_tokens=(), limit) -> Walk:
    """Wrong on purpose: samples again when the first sample is no child of the root."""
    token = sample(0)
    if token not in tokens[1:]:
        token = sample(0)
    return Walk((token,), (0,), is_stopped=False)


def test_a_wrong_walk_is_caught_by_the_enumeration(monkeypatch):
    monkeypatch.setitem(globals(), "walk", walk_with_a_second_try)
    target, draft = random_laws(1), random_laws(2)
    found = walked_law(top_k(draft, 1, 1), target, length=1)
    assert sum(found.values()) == pytest.approx(1.0)
    assert distance(found, plain(target, 1)) > 0.05
