"""The commands of `aioenvs`: run and bench."""
