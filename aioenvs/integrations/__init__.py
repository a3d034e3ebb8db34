"""The same envs as other libraries know them; each module needs the library it is named after, an extra."""
