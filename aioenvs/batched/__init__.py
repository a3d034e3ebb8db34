"""The faces over many envs: coroutines first, and their synchronous twins."""
