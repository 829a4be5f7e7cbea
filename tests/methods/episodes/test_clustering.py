"""Episodes of made-up conversations, and the clusters that they are."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.methods.episodes.clustering import (
    Episodes,
    TokenVectors,
    find_sentence_episodes,
    find_token_episodes,
    kmeans,
    unit,
)


@given(
    count=st.integers(1, 6),
    points=st.lists(st.tuples(*[st.integers(-2, 2)] * 2), min_size=1, max_size=25),
    seed=st.integers(0, 3),
)
def test_no_cluster_is_empty_and_every_point_is_in_the_nearest(
    count: int, points: list[tuple[int, int]], seed: int
) -> None:
    places = np.array(points, np.float64)
    labels, inertia = kmeans(places, count, seed)
    clusters = min(count, len(set(points)))
    assert set(labels.tolist()) == set(range(clusters))
    means = [places[labels == number].mean(axis=0) for number in range(clusters)]
    own = [
        np.square(place - means[label]).sum() for place, label in zip(places, labels, strict=True)
    ]
    assert inertia == pytest.approx(sum(own), abs=1e-9)
    for place, distance in zip(places, own, strict=True):
        assert distance <= min(np.square(place - mean).sum() for mean in means) + 1e-9
    again, _ = kmeans(places, count, seed)
    assert labels.tolist() == again.tolist()
    assert labels[0] == 0  # numbered in order of their first points


def test_the_best_of_the_restarts_finds_what_one_start_misses() -> None:
    rng = np.random.default_rng(0)
    centres = np.array([[0, 0], [0, 9], [9, 0], [9, 9], [30, 30]])
    points = np.repeat(centres, 12, axis=0) + rng.normal(size=(60, 2))
    for seed in range(20):
        labels, _ = kmeans(points, 5, seed)
        assert labels.tolist() == np.repeat(np.arange(5), 12).tolist()


def test_points_that_differ_by_less_than_is_computed_are_divided_all_the_same() -> None:
    points = np.array([[1.0, 0.0], [1.0, 1e-170], [1.0, 2e-170]])
    labels, inertia = kmeans(points, 3, 0)
    assert sorted(labels.tolist()) == [0, 1, 2]
    assert inertia == pytest.approx(0)


def conversation(topics: int, windows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, bounds of windows (in turn of the topics), and vectors.

    Words of a topic are alike. Half of a window's tokens are common ones, all of which are alike.
    """
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(20 * topics + 20, 32)).astype(np.float32)
    table[: 20 * topics] += np.repeat(rng.normal(size=(topics, 32)), 20, axis=0)
    table[-20:] += 3
    words = [
        [*range(20 * topic, 20 * topic + 20), *range(20 * topics, 20 * topics + 20)]
        for topic in range(topics)
    ]
    found = [
        rng.permutation([*rng.choice(words[n % topics][:20], 12), *rng.choice(words[0][20:], 12)])
        for n in range(windows)
    ]
    tokens = np.concatenate(found).astype(np.int32)
    return tokens, np.arange(0, len(tokens) + 1, 24, dtype=np.int32), unit(table)


def episodes_of(
    tokens: np.ndarray, bounds: np.ndarray, table: np.ndarray, count: int, near: int
) -> Episodes:
    return find_token_episodes(tokens, bounds, table[np.unique(tokens)], count, near, seed=0)


def test_questions_go_to_their_topics() -> None:
    right, asked = 0, 0
    for seed in range(10):
        tokens, bounds, table = conversation(4, 24, seed)
        episodes = episodes_of(tokens, bounds, table, 4, 3)
        np.testing.assert_allclose(np.linalg.norm(episodes.centroids, axis=1), 1)
        rng = np.random.default_rng(seed)
        for topic in range(4):
            own = np.bincount(episodes.labels[topic::4]).argmax()
            for _ in range(5):
                words = [*rng.integers(20 * topic, 20 * topic + 20, 4), *rng.integers(80, 110, 9)]
                right += episodes.nearest(np.array(words, np.int32)) == own
                asked += 1
    assert right / asked > 0.9


def by_hand(tokens: np.ndarray, table: np.ndarray, history: np.ndarray) -> np.ndarray:
    """Return the weighted mean of tokens' vectors; those that the history lacks don't count."""
    total, mean = 0.0, np.zeros(table.shape[1])
    for token in tokens:
        share = np.count_nonzero(history == token) / len(history)
        weight = 1e-3 / (1e-3 + share) if share else 0.0
        total, mean = total + weight, mean + weight * table[token].astype(np.float64)
    return mean / total


def test_embeddings_and_nearness_are_those_of_a_loop() -> None:
    tokens, bounds, table = conversation(3, 15, 1)
    episodes = episodes_of(tokens, bounds, table, 3, 2)
    means = [by_hand(tokens[start:end], table, tokens) for start, end in pairwise(bounds)]
    common = np.mean(means, axis=0)
    points = [unit(mean - common) for mean in means]
    for number, centroid in enumerate(episodes.centroids):
        own = [window for window in range(15) if episodes.labels[window] == number]
        mean = sum(points[window] for window in own) / len(own)
        np.testing.assert_allclose(centroid, unit(mean), atol=1e-6)
        nearest = sorted(own, key=lambda window: -(points[window] @ centroid))
        assert episodes.representatives[number].tolist() == nearest[:2]
    rng = np.random.default_rng(0)
    for _ in range(20):
        asked = rng.integers(0, 80, 6).astype(np.int32)  # some of which the history may lack
        place = unit(by_hand(asked, table, tokens) - common)
        distances = episodes.centroids @ place
        assert distances[episodes.nearest(asked)] == pytest.approx(distances.max())


def test_a_question_of_unknown_words_goes_to_the_first_episode() -> None:
    tokens, bounds, table = conversation(3, 15, 1)
    episodes = episodes_of(tokens, bounds, table, 3, 2)
    assert episodes.nearest(np.array([500, 501], np.int32)) == 0


def test_common_directions_are_taken_from_embeddings() -> None:
    rng = np.random.default_rng(0)
    sample = rng.normal(size=(500, 200)).astype(np.float32)
    directions, _ = np.linalg.qr(rng.normal(size=(200, 2)))
    sample += 5 + (rng.normal(size=(500, 2)) * 30 @ directions.T).astype(np.float32)
    found = TokenVectors(sample).of(sample)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    assert np.abs(found @ directions).max() < 0.1  # 200 / 100 of them
    assert np.abs(unit(sample - sample.mean(axis=0)) @ directions).max() > 0.9


@pytest.mark.parametrize(("windows", "episodes"), [(1, 1), (2, 2), (3, 3), (9, 4)])
def test_there_are_no_more_episodes_than_windows(windows: int, episodes: int) -> None:
    tokens, bounds, table = conversation(3, windows, 0)
    found = episodes_of(tokens, bounds, table, 4, 4)
    assert len(found.centroids) == len(found.representatives) == episodes
    assert all(len(each) for each in found.representatives)


def test_windows_that_say_the_same_are_one_episode() -> None:
    tokens = np.tile(np.arange(6, dtype=np.int32), 5)
    table = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    found = episodes_of(tokens, np.arange(0, 31, 6, dtype=np.int32), table, 4, 4)
    assert len(found.centroids) == 1
    assert found.nearest(tokens) == 0


def test_an_encoders_vectors_are_clustered_as_they_are() -> None:
    rng = np.random.default_rng(0)
    centres = unit(rng.normal(size=(3, 16)))
    topics = rng.permutation(np.repeat(np.arange(3), 6))
    points = unit(centres[topics] + 0.1 * rng.normal(size=(18, 16)))
    asked: list[list[int]] = []

    def encode(tokens: np.ndarray) -> np.ndarray:
        asked.append(tokens.tolist())
        return centres[tokens[0]]

    episodes = find_sentence_episodes(points, encode, 3, 2, seed=0)
    np.testing.assert_allclose(np.linalg.norm(episodes.centroids, axis=1), 1)
    for topic in range(3):
        own = np.flatnonzero(topics == topic)
        label = episodes.nearest(np.array([topic, 7], np.int32))
        assert (episodes.labels[own] == label).all()
        similarities = points[own] @ unit(points[own].mean(axis=0))
        nearest = own[np.argsort(-similarities)][:2]
        assert episodes.representatives[label].tolist() == nearest.tolist()
    assert asked == [[0, 7], [1, 7], [2, 7]]  # whole questions, and nothing else
    assert episodes.nbytes == 3 * 16 * 8 + 18 * 8 + 6 * 8
