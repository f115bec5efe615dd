"""Nodes of a graph."""
