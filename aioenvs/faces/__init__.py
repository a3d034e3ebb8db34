"""The faces over many envs: coroutines, and their synchronous twins."""
