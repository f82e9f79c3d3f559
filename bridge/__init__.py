"""Values and functions across torch and JAX."""
