"""Hosts of a Ray cluster."""
