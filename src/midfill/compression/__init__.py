"""What a method of KV compression may look at and decide; the methods are in ``methods``."""
