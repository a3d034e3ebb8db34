"""Functions on TensorDicts: trees of keys, storage, devices, rollouts, and the step of a decision process."""
