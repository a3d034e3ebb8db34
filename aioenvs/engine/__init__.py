"""The engine: worker processes, pipes and the shared block. Knows numpy, never torch."""
