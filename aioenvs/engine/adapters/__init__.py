"""Adapters: how a worker drives one env of each kind, on numpy arrays."""
