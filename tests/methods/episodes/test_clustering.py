"""Episodes of made-up conversations, and the clusters that they are."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.methods.episodes.clustering import find_episodes, kmeans, unit


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
    """Return tokens, bounds of windows (in turn of the topics), and a table.

    Words of a topic are alike. Half of a window's tokens are common, with large embeddings.
    """
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(20 * topics + 20, 32)).astype(np.float32)
    table[: 20 * topics] += np.repeat(rng.normal(size=(topics, 32)), 20, axis=0)
    table[-20:] += 3
    words = [
        [*rng.integers(20 * (n % topics), 20 * (n % topics) + 20, 12), *rng.integers(-20, 0, 12)]
        for n in range(windows)
    ]
    tokens = np.concatenate(words).astype(np.int32) % len(table)
    return tokens.astype(np.int32), np.arange(0, len(tokens) + 1, 24, dtype=np.int32), table


def test_questions_go_to_their_topics() -> None:
    right, asked = 0, 0
    for seed in range(10):
        tokens, bounds, table = conversation(4, 24, seed)
        episodes = find_episodes(tokens, bounds, table, 4, 3, seed=0)
        np.testing.assert_allclose(np.linalg.norm(episodes.centroids, axis=1), 1)
        rng = np.random.default_rng(seed)
        for topic in range(4):
            labels = episodes.labels[topic::4]
            own = np.bincount(labels).argmax()
            for _ in range(5):
                words = [*rng.integers(20 * topic, 20 * topic + 20, 4), *rng.integers(-20, 0, 6)]
                right += episodes.nearest(table[words].astype(np.float64).mean(axis=0)) == own
                asked += 1
    assert right / asked > 0.9


def test_an_episode_is_represented_by_the_windows_nearest_to_its_centroid() -> None:
    tokens, bounds, table = conversation(3, 15, 1)
    episodes = find_episodes(tokens, bounds, table, 3, 2, seed=0)
    means = [
        table[tokens[start:end]].astype(np.float64).mean(axis=0) for start, end in pairwise(bounds)
    ]
    common = np.mean(means, axis=0)
    for number, centroid in enumerate(episodes.centroids):
        points = {
            window: unit(means[window] - common)
            for window in range(15)
            if episodes.labels[window] == number
        }
        mean = sum(points.values()) / len(points)
        np.testing.assert_allclose(centroid, mean / np.linalg.norm(mean))
        nearest = sorted(points, key=lambda window: -(points[window] @ centroid))
        assert episodes.representatives[number].tolist() == nearest[:2]


@pytest.mark.parametrize(("windows", "episodes"), [(1, 1), (2, 2), (3, 3), (9, 4)])
def test_there_are_no_more_episodes_than_windows(windows: int, episodes: int) -> None:
    tokens, bounds, table = conversation(3, windows, 0)
    found = find_episodes(tokens, bounds, table, 4, 4, seed=0)
    assert len(found.centroids) == len(found.representatives) == episodes
    assert all(len(each) for each in found.representatives)


def test_windows_that_say_the_same_are_one_episode() -> None:
    tokens = np.tile(np.arange(6, dtype=np.int32), 5)
    table = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    found = find_episodes(tokens, np.arange(0, 31, 6, dtype=np.int32), table, 4, 4, seed=0)
    assert len(found.centroids) == 1
    assert found.nearest(table[0].astype(np.float64)) == 0
