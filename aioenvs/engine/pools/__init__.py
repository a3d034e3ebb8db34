"""Pools of hosts: who runs the envs, in processes, threads, this thread or a Ray cluster."""
