"""Envs of sessions, in their workers and as asked from outside. Free of torch, but for those that deal in tensors."""
