"""Garbage collection in processes that live long."""

import gc


def freeze_objects() -> None:
    """Have collections look no more at what is there now; call it once all is loaded.

    A collection stops everything for as long as it takes to look at all objects, tens of
    milliseconds for a few hundred thousand. And the old generation is collected only once it has
    grown by a quarter, so with those objects in it, garbage would stay for long.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # counts the old generation, from which it must grow
