"""Replicas of the engine on a Ray cluster, behind one server."""
