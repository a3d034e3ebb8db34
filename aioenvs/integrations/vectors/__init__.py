"""What the faces that deal in batches of numpy arrays have in common. Free of torch."""
