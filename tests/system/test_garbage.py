"""Garbage collection: what was there before is looked at no more, and later garbage goes soon."""

import subprocess
import sys

PROGRAM = """
import gc, weakref
from midfill.system.garbage import freeze_objects

class Node:
    pass

def cycles(count):
    last = None
    for _ in range(count):
        last = Node()
        last.itself = last
    return weakref.ref(last)

stays = [Node() for _ in range(400_000)]
freeze_objects()
assert len(gc.get_objects()) < 1000, len(gc.get_objects())
old = gc.get_stats()[2]["collections"]
gone = cycles(100_000)
assert gc.get_stats()[2]["collections"] > old, "the old generation was never collected"
"""


def test_objects_of_the_start_are_not_looked_at_again() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
