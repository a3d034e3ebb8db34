"""Faces for other libraries, each imported by its module and needing its extra. None imports torch by itself."""
