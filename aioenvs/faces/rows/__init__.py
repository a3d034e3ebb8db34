"""Rows of arrays as tensors: inputs on their way to the envs, results on their way to the caller."""
