"""A worker's side: the loops that serve commands, and the envs that they are for."""
