"""The base of the faces that deal in batches of numpy arrays. Free of torch."""
